//! The part of the hubs in a job: their reports, and the consequences for the job.

use std::collections::BTreeSet;

use crate::checkpoint::CheckpointStatus;
use crate::composition::SiteId;
use crate::limits::MESSAGE_BYTES_MAX;
use crate::placement::HubShape;
use crate::service::{
    AwaitedRanks, CauseKind, ErrorCode, JobCounters, JobEnd, JobOptions, JobState, add_by_rank,
};

use super::cause::Cause;
use super::further_shares::AskedFurther;
use super::new_standbys::AskedStandby;
use super::silence::ReportedLoss;
use super::{Job, JobPhase, Transition, join_words};
use crate::membership::{Now, REPORTED_BACK_MAX};

/// The most bytes kept of why a checkpoint failed.
const FAILURE_BYTES_MAX: usize = 1024;

/// The most bytes kept of a key's name, and of what is awaited for that key.
const AWAITED_BYTES_MAX: usize = 256;

/// A hub's part in a job.
pub(super) struct JobHub {
    pub(super) hub: u32,
    pub(super) shape: HubShape,
    /// The site of the hub.
    pub(super) site: SiteId,
    /// `true` if the manager has asked the hub to allocate.
    pub(super) asked: bool,
    pub(super) allocated: bool,
    /// `true` if the hub has reported since the manager started that it has allocated.
    pub(super) is_reported: bool,
    pub(super) ended: bool,
    /// `true` if the hub has yet to take a last checkpoint.
    pub(super) keeps: bool,
    pub(super) counters: JobCounters,
    /// What the hub has reserved for the job: bytes of buffers, and streams.
    pub(super) reserved: (u64, u64),
    /// For each rank, the updates made without it.
    pub(super) left_out: Vec<u64>,
    /// The step with which the hub's chunks begin, if they come from a checkpoint.
    pub(super) resumed_step: Option<u32>,
    /// The state of the hub's part in the job's checkpoints.
    pub(super) checkpoints: Option<CheckpointStatus>,
    /// Ranks for which the others wait at this hub, and when it reported that.
    pub(super) awaited: Option<(AwaitedRanks, Now)>,
    /// Why a job ends at last in which nothing but this hub is awaited; `None` while the manager hears the hub.
    pub(super) unheard: Option<Cause>,
    /// What a rank has said of the loss of the hub, until it is known whether the hub is still there.
    pub(super) lost_by: Option<ReportedLoss>,
    /// The shares whose standby it is to become, until it has allocated them.
    pub(super) asked_standby: Option<AskedStandby>,
    /// When it could not become a standby, or was lost as one.
    pub(super) failed_standby: Option<Now>,
    /// The shares whose standby it is to become besides the part that it has, until it has allocated them.
    pub(super) asked_further: Option<AskedFurther>,
    /// When it could not take further shares.
    pub(super) failed_further: Option<Now>,
}

impl JobHub {
    /// A hub that will have a part in a job.
    pub(super) fn new(hub: u32, shape: HubShape, site: SiteId) -> Self {
        let counters = JobCounters::default();
        let (left_out, resumed_step, checkpoints) = (Vec::new(), None, None);
        JobHub {
            hub,
            shape,
            site,
            asked: false,
            allocated: false,
            is_reported: false,
            ended: false,
            keeps: false,
            counters,
            reserved: (0, 0),
            left_out,
            resumed_step,
            checkpoints,
            awaited: None,
            unheard: None,
            lost_by: None,
            asked_standby: None,
            failed_standby: None,
            asked_further: None,
            failed_further: None,
        }
    }

    /// Whether the hub holds a part of the job, and is heard, so that it is told when the job ends.
    pub(super) fn will_free(&self) -> bool {
        self.asked && !self.ended && self.unheard.is_none()
    }

    /// Whether workers exchange there. A hub without chunks of the job is done as soon as it has allocated.
    pub(super) fn has_streams(&self) -> bool {
        self.reserved.1 > 0
    }

    pub(super) fn describe(&self) -> String {
        describe_hub(self.hub, &self.shape)
    }
}

