//! One layer's syncer: Move, Send and Receive (Poseidon table 2).

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use paramhub_transport::ReceiveRegion;
use paramhub_worker::{FactorBuffers, FactorHandle, Handle, Job};

use crate::completion::CompletionVector;
use crate::error::SyncError;
use crate::exchange::FactorExchange;
use crate::layer::{LayerFactors, Outputs};

/// What a syncer needs of its surroundings.
pub(crate) struct Client<'a> {
    pub(crate) job: &'a Job,
    pub(crate) factors: Option<&'a FactorExchange>,
    pub(crate) completion: &'a Arc<CompletionVector>,
}

/// Exchanges one layer the way that the coordinator planned for it, in memory that changes hands instead of being copied.
pub(crate) struct Syncer {
    /// Its entry in the completion vector.
    number: usize,
    way: Way,
    keys: Vec<KeyMemory>,
}

/// How, and what is under way of it.
enum Way {
    /// Each key's gradient to the hub and its parameters back.
    Hub,
    /// Factors to all peers.
    Factors {
        /// The layer's position in the exchange.
        position: usize,
        under_way: Option<Receiver<Result<Outputs, SyncError>>>,
    },
    /// Factors to the hub that has the layer.
    FactorsToHub {
        /// Copies of the factors, for the caller's own are free again as soon as they have been given: inputs, output gradients.
        memory: [Vec<u8>; 2],
        under_way: Option<FactorHandle<Vec<u8>, Vec<f32>>>,
    },
}

/// What belongs to one key.
struct KeyMemory {
    key: u32,
    state: KeyState,
    /// For the parameters to come; those that have come, until they are moved out.
    parameters: Vec<f32>,
    /// What the last gradient lay in.
    gradient: Vec<f32>,
}

enum KeyState {
    /// The initial parameters were not exchanged yet.
    Fresh,
    Idle,
    UnderWay(Handle<Vec<f32>, Vec<f32>>),
    /// With the rest of its layer.
    UnderWayByFactors,
    Arrived,
}

impl Syncer {
    /// Through the hub.
    pub(crate) fn by_hub(number: usize, keys: impl IntoIterator<Item = u32>) -> Syncer {
        Syncer { number, way: Way::Hub, keys: keys.into_iter().map(KeyMemory::new).collect() }
    }

    /// By factors, as the layer at this position of the exchange.
    pub(crate) fn by_factors(number: usize, keys: impl IntoIterator<Item = u32>, position: usize) -> Syncer {
        Syncer { way: Way::Factors { position, under_way: None }, ..Syncer::by_hub(number, keys) }
    }

    /// With factors to the hub that has the layer.
    pub(crate) fn by_factors_to_hub(number: usize, keys: impl IntoIterator<Item = u32>) -> Syncer {
        let way = Way::FactorsToHub { memory: Default::default(), under_way: None };
        Syncer { way, ..Syncer::by_hub(number, keys) }
    }

    pub(crate) fn takes_factors(&self) -> bool {
        matches!(self.way, Way::Factors { .. } | Way::FactorsToHub { .. })
    }

    pub(crate) fn has_begun(&self, place: usize) -> bool {
        !matches!(self.keys[place].state, KeyState::Fresh)
    }

    /// Rank 0's initial parameters of a key, or those of a checkpoint, become everybody's.
    pub(crate) fn begin(
        &mut self,
        client: &Client<'_>,
        place: usize,
        parameters: &mut Vec<f32>,
    ) -> Result<(), SyncError> {
        let key = &mut self.keys[place];
        let job = client.job;
        client.completion.begin(self.number);
        let begun = client.completion.waiting(|| key.begin(job, parameters));
        client.completion.end(self.number);
        begun?;
        let Way::Factors { position, .. } = self.way else { return Ok(()) };
        // The peers go on with them themselves; the memory has been sized for what comes back.
        key.parameters.copy_from_slice(parameters);
        if self.keys.iter().all(|key| matches!(key.state, KeyState::Idle)) {
            let bias = self.keys.get(1).map_or(&[][..], |bias| &bias.parameters);
            client.exchange().initialise(position, &self.keys[0].parameters, bias, 0)?;
        }
        Ok(())
    }

    /// Send: a key's gradient leaves as a fused PushPull.
    pub(crate) fn send(
        &mut self,
        client: &Client<'_>,
        place: usize,
        gradient: Vec<f32>,
    ) -> Result<(), SyncError> {
        let takes_factors = self.takes_factors();
        let memory = &mut self.keys[place];
        let key = memory.key;
        if takes_factors {
            return Err(misplaced(client.job, key, "goes by its factors, and a gradient came"));
        }
        let KeyState::Idle = memory.state else {
            return Err(misplaced(
                client.job,
                key,
                "got a gradient without having moved the parameters that it belongs to",
            ));
        };
        let parameters = std::mem::take(&mut memory.parameters);
        let size = parameters.len();
        client.completion.begin(self.number);
        let handle = client.job.push_pull(key, gradient, parameters).inspect_err(|_| {
            client.completion.end(self.number);
            // What it was lent is gone with the refusal.
            memory.parameters = vec![0.0; size];
        })?;
        let (completion, number) = (Arc::clone(client.completion), self.number);
        handle.on_complete(move |_| completion.end(number));
        memory.state = KeyState::UnderWay(handle);
        Ok(())
    }

