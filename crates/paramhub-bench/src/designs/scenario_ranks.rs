//! The launcher's connections to all ranks of a scenario. It sends them commands and receives their replies.

use anyhow::Context;
use paramhub::service::ServiceCreated;
use paramhub_core::auth::Nonce;
use paramhub_harness::exchange::driver::{LEAD, receive};
use paramhub_harness::exchange::messages::{JsonConnection, LauncherCommand};
use paramhub_harness::exchange::numbers::Verdict;
use paramhub_harness::exchange::statistics::mean;
use paramhub_harness::exchange::usage;

use super::SCENARIO;
use super::messages::{IsolatedTimes, RankSpec, ScenarioCommand, ScenarioReply, TrainingTimes, TurnTimes};
use super::scenario::{KeyOrder, Scenario};
use super::timeline::Timeline;

/// All ranks of a scenario.
pub(super) struct ScenarioRanks {
    /// The scenario's name in errors.
    name: String,
    /// The connection to each rank, by rank.
    pub(super) connections: Vec<JsonConnection>,
}

impl ScenarioRanks {
    pub(super) fn new(scenario: Scenario) -> ScenarioRanks {
        ScenarioRanks { name: scenario.label(), connections: Vec::new() }
    }

    /// Sends a command to all ranks. Returns every rank's reply, which must be of the expected kind.
    fn ask<T>(
        &mut self,
        command: &ScenarioCommand,
        expected: impl Fn(ScenarioReply) -> Option<T>,
    ) -> anyhow::Result<Vec<T>> {
        for (rank, connection) in self.connections.iter_mut().enumerate() {
            connection.send(command).with_context(|| format!("rank {rank} of {}", self.name))?;
        }
        self.receive(expected)
    }

    /// Receives the next reply of every rank, which must be of the expected kind.
    fn receive<T>(&mut self, expected: impl Fn(ScenarioReply) -> Option<T>) -> anyhow::Result<Vec<T>> {
        let name = &self.name;
        let replies = self.connections.iter_mut().enumerate().map(|(rank, connection)| {
            let name = format!("rank {rank} of {name}");
            expected(receive(&name, connection)?).with_context(|| format!("{name} answered out of turn"))
        });
        replies.collect()
    }

    /// Tells every process which rank it is, and has the ranks of a native communicator connect to one another.
    /// `url` is that of the manager. `job` is the job of ranks that exchange through hubs.
    pub(super) fn enter(
        &mut self,
        rank_spec: &RankSpec,
        url: &str,
        job: Option<&ServiceCreated>,
    ) -> anyhow::Result<()> {
        for (rank, connection) in (0..).zip(&mut self.connections) {
            let rank_spec = Box::new(rank_spec.clone());
            let command = ScenarioCommand::Enter { rank_spec, rank, url: url.to_owned(), job: job.cloned() };
            connection.send(&LauncherCommand::scenario(SCENARIO, &command)?)?;
        }
        let addresses = self.receive(|reply| match reply {
            ScenarioReply::Listening(address) => Some(address),
            _ => None,
        })?;
        let mut secret = Nonce([0; 32]);
        getrandom::fill(&mut secret.0).context("the system has no random numbers")?;
        let command = ScenarioCommand::Meet { addresses: addresses.into_iter().flatten().collect(), secret };
        self.ask(&command, |reply| matches!(reply, ScenarioReply::Joined).then_some(()))?;
        Ok(())
    }

    /// Measures every key's collective alone. Returns the mean of all ranks.
    pub(super) fn alone(&mut self) -> anyhow::Result<IsolatedTimes> {
        let command = ScenarioCommand::Alone { start: usage::monotonic() + LEAD };
        let times = self.ask(&command, |reply| match reply {
            ScenarioReply::Alone(times) => Some(times),
            _ => None,
        })?;
        let keys = 0..times[0].keys.len();
        let of_key = |key: usize| mean(times.iter().filter_map(|rank| rank.keys.get(key).copied()));
        Ok(IsolatedTimes {
            keys: keys.map(of_key).collect(),
            barrier: mean(times.iter().map(|rank| rank.barrier)),
        })
    }

    /// Plays a turn whose computation takes `stretch` times as long as in the workload. Returns the times of every rank.
    pub(super) fn turn(
        &mut self,
        key_order: KeyOrder,
        stretch: f64,
        is_traced: bool,
    ) -> anyhow::Result<Vec<TurnTimes>> {
        let command =
            ScenarioCommand::Play { key_order, stretch, is_traced, start: usage::monotonic() + LEAD };
        self.ask(&command, |reply| match reply {
            ScenarioReply::Played(times) => Some(times),
            _ => None,
        })
    }

    /// Returns every rank's timeline of the last turn that was traced.
    pub(super) fn show(&mut self) -> anyhow::Result<Vec<Timeline>> {
        self.ask(&ScenarioCommand::Show, |reply| match reply {
            ScenarioReply::Timeline(timeline) => Some(timeline),
            _ => None,
        })
    }

    /// Has every rank compare the sums of the last step with the expected ones. Returns the verdict on all ranks.
    pub(super) fn verify(&mut self) -> anyhow::Result<Verdict> {
        let verdicts = self.ask(&ScenarioCommand::Verify, |reply| match reply {
            ScenarioReply::Checked(verdict) => Some(verdict),
            _ => None,
        })?;
        Ok(verdicts.into_iter().fold(Verdict::default(), Verdict::and))
    }

    /// Has the ranks train. Returns the times of every rank.
    pub(super) fn train(&mut self) -> anyhow::Result<Vec<TrainingTimes>> {
        let command = ScenarioCommand::Train { start: usage::monotonic() + LEAD };
        self.ask(&command, |reply| match reply {
            ScenarioReply::Trained(times) => Some(times),
            _ => None,
        })
    }
}
