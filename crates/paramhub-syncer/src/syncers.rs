//! All syncers of a worker, which a training loop drives (Poseidon algorithm 2).

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_core::scheme::{Scheme, SchemeChoice};
use paramhub_core::settings::Settings;
use paramhub_kernels::Registry;
use paramhub_worker::{Job, Member, Membership, Options};

use crate::completion::CompletionVector;
use crate::error::SyncError;
use crate::exchange::FactorExchange;
use crate::layer::LayerFactors;
use crate::open::open_factors;
use crate::peer_listener::{PeerAddresses, PeerListener, PortRange};
use crate::syncer::{SyncContext, Syncer};

/// One syncer for each layer of a job's plan, then one for each key that belongs to no layer, in the order of
/// the key table.
///
/// A training loop [begins](Self::begin) every key once. In each iteration it [sends](Self::send) a layer's
/// gradients, or its [factors](Self::send_factors), as soon as backpropagation has made them, which does not
/// wait. Before the layer's next forward pass it [receives](Self::receive) the layer and
/// [moves](Self::move_out) its parameters out. Algorithm 2 waits for the whole completion vector between two
/// iterations, as [`wait`](Self::wait) does; a loop that receives layer by layer waits for each entry only
/// when it needs it.
///
/// The threads behind it are the job's, which send and receive, and those of the exchange of factors, which
/// multiply and update. Only the caller's thread waits for a layer.
pub struct Syncers {
    job: Job,
    factors: Option<FactorExchange>,
    syncers: Vec<Syncer>,
    /// For each key, the position of its syncer, and its own place there.
    places: Vec<(usize, usize)>,
    completion: Arc<CompletionVector>,
    leave_timeout: Duration,
}

/// Returns the counters since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SyncStatistics {
    /// Time during which at least one layer was under way.
    pub in_flight: Duration,
    /// The part of it that the caller spent waiting in [`Syncers::receive`] and [`Syncers::begin`]; the
    /// caller computed in the rest.
    pub exposed: Duration,
    /// Bytes that this worker has sent.
    pub bytes_sent: u64,
    /// Bytes that this worker has received.
    pub bytes_received: u64,
}

impl Syncers {
    /// Joins a job with these settings, the same at all ranks. If the job's plan has layers whose scheme is
    /// `factors`, also connects the workers with one another; `threads` threads compute the gradients of
    /// these layers.
    ///
    /// # Errors
    /// If the job cannot be joined, or the workers cannot exchange factors.
    pub fn join(
        membership: Membership,
        options: Options,
        settings: Settings,
        registry: &Registry,
        threads: usize,
    ) -> Result<Syncers, SyncError> {
        let leave_timeout = options.leave_timeout;
        let may_meet = settings.scheme != SchemeChoice::default()
            || settings.layers.iter().any(|layer| layer.scheme.is_some());
        if !may_meet {
            let job = Member::connect_with(membership, options)?.init(settings)?;
            return Ok(Syncers { leave_timeout, ..Syncers::new(job) });
        }
        let peer_listener = PeerListener::listen(&membership, PortRange::ANY)?;
        let options = Options { peer_address: Some(peer_listener.address()), ..options };
        let member = Member::connect_with(membership, options)?;
        let peers = PeerAddresses::of(&member);
        let job = member.init(settings)?;
        let opened = open_factors(&job, peer_listener, &peers, registry, threads)?;
        let factors = opened.map(|(factors, _)| factors);
        Ok(Syncers { leave_timeout, ..Syncers::with_factors(job, factors) })
    }

    /// The syncers of a job none of whose layers has the scheme `factors`.
    ///
    /// # Panics
    /// If a layer has it: [`join`](Self::join) such a job.
    pub fn new(job: Job) -> Syncers {
        Syncers::with_factors(job, None)
    }

    fn with_factors(job: Job, factors: Option<FactorExchange>) -> Syncers {
        let keys = job.settings().keys.len();
        let mut places = vec![None; keys];
        let mut syncers = Vec::new();
        // The exchange has the layers in the order of the plan.
        let mut positions = 0..factors.as_ref().map_or(0, |factors| factors.layers().len());
        for planned in &job.information_book().plan.layers {
            let number = syncers.len();
            for (place, &key) in planned.keys.iter().enumerate() {
                places[key as usize] = Some((number, place));
            }
            let keys = planned.keys.iter().copied();
            syncers.push(match planned.scheme {
                Scheme::Factors => {
                    let position =
                        positions.next().expect("a plan with layers by factors has their exchange");
                    Syncer::by_factors(number, keys, position)
                }
                Scheme::FactorsToHub => Syncer::by_factors_to_hub(number, keys),
                Scheme::Hub => Syncer::by_hub(number, keys),
            });
        }
        let places = (0..).zip(places).map(|(key, place)| {
            place.unwrap_or_else(|| {
                syncers.push(Syncer::by_hub(syncers.len(), [key]));
                (syncers.len() - 1, 0)
            })
        });
        let places = places.collect();
        let completion = Arc::new(CompletionVector::new(syncers.len()));
        let leave_timeout = Options::default().leave_timeout;
        Syncers { job, factors, syncers, places, completion, leave_timeout }
    }

    /// The job, for calls that concern no layer.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// The number of syncers.
    pub fn len(&self) -> usize {
        self.syncers.len()
    }

    /// Returns whether the job has no keys.
    pub fn is_empty(&self) -> bool {
        self.syncers.is_empty()
    }

    /// The syncer that a key belongs to.
    ///
    /// # Panics
    /// If the job has no such key.
    pub fn of_key(&self, key: u32) -> usize {
        self.places[key as usize].0
    }

