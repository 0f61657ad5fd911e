//! A communicator whose collectives are MPI's.

use std::fmt;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use paramhub_collective::communicator::{Collective, Communicator, CommunicatorError, check_blocks};
use paramhub_core::codec::Dtype;
use paramhub_kernels::convert;

use crate::process::{self, CallPermit, ThreadLevel};
use crate::raw::{self, Raw};

/// The maximum of elements in one call of MPI. Its counts have 31 bits, and algorithms inside it add some of
/// them up.
const PIECE: usize = 1 << 30;
/// The same maximum for f16 and bf16, which are f32 during the call: a mebibyte of f32.
const PIECE_OF_HALVES: usize = 1 << 18;

/// One rank's communicator of MPI. Its collectives have no time limit: `mpirun` ends all ranks when one of
/// them dies.
///
/// ```no_run
/// # use std::sync::Arc;
/// # use paramhub_collective::engine::{Engine, EngineConfig};
/// # use paramhub_collective::kvstore::{StoreKind, StoreOptions, create};
/// use paramhub_mpi::{MpiCommunicator, ThreadLevel};
///
/// let communicator = MpiCommunicator::start(ThreadLevel::Serialized)?;
/// let engine = Arc::new(Engine::new(EngineConfig::default())?);
/// let store = create(StoreKind::DepCha, StoreOptions::over(engine, communicator))?;
/// store.leave()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// f16 and bf16 are summed as f32 and rounded once. A communicator that is dropped without
/// [`leave`](Communicator::leave) is not freed; then the process exits without ending MPI, which `mpirun`
/// takes for a failure of this rank.
pub struct MpiCommunicator {
    rank: u32,
    size: u32,
    piece: usize,
    inner: Mutex<Inner>,
    failure: OnceLock<CommunicatorError>,
}

struct Inner {
    /// `None` after the communicator was left.
    raw: Option<Raw>,
    /// Scratch for values that are not f32, converted to f32; it grows to the largest piece.
    values: Vec<f32>,
    /// The same scratch for results.
    sums: Vec<f32>,
}

impl MpiCommunicator {
    /// Joins all ranks that `mpirun` has started; all of them must call it. The first call begins MPI with
    /// this thread level. MPI ends when the process exits, if all communicators have been left by then. If
    /// MPI has begun already, by other means too, it is used as it is. Each call makes another communicator.
    ///
    /// # Errors
    /// If MPI does not provide the thread level.
    pub fn start(threads: ThreadLevel) -> Result<MpiCommunicator, CommunicatorError> {
        process::begin(threads, |permit| Ok(MpiCommunicator::over(permit, Raw::of_world(permit)?, PIECE)))
    }

    /// Sets the maximum of elements in one call of MPI, 2^30 by default; bytes for a collective of bytes. It
    /// must be the same at all ranks.
    ///
    /// # Panics
    /// If it is 0, or more than MPI can count.
    #[must_use]
    pub fn with_pieces(mut self, elements: usize) -> MpiCommunicator {
        assert!((1..=i32::MAX as usize).contains(&elements), "1 to 2^31 - 1 elements at a time");
        self.piece = elements;
        self
    }

    fn over(permit: &CallPermit, raw: Raw, piece: usize) -> MpiCommunicator {
        process::join();
        let (rank, size) = (raw.rank(permit), raw.size(permit));
        let inner = Inner { raw: Some(raw), values: Vec::new(), sums: Vec::new() };
        MpiCommunicator { rank, size, piece, inner: Mutex::new(inner), failure: OnceLock::new() }
    }

    /// Calls MPI, unless an earlier call failed.
    fn with_mpi<R>(
        &self,
        kind: &str,
        name: &str,
        make: impl FnOnce(&CallPermit, &Raw, &mut Vec<f32>, &mut Vec<f32>) -> Result<R, String>,
    ) -> Result<R, CommunicatorError> {
        let mut inner = self.lock();
        if let Some(failure) = self.failure.get() {
            return Err(failure.clone());
        }
        let Inner { raw, values, sums } = &mut *inner;
        let called = match (raw, process::enter()) {
            (None, _) => Err("this communicator has been left".to_owned()),
            (_, None) => Err(process::BUSY.to_owned()),
            (Some(raw), Some(permit)) => make(&permit, raw, values, sums),
        };
        called.map_err(|reason| self.fail(kind, name, reason))
    }

