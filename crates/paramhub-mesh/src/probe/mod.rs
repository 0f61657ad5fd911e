//! Measures the rate of the network between the ranks, for each pair and direction.
//!
//! A pair is measured in three parts: one direction alone, the other alone, then both at once. Each part
//! finds the number of bytes to send by itself: the receiver asks for batches of growing size until one lasts
//! long enough, and only that one counts, so that neither slow start nor a shaper's burst does
//! (`transfer.rs`). Ranks that are not measured wait in a barrier.

mod transfer;

use std::time::Duration;

use paramhub_core::pairs::{one_by_one, tournament};

use paramhub_core::cost::Rate;
use paramhub_transport::lend;

use crate::error::MeshError;
use crate::mesh::Mesh;
use transfer::TimedTransfer;

/// The parts of a pair's time: one direction, the other, both.
const PARTS: u32 = 3;
/// The least time of a part: a shorter one would measure schedulers rather than links.
const PART_MIN: Duration = Duration::from_millis(20);

/// How to measure. It must be the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// How long the whole measurement may take, about: a link so slow that 256 KiB take longer than their
    /// part exceeds it.
    pub budget: Duration,
    /// Which pairs are measured at the same time.
    pub pairs: Pairs,
}

/// Which pairs are measured at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairs {
    /// One pair after the other: measures the rate of a pair while no other rank sends.
    OneByOne,
    /// As many pairs at once as there are, each rank in one of them, in rounds until every rank has met every
    /// other. This is quicker, but the pairs of a round divide the rate of the links that they share.
    Together,
}

/// The rates at which each rank received from each, in bits of payload per second.
#[derive(Clone, Debug, PartialEq)]
pub struct Bandwidths {
    size: usize,
    alone: Vec<f64>,
    both: Vec<f64>,
}

impl Bandwidths {
    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The rate from one rank to another while the other direction was idle; `None` from a rank to itself.
    pub fn alone(&self, from: usize, to: usize) -> Option<Rate> {
        self.of(&self.alone, from, to)
    }

    /// The rate from one rank to another while the other sent as well; `None` from a rank to itself.
    pub fn both(&self, from: usize, to: usize) -> Option<Rate> {
        self.of(&self.both, from, to)
    }

    /// The slowest direction of a pair while both were in use, as (from, to, rate); `None` if there is only
    /// one rank.
    pub fn slowest(&self) -> Option<(usize, usize, Rate)> {
        let ways = (0..self.size).flat_map(|from| (0..self.size).map(move |to| (from, to)));
        ways.filter_map(|(from, to)| Some((from, to, self.both(from, to)?)))
            .min_by(|a, b| a.2.bits_per_second().total_cmp(&b.2.bits_per_second()))
    }

    fn of(&self, table: &[f64], from: usize, to: usize) -> Option<Rate> {
        assert!(from < self.size && to < self.size, "there are {} ranks", self.size);
        Rate::from_bits_per_second(table[to * self.size + from])
    }
}

impl Mesh {
    /// Measures the rate of the network between all ranks, over the mesh's own connections. Every rank must
    /// call it, with the same `probe`, while no operation is under way; every rank gets the same result.
    ///
    /// A rate is that of one TCP connection between two processes, each with one thread on it: payload alone,
    /// timed by the receiver. Where a link is faster than such a thread, the result is the thread's rate.
    ///
    /// # Errors
    /// If so many pairs do not fit into the budget, if the ranks pass different probes, or if the mesh fails.
    pub fn probe(&self, probe: &Probe) -> Result<Bandwidths, MeshError> {
        let rounds = match probe.pairs {
            Pairs::OneByOne => one_by_one(self.size()),
            Pairs::Together => tournament(self.size()),
        };
        let part = self.part(probe, rounds.len() as u32)?;
        self.compare(probe)?;
        let size = self.size() as usize;
        let mut transfer = TimedTransfer::new(self, part);
        // The rates measured here: from each rank alone, then from each with both directions in use.
        let mut arrived = vec![0.0; 2 * size];
        for round in &rounds {
            self.barrier()?.wait()?;
            let Some(pair) = round.iter().find(|pair| pair.contains(&self.rank())) else { continue };
            let peer = if pair[0] == self.rank() { pair[1] } else { pair[0] };
            let measured = transfer.measure(peer, pair[0] == self.rank())?;
            arrived[peer as usize] = measured.alone;
            arrived[size + peer as usize] = measured.both;
        }
        self.share(arrived)
    }

    fn part(&self, probe: &Probe, rounds: u32) -> Result<Duration, MeshError> {
        let part = probe.budget / (rounds.max(1) * PARTS);
        if part >= PART_MIN {
            return Ok(part);
        }
        let reason = format!(
            "{} s are too few for {rounds} rounds of pairs among {} ranks: allow {} s{}",
            probe.budget.as_secs_f64(),
            self.size(),
            (PART_MIN * PARTS * rounds).as_secs_f64().ceil(),
            if probe.pairs == Pairs::OneByOne { ", or measure disjoint pairs together" } else { "" },
        );
        Err(MeshError::Configuration { this_rank: self.this_rank().clone(), reason: reason.into() })
    }

    /// Compares the ranks' probes: ranks with unlike rounds would wait for one another for ever.
    fn compare(&self, probe: &Probe) -> Result<(), MeshError> {
        let own = [probe.budget.as_secs_f64(), f64::from(u8::from(probe.pairs == Pairs::Together))];
        let all = self.exchange(own.to_vec())?;
        let Some(other) = all.iter().position(|theirs| *theirs != own) else { return Ok(()) };
        let words = |[seconds, together]: [f64; 2]| {
            let pairs = if together == 1.0 { "disjoint pairs together" } else { "one pair after the other" };
            format!("{pairs} in {seconds} s")
        };
        let reason = format!(
            "this rank measures {} and rank {other} {}: all ranks must measure alike",
            words(own),
            words([all[other][0], all[other][1]])
        );
        Err(MeshError::Configuration { this_rank: self.this_rank().clone(), reason: reason.into() })
    }

    fn share(&self, arrived: Vec<f64>) -> Result<Bandwidths, MeshError> {
        let size = self.size() as usize;
        let all = self.exchange(arrived)?;
        let half = |begin: usize| all.iter().flat_map(|row| row[begin..begin + size].to_vec()).collect();
        Ok(Bandwidths { size, alone: half(0), both: half(size) })
    }

    /// Gathers every rank's values, by rank; all ranks have the same number of them.
    fn exchange(&self, own: Vec<f64>) -> Result<Vec<Vec<f64>>, MeshError> {
        let mut all = vec![vec![0.0; own.len()]; self.size() as usize];
        all[self.rank() as usize] = own;
        let outputs = all.iter_mut();
        lend(|lending| {
            let outputs = outputs.map(|output| lending.receive(output)).collect();
            self.allgather(None, outputs)?.wait()
        })?;
        Ok(all)
    }
}
