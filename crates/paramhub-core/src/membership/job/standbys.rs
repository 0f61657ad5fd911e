//! The hubs of a job's shares while it runs: a hub that is lost is replaced by its [standby](crate::standbys).
//!
//! Hubs report that another is lost to them. A hub that serves a share and has lost its standby goes on alone, since it is
//! there to say so. A standby that has lost the hub it follows takes over once the manager does not hear that hub either. If
//! the manager goes on hearing both, they do not reach each other, and the share goes on without its standby.
//!
//! The record of the job is saved before a hub hears of a change, and each change has a number. So the hubs of a share never
//! both answer: the one that served needs the acknowledgement of the other, or the manager's word that it goes on alone.

use super::begin_again::without_unheard;
use super::cause::Cause;
use super::silence::LOST_HUB_CALLS_WITHIN_S;
use super::{Job, Transition};
use crate::membership::Now;
use crate::service::{CauseKind, HubCommand, JobState};
use crate::standbys::{HubLocation, Role, Share, first_shares, without_hub};

/// The time since its last call after which a hub counts as gone that is lost to its standby, or has hung up while ranks go
/// back. Hubs call every second.
pub(super) const CALLS_WITHIN_S: f64 = 1.5;
/// The time after such a report after which a hub that calls counts as there.
const IS_THERE_AFTER_S: f64 = 2.0;

/// A report that the other hub of a share is lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SuspectedHub {
    /// The hub, by its position in the job.
    hub: u16,
    share: u16,
    at: Now,
    reason: String,
}

/// What the manager knows of a hub from its calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LastContact {
    /// When it last called.
    pub(crate) call: Now,
    /// Whether the connection of that call has ended since, although it was not answered.
    pub(crate) has_hung_up: bool,
}

impl LastContact {
    /// Whether a hub is gone without which a job that is to begin again waits.
    pub(crate) fn is_gone(&self, now: Now) -> bool {
        let within_s = if self.has_hung_up { CALLS_WITHIN_S } else { LOST_HUB_CALLS_WITHIN_S };
        now.seconds_since(self.call) >= within_s
    }
}

impl Job {
    /// Chooses the standby of each share, if the job has any. `location` says where a hub is.
    pub(crate) fn choose_standbys(&mut self, location: impl Fn(u32) -> HubLocation) {
        let is_flat = self.composition.as_ref().is_some_and(|composition| composition.is_flat());
        if self.options.has_standbys() && is_flat {
            let locations: Vec<HubLocation> = self.hubs().map(location).collect();
            self.shares = first_shares(&locations);
        }
    }

    /// The job begins again, and its shares are chosen anew for the hubs that are there. Where an operator has moved it counts no
    /// more.
    pub(super) fn forget_shares(&mut self) {
        self.shares.clear();
        (self.shares_number, self.shares_reason) = (0, String::new());
        self.suspected_hubs.clear();
        self.lacking_since.clear();
        self.moves.clear();
    }

    /// The hubs of each share; empty in a job without standbys.
    pub fn shares(&self) -> &[Share] {
        &self.shares
    }

    /// The command by which hubs hear of the shares as they are now.
    pub(crate) fn shares_command(&self) -> HubCommand {
        HubCommand::ChangeShares {
            namespace: self.namespace,
            number: self.shares_number,
            shares: self.shares.clone(),
            later_hubs: self.later_hubs(),
            reason: self.shares_reason.clone(),
        }
    }

    /// A hub reports that another hub of a share is lost to it, or that it leaves the job itself.
    pub(crate) fn counterpart_lost(
        &mut self,
        reporter: u32,
        (share, lost): (u16, u16),
        number: u32,
        reason: &str,
        now: Now,
    ) -> Transition {
        let reporter = self.job_hub_index(reporter).map(|index| index as u16);
        let held = self.shares.get(usize::from(share)).copied();
        let (Some(reporter), Some(held)) = (reporter, held) else { return Transition::None };
        if self.state != JobState::Running || usize::from(lost) >= self.job_hubs.len() {
            return Transition::None;
        }
        if reporter == lost {
            let message = format!("{} left: {reason}", self.job_hubs[usize::from(lost)].describe());
            return self.go_on_without(lost, Cause::known(message, now), now);
        }
        // A report of a hub that has not heard yet how another share has changed counts, too. If it comes so late that the two hubs
        // have become those of the share again, the share loses its standby once more, and gets another.
        match held.role(reporter) {
            Role::Serves { has_standby: true } if held.standby == Some(lost) => {
                let message = self.drop_standby(share, reason, now);
                // What it serves itself may have no chunks, and then nobody else reports its loss.
                self.suspect(share, lost, reason, now);
                let told_later = Some(self.job_hubs[usize::from(lost)].hub);
                Transition::SharesChanged { message, told_later }
            }
            Role::StandsBy if held.served_by == lost => {
                self.suspect(share, lost, reason, now);
                Transition::None
            }
            // It has not heard of the last change.
            _ if number != self.shares_number => self.repeat_shares(),
            _ => Transition::None,
        }
    }

    fn suspect(&mut self, share: u16, hub: u16, reason: &str, now: Now) {
        self.suspected_hubs.retain(|other| other.share != share);
        self.suspected_hubs.push(SuspectedHub { hub, share, at: now, reason: reason.to_owned() });
    }