    /// Returns whether to send a layer's factors, and not its gradients.
    pub fn takes_factors(&self, layer: usize) -> bool {
        self.syncers[layer].takes_factors()
    }

    /// Returns whether a key's initial parameters are known.
    pub fn has_begun(&self, key: u32) -> bool {
        let (layer, place) = self.places[key as usize];
        self.syncers[layer].has_begun(place)
    }

    /// Begins with rank 0's initial parameters of a key, or those of the checkpoint that the job goes on
    /// from, at every rank. Waits for them. Where the job has no optimizer every rank keeps its own.
    ///
    /// # Errors
    /// If the job has failed.
    pub fn begin(&mut self, key: u32, parameters: &mut Vec<f32>) -> Result<(), SyncError> {
        let (layer, place) = self.places[key as usize];
        let (context, syncer) = self.borrow(layer);
        syncer.begin(&context, place, parameters)
    }

    /// Sends the gradient of a key whose layer takes no factors, and requests its parameters. Does not wait
    /// for the network. [`move_out`](Self::move_out) gives the memory back.
    ///
    /// # Errors
    /// If the parameters that the gradient belongs to were not moved out before, or the job has failed.
    pub fn send(&mut self, key: u32, gradient: Vec<f32>) -> Result<(), SyncError> {
        let (layer, place) = self.places[key as usize];
        let (context, syncer) = self.borrow(layer);
        syncer.send(&context, place, gradient)
    }

    /// Sends a layer's factors in place of the gradients of its keys. Does not wait for the network; the
    /// factors' memory is free again when this returns.
    ///
    /// # Errors
    /// If the layer takes no factors, the parameters that they belong to were not moved out before, or the
    /// exchange has failed.
    pub fn send_factors(&mut self, layer: usize, factors: LayerFactors<'_>) -> Result<(), SyncError> {
        let (context, syncer) = self.borrow(layer);
        syncer.send_factors(&context, factors)
    }

    /// Waits until nothing of a layer is under way; returns whether anything was.
    ///
    /// # Errors
    /// If the job or the exchange of factors has failed.
    pub fn receive(&mut self, layer: usize) -> Result<bool, SyncError> {
        let (context, syncer) = self.borrow(layer);
        syncer.receive(&context)
    }

    /// Swaps a key's received parameters with memory of the same length; leaves `parameters` unchanged if
    /// none have come since they were last moved. Returns the memory of the key's last gradient, or an empty
    /// vector.
    pub fn move_out(&mut self, key: u32, parameters: &mut Vec<f32>) -> Vec<f32> {
        let (layer, place) = self.places[key as usize];
        self.syncers[layer].move_out(place, parameters)
    }

    /// Returns whether a layer's entry of the completion vector is set: then receiving the layer does not
    /// wait.
    pub fn is_complete(&self, layer: usize) -> bool {
        self.completion.is_complete(layer)
    }

    /// Waits until all entries of the completion vector are set.
    ///
    /// # Errors
    /// See [`receive`](Self::receive).
    pub fn wait(&mut self) -> Result<(), SyncError> {
        (0..self.len()).try_for_each(|layer| self.receive(layer).map(drop))
    }

    /// Changes the hyperparameters of one group of the optimizer from `first_step` on, wherever its layers
    /// are updated. Rank 0's call counts, before it sends anything of that step.
    ///
    /// # Errors
    /// If the optimizer cannot go on with them, or the job has failed.
    pub fn set_hyperparameters(
        &self,
        group: u16,
        first_step: u32,
        hyperparameters: &Hyperparameters,
    ) -> Result<(), SyncError> {
        self.job.set_group_hyperparameters(group, first_step, hyperparameters)?;
        let Some(factors) = &self.factors else { return Ok(()) };
        let set = factors.set_hyperparameters(group, first_step, *hyperparameters);
        set.map_err(|reason| SyncError::Hyperparameters { rank: self.job.rank(), reason })
    }

    /// The step that this worker is to compute next, after `done` steps: a later one where the other workers
    /// went on without it.
    pub fn next_step(&self, done: u32) -> u32 {
        // For a key under way the answer is not known yet: its next step is the one after the push.
        let steps = (0..self.places.len() as u32).filter_map(|key| self.job.next_step(key).ok());
        steps.max().map_or(done, |step| done.max(step))
    }

    /// Returns the counters since the beginning.
    pub fn statistics(&self) -> SyncStatistics {
        let job = self.job.statistics();
        let factors = self.factors.as_ref().map(FactorExchange::statistics).unwrap_or_default();
        let (in_flight, exposed) = self.completion.times();
        SyncStatistics {
            in_flight,
            exposed,
            bytes_sent: job.bytes_sent + factors.bytes_sent,
            bytes_received: job.bytes_received + factors.bytes_received,
        }
    }

    /// Waits until nothing is under way, here and at the peers, and leaves the job.
    ///
    /// # Errors
    /// If the job or the exchange of factors has failed, or the peers take too long.
    pub fn leave(self) -> Result<(), SyncError> {
        if let Some(factors) = &self.factors {
            factors.leave(self.leave_timeout)?;
        }
        Ok(self.job.leave()?)
    }

    fn borrow(&mut self, layer: usize) -> (SyncContext<'_>, &mut Syncer) {
        let Syncers { job, factors, syncers, completion, .. } = self;
        (SyncContext { job, factors: factors.as_ref(), completion }, &mut syncers[layer])
    }
}

impl fmt::Debug for Syncers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Syncers").field("job", &self.job.name()).finish_non_exhaustive()
    }
}