    /// Send: the layer's factors leave, for all peers or for the hub.
    pub(crate) fn send_factors(
        &mut self,
        client: &Client<'_>,
        factors: LayerFactors<'_>,
    ) -> Result<(), SyncError> {
        let first = self.keys[0].key;
        if !self.takes_factors() {
            return Err(misplaced(client.job, first, "does not go by its factors, and factors came"));
        }
        if let Some(key) = self.keys.iter().find(|key| !matches!(key.state, KeyState::Idle)) {
            return Err(misplaced(
                client.job,
                key.key,
                "got factors without having moved the parameters that they belong to",
            ));
        }
        let sizes: Vec<usize> = self.keys.iter().map(|key| key.parameters.len()).collect();
        let mut memory = self.keys.iter_mut().map(|key| std::mem::take(&mut key.parameters));
        let (weight, bias) = (memory.next().expect("a layer has a weight"), memory.next());
        client.completion.begin(self.number);
        if let Err(refused) = self.way.push_factors(client, self.number, first, factors, (weight, bias)) {
            client.completion.end(self.number);
            // What it was lent is gone with the refusal.
            self.keys.iter_mut().zip(sizes).for_each(|(key, size)| key.parameters = vec![0.0; size]);
            return Err(refused);
        }
        self.keys.iter_mut().for_each(|key| key.state = KeyState::UnderWayByFactors);
        Ok(())
    }

    /// Receive: waits for everything that is under way of the layer. Says whether there was something.
    pub(crate) fn receive(&mut self, client: &Client<'_>) -> Result<bool, SyncError> {
        let Syncer { number, way, keys } = self;
        match way {
            Way::Hub => {
                let was_under_way = keys.iter().any(|key| matches!(key.state, KeyState::UnderWay(_)));
                client.completion.waiting(|| {
                    keys.iter_mut().try_for_each(KeyMemory::receive)?;
                    client.completion.wait(*number);
                    Ok(was_under_way)
                })
            }
            Way::Factors { under_way, .. } => {
                let Some(told) = under_way.take() else { return Ok(false) };
                let outputs = client.completion.waiting(|| told.recv()).expect("every push is answered")?;
                let memory = |region: ReceiveRegion| region.into_owned().expect("it was given as a vector");
                arrive(keys, memory(outputs.weight), outputs.bias.map(memory));
                Ok(true)
            }
            Way::FactorsToHub { memory, under_way } => {
                let Some(handle) = under_way.take() else { return Ok(false) };
                let done = client.completion.waiting(|| handle.wait())?;
                client.completion.wait(*number);
                *memory = [done.inputs, done.output_gradients];
                arrive(keys, done.weight, done.bias);
                Ok(true)
            }
        }
    }

    /// Move: gives a key's parameters for memory of the same length if they have come since they were last moved, and the
    /// memory of its last gradient.
    pub(crate) fn move_out(&mut self, place: usize, parameters: &mut Vec<f32>) -> Vec<f32> {
        let key = &mut self.keys[place];
        if let KeyState::Arrived = key.state {
            std::mem::swap(&mut key.parameters, parameters);
            key.state = KeyState::Idle;
        }
        std::mem::take(&mut key.gradient)
    }
}

impl Way {
    fn push_factors(
        &mut self,
        client: &Client<'_>,
        number: usize,
        weight_key: u32,
        factors: LayerFactors<'_>,
        (weight, bias): (Vec<f32>, Option<Vec<f32>>),
    ) -> Result<(), SyncError> {
        let completion = Arc::clone(client.completion);
        match self {
            Way::Hub => unreachable!("checked by the caller"),
            Way::Factors { position, under_way } => {
                let outputs =
                    Outputs { weight: ReceiveRegion::owned(weight), bias: bias.map(ReceiveRegion::owned) };
                let (tell, told) = sync_channel(1);
                client.exchange().push(*position, factors, outputs, move |outcome| {
                    completion.end(number);
                    // A run that has ended needs no parameters.
                    let _ = tell.send(outcome);
                })?;
                *under_way = Some(told);
            }
            Way::FactorsToHub { memory, under_way } => {
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
                let handle = client.job.push_pull_factors(weight_key, buffers)?;
                handle.on_complete(move |_| completion.end(number));
                *under_way = Some(handle);
            }
        }
        Ok(())
    }
}

/// A layer's parameters have come.
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
            // Nobody keeps any: what comes back is the mean or the sum.
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

impl Client<'_> {
    fn exchange(&self) -> &FactorExchange {
        self.factors.expect("a plan with layers by factors has their exchange")
    }
}

fn misplaced(job: &Job, key: u32, reason: &str) -> SyncError {
    let name = job.settings().keys.keys()[key as usize].name.as_str();
    SyncError::Misplaced { rank: job.rank(), layer: name.into(), reason: reason.into() }
}