    fn fail(&self, kind: &str, name: &str, reason: String) -> CommunicatorError {
        let call = if name.is_empty() { kind.to_owned() } else { format!("{kind} of `{name}`") };
        let error = CommunicatorError::Library { rank: self.rank, call, reason };
        self.failure.get_or_init(|| error).clone()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The maximum of elements of `dtype` in one call. It must not depend on how a rank's memory is aligned:
    /// all ranks cut alike.
    fn piece_of(&self, dtype: Dtype) -> usize {
        match dtype {
            Dtype::F32 => self.piece,
            Dtype::F16 | Dtype::BF16 => self.piece.min(PIECE_OF_HALVES),
        }
    }

    /// The maximum of elements of each rank's block, in a call that takes all ranks' blocks.
    fn piece_of_blocks(&self, piece: usize) -> usize {
        (piece / self.size as usize).max(1)
    }
}

/// Cuts `0..elements` into ranges of at most `piece`.
fn pieces(elements: usize, piece: usize) -> impl Iterator<Item = Range<usize>> {
    (0..elements).step_by(piece).map(move |start| start..elements.min(start + piece))
}

/// The bytes of a range of elements.
fn bytes_of(range: &Range<usize>, dtype: Dtype) -> Range<usize> {
    range.start * dtype.bytes()..range.end * dtype.bytes()
}

impl MpiCommunicator {
    /// [`Collective::Allreduce`].
    fn sum(&self, name: &str, values: &mut [u8], dtype: Dtype) -> Result<(), CommunicatorError> {
        if !values.len().is_multiple_of(dtype.bytes()) {
            return Err(CommunicatorError::Misused {
                name: name.to_owned(),
                reason: format!("{} bytes are no whole number of {dtype}", values.len()),
            });
        }
        let elements = values.len() / dtype.bytes();
        self.with_mpi("allreduce", name, |permit, raw, scratch, _| {
            for range in pieces(elements, self.piece_of(dtype)) {
                let wire = &mut values[bytes_of(&range, dtype)];
                if let (Dtype::F32, Ok(floats)) = (dtype, bytemuck::try_cast_slice_mut(wire)) {
                    raw.allreduce(permit, floats)?;
                    continue;
                }
                scratch.resize(range.len(), 0.0);
                convert::decode(wire, scratch, dtype.codec());
                raw.allreduce(permit, scratch)?;
                convert::encode(scratch, wire, dtype.codec());
            }
            Ok(())
        })
    }

    /// [`Collective::Broadcast`].
    fn give(&self, name: &str, bytes: &mut [u8], root: u32) -> Result<(), CommunicatorError> {
        self.with_mpi("broadcast", name, |permit, raw, _, _| {
            bytes.chunks_mut(self.piece).try_for_each(|piece| raw.broadcast(permit, piece, root))
        })
    }

    /// [`Collective::ReduceScatter`].
    fn sum_block(
        &self,
        name: &str,
        values: &[u8],
        sum: &mut [u8],
        dtype: Dtype,
    ) -> Result<(), CommunicatorError> {
        check_blocks(name, self.size, sum.len(), values.len(), Some(dtype))?;
        let block = sum.len() / dtype.bytes();
        self.with_mpi("reduce-scatter", name, |permit, raw, scratch, sums| {
            let piece = self.piece_of_blocks(self.piece_of(dtype));
            if (1..=piece).contains(&block)
                && dtype == Dtype::F32
                && let Ok(values) = bytemuck::try_cast_slice(values)
                && let Ok(sum) = bytemuck::try_cast_slice_mut(sum)
            {
                return raw.reduce_scatter(permit, values, sum);
            }
            for range in pieces(block, piece) {
                scratch.resize(range.len() * self.size as usize, 0.0);
                sums.resize(range.len(), 0.0);
                let of_ranks = values.chunks_exact(block * dtype.bytes());
                for (of_rank, out) in of_ranks.zip(scratch.chunks_exact_mut(range.len())) {
                    convert::decode(&of_rank[bytes_of(&range, dtype)], out, dtype.codec());
                }
                raw.reduce_scatter(permit, scratch, sums)?;
                convert::encode(sums, &mut sum[bytes_of(&range, dtype)], dtype.codec());
            }
            Ok(())
        })
    }

