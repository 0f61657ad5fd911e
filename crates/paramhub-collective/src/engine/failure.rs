//! A failed operation, as the operations and waits that depend on it see it.

use std::sync::Arc;

use thiserror::Error;

/// An operation that failed. It poisons every variable that it mutates or that depends on it, until a wait
/// has reported it.
#[derive(Debug, PartialEq, Eq, Error)]
#[error("operation {operation} failed: {reason}")]
pub struct Failure {
    /// The number of the operation, counted in pushes from 0 on. Where several failures meet, the one pushed
    /// first is kept, whichever ran first, so that the same program always reports the same failure.
    pub number: u64,
    /// The name it was pushed with.
    pub operation: String,
    /// The error that it returned, or the message of its panic.
    pub reason: String,
}

impl Failure {
    /// Puts `other` into `slot` unless it holds a failure that was pushed earlier; returns whether it was
    /// empty.
    pub(super) fn meet(slot: &mut Option<Arc<Failure>>, other: &Arc<Failure>) -> bool {
        let first = slot.as_ref().is_none_or(|known| other.number < known.number);
        let was_none = slot.is_none();
        if first {
            *slot = Some(Arc::clone(other));
        }
        was_none
    }
}
