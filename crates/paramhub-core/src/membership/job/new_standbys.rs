//! Hubs that become [standbys](crate::standbys) while the job runs: of shares whose standby was lost, or took over.
//!
//! The manager asks a hub that has no part in the job to allocate the shares. Once it has, the hubs that serve them hear of it,
//! and copy the chunks. When such a hub reports that the standby has all of them, the standby can take over. Up to then the job
//! goes on as without it, whatever becomes of it.

use std::collections::BTreeSet;

use super::job_hubs::JobHub;
use super::{Job, Transition, join_words};
use crate::membership::Now;
use crate::placement::HubShape;
use crate::service::{HubCommand, JobPlan, JobState, StandbyCounts, StopWhen, TeamAllowance};
use crate::standbys::{Role, Share};

/// The time after which a hub is asked once more that could not become a standby.
pub(super) const ASK_AGAIN_AFTER_S: f64 = 30.0;
/// The time that a hub may take to allocate.
pub(super) const ALLOCATES_WITHIN_S: f64 = 120.0;
/// The most hubs that a job gets while it runs. All its hubs hear of each of them with every change.
const LATER_HUBS_MAX: usize = 1000;

/// The shares of which a hub is about to become the standby.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AskedStandby {
    shares: Vec<u16>,
    at: Now,
}

/// A share without a standby, and the hub that serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LackingShare {
    pub(crate) share: u16,
    pub(crate) served_by: u32,
}

impl Job {
    /// The number of hubs with which the job began.
    pub(super) fn first_hubs(&self) -> usize {
        self.composition.as_ref().map_or(0, |composition| composition.hubs())
    }

    /// The hubs that the job has got since it began.
    pub(super) fn later_hubs(&self) -> Vec<HubShape> {
        self.job_hubs.iter().skip(self.first_hubs()).map(|job_hub| job_hub.shape.clone()).collect()
    }

    /// The shares that are to get a standby.
    pub(crate) fn lacking_shares(&self) -> Vec<LackingShare> {
        let has_room = self.job_hubs.len() < self.first_hubs() + LATER_HUBS_MAX;
        if self.state != JobState::Running || self.is_concluding() || !has_room || self.has_suspected_hubs() {
            return Vec::new();
        }
        let is_asked_for = |number: u16| {
            let mut asked = self.job_hubs.iter().filter_map(|job_hub| job_hub.asked_standby.as_ref());
            asked.any(|asked| asked.shares.contains(&number)) || self.is_asked_further(number)
        };
        let lacks = |&(number, share): &(u16, &Share)| {
            let has_ended = self.job_hubs[usize::from(share.served_by)].ended;
            share.standby.is_none() && !has_ended && !self.is_empty_share(number) && !is_asked_for(number)
        };
        let lacking = (0..).zip(&self.shares).filter(lacks);
        let served_by = |share: &Share| self.job_hubs[usize::from(share.served_by)].hub;
        lacking.map(|(number, share)| LackingShare { share: number, served_by: served_by(share) }).collect()
    }

    /// How many of the job's shares have a standby; `None` if it has none, or has ended.
    pub fn standby_counts(&self) -> Option<StandbyCounts> {
        if self.shares.is_empty() || self.state.has_ended() {
            return None;
        }
        let with_chunks = || (0..).zip(&self.shares).filter(|&(share, _)| !self.is_empty_share(share));
        Some(StandbyCounts {
            shares: with_chunks().count() as u32,
            ready: with_chunks().filter(|(_, share)| share.ready_standby().is_some()).count() as u32,
            copying: with_chunks().filter(|(_, share)| share.standby.is_some() && share.copying).count()
                as u32,
        })
    }

    /// Whether the placement has put no chunk on the first hub of a share.
    pub(super) fn is_empty_share(&self, share: u16) -> bool {
        self.placements.first().is_some_and(|placed| placed.empty_hubs.contains(&share))
    }

    /// Whether a hub may be asked to become a standby: it has no part in the job, and has not failed lately.
    pub(crate) fn may_ask_standby(&self, hub: u32, now: Now) -> bool {
        let entries = self.job_hubs.iter().filter(|job_hub| job_hub.hub == hub);
        let is_free = |job_hub: &JobHub| {
            let has_failed = |at| now.seconds_since(at) < ASK_AGAIN_AFTER_S;
            job_hub.ended && !job_hub.failed_standby.is_some_and(has_failed)
        };
        let mut entries = entries.peekable();
        entries.peek().is_none() || entries.all(is_free)
    }

