//! Communicators over an installed MPI (`MpiCommunicator`), with the feature `mpi`. Without the feature the
//! crate is empty, so that building it needs no MPI.

#[cfg(feature = "mpi")]
mod communicator;
#[cfg(feature = "mpi")]
mod process;
#[cfg(feature = "mpi")]
mod raw;

#[cfg(feature = "mpi")]
pub use communicator::MpiCommunicator;
#[cfg(feature = "mpi")]
pub use process::ThreadLevel;
