//! Training through a hub: one rank among others.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use paramhub_syncer::LayerFactors;
use paramhub_worker::{Handle, Job, Options, WorkerError};

use crate::exchange::{Exchange, ExchangeError, ExchangeStatistics};
use crate::factors::FactorLayers;
use crate::to_hub::ToHubLayers;

/// An [`Exchange`] with the other ranks of a job, whose keys are the network's in the network's order.
///
/// Each gradient leaves as a fused PushPull. Parameters arrive in memory that is exchanged for the network's, so that
/// nothing is copied and nothing is allocated per step. Layers may go [by factors](Self::with_factors) instead; their initial
/// parameters come through the hub, too.
pub struct HubExchange {
    job: Job,
    keys: Vec<HubKey>,
    factors: Option<FactorLayers>,
    to_hub: ToHubLayers,
    under_way: Arc<UnderWay>,
}

enum HubKey {
    /// Nothing was pushed yet, nor were the initial parameters exchanged.
    Fresh,
    /// Nothing is under way. The memory is for the parameters to come.
    Idle(Vec<f32>),
    /// The gradient has left.
    Underway(Handle<Vec<f32>, Vec<f32>>),
    /// The layer's factors have left.
    ByFactors,
    /// Parameters that came with the rest of their layer's.
    Come(Vec<f32>),
}

impl HubExchange {
    /// An exchange through a job that all ranks have joined with the network's keys and an optimizer.
    pub fn new(job: Job) -> Self {
        let keys: Vec<HubKey> = job.settings().keys.keys().iter().map(|_| HubKey::Fresh).collect();
        let under_way = Arc::<UnderWay>::default();
        let to_hub = ToHubLayers::of(&job);
        HubExchange { job, keys, factors: None, to_hub, under_way }
    }

    /// The same, with some layers exchanged by their factors.
    pub fn with_factors(self, factors: FactorLayers) -> Self {
        HubExchange { factors: Some(factors), ..self }
    }

    /// The job, for instance to change its hyperparameters.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// Leaves the job when all that is under way has ended.
    ///
    /// # Errors
    /// If the job failed before.
    pub fn leave(self) -> Result<(), ExchangeError> {
        if let Some(factors) = &self.factors {
            factors.exchange().leave(Options::default().leave_timeout).map_err(remote)?;
        }
        self.job.leave().map_err(remote)
    }

    /// Rank 0's initial parameters, or those of a checkpoint, become everybody's. Returns the memory that is left over.
    fn begin(&self, key: u32, parameters: &mut Vec<f32>) -> Result<Vec<f32>, WorkerError> {
        let memory = parameters.clone();
        if self.job.rank() == 0 && self.job.resumed_step().is_none() {
            return Ok(self.job.initialise(key, memory, 0)?.wait()?.0);
        }
        let ((), arrived) = self.job.pull(key, memory)?.wait()?;
        Ok(std::mem::replace(parameters, arrived))
    }

    fn push_factors_to_hub(&mut self, weight: usize, factors: [&[f32]; 2]) -> Result<(), ExchangeError> {
        let mut memory_of =
            |key: usize| match std::mem::replace(find(&mut self.keys, key)?, HubKey::ByFactors) {
                HubKey::Idle(memory) => Ok(memory),
                _ => {
                    let reason = "factors without the parameters that they belong to";
                    Err(ExchangeError::Sequence { key, reason })
                }
            };
        let memory = (memory_of(weight)?, self.to_hub.bias(weight).map(memory_of).transpose()?);
        self.under_way.begin();
        let under_way = self.under_way.clone();
        self.to_hub.push(&self.job, weight, factors, memory, move || under_way.end()).map_err(remote)
    }

    /// Waits for the layer of a key whose factors went to a hub, if it is under way.
    fn await_layer(&mut self, key: usize) -> Result<(), ExchangeError> {
        if self.to_hub.is_under_way(key) {
            self.under_way.wait();
            for (key, arrived) in self.to_hub.wait(key).map_err(remote)? {
                self.keys[key] = HubKey::Come(arrived);
            }
            self.under_way.go_on();
        }
        Ok(())
    }

