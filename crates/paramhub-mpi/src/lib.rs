//! Communicators over an installed MPI, with the feature `mpi`; without it nothing is here, so that nobody needs one.
//!
//! `Mpi::start` is called by every rank of a program that `mpirun` has started:
//!
//! ```ignore
//! let communicator = Mpi::start(Threads::One)?;
//! let options = StoreOptions { engine, communicator: Some(Box::new(communicator)), outstanding: None };
//! let store = create(StoreKind::DepCha, options)?;
//! ```

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
