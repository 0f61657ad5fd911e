use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::aggregate::{Aggregator, Sum};
use crate::optimizer::{
    Adadelta, Adagrad, Adam, Averaged, Lamb, Lars, Lion, Mean, NAdam, Optimizer, RmsProp, Sgd, Undivided,
};

/// Optimizers and aggregators by the names that jobs ask for.
///
/// A hub gets one at its start; a program with kinds of its own registers them before that.
#[derive(Clone)]
pub struct Registry {
    optimizers: BTreeMap<String, Arc<dyn Optimizer>>,
    aggregators: BTreeMap<String, Arc<dyn Aggregator>>,
}

impl Registry {
    /// An empty registry.
    pub fn empty() -> Self {
        Self { optimizers: BTreeMap::new(), aggregators: BTreeMap::new() }
    }

    /// A registry with the built-in optimizers and the aggregator `sum`.
    pub fn with_builtins() -> Self {
        let optimizers: [(&str, Arc<dyn Optimizer>); 12] = [
            ("mean", Arc::new(Mean::new())),
            ("sum", Arc::new(Undivided::new())),
            ("sgd", Arc::new(Averaged::new(Sgd::new()))),
            ("adam", Arc::new(Averaged::new(Adam::new()))),
            ("adamw", Arc::new(Averaged::new(Adam::decoupled()))),
            ("adagrad", Arc::new(Averaged::new(Adagrad::new()))),
            ("rmsprop", Arc::new(Averaged::new(RmsProp::new()))),
            ("adadelta", Arc::new(Averaged::new(Adadelta::new()))),
            ("nadam", Arc::new(Averaged::new(NAdam::new()))),
            ("lion", Arc::new(Averaged::new(Lion::new()))),
            ("lars", Arc::new(Averaged::new(Lars::new()))),
            ("lamb", Arc::new(Averaged::new(Lamb::new()))),
        ];
        let aggregators: [(&str, Arc<dyn Aggregator>); 1] = [("sum", Arc::new(Sum::new()))];
        Self {
            optimizers: optimizers.map(|(name, optimizer)| (name.to_owned(), optimizer)).into(),
            aggregators: aggregators.map(|(name, aggregator)| (name.to_owned(), aggregator)).into(),
        }
    }

    /// Adds an optimizer under a new name.
    ///
    /// # Errors
    /// If the name is taken or empty; the registry is unchanged then.
    pub fn register_optimizer(
        &mut self,
        name: &str,
        optimizer: Arc<dyn Optimizer>,
    ) -> Result<(), RegistryError> {
        register(&mut self.optimizers, "optimizer", name, optimizer)
    }

    /// Adds an aggregator under a new name.
    ///
    /// # Errors
    /// If the name is taken or empty; the registry is unchanged then.
    pub fn register_aggregator(
        &mut self,
        name: &str,
        aggregator: Arc<dyn Aggregator>,
    ) -> Result<(), RegistryError> {
        register(&mut self.aggregators, "aggregator", name, aggregator)
    }

    /// The optimizer called `name`.
    ///
    /// # Errors
    /// If there is none; the error lists the existing names.
    pub fn optimizer(&self, name: &str) -> Result<Arc<dyn Optimizer>, RegistryError> {
        look_up(&self.optimizers, "optimizer", name)
    }

    /// The aggregator called `name`.
    ///
    /// # Errors
    /// If there is none; the error lists the existing names.
    pub fn aggregator(&self, name: &str) -> Result<Arc<dyn Aggregator>, RegistryError> {
        look_up(&self.aggregators, "aggregator", name)
    }

    /// The names of the optimizers, sorted.
    pub fn optimizer_names(&self) -> impl Iterator<Item = &str> {
        self.optimizers.keys().map(String::as_str)
    }

    /// The names of the aggregators, sorted.
    pub fn aggregator_names(&self) -> impl Iterator<Item = &str> {
        self.aggregators.keys().map(String::as_str)
    }
}

impl Default for Registry {
    fn default() -> Self {
        Self::with_builtins()
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry")
            .field("optimizers", &self.optimizers.keys())
            .field("aggregators", &self.aggregators.keys())
            .finish()
    }
}

/// The reason why a name is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// Nothing is registered under this name.
    #[error("no {kind} is called {name:?}; there are: {}", known.join(", "))]
    Unknown {
        /// `optimizer` or `aggregator`.
        kind: &'static str,
        /// The name asked for.
        name: String,
        /// The existing names, sorted.
        known: Vec<String>,
    },
    /// The name is taken.
    #[error("an {kind} called {name:?} is registered already; choose another name")]
    Duplicate {
        /// `optimizer` or `aggregator`.
        kind: &'static str,
        /// The name given.
        name: String,
    },
    /// The name is empty.
    #[error("an {kind} cannot be registered under an empty name")]
    Empty {
        /// `optimizer` or `aggregator`.
        kind: &'static str,
    },
}

fn register<T: ?Sized>(
    map: &mut BTreeMap<String, Arc<T>>,
    kind: &'static str,
    name: &str,
    value: Arc<T>,
) -> Result<(), RegistryError> {
    if name.is_empty() {
        return Err(RegistryError::Empty { kind });
    }
    if map.contains_key(name) {
        return Err(RegistryError::Duplicate { kind, name: name.to_owned() });
    }
    map.insert(name.to_owned(), value);
    Ok(())
}

fn look_up<T: ?Sized>(
    map: &BTreeMap<String, Arc<T>>,
    kind: &'static str,
    name: &str,
) -> Result<Arc<T>, RegistryError> {
    map.get(name).cloned().ok_or_else(|| RegistryError::Unknown {
        kind,
        name: name.to_owned(),
        known: map.keys().cloned().collect(),
    })
}
