//! Communicators: groups of ranks that exchange arrays by calling the same collectives in the same order.
//!
//! Only the order distinguishes the collectives of a communicator (MPI collectives in DAGs, section 2.2):
//! ranks that call them in different orders sum values that do not belong together, or wait for ever.
//! [`CheckedCommunicator`] detects this.

mod checked;
mod collective;
mod error;
mod mesh;
mod rendezvous;
mod traced;

pub use checked::CheckedCommunicator;
pub use collective::Collective;
pub use error::CommunicatorError;
pub use mesh::MeshCommunicator;
use paramhub_core::codec::Dtype;
pub use rendezvous::{RendezvousOptions, rendezvous};
pub use traced::TracedCommunicator;

/// One rank's communicator, with MPI's semantics. Every call blocks until this rank's part is done. The
/// caller makes one call at a time, or orders the calls of several threads; every rank makes the same calls
/// in the same order.
///
/// `name` describes the exchange in errors and timelines; it is not sent to the other ranks.
///
/// # Errors
/// Every method fails if a rank is gone or the calls do not match. A communicator that has failed stays
/// failed.
pub trait Communicator: Send + Sync {
    /// The rank of this process, counted from 0.
    fn rank(&self) -> u32;

    /// The number of ranks.
    fn size(&self) -> u32;

    /// Returns the way in which bytes travel between the ranks, as text for people.
    fn transport(&self) -> &'static str;

    /// Makes a collective call.
    fn call(&self, name: &str, collective: Collective<'_>) -> Result<(), CommunicatorError>;

    /// Another communicator of the same ranks, whose calls have an order of their own. All ranks call this in
    /// the same order as their other collectives.
    fn duplicate(&self) -> Result<Box<dyn Communicator>, CommunicatorError>;

    /// Ends the communicator, here and at all other ranks, which receive the reason.
    fn abort(&self, reason: &str);

    /// Leaves in order. All ranks leave, and make no calls afterwards.
    fn leave(&self) -> Result<(), CommunicatorError>;

    /// The error that every further call fails with, if it is known before a call.
    fn failure(&self) -> Option<CommunicatorError> {
        None
    }

    /// Returns whether several threads of this process may be in collectives of this communicator and of its
    /// duplicates at one time, a thread in each. Calls no rank; the error says what to do where they may not.
    fn check_threads(&self) -> Result<(), CommunicatorError> {
        Ok(())
    }

    /// [`Collective::Allreduce`].
    fn allreduce(&self, name: &str, values: &mut [u8], dtype: Dtype) -> Result<(), CommunicatorError> {
        self.call(name, Collective::Allreduce { values, dtype })
    }

    /// [`Collective::Broadcast`].
    fn broadcast(&self, name: &str, bytes: &mut [u8], root: u32) -> Result<(), CommunicatorError> {
        self.call(name, Collective::Broadcast { bytes, root })
    }

    /// [`Collective::ReduceScatter`].
    fn reduce_scatter(
        &self,
        name: &str,
        values: &[u8],
        sum: &mut [u8],
        dtype: Dtype,
    ) -> Result<(), CommunicatorError> {
        self.call(name, Collective::ReduceScatter { values, sum, dtype })
    }

    /// [`Collective::Allgather`].
    fn allgather(&self, name: &str, block: &[u8], all: &mut [u8]) -> Result<(), CommunicatorError> {
        self.call(name, Collective::Allgather { block, all })
    }

    /// [`Collective::Barrier`].
    fn barrier(&self) -> Result<(), CommunicatorError> {
        self.call("", Collective::Barrier)
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

    fn call(&self, name: &str, collective: Collective<'_>) -> Result<(), CommunicatorError> {
        (**self).call(name, collective)
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

/// Checks that a rank's blocks fit together, for collectives whose blocks have one length.
///
/// # Errors
/// [`CommunicatorError::Misused`], which names the exchange.
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
    Err(CommunicatorError::Misused {
        name: name.to_owned(),
        reason: format!("{size} blocks{of} of {one} bytes each are not {all} bytes"),
    })
}