    /// Gives a hub a part in the job, as the standby of these shares. Returns what the hub is asked, once that is saved; `None` if
    /// the job cannot be planned, since it has ended.
    pub(crate) fn ask_standby(
        &mut self,
        hub: u32,
        shape: HubShape,
        shares: Vec<u16>,
        team: TeamAllowance,
        now: Now,
    ) -> Option<HubCommand> {
        let position = self.job_hubs.len() as u16;
        self.job_hubs.push(JobHub {
            asked: true,
            asked_standby: Some(AskedStandby { shares: shares.clone(), at: now }),
            ..JobHub::new(hub, shape, 0)
        });
        let Some(plan) = self.plan_of_standby(position, &shares, team) else {
            self.job_hubs.pop();
            return None;
        };
        Some(HubCommand::Allocate(Box::new(plan)))
    }

    /// What the hub at this position must know of the job to become the standby of these shares; `None` if the job has ended.
    pub(super) fn plan_of_standby(
        &self,
        position: u16,
        shares: &[u16],
        team: TeamAllowance,
    ) -> Option<JobPlan> {
        let (settings, book) = (self.settings.as_ref()?, self.information_book.as_ref()?);
        Some(JobPlan {
            name: self.name.clone(),
            namespace: self.namespace,
            nonce: self.nonce,
            epoch: self.epoch?,
            version_1_ranks: self.version_1_ranks(),
            options: self.options_told(),
            composition: self.composition.as_ref()?.as_ref().clone(),
            site: 0,
            hub: u32::from(position),
            shares: self.shares_with_standby(position, shares),
            later_hubs: self.later_hubs(),
            further: None,
            cluster: book.roster.cluster(),
            settings: settings.as_ref().clone(),
            team,
        })
    }

    /// The hubs that hear of the shares. One that is only asked to become a standby does not have its part yet.
    pub(crate) fn hubs_told_of_shares(&self) -> Vec<u32> {
        let told: BTreeSet<u32> = self.hubs().collect();
        let has_part = |&hub: &u32| {
            let newest = self.job_hub_index(hub).map(|index| &self.job_hubs[index]);
            newest.is_some_and(|job_hub| job_hub.asked_standby.is_none())
        };
        told.into_iter().filter(has_part).collect()
    }

    /// A hub that was asked to become a standby has allocated: the hubs that serve its shares copy their chunks.
    pub(super) fn standby_allocated(&mut self, index: usize) -> Transition {
        let Some(AskedStandby { shares, .. }) = self.job_hubs[index].asked_standby.take() else {
            return Transition::None;
        };
        self.job_hubs[index].allocated = true;
        self.follow_with(index, shares)
    }

    /// Has a hub that has allocated these shares become their standby.
    pub(super) fn follow_with(&mut self, index: usize, shares: Vec<u16>) -> Transition {
        let mut followed = Vec::new();
        for share in shares {
            let held = &mut self.shares[usize::from(share)];
            if held.standby.is_none() && !self.job_hubs[usize::from(held.served_by)].ended {
                *held = Share { copying: true, ..Share::new(held.served_by, Some(index as u16)) };
                followed.push(held.served_by);
            }
        }
        followed.sort_unstable();
        followed.dedup();
        if followed.is_empty() {
            let reason = "the job needs no further standby any more";
            return match self.parts_of(self.job_hubs[index].hub) {
                0 => self.stop_later_hub(index, reason),
                _ => Transition::SharesChanged {
                    message: Some(self.change_shares(reason.into())),
                    told_later: None,
                },
            };
        }
        let served_by: Vec<String> =
            followed.iter().map(|&hub| self.job_hubs[usize::from(hub)].describe()).collect();
        let standby = self.job_hubs[index].describe();
        let message =
            self.change_shares(format!("{standby} becomes the standby of {}", join_words(&served_by)));
        Transition::SharesChanged { message: Some(message), told_later: None }
    }

