//! An operation that failed, as those hear who depend on it.

use std::sync::Arc;

use thiserror::Error;

/// An operation that failed. Every variable that it mutates, or that depends on it, is poisoned with it until a wait has
/// told.
#[derive(Debug, PartialEq, Eq, Error)]
#[error("operation {operation} failed: {reason}")]
pub struct Failure {
    /// Counts pushes from 0 on. Of several failures that meet, the one pushed first goes on, whichever ran first: the
    /// same program then always tells the same.
    pub number: u64,
    /// The name it was pushed with.
    pub operation: String,
    /// What it returned, or the message of its panic.
    pub reason: String,
}

impl Failure {
    /// Makes `slot` hold the one pushed first; true if it held none.
    pub(super) fn meet(slot: &mut Option<Arc<Failure>>, other: &Arc<Failure>) -> bool {
        let first = slot.as_ref().is_none_or(|known| other.number < known.number);
        let was_none = slot.is_none();
        if first {
            *slot = Some(Arc::clone(other));
        }
        was_none
    }
}
