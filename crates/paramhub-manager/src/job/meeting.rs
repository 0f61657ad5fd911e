//! Ranks that reach no hub: those of a job that only meet here and exchange among themselves, and those that give up.

use paramhub_core::service::{ErrorCode, JobState, LeaveService, ServiceError};

use super::seats::list_ranks_with_verb;
use super::{Job, Stage, Transition};
use crate::clock::Now;

impl Job {
    /// Whether no hub is to serve it.
    pub(crate) fn only_meets(&self) -> bool {
        self.options.hubs == Some(0)
    }

    /// Every rank is there, and none needs more than the others' addresses.
    pub(super) fn meet(&mut self) -> Transition {
        self.state = JobState::Running;
        self.stage.send_replace(Stage::Running);
        Transition::Advanced
    }

    /// A worker leaves that has reached no hub, `reason` saying why.
    ///
    /// Ranks that have finished wait for nobody; the job has finished with the last. Any other end of a rank that all know to be
    /// there is the job's.
    pub(crate) fn leave(
        &mut self,
        call: &LeaveService,
        reason: &str,
        now: Now,
    ) -> Result<Transition, ServiceError> {
        self.last_sign = now;
        if self.state.has_ended() {
            return Ok(Transition::None);
        }
        let rank = call.rank;
        self.check_rank(rank)?;
        self.check_holder(rank, call.incarnation)?;
        let why = if reason.is_empty() { "it gave no reason" } else { reason };
        match self.state {
            JobState::Connecting => {
                self.seats.vacate(rank);
                Ok(Transition::None)
            }
            JobState::Running if !self.only_meets() => {
                // From here on the hubs see workers come and go.
                Ok(Transition::None)
            }
            _ if call.finished => {
                self.seats.finish(rank);
                if self.seats.have_all_finished() {
                    return Ok(self.end(JobState::Finished, now));
                }
                Ok(self.check_settings_can_come(now))
            }
            JobState::Running => Ok(self.fail(ErrorCode::JobEnded, format!("rank {rank} left: {why}"), now)),
            _ => {
                let message = format!("rank {rank} left before the job ran: {why}");
                Ok(self.fail(ErrorCode::JobEnded, message, now))
            }
        }
    }

    /// Ranks that have handed in their settings wait in vain for one that has finished without any.
    pub(crate) fn check_settings_can_come(&mut self, now: Now) -> Transition {
        let finished = self.seats.finished();
        if finished.is_empty() || !self.seats.has_any_handed_in() {
            return Transition::None;
        }
        let message = format!(
            "{} done without a hub, and others have called InitService: let all ranks exchange in one way",
            list_ranks_with_verb(&finished, "is", "are")
        );
        self.fail(ErrorCode::JobEnded, message, now)
    }
}
