//! Ranks that leave at the manager: those of a job that only meet here and exchange among themselves, those that give up
//! before they have reached a hub, and those that have lost one.

use crate::service::{ErrorCode, JobState, LeaveService, ServiceError};

use super::rank_assignments::RankHolder;
use super::rank_texts::list_ranks_with_verb;
use super::{Job, JobPhase, Transition};
use crate::membership::Now;

impl Job {
    /// Returns whether the job uses no hub.
    pub(crate) fn is_rendezvous_only(&self) -> bool {
        self.options.hubs == Some(0)
    }

    /// Every rank is there, and each needs only the others' addresses.
    pub(super) fn begin_without_hubs(&mut self) -> Transition {
        self.state = JobState::Running;
        self.phase = JobPhase::Running;
        Transition::Advanced
    }

    /// A worker that has reached no hub leaves, or one that has lost a hub says so; `reason` says why.
    ///
    /// Ranks that have finished wait for no other; the job has finished when the last has. If any other rank
    /// ends after all have connected, the job fails.
    pub(crate) fn leave(
        &mut self,
        call: &LeaveService,
        reason: &str,
        now: Now,
    ) -> Result<Transition, ServiceError> {
        self.lease.renew(now.monotonic);
        if self.state.has_ended() {
            return Ok(Transition::None);
        }
        let rank = call.rank;
        self.check_rank(rank)?;
        let why = if reason.is_empty() { "it gave no reason" } else { reason };
        let holder = self.assignments.holder(rank);
        let former = holder.and_then(RankHolder::former).map(|(incarnation, _)| incarnation);
        if let Some(address) = &call.lost_hub
            && self.state == JobState::Running
            && former == Some(call.incarnation)
        {
            // The report of a rank that has lost its place with the hub comes after another report of that.
            self.rank_lost_hub(rank, address, why, now)?;
            return Ok(Transition::None);
        }
        self.check_holder(rank, call.incarnation)?;
        match self.state {
            JobState::Connecting => {
                self.assignments.clear(rank);
                Ok(Transition::None)
            }
            JobState::Running if !self.is_rendezvous_only() => {
                // From here on the hubs notice when workers come and go, and workers when hubs do.
                if let Some(address) = &call.lost_hub {
                    self.rank_lost_hub(rank, address, why, now)?;
                }
                match self.is_joining(rank) {
                    true => Ok(self.rank_lost_again(rank, now)),
                    false => Ok(Transition::None),
                }
            }
            _ if call.finished => {
                self.assignments.finish(rank);
                if self.assignments.have_all_finished() {
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

    /// Fails a job in which ranks that have handed in their settings would wait in vain for one that has
    /// finished without any.
    pub(crate) fn check_settings_can_come(&mut self, now: Now) -> Transition {
        let finished = self.assignments.finished();
        if finished.is_empty() || !self.assignments.has_any_submitted() {
            return Transition::None;
        }
        let message = format!(
            "{} done without a hub, and others have called InitService: let all ranks exchange in one way",
            list_ranks_with_verb(&finished, "is", "are")
        );
        self.fail(ErrorCode::JobEnded, message, now)
    }
}
