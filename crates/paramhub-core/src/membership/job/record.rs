//! The record of a job in the store, and how the job goes on from it under another manager.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::begin_again::Returns;
use super::job_hubs::JobHub;
use super::loss_tally::LossTally;
use super::moves::MoveOrder;
use super::rank_assignments::RankRecord;
use super::rewind::Rewind;
use super::{Job, JobPhase, SettingsSummary, SitePlacement, Transition};
use crate::auth::{Epoch, Nonce};
use crate::composition::{Composition, Place, SiteId};
use crate::membership::Now;
use crate::placement::HubShape;
use crate::scheme::InformationBook;
use crate::service::{CreateService, ErrorCode, JobCounters, JobOptions, JobState, JobStatus};
use crate::settings::Settings;
use crate::standbys::{Role, Share};

/// The record of a job, which the store keeps.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JobRecord {
    /// The number of the job among all jobs ever created.
    pub order: u64,
    /// The job's secret.
    pub nonce: Nonce,
    /// Its epoch; the store of an earlier release has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<Epoch>,
    /// Its waits and lifetimes.
    pub options: JobOptions,
    /// The job as listings show it.
    pub status: JobStatus,
    /// Its ranks and hubs, from the moment when all ranks have connected until the job ends. The store of an earlier
    /// release has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub members: Option<Box<MembersRecord>>,
    /// The hubs that may have a part of the job from before it began again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub former_hubs: Vec<u32>,
    /// How often it has begun again, and whether that was of use.
    #[serde(default, skip_serializing_if = "is_default")]
    pub returns: Returns,
}

/// The ranks and hubs of a job whose ranks have all connected, and what they were told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MembersRecord {
    /// When this was recorded, in seconds since the Unix epoch; 0 in the store of an earlier release.
    #[serde(default)]
    recorded_at: u64,
    ranks: Vec<RankRecord>,
    /// Set while ranks are missing because all go back to an earlier step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rewind: Option<Rewind>,
    /// The number of ranks that take part, in a job whose ranks go back and which may have more or fewer than at first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    current_workers: Option<u32>,
    /// The place of each rank.
    places: Vec<Place>,
    /// The address of each rank for other ranks.
    peer_addresses: Vec<Option<SocketAddr>>,
    /// The hubs, site by site in placement order; none in a job without hubs.
    hubs: Vec<JobHubRecord>,
    /// The hubs of each share, the number of the last change and its reason, if the chunks have standbys.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    shares: Vec<Share>,
    #[serde(default, skip_serializing_if = "is_default")]
    shares_number: u32,
    #[serde(default, skip_serializing_if = "is_default")]
    shares_reason: String,
    /// The hubs off which an operator has moved the job.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    moves: Vec<MoveOrder>,
    /// The settings of a job with standbys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    settings: Option<Arc<Settings>>,
    /// The sites of the hubs with which the job began.
    composition: Option<Arc<Composition>>,
    /// What ranks and hubs were told once the hubs had allocated; none before.
    placed: Option<PlacedRecord>,
}

/// A hub's part in a job.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct JobHubRecord {
    hub: u32,
    counters: JobCounters,
    left_out: Vec<u64>,
    /// Bytes of buffers, and streams.
    reserved: (u64, u64),
    /// The interfaces of a hub that the job has got since it began; those of the others are in the composition.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    later_shape: Option<HubShape>,
}

/// A job's placement.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct PlacedRecord {
    placements: Vec<SitePlacement>,
    information_book: Arc<InformationBook>,
    /// The step of the checkpoint with which the job began.
    resumed_step: Option<u32>,
    /// The digest of the settings; a store of an earlier release has none.
    #[serde(default)]
    digest: String,
}

impl Job {
    /// The record that the store keeps.
    pub fn record(&self, now: Now) -> JobRecord {
        let has_members = matches!(self.state, JobState::Initialising | JobState::Running);
        JobRecord {
            order: self.order,
            nonce: self.nonce,
            epoch: self.epoch,
            options: self.options,
            status: self.status(now),
            members: has_members.then(|| Box::new(self.members_record(now))),
            former_hubs: self.former_hubs(),
            returns: self.returns,
        }
    }

    fn members_record(&self, now: Now) -> MembersRecord {
        let first = self.first_hubs();
        let hub = |(position, job_hub): (usize, &JobHub)| JobHubRecord {
            later_shape: (position >= first).then(|| job_hub.shape.clone()),
            hub: job_hub.hub,
            counters: job_hub.counters,
            left_out: job_hub.left_out.clone(),
            reserved: job_hub.reserved,
        };
        let information_book = self.information_book.clone().filter(|_| self.state == JobState::Running);
        MembersRecord {
            recorded_at: now.unix_s,
            ranks: self.assignments.record(),
            rewind: self.rewind.clone(),
            current_workers: self.may_change_workers().then_some(self.current_workers),
            places: self.places.clone(),
            peer_addresses: self.peer_addresses.clone(),
            hubs: self.job_hubs.iter().enumerate().map(hub).collect(),
            shares: self.shares.clone(),
            shares_number: self.shares_number,
            shares_reason: self.shares_reason.clone(),
            moves: self.moves.clone(),
            settings: self.settings.clone(),
            composition: self.composition.clone(),
            placed: information_book.map(|information_book| PlacedRecord {
                placements: self.placements.clone(),
                information_book,
                resumed_step: self.resumed_step(),
                digest: self.summary.digest.clone(),
            }),
        }
    }

