//! All ranks of a scenario, to which the launcher sends commands.

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
    name: String,
    pub(super) connections: Vec<JsonConnection>,
}

impl ScenarioRanks {
    pub(super) fn new(scenario: Scenario) -> ScenarioRanks {
        ScenarioRanks { name: scenario.label(), connections: Vec::new() }
    }

    /// Sends a command to all ranks. Returns every rank's reply, which must be of the expected kind.
    fn ask<T>(
        &mut self,
        order: &ScenarioCommand,
        expected: impl Fn(ScenarioReply) -> Option<T>,
    ) -> anyhow::Result<Vec<T>> {
        for (rank, connection) in self.connections.iter_mut().enumerate() {
            connection.send(order).with_context(|| format!("rank {rank} of {}", self.name))?;
        }
        self.receive(expected)
    }

    fn receive<T>(&mut self, expected: impl Fn(ScenarioReply) -> Option<T>) -> anyhow::Result<Vec<T>> {
        let name = &self.name;
        let reply = self.connections.iter_mut().enumerate().map(|(rank, connection)| {
            let name = format!("rank {rank} of {name}");
            expected(receive(&name, connection)?).with_context(|| format!("{name} answered out of turn"))
        });
        reply.collect()
    }

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

    /// The mean of all ranks.
    pub(super) fn alone(&mut self) -> anyhow::Result<IsolatedTimes> {
        let command = ScenarioCommand::Alone { start: usage::monotonic() + LEAD };
        let alone = self.ask(&command, |reply| match reply {
            ScenarioReply::Alone(alone) => Some(alone),
            _ => None,
        })?;
        let keys = 0..alone[0].keys.len();
        let of_key = |key: usize| mean(alone.iter().filter_map(|rank| rank.keys.get(key).copied()));
        Ok(IsolatedTimes {
            keys: keys.map(of_key).collect(),
            barrier: mean(alone.iter().map(|rank| rank.barrier)),
        })
    }

    pub(super) fn turn(
        &mut self,
        order: KeyOrder,
        stretch: f64,
        is_traced: bool,
    ) -> anyhow::Result<Vec<TurnTimes>> {
        let command =
            ScenarioCommand::Play { key_order: order, stretch, is_traced, start: usage::monotonic() + LEAD };
        self.ask(&command, |reply| match reply {
            ScenarioReply::Played(played) => Some(played),
            _ => None,
        })
    }

    pub(super) fn show(&mut self) -> anyhow::Result<Vec<Timeline>> {
        self.ask(&ScenarioCommand::Show, |reply| match reply {
            ScenarioReply::Timeline(timeline) => Some(timeline),
            _ => None,
        })
    }

    pub(super) fn verify(&mut self) -> anyhow::Result<Verdict> {
        let verdicts = self.ask(&ScenarioCommand::Verify, |reply| match reply {
            ScenarioReply::Checked(verdict) => Some(verdict),
            _ => None,
        })?;
        Ok(verdicts.into_iter().fold(Verdict::default(), Verdict::and))
    }

    /// The times of every rank.
    pub(super) fn train(&mut self) -> anyhow::Result<Vec<TrainingTimes>> {
        let command = ScenarioCommand::Train { start: usage::monotonic() + LEAD };
        self.ask(&command, |reply| match reply {
            ScenarioReply::Trained(trained) => Some(trained),
            _ => None,
        })
    }
}
