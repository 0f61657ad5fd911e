//! Hubs join, report, leave and are lost: the consequences for the jobs that they serve. What becomes of hubs that are
//! not heard is in `silence`.

use super::consequences::stop_command;
use super::job::Transition;
use super::job::cause::Cause;
use super::job::job_hubs::describe_hub;
use super::{Job, LogEvent, Membership, Now, Output, bounded};
use crate::auth::Namespace;
use crate::limits::CORES_MAX;
use crate::service::{
    AwaitedRanks, CauseKind, ErrorCode, HubCommand, HubEvent, HubReport, JobEnd, JobState, Presence,
    RegisterHub, ServiceError, StopWhen, refusal,
};

impl Membership {
    /// Lets a hub join in place of any that had one of its addresses. It takes jobs once it calls under its number.
    pub fn register_hub(&mut self, offer: RegisterHub, token: &str, now: Now) -> Result<u32, ServiceError> {
        let replaced = self.hubs.at_addresses_of(&offer.shape);
        self.make_room_for_a_hub(now);
        let hub = self.hubs.register(offer, token, now)?;
        for lost in replaced {
            self.lose_hub(lost, "was lost: another hub has joined at its address", now);
        }
        self.outputs.push(Output::HubJoined { hub });
        Ok(hub)
    }

    /// Checks that a hub calls that has joined, with the token that it was given. The call is a sign of life.
    ///
    /// # Errors
    /// If the hub is not here, or this is not its token.
    pub fn admit_hub(&mut self, hub: u32, token: Option<&str>, now: Now) -> Result<(), ServiceError> {
        self.hubs.admit(hub, token, now)?;
        if self.hear(hub, now) {
            self.advance_all_jobs(now);
        }
        Ok(())
    }

    /// Takes a hub's report.
    pub fn report(
        &mut self,
        hub: u32,
        token: Option<&str>,
        report: HubReport,
        now: Now,
    ) -> Result<(), ServiceError> {
        let joined = self.hubs.admit(hub, token, now)?;
        let leaves = report.presence != Presence::Here && !std::mem::replace(&mut joined.is_leaving, true);
        if report.cores.len() > CORES_MAX {
            let message = format!("hub {hub} reports {} cores: {CORES_MAX} are possible", report.cores.len());
            return Err(refusal(ErrorCode::BadRequest, message));
        }
        if !report.cores.is_empty() {
            joined.cores = report.cores;
        }
        let can_take_jobs = self.hear(hub, now);
        let ends: Vec<Namespace> = report.events.iter().filter_map(ended_job).collect();
        let has_ended = |namespace| ends.contains(&namespace);
        // The counters come first, so that a job that ends is recorded with its last ones.
        for counted in &report.jobs {
            match self.jobs.get_mut(&counted.namespace) {
                Some(job) if job.is_served_by(hub) && !job.is_over_at(hub) => {
                    job.hub_counted(hub, counted.counters, &counted.left_out);
                }
                // With the end of a job come its last counters.
                _ if has_ended(counted.namespace) => {}
                _ => self.disown(hub, counted.namespace),
            }
        }
        for kept in report.checkpoints {
            if let Some(job) = self.jobs.get_mut(&kept.namespace) {
                job.hub_kept(hub, kept.status);
            }
        }
        for event in report.events {
            self.apply(hub, event, now);
        }
        match report.presence {
            Presence::Here => {}
            Presence::Leaving if leaves => self.spare_leaving_hub(hub, now),
            Presence::Leaving => {}
            Presence::Gone => self.dismiss_hub(hub, now),
        }
        if can_take_jobs {
            self.advance_all_jobs(now);
        }
        self.go_on_probing(now);
        Ok(())
    }

