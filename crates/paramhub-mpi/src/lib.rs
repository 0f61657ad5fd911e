//! Communicators over an installed MPI (`Mpi`), with the feature `mpi`; without it nothing is here, so that nobody needs one.

#[cfg(feature = "mpi")]
mod communicator;
#[cfg(feature = "mpi")]
mod process;
#[cfg(feature = "mpi")]
mod raw;

#[cfg(feature = "mpi")]
pub use communicator::Mpi;
#[cfg(feature = "mpi")]
pub use process::Threads;
