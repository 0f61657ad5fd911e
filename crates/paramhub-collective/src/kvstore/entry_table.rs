//! The table of entries that every store has: keys, their memory, and the operations on this rank's memory
//! alone.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use paramhub_core::limits::GROUPS_MAX;
use paramhub_kernels::{Hyperparameters, Optimizer, Registry};

use super::entry::{Entry, Updater};
use super::{Array, Key, OptimizerState, StoreError};
use crate::engine::{Engine, Kind};

pub(super) const NO_VALUE: &str = "it has no value yet: give it one with init";
pub(super) const HAS_VALUE: &str = "it has its value already";
pub(super) const TOO_LATE: &str = "the optimizer is chosen before the first push";
pub(super) const NO_OPTIMIZER: &str = "there is no optimizer";
pub(super) const STATE_TOO_LATE: &str = "the optimizer's state is restored before the first push";

pub(super) struct EntryTable {
    pub(super) engine: Arc<Engine>,
    registry: Registry,
    ranks: u32,
    state: Mutex<TableState>,
}

#[derive(Default)]
struct TableState {
    entries: HashMap<Key, Arc<Entry>>,
    /// The entries in the order of `init`, which is the same at all ranks.
    order: Vec<Arc<Entry>>,
    optimizer: Option<ChosenOptimizer>,
    has_pushed: bool,
}

/// The optimizer of a store, with the hyperparameters of each group.
struct ChosenOptimizer {
    optimizer: Arc<dyn Optimizer>,
    groups: Vec<Hyperparameters>,
}

impl EntryTable {
    pub(super) fn new(engine: Arc<Engine>, registry: Registry, ranks: u32) -> EntryTable {
        EntryTable { engine, registry, ranks, state: Mutex::default() }
    }

    /// Adds a new key's entry, and pushes the copy of this rank's value into its buffer. The store then
    /// replaces that by rank 0's value, and calls [`set_initial_value`](Self::set_initial_value).
    pub(super) fn add(&self, key: &Key, value: &Array) -> Result<Arc<Entry>, StoreError> {
        let entry = {
            let TableState { entries, order, .. } = &mut *self.state();
            let Slot::Vacant(slot) = entries.entry(key.clone()) else {
                return Err(wrong(key, HAS_VALUE.into()));
            };
            let entry = Entry::new(&self.engine, key.clone(), value.dtype(), value.elements());
            order.push(Arc::clone(slot.insert(Arc::new(entry))));
            Arc::clone(&order[order.len() - 1])
        };
        self.sum_into_buffer(&entry, std::slice::from_ref(value), 0)?;
        Ok(entry)
    }

    /// Pushes the operation that makes the value in an added entry's buffer the key's initial value.
    pub(super) fn set_initial_value(&self, entry: &Arc<Entry>) -> Result<(), StoreError> {
        let here = Arc::clone(entry);
        self.engine
            .operation(format!("init {}", entry.key), Kind::Copy)
            .reads([entry.buffer.variable()])
            .mutates([&entry.parameters])
            .push(move || -> Result<(), String> {
                here.set_initial_value();
                Ok(())
            })?;
        Ok(())
    }

    /// The entry of a key, if arrays of this type and length fit it.
    pub(super) fn entry(&self, key: &Key, arrays: &[Array]) -> Result<Arc<Entry>, StoreError> {
        let entry = self.state().entries.get(key).cloned();
        let entry = entry.ok_or_else(|| no_value(key))?;
        check(key, &entry.buffer, arrays)?;
        Ok(entry)
    }

    /// Pushes an operation that adds up this rank's arrays in the communication buffer.
    pub(super) fn sum_into_buffer(
        &self,
        entry: &Arc<Entry>,
        values: &[Array],
        priority: i32,
    ) -> Result<(), StoreError> {
        sum_into_buffer(&self.engine, &entry.key, &entry.buffer, values, priority)
    }

    /// Pushes the optimizer's step on the sum in the buffer, if there is an optimizer.
    pub(super) fn update(&self, entry: &Arc<Entry>, priority: i32) -> Result<(), StoreError> {
        entry.note_sum();
        self.state().has_pushed = true;
        let Some(updater) = self.updater(entry) else { return Ok(()) };
        let here = Arc::clone(entry);
        self.engine
            .operation(format!("update {}", entry.key), Kind::Compute)
            .reads([entry.buffer.variable()])
            .mutates([&entry.parameters])
            .priority(priority)
            .push(move || -> Result<(), String> {
                here.update(&updater);
                Ok(())
            })?;
        Ok(())
    }

