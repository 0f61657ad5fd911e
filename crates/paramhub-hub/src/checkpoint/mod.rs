//! Checkpoints: what a job's cores have copied goes to the disk, and comes back from there.
//!
//! A [`keeper`] a job says when, collects the copies and writes them; [`manifest`] and [`tensors`] are what it writes, a
//! [`folder`] is where; [`load`] gives a new job what an old one has left.

mod folder;
mod keeper;
mod load;
mod manifest;
mod tensors;
mod write;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

pub use folder::{Flaw, Found};
pub use manifest::{FileEntry, Holds, Manifest, TensorEntry};

pub(crate) use folder::JobFolder;
pub(crate) use keeper::{Board, Keeper, LAST, Taken, Terms, Word};
pub(crate) use load::load;

/// Where a hub's checkpoints go, and how many stay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointConfig {
    /// A folder, of which each job has one of its own. Several hubs of a job must share it.
    pub folder: PathBuf,
    /// Complete checkpoints of a job that stay; at least 1.
    pub keep: usize,
}

/// All checkpoints in a hub's folder, by job, the newest first, those that do not count among them.
///
/// # Errors
/// If the folder cannot be read.
pub fn list_checkpoints(folder: &Path) -> io::Result<BTreeMap<String, Vec<Found>>> {
    let jobs = folder::jobs(folder)?;
    jobs.into_iter().map(|(job, folder)| Ok((job, folder.list()?))).collect()
}

impl Found {
    /// Reads all files of a checkpoint and compares what they hold with what was written.
    ///
    /// # Errors
    /// The first flaw.
    pub fn verify(&self) -> Result<(), String> {
        load::read(self, |_, _, _, _, _| {})
    }
}