    /// [`Collective::Allgather`].
    fn gather(&self, name: &str, block: &[u8], all: &mut [u8]) -> Result<(), CommunicatorError> {
        check_blocks(name, self.size, block.len(), all.len(), None)?;
        self.with_mpi("allgather", name, |permit, raw, _, _| {
            // An empty slice of bytes points to address 1, which is OpenMPI's MPI_IN_PLACE.
            if block.is_empty() {
                return Ok(());
            }
            if block.len() <= self.piece_of_blocks(self.piece) {
                return raw.allgather(permit, block, all);
            }
            // One piece of every block would not be contiguous, but the pieces of one block are: so broadcast
            // block by block.
            for (rank, of_rank) in (0..self.size).zip(all.chunks_exact_mut(block.len())) {
                if rank == self.rank {
                    of_rank.copy_from_slice(block);
                }
                of_rank.chunks_mut(self.piece).try_for_each(|piece| raw.broadcast(permit, piece, rank))?;
            }
            Ok(())
        })
    }
}

impl Communicator for MpiCommunicator {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn transport(&self) -> &'static str {
        "MPI"
    }

    fn call(&self, name: &str, collective: Collective<'_>) -> Result<(), CommunicatorError> {
        match collective {
            Collective::Allreduce { values, dtype } => self.sum(name, values, dtype),
            Collective::Broadcast { bytes, root } => self.give(name, bytes, root),
            Collective::ReduceScatter { values, sum, dtype } => self.sum_block(name, values, sum, dtype),
            Collective::Allgather { block, all } => self.gather(name, block, all),
            Collective::Barrier => self.with_mpi("barrier", name, |permit, raw, _, _| raw.barrier(permit)),
        }
    }

    fn duplicate(&self) -> Result<Box<dyn Communicator>, CommunicatorError> {
        self.with_mpi("duplicate", "", |permit, raw, _, _| {
            Ok(Box::new(MpiCommunicator::over(permit, raw.duplicate(permit)?, self.piece))
                as Box<dyn Communicator>)
        })
    }

    /// Prints the reason, then ends all ranks' processes, this one too.
    fn abort(&self, reason: &str) {
        eprintln!("rank {} of {} ends the job: {reason}", self.rank, self.size);
        if let Some(permit) = process::enter() {
            raw::abort(&permit);
        }
        // `mpirun` ends the other ranks when this process aborts.
        std::process::abort();
    }

    fn leave(&self) -> Result<(), CommunicatorError> {
        self.barrier()?;
        let raw = self.lock().raw.take();
        let Some(raw) = raw else {
            return Err(self.fail("leave", "", "this communicator has been left".to_owned()));
        };
        let permit = process::enter().ok_or_else(|| self.fail("leave", "", process::BUSY.to_owned()))?;
        raw.free(&permit).map_err(|reason| self.fail("leave", "", reason))?;
        process::leave();
        Ok(())
    }

    fn check_threads(&self) -> Result<(), CommunicatorError> {
        if process::takes_many() {
            return Ok(());
        }
        Err(CommunicatorError::Library {
            rank: self.rank,
            call: "collectives of several threads".to_owned(),
            reason: "MPI was started for one thread at a time: start it with ThreadLevel::Multiple (MPI_THREAD_MULTIPLE), or choose depcha or \
                     funnel"
                .to_owned(),
        })
    }
}

impl fmt::Debug for MpiCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mpi(rank {} of {})", self.rank, self.size)
    }
}
