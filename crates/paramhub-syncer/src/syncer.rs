//! One layer's syncer: Move, Send and Receive (Poseidon table 2).

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use paramhub_transport::ReceiveRegion;
use paramhub_worker::{FactorBuffers, FactorHandle, Handle, Job};

use crate::completion::CompletionVector;
use crate::error::SyncError;
use crate::exchange::FactorExchange;
use crate::layer::{LayerFactors, Outputs};

/// The job, exchange and completion vector that a syncer works with.
pub(crate) struct SyncContext<'a> {
    pub(crate) job: &'a Job,
    pub(crate) factors: Option<&'a FactorExchange>,
    pub(crate) completion: &'a Arc<CompletionVector>,
}

/// Exchanges one layer by the scheme that the coordinator planned for it, in memory that changes hands
/// instead of being copied.
pub(crate) struct Syncer {
    /// The position of its entry in the completion vector.
    number: usize,
    scheme: SchemeState,
    keys: Vec<KeyMemory>,
}

/// The layer's scheme, and the layer's request under way.
enum SchemeState {
    /// Each key's gradient goes to the hub, and its parameters come back.
    Hub,
    /// Factors go to all peers.
    Factors {
        /// The layer's position in the exchange.
        position: usize,
        under_way: Option<Receiver<Result<Outputs, SyncError>>>,
    },
    /// Factors go to the hub that owns the layer.
    FactorsToHub {
        /// Copies of the inputs and the output gradients, for the caller may reuse its own as soon as the
        /// call returns.
        memory: [Vec<u8>; 2],
        under_way: Option<FactorHandle<Vec<u8>, Vec<f32>>>,
    },
}

/// The memory of one key.
struct KeyMemory {
    key: u32,
    state: KeyState,
    /// The memory for the parameters under way, or the parameters that have come, until they are moved out.
    parameters: Vec<f32>,
    /// The memory of the last gradient.
    gradient: Vec<f32>,
}

enum KeyState {
    /// The initial parameters were not exchanged yet.
    Fresh,
    Idle,
    UnderWay(Handle<Vec<f32>, Vec<f32>>),
    /// Under way with the rest of its layer.
    UnderWayByFactors,
    Arrived,
}

impl Syncer {
    /// A syncer that goes through the hub.
    pub(crate) fn by_hub(number: usize, keys: impl IntoIterator<Item = u32>) -> Syncer {
        Syncer { number, scheme: SchemeState::Hub, keys: keys.into_iter().map(KeyMemory::new).collect() }
    }

    /// A syncer that sends factors to the peers, as the layer at this position of the exchange.
    pub(crate) fn by_factors(number: usize, keys: impl IntoIterator<Item = u32>, position: usize) -> Syncer {
        Syncer { scheme: SchemeState::Factors { position, under_way: None }, ..Syncer::by_hub(number, keys) }
    }

    /// A syncer that sends factors to the hub that owns the layer.
    pub(crate) fn by_factors_to_hub(number: usize, keys: impl IntoIterator<Item = u32>) -> Syncer {
        let scheme = SchemeState::FactorsToHub { memory: Default::default(), under_way: None };
        Syncer { scheme, ..Syncer::by_hub(number, keys) }
    }

    pub(crate) fn takes_factors(&self) -> bool {
        matches!(self.scheme, SchemeState::Factors { .. } | SchemeState::FactorsToHub { .. })
    }

    pub(crate) fn has_begun(&self, index: usize) -> bool {
        !matches!(self.keys[index].state, KeyState::Fresh)
    }

    /// Begins with rank 0's initial parameters of a key, or those of a checkpoint, at every rank.
    pub(crate) fn begin(
        &mut self,
        context: &SyncContext<'_>,
        index: usize,
        parameters: &mut Vec<f32>,
    ) -> Result<(), SyncError> {
        let key = &mut self.keys[index];
        let job = context.job;
        context.completion.begin(self.number);
        let begun = context.completion.waiting(|| key.begin(job, parameters));
        context.completion.end(self.number);
        begun?;
        let SchemeState::Factors { position, .. } = self.scheme else { return Ok(()) };
        // The peers update the parameters themselves; `key.parameters` has the size for those that come back.
        key.parameters.copy_from_slice(parameters);
        if self.keys.iter().all(|key| matches!(key.state, KeyState::Idle)) {
            let bias = self.keys.get(1).map_or(&[][..], |bias| &bias.parameters);
            context.exchange().initialise(position, &self.keys[0].parameters, bias, 0)?;
        }
        Ok(())
    }