impl Job {
    /// A hub has allocated its part, or further shares that it was asked for when the last change of the shares had this number.
    pub(crate) fn hub_allocated(
        &mut self,
        hub: u32,
        placement_hash: &str,
        (resumed_step, further): (Option<u32>, Option<u32>),
        now: Now,
    ) -> Transition {
        let Some(index) = self.job_hub_index(hub) else { return Transition::None };
        self.job_hubs[index].is_reported = true;
        // There is none yet if the manager has restarted since the hub was asked to allocate: it will be asked again.
        let Some(placed) = self.placements.get(usize::from(self.job_hubs[index].site)) else {
            return Transition::None;
        };
        match self.state {
            JobState::Initialising => {}
            JobState::Running if self.job_hubs[index].asked_standby.is_some() => {
                if placed.hash == placement_hash {
                    return self.standby_allocated(index);
                }
                let reason = "it has placed the chunks otherwise: run one version of paramhub everywhere";
                return self.refuse_standby(index, reason, now);
            }
            JobState::Running if self.job_hubs[index].failed_standby.is_some() && self.shares_number == 0 => {
                return self.stop_later_hub(index, "the job does not need it as a standby");
            }
            JobState::Running if !self.shares.is_empty() => {
                let becomes = self.further_allocated(index, further);
                return becomes.unwrap_or_else(|| self.repeat_shares());
            }
            JobState::Running => return self.repeat_losses(),
            _ => return Transition::None,
        }
        if placed.hash != placement_hash {
            let message = format!(
                "{} placed job `{}` otherwise than the manager ({placement_hash}, not {}): run one version of \
                 paramhub everywhere",
                self.job_hubs[index].describe(),
                self.name,
                placed.hash
            );
            return self.fail(ErrorCode::Internal, message, now);
        }
        // A hub without chunks has no checkpoint to resume.
        let others = self.job_hubs.iter().find(|job_hub| job_hub.resumed_step.is_some());
        if let (Some(step), Some(other)) = (resumed_step, others)
            && other.resumed_step != resumed_step
        {
            let message = format!(
                "{} found its checkpoint of step {step}, {} that of step {}: let all hubs share one folder of checkpoints, or \
                 say which step to resume",
                self.job_hubs[index].describe(),
                other.describe(),
                other.resumed_step.unwrap_or_default()
            );
            return self.fail(ErrorCode::DoesNotFit, message, now);
        }
        self.job_hubs[index].resumed_step = resumed_step;
        self.job_hubs[index].allocated = true;
        if !self.job_hubs.iter().all(|job_hub| job_hub.allocated) {
            return Transition::None;
        }
        // With `auto` each hub has looked for itself whether there is one.
        let without = |job_hub: &&JobHub| job_hub.resumed_step.is_none() && job_hub.has_streams();
        let (resumed_step, without) = (self.resumed_step(), self.job_hubs.iter().find(without));
        if let (Some(step), Some(without)) = (resumed_step, without) {
            let message = format!(
                "one hub goes on from its checkpoint of step {step}, and {} has found none: let all hubs share one folder of \
                 checkpoints",
                without.describe()
            );
            return self.fail(ErrorCode::DoesNotFit, message, now);
        }
        self.state = JobState::Running;
        self.phase = JobPhase::Running;
        if self.has_begun_again() {
            self.message.clear();
            self.loss_tally.note(false, now);
        }
        Transition::Advanced
    }

    /// A hub has reported all jobs that it has. If this one runs and the hub has not reported it, the hub has lost it.
    pub(crate) fn hub_reported_all(&mut self, hub: u32, now: Now) -> Transition {
        let Some(index) = self.job_hub_index(hub) else { return Transition::None };
        let JobHub { is_reported, ended, .. } = self.job_hubs[index];
        // One that is to become a standby may have said that before it was asked, and otherwise its part is missed at the hub that
        // serves the share.
        if self.state != JobState::Running || is_reported || ended || self.is_dispensable(index) {
            return Transition::None;
        }
        let message = format!("{} does not have the job any more", self.job_hubs[index].describe());
        let cause = Cause::known(message, now);
        if !self.shares.is_empty() {
            return self.go_on_without(index as u16, cause, now);
        }
        self.job_hubs[index].ended = true;
        self.begin_again_or_fail(cause, now)
    }

    /// The step of the checkpoint with which the job began, if it did.
    pub(super) fn resumed_step(&self) -> Option<u32> {
        self.job_hubs.iter().find_map(|job_hub| job_hub.resumed_step)
    }

    /// A hub has reserved bytes of buffers and streams for its part.
    pub(crate) fn hub_reserved(&mut self, hub: u32, memory_bytes: u64, streams: u64) {
        if let Some(index) = self.job_hub_index(hub) {
            self.job_hubs[index].reserved = (memory_bytes, streams);
        }
    }

