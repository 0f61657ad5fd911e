//! A communicator whose collectives are MPI's.

use std::fmt;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use paramhub_collective::communicator::{Communicator, CommunicatorError, check_blocks};
use paramhub_core::codec::Dtype;
use paramhub_kernels::convert;

use crate::process::{self, Threads, Turn};
use crate::raw::{self, Raw};

/// Elements that a call of MPI is given at most. Its counts have 31 bits, and algorithms inside it add some of them up.
const PIECE: usize = 1 << 30;
/// The same for halves, which are f32 for the time of the call: a mebibyte of these.
const PIECE_OF_HALVES: usize = 1 << 18;

/// One rank's end of a communicator of MPI. Collectives have no time limit: `mpirun` ends all ranks when one of them dies.
///
/// ```no_run
/// # use std::sync::Arc;
/// # use paramhub_collective::engine::{Engine, EngineConfig};
/// # use paramhub_collective::kvstore::{StoreKind, StoreOptions, create};
/// use paramhub_mpi::{Mpi, Threads};
///
/// let communicator = Mpi::start(Threads::One)?;
/// let engine = Arc::new(Engine::new(EngineConfig::default())?);
/// let store = create(StoreKind::DepCha, StoreOptions::over(engine, communicator))?;
/// store.leave()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// f16 and bf16 are summed as f32 and rounded once. A communicator that is dropped and not left stays with MPI; a process that exits
/// then does not end MPI, which `mpirun` takes for a failure of this rank.
pub struct Mpi {
    rank: u32,
    size: u32,
    piece: usize,
    inner: Mutex<Inner>,
    failure: OnceLock<CommunicatorError>,
}

struct Inner {
    /// None once it has been left.
    raw: Option<Raw>,
    /// What is not f32, as f32; grows to the largest piece and stays.
    values: Vec<f32>,
    /// The same of a result.
    sums: Vec<f32>,
}

impl Mpi {
    /// Joins all ranks that `mpirun` has started, which all call it. The first time MPI begins for as many threads; it ends when the
    /// process exits, if all communicators have been left then. MPI that has begun already, by other means too, is used as it is. Each
    /// call makes another communicator.
    ///
    /// # Errors
    /// If MPI does not permit so many threads.
    pub fn start(threads: Threads) -> Result<Mpi, CommunicatorError> {
        process::begin(threads, |turn| Ok(Mpi::over(turn, Raw::of_world(turn)?, PIECE)))
    }

    /// Gives MPI at most so many elements at a time instead of 2^30; bytes where these are exchanged. The same at all ranks.
    ///
    /// # Panics
    /// If none, or more than MPI can count.
    #[must_use]
    pub fn with_pieces(mut self, elements: usize) -> Mpi {
        assert!((1..=i32::MAX as usize).contains(&elements), "1 to 2^31 - 1 elements at a time");
        self.piece = elements;
        self
    }

    fn over(turn: &Turn, raw: Raw, piece: usize) -> Mpi {
        process::join();
        let (rank, size) = (raw.rank(turn), raw.size(turn));
        let inner = Inner { raw: Some(raw), values: Vec::new(), sums: Vec::new() };
        Mpi { rank, size, piece, inner: Mutex::new(inner), failure: OnceLock::new() }
    }

