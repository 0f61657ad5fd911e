//! What must hold whatever fails: the record of every update that any hub has made, of every answer, and of what the
//! manager has told.

mod rewinds;
mod sites;
mod standbys;
mod told;

use std::collections::{BTreeMap, BTreeSet};

use paramhub_core::auth::Incarnation;
use paramhub_core::chunk::ChunkId;
use paramhub_core::composition::{Composition, SiteId};
use paramhub_core::service::{JobState, ServiceConnected, ServiceError, ServiceInitialised};
use paramhub_core::standbys::Share;

use crate::message::Contribution;
use crate::network::StreamId;
use crate::random::mixed;
use crate::scenario::Scenario;
use rewinds::Rewinds;
use sites::Sites;
use standbys::Standbys;
use told::Told;

/// A chunk at a site or, where two hubs have each chunk, at a hub.
pub(crate) type SiteChunk = (SiteId, ChunkId);

/// All updates of a run.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// The digests of each chunk's parameters at each site, by version.
    versions: BTreeMap<SiteChunk, Vec<u64>>,
    /// The present version of each chunk that has gone back, and not yet come as far again as it had been.
    behind: BTreeMap<SiteChunk, u32>,
    workers: u32,
    sites: Sites,
    /// The hubs that have each chunk, if these are two.
    standbys: Option<Standbys>,
    rewinds: Rewinds,
    /// The number of workers with which the job has begun.
    first_workers: u32,
    /// The ranks that a hub has taken for lost at some time.
    lost: BTreeSet<u32>,
    told: Told,
    /// The first thing that must not be.
    violation: Option<String>,
}