    /// All entries, in the order that is the same at all ranks.
    pub(super) fn entries(&self) -> Vec<Arc<Entry>> {
        self.state().order.clone()
    }

    /// Returns whether values are parameters.
    pub(super) fn has_optimizer(&self) -> bool {
        self.state().optimizer.is_some()
    }

    /// Returns whether a pull gets the sum itself.
    pub(super) fn gives_sums(&self, entry: &Entry) -> bool {
        entry.has_sum() && !self.has_optimizer()
    }

    /// Pushes an operation that copies the key's value to `outs`.
    pub(super) fn copy_out(
        &self,
        entry: &Arc<Entry>,
        outs: &[Array],
        priority: i32,
    ) -> Result<(), StoreError> {
        if self.gives_sums(entry) {
            return copy_back(&self.engine, &entry.key, &entry.buffer, outs, priority);
        }
        let (here, theirs) = (Arc::clone(entry), outs.to_vec());
        self.engine
            .operation(format!("copy back {}", entry.key), Kind::Copy)
            .reads([&entry.parameters])
            .mutates(outs.iter().map(Array::variable))
            .priority(priority)
            .push(move || -> Result<(), String> {
                here.give(&theirs);
                Ok(())
            })?;
        Ok(())
    }

    pub(super) fn set_optimizer(
        &self,
        name: &str,
        hyperparameters: Hyperparameters,
    ) -> Result<(), StoreError> {
        let optimizer = self.registry.optimizer(name);
        let optimizer = optimizer.map_err(|error| StoreError::Options(error.to_string()))?;
        let mut state = self.state();
        if state.has_pushed {
            return Err(StoreError::Sequence(TOO_LATE));
        }
        optimizer.check(&hyperparameters).map_err(|error| StoreError::Options(error.to_string()))?;
        state.optimizer = Some(ChosenOptimizer { optimizer, groups: vec![hyperparameters] });
        state.order.iter().for_each(|entry| entry.set_group(0));
        Ok(())
    }

    pub(super) fn add_group(
        &self,
        keys: &[Key],
        hyperparameters: Hyperparameters,
    ) -> Result<u16, StoreError> {
        let mut state = self.state();
        if state.has_pushed {
            return Err(StoreError::Sequence(TOO_LATE));
        }
        let entries = keys.iter().map(|key| state.entries.get(key).cloned().ok_or_else(|| no_value(key)));
        let entries = entries.collect::<Result<Vec<_>, _>>()?;
        let chosen = state.optimizer.as_mut().ok_or(StoreError::Sequence(NO_OPTIMIZER))?;
        let checked = chosen.optimizer.check(&hyperparameters);
        checked.map_err(|error| StoreError::Options(error.to_string()))?;
        let group = next_group(chosen.groups.len())?;
        chosen.groups.push(hyperparameters);
        entries.iter().for_each(|entry| entry.set_group(group));
        Ok(group)
    }

    pub(super) fn set_hyperparameters(
        &self,
        group: u16,
        hyperparameters: Hyperparameters,
    ) -> Result<(), StoreError> {
        let mut state = self.state();
        let chosen = state.optimizer.as_mut().ok_or(StoreError::Sequence(NO_OPTIMIZER))?;
        let checked = chosen.optimizer.check(&hyperparameters);
        checked.map_err(|error| StoreError::Options(error.to_string()))?;
        let groups = chosen.groups.len();
        let changed = chosen.groups.get_mut(usize::from(group)).ok_or_else(|| no_group(group, groups))?;
        *changed = hyperparameters;
        Ok(())
    }

    pub(super) fn optimizer_state(&self, key: &Key) -> Result<OptimizerState, StoreError> {
        let entry = self.known(key)?;
        self.engine.wait_for_all()?;
        let updater = self.updater(&entry).ok_or(StoreError::Sequence(NO_OPTIMIZER))?;
        Ok(entry.optimizer_state(&updater))
    }