    /// Whether it is not known yet of a hub that another has lost whether it is still there.
    pub(crate) fn has_suspected_hubs(&self) -> bool {
        !self.suspected_hubs.is_empty()
    }

    /// Replaces the hubs that others have lost and that the manager does not hear either. `last_contact` says what is
    /// known of a hub that has not been forgotten.
    pub(crate) fn check_suspected_hubs(
        &mut self,
        last_contact: impl Fn(u32) -> Option<LastContact>,
        now: Now,
    ) -> Transition {
        if self.state != JobState::Running {
            self.suspected_hubs.clear();
        }
        for position in 0..self.suspected_hubs.len() {
            let suspected = &self.suspected_hubs[position];
            let job_hub = &self.job_hubs[usize::from(suspected.hub)];
            let contact = last_contact(job_hub.hub).filter(|_| job_hub.unheard.is_none());
            let is_late = |contact: LastContact| now.seconds_since(contact.call) >= CALLS_WITHIN_S;
            // A hub without which the job fails may call late: it counts as gone when it is not heard for longer.
            let may_be_late =
                || without_hub(&self.shares, suspected.hub, |share| self.is_empty_share(share)).is_err();
            let is_gone =
                contact.is_none_or(|contact| contact.has_hung_up || is_late(contact) && !may_be_late());
            let is_there =
                contact.is_some_and(|contact| contact.call.seconds_since(suspected.at) >= IS_THERE_AFTER_S);
            if is_gone {
                let (hub, reason) = (suspected.hub, &suspected.reason);
                let message = format!(
                    "{} was lost: the connection manager does not hear it, and another hub reports that {reason}",
                    job_hub.describe()
                );
                let began = contact.map_or(now, |contact| contact.call);
                let (gone, cause) =
                    (job_hub.hub, Cause { kind: CauseKind::HubLost, rank: None, began, message });
                let transition = self.go_on_without(hub, cause, now);
                return without_unheard(gone, transition);
            }
            if is_there {
                let SuspectedHub { share, reason, .. } = self.suspected_hubs.remove(position);
                // If the share goes on without it already, it is to be told.
                let message = self.drop_standby(share, &reason, now);
                return Transition::SharesChanged { message, told_later: None };
            }
        }
        Transition::None
    }

    /// A hub is lost: its standbys take over. If a share has none, the job begins again from a checkpoint, or fails.
    pub(super) fn go_on_without(&mut self, lost: u16, cause: Cause, now: Now) -> Transition {
        self.suspected_hubs.retain(|suspected| suspected.hub != lost);
        self.job_hubs[usize::from(lost)].asked_standby = None;
        let served = self.shares.iter().filter(|share| share.served_by == lost);
        let taking_over: Vec<u16> = served.filter_map(Share::ready_standby).collect();
        match without_hub(&self.shares, lost, |share| self.is_empty_share(share)) {
            Ok(shares) => {
                self.leave_later_hub(usize::from(lost), now);
                // The other hubs have heard that all workers have left, also those that the lost one served.
                if self.has_ended_everywhere() {
                    return self.end(JobState::Finished, now);
                }
                if shares == self.shares {
                    return Transition::None;
                }
                self.shares = shares;
                let then = match taking_over.first() {
                    Some(&standby) => {
                        format!("{} takes over", self.job_hubs[usize::from(standby)].describe())
                    }
                    None => "it goes on without that standby".to_owned(),
                };
                let message = Some(self.change_shares(format!("{}; {then}", cause.message)));
                Transition::SharesChanged { message, told_later: None }
            }
            Err(share_lost) => {
                self.leave_later_hub(usize::from(lost), now);
                let message = format!("{}; {share_lost}", cause.message);
                self.begin_again_or_fail(Cause { message, ..cause }, now)
            }
        }
    }

    /// The hub that serves a share goes on without its standby. Returns what that is for people, if there was a standby.
    fn drop_standby(&mut self, share: u16, reason: &str, now: Now) -> Option<String> {
        self.suspected_hubs.retain(|suspected| suspected.share != share);
        let Share { served_by, standby, .. } = self.shares[usize::from(share)];
        let standby = standby?;
        self.shares[usize::from(share)] = Share::new(served_by, None);
        if self.shares.iter().all(|share| share.role(standby) == Role::None) {
            self.leave_later_hub(usize::from(standby), now);
        }
        let [serving, standby] =
            [served_by, standby].map(|position| self.job_hubs[usize::from(position)].describe());
        let message = format!("{serving} goes on without its standby {standby}, since {reason}");
        Some(self.change_shares(message))
    }

    /// Counts a change of the shares, and returns what it is for people.
    pub(super) fn change_shares(&mut self, message: String) -> String {
        self.shares_number += 1;
        self.withdraw_further();
        self.shares_reason.clone_from(&message);
        self.message.clone_from(&message);
        message
    }

    /// Tells the hubs once more which of them have which shares, if that has changed.
    pub(super) fn repeat_shares(&self) -> Transition {
        match self.shares_number {
            0 => Transition::None,
            _ => Transition::SharesChanged { message: None, told_later: None },
        }
    }
}