    /// Restores a job of an earlier manager. One that was connecting waits for all of its ranks again, since their
    /// calls broke with that manager and are repeated. One that was initialising waits for the settings of its ranks,
    /// and one that ran goes on, if the hubs report that they have it.
    pub(crate) fn restore(record: JobRecord, now: Now) -> (Self, Transition) {
        let JobRecord { order, nonce, epoch, options, status, members, former_hubs, returns } = record;
        let request = CreateService { name: status.name, workers: status.workers, options };
        let mut job = Job::new(order, request, status.namespace, nonce, epoch, now);
        job.created_at = status.created_at;
        job.had_linked_hubs = job.has_begun_again() && job.options.has_standbys();
        job.former_hubs = former_hubs.into_iter().map(|hub| (hub, false)).collect();
        job.returns = returns;
        job.message = status.message;
        job.reduction = status.reduction;
        job.loss_tally = LossTally::restored(status.losses.unwrap_or_default());
        job.summary = SettingsSummary {
            keys: status.keys,
            bytes: status.bytes,
            optimizer: status.optimizer,
            consistency: status.consistency,
            digest: String::new(),
        };
        match (status.state, members) {
            (JobState::Connecting, _) => return (job, Transition::None),
            (JobState::Initialising | JobState::Running, Some(members)) if members.fit(status.workers) => {
                job.restore_members(status.state, *members, now);
                return (job, Transition::None);
            }
            _ => {}
        }
        job.assignments.restore_ended(&status.connected, status.epoch);
        job.recorded_counters = status.counters;
        job.recorded_left_out = status.left_out;
        job.recorded_checkpoints = status.checkpoints;
        if status.state.has_ended() {
            job.state = status.state;
            job.ended_at = status.ended_at;
            job.phase = JobPhase::Cleared;
            return (job, Transition::None);
        }
        let message =
            "the connection manager restarted, and its store does not say which ranks and hubs the job had";
        let transition = job.fail(ErrorCode::JobEnded, message.into(), now);
        (job, transition)
    }

    fn restore_members(&mut self, state: JobState, members: MembersRecord, now: Now) {
        self.assignments.restore(members.ranks, now);
        self.rewind = members.rewind;
        self.current_workers = members.current_workers.unwrap_or(self.current_workers).min(self.workers);
        self.places = members.places;
        self.peer_addresses = members.peer_addresses;
        let sites = members.composition.iter().flat_map(|composition| (0..).zip(&composition.sites));
        let shapes = sites.flat_map(|(site, hubs)| hubs.hubs.iter().map(move |shape| (site, shape)));
        let later: Vec<HubShape> =
            members.hubs.iter().filter_map(|recorded| recorded.later_shape.clone()).collect();
        let shapes = shapes.chain(later.iter().map(|shape| (0, shape)));
        let hub = |(recorded, (site, shape)): (JobHubRecord, (SiteId, &HubShape))| JobHub {
            // A hub that was not asked answers a stop all the same.
            asked: true,
            counters: recorded.counters,
            left_out: recorded.left_out,
            reserved: recorded.reserved,
            ..JobHub::new(recorded.hub, shape.clone(), site)
        };
        self.job_hubs = members.hubs.into_iter().zip(shapes).map(hub).collect();
        self.shares = members.shares;
        self.settings = members.settings;
        (self.shares_number, self.shares_reason) = (members.shares_number, members.shares_reason);
        self.moves = members.moves;
        let newest: BTreeMap<u32, u16> =
            self.job_hubs.iter().zip(0..).map(|(job_hub, position)| (job_hub.hub, position)).collect();
        // A hub of which nothing is left in the shares has been lost, and is not awaited. Neither is the first part of a hub without
        // chunks which has become a standby since: it was over at once.
        for (job_hub, position) in self.job_hubs.iter_mut().zip(0..) {
            let has_role = self.shares.iter().any(|share| share.role(position) != Role::None);
            let is_newest = newest.get(&job_hub.hub) == Some(&position);
            job_hub.ended = !self.shares.is_empty() && (!has_role || !is_newest);
            job_hub.failed_standby = job_hub.ended.then_some(now);
        }
        self.composition = members.composition;
        (self.state, self.phase) = (JobState::Initialising, JobPhase::Initialising);
        if state == JobState::Running {
            (self.state, self.phase) = (JobState::Running, JobPhase::Running);
            self.agreed = true;
            // While no manager ran, a rank that was lost stayed so.
            let away_s =
                if members.recorded_at == 0 { 0 } else { now.unix_s.saturating_sub(members.recorded_at) };
            self.note_presence(now.earlier(away_s as f64));
            if let Some(placed) = members.placed {
                self.placements = placed.placements;
                self.summary.digest = placed.digest;
                self.information_book = Some(placed.information_book);
                for job_hub in &mut self.job_hubs {
                    job_hub.allocated = true;
                    job_hub.resumed_step = placed.resumed_step;
                }
            }
        }
    }
}

/// Returns whether a field has its default, and is left out.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl MembersRecord {
    /// Whether every rank and every hub has what belongs to it.
    fn fit(&self, workers: u32) -> bool {
        let of_ranks = [self.ranks.len(), self.places.len(), self.peer_addresses.len()];
        let first = self.hubs.iter().take_while(|hub| hub.later_shape.is_none()).count();
        let later = self.hubs[first..].iter().all(|hub| hub.later_shape.is_some());
        of_ranks.into_iter().all(|length| length == workers as usize)
            && self.composition.as_ref().map_or(0, |composition| composition.hubs()) == first
            && later
    }
}