    /// Send: sends a key's gradient as a fused PushPull.
    pub(crate) fn send(
        &mut self,
        context: &SyncContext<'_>,
        index: usize,
        gradient: Vec<f32>,
    ) -> Result<(), SyncError> {
        let takes_factors = self.takes_factors();
        let memory = &mut self.keys[index];
        let key = memory.key;
        if takes_factors {
            return Err(misused(context.job, key, "goes by its factors, and a gradient came"));
        }
        let KeyState::Idle = memory.state else {
            return Err(misused(
                context.job,
                key,
                "got a gradient without having moved the parameters that it belongs to",
            ));
        };
        let parameters = std::mem::take(&mut memory.parameters);
        let size = parameters.len();
        context.completion.begin(self.number);
        let handle = context.job.push_pull(key, gradient, parameters).inspect_err(|_| {
            context.completion.end(self.number);
            // The memory that was handed over is gone with the refusal.
            memory.parameters = vec![0.0; size];
        })?;
        let (completion, number) = (Arc::clone(context.completion), self.number);
        handle.on_complete(move |_| completion.end(number));
        memory.state = KeyState::UnderWay(handle);
        Ok(())
    }

    /// Send: sends the layer's factors, to all peers or to the hub.
    pub(crate) fn send_factors(
        &mut self,
        context: &SyncContext<'_>,
        factors: LayerFactors<'_>,
    ) -> Result<(), SyncError> {
        let first = self.keys[0].key;
        if !self.takes_factors() {
            return Err(misused(context.job, first, "does not go by its factors, and factors came"));
        }
        if let Some(key) = self.keys.iter().find(|key| !matches!(key.state, KeyState::Idle)) {
            return Err(misused(
                context.job,
                key.key,
                "got factors without having moved the parameters that they belong to",
            ));
        }
        let sizes: Vec<usize> = self.keys.iter().map(|key| key.parameters.len()).collect();
        let mut memory = self.keys.iter_mut().map(|key| std::mem::take(&mut key.parameters));
        let (weight, bias) = (memory.next().expect("a layer has a weight"), memory.next());
        context.completion.begin(self.number);
        if let Err(refused) = self.scheme.push_factors(context, self.number, first, factors, (weight, bias)) {
            context.completion.end(self.number);
            // The memory that was handed over is gone with the refusal.
            self.keys.iter_mut().zip(sizes).for_each(|(key, size)| key.parameters = vec![0.0; size]);
            return Err(refused);
        }
        self.keys.iter_mut().for_each(|key| key.state = KeyState::UnderWayByFactors);
        Ok(())
    }

    /// Receive: waits for everything of the layer that is under way. Returns whether anything was.
    pub(crate) fn receive(&mut self, context: &SyncContext<'_>) -> Result<bool, SyncError> {
        let Syncer { number, scheme, keys } = self;
        match scheme {
            SchemeState::Hub => {
                let was_under_way = keys.iter().any(|key| matches!(key.state, KeyState::UnderWay(_)));
                context.completion.waiting(|| {
                    keys.iter_mut().try_for_each(KeyMemory::receive)?;
                    context.completion.wait(*number);
                    Ok(was_under_way)
                })
            }
            SchemeState::Factors { under_way, .. } => {
                let Some(receiver) = under_way.take() else { return Ok(false) };
                let outputs =
                    context.completion.waiting(|| receiver.recv()).expect("every push is answered")?;
                let memory = |region: ReceiveRegion| region.into_owned().expect("it was given as a vector");
                arrive(keys, memory(outputs.weight), outputs.bias.map(memory));
                Ok(true)
            }
            SchemeState::FactorsToHub { memory, under_way } => {
                let Some(handle) = under_way.take() else { return Ok(false) };
                let done = context.completion.waiting(|| handle.wait())?;
                context.completion.wait(*number);
                *memory = [done.inputs, done.output_gradients];
                arrive(keys, done.weight, done.bias);
                Ok(true)
            }
        }
    }

