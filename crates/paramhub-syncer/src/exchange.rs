//! Sends factors to all peers, receives theirs, and updates the layers.

mod config;
mod step;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use paramhub_core::combinations::{self, Feature, Features};
use paramhub_core::hyperparameters::{HyperparameterError, Hyperparameters, Schedule};
use paramhub_kernels::Optimizer;
use paramhub_kernels::factors::fingerprint;
use paramhub_mesh::{Mesh, MeshError};
use paramhub_transport::{BufferSlot, ReceiveRegion, lend};
use paramhub_worker::AbortHandle;
use rayon::{ThreadPool, ThreadPoolBuilder};

pub use config::{FactorConfig, FactorStatistics};

use crate::error::SyncError;
use crate::layer::{FactorLayer, LayerFactors, Outputs};
use crate::message::{self, FactorMessageHeader};
use crate::parameters::LayerParameters;

/// The time that the comparison of the processors may take once the mesh is joined.
const COMPARISON: Duration = Duration::from_secs(60);

/// The exchange of layers by factors between the workers.
///
/// All ranks push the same layers in the same order, as backpropagation reaches them. Threads may share it by
/// reference.
pub struct FactorExchange {
    inner: Arc<Inner>,
}

struct Inner {
    rank: u32,
    workers: u32,
    mesh: Mesh,
    hosts: Vec<u32>,
    reject_non_finite: bool,
    abort_handle: Option<AbortHandle>,
    optimizer: Arc<dyn Optimizer>,
    /// The hyperparameters of each group. Rank 0's are used.
    schedules: Mutex<Vec<Schedule>>,
    layers: Vec<FactorLayer>,
    states: Vec<Mutex<LayerState>>,
    pool: ThreadPool,
    failure: OnceLock<SyncError>,
    /// Bytes of this rank's messages, each counted once.
    bytes: AtomicU64,
    rebuilding_ns: AtomicU64,
    updates: AtomicU64,
}

/// The state of one layer.
struct LayerState {
    parameters: LayerParameters,
    /// Every rank's message of the step.
    messages: Vec<BufferSlot<Vec<u8>>>,
    /// All ranks' samples, in rank order.
    inputs: Vec<f32>,
    output_gradients: Vec<f32>,
    step: u32,
    is_under_way: bool,
}

type UpdateCallback = Box<dyn FnOnce(Result<Outputs, SyncError>) + Send>;