    fn apply(&mut self, hub: u32, event: HubEvent, now: Now) {
        // The hub has logged these itself, with an embedded manager even in the same log.
        let was_logged =
            matches!(event, HubEvent::Refused { .. } | HubEvent::Ended(JobEnd { finished: false, .. }));
        let (namespace, transition) = match event {
            HubEvent::Probed(report) => return self.probes.record_answer(hub, report),
            HubEvent::Allocated {
                namespace,
                placement_hash,
                resumed_step,
                memory_bytes,
                streams,
                further,
            } => {
                let Some(job) = self.jobs.get_mut(&namespace).filter(|job| job.is_served_by(hub)) else {
                    return self.disown(hub, namespace);
                };
                job.hub_reserved(hub, memory_bytes, streams);
                self.check_team_of(namespace, hub, now);
                let Some(job) = self.jobs.get_mut(&namespace) else { return };
                (namespace, job.hub_allocated(hub, bounded(&placement_hash), (resumed_step, further), now))
            }
            HubEvent::Refused { namespace, reason } => {
                let Some(job) = self.jobs.get_mut(&namespace) else { return };
                (namespace, job.hub_refused(hub, bounded(&reason), now))
            }
            HubEvent::Noticed { namespace, message } => {
                let Some(job) = self.jobs.get_mut(&namespace) else { return };
                let message = bounded(&message).to_string();
                let event = LogEvent::HubNoticed { job: job.name.clone(), hub, message: message.clone() };
                self.outputs.push(Output::Log(event));
                (namespace, job.hub_noticed(hub, message))
            }
            HubEvent::Awaited { namespace, message, awaited } => {
                let message = bounded(&message).to_string();
                self.pass_on(hub, namespace, &message, awaited.as_ref());
                let Some(job) = self.jobs.get_mut(&namespace) else { return };
                let event = LogEvent::RanksAwaited { job: job.name.clone(), hub, message: message.clone() };
                self.outputs.push(Output::Log(event));
                job.hub_awaits(hub, awaited, now);
                (namespace, job.hub_noticed(hub, message))
            }
            HubEvent::WorkerLost { namespace, rank, epoch, reason } => {
                let Some(job) = self.jobs.get_mut(&namespace).filter(|job| job.is_served_by(hub)) else {
                    return;
                };
                (namespace, job.worker_lost((rank, epoch), bounded(&reason), now))
            }
            HubEvent::WorkerLeft { namespace, rank, epoch } => {
                let Some(job) = self.jobs.get_mut(&namespace).filter(|job| job.is_served_by(hub)) else {
                    return;
                };
                job.worker_left((rank, epoch));
                (namespace, Transition::None)
            }
            HubEvent::HubLost { namespace, share, hub: lost, number, reason } => {
                let Some(job) = self.jobs.get_mut(&namespace).filter(|job| job.is_served_by(hub)) else {
                    return;
                };
                let transition = job.counterpart_lost(hub, (share, lost), number, bounded(&reason), now);
                self.losses_to_check.insert(namespace);
                self.follow(namespace, transition);
                return self.check_losses(now);
            }
            HubEvent::StandbyReady { namespace, share, standby } => {
                let Some(job) = self.jobs.get_mut(&namespace) else { return };
                (namespace, job.standby_ready(hub, share, standby))
            }
            HubEvent::RankExpected { namespace, rank, epoch, step } => {
                let Some(job) = self.jobs.get_mut(&namespace) else { return };
                (namespace, job.process_expected(hub, (rank, epoch), step, now))
            }
            HubEvent::RankJoined { namespace, rank, epoch } => {
                let Some(job) = self.jobs.get_mut(&namespace) else { return };
                (namespace, job.rank_joined(hub, (rank, epoch), now))
            }
            HubEvent::Kept { namespace } => {
                let Some(job) = self.jobs.get_mut(&namespace) else { return };
                job.hub_kept_last(hub);
                (namespace, Transition::None)
            }
            HubEvent::AllReported { question } => return self.all_reported(hub, question, now),
            HubEvent::Ended(end) => {
                let is_leaving = self.hubs.is_leaving(hub);
                let Some(job) = self.jobs.get_mut(&end.namespace) else { return };
                if job.former_part_over(hub) {
                    let transition = job.former_part_ended(&end, is_leaving, now);
                    self.follow(end.namespace, transition);
                    return self.advance_job(end.namespace, now);
                }
                let transition = match (job.is_served_by(hub), self.hubs.shape(hub)) {
                    (false, Some(shape)) => job.former_hub_ended(shape, &end, now),
                    _ if is_leaving => job.leaving_hub_ended(hub, &end, now),
                    _ => job.hub_ended(hub, &end, now),
                };
                (end.namespace, transition)
            }
        };
        self.follow_with(namespace, transition, was_logged);
    }

    /// Sends the message that one hub has sent to its ranks, about the ranks they wait for, to the hubs of
    /// the job's other sites for theirs.
    fn pass_on(&mut self, from: u32, namespace: Namespace, message: &str, awaited: Option<&AwaitedRanks>) {
        let Some(job) = self.jobs.get(&namespace) else { return };
        if !job.has_several_sites() || !job.is_served_by(from) || job.state().has_ended() {
            return;
        }
        let rank = awaited.and_then(|awaited| match awaited.ranks[..] {
            [rank] => Some(rank),
            _ => None,
        });
        // A hub that is not heard would find all messages of that time at once when it calls again.
        let others: Vec<u32> = job.hubs().filter(|&hub| hub != from && self.hubs.is_heard(hub)).collect();
        for hub in others {
            let notice = HubCommand::Tell { namespace, rank, message: message.to_owned() };
            self.command_once(hub, notice);
        }
    }

