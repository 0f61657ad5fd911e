//! Changes of a job's membership at a core: workers that are lost, and the processes that take their ranks.

use std::time::Instant;

use paramhub_core::auth::Namespace;
use paramhub_core::job_control::{RankChange, chosen_step};
use paramhub_core::wire::{Failure, Operation};

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
        let (mut named, rewinds) = (Vec::new(), self.rewinds(namespace));
        for index in here {
            let shard = &mut self.shards.index_mut(index).shard;
            let Some(port) = shard.plan().ports.of_rank(rank) else { continue };
            match change {
                RankChange::Lose => self.lose(index, port, epoch, now),
                RankChange::Expect if shard.rewinds() => named.push(shard.expect_after_rewind(port)),
                RankChange::Expect => {
                    let (step, arenas) = shard.expect(port);
                    named.push(Ok(step));
                    unmap(arenas);
                }
                RankChange::Join { step } if shard.rewinds() => {
                    if let Err(reason) = shard.join_after_rewind(port, step) {
                        return self.mailbox.send_event(CoreEvent::CannotGoOn { namespace, reason });
                    }
                }
                RankChange::Join { step } => shard.join(port, step),
            }
            self.schedule_change_of_members(index);
        }
        match change {
            RankChange::Lose => {}
            RankChange::Expect => {
                let named: Result<Vec<Option<u32>>, String> = named.into_iter().collect();
                let chosen = |named: Vec<Option<u32>>| chosen_step(rank, named.into_iter(), rewinds);
                self.mailbox.send_event(match named.map(chosen) {
                    Ok(step) => CoreEvent::RankExpected { namespace, rank, epoch, step },
                    Err(reason) => CoreEvent::CannotGoOn { namespace, reason },
                });
            }
            RankChange::Join { .. } => {
                self.joins.push((namespace, rank, epoch));
                self.report_joins(namespace);
            }
        }
    }

    /// Closes the stream of a lost worker, with the reason, and refuses those that its process has opened before.
    fn lose(&mut self, index: usize, port: u32, epoch: u64, now: Instant) {
        let hosted = self.shards.index_mut(index);
        hosted.newest_streams[port as usize] = Some((epoch, 0));
        let plan = hosted.shard.plan();
        let neighbour = plan.ports.neighbour(port);
        let (name, job) = (plan.name(neighbour), &plan.name);
        let message = format!("job `{job}` has taken {name} for lost, and goes on without it");
        let begun = hosted.shard.begun(port);
        let token = hosted.lane_of[port as usize];
        hosted.shard.lose(port);
        if let Some(lane) = token.and_then(|token| self.take_lane(token)) {
            let failure = Failure { rank: neighbour.rank(), message }.encode();
            self.final_messages.dismiss(lane, begun, (Operation::Failure, &failure), now);
        }
    }

    /// Schedules what chunks have to do after a change of the membership, if there is anything: to end steps that wait for no
    /// member any more, or to go back.
    pub(super) fn schedule_change_of_members(&mut self, index: usize) {
        let hosted = self.shards.index_mut(index);
        let has_work = hosted.shard.has_steps_to_end() || hosted.shard.is_rewinding();
        if has_work && !std::mem::replace(&mut hosted.changes_members, true) {
            self.scheduler.add(hosted.job, WorkUnit::ChangeMembers(index));
        }
    }

    /// Has some chunks end steps that wait for no member any more, and sends the answers that result, or takes some chunks
    /// back to an earlier step.
    pub(super) fn change_members(&mut self, index: usize, now: Instant) {
        let hosted = self.shards.index_mut(index);
        hosted.changes_members = false;
        if hosted.ending {
            return;
        }
        let namespace = hosted.shard.plan().namespace;
        match hosted.shard.is_rewinding() {
            true => hosted.shard.rewind_some(RELEASE_TURN_ELEMENTS),
            false => hosted.shard.end_steps(RELEASE_TURN_ELEMENTS),
        }
        self.report_joins(namespace);
        self.schedule_change_of_members(index);
        self.answer(index, now);
        self.end_snapshot(index);
    }
}

/// Unmaps the arenas of former processes. Large memory takes long; if no thread can be started, this one does it.
pub(super) fn unmap(arenas: impl Send + 'static) {
    let _ = std::thread::Builder::new().name("hub-unmap".into()).spawn(move || drop(arenas));
}
