//! The layers of a job that workers exchange among themselves, by factors.

use std::collections::HashMap;

use paramhub::{Job, Options, Registry};
use paramhub_kernels::convert;
use paramhub_syncer::{
    FactorExchange, FactorStatistics, LayerFactors, Outputs, PeerAddresses, PeerListener, PlannedFactors,
    SyncError, open_factors,
};
use paramhub_transport::StableBytes;

use crate::errors::Failure;
use crate::handle::{CompletionCounter, Handle};
use crate::memory::Borrowed;

/// The exchange of the layers, and their keys.
pub(crate) struct FactorLayers {
    exchange: FactorExchange,
    planned: Vec<PlannedFactors>,
    /// The layer of each key, for weights and biases.
    parts: HashMap<u32, Part>,
}

/// The layer of a key, and which of its tensors the key is.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    layer: usize,
    is_bias: bool,
}

impl FactorLayers {
    /// Connects the workers, if the job's plan has such layers: all ranks have the same plan.
    pub(crate) fn open(
        job: &Job,
        peer_listener: PeerListener,
        peers: &PeerAddresses,
    ) -> Result<Option<Self>, SyncError> {
        let opened = open_factors(job, peer_listener, peers, &Registry::with_builtins(), threads(job))?;
        Ok(opened.map(|(exchange, planned)| {
            let mut parts = HashMap::new();
            for (layer, planned) in planned.iter().enumerate() {
                parts.insert(planned.weight, Part { layer, is_bias: false });
                parts.extend(planned.bias.map(|bias| (bias, Part { layer, is_bias: true })));
            }
            FactorLayers { exchange, planned, parts }
        }))
    }

    /// The layers, by their numbers.
    pub(crate) fn planned(&self) -> &[PlannedFactors] {
        &self.planned
    }

    /// The part of a layer that a key is, if it belongs to one of these layers.
    pub(crate) fn part(&self, key: u32) -> Option<Part> {
        self.parts.get(&key).copied()
    }

    /// Begins all layers with these parameters, by key, which are equal at all ranks, and with the hubs'
    /// optimizer state for them, which rank 0 has initialised.
    pub(crate) fn begin(&self, job: &Job, parameters: &HashMap<u32, Borrowed>) -> Result<(), Failure> {
        let values = |key: u32| decoded(job, key, parameters.get(&key).map_or(&[][..], Borrowed::as_bytes));
        for (layer, planned) in self.planned.iter().enumerate() {
            let weight = values(planned.weight);
            let bias = planned.bias.map(values).unwrap_or_default();
            self.exchange.initialise(layer, &weight, &bias, 0).map_err(Failure::Factors)?;
            for slot in 0..job.state_slots() {
                let (weight, updates) = pull_state(job, planned.weight, slot)?;
                let bias = planned.bias.map(|bias| pull_state(job, bias, slot)).transpose()?;
                let bias = bias.map(|(bias, _)| bias).unwrap_or_default();
                self.exchange
                    .restore_state(layer, usize::from(slot), &weight, &bias, updates)
                    .map_err(Failure::Factors)?;
            }
        }
        Ok(())
    }

    /// Sends a layer's factors of a step; the handle ends when the layer's new parameters are in `weight` and
    /// `bias`.
    pub(crate) fn push(
        &self,
        layer: usize,
        inputs: &Borrowed,
        output_gradients: &Borrowed,
        weight: Borrowed,
        bias: Option<Borrowed>,
    ) -> Result<Handle, SyncError> {
        let factors =
            LayerFactors { inputs: inputs.as_bytes(), output_gradients: output_gradients.as_bytes() };
        let outputs = Outputs { weight: weight.into_receive(), bias: bias.map(Borrowed::into_receive) };
        let (counter, handle) = CompletionCounter::new(1);
        let end = move |outcome: Result<Outputs, SyncError>| {
            // Drop the regions first: a caller that sees the end may read their memory.
            let failure = outcome.map(drop).err();
            counter.count(failure.map(Failure::Factors));
        };
        self.exchange.push(layer, factors, outputs, end)?;
        Ok(handle)
    }

    /// The step that the next push of a key's layer contributes to.
    pub(crate) fn next_step(&self, part: Part) -> Result<u32, SyncError> {
        self.exchange.next_step(part.layer)
    }

    /// A slot of a key's optimizer state in f32, and the number of updates it has had.
    pub(crate) fn state(&self, part: Part, slot: u8) -> Result<(Vec<f32>, u64), SyncError> {
        let (weight, bias) = self.exchange.state(part.layer, usize::from(slot))?;
        Ok((if part.is_bias { bias } else { weight }, self.exchange.updates(part.layer)?))
    }

    pub(crate) fn exchange(&self) -> &FactorExchange {
        &self.exchange
    }

    pub(crate) fn statistics(&self) -> FactorStatistics {
        self.exchange.statistics()
    }

    /// Waits for all exchanges under way, here and at the peers, and leaves.
    pub(crate) fn leave(&self) -> Result<(), SyncError> {
        self.exchange.leave(Options::default().leave_timeout)
    }
}

impl Drop for FactorLayers {
    fn drop(&mut self) {
        // Leave instead of dropping the mesh: a dropped mesh fails at the peers, which may have all they need
        // of this rank and go on. A caller that wants the outcome calls `leave` before; then this does
        // nothing.
        let _ = self.exchange.leave(Options::DROP_TIMEOUT);
    }
}

/// The number of threads that multiply: the workers of a host share its processors.
fn threads(job: &Job) -> usize {
    let workers = &job.information_book().roster.workers;
    let own = workers.get(job.rank() as usize).map(|worker| &worker.host);
    let beside = workers.iter().filter(|worker| Some(&worker.host) == own).count();
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    (processors / beside.max(1)).max(1)
}

/// A key's parameters in f32.
fn decoded(job: &Job, key: u32, bytes: &[u8]) -> Vec<f32> {
    let codec = job.settings().keys.keys()[key as usize].dtype.codec();
    let mut values = vec![0.0; bytes.len() / codec.bytes()];
    convert::decode(bytes, &mut values, codec);
    values
}

/// A slot of a key's optimizer state at the hubs, and the number of updates it has had.
fn pull_state(job: &Job, key: u32, slot: u8) -> Result<(Vec<f32>, u64), Failure> {
    let elements: u64 = job.settings().keys.keys()[key as usize].shape.iter().product();
    // The key fits into memory, so its length fits into `usize`.
    let values = vec![0.0_f32; usize::try_from(elements).unwrap_or(usize::MAX)];
    let pulled = job.pull_state(key, slot, values).map_err(Failure::Worker)?;
    let ended = pulled.finish();
    ended.outcome.map_err(Failure::Worker)?;
    Ok((ended.parameters, ended.updates))
}
