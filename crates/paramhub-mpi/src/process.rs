//! MPI as this process has it: begun once, ended once, and entered by as many threads as it takes.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use mpi::Threading;
use mpi::environment::{is_finalized, is_initialized, threading_support};
use paramhub_collective::communicator::CommunicatorError;

use crate::raw;

/// Which threads call MPI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// Any, one at a time (`MPI_THREAD_SERIALIZED`): what the stores funnel and depcha need.
    One,
    /// Several at a time (`MPI_THREAD_MULTIPLE`), each in a communicator of its own: what concom needs.
    Many,
}

/// The right to call MPI now. Whoever has one knows that MPI has begun and has not ended, and that MPI permits as many threads
/// as have one.
pub(crate) struct Turn {
    _alone: Option<MutexGuard<'static, ()>>,
}

/// Held in calls where MPI takes one thread at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
/// One thread begins.
static BEGINNING: Mutex<()> = Mutex::new(());
/// Whether MPI takes several threads at a time; written before the first communicator is made.
static TAKES_MANY: AtomicBool = AtomicBool::new(false);
/// Communicators that were made and not left.
static LIVE: AtomicUsize = AtomicUsize::new(0);
/// Whether the last who wanted to begin was refused. The other ranks may not have been, and wait for this one.
static REFUSED: AtomicBool = AtomicBool::new(false);

/// Begins MPI unless it has begun, here or by other means, and makes the first communicator. All ranks do.
pub(crate) fn begin<C>(
    threads: Threads,
    make: impl FnOnce(&Turn) -> Result<C, String>,
) -> Result<C, CommunicatorError> {
    let _beginning = BEGINNING.lock().unwrap_or_else(PoisonError::into_inner);
    let made = begin_with(threads).and_then(|()| {
        let turn = enter().ok_or_else(|| BUSY.to_owned())?;
        make(&turn)
    });
    REFUSED.store(made.is_err(), Ordering::Relaxed);
    made.map_err(|reason| {
        let rank = if is_running() { raw::world_rank() } else { 0 };
        let call = match threads {
            Threads::One => "start of MPI".to_owned(),
            Threads::Many => "start of MPI for several threads".to_owned(),
        };
        CommunicatorError::Library { rank, call, reason }
    })
}

fn begin_with(threads: Threads) -> Result<(), String> {
    let (needed, advice) = match threads {
        Threads::One => (Threading::Serialized, "have it start MPI with that level, or start it here"),
        Threads::Many => (
            Threading::Multiple,
            "use an MPI built for it and start it with that level, or choose depcha or funnel, which need one thread at a time",
        ),
    };
    if is_finalized() {
        return Err("MPI has ended in this process, and cannot begin again".to_owned());
    }
    let begun_before = is_initialized();
    if !begun_before {
        let (universe, _) = mpi::initialize_with_threading(needed).expect("it has not begun");
        // Dropping it would end MPI, wherever this process then is.
        std::mem::forget(universe);
        raw::at_exit(end);
    }
    let provided = threading_support();
    if provided < needed {
        let who = if begun_before { "the MPI that this process has begun" } else { "this MPI" };
        return Err(format!("{who} provides {}, and {} is needed: {advice}", name(provided), name(needed)));
    }
    TAKES_MANY.store(provided == Threading::Multiple, Ordering::Release);
    Ok(())
}

/// Why there is no turn.
pub(crate) const BUSY: &str = "another thread of this process is in MPI, which was started for one at a time: start it with Threads::Many, or \
                               call from one thread at a time";

/// The right to call MPI, for who has a communicator or begins; none if another thread is in it and MPI takes one at a time. It does
/// not wait: ranks whose threads enter in different orders would wait for one another.
pub(crate) fn enter() -> Option<Turn> {
    if takes_many() {
        return Some(Turn { _alone: None });
    }
    match ONE_AT_A_TIME.try_lock() {
        Ok(alone) => Some(Turn { _alone: Some(alone) }),
        Err(TryLockError::Poisoned(poisoned)) => Some(Turn { _alone: Some(poisoned.into_inner()) }),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Whether several threads may be in MPI.
pub(crate) fn takes_many() -> bool {
    TAKES_MANY.load(Ordering::Acquire)
}

/// Counts a communicator.
pub(crate) fn join() {
    LIVE.fetch_add(1, Ordering::AcqRel);
}

/// Counts one less.
pub(crate) fn leave() {
    LIVE.fetch_sub(1, Ordering::AcqRel);
}

fn is_running() -> bool {
    is_initialized() && !is_finalized()
}

/// When the process exits. Ending MPI waits for all ranks to end it, so who has not left does not: `mpirun` sees a rank exit
/// without, and ends the others, who may be waiting for this one.
extern "C" fn end() {
    if LIVE.load(Ordering::Acquire) == 0 && !REFUSED.load(Ordering::Relaxed) && is_running() {
        raw::finalize();
    }
}

fn name(level: Threading) -> &'static str {
    match level {
        Threading::Single => "MPI_THREAD_SINGLE",
        Threading::Funneled => "MPI_THREAD_FUNNELED",
        Threading::Serialized => "MPI_THREAD_SERIALIZED",
        Threading::Multiple => "MPI_THREAD_MULTIPLE",
    }
}