    /// Calls MPI, unless it has failed here before.
    fn call<R>(
        &self,
        kind: &str,
        name: &str,
        make: impl FnOnce(&Turn, &Raw, &mut Vec<f32>, &mut Vec<f32>) -> Result<R, String>,
    ) -> Result<R, CommunicatorError> {
        let mut inner = self.lock();
        if let Some(failure) = self.failure.get() {
            return Err(failure.clone());
        }
        let Inner { raw, values, sums } = &mut *inner;
        let called = match (raw, process::enter()) {
            (None, _) => Err("this communicator has been left".to_owned()),
            (_, None) => Err(process::BUSY.to_owned()),
            (Some(raw), Some(turn)) => make(&turn, raw, values, sums),
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

    /// Elements of `dtype` at a time. What a rank's memory is like has no say: all ranks cut alike.
    fn piece_of(&self, dtype: Dtype) -> usize {
        match dtype {
            Dtype::F32 => self.piece,
            Dtype::F16 | Dtype::BF16 => self.piece.min(PIECE_OF_HALVES),
        }
    }

    /// Elements of each rank's block at a time, where a call takes all ranks' blocks.
    fn piece_of_blocks(&self, piece: usize) -> usize {
        (piece / self.size as usize).max(1)
    }
}

/// `0..elements` in ranges of at most `piece`.
fn pieces(elements: usize, piece: usize) -> impl Iterator<Item = Range<usize>> {
    (0..elements).step_by(piece).map(move |start| start..elements.min(start + piece))
}

/// Bytes of a range of elements.
fn bytes_of(range: &Range<usize>, dtype: Dtype) -> Range<usize> {
    range.start * dtype.bytes()..range.end * dtype.bytes()
}

impl Communicator for Mpi {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn transport(&self) -> &'static str {
        "MPI"
    }

    fn allreduce(&self, name: &str, values: &mut [u8], dtype: Dtype) -> Result<(), CommunicatorError> {
        if !values.len().is_multiple_of(dtype.bytes()) {
            return Err(CommunicatorError::Misplaced {
                name: name.to_owned(),
                reason: format!("{} bytes are no whole number of {dtype}", values.len()),
            });
        }
        let elements = values.len() / dtype.bytes();
        self.call("allreduce", name, |turn, raw, scratch, _| {
            for range in pieces(elements, self.piece_of(dtype)) {
                let wire = &mut values[bytes_of(&range, dtype)];
                if let (Dtype::F32, Ok(floats)) = (dtype, bytemuck::try_cast_slice_mut(wire)) {
                    raw.allreduce(turn, floats)?;
                    continue;
                }
                scratch.resize(range.len(), 0.0);
                convert::decode(wire, scratch, dtype.codec());
                raw.allreduce(turn, scratch)?;
                convert::encode(scratch, wire, dtype.codec());
            }
            Ok(())
        })
    }

    fn broadcast(&self, name: &str, bytes: &mut [u8], root: u32) -> Result<(), CommunicatorError> {
        self.call("broadcast", name, |turn, raw, _, _| {
            bytes.chunks_mut(self.piece).try_for_each(|piece| raw.broadcast(turn, piece, root))
        })
    }

    fn reduce_scatter(
        &self,
        name: &str,
        values: &[u8],
        sum: &mut [u8],
        dtype: Dtype,
    ) -> Result<(), CommunicatorError> {
        check_blocks(name, self.size, sum.len(), values.len(), Some(dtype))?;
        let block = sum.len() / dtype.bytes();
        self.call("reduce-scatter", name, |turn, raw, scratch, sums| {
            let piece = self.piece_of_blocks(self.piece_of(dtype));
            if (1..=piece).contains(&block)
                && dtype == Dtype::F32
                && let Ok(values) = bytemuck::try_cast_slice(values)
                && let Ok(sum) = bytemuck::try_cast_slice_mut(sum)
            {
                return raw.reduce_scatter(turn, values, sum);
            }
            for range in pieces(block, piece) {
                scratch.resize(range.len() * self.size as usize, 0.0);
                sums.resize(range.len(), 0.0);
                let of_ranks = values.chunks_exact(block * dtype.bytes());
                for (of_rank, out) in of_ranks.zip(scratch.chunks_exact_mut(range.len())) {
                    convert::decode(&of_rank[bytes_of(&range, dtype)], out, dtype.codec());
                }
                raw.reduce_scatter(turn, scratch, sums)?;
                convert::encode(sums, &mut sum[bytes_of(&range, dtype)], dtype.codec());
            }
            Ok(())
        })
    }

    fn allgather(&self, name: &str, block: &[u8], all: &mut [u8]) -> Result<(), CommunicatorError> {
        check_blocks(name, self.size, block.len(), all.len(), None)?;
        self.call("allgather", name, |turn, raw, _, _| {
            // Where nothing is, Rust points to 1, which is OpenMPI's MPI_IN_PLACE.
            if block.is_empty() {
                return Ok(());
            }
            if block.len() <= self.piece_of_blocks(self.piece) {
                return raw.allgather(turn, block, all);
            }
            // Pieces of several blocks do not lie together, those of one do.
            for (rank, of_rank) in (0..self.size).zip(all.chunks_exact_mut(block.len())) {
                if rank == self.rank {
                    of_rank.copy_from_slice(block);
                }
                of_rank.chunks_mut(self.piece).try_for_each(|piece| raw.broadcast(turn, piece, rank))?;
            }
            Ok(())
        })
    }

    fn barrier(&self) -> Result<(), CommunicatorError> {
        self.call("barrier", "", |turn, raw, _, _| raw.barrier(turn))
    }

    fn duplicate(&self) -> Result<Box<dyn Communicator>, CommunicatorError> {
        self.call("duplicate", "", |turn, raw, _, _| {
            Ok(Box::new(Mpi::over(turn, raw.duplicate(turn)?, self.piece)) as Box<dyn Communicator>)
        })
    }

    /// Prints the reason, then ends all ranks' processes, this one too.
    fn abort(&self, reason: &str) {
        eprintln!("rank {} of {} ends the job: {reason}", self.rank, self.size);
        if let Some(turn) = process::enter() {
            raw::abort(&turn);
        }
        // `mpirun` ends the others when this process ends so.
        std::process::abort();
    }

    fn leave(&self) -> Result<(), CommunicatorError> {
        self.barrier()?;
        let raw = self.lock().raw.take();
        let Some(raw) = raw else {
            return Err(self.fail("leave", "", "this communicator has been left".to_owned()));
        };
        let turn = process::enter().ok_or_else(|| self.fail("leave", "", process::BUSY.to_owned()))?;
        raw.free(&turn).map_err(|reason| self.fail("leave", "", reason))?;
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
            reason: "MPI was started for one thread at a time: start it with Threads::Many (MPI_THREAD_MULTIPLE), or choose depcha or \
                     funnel"
                .to_owned(),
        })
    }
}

impl fmt::Debug for Mpi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mpi(rank {} of {})", self.rank, self.size)
    }
}
