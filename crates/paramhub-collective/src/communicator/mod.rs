//! Communicators: groups of ranks that exchange arrays by calling the same collectives in the same order.
//!
//! The order is all that tells collectives of a communicator apart (MPI collectives in DAGs, section 2.2): ranks that call
//! them in different orders sum what does not belong together, or wait for ever. [`Checking`] finds out.

mod checking;
mod error;
mod meet;
mod native;
mod tracing;

pub use checking::Checking;
pub use error::CommunicatorError;
pub use meet::{MeetOptions, meet};
pub use native::Native;
use paramhub_core::codec::Dtype;
pub use tracing::Tracing;

/// One rank's end of a communicator, as MPI has it. All calls block until this rank is done, and are made by one thread at a
/// time or are put in order by the caller; the same calls come in the same order at every rank.
///
/// `name` says what is exchanged, for errors and timelines; the others may not hear of it.
///
/// # Errors
/// Every method fails if a rank is gone or the calls do not fit together. A communicator that has failed stays so.
pub trait Communicator: Send + Sync {
    /// This process, counted from 0.
    fn rank(&self) -> u32;

    /// Ranks of the group.
    fn size(&self) -> u32;

    /// How bytes travel between the ranks, for people.
    fn transport(&self) -> &'static str;

    /// Puts the sum of all ranks' values in the place of each. All ranks get the same bits. Halves are added in
    /// f32, and may be rounded after each contribution.
    fn allreduce(&self, name: &str, values: &mut [u8], dtype: Dtype) -> Result<(), CommunicatorError>;

    /// Gives `root`'s bytes to every rank, in place.
    fn broadcast(&self, name: &str, bytes: &mut [u8], root: u32) -> Result<(), CommunicatorError>;

    /// Sums `values`, one block for each rank, and leaves this rank its own block's sum.
    fn reduce_scatter(
        &self,
        name: &str,
        values: &[u8],
        sum: &mut [u8],
        dtype: Dtype,
    ) -> Result<(), CommunicatorError>;

    /// Gives every rank's `block` to every rank, in rank order. All blocks have one length.
    fn allgather(&self, name: &str, block: &[u8], all: &mut [u8]) -> Result<(), CommunicatorError>;

    /// Waits until every rank has called it.
    fn barrier(&self) -> Result<(), CommunicatorError>;

    /// Another communicator of the same ranks, whose calls have an order of their own. All ranks call it, as they call any
    /// collective.
    fn duplicate(&self) -> Result<Box<dyn Communicator>, CommunicatorError>;

    /// Ends it, here and at all other ranks, for a reason that these are told.
    fn abort(&self, reason: &str);

    /// Leaves in order: all ranks do, and nobody calls anything any more.
    fn leave(&self) -> Result<(), CommunicatorError>;

    /// What every further call fails with, as far as it is known before one is made.
    fn failure(&self) -> Option<CommunicatorError> {
        None
    }

    /// Whether threads of this process may be in collectives of this communicator and of its duplicates at one time, a thread
    /// each. Calls nobody; the error says what to do where they may not.
    fn check_threads(&self) -> Result<(), CommunicatorError> {
        Ok(())
    }
}

impl<C: Communicator + ?Sized> Communicator for Box<C> {
    fn rank(&self) -> u32 {
        (**self).rank()
    }

    fn size(&self) -> u32 {
        (**self).size()
    }

    fn transport(&self) -> &'static str {
        (**self).transport()
    }

    fn allreduce(&self, name: &str, values: &mut [u8], dtype: Dtype) -> Result<(), CommunicatorError> {
        (**self).allreduce(name, values, dtype)
    }

    fn broadcast(&self, name: &str, bytes: &mut [u8], root: u32) -> Result<(), CommunicatorError> {
        (**self).broadcast(name, bytes, root)
    }

    fn reduce_scatter(
        &self,
        name: &str,
        values: &[u8],
        sum: &mut [u8],
        dtype: Dtype,
    ) -> Result<(), CommunicatorError> {
        (**self).reduce_scatter(name, values, sum, dtype)
    }

    fn allgather(&self, name: &str, block: &[u8], all: &mut [u8]) -> Result<(), CommunicatorError> {
        (**self).allgather(name, block, all)
    }

    fn barrier(&self) -> Result<(), CommunicatorError> {
        (**self).barrier()
    }

    fn duplicate(&self) -> Result<Box<dyn Communicator>, CommunicatorError> {
        (**self).duplicate()
    }

    fn abort(&self, reason: &str) {
        (**self).abort(reason);
    }

    fn leave(&self) -> Result<(), CommunicatorError> {
        (**self).leave()
    }

    fn failure(&self) -> Option<CommunicatorError> {
        (**self).failure()
    }

    fn check_threads(&self) -> Result<(), CommunicatorError> {
        (**self).check_threads()
    }
}

/// Whether a rank's blocks fit together, for collectives whose blocks have one length.
///
/// # Errors
/// [`CommunicatorError::Misplaced`], which names the exchange.
pub fn check_blocks(
    name: &str,
    size: u32,
    one: usize,
    all: usize,
    dtype: Option<Dtype>,
) -> Result<(), CommunicatorError> {
    if one.checked_mul(size as usize) == Some(all)
        && dtype.is_none_or(|dtype| one.is_multiple_of(dtype.bytes()))
    {
        return Ok(());
    }
    let of = dtype.map_or(String::new(), |dtype| format!(" of {dtype}"));
    Err(CommunicatorError::Misplaced {
        name: name.to_owned(),
        reason: format!("{size} blocks{of} of {one} bytes each are not {all} bytes"),
    })
}