    fn parameters_by_factors(&mut self, key: usize, parameters: &mut Vec<f32>) -> Result<(), ExchangeError> {
        let factors = self.factors.as_mut().expect("such keys are its own");
        if !factors.has_begun(key) {
            self.under_way.begin();
            self.under_way.wait();
            self.begin(key as u32, parameters).map_err(remote)?;
            self.under_way.end();
            self.under_way.go_on();
            let factors = self.factors.as_mut().expect("such keys are its own");
            return factors.begin(key, parameters).map_err(remote);
        }
        if factors.is_under_way(key) {
            self.under_way.wait();
            factors.wait(key).map_err(remote)?;
            self.under_way.go_on();
        }
        factors.swap(key, parameters);
        Ok(())
    }
}

impl Exchange for HubExchange {
    fn workers(&self) -> usize {
        self.job.workers() as usize
    }

    fn ranks(&self) -> Range<usize> {
        let rank = self.job.rank() as usize;
        rank..rank + 1
    }

    fn first_step(&self) -> usize {
        self.job.resumed_step().unwrap_or(0) as usize
    }

    fn push(&mut self, key: usize, gradient: Vec<f32>) -> Result<(), ExchangeError> {
        let slot = find(&mut self.keys, key)?;
        let HubKey::Idle(memory) = std::mem::replace(slot, HubKey::Fresh) else {
            let reason = "a gradient without the parameters that it belongs to";
            return Err(ExchangeError::Sequence { key, reason });
        };
        self.under_way.begin();
        let handle = self.job.push_pull(key as u32, gradient, memory).map_err(remote)?;
        let under_way = self.under_way.clone();
        handle.on_complete(move |_| under_way.end());
        *slot = HubKey::Underway(handle);
        Ok(())
    }

    fn takes_factors(&self, weight: usize) -> bool {
        self.to_hub.has(weight) || self.factors.as_ref().is_some_and(|factors| factors.has(weight))
    }

    fn push_factors(
        &mut self,
        weight: usize,
        inputs: &[f32],
        output_gradients: &[f32],
    ) -> Result<(), ExchangeError> {
        if self.to_hub.has(weight) {
            return self.push_factors_to_hub(weight, [inputs, output_gradients]);
        }
        let Some(factors) = self.factors.as_mut().filter(|factors| factors.has(weight)) else {
            let reason = "factors of a key that takes none";
            return Err(ExchangeError::Sequence { key: weight, reason });
        };
        self.under_way.begin();
        let under_way = self.under_way.clone();
        let pushed =
            factors.push(weight, LayerFactors::of_f32(inputs, output_gradients), move || under_way.end());
        pushed.map_err(remote)
    }

    fn parameters(&mut self, key: usize, parameters: &mut Vec<f32>) -> Result<(), ExchangeError> {
        if self.factors.as_ref().is_some_and(|factors| factors.has(key)) {
            return self.parameters_by_factors(key, parameters);
        }
        self.await_layer(key)?;
        let memory = match std::mem::replace(find(&mut self.keys, key)?, HubKey::Fresh) {
            HubKey::Fresh => {
                self.under_way.begin();
                self.under_way.wait();
                let memory = self.begin(key as u32, parameters).map_err(remote)?;
                self.under_way.end();
                self.under_way.go_on();
                memory
            }
            HubKey::Idle(memory) => memory,
            HubKey::Come(arrived) => std::mem::replace(parameters, arrived),
            HubKey::ByFactors => {
                let reason = "parameters of a layer whose factors have left and were not waited for";
                return Err(ExchangeError::Sequence { key, reason });
            }
            HubKey::Underway(handle) => {
                self.under_way.wait();
                let (_gradient, arrived) = handle.wait().map_err(remote)?;
                self.under_way.go_on();
                std::mem::replace(parameters, arrived)
            }
        };
        self.keys[key] = HubKey::Idle(memory);
        Ok(())
    }

