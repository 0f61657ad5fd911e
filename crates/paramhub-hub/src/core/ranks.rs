//! Changes of a job's membership at a core: workers that are lost, and the processes that take their ranks.

use std::time::Instant;

use paramhub_core::auth::Namespace;
use paramhub_core::job_control::{FaultCause, RankChange};
use paramhub_core::service::CauseKind;
use paramhub_core::wire::Failure;

use super::fault::Fault;
use super::scheduler::WorkUnit;
use super::{Core, CoreEvent, RELEASE_TURN_ELEMENTS};

impl Core {
    /// Changes the membership of all chunks of a job here.
    pub(super) fn change_rank(
        &mut self,
        namespace: Namespace,
        rank: u32,
        epoch: u64,
        change: RankChange,
        now: Instant,
    ) {
        let of_job = self.shard_of.iter().filter(|((job, _), _)| *job == namespace).map(|(_, &index)| index);
        let here: Vec<usize> = of_job.filter(|&index| !self.shards.index(index).ending).collect();
        let mut first_step = 0;
        for index in here {
            let shard = &mut self.shards.index_mut(index).shard;
            let Some(port) = shard.plan().ports.of_rank(rank) else { continue };
            match change {
                RankChange::Lose => self.lose(index, port, epoch, now),
                RankChange::Expect => {
                    let (step, arenas) = shard.expect(port);
                    first_step = step.max(first_step);
                    // Large memory takes long to unmap. If no thread can be started, this one does it.
                    let _ = std::thread::Builder::new().name("hub-unmap".into()).spawn(move || drop(arenas));
                }
                RankChange::Join { step } => shard.join(port, step),
            }
            self.schedule_ends_of_steps(index);
        }
        match change {
            RankChange::Lose => {}
            RankChange::Expect => {
                let step = first_step;
                self.mailbox.send_event(CoreEvent::RankExpected { namespace, rank, epoch, step });
            }
            RankChange::Join { .. } => {
                self.mailbox.send_event(CoreEvent::RankJoined { namespace, rank, epoch });
            }
        }
    }

    /// Closes the stream of a lost worker, with the reason, and refuses those that its process has opened before.
    fn lose(&mut self, index: usize, port: u32, epoch: u64, now: Instant) {
        let hosted = self.shards.index_mut(index);
        hosted.newest_streams[port as usize] = Some((epoch, 0));
        let plan = hosted.shard.plan();
        let (namespace, neighbour) = (plan.namespace, plan.ports.neighbour(port));
        let name = plan.name(neighbour);
        let message = format!("job `{}` has taken {name} for lost, and goes on without it", plan.name);
        let begun = hosted.shard.begun(port);
        let token = hosted.lane_of[port as usize];
        if let Err(lost) = hosted.shard.lose(port) {
            let fault = Fault::LostBeforeStart(lost);
            let (message, cause) = (fault.message(&name), FaultCause::Kind(CauseKind::Known));
            self.mailbox.send_event(CoreEvent::Faulted { namespace, culprit: neighbour, message, cause });
        }
        if let Some(lane) = token.and_then(|token| self.take_lane(token)) {
            self.final_messages.dismiss(lane, begun, &Failure { rank: neighbour.rank(), message }, now);
        }
    }

    /// Schedules the end of steps that wait for no member any more, if there may be any.
    pub(super) fn schedule_ends_of_steps(&mut self, index: usize) {
        let hosted = self.shards.index_mut(index);
        if hosted.shard.has_steps_to_end() && !std::mem::replace(&mut hosted.ends_steps, true) {
            self.scheduler.add(hosted.job, WorkUnit::EndSteps(index));
        }
    }

    /// Ends some steps that wait for no member any more, and sends the answers that result.
    pub(super) fn end_steps(&mut self, index: usize, now: Instant) {
        let hosted = self.shards.index_mut(index);
        hosted.ends_steps = false;
        if hosted.ending {
            return;
        }
        hosted.shard.end_steps(RELEASE_TURN_ELEMENTS);
        self.schedule_ends_of_steps(index);
        self.answer(index, now);
        self.end_snapshot(index);
    }
}