    /// The hub that serves a share reports that the standby has all chunks, and can take over.
    pub(crate) fn standby_ready(&mut self, reporter: u32, share: u16, standby: u16) -> Transition {
        let reporter = self.job_hub_index(reporter).map(|index| index as u16);
        let Some(held) = self.shares.get_mut(usize::from(share)) else { return Transition::None };
        let is_it = Some(held.served_by) == reporter && held.standby == Some(standby) && held.copying;
        if self.state != JobState::Running || !is_it {
            return Transition::None;
        }
        held.copying = false;
        let [standby, serving] =
            [standby, held.served_by].map(|position| self.job_hubs[usize::from(position)].describe());
        let message = self.change_shares(format!("{standby} has all chunks of {serving} as its standby"));
        Transition::SharesChanged { message: Some(message), told_later: None }
    }

    /// Whether a hub is about to become a standby, or still receives the chunks: the job does not need it.
    pub(super) fn is_dispensable(&self, index: usize) -> bool {
        let position = index as u16;
        let roles = || self.shares.iter().filter(|share| share.role(position) != Role::None);
        let is_copying = |share: &Share| share.copying && share.standby == Some(position);
        self.job_hubs[index].asked_standby.is_some() || (roles().count() > 0 && roles().all(is_copying))
    }

    /// Goes on without a hub that the job does not need.
    pub(super) fn drop_dispensable(&mut self, index: usize, reason: &str, now: Now) -> Transition {
        let position = index as u16;
        self.job_hubs[index].asked_standby = None;
        self.leave_later_hub(index, now);
        let name = self.job_hubs[index].describe();
        let mut has_changed = false;
        for share in self.shares.iter_mut().filter(|share| share.standby == Some(position)) {
            *share = Share::new(share.served_by, None);
            has_changed = true;
        }
        let message = format!("{name} does not become a standby: {reason}");
        if !has_changed {
            self.message = message;
            return Transition::None;
        }
        let message = Some(self.change_shares(message));
        Transition::SharesChanged { message, told_later: None }
    }

    /// A hub has no part in the job any more, and may be asked again later.
    pub(super) fn leave_later_hub(&mut self, index: usize, now: Now) {
        (self.job_hubs[index].ended, self.job_hubs[index].failed_standby) = (true, Some(now));
    }

    /// Gives up hubs that do not allocate.
    pub(crate) fn check_asked_standbys(&mut self, now: Now) -> Transition {
        let reason = format!("it has not allocated the chunks within {ALLOCATES_WITHIN_S} s");
        if let Some(index) = self.late_further(now) {
            return self.refuse_further(index, &reason, now).unwrap_or(Transition::None);
        }
        let is_late = |asked: &AskedStandby| now.seconds_since(asked.at) >= ALLOCATES_WITHIN_S;
        let late =
            self.job_hubs.iter().position(|job_hub| job_hub.asked_standby.as_ref().is_some_and(is_late));
        let Some(index) = late else { return Transition::None };
        self.refuse_standby(index, &reason, now)
    }

    /// Does without a hub that has just allocated as a standby, since that is more than the job's team may have; `None` if the hub
    /// was not asked to become one.
    pub(crate) fn exceeds_team(&mut self, hub: u32, reason: &str, now: Now) -> Option<Transition> {
        let index = self.job_hub_index(hub)?;
        if self.job_hubs[index].asked_standby.is_none() {
            return self.refuse_further(index, reason, now);
        }
        self.job_hubs[index].reserved = (0, 0);
        Some(self.refuse_standby(index, reason, now))
    }

    /// Does without a hub that was asked to become a standby, of which no other hub knows yet, and has it end its part.
    pub(super) fn refuse_standby(&mut self, index: usize, reason: &str, now: Now) -> Transition {
        let _ = self.drop_dispensable(index, reason, now);
        self.stop_later_hub(index, reason)
    }

    /// Has a hub end its part, which the job does not need.
    pub(super) fn stop_later_hub(&mut self, index: usize, reason: &str) -> Transition {
        self.job_hubs[index].ended = true;
        let hubs = vec![self.job_hubs[index].hub];
        Transition::AskHubs { hubs, reason: reason.to_owned(), when: StopWhen::Now }
    }
}
