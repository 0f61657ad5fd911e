//! What a store refuses, or could not do.

use std::sync::Arc;

use paramhub_syncer::SyncError;
use paramhub_worker::WorkerError;
use thiserror::Error;

use super::Key;
use crate::communicator::CommunicatorError;
use crate::engine::{Failure, PushError};

/// Why a call to a store failed.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// There is no such store, or it cannot be made so.
    #[error("{0}")]
    Options(String),
    /// A key or an array that does not fit.
    #[error("key {key}: {reason}")]
    Key {
        /// Which key.
        key: Key,
        /// What does not fit.
        reason: String,
    },
    /// The store is not where this could be done.
    #[error("{0}")]
    Sequence(&'static str),
    /// The engine takes no more operations.
    #[error(transparent)]
    Push(#[from] PushError),
    /// An operation that was waited for.
    #[error(transparent)]
    Failed(#[from] Arc<Failure>),
    /// A hub, or the way there.
    #[error(transparent)]
    Hub(#[from] WorkerError),
    /// The other ranks of a job at a hub.
    #[error(transparent)]
    Ranks(Arc<SyncError>),
    /// A collective that was called here.
    #[error(transparent)]
    Communicator(#[from] CommunicatorError),
}

impl StoreError {
    /// The rank at fault, where one is known. Of an operation's failure the store [knows more](super::KvStore::failure).
    pub fn culprit(&self) -> Option<u32> {
        match self {
            StoreError::Hub(error) => error.culprit(),
            StoreError::Communicator(error) => error.culprit(),
            _ => None,
        }
    }
}
