//! One rank of a simulated model. Its operations sleep as long as layers compute, and its store really exchanges.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use paramhub::Dtype;
use paramhub_collective::kvstore::StoreError;
use paramhub_harness::exchange::messages::JsonConnection;
use paramhub_harness::exchange::numbers::{self, Verdict};
use paramhub_harness::exchange::usage;
use paramhub_train::dataflow::Meter;

use super::messages::{IsolatedTimes, ScenarioCommand, ScenarioReply, TurnTimes, Workload};
use super::rank_runtime::RankRuntime;
use super::scenario::KeyOrder;
use super::simulated_model::{SimulatedKey, SimulatedModel, StepMarks};
use super::step::Step;
use super::timeline::{RecordedOperation, Timeline};

/// The number of barriers of whose times the mean is taken.
const BARRIERS: u32 = 10;

/// A rank that plays turns of a simulated model as the launcher commands.
pub(super) struct SimulatedRank<'a> {
    model: SimulatedModel<'a>,
    ranks: u32,
    /// The times at which the forward passes of the last turn's steps began, in seconds since the runtime's origin.
    step_begins: Vec<f64>,
}

impl<'a> SimulatedRank<'a> {
    pub(super) fn new(
        runtime: RankRuntime,
        workload: &'a Workload,
        rank: u32,
        ranks: u32,
    ) -> anyhow::Result<SimulatedRank<'a>> {
        let model = SimulatedModel::new(runtime, workload, rank, ranks)?;
        Ok(SimulatedRank { model, ranks, step_begins: Vec::new() })
    }

    /// Answers the launcher's commands until it closes the connection.
    pub(super) fn play(mut self, connection: &mut JsonConnection) -> anyhow::Result<()> {
        connection.send(&ScenarioReply::Joined)?;
        while let Some(command) = connection.receive()? {
            connection.send(&match command {
                ScenarioCommand::Alone { start } => ScenarioReply::Alone(self.alone(start)?),
                ScenarioCommand::Play { key_order, stretch, is_traced, start } => {
                    self.trace(is_traced);
                    let played = self.turn(key_order, stretch, start)?;
                    self.trace(false);
                    ScenarioReply::Played(played)
                }
                ScenarioCommand::Show => ScenarioReply::Timeline(self.show()),
                ScenarioCommand::Verify => ScenarioReply::Checked(self.verify()),
                _ => bail!("the launcher sent a command out of turn"),
            })?;
        }
        self.model.runtime.leave()
    }

    /// Plays a turn. Its times are the means of all steps but the leading one.
    fn turn(&mut self, order: KeyOrder, stretch: f64, start: Duration) -> anyhow::Result<TurnTimes> {
        std::thread::sleep(start.saturating_sub(usage::monotonic()));
        self.model.gpu.restart();
        let (meter, marks) = (Arc::new(Meter::new()), Arc::new(StepMarks::default()));
        for number in 0..=self.model.workload.steps as usize {
            let step = Step { model: &self.model, order, stretch, number, meter: &meter, marks: &marks };
            step.push()?;
            // Like a training loop, this waits for the losses of the step before.
            if number > 0 {
                let last = &self.model.losses[(number - 1) % 2];
                self.model.runtime.engine.wait_for_var(last).map_err(StoreError::from)?;
            }
        }
        self.model.runtime.engine.wait_for_all().map_err(StoreError::from)?;
        let begins = std::mem::take(&mut *marks.begins.lock().unwrap_or_else(PoisonError::into_inner));
        let since_origin =
            |at: Instant| at.saturating_duration_since(self.model.runtime.origin).as_secs_f64();
        self.step_begins = begins.into_iter().map(since_origin).collect();
        let ends = marks.ends.lock().unwrap_or_else(PoisonError::into_inner);
        let (first, last) = ends.first().zip(ends.last()).context("a turn has steps")?;
        let steps = f64::from(self.model.workload.steps);
        let (before, after) = (first.times, last.times);
        Ok(TurnTimes {
            seconds: last.at.saturating_duration_since(first.at).as_secs_f64() / steps,
            computing: (after.computing - before.computing).as_secs_f64() / steps,
            in_flight: (after.in_flight - before.in_flight).as_secs_f64() / steps,
            hidden: (after.hidden - before.hidden).as_secs_f64() / steps,
            cpu: (last.cpu_seconds - first.cpu_seconds) / steps,
        })
    }

    /// Measures each key's collective alone. Through a hub all keys are under way together, and a key's share
    /// is that of its bytes.
    fn alone(&mut self, start: Duration) -> anyhow::Result<IsolatedTimes> {
        let bytes: Vec<usize> = self.model.keys.iter().map(|key| key.sum.bytes()).collect();
        let Some(spare) = &self.model.runtime.spare else {
            let seconds = self.turn(KeyOrder::LastFirst, 0.0, start)?.seconds;
            let all: usize = bytes.iter().sum();
            let share = |&bytes: &usize| seconds * bytes as f64 / all.max(1) as f64;
            return Ok(IsolatedTimes { keys: bytes.iter().map(share).collect(), barrier: 0.0 });
        };
        let mut keys = vec![0.0; bytes.len()];
        std::thread::sleep(start.saturating_sub(usage::monotonic()));
        spare.barrier()?;
        // The memory has been used before, and the next turn fills it again.
        for number in KeyOrder::LastFirst.keys(&bytes) {
            let SimulatedKey { key, sum, .. } = &self.model.keys[number];
            let began = Instant::now();
            sum.write(|values| spare.allreduce(&key.to_string(), values, Dtype::F32))?;
            keys[number] = began.elapsed().as_secs_f64();
        }
        let began = Instant::now();
        (0..BARRIERS).try_for_each(|_| spare.barrier())?;
        Ok(IsolatedTimes { keys, barrier: began.elapsed().as_secs_f64() / f64::from(BARRIERS) })
    }

    fn trace(&self, is_on: bool) {
        if let Some(trace) = &self.model.runtime.trace {
            trace.switch(is_on);
        }
    }

    /// Takes the timeline of the last turn that was traced.
    fn show(&mut self) -> Timeline {
        let spans = self.model.runtime.trace.as_ref().map(|trace| trace.take().0).unwrap_or_default();
        let spans = spans.into_iter().map(RecordedOperation::from).collect();
        Timeline { spans, steps: std::mem::take(&mut self.step_begins) }
    }

    /// Checks the sums. Every rank's numbers are eighths, so that their sums are exact in any order.
    fn verify(&self) -> Verdict {
        let mut verdict = Verdict::default();
        for (number, key) in self.model.keys.iter().enumerate() {
            key.sum.read(|bytes| {
                for (at, &sum) in bytemuck::cast_slice::<u8, f32>(bytes).iter().enumerate() {
                    let expected: f32 = (0..self.ranks).map(|rank| numbers::small(rank, number, at)).sum();
                    if sum.to_bits() != expected.to_bits() {
                        let error = f64::from((sum - expected).abs());
                        let max_abs_error = if error.is_finite() { error } else { f64::MAX };
                        verdict = verdict.and(Verdict { max_abs_error, wrong: 1 });
                    }
                }
            });
        }
        verdict
    }
}
