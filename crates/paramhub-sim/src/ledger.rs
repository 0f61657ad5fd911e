//! What must hold whatever fails: the record of every update that any hub has made, of every answer, and of what the
//! manager has told.

mod told;

use std::collections::{BTreeMap, BTreeSet};

use paramhub_core::auth::Incarnation;
use paramhub_core::chunk::ChunkId;
use paramhub_core::service::{JobState, ServiceConnected, ServiceError, ServiceInitialised};

use crate::message::Contribution;
use crate::random::mixed;
use told::Told;

/// All updates of a run.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// The digests of each chunk's parameters, by version.
    versions: BTreeMap<ChunkId, Vec<u64>>,
    workers: u32,
    /// The ranks that a hub has taken for lost at some time.
    lost: BTreeSet<u32>,
    told: Told,
    /// The first thing that must not be.
    violation: Option<String>,
}

impl Ledger {
    /// The ledger of a job with so many workers.
    pub(crate) fn new(workers: u32) -> Ledger {
        Ledger { workers, ..Ledger::default() }
    }

    /// The first thing that must not be, if there was one.
    pub(crate) fn violation(&self) -> Option<&str> {
        self.violation.as_deref()
    }

    /// Notes something that must not be.
    pub(crate) fn violate(&mut self, what: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(what());
        }
    }

    /// A hub has taken the initial parameters of a chunk. Returns their digest.
    pub(crate) fn initialised(&mut self, chunk: ChunkId) -> u64 {
        let digest = mixed(u64::from(chunk) + 1);
        if self.versions.insert(chunk, vec![digest]).is_some() {
            self.violate(|| format!("chunk {chunk} was initialised twice"));
        }
        digest
    }

    /// A hub has updated a chunk with the sum of these contributions. Returns the digest of the new parameters.
    pub(crate) fn updated(&mut self, chunk: ChunkId, step: u32, sum: &mut [Contribution]) -> u64 {
        sum.sort_unstable();
        let has = |rank: u32| sum.contains(&Contribution { step, rank });
        let lacks_one = (0..self.workers).any(|rank| !self.lost.contains(&rank) && !has(rank));
        let has_others = sum.iter().any(|contribution| contribution.step != step);
        let has_one_twice = sum.windows(2).any(|pair| pair[0] == pair[1]);
        if lacks_one || has_others || has_one_twice {
            self.violate(|| format!("the update of chunk {chunk} at step {step} has the sum of {sum:?}"));
        }
        let versions = self.versions.entry(chunk).or_default();
        let (version, before) = (versions.len(), versions.last().copied().unwrap_or_default());
        let digest = mixed(before ^ u64::from(step) << 32 ^ u64::from(chunk));
        versions.push(digest);
        if version != step as usize + 1 {
            self.violate(|| format!("the update of chunk {chunk} at step {step} makes version {version}"));
        }
        digest
    }

    /// A hub takes a rank for lost: updates need not have its contribution from now on.
    pub(crate) fn rank_lost(&mut self, rank: u32) {
        self.lost.insert(rank);
    }

    /// Whether no hub has ever taken this rank for lost.
    pub(crate) fn was_always_there(&self, rank: u32) -> bool {
        !self.lost.contains(&rank)
    }

    /// A hub has moved a chunk on to a version without an update.
    pub(crate) fn skipped(&mut self, chunk: ChunkId, version: u32) {
        let versions = self.versions.entry(chunk).or_default();
        let newest = versions.last().copied().unwrap_or_default();
        versions.resize(version as usize + 1, newest);
    }

    /// A worker has received parameters.
    pub(crate) fn received(&mut self, rank: u32, chunk: ChunkId, version: u32, digest: u64) {
        let known = self.versions.get(&chunk).and_then(|versions| versions.get(version as usize));
        if known != Some(&digest) {
            self.violate(|| {
                format!("rank {rank} has received parameters of chunk {chunk} that are not those of version {version}")
            });
        }
    }

    /// The manager tells a process that it has its rank.
    pub(crate) fn connected(&mut self, rank: u32, incarnation: Incarnation, connected: &ServiceConnected) {
        let checked = self.told.connected(rank, incarnation, connected);
        self.check(checked);
    }

    /// The manager tells a rank that the job runs.
    pub(crate) fn told_that_it_runs(&mut self, initialised: &ServiceInitialised) {
        let checked = self.told.initialised(initialised);
        self.check(checked);
    }

    /// The manager refuses a call of a rank.
    pub(crate) fn refused(&mut self, rank: u32, incarnation: Incarnation, refusal: &ServiceError) {
        let checked = self.told.refused(rank, incarnation, refusal);
        self.check(checked);
    }

    /// A manager has started, with the job in this state if it knows the job.
    pub(crate) fn manager_started(&mut self, state: Option<JobState>) {
        let checked = self.told.manager_started(state);
        self.check(checked);
    }

    fn check(&mut self, checked: Result<(), String>) {
        if let Err(violation) = checked {
            self.violate(|| violation);
        }
    }
}