    pub(super) fn set_optimizer_state(&self, key: &Key, restored: OptimizerState) -> Result<(), StoreError> {
        let entry = self.known(key)?;
        if self.state().has_pushed {
            return Err(StoreError::Sequence(STATE_TOO_LATE));
        }
        let updater = self.updater(&entry).ok_or(StoreError::Sequence(NO_OPTIMIZER))?;
        let Updater { optimizer, hyperparameters, .. } = updater;
        check_state(key, &restored, optimizer.state_slots(&hyperparameters), entry.buffer.elements())?;
        self.engine.wait_for_all()?;
        entry.set_optimizer_state(restored);
        Ok(())
    }

    fn known(&self, key: &Key) -> Result<Arc<Entry>, StoreError> {
        self.state().entries.get(key).cloned().ok_or_else(|| no_value(key))
    }

    /// The optimizer of a key with its hyperparameters as they are now; `None` if the store has none.
    fn updater(&self, entry: &Entry) -> Option<Updater> {
        let state = self.state();
        let ChosenOptimizer { optimizer, groups } = state.optimizer.as_ref()?;
        let hyperparameters = groups[usize::from(entry.group())];
        Some(Updater { optimizer: Arc::clone(optimizer), hyperparameters, ranks: self.ranks })
    }

    fn state(&self) -> MutexGuard<'_, TableState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn wrong(key: &Key, reason: String) -> StoreError {
    StoreError::Key { key: key.clone(), reason }
}

pub(super) fn no_value(key: &Key) -> StoreError {
    wrong(key, NO_VALUE.into())
}

pub(super) fn no_group(group: u16, groups: usize) -> StoreError {
    StoreError::Options(format!("there is no group {group} of keys: there are {groups}, counted from 0"))
}

/// The number of the group that is added to so many.
pub(super) fn next_group(groups: usize) -> Result<u16, StoreError> {
    match groups < GROUPS_MAX {
        true => Ok(groups as u16),
        false => Err(StoreError::Options(format!("a store has at most {GROUPS_MAX} groups of keys"))),
    }
}

/// Checks that a key's state has the optimizer's slots, each with a value for each element.
pub(super) fn check_state(
    key: &Key,
    state: &OptimizerState,
    slots: usize,
    elements: usize,
) -> Result<(), StoreError> {
    if state.slots.len() == slots && state.slots.iter().all(|slot| slot.len() == elements) {
        return Ok(());
    }
    let lengths: Vec<_> = state.slots.iter().map(Vec::len).collect();
    Err(wrong(key, format!("the optimizer's state is {slots} slots of {elements} values, not {lengths:?}")))
}

/// Checks that arrays can be pushed to, or pulled from, a key with this buffer.
pub(super) fn check(key: &Key, buffer: &Array, arrays: &[Array]) -> Result<(), StoreError> {
    let (dtype, elements) = (buffer.dtype(), buffer.elements());
    let other = arrays.iter().find(|array| array.dtype() != dtype || array.elements() != elements);
    match (arrays, other) {
        ([], _) => Err(wrong(key, "there is no array to push, or to pull into".into())),
        (_, None) => Ok(()),
        (_, Some(other)) => {
            let (theirs, count) = (other.dtype(), other.elements());
            let reason = format!("its value is {elements} of {dtype}, the array is {count} of {theirs}");
            Err(wrong(key, reason))
        }
    }
}

/// Pushes an operation that adds up a rank's arrays in a buffer.
pub(super) fn sum_into_buffer(
    engine: &Engine,
    key: &Key,
    buffer: &Array,
    values: &[Array],
    priority: i32,
) -> Result<(), StoreError> {
    let (into, own) = (buffer.clone(), values.to_vec());
    engine
        .operation(format!("copy {key}"), Kind::Copy)
        .reads(values.iter().map(Array::variable))
        .mutates([buffer.variable()])
        .priority(priority)
        .push(move || -> Result<(), String> {
            into.gather(&own);
            Ok(())
        })?;
    Ok(())
}

/// Pushes an operation that copies a buffer to `outs`.
pub(super) fn copy_back(
    engine: &Engine,
    key: &Key,
    buffer: &Array,
    outs: &[Array],
    priority: i32,
) -> Result<(), StoreError> {
    let (from, theirs) = (buffer.clone(), outs.to_vec());
    engine
        .operation(format!("copy back {key}"), Kind::Copy)
        .reads([buffer.variable()])
        .mutates(outs.iter().map(Array::variable))
        .priority(priority)
        .push(move || -> Result<(), String> {
            from.copy_to(&theirs);
            Ok(())
        })?;
    Ok(())
}
