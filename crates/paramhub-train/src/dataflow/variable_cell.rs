use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use paramhub_collective::engine::{Engine, Variable};

/// A variable of the engine with its value, which one operation leaves for a later one. Both mutate the
/// variable. Clones share the value.
pub(super) struct VariableCell<T> {
    value: Arc<Mutex<Option<T>>>,
    variable: Variable,
}

impl<T> VariableCell<T> {
    pub(super) fn new(engine: &Engine) -> VariableCell<T> {
        VariableCell { value: Arc::default(), variable: engine.variable() }
    }

    pub(super) fn variable(&self) -> &Variable {
        &self.variable
    }

    pub(super) fn put(&self, value: T) {
        *self.value() = Some(value);
    }

    /// # Panics
    /// If it is empty: the operation that fills it was to be pushed first.
    pub(super) fn take(&self) -> T {
        self.value().take().expect("an operation that was pushed before has left something")
    }

    fn value(&self) -> MutexGuard<'_, Option<T>> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Clone for VariableCell<T> {
    fn clone(&self) -> Self {
        VariableCell { value: Arc::clone(&self.value), variable: self.variable.clone() }
    }
}

impl<T> fmt::Debug for VariableCell<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VariableCell").field("is_full", &self.value().is_some()).finish_non_exhaustive()
    }
}