    fn next_step(&self, done: usize) -> usize {
        // Of keys under way the answer is not known yet: what they say is the step after the one pushed.
        let steps = (0..self.keys.len() as u32).filter_map(|key| self.job.next_step(key).ok());
        steps.max().map_or(done, |step| done.max(step as usize))
    }

    fn statistics(&self) -> ExchangeStatistics {
        let statistics = self.job.statistics();
        let factors =
            self.factors.as_ref().map(|factors| factors.exchange().statistics()).unwrap_or_default();
        let (in_flight, exposed) = self.under_way.totals();
        ExchangeStatistics {
            in_flight,
            exposed,
            bytes_sent: statistics.bytes_sent + factors.bytes_sent,
            bytes_received: statistics.bytes_received + factors.bytes_received,
        }
    }
}

/// Time with at least one key under way, and the part of it that the trainer spent waiting. The job's own clock starts
/// when its I/O thread takes a request up, which on a busy machine is long after the push.
#[derive(Default)]
struct UnderWay {
    state: Mutex<UnderWayState>,
}

#[derive(Default)]
struct UnderWayState {
    keys: usize,
    /// When the first of `keys` left; none while nothing is under way.
    since: Option<Instant>,
    /// When last nothing was under way any more.
    ended: Option<Instant>,
    total: Duration,
    waits_since: Option<Instant>,
    exposed: Duration,
}

impl UnderWay {
    fn begin(&self) {
        let mut state = self.state();
        state.keys += 1;
        state.since.get_or_insert_with(Instant::now);
    }

    fn end(&self) {
        let mut state = self.state();
        state.keys -= 1;
        if state.keys == 0 {
            let since = state.since.take().expect("set by the first key");
            let now = Instant::now();
            state.total += now - since;
            state.ended = Some(now);
        }
    }

    /// The trainer waits from here on, if there is anything to wait for.
    fn wait(&self) {
        let mut state = self.state();
        state.waits_since = state.since.map(|_| Instant::now());
    }

    /// The trainer goes on. What it waited after the last arrival, for a processor to run on, is no part of the exchange.
    fn go_on(&self) {
        let mut state = self.state();
        if let Some(waits_since) = state.waits_since.take() {
            let until = if state.since.is_some() { Some(Instant::now()) } else { state.ended };
            state.exposed +=
                until.map_or(Duration::ZERO, |until| until.saturating_duration_since(waits_since));
        }
    }

    fn totals(&self) -> (Duration, Duration) {
        let state = self.state();
        (state.total + state.since.map_or(Duration::ZERO, |since| since.elapsed()), state.exposed)
    }

    fn state(&self) -> MutexGuard<'_, UnderWayState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn find(keys: &mut [HubKey], key: usize) -> Result<&mut HubKey, ExchangeError> {
    keys.get_mut(key).ok_or(ExchangeError::Sequence { key, reason: "the network has no such key" })
}

fn remote(error: impl std::error::Error + Send + Sync + 'static) -> ExchangeError {
    ExchangeError::Remote(Box::new(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Duration = Duration::from_millis(30);

    #[test]
    fn what_passes_while_the_trainer_computes_is_hidden_and_what_it_waits_for_is_exposed() {
        let under_way = UnderWay::default();
        under_way.wait();
        std::thread::sleep(PAUSE);
        under_way.go_on();
        assert_eq!(under_way.totals(), (Duration::ZERO, Duration::ZERO), "nothing was under way");
        under_way.begin();
        under_way.begin();
        // Computing.
        std::thread::sleep(PAUSE);
        under_way.end();
        under_way.wait();
        std::thread::sleep(PAUSE);
        under_way.end();
        let (in_flight, _) = under_way.totals();
        // Arrived, but the waiter gets no processor.
        std::thread::sleep(PAUSE);
        under_way.go_on();
        let (still, exposed) = under_way.totals();
        assert_eq!(still, in_flight, "nothing is under way any more");
        assert!(
            exposed >= PAUSE && in_flight >= exposed + PAUSE,
            "{in_flight:?} in flight, {exposed:?} exposed"
        );
    }
}
