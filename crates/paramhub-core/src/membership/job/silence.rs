//! The part in a job of hubs that the manager does not hear, and what ranks say of hubs that they have lost.

use super::cause::Cause;
use super::job_hubs::JobHub;
use super::{Job, LastContact, Transition};
use crate::membership::Now;
use crate::service::{CauseKind, ErrorCode, JobState, ServiceError, refusal};

/// The time that a hub which a rank has lost, or which is needed for ranks to go back, may take to call before its job fails or
/// begins again. Hubs call every second.
pub(super) const LOST_HUB_CALLS_WITHIN_S: f64 = 3.0;

/// A rank's report that it has lost a hub.
#[derive(Debug)]
pub(super) struct ReportedLoss {
    rank: u32,
    at: Now,
    reason: String,
}

impl Job {
    /// A hub is not heard any more. A job that opens there fails with this cause, and so does one whose workers have ended;
    /// one that runs goes on and shows the notice.
    pub(crate) fn hub_fell_silent(&mut self, hub: u32, cause: Cause, notice: String, now: Now) -> Transition {
        let Some(index) = self.job_hub_index(hub) else { return Transition::None };
        // The hub had ended the job before.
        if self.job_hubs[index].ended {
            return Transition::None;
        }
        if self.state == JobState::Running && self.job_hubs[index].asked_standby.is_some() {
            return self.drop_dispensable(index, &cause.message, now);
        }
        self.job_hubs[index].unheard = Some(cause.clone());
        match self.state {
            // The job may have ended because the hub was gone.
            JobState::Finished | JobState::Failed => self.explain(cause),
            JobState::Running => {
                self.message = notice;
                self.check_conclusion(now)
            }
            JobState::Connecting | JobState::Initialising => self.begin_again_or_fail(cause, now),
        }
    }

    /// A hub that was not heard calls again.
    pub(crate) fn hub_heard_again(&mut self, hub: u32, notice: &str) {
        let Some(index) = self.job_hub_index(hub) else { return };
        if self.job_hubs[index].unheard.take().is_some() && !self.state.has_ended() {
            notice.clone_into(&mut self.message);
        }
    }

    /// A rank of the job, which runs, has lost the hub at this address.
    ///
    /// # Errors
    /// If the job has no hub there.
    pub(super) fn rank_lost_hub(
        &mut self,
        rank: u32,
        address: &str,
        reason: &str,
        now: Now,
    ) -> Result<(), ServiceError> {
        let is_there = |job_hub: &&mut JobHub| {
            job_hub.shape.interfaces.iter().any(|interface| interface.address == address)
        };
        // A hub that has come back has its newest part in the job.
        let Some(job_hub) = self.job_hubs.iter_mut().rev().find(is_there) else {
            let message = format!("job `{}` has no hub at the address that rank {rank} names", self.name);
            return Err(refusal(ErrorCode::BadRequest, message));
        };
        if !job_hub.ended {
            job_hub.lost_by.get_or_insert(ReportedLoss { rank, at: now, reason: reason.to_owned() });
        }
        Ok(())
    }

    /// Whether it is not known yet of a hub that a rank has lost whether it is still there.
    pub(crate) fn has_losses_to_check(&self) -> bool {
        self.job_hubs.iter().any(|job_hub| job_hub.lost_by.is_some())
    }

    /// A rank may have lost a hub that the manager does not hear either: the job fails, or begins again. A hub that has called
    /// since and has not hung up is there, and reports itself how the job ends. That is decided after some time: the last call
    /// of a hub that died may be read after the rank's report. `last_contact` says what is known of a hub that is not forgotten.
    pub(crate) fn check_losses(
        &mut self,
        last_contact: impl Fn(u32) -> Option<LastContact>,
        now: Now,
    ) -> Transition {
        let mut transition = Transition::None;
        for index in 0..self.job_hubs.len() {
            let job_hub = &mut self.job_hubs[index];
            let (Some(loss), Some(contact)) = (&job_hub.lost_by, last_contact(job_hub.hub)) else {
                job_hub.lost_by = None;
                continue;
            };
            let began = contact.call;
            let is_gone = contact.has_hung_up || job_hub.unheard.is_some();
            let is_there = job_hub.ended || began.monotonic > loss.at.monotonic && !is_gone;
            let is_decided =
                job_hub.ended || is_gone || now.seconds_since(loss.at) >= LOST_HUB_CALLS_WITHIN_S;
            if !is_decided {
                continue;
            }
            let Some(ReportedLoss { rank, reason, .. }) = job_hub.lost_by.take() else { continue };
            if !is_there {
                let message = format!(
                    "rank {rank} lost {}, which the connection manager does not hear either: {reason}",
                    job_hub.describe()
                );
                let gone = job_hub.hub;
                let cause = Cause { kind: CauseKind::HubLost, rank: None, began, message };
                match self.go_on_without_unheard(gone, cause, now) {
                    // None of the hubs is the job's any more.
                    began_again @ Transition::BeganAgain { .. } => return began_again,
                    consequence if transition == Transition::None => transition = consequence,
                    _ => {}
                }
            }
        }
        transition
    }

    /// Why the job ends if its hubs that are not heard are not awaited; `None` if there are none.
    pub(super) fn unheard_cause(&self) -> Option<&Cause> {
        let unheard = self.job_hubs.iter().filter(|job_hub| !job_hub.ended);
        unheard.filter_map(|job_hub| job_hub.unheard.as_ref()).next()
    }

    /// The manager itself has paused, so that hubs and ranks may have called in vain.
    pub(crate) fn forgive(&mut self, now: Now) {
        self.lease.renew(now.monotonic);
        self.job_hubs
            .iter_mut()
            .filter_map(|job_hub| job_hub.lost_by.as_mut())
            .for_each(|loss| loss.at = now);
    }
}
