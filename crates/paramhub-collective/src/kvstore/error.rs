//! Errors of stores.

use std::sync::Arc;

use paramhub_syncer::SyncError;
use paramhub_worker::WorkerError;
use thiserror::Error;

use super::Key;
use crate::communicator::CommunicatorError;
use crate::engine::{Failure, PushError};

/// The reason why a call to a store failed.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// There is no such kind of store, or it cannot be made with these options.
    #[error("{0}")]
    Options(String),
    /// A key or an array does not fit.
    #[error("key {key}: {reason}")]
    Key {
        /// The key.
        key: Key,
        /// The part that does not fit.
        reason: String,
    },
    /// The store is in a state that does not allow the call.
    #[error("{0}")]
    Sequence(&'static str),
    /// The engine takes no more operations.
    #[error(transparent)]
    Push(#[from] PushError),
    /// An operation that the call waited for failed.
    #[error(transparent)]
    Failed(#[from] Arc<Failure>),
    /// A hub failed, or the connection to it.
    #[error(transparent)]
    Hub(#[from] WorkerError),
    /// The other ranks of a job at a hub failed.
    #[error(transparent)]
    Ranks(Arc<SyncError>),
    /// A collective that the caller's thread made failed.
    #[error(transparent)]
    Communicator(#[from] CommunicatorError),
}

impl StoreError {
    /// The rank at fault, where one is known. For an operation's failure [`failure`](super::KvStore::failure)
    /// of the store may know it.
    pub fn culprit(&self) -> Option<u32> {
        match self {
            StoreError::Hub(error) => error.culprit(),
            StoreError::Communicator(error) => error.culprit(),
            _ => None,
        }
    }
}
