//! All ranks of a contestant, as the launcher talks to them.

use anyhow::{Context, bail};
use paramhub_core::auth::Nonce;

use super::contestant::{Contestant, KeyOrder};
use super::part::{Alone, Cue, Heard, Part, Performed, Trained};
use super::timeline::Timeline;
use crate::cli::bench::conductor::{LEAD, hear};
use crate::cli::bench::numbers::Verdict;
use crate::cli::bench::spec::{Line, Order, Report};
use crate::cli::bench::statistics::mean;
use crate::cli::bench::usage;
use crate::service::ServiceCreated;

/// All ranks of a contestant.
pub(super) struct Cast {
    name: String,
    pub(super) lines: Vec<Line>,
}

impl Cast {
    pub(super) fn new(contestant: Contestant) -> Cast {
        Cast { name: contestant.label(), lines: Vec::new() }
    }

    /// Tells all, and gives every rank's answer as what was expected of it.
    fn ask<T>(&mut self, order: &Order, expected: impl Fn(Heard) -> Option<T>) -> anyhow::Result<Vec<T>> {
        for (rank, line) in self.lines.iter_mut().enumerate() {
            line.say(order).with_context(|| format!("rank {rank} of {}", self.name))?;
        }
        self.hear(expected)
    }

    fn hear<T>(&mut self, expected: impl Fn(Heard) -> Option<T>) -> anyhow::Result<Vec<T>> {
        let name = &self.name;
        let heard = self.lines.iter_mut().enumerate().map(|(rank, line)| {
            let name = format!("rank {rank} of {name}");
            match hear(&name, line)? {
                Report::Design(heard) => {
                    expected(heard).with_context(|| format!("{name} answered out of turn"))
                }
                other => bail!("{name} answered {other:?}"),
            }
        });
        heard.collect()
    }

    pub(super) fn enter(
        &mut self,
        part: &Part,
        url: &str,
        job: Option<&ServiceCreated>,
    ) -> anyhow::Result<()> {
        for (rank, line) in (0..).zip(&mut self.lines) {
            let part = Box::new(part.clone());
            line.say(&Order::Design(Cue::Enter { part, rank, url: url.to_owned(), job: job.cloned() }))?;
        }
        let addresses = self.hear(|heard| match heard {
            Heard::Listening(address) => Some(address),
            _ => None,
        })?;
        let mut secret = Nonce([0; 32]);
        getrandom::fill(&mut secret.0).context("the system has no random numbers")?;
        let cue = Cue::Meet { addresses: addresses.into_iter().flatten().collect(), secret };
        self.ask(&Order::Design(cue), |heard| matches!(heard, Heard::Joined).then_some(()))?;
        Ok(())
    }

    /// In the mean of all ranks.
    pub(super) fn alone(&mut self) -> anyhow::Result<Alone> {
        let cue = Cue::Alone { start: usage::monotonic() + LEAD };
        let alone = self.ask(&Order::Design(cue), |heard| match heard {
            Heard::Alone(alone) => Some(alone),
            _ => None,
        })?;
        let keys = 0..alone[0].keys.len();
        let of_key = |key: usize| mean(alone.iter().filter_map(|rank| rank.keys.get(key).copied()));
        Ok(Alone { keys: keys.map(of_key).collect(), barrier: mean(alone.iter().map(|rank| rank.barrier)) })
    }

    pub(super) fn turn(
        &mut self,
        order: KeyOrder,
        stretch: f64,
        is_traced: bool,
    ) -> anyhow::Result<Vec<Performed>> {
        let cue = Cue::Play { key_order: order, stretch, is_traced, start: usage::monotonic() + LEAD };
        self.ask(&Order::Design(cue), |heard| match heard {
            Heard::Played(played) => Some(played),
            _ => None,
        })
    }

    pub(super) fn show(&mut self) -> anyhow::Result<Vec<Timeline>> {
        self.ask(&Order::Design(Cue::Show), |heard| match heard {
            Heard::Timeline(timeline) => Some(timeline),
            _ => None,
        })
    }

    pub(super) fn verify(&mut self) -> anyhow::Result<Verdict> {
        let verdicts = self.ask(&Order::Design(Cue::Verify), |heard| match heard {
            Heard::Checked(verdict) => Some(verdict),
            _ => None,
        })?;
        Ok(verdicts.into_iter().fold(Verdict::default(), Verdict::and))
    }

    /// Every rank's.
    pub(super) fn train(&mut self) -> anyhow::Result<Vec<Trained>> {
        let cue = Cue::Train { start: usage::monotonic() + LEAD };
        self.ask(&Order::Design(cue), |heard| match heard {
            Heard::Trained(trained) => Some(trained),
            _ => None,
        })
    }
}
