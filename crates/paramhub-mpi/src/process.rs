//! The MPI of this process: it begins once and ends once, and takes as many threads as it permits.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use mpi::Threading;
use mpi::environment::{is_finalized, is_initialized, threading_support};
use paramhub_collective::communicator::CommunicatorError;

use crate::raw;

/// The thread level with which MPI begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadLevel {
    /// Any thread, one at a time (`MPI_THREAD_SERIALIZED`): the stores funnel and depcha need it.
    Serialized,
    /// Several threads at a time (`MPI_THREAD_MULTIPLE`), each in a communicator of its own: the store concom
    /// needs it.
    Multiple,
}

/// The right to call MPI now. It proves that MPI has begun and has not ended, and that MPI permits as many
/// threads as hold one.
pub(crate) struct CallPermit {
    _alone: Option<MutexGuard<'static, ()>>,
}

/// Held during calls where MPI takes one thread at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
/// Held by the thread that begins MPI.
static BEGINNING: Mutex<()> = Mutex::new(());
/// `true` if MPI takes several threads at a time; written before the first communicator is made.
static TAKES_MANY: AtomicBool = AtomicBool::new(false);
/// The number of communicators that were made and not left.
static LIVE: AtomicUsize = AtomicUsize::new(0);
/// `true` if the last attempt to begin failed. It may have succeeded at the other ranks, which then wait
/// for this one.
static REFUSED: AtomicBool = AtomicBool::new(false);

/// Begins MPI unless it has begun, here or by other means, and makes the first communicator. All ranks call
/// it.
pub(crate) fn begin<C>(
    threads: ThreadLevel,
    make: impl FnOnce(&CallPermit) -> Result<C, String>,
) -> Result<C, CommunicatorError> {
    let _beginning = BEGINNING.lock().unwrap_or_else(PoisonError::into_inner);
    let made = begin_with(threads).and_then(|()| {
        let permit = enter().ok_or_else(|| BUSY.to_owned())?;
        make(&permit)
    });
    REFUSED.store(made.is_err(), Ordering::Relaxed);
    made.map_err(|reason| {
        let rank = if is_running() { raw::world_rank() } else { 0 };
        let call = match threads {
            ThreadLevel::Serialized => "start of MPI".to_owned(),
            ThreadLevel::Multiple => "start of MPI for several threads".to_owned(),
        };
        CommunicatorError::Library { rank, call, reason }
    })
}

fn begin_with(threads: ThreadLevel) -> Result<(), String> {
    let (needed, advice) = match threads {
        ThreadLevel::Serialized => {
            (Threading::Serialized, "have it start MPI with that level, or start it here")
        }
        ThreadLevel::Multiple => (
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
        // Dropping it would end MPI at that moment.
        std::mem::forget(universe);
        raw::at_exit(end);
    }
    let provided = threading_support();
    if provided < needed {
        let mpi = if begun_before { "the MPI that this process has begun" } else { "this MPI" };
        return Err(format!("{mpi} provides {}, and {} is needed: {advice}", name(provided), name(needed)));
    }
    TAKES_MANY.store(provided == Threading::Multiple, Ordering::Release);
    Ok(())
}

/// The reason why a thread gets no permit.
pub(crate) const BUSY: &str = "another thread of this process is in MPI, which was started for one at a time: start it with ThreadLevel::Multiple, or \
                               call from one thread at a time";

/// The right to call MPI, for a caller that has a communicator or begins MPI; `None` if another thread is in
/// MPI, which takes one at a time. It does not wait: ranks whose threads enter in different orders would wait
/// for one another.
pub(crate) fn enter() -> Option<CallPermit> {
    if takes_many() {
        return Some(CallPermit { _alone: None });
    }
    match ONE_AT_A_TIME.try_lock() {
        Ok(alone) => Some(CallPermit { _alone: Some(alone) }),
        Err(TryLockError::Poisoned(poisoned)) => Some(CallPermit { _alone: Some(poisoned.into_inner()) }),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Returns whether several threads may be in MPI.
pub(crate) fn takes_many() -> bool {
    TAKES_MANY.load(Ordering::Acquire)
}

/// Counts one communicator more.
pub(crate) fn join() {
    LIVE.fetch_add(1, Ordering::AcqRel);
}

/// Counts one communicator less.
pub(crate) fn leave() {
    LIVE.fetch_sub(1, Ordering::AcqRel);
}

fn is_running() -> bool {
    is_initialized() && !is_finalized()
}

/// Runs when the process exits. Ending MPI waits for all ranks to end it, so a rank with communicators that
/// were not left does not end it: `mpirun` sees it exit without, and ends the other ranks, which may be
/// waiting for this one.
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
