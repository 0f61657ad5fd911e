//! The hub server: pinned cores that own chunks, sum and optimise them, and answer the workers.
//!
//! The way of a gradient: the `acceptor` admits a worker's stream and passes it to the core of its route. The
//! event loop of the `core` receives frames into a buffer that stays in cache. A `shard` adds each whole
//! contribution to its chunk's sum and, with the last one, runs the optimizer. A `lane` sends the new
//! parameters straight from the model. No other thread than that core ever touches the chunk.
//!
//! Workers of the hub's own host connect to a `local` socket and share their memory. Their gradients stay
//! there until the step's last contribution. Then the shard adds up all of them, runs the optimizer and
//! writes the parameters back, block by block, and only headers pass through the lane.
//!
//! The hub decides at its start on which addresses it listens, and which core and processor serve each of its
//! `interfaces`.
//!
//! In a job with checkpoints, the cores copy each chunk when it reaches the wanted step, and a thread of
//! `checkpoint` writes the copies.
//!
//! Everything else is slow and rare: the `job_controller` opens and ends jobs on all cores, and the
//! `manager_link` exchanges commands and reports with the connection manager.
#![forbid(unsafe_code)]

mod acceptor;
mod checkpoint;
mod config;
mod core;
mod directory;
mod events;
mod expected_probe;
mod hub;
mod interfaces;
mod job_controller;
mod local;
mod manager_link;
mod parent_dialler;
mod probe;

pub use checkpoint::{
    CheckpointConfig, CheckpointFlaw, FileEntry, FoundCheckpoint, Manifest, NextStart, ProgramStateEntry,
    TensorContents, TensorEntry, list_checkpoints, next_start,
};
pub use config::{HubConfig, HubError};
pub use hub::{ListeningHub, RunningHub};
pub use paramhub_core::job_control::JobLimits;
pub use paramhub_kernels::{Aggregator, Optimizer, Registry};
pub use paramhub_transport::interface::{Rate, Selector};

/// Entry points of fuzz targets, and of the example `exercise`.
#[cfg(feature = "fuzzing")]
pub mod fuzzing {
    use crate::core::exercise::{exercise, exercise_seeded};

    /// Drives a core as `data` selects, and returns how many frames it has accepted.
    pub fn hub_core(data: &[u8]) -> u64 {
        let mut bytes = data.iter().copied();
        exercise(|| bytes.next()).accepted
    }

    /// Drives a core as `choices` pseudorandom bytes select, which follow from `seed`. Returns how many frames it has
    /// accepted, and in how many jobs.
    pub fn hub_core_seeded(seed: u64, choices: u64) -> (u64, u64) {
        let exercised = exercise_seeded(seed, choices);
        (exercised.accepted, exercised.jobs)
    }

    /// Plays a stream's handshake as `data` selects.
    pub fn handshake(data: &[u8]) {
        let mut bytes = data.iter().copied();
        crate::acceptor::exercise::exercise(|| bytes.next());
    }
}