    /// A hub cannot hold its part.
    pub(crate) fn hub_refused(&mut self, hub: u32, reason: &str, now: Now) -> Transition {
        let Some(index) = self.job_hub_index(hub) else { return Transition::None };
        if self.state == JobState::Running && self.is_dispensable(index) {
            return self.drop_dispensable(index, reason, now);
        }
        // The job goes on with the parts that its hubs have. The refusal may be of what a manager asked that has restarted since.
        if self.state == JobState::Running && !self.shares.is_empty() {
            let _ = self.further_refused(index, now);
            return Transition::None;
        }
        self.job_hubs[index].ended = true;
        let message =
            format!("{} cannot serve job `{}`: {reason}", self.job_hubs[index].describe(), self.name);
        match self.fail(ErrorCode::DoesNotFit, message, now) {
            Transition::None => self.note_cleared(),
            transition => transition,
        }
    }

    /// A hub has reported its part in the job's checkpoints.
    pub(crate) fn hub_kept(&mut self, hub: u32, mut status: CheckpointStatus) {
        if let Some(index) = self.job_hub_index(hub) {
            status.failure.truncate(status.failure.floor_char_boundary(FAILURE_BYTES_MAX));
            self.job_hubs[index].checkpoints = Some(status);
        }
    }

    /// The state of the job's checkpoints, if it takes any.
    pub fn checkpoints(&self) -> Option<CheckpointStatus> {
        let of_hubs = CheckpointStatus::of_hubs(
            self.hubs_that_write().filter_map(|job_hub| job_hub.checkpoints.as_ref()),
        );
        of_hubs.or_else(|| self.recorded_checkpoints.clone())
    }

    /// The hubs that write parts of the job's checkpoints: in a job with standbys, those that serve chunks.
    pub(super) fn hubs_that_write(&self) -> impl Iterator<Item = &JobHub> {
        let serves = |position: u16| {
            let mut shares = (0..).zip(&self.shares);
            shares.any(|(number, share)| share.served_by == position && !self.is_empty_share(number))
        };
        let all = (0..).zip(&self.job_hubs);
        all.filter(move |&(position, _)| self.shares.is_empty() || serves(position))
            .map(|(_, job_hub)| job_hub)
    }

    /// A hub has a message for people.
    pub(crate) fn hub_noticed(&mut self, hub: u32, message: String) -> Transition {
        if self.state.has_ended() || self.job_hub_index(hub).is_none() {
            return Transition::None;
        }
        self.message = message;
        Transition::None
    }

    /// Ranks keep the others waiting at a hub, or no longer do so.
    pub(crate) fn hub_awaits(&mut self, hub: u32, awaited: Option<AwaitedRanks>, now: Now) {
        if let Some(index) = self.job_hub_index(hub) {
            let workers = self.workers;
            self.job_hubs[index].awaited = awaited.map(|mut awaited| {
                awaited.ranks.retain(|rank| *rank < workers);
                awaited.key.truncate(awaited.key.floor_char_boundary(AWAITED_BYTES_MAX));
                awaited.what.truncate(awaited.what.floor_char_boundary(AWAITED_BYTES_MAX));
                (awaited, now)
            });
        }
    }

    /// The ranks that keep the others waiting, at the hub where they have done so for longest.
    pub fn awaited(&self, now: Now) -> Option<AwaitedRanks> {
        let reported = self.job_hubs.iter().filter_map(|job_hub| job_hub.awaited.as_ref());
        let reported = reported.filter(|(awaited, _)| !self.state.has_ended() && !awaited.ranks.is_empty());
        let aged = reported.map(|(awaited, at)| AwaitedRanks {
            seconds: awaited.seconds + now.seconds_since(*at),
            ..awaited.clone()
        });
        aged.max_by(|one, other| one.seconds.total_cmp(&other.seconds))
    }

