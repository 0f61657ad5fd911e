//! Drives cores with random frames until they have accepted so many, and computes every sum again:
//!
//! ```text
//! CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true \
//!     cargo run --release -p paramhub-hub --features fuzzing --example exercise -- FRAMES [FIRST SEED] [THREADS]
//! ```
//! A frame counts when its answer has come and was right. Each thread takes one seed after another, from the first, and
//! drives a core of its own with it. The first seed that makes one panic ends the run with exit code 1. `1 SEED 1` runs
//! that seed alone, and so does the crate's test `a_core_is_right_whatever_workers_do` with `PARAMHUB_TEST_SEED=SEED`.
//! libFuzzer, which follows the branches of the code, reaches rarer ones, but hundreds of frames a second only.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant, UNIX_EPOCH};

use paramhub_hub::fuzzing::hub_core_seeded;

/// The random bytes of one seed, as many as the crate's test takes.
const CHOICES: u64 = 100_000;
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let given: Option<Vec<u64>> = std::env::args().skip(1).map(|text| text.parse().ok()).collect();
    let (frames, first, threads) = match given.as_deref() {
        Some(&[frames]) => (frames, None, None),
        Some(&[frames, first]) => (frames, Some(first), None),
        Some(&[frames, first, threads]) => (frames, Some(first), Some(threads.max(1))),
        _ => {
            eprintln!("give a number of frames, and perhaps the first seed and the number of threads");
            return ExitCode::from(2);
        }
    };
    let first = first.unwrap_or_else(|| UNIX_EPOCH.elapsed().unwrap_or_default().as_secs());
    let threads =
        threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |count| count.get() as u64));
    println!("{frames} frames, first seed {first}, {threads} threads");
    let totals = Totals { next_seed: AtomicU64::new(first), ..Totals::default() };
    let start = Instant::now();
    std::thread::scope(|scope| {
        let (ending, ended) = channel();
        for _ in 0..threads {
            let (totals, ending) = (&totals, ending.clone());
            scope.spawn(move || {
                totals.add_seeds_until(frames);
                drop(ending);
            });
        }
        drop(ending);
        // Nothing is sent: the channel closes with the last thread.
        while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(PROGRESS_INTERVAL) as Result<(), _> {
            totals.print(first, start);
        }
    });
    totals.print(first, start);
    match totals.has_failed.load(Ordering::Relaxed) {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    }
}

#[derive(Default)]
struct Totals {
    next_seed: AtomicU64,
    seeds_done: AtomicU64,
    frames: AtomicU64,
    jobs: AtomicU64,
    has_failed: AtomicBool,
}

impl Totals {
    /// Takes seed after seed until there are so many frames, or a core has panicked.
    fn add_seeds_until(&self, frames: u64) {
        while self.frames.load(Ordering::Relaxed) < frames && !self.has_failed.load(Ordering::Relaxed) {
            let seed = self.next_seed.fetch_add(1, Ordering::Relaxed);
            match catch_unwind(AssertUnwindSafe(|| hub_core_seeded(seed, CHOICES))) {
                Ok((accepted, jobs)) => {
                    self.seeds_done.fetch_add(1, Ordering::Relaxed);
                    self.frames.fetch_add(accepted, Ordering::Relaxed);
                    self.jobs.fetch_add(jobs, Ordering::Relaxed);
                }
                Err(_) => {
                    self.has_failed.store(true, Ordering::Relaxed);
                    eprintln!("seed {seed} fails. Alone: `-- 1 {seed} 1`");
                }
            }
        }
    }

    fn print(&self, first: u64, start: Instant) {
        let [frames, jobs, seeds, next] = [&self.frames, &self.jobs, &self.seeds_done, &self.next_seed]
            .map(|count| count.load(Ordering::Relaxed));
        let seconds = start.elapsed().as_secs_f64();
        println!(
            "{frames} frames accepted, {jobs} jobs, {seeds} seeds from {first} to {}, {seconds:.0} s, {:.0} frames/s",
            next - 1,
            frames as f64 / seconds
        );
    }
}