    /// Move: swaps a key's parameters with memory of the same length, if they have come since they were last
    /// moved. Returns the memory of its last gradient.
    pub(crate) fn move_out(&mut self, index: usize, parameters: &mut Vec<f32>) -> Vec<f32> {
        let key = &mut self.keys[index];
        if let KeyState::Arrived = key.state {
            std::mem::swap(&mut key.parameters, parameters);
            key.state = KeyState::Idle;
        }
        std::mem::take(&mut key.gradient)
    }
}

impl SchemeState {
    fn push_factors(
        &mut self,
        context: &SyncContext<'_>,
        number: usize,
        weight_key: u32,
        factors: LayerFactors<'_>,
        (weight, bias): (Vec<f32>, Option<Vec<f32>>),
    ) -> Result<(), SyncError> {
        let completion = Arc::clone(context.completion);
        match self {
            SchemeState::Hub => unreachable!("checked by the caller"),
            SchemeState::Factors { position, under_way } => {
                let outputs =
                    Outputs { weight: ReceiveRegion::owned(weight), bias: bias.map(ReceiveRegion::owned) };
                let (sender, receiver) = sync_channel(1);
                context.exchange().push(*position, factors, outputs, move |outcome| {
                    completion.end(number);
                    // A run that has ended needs no parameters.
                    let _ = sender.send(outcome);
                })?;
                *under_way = Some(receiver);
            }
            SchemeState::FactorsToHub { memory, under_way } => {
                let copied = |memory: &mut Vec<u8>, values: &[u8]| {
                    let mut copy = std::mem::take(memory);
                    copy.clear();
                    copy.extend_from_slice(values);
                    copy
                };
                let [inputs, output_gradients] = memory;
                let buffers = FactorBuffers {
                    inputs: copied(inputs, factors.inputs),
                    output_gradients: copied(output_gradients, factors.output_gradients),
                    weight,
                    bias,
                };
                let handle = context.job.push_pull_factors(weight_key, buffers)?;
                handle.on_complete(move |_| completion.end(number));
                *under_way = Some(handle);
            }
        }
        Ok(())
    }
}

/// Stores a layer's parameters that have come.
fn arrive(keys: &mut [KeyMemory], weight: Vec<f32>, bias: Option<Vec<f32>>) {
    for (key, parameters) in keys.iter_mut().zip([Some(weight), bias].into_iter().flatten()) {
        key.parameters = parameters;
        key.state = KeyState::Arrived;
    }
}

impl KeyMemory {
    fn new(key: u32) -> KeyMemory {
        KeyMemory { key, state: KeyState::Fresh, parameters: Vec::new(), gradient: Vec::new() }
    }

    fn begin(&mut self, job: &Job, parameters: &mut Vec<f32>) -> Result<(), SyncError> {
        let memory = parameters.clone();
        self.parameters = if !job.settings().has_parameters() {
            // The hub keeps no parameters: what comes back is the mean or the sum.
            memory
        } else if job.rank() == 0 && job.resumed_step().is_none() {
            job.initialise(self.key, memory, 0)?.wait()?.0
        } else {
            let ((), arrived) = job.pull(self.key, memory)?.wait()?;
            std::mem::replace(parameters, arrived)
        };
        self.state = KeyState::Idle;
        Ok(())
    }

    fn receive(&mut self) -> Result<(), SyncError> {
        match std::mem::replace(&mut self.state, KeyState::Arrived) {
            KeyState::UnderWay(handle) => (self.gradient, self.parameters) = handle.wait()?,
            settled => self.state = settled,
        }
        Ok(())
    }
}

impl SyncContext<'_> {
    fn exchange(&self) -> &FactorExchange {
        self.factors.expect("a plan with layers by factors has their exchange")
    }
}

fn misused(job: &Job, key: u32, reason: &str) -> SyncError {
    let name = job.settings().keys.keys()[key as usize].name.as_str();
    SyncError::Misused { rank: job.rank(), layer: name.into(), reason: reason.into() }
}