    /// The job is over at a hub.
    pub(crate) fn hub_ended(&mut self, hub: u32, end: &JobEnd, now: Now) -> Transition {
        let Some(index) = self.job_hub_index(hub) else { return Transition::None };
        // The hub has no chunks of the job and was done at once, when an earlier manager asked it. It is asked again, and
        // reports that it has allocated before it is done again.
        if end.finished && !self.job_hubs[index].allocated && !self.state.has_ended() {
            return Transition::None;
        }
        // The hub was told to stop its part from before the job began again, and had none any more.
        let is_of_former = self.has_begun_again() && !self.job_hubs[index].allocated;
        if is_of_former && end.cause == CauseKind::Hearsay && !self.state.has_ended() {
            return Transition::None;
        }
        if self.state == JobState::Running && !end.finished && self.is_dispensable(index) {
            return self.drop_dispensable(index, &cause_of(end, now).message, now);
        }
        // A repeated report: the answer to the first was lost, or the hub was asked after the end.
        if std::mem::replace(&mut self.job_hubs[index].ended, true) {
            return Transition::None;
        }
        if self.state.has_ended() {
            return match (end.finished, self.note_cleared()) {
                (true, cleared) => cleared,
                (false, cleared) => match self.explain(cause_of(end, now)) {
                    Transition::None => cleared,
                    explained => explained,
                },
            };
        }
        // All ranks have left another hub, and so have made all their steps. One that has died since has only not left this one.
        let is_loss = matches!(end.cause, CauseKind::PeerLost | CauseKind::GaveUp);
        let has_finished = end.finished || is_loss && !self.shares.is_empty() && self.has_finished_at_a_hub;
        if !has_finished && self.may_outlive_end(end.cause) {
            return self.begin_again_or_fail(cause_of(end, now), now);
        }
        if !has_finished {
            return self.fail_because(ErrorCode::JobEnded, cause_of(end, now), now);
        }
        self.has_finished_at_a_hub |= !self.shares.is_empty() && self.job_hubs[index].has_streams();
        if self.state != JobState::Running || !self.has_ended_everywhere() {
            if let Some(transition) = self.needs_no_copies_of(index) {
                return transition;
            }
            return match self.job_hubs[index].has_streams() {
                true => self.finish_elsewhere(),
                false => self.go_on_without_hub(now),
            };
        }
        self.end(JobState::Finished, now)
    }

    /// Whether the job is over at all hubs that it needs.
    pub(super) fn has_ended_everywhere(&self) -> bool {
        (0..self.job_hubs.len()).all(|index| self.job_hubs[index].ended || self.is_dispensable(index))
    }

    /// A lost hub has joined again under another number and reports why the job ended there.
    pub(crate) fn former_hub_ended(&mut self, shape: &HubShape, end: &JobEnd, now: Now) -> Transition {
        let was_here = self.job_hubs.iter().any(|job_hub| job_hub.shape.interfaces == shape.interfaces);
        if end.finished || !was_here {
            return Transition::None;
        }
        self.explain(cause_of(end, now))
    }

    /// A hub is lost, with all that it held.
    pub(crate) fn hub_lost(&mut self, hub: u32, cause: Cause, now: Now) -> Transition {
        let Some(index) = self.job_hub_index(hub) else { return Transition::None };
        if self.state == JobState::Running && !self.shares.is_empty() && !self.job_hubs[index].ended {
            return self.go_on_without(index as u16, cause, now);
        }
        // The hub had ended the job before it was lost.
        if std::mem::replace(&mut self.job_hubs[index].ended, true) {
            return Transition::None;
        }
        let was_over = self.state.has_ended();
        let transition = self.begin_again_or_fail(cause, now);
        match was_over.then(|| self.note_cleared()) {
            Some(cleared) if transition == Transition::None => cleared,
            _ => transition,
        }
    }

    /// A hub has reported its counters.
    pub(crate) fn hub_counted(&mut self, hub: u32, counters: JobCounters, left_out: &[u64]) {
        let ranks = left_out.len().min(self.workers as usize);
        if let Some(index) = self.job_hub_index(hub) {
            self.job_hubs[index].counters = counters;
            self.job_hubs[index].left_out = left_out[..ranks].to_vec();
        }
    }

    /// For each rank, how many updates of chunks hubs have made without it because it was late.
    pub fn left_out(&self) -> Vec<u64> {
        let mut sum = self.recorded_left_out.clone();
        self.job_hubs.iter().for_each(|job_hub| add_by_rank(&mut sum, &job_hub.left_out));
        sum
    }

