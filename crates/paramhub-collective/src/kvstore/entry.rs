//! A store's entry for one key.

use std::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use paramhub_core::codec::Dtype;
use paramhub_kernels::{Hyperparameters, Optimizer, Step, convert};
use paramhub_transport::ReceiveRegion;

use super::{Array, Key, OptimizerState};
use crate::engine::{Engine, Variable};

/// A key's memory: a buffer in which this rank's push becomes the sum of all ranks', and with an optimizer
/// the parameters made from it.
pub(super) struct Entry {
    pub(super) key: Key,
    /// The communication buffer (the paper's `comm_buf`): a collective works in place there, and nowhere
    /// else.
    pub(super) buffer: Array,
    /// The variable of a key's initial value and, with an optimizer, of its parameters. The two share it: for
    /// a pull they are the same.
    pub(super) parameters: Variable,
    weight: Mutex<Weight>,
    /// `true` if a push waits to be reduced, in a store that reduces at the pull.
    is_pending: AtomicBool,
    /// `true` if the buffer has a sum.
    has_sum: AtomicBool,
    /// The communicator of the key, where there are several.
    line: AtomicUsize,
    /// The group whose hyperparameters the key's updates have.
    group: AtomicU16,
}

struct Weight {
    /// The master parameters, in f32 whatever the key's type.
    values: Vec<f32>,
    state: Vec<f32>,
    updates: u64,
    /// Scratch for the gradient in f32, where the key has another type.
    gradient: Vec<f32>,
}

/// The optimizer of a key, and the number of ranks whose gradients are in a sum.
#[derive(Clone)]
pub(super) struct Updater {
    pub(super) optimizer: Arc<dyn Optimizer>,
    pub(super) hyperparameters: Hyperparameters,
    pub(super) ranks: u32,
}

impl Entry {
    pub(super) fn new(engine: &Engine, key: Key, dtype: Dtype, elements: usize) -> Entry {
        let region = match dtype {
            // Aligned, so that it is used without conversion.
            Dtype::F32 => ReceiveRegion::owned(vec![0.0_f32; elements]),
            Dtype::F16 | Dtype::BF16 => ReceiveRegion::owned(vec![0_u16; elements]),
        };
        let weight =
            Weight { values: vec![0.0; elements], state: Vec::new(), updates: 0, gradient: Vec::new() };
        Entry {
            key,
            buffer: Array::over(engine, region, dtype),
            parameters: engine.variable(),
            weight: Mutex::new(weight),
            is_pending: AtomicBool::new(false),
            has_sum: AtomicBool::new(false),
            line: AtomicUsize::new(0),
            group: AtomicU16::new(0),
        }
    }

    /// Makes the value in the buffer the key's initial value; in an operation that reads the buffer and mutates
    /// the parameters.
    pub(super) fn set_initial_value(&self) {
        let mut weight = self.weight.lock().unwrap_or_else(PoisonError::into_inner);
        self.buffer.read(|bytes| convert::decode(bytes, &mut weight.values, self.buffer.dtype().codec()));
    }

    /// Runs a step of the optimizer; in an operation that reads the buffer and mutates the parameters.
    pub(super) fn update(&self, updater: &Updater) {
        let mut weight = self.weight.lock().unwrap_or_else(PoisonError::into_inner);
        let Weight { values, state, updates, gradient } = &mut *weight;
        *updates += 1;
        state.resize(updater.optimizer.state_slots(&updater.hyperparameters) * values.len(), 0.0);
        let step = Step {
            hyperparameters: &updater.hyperparameters,
            number: *updates,
            contributions: updater.ranks,
            factor: 1.0,
            tensor: None,
        };
        self.buffer.read(|bytes| match bytemuck::try_cast_slice(bytes) {
            Ok(sum) if self.buffer.dtype() == Dtype::F32 => {
                updater.optimizer.apply_to_tensor(&step, values, sum, state)
            }
            _ => {
                gradient.resize(values.len(), 0.0);
                convert::decode(bytes, gradient, self.buffer.dtype().codec());
                updater.optimizer.apply_to_tensor(&step, values, gradient, state);
            }
        });
    }

    /// The optimizer's state; while no operation on the parameters is under way.
    pub(super) fn optimizer_state(&self, updater: &Updater) -> OptimizerState {
        let mut weight = self.weight.lock().unwrap_or_else(PoisonError::into_inner);
        let Weight { values, state, updates, .. } = &mut *weight;
        state.resize(updater.optimizer.state_slots(&updater.hyperparameters) * values.len(), 0.0);
        // A key without elements has slots, too.
        let slots = match values.len() {
            0 => vec![Vec::new(); updater.optimizer.state_slots(&updater.hyperparameters)],
            elements => state.chunks(elements).map(<[f32]>::to_vec).collect(),
        };
        OptimizerState { slots, updates: *updates }
    }

    /// Replaces the optimizer's state; while no operation on the parameters is under way.
    pub(super) fn set_optimizer_state(&self, restored: OptimizerState) {
        let mut weight = self.weight.lock().unwrap_or_else(PoisonError::into_inner);
        weight.state = restored.slots.concat();
        weight.updates = restored.updates;
    }

    /// Writes the parameters to `outs`; in an operation that reads the parameters and mutates `outs`.
    pub(super) fn give(&self, outs: &[Array]) {
        let weight = self.weight.lock().unwrap_or_else(PoisonError::into_inner);
        for out in outs {
            out.write(|out| convert::encode(&weight.values, out, self.buffer.dtype().codec()));
        }
    }

    /// Puts the key into a group.
    pub(super) fn set_group(&self, group: u16) {
        self.group.store(group, Ordering::Relaxed);
    }

    /// The key's group.
    pub(super) fn group(&self) -> u16 {
        self.group.load(Ordering::Relaxed)
    }

    /// Sets the key's communicator.
    pub(super) fn set_line(&self, line: usize) {
        self.line.store(line, Ordering::Relaxed);
    }

    /// The key's communicator.
    pub(super) fn line(&self) -> usize {
        self.line.load(Ordering::Relaxed)
    }

    /// Notes that a gradient has been pushed.
    pub(super) fn note_sum(&self) {
        self.has_sum.store(true, Ordering::Relaxed);
    }

    /// Returns whether a gradient was ever pushed.
    pub(super) fn has_sum(&self) -> bool {
        self.has_sum.load(Ordering::Relaxed)
    }

    /// Notes whether a push waits to be reduced; returns the previous note.
    pub(super) fn set_pending(&self, is_pending: bool) -> bool {
        self.is_pending.swap(is_pending, Ordering::Relaxed)
    }
}
