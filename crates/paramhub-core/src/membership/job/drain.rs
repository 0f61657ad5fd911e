//! How a job leaves a hub that an operator drains, or [moves](super::moves) it off: its standbys take over, as if the hub were lost, once there are some that
//! have all chunks.

use super::cause::Cause;
use super::standbys::CALLS_WITHIN_S;
use super::{Job, LastContact, Transition, join_words};
use crate::membership::Now;
use crate::service::JobState;
use crate::standbys::{Role, Share};

impl Job {
    /// Leaves a hub that it is to leave, if others have all that it has; one at a time. `last_contact` says what is known of a hub that
    /// has not been forgotten: one that may have just been lost does not go on alone with chunks that the drained hub has, too.
    pub(crate) fn leave_drained_hub(
        &mut self,
        is_drained: impl Fn(u32) -> bool,
        last_contact: impl Fn(u32) -> Option<LastContact>,
        now: Now,
    ) -> Transition {
        if self.shares.is_empty()
            || self.state != JobState::Running
            || self.is_concluding()
            || self.has_suspected_hubs()
        {
            return Transition::None;
        }
        let calls = |position: u16| {
            let contact = last_contact(self.job_hubs[usize::from(position)].hub);
            contact.is_some_and(|contact| {
                !contact.has_hung_up && now.seconds_since(contact.call) < CALLS_WITHIN_S
            })
        };
        let can_leave = |index: usize| {
            let mut others = self.shares.iter().filter_map(|share| share.counterpart(index as u16));
            self.awaited_to_leave(index as u16).is_empty() && others.all(calls)
        };
        let drained = (0..self.job_hubs.len()).find(|&index| {
            let job_hub = &self.job_hubs[index];
            let leaves = is_drained(job_hub.hub) || self.is_moved_off(job_hub.hub);
            !job_hub.ended && leaves && can_leave(index)
        });
        let Some(index) = drained else { return Transition::None };
        if self.job_hubs[index].asked_standby.is_some() {
            return self.refuse_standby(index, "the job is to leave it, as an operator has said", now);
        }
        let name = self.job_hubs[index].describe();
        let message = match is_drained(self.job_hubs[index].hub) {
            true => format!("{name} is drained by an operator"),
            false => format!("an operator has moved the job off {name}"),
        };
        self.go_on_without(index as u16, Cause::known(message, now), now)
    }

    /// The shares that the hub at this position serves and that no other hub can take over yet.
    fn awaited_to_leave(&self, position: u16) -> Vec<Share> {
        let is_heard = |&standby: &u16| self.job_hubs[usize::from(standby)].unheard.is_none();
        let is_awaited = |&(number, share): &(u16, &Share)| {
            matches!(share.role(position), Role::Serves { .. })
                && !self.is_empty_share(number)
                && share.ready_standby().filter(is_heard).is_none()
        };
        (0..).zip(&self.shares).filter(is_awaited).map(|(_, share)| *share).collect()
    }

    /// What the job waits for until it leaves a hub that is drained, or why it stays there until it ends.
    pub(crate) fn stays_because(&self, hub: u32) -> String {
        let Some(index) = self.job_hub_index(hub) else { return String::new() };
        if self.state.has_ended() {
            return "it has ended, and the hub frees its memory".into();
        }
        if self.is_concluding() {
            return "it is ending".into();
        }
        if self.shares.is_empty() {
            return "it stays until it ends, since it has no standbys (`--replicas 1`)".into();
        }
        if self.state != JobState::Running {
            return "it leaves once it has begun".into();
        }
        let awaited = self.awaited_to_leave(index as u16);
        if awaited.is_empty() {
            return "it is about to leave".into();
        }
        let mut copying: Vec<u16> = awaited.iter().filter_map(|share| share.standby).collect();
        copying.sort_unstable();
        copying.dedup();
        let is_asked = self
            .job_hubs
            .iter()
            .any(|job_hub| job_hub.asked_standby.is_some() || job_hub.asked_further.is_some());
        let mut others = (0..).zip(&self.job_hubs).filter(|&(position, _)| position != index);
        let has_other = others.any(|(_, other)| !other.ended && other.unheard.is_none());
        match (copying.is_empty(), is_asked) {
            (false, _) => {
                let names: Vec<String> =
                    copying.into_iter().map(|hub| self.job_hubs[usize::from(hub)].describe()).collect();
                format!("it leaves once {} has all chunks", join_words(&names))
            }
            (true, true) => "it leaves once another hub has all chunks".into(),
            (true, false) if has_other => {
                "it waits for a hub that can take its chunks: another of its hubs does so soon if it has memory for them".into()
            }
            (true, false) => {
                "it waits for a hub that can take its chunks: start one that has no part in it".into()
            }
        }
    }
}