impl FactorExchange {
    /// Makes an exchange of these layers, whose parameters are zeros until they are
    /// [initialised](Self::initialise). All ranks call it with the same layers; it waits for them.
    ///
    /// # Errors
    /// If a layer has no elements or too many, the optimizer cannot run on parts of a layer, threads cannot
    /// be started, or the ranks' processors round differently.
    pub fn new(config: FactorConfig, layers: Vec<FactorLayer>) -> Result<FactorExchange, SyncError> {
        let FactorConfig {
            mesh,
            optimizer,
            hyperparameters,
            threads,
            hosts,
            reject_non_finite,
            abort_handle,
        } = config;
        let (rank, workers) = (mesh.rank(), mesh.size());
        layers.iter().try_for_each(|layer| check_layer(rank, workers, layer, hyperparameters.len()))?;
        if let Some(layer) = layers.first() {
            let asked = Features::of([
                (Feature::Factors, true),
                (Feature::WholeChunkOptimizer, optimizer.needs_whole_chunks()),
            ]);
            combinations::check(asked).map_err(|conflict| misused(rank, layer, conflict.to_string()))?;
        }
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|number| format!("paramhub-syncer-{number}"))
            .build()
            .map_err(|error| SyncError::Threads { rank, reason: error.to_string().into() })?;
        compare(&mesh, &[fingerprint()])?.map_or(Ok(()), |peer| Err(SyncError::Rounding { rank, peer }))?;
        let slots = hyperparameters.iter().map(|group| optimizer.state_slots(group)).max().unwrap_or(0);
        let states = layers.iter().map(|layer| Mutex::new(LayerState::new(layer, slots, workers))).collect();
        let schedules = hyperparameters.into_iter().map(Schedule::new).collect();
        let inner = Inner {
            rank,
            workers,
            mesh,
            hosts,
            reject_non_finite,
            abort_handle,
            optimizer,
            schedules: Mutex::new(schedules),
            layers,
            states,
            pool,
            failure: OnceLock::new(),
            bytes: AtomicU64::new(0),
            rebuilding_ns: AtomicU64::new(0),
            updates: AtomicU64::new(0),
        };
        Ok(FactorExchange { inner: Arc::new(inner) })
    }

    /// The layers, in the order in which they are numbered.
    pub fn layers(&self) -> &[FactorLayer] {
        &self.inner.layers
    }

    /// Sets a layer's initial parameters, which must be equal at all ranks, as of step `step`, with fresh
    /// optimizer state. `bias` is empty where the layer has none.
    ///
    /// # Errors
    /// If the lengths are not the layer's, or an exchange of the layer is under way.
    pub fn initialise(&self, layer: usize, weight: &[f32], bias: &[f32], step: u32) -> Result<(), SyncError> {
        let (spec, mut state) = self.inner.idle(layer)?;
        let (elements, biases) = (state.parameters.weight().len(), spec.bias_elements());
        if (weight.len(), bias.len()) != (elements, biases) {
            let (weights, given) = (weight.len(), bias.len());
            let reason =
                format!("takes {elements} and {biases} initial parameters, not {weights} and {given}");
            return Err(misused(self.inner.rank, spec, reason));
        }
        state.parameters.begin(weight, bias, step.into());
        state.step = step;
        Ok(())
    }

    /// A layer's weight and bias, in f32, and the number of updates they have had.
    ///
    /// # Errors
    /// If an exchange of the layer is under way.
    pub fn parameters(&self, layer: usize) -> Result<(Vec<f32>, Vec<f32>, u64), SyncError> {
        let (_, state) = self.inner.idle(layer)?;
        let parameters = &state.parameters;
        Ok((parameters.weight().to_vec(), parameters.bias().to_vec(), parameters.updates))
    }

    /// The step that a layer's next push contributes to.
    ///
    /// # Errors
    /// If there is no such layer.
    pub fn next_step(&self, layer: usize) -> Result<u32, SyncError> {
        self.inner.spec(layer)?;
        let state = lock(&self.inner.states[layer]);
        Ok(state.step + u32::from(state.is_under_way))
    }

    /// The number of updates that a layer has had.
    ///
    /// # Errors
    /// If an exchange of the layer is under way.
    pub fn updates(&self, layer: usize) -> Result<u64, SyncError> {
        Ok(self.inner.idle(layer)?.1.parameters.updates)
    }

    /// One slot of the optimizer's state, of weight and bias, as a hub would keep it.
    ///
    /// # Errors
    /// If an exchange of the layer is under way, or the optimizer has no such slot.
    pub fn state(&self, layer: usize, slot: usize) -> Result<(Vec<f32>, Vec<f32>), SyncError> {
        let (spec, state) = self.inner.idle(layer)?;
        self.inner.check_slot(spec, &state, slot)?;
        Ok(state.parameters.state(slot))
    }

    /// Sets one slot of the optimizer's state, after [`initialise`](Self::initialise). `updates` is the
    /// number of updates it has had.
    ///
    /// # Errors
    /// If an exchange of the layer is under way, the optimizer has no such slot, or the lengths are not the
    /// layer's.
    pub fn restore_state(
        &self,
        layer: usize,
        slot: usize,
        weight: &[f32],
        bias: &[f32],
        updates: u64,
    ) -> Result<(), SyncError> {
        let (spec, mut state) = self.inner.idle(layer)?;
        self.inner.check_slot(spec, &state, slot)?;
        if (weight.len(), bias.len()) != (state.parameters.weight().len(), spec.bias_elements()) {
            let reason = format!("its state is not {} and {} numbers", weight.len(), bias.len());
            return Err(misused(self.inner.rank, spec, reason));
        }
        state.parameters.restore_state(slot, weight, bias);
        state.parameters.updates = updates;
        Ok(())
    }

    /// Changes the hyperparameters of a group from `first_step` on. Rank 0's call holds for all: the other
    /// ranks receive the change with rank 0's factors.
    ///
    /// # Errors
    /// If the optimizer cannot go on with them, or too many changes wait for their steps.
    pub fn set_hyperparameters(
        &self,
        group: u16,
        first_step: u32,
        hyperparameters: Hyperparameters,
    ) -> Result<(), HyperparameterError> {
        let mut schedules = lock(&self.inner.schedules);
        let Some(schedule) = schedules.get_mut(usize::from(group)) else { return Ok(()) };
        self.inner.optimizer.check_change(schedule.at(0), &hyperparameters)?;
        schedule.change(first_step, first_step, hyperparameters)
    }

    /// Sends this worker's factors of a layer's next step to all peers. When theirs have come, the exchange
    /// updates the layer, writes its new parameters into `outputs`, and calls `done` with them on a thread of
    /// its own. If they do not come, it calls `done` with the reason. The memory of the factors is free again
    /// when this returns.
    ///
    /// A worker may have fewer samples than the layer has room for, or none. The gradient is divided by the
    /// number of workers, as at a hub. For the mean over all samples, divide the output gradients by the
    /// number of this worker's samples.
    ///
    /// # Errors
    /// If the previous step is still under way, lengths do not fit, the factors hold a NaN and the job rejects
    /// such gradients, or the exchange has failed.
    pub fn push(
        &self,
        layer: usize,
        factors: LayerFactors<'_>,
        outputs: Outputs,
        done: impl FnOnce(Result<Outputs, SyncError>) + Send + 'static,
    ) -> Result<(), SyncError> {
        let inner = &self.inner;
        if let Some(failure) = inner.failure.get() {
            return Err(failure.clone());
        }
        let (spec, mut state) = inner.idle(layer)?;
        let samples = inner.check(spec, &state, factors, &outputs)?;
        inner.check_finite(spec, factors)?;
        let step = state.step;
        let hyperparameters = {
            let schedules = lock(&inner.schedules);
            spec.groups.map(|group| *schedules[usize::from(group)].at(step))
        };
        let header = FactorMessageHeader { step, samples, hyperparameters };
        let slot = &state.messages[inner.rank as usize];
        let mut own = slot.take().expect("messages are returned between steps");
        message::write(spec, &header, factors, &mut own);
        slot.put(own);
        let regions = state
            .messages
            .iter()
            .map(|slot| ReceiveRegion::owned(slot.lend().expect("messages are returned between steps")));
        let handle = inner.mesh.allgather_between_hosts(None, regions.collect(), &inner.hosts)?;
        state.is_under_way = true;
        drop(state);
        let (inner, done): (_, UpdateCallback) = (Arc::clone(inner), Box::new(done));
        handle.on_complete(move |arrived| {
            let arrived = arrived.clone();
            let task = Arc::clone(&inner);
            inner.pool.spawn(move || task.finish(layer, arrived, outputs, done));
        });
        Ok(())
    }

    /// Returns the counters since the beginning.
    pub fn statistics(&self) -> FactorStatistics {
        let inner = &self.inner;
        // Messages of a layer are equally long at all ranks.
        let bytes = inner.bytes.load(Ordering::Relaxed);
        FactorStatistics {
            bytes_sent: bytes * inner.mesh.blocks_sent_between_hosts(&inner.hosts) as u64,
            bytes_received: bytes * u64::from(inner.workers - 1),
            rebuilding: Duration::from_nanos(inner.rebuilding_ns.load(Ordering::Relaxed)),
            updates: inner.updates.load(Ordering::Relaxed),
        }
    }

    /// Returns the reason why nothing more can be pushed, if the exchange has failed.
    pub fn failure(&self) -> Option<SyncError> {
        self.inner.failure.get().cloned().or_else(|| self.inner.mesh.failure().map(SyncError::from))
    }

    /// Ends the exchange at once, for the peers as well, which receive the reason.
    pub fn abort(&self, reason: &str) {
        self.inner.mesh.abort(reason);
    }

    /// Waits until nothing is under way, here and at the peers, and leaves.
    ///
    /// # Errors
    /// If the exchange has failed, or takes longer.
    pub fn leave(&self, timeout: Duration) -> Result<(), SyncError> {
        Ok(self.inner.mesh.leave(timeout)?)
    }
}