    /// A hub has reported all jobs that it has, because this manager has restarted: those that it should have and has
    /// not reported cannot go on. The hub may still repeat an answer to an earlier manager, of which that one has taken
    /// the reports before.
    fn all_reported(&mut self, hub: u32, question: u32, now: Now) {
        if question != self.question {
            return;
        }
        for namespace in self.served_by(hub) {
            if let Some(job) = self.jobs.get_mut(&namespace) {
                let transition = job.hub_reported_all(hub, now);
                self.follow(namespace, transition);
            }
        }
        self.end_former_parts(now, |job| job.former_parts_reported(hub));
    }

    /// Lets jobs advance that `is_over` finds to have waited only for a hub's part from before they began again.
    fn end_former_parts(&mut self, now: Now, mut is_over: impl FnMut(&mut Job) -> bool) {
        let mut freed = Vec::new();
        for (&namespace, job) in &mut self.jobs {
            freed.extend(is_over(job).then_some(namespace));
        }
        freed.into_iter().for_each(|namespace| self.advance_job(namespace, now));
    }

    /// A hub serves a job that is not its own any more, because this manager has lost the hub or the job, or the job
    /// has ended: the hub must stop the job.
    fn disown(&mut self, hub: u32, namespace: Namespace) {
        if let Some(job) = self.jobs.get_mut(&namespace) {
            job.former_part_reported(hub);
            if job.went_on_without(hub) {
                let command = job.shares_command();
                return self.command_once(hub, command);
            }
        }
        let ended =
            self.jobs.get(&namespace).filter(|job| job.state().has_ended() && !job.message().is_empty());
        let reason = ended.map(Job::message).map_or_else(
            || {
                "the connection manager does not know this job any more: it restarted, or had lost this hub"
                    .to_string()
            },
            str::to_string,
        );
        self.command_once(hub, stop_command(namespace, reason, StopWhen::Now));
    }

    pub(super) fn lose_hub(&mut self, hub: u32, what: &str, now: Now) {
        let Some((name, heard)) = self.hubs.remove(hub) else { return };
        let message = format!("{name} {what}");
        self.outputs.push(Output::Log(LogEvent::HubLost { message: message.clone() }));
        self.forget_hub(hub, &Cause { kind: CauseKind::HubLost, rank: None, began: heard, message }, now);
    }

    /// A hub shuts down. Fails the jobs that wait for it to allocate, as they would wait in vain.
    fn spare_leaving_hub(&mut self, hub: u32, now: Now) {
        let Some(name) = self.hubs.shape(hub).map(|shape| describe_hub(hub, shape)) else { return };
        let waiting = |job: &&Job| job.state() == JobState::Initialising && job.is_served_by(hub);
        let waiting: Vec<Namespace> = self.jobs.values().filter(waiting).map(|job| job.namespace).collect();
        for namespace in waiting {
            if let Some(job) = self.jobs.get_mut(&namespace) {
                let transition = job.fail_before_it_runs(format!("{name} is shutting down"), now);
                self.follow(namespace, transition);
            }
        }
    }

    /// A hub has reported that it has shut down.
    fn dismiss_hub(&mut self, hub: u32, now: Now) {
        let Some((name, _)) = self.hubs.remove(hub) else { return };
        self.outputs.push(Output::Log(LogEvent::HubLeft { hub }));
        // The hub has ended its own jobs itself. This is for jobs that were placed on it while it shut down.
        self.forget_hub(hub, &Cause::known(format!("{name} has shut down"), now), now);
    }

    fn forget_hub(&mut self, hub: u32, cause: &Cause, now: Now) {
        self.outputs.push(Output::HubForgotten { hub });
        self.probes.forget(hub);
        self.lose_parts(hub, cause, now);
        self.end_former_parts(now, |job| job.former_part_over(hub));
    }

    /// Takes the parts that a hub had in jobs for lost.
    pub(super) fn lose_parts(&mut self, hub: u32, cause: &Cause, now: Now) {
        for namespace in self.served_by(hub) {
            if let Some(job) = self.jobs.get_mut(&namespace) {
                let transition = job.hub_lost(hub, cause.clone(), now);
                self.follow(namespace, transition);
            }
        }
    }

    pub(super) fn served_by(&self, hub: u32) -> Vec<Namespace> {
        self.jobs.values().filter(|job| job.is_served_by(hub)).map(|job| job.namespace).collect()
    }
}

/// The job that has ended at a hub, if that is the event.
fn ended_job(event: &HubEvent) -> Option<Namespace> {
    match event {
        HubEvent::Ended(end) => Some(end.namespace),
        _ => None,
    }
}
