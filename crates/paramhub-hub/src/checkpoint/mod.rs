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
use std::fs;
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

impl CheckpointConfig {
    /// Makes the folder if there is none, and writes and removes a small file in it, to the disk, so that a hub finds out when it
    /// starts what would else be found out by the first checkpoint.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn try_out(&self) -> io::Result<()> {
        let folder = if self.folder == Path::new("") { Path::new(".") } else { &self.folder };
        fs::create_dir_all(folder)?;
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        // A name of its own, since several hubs may start on one folder at once.
        let probe = folder.join(format!(".writable-{:016x}", u64::from_le_bytes(random)));
        let written = folder::write_whole(&probe, "a hub tries whether it can write here\n");
        // Also where it could be made and not be written.
        let removed = fs::remove_file(&probe).or_else(|error| match error.kind() {
            io::ErrorKind::NotFound => fs::remove_file(folder::temporary_of(&probe)),
            _ => Err(error),
        });
        written.and(removed)?;
        folder::sync_folder(folder)
    }
}

/// All checkpoints in a hub's folder, by job, the newest first, those that do not count among them. Of a job whose folder cannot
/// be read there is that folder, with its flaw.
///
/// # Errors
/// If the folder cannot be read.
pub fn list_checkpoints(folder: &Path) -> io::Result<BTreeMap<String, Vec<Found>>> {
    let jobs = folder::jobs(folder)?;
    let all_of = |folder: &JobFolder| {
        let unreadable = |error| vec![Found::unreadable(folder.path().to_owned(), 0, &error)];
        folder.list().unwrap_or_else(unreadable)
    };
    Ok(jobs.into_iter().map(|(job, folder)| (job, all_of(&folder))).collect())
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