impl fmt::Debug for FactorExchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FactorExchange").field("layers", &self.inner.layers).finish_non_exhaustive()
    }
}

impl Inner {
    /// A layer that has no exchange under way.
    fn idle(&self, layer: usize) -> Result<(&FactorLayer, MutexGuard<'_, LayerState>), SyncError> {
        let spec = self.spec(layer)?;
        let state = lock(&self.states[layer]);
        if state.is_under_way {
            return Err(misused(
                self.rank,
                spec,
                "its last step is still under way: wait for it first".into(),
            ));
        }
        Ok((spec, state))
    }

    fn spec(&self, layer: usize) -> Result<&FactorLayer, SyncError> {
        self.layers.get(layer).ok_or_else(|| {
            let reason = format!("does not exist: there are {}, counted from 0", self.layers.len());
            let layer = layer.to_string().into();
            SyncError::Misused { rank: self.rank, layer, reason: reason.into() }
        })
    }

    /// The number of samples in these factors, if they fit the layer.
    fn check(
        &self,
        spec: &FactorLayer,
        state: &LayerState,
        factors: LayerFactors<'_>,
        outputs: &Outputs,
    ) -> Result<u32, SyncError> {
        let (rows, columns) = spec.shape;
        let width = spec.codec.bytes();
        let (inputs, gradients) = (factors.inputs.len(), factors.output_gradients.len());
        let samples = inputs / (columns * width);
        if inputs != samples * columns * width || gradients != samples * rows * width {
            let reason = format!(
                "takes rows of {columns} inputs and as many of {rows} output gradients in {}, not {inputs} and {gradients} bytes",
                spec.codec
            );
            return Err(misused(self.rank, spec, reason));
        }
        if samples > spec.samples {
            let reason = format!(
                "takes {} samples a step at most, not {samples}: say how many there may be when the job begins, or let it go \
                 through the hub",
                spec.samples
            );
            return Err(misused(self.rank, spec, reason));
        }
        let width = spec.parameter_codec.bytes();
        let (weight, bias) = (state.parameters.weight().len() * width, spec.bias_elements() * width);
        let given = outputs.weight.bytes().len();
        let given_bias = outputs.bias.as_ref().map(|bias| bias.bytes().len());
        if given != weight || given_bias.is_some_and(|given| given != bias) {
            let reason = format!(
                "gives {weight} and {bias} bytes of parameters, but there is room for {given} and {}",
                given_bias.unwrap_or(0)
            );
            return Err(misused(self.rank, spec, reason));
        }
        Ok(u32::try_from(samples).unwrap_or(u32::MAX))
    }

