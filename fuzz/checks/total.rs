//! Counts the frames of a target that were accepted, in this run and in all before it.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};

/// Frames of this run that are not in the file yet.
static FRAMES: AtomicU64 = AtomicU64::new(0);
/// The number of frames that are written to the file at once.
const BATCH: u64 = 10_000;

/// Adds frames to `fuzz/corpus/TARGET.accepted`, a number a line, and prints the sum of all lines.
pub(crate) fn add(target: &str, frames: u64) {
    if FRAMES.fetch_add(frames, Ordering::Relaxed) + frames < BATCH {
        return;
    }
    let batch = FRAMES.swap(0, Ordering::Relaxed);
    let path = format!("{}/corpus/{target}.accepted", env!("CARGO_MANIFEST_DIR"));
    // Runs that end at any time, or run at once, lose a batch at most.
    let file = std::fs::OpenOptions::new().create(true).append(true).open(&path);
    let written = file.and_then(|mut file| file.write_all(format!("{batch}\n").as_bytes()));
    let all = std::fs::read_to_string(&path).unwrap_or_default();
    let total: u64 = all.lines().filter_map(|line| line.parse::<u64>().ok()).sum();
    match written {
        Ok(()) => eprintln!("{target}: {total} frames accepted, in all runs"),
        Err(error) => eprintln!("{target}: {batch} frames accepted, not written to {path}: {error}"),
    }
}
