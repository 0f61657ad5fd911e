//! The hub server: pinned cores that own chunks, sum, optimise and answer them.
//!
//! Follow a gradient: the `door` lets a worker's stream in and hands it to the core of its route; the `core`'s event loop
//! receives frames into a buffer that stays in cache; a `shard` adds each whole contribution to its chunk's sum and, with
//! the last one, runs the optimizer; a `lane` sends the new parameters straight from the model. No thread but that core
//! ever touches the chunk.
//!
//! Workers of the hub's own host come in by a `local` socket and bring their memory. Their gradients stay there until
//! the step's last contribution: then the shard adds up all of them, runs the optimizer and writes the parameters back,
//! block by block, and only headers pass through the lane.
//!
//! What the hub listens on, and which core and processor serve each of its `interfaces`, is settled at its start.
//!
//! Where a job has checkpoints, its cores copy chunks as they come by the wanted step, and a thread of `checkpoint` writes them.
//!
//! Everything else is slow and rare: the `steward` opens and ends jobs on all cores, and the `link` speaks with the
//! connection manager.
#![forbid(unsafe_code)]

mod above;
mod checkpoint;
mod config;
mod core;
mod directory;
mod door;
mod hub;
mod interfaces;
mod link;
mod local;
mod probe;
mod steward;

pub use checkpoint::{
    CheckpointConfig, FileEntry, Flaw, Found, Holds, Manifest, TensorEntry, list_checkpoints,
};
pub use config::{HubConfig, HubError, JobLimits};
pub use hub::{ListeningHub, RunningHub};
pub use paramhub_kernels::{Aggregator, Optimizer, Registry};
pub use paramhub_transport::interface::{Rate, Selector};

/// For fuzz targets.
#[cfg(feature = "fuzzing")]
pub mod fuzzing {
    /// Drives a core as the bytes say, and returns how many frames it has accepted.
    pub fn hub_core(data: &[u8]) -> u64 {
        let mut bytes = data.iter().copied();
        crate::core::exercise::exercise(|| bytes.next())
    }
}