    fn check_slot(&self, spec: &FactorLayer, state: &LayerState, slot: usize) -> Result<(), SyncError> {
        let slots = state.parameters.slots();
        if slot < slots {
            return Ok(());
        }
        Err(misused(
            self.rank,
            spec,
            format!("has {slots} values of state a parameter, and none numbered {slot}"),
        ))
    }
}

impl LayerState {
    fn new(layer: &FactorLayer, slots: usize, workers: u32) -> LayerState {
        let bytes = message::bytes(layer).expect("checked before");
        let samples = layer.samples * workers as usize;
        LayerState {
            parameters: LayerParameters::new(layer, slots),
            messages: (0..workers).map(|_| BufferSlot::new(vec![0; bytes])).collect(),
            inputs: vec![0.0; samples * layer.shape.1],
            output_gradients: vec![0.0; samples * layer.shape.0],
            step: 0,
            is_under_way: false,
        }
    }
}

fn check_layer(rank: u32, workers: u32, layer: &FactorLayer, groups: usize) -> Result<(), SyncError> {
    let (rows, columns) = layer.shape;
    let counted = layer.weight_elements().filter(|&elements| elements <= isize::MAX as usize / 64);
    let all = message::bytes(layer).and_then(|bytes| bytes.checked_mul(2 * workers as usize));
    let reason = if rows == 0 || columns == 0 || layer.samples == 0 {
        format!("has {rows} outputs, {columns} inputs and {} samples: none may be 0", layer.samples)
    } else if counted.is_none() || all.is_none_or(|bytes| bytes > isize::MAX as usize) {
        "is too large".to_owned()
    } else if let Some(group) = layer.groups.iter().find(|group| usize::from(**group) >= groups) {
        format!("is in group {group} of the optimizer, which has {groups}, counted from 0")
    } else {
        return Ok(());
    };
    Err(misused(rank, layer, reason))
}

/// The first peer whose numbers differ from this rank's.
fn compare(mesh: &Mesh, own: &[u64]) -> Result<Option<u32>, MeshError> {
    let mut all = vec![0_u64; own.len() * mesh.size() as usize];
    lend(|lending| {
        let outputs = all.chunks_exact_mut(own.len()).map(|numbers| lending.receive(numbers)).collect();
        let handle = mesh.allgather(Some(lending.send(own)), outputs)?;
        match handle.wait_timeout(COMPARISON) {
            Ok(true) => Ok(()),
            Ok(false) => {
                mesh.abort("the ranks did not compare their processors in time");
                handle.wait()
            }
            Err(error) => Err(error),
        }
    })?;
    let differs = all.chunks_exact(own.len()).position(|numbers| numbers != own);
    Ok(differs.map(|rank| rank as u32))
}

fn misused(rank: u32, layer: &FactorLayer, reason: String) -> SyncError {
    SyncError::Misused { rank, layer: Arc::clone(&layer.name), reason: reason.into() }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