impl Ledger {
    /// The ledger of a scenario's job.
    pub(crate) fn new(scenario: &Scenario) -> Ledger {
        Ledger {
            workers: scenario.workers,
            first_workers: scenario.start_workers.unwrap_or(scenario.workers),
            standbys: scenario.replicas.then(Standbys::default),
            sites: Sites::new(scenario.replicas),
            rewinds: Rewinds::new(scenario.rewind_every),
            told: Told::new(scenario.racks.map_or(1, |racks| racks.count.into())),
            ..Ledger::default()
        }
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

    /// A hub has the job, whose sites are these, and whose chunks have these hubs if they have standbys.
    pub(crate) fn arranged(&mut self, composition: &Composition, shares: &[Share]) {
        self.sites.arranged(composition);
        if let Some(standbys) = &mut self.standbys {
            standbys.arranged(composition, shares);
        }
    }

    /// A hub has taken the initial parameters of a chunk. Returns their digest.
    pub(crate) fn initialised(&mut self, chunk: SiteChunk) -> u64 {
        let digest = mixed(u64::from(chunk.1) + 1);
        if self.versions.insert(chunk, vec![digest]).is_some() {
            self.violate(|| format!("{} was initialised twice", name(chunk)));
        }
        digest
    }

    /// A hub has new memory for a chunk that it had given up.
    pub(crate) fn begins_anew(&mut self, chunk: SiteChunk) {
        self.versions.remove(&chunk);
        self.behind.remove(&chunk);
    }

    /// A hub has taken the parameters of a version of a chunk from the one that serves it. Returns their digest.
    pub(crate) fn copied(&mut self, chunk: SiteChunk, version: u32, digest: u64) -> u64 {
        if self.versions.contains_key(&chunk) {
            self.violate(|| format!("{} was initialised twice", name(chunk)));
        }
        let all_of = self.versions.iter().filter(|((_, of), _)| *of == chunk.1);
        let mut same = all_of.filter(|(_, versions)| versions.get(version as usize) == Some(&digest));
        match same.next().map(|(_, versions)| versions[..=version as usize].to_vec()) {
            Some(versions) => drop(self.versions.insert(chunk, versions)),
            None => {
                self.violate(|| format!("{} is copied, and is not that of version {version}", name(chunk)))
            }
        }
        digest
    }

    /// A hub has updated a chunk with the sum of these contributions. Returns the digest of the new parameters. In a job
    /// that goes back, all ranks must be in the sum, each with the process that has come since the chunk went back last.
    pub(crate) fn updated(
        &mut self,
        chunk: SiteChunk,
        step: u32,
        sum: &mut [Contribution],
        rewound_in: u64,
    ) -> u64 {
        sum.sort_unstable();
        let has = |rank: u32| sum.iter().any(|contribution| contribution.rank == rank);
        let lacks_one = match self.rewinds.may_happen() {
            true => (0..self.rewinds.workers_since(rewound_in).max(sum.len() as u32)).any(|rank| !has(rank)),
            false => (0..self.workers).any(|rank| self.was_always_there(rank) && !has(rank)),
        };
        let has_others =
            sum.iter().any(|contribution| contribution.step != step || contribution.epoch <= rewound_in);
        let has_one_twice = sum.windows(2).any(|pair| pair[0].rank == pair[1].rank);
        if lacks_one || has_others || has_one_twice {
            self.violate(|| format!("the update of {} at step {step} has the sum of {sum:?}", name(chunk)));
        }
        let versions = self.versions.entry(chunk).or_default();
        let version = self.behind.get(&chunk).map_or(versions.len(), |&present| present as usize + 1);
        let before = versions.get(version.wrapping_sub(1)).copied().unwrap_or_default();
        let digest = mixed(before ^ u64::from(step) << 32 ^ u64::from(chunk.1));
        match version == versions.len() {
            true => versions.push(digest),
            false => drop(self.behind.insert(chunk, version as u32)),
        }
        if version + 1 == versions.len() {
            self.behind.remove(&chunk);
        }
        if version != step as usize + 1 {
            self.violate(|| format!("the update of {} at step {step} makes version {version}", name(chunk)));
        }
        let checked = self.sites.updated(chunk, version as u32, sum, digest);
        self.check(checked);
        digest
    }

    /// A site sends the sum of its members' contributions to a step of a chunk to the site above.
    pub(crate) fn raised(&mut self, chunk: SiteChunk, step: u32, sum: &[Contribution]) {
        let checked = self.sites.raised(chunk, step, sum);
        self.check(checked);
    }

    /// A site has taken the parameters of a version from a chunk's owner.
    pub(crate) fn lowered(&mut self, chunk: SiteChunk, version: u32, digest: u64) {
        let versions = self.versions.entry(chunk).or_default();
        versions.push(digest);
        let made = versions.len() as u32 - 1;
        if made != version {
            self.violate(|| format!("{} takes version {version}, and had come to {}", name(chunk), made - 1));
        }
        let checked = self.sites.lowered(chunk, version, digest);
        self.check(checked);
    }

    /// A hub has taken a chunk back to a version, with parameters of this digest.
    pub(crate) fn went_back(&mut self, chunk: SiteChunk, version: u32, digest: u64) {
        let versions = self.versions.get(&chunk).map_or(&[][..], |versions| versions);
        let present = self.behind.get(&chunk).copied().unwrap_or(versions.len() as u32 - 1);
        if version > present || versions[version as usize] != digest {
            self.violate(|| {
                format!("{} goes back from version {present} to another than {version}", name(chunk))
            });
        }
        self.behind.insert(chunk, version);
    }

    /// A chunk waits for parameters to start from once more.
    pub(crate) fn began_anew(&mut self, chunk: SiteChunk) {
        self.versions.remove(&chunk);
        self.behind.remove(&chunk);
    }

    /// The version that every chunk has at the end at all sites; `None` if they have several.
    pub(crate) fn common_version(&self) -> Option<u32> {
        let present = |(chunk, versions): (&SiteChunk, &Vec<u64>)| match self.behind.get(chunk) {
            Some(&present) => present,
            None => versions.len() as u32 - 1,
        };
        let mut all: BTreeMap<SiteChunk, u32> = BTreeMap::new();
        for (&(site, chunk), versions) in &self.versions {
            // Where two hubs have a chunk, one may be lost, and be behind.
            let place = if self.standbys.is_some() { 0 } else { site };
            let newest = all.entry((place, chunk)).or_default();
            *newest = present((&(site, chunk), versions)).max(*newest);
        }
        let mut all = all.into_values();
        let first = all.next()?;
        all.all(|version| version == first).then_some(first)
    }

    /// A hub takes over a chunk from the one that has served it.
    pub(crate) fn taken_over(&mut self, chunk: SiteChunk) {
        let version = self.versions.get(&chunk).map(|versions| versions.len() as u32 - 1);
        let checked = self.standbys.as_mut().map_or(Ok(()), |standbys| standbys.takes_over(chunk, version));
        self.check(checked);
    }

    /// The manager tells hubs the shares of the chunks, which have changed so often.
    pub(crate) fn shares_decided(&mut self, number: u32, shares: &[Share]) {
        let checked = self.standbys.as_mut().map_or(Ok(()), |standbys| standbys.decided(number, shares));
        self.check(checked);
    }

    /// How often a hub had all chunks of a share that it got while the job ran, how often it served another then, and how many
    /// hubs that have joined the running job have taken over.
    pub(crate) fn new_standbys(&self) -> (usize, usize, usize) {
        self.standbys.as_ref().map_or((0, 0, 0), |standbys| {
            (standbys.became_ready(), standbys.became_ready_further(), standbys.later_took_over())
        })
    }

    /// A hub with these copies of chunks exchanges with a worker by a stream.
    pub(crate) fn exchanges(&mut self, stream: StreamId, copy: SiteId) {
        if let Some(standbys) = &mut self.standbys {
            standbys.exchanges(stream, copy);
        }
    }

    /// A hub has heard that all ranks go back, in an epoch.
    pub(crate) fn rewound(&mut self, epoch: u64) {
        self.rewinds.begun(epoch);
    }

    /// How often all ranks have gone back.
    pub(crate) fn rewinds(&self) -> usize {
        self.rewinds.count()
    }

    /// How often all ranks have begun anew, because parameters to start from were missing.
    pub(crate) fn begun_anew(&self) -> usize {
        self.rewinds.count_anew()
    }

    /// The newest epoch in which all ranks have begun to go back; 0 if there is none.
    pub(crate) fn newest_rewind(&self) -> u64 {
        self.rewinds.newest()
    }

    /// A rank has the parameters of all chunks after so many steps.
    pub(crate) fn reached(&mut self, step: u32) {
        self.rewinds.reached(step);
    }

    /// A hub takes a rank for lost: updates need not have its contribution from now on.
    pub(crate) fn rank_lost(&mut self, rank: u32) {
        self.lost.insert(rank);
    }

    /// Whether a hub has taken this rank for lost at some time.
    pub(crate) fn was_lost(&self, rank: u32) -> bool {
        self.lost.contains(&rank)
    }

    /// Whether the job has begun with this rank, and no hub has ever taken it for lost.
    pub(crate) fn was_always_there(&self, rank: u32) -> bool {
        let first_workers = match self.rewinds.may_happen() {
            // A start with another number of workers may have come before the job began.
            true => self.rewinds.workers_since(0),
            false => self.first_workers,
        };
        rank < first_workers && !self.was_lost(rank)
    }

    /// A hub has moved a chunk on to a version without an update.
    pub(crate) fn skipped(&mut self, chunk: SiteChunk, version: u32) {
        let versions = self.versions.entry(chunk).or_default();
        let newest = versions.last().copied().unwrap_or_default();
        versions.resize(version as usize + 1, newest);
    }

    /// A worker has received parameters by a stream.
    pub(crate) fn received(&mut self, rank: u32, from: StreamId, chunk: ChunkId, version: u32, digest: u64) {
        let place = match &self.standbys {
            Some(standbys) => standbys.copy_of(from),
            None => self.sites.of(rank),
        };
        let known = self.versions.get(&(place, chunk)).and_then(|versions| versions.get(version as usize));
        if known != Some(&digest) {
            self.violate(|| {
                format!("rank {rank} has received parameters of chunk {chunk} that are not those of version {version}")
            });
        }
        let standbys = self.standbys.as_mut();
        let checked = standbys.map_or(Ok(()), |standbys| standbys.received((place, chunk), version));
        self.check(checked);
    }

    /// The manager tells a process that it has its rank.
    pub(crate) fn connected(&mut self, rank: u32, incarnation: Incarnation, connected: &ServiceConnected) {
        let checked = self.told.connected(rank, incarnation, connected);
        self.check(checked);
    }

    /// The manager tells a rank that the job runs.
    pub(crate) fn told_that_it_runs(&mut self, rank: u32, initialised: &ServiceInitialised) {
        let checked = self.told.initialised(rank, initialised);
        self.check(checked);
    }

    /// A process that has a rank since an epoch begins at a step, if it joins a running job.
    /// `workers` were started together with it, if this number may change.
    pub(crate) fn joined(&mut self, rank: u32, epoch: u64, step: Option<u32>, workers: Option<u32>) {
        let checked = self.rewinds.joined(rank, epoch, step, workers.unwrap_or(self.workers));
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

fn name((site, chunk): SiteChunk) -> String {
    format!("chunk {chunk} at site {site}")
}
