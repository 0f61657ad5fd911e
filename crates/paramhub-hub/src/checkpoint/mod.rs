//! Checkpoints: the copies that a job's cores make go to the disk, and come back from it.
//!
//! A [`writer_thread`] for each job decides when to write, collects the copies and writes them as
//! [`manifest`] and [`tensors`] into a [`folder`]; [`load`] gives a new job the checkpoint of an old one.

mod folder;
mod load;
mod manifest;
mod run_record;
mod statuses;
mod tensors;
mod write;
mod writer_thread;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use paramhub_transport::greeting::draw;

pub use folder::{CheckpointFlaw, FoundCheckpoint};
pub use manifest::{FileEntry, Manifest, ProgramStateEntry, TensorContents, TensorEntry};
pub use run_record::NextStart;

pub(crate) use folder::JobFolder;
pub(crate) use load::{Loaded, Start, load};
pub(crate) use statuses::CheckpointStatuses;
pub(crate) use writer_thread::{CheckpointCommand, CheckpointTask, CheckpointWriter, NotifyOnDrop};

/// The folder of a hub's checkpoints, and the number that are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointConfig {
    /// The folder, which has a subfolder for each job. All hubs of a job must share it.
    pub folder: PathBuf,
    /// Complete checkpoints of a job that are kept; at least 1.
    pub keep: usize,
}

impl CheckpointConfig {
    /// Complete checkpoints that are kept where nobody has chosen.
    pub const KEPT: usize = 3;

    /// Creates the folder if it does not exist, and writes a small file in it, to the disk, and removes it.
    /// So a hub finds out at its start what it would otherwise find out at the first checkpoint.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn try_out(&self) -> io::Result<()> {
        let folder = if self.folder == Path::new("") { Path::new(".") } else { &self.folder };
        fs::create_dir_all(folder)?;
        // The name is random, since several hubs may start on one folder at once.
        let probe = folder.join(format!(".writable-{:016x}", u64::from_le_bytes(draw()?)));
        let written = folder::write_whole(&probe, "a hub tries whether it can write here\n");
        // The file is also removed if it could be created but not written.
        let removed = fs::remove_file(&probe).or_else(|error| match error.kind() {
            io::ErrorKind::NotFound => fs::remove_file(folder::temporary_of(&probe)),
            _ => Err(error),
        });
        written.and(removed)?;
        folder::sync_folder(folder)
    }
}

/// All checkpoints in a hub's folder, by job, the newest first, including those that do not count. For a job
/// whose folder cannot be read, the list has that folder with its flaw.
///
/// # Errors
/// If the folder cannot be read.
pub fn list_checkpoints(folder: &Path) -> io::Result<BTreeMap<String, Vec<FoundCheckpoint>>> {
    let jobs = folder::jobs(folder)?;
    let all_of = |folder: &JobFolder| {
        let unreadable = |error| vec![FoundCheckpoint::unreadable(folder.path().to_owned(), 0, &error)];
        folder.list().unwrap_or_else(unreadable)
    };
    Ok(jobs.into_iter().map(|(job, folder)| (job, all_of(&folder))).collect())
}

/// With what a run of this job begins that goes on by itself (`resume = auto`), at hubs with this folder.
///
/// # Errors
/// Why that cannot be known.
pub fn next_start(folder: &Path, job: &str) -> Result<NextStart, String> {
    JobFolder::new(folder, job).next_start()
}

impl FoundCheckpoint {
    /// Reads all files of a checkpoint and compares their contents with their digests.
    ///
    /// # Errors
    /// The first flaw found.
    pub fn verify(&self) -> Result<(), String> {
        load::read_program_states(self)?;
        load::read(self, |_, _, _, _, _| {})
    }
}