    /// The hubs that serve the job, site by site in placement order.
    pub fn hubs(&self) -> impl Iterator<Item = u32> + '_ {
        self.job_hubs.iter().map(|job_hub| job_hub.hub)
    }

    /// The hubs that hold a part of the job, each once.
    pub(crate) fn holding_hubs(&self) -> BTreeSet<u32> {
        self.job_hubs
            .iter()
            .filter(|job_hub| job_hub.asked && !job_hub.ended)
            .map(|job_hub| job_hub.hub)
            .collect()
    }

    /// The options that hubs and workers hear of: those of an earlier release need not know what concerns the manager alone.
    pub fn options_told(&self) -> JobOptions {
        JobOptions { max_hubs: None, hub_label: None, ..self.options }
    }

    /// Whether a hub has a part of the job, or is about to.
    pub(crate) fn has_part_at(&self, hub: u32) -> bool {
        self.job_hubs.iter().any(|job_hub| job_hub.hub == hub && !job_hub.ended)
    }

    /// Returns whether this hub was asked to hold part of the job.
    pub(crate) fn is_served_by(&self, hub: u32) -> bool {
        self.job_hub_index(hub).is_some()
    }

    /// Whether the job has ended, and nothing of it is known to be left at this hub. One that the job went on without may have
    /// been frozen then, and still have its part when it calls again.
    pub(crate) fn is_over_at(&self, hub: u32) -> bool {
        self.state.has_ended() && self.job_hub_index(hub).is_some_and(|index| self.job_hubs[index].ended)
    }

    /// Whether the job has ended after it had gone on at other hubs than this one, which may not have heard of that. A hub that
    /// still had a part in the job when it failed is to stop that instead. If the job has finished, it finishes there, too.
    pub(crate) fn went_on_without(&self, hub: u32) -> bool {
        let failed_with_it = self.state == JobState::Failed && self.parts_of(hub) > 0;
        self.is_over_at(hub) && self.shares_number > 0 && !failed_with_it
    }

    /// The hubs that have not yet reported that they freed the job, for a message.
    pub(crate) fn hubs_not_cleared(&self) -> String {
        let holding = self.job_hubs.iter().filter(|job_hub| job_hub.asked && !job_hub.ended);
        join_words(&holding.map(JobHub::describe).collect::<Vec<_>>())
    }

    /// The counters of all hubs together.
    pub fn counters(&self) -> JobCounters {
        let mut sum = self.recorded_counters;
        self.job_hubs.iter().for_each(|job_hub| sum += job_hub.counters);
        sum
    }

    /// What the job has at its hubs: bytes of buffers, and streams.
    pub(crate) fn held(&self) -> (u64, u64) {
        let holding = self.job_hubs.iter().filter(|job_hub| !job_hub.ended);
        holding.fold((0, 0), |(memory_bytes, streams), job_hub| {
            // A hub of an earlier release only counts its bytes.
            let of_hub = job_hub.reserved.0.max(job_hub.counters.memory_bytes);
            (memory_bytes.saturating_add(of_hub), streams.saturating_add(job_hub.reserved.1))
        })
    }

    fn note_cleared(&mut self) -> Transition {
        let holds = |job_hub: &JobHub| job_hub.asked && !job_hub.ended;
        let cleared = self.state.has_ended() && !self.job_hubs.iter().any(holds);
        if cleared && self.phase != JobPhase::Cleared {
            self.phase = JobPhase::Cleared;
            return Transition::Advanced;
        }
        Transition::None
    }

    pub(super) fn job_hub_index(&self, hub: u32) -> Option<usize> {
        // A hub that was asked to become a standby more than once has its newest part.
        self.job_hubs.iter().rposition(|job_hub| job_hub.hub == hub)
    }
}

/// The cause that a hub reports, cut to the length that is kept.
pub(super) fn cause_of(end: &JobEnd, now: Now) -> Cause {
    let ago_s =
        if end.ago_s.is_finite() { end.ago_s.clamp(0.0, REPORTED_BACK_MAX.as_secs_f64()) } else { 0.0 };
    let message = end.reason[..end.reason.floor_char_boundary(MESSAGE_BYTES_MAX)].to_owned();
    Cause { kind: end.cause, rank: end.rank, began: now.earlier(ago_s), message }
}

/// A hub by its number and first address, by which people can find it.
pub(crate) fn describe_hub(hub: u32, shape: &HubShape) -> String {
    match shape.interfaces.first() {
        Some(interface) => format!("hub {hub} ({})", interface.address),
        None => format!("hub {hub}"),
    }
}
