//! Hubs that have a part in a job and become the standby of a further share.
//!
//! A share that has lost one of its hubs may get such a standby if no hub without a part in the job is there. The hub first
//! allocates the share. The change of the shares that follows its answer makes it the standby. Any other change of the shares
//! withdraws what was asked: the hub gives the share up, and may be asked again.

use std::collections::BTreeSet;

use super::new_standbys::{ALLOCATES_WITHIN_S, ASK_AGAIN_AFTER_S, LackingShare};
use super::{Job, Transition};
use crate::membership::Now;
use crate::service::{FurtherShares, HubCommand, JobState, TeamAllowance};
use crate::standbys::{Role, Share};

/// The time that a share waits for a hub without a part in the job: one that was lost may come back.
const NEW_HUBS_COME_WITHIN_S: f64 = 10.0;

/// The further shares of which a hub is about to become the standby.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AskedFurther {
    shares: Vec<u16>,
    at: Now,
    /// What the hub had reserved before: bytes of buffers, and streams.
    reserved: (u64, u64),
}

impl Job {
    /// Notes which shares have no standby, and since when.
    pub(crate) fn note_lacking(&mut self, now: Now) {
        let lacking = (0..).zip(&self.shares).filter(|(_, share)| share.standby.is_none());
        let lacking: BTreeSet<u16> = lacking.map(|(number, _)| number).collect();
        self.lacking_since.retain(|share, _| lacking.contains(share));
        for share in lacking {
            self.lacking_since.entry(share).or_insert(now);
        }
    }

    /// Whether a hub that has a part in the job may be asked to become the standby of a share, too.
    pub(crate) fn may_ask_further(&self, hub: u32, lacking: LackingShare, now: Now) -> bool {
        let LackingShare { share, served_by } = lacking;
        let since = self.lacking_since.get(&share);
        let has_waited = since.is_some_and(|&since| now.seconds_since(since) >= NEW_HUBS_COME_WITHIN_S);
        let is_due = has_waited || self.destination(lacking, now) == Some(hub);
        let Some(index) = self.job_hub_index(hub).filter(|_| is_due && hub != served_by) else {
            return false;
        };
        let job_hub = &self.job_hubs[index];
        let has_failed = |at| now.seconds_since(at) < ASK_AGAIN_AFTER_S;
        job_hub.allocated
            && !job_hub.ended
            && job_hub.unheard.is_none()
            && job_hub.asked_standby.is_none()
            && job_hub.asked_further.is_none()
            && !job_hub.failed_further.is_some_and(has_failed)
            && self.parts_of(hub) > 0
    }

    /// The number of shares that a hub serves or follows.
    pub(crate) fn parts_of(&self, hub: u32) -> usize {
        let Some(position) = self.job_hub_index(hub).map(|index| index as u16) else { return 0 };
        self.shares.iter().filter(|share| share.role(position) != Role::None).count()
    }

    /// Asks a hub that has a part in the job to allocate these shares, too. Returns what it is asked; `None` if the job cannot be
    /// planned, since it has ended.
    pub(crate) fn ask_further(
        &mut self,
        hub: u32,
        shares: Vec<u16>,
        team: TeamAllowance,
        now: Now,
    ) -> Option<HubCommand> {
        let index = self.job_hub_index(hub)?;
        let mut plan = self.plan_of_standby(index as u16, &shares, team)?;
        plan.further = Some(FurtherShares { number: self.shares_number, shares: shares.clone() });
        let job_hub = &mut self.job_hubs[index];
        job_hub.asked_further = Some(AskedFurther { shares, at: now, reserved: job_hub.reserved });
        Some(HubCommand::Allocate(Box::new(plan)))
    }

    /// A hub has allocated further shares, and becomes their standby; `None` if it was not asked for these.
    pub(super) fn further_allocated(&mut self, index: usize, number: Option<u32>) -> Option<Transition> {
        number.filter(|&number| number == self.shares_number)?;
        let AskedFurther { shares, .. } = self.job_hubs[index].asked_further.take()?;
        Some(self.follow_with(index, shares))
    }

    /// What was asked of hubs that have a part in the job does not count any more, since the shares change.
    pub(super) fn withdraw_further(&mut self) {
        for job_hub in &mut self.job_hubs {
            job_hub.asked_further = None;
        }
    }

    /// Does without a hub that has allocated further shares, or has not for too long; `None` if it was not asked to.
    pub(super) fn refuse_further(&mut self, index: usize, reason: &str, now: Now) -> Option<Transition> {
        self.further_refused(index, now)?;
        let name = self.job_hubs[index].describe();
        let message = self.change_shares(format!("{name} does not become a further standby: {reason}"));
        Some(Transition::SharesChanged { message: Some(message), told_later: None })
    }

    /// A hub cannot allocate further shares; `None` if it was not asked to.
    pub(super) fn further_refused(&mut self, index: usize, now: Now) -> Option<()> {
        let job_hub = &mut self.job_hubs[index];
        let AskedFurther { reserved, .. } = job_hub.asked_further.take()?;
        (job_hub.reserved, job_hub.failed_further) = (reserved, Some(now));
        Some(())
    }

    /// A hub has ended the job. If it was to copy shares to further standbys, and had not heard of that, these would wait for it in
    /// vain: they give the shares up.
    pub(super) fn needs_no_copies_of(&mut self, index: usize) -> Option<Transition> {
        let waits = |share: &Share| {
            // The job is over without a hub that has nothing but copies.
            let is_needed = |standby: u16| !self.is_dispensable(usize::from(standby));
            share.served_by == index as u16 && share.copying && share.standby.is_some_and(is_needed)
        };
        let waiting: Vec<usize> =
            (0..self.shares.len()).filter(|&share| waits(&self.shares[share])).collect();
        if waiting.is_empty() {
            return None;
        }
        for share in waiting {
            self.shares[share] = Share::new(index as u16, None);
        }
        let serving = self.job_hubs[index].describe();
        let message = self.change_shares(format!("{serving} has finished without a standby"));
        Some(Transition::SharesChanged { message: Some(message), told_later: None })
    }

    /// The first hub that has not allocated further shares for too long.
    pub(super) fn late_further(&self, now: Now) -> Option<usize> {
        let is_late = |asked: &AskedFurther| {
            self.state == JobState::Running && now.seconds_since(asked.at) >= ALLOCATES_WITHIN_S
        };
        self.job_hubs.iter().position(|job_hub| job_hub.asked_further.as_ref().is_some_and(is_late))
    }

    /// Whether a hub is about to become a further standby of a share.
    pub(super) fn is_asked_further(&self, share: u16) -> bool {
        let mut asked = self.job_hubs.iter().filter_map(|job_hub| job_hub.asked_further.as_ref());
        asked.any(|asked| asked.shares.contains(&share))
    }

    /// The shares as they are when the hub at this position has become the standby of these.
    pub(super) fn shares_with_standby(&self, position: u16, shares: &[u16]) -> Vec<Share> {
        let mut planned = self.shares.clone();
        for &share in shares {
            let share = &mut planned[usize::from(share)];
            (share.standby, share.copying) = (Some(position), true);
        }
        planned
    }
}
