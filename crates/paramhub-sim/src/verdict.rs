//! What must have come of a run: whether the job had to go through, and what every process must say of its end.

use std::time::Duration;

use paramhub_core::liveness::{HEARTBEAT, LivenessRules};
use paramhub_core::resuming::ResumeTerms;
use paramhub_core::service::{CauseKind, JobEnd, JobState, JobStatus};

use crate::network::Process;
use crate::scenario::{Fault, Learns, Scenario};

/// Outages of this length together are survived: a worker tries for 10 s to open a stream again.
const BRIEF: Duration = Duration::from_millis(6_500);
/// What a handshake costs whose stream is silent, or late: the time after which the worker dials once more.
const SILENT_HANDSHAKE: Duration = Duration::from_secs(4);
/// What an acceptor and a core take for a stream.
const ADMISSION: Duration = Duration::from_millis(25);
/// The manager need not hear hubs for so long while the job runs.
const UNHEARD: Duration = Duration::from_secs(80);
/// The manager takes a hub for gone that a rank has lost and that it has not heard for so long.
const MISSED_AFTER: Duration = Duration::from_secs(3);
/// The manager may be away for so long while ranks gather: they call again for 10 s.
const AWAY: Duration = Duration::from_secs(6);
/// Outages of this length together are survived while ranks gather: one whose call broke must call again within 2 s.
const BRIEF_GATHERING: Duration = Duration::from_millis(500);
/// A job that goes back waits so long for all its ranks.
const ABSENT: Duration = Duration::from_secs(60);
/// Calls that break so often are survived while ranks gather.
const BREAKS: usize = 3;

/// How a worker has ended.
pub(crate) struct WorkerEnd<'a> {
    pub(crate) process: Process,
    pub(crate) rank: u32,
    pub(crate) was_killed: bool,
    /// The steps that it has done.
    pub(crate) steps: u32,
    pub(crate) outcome: Option<&'a Result<(), String>>,
}

/// How a run has ended.
pub(crate) struct Ends<'a> {
    pub(crate) scenario: &'a Scenario,
    /// When all workers had opened all streams.
    pub(crate) connected: Option<Duration>,
    /// All processes that there were of workers.
    pub(crate) workers: Vec<WorkerEnd<'a>>,
    /// The hubs that live and that no others have replaced, by number.
    pub(crate) hubs: Vec<(u16, Option<&'a JobEnd>)>,
    /// What the manager has recorded.
    pub(crate) recorded: &'a JobStatus,
    /// The ranks that no hub has ever taken for lost.
    pub(crate) always_there: Vec<u32>,
    /// The ranks that some hub has taken for lost.
    pub(crate) lost: Vec<u32>,
    /// The version that all chunks have; `None` if they have several.
    pub(crate) common_version: Option<u32>,
    /// Whether no hub was killed or has lost its part in the job.
    pub(crate) has_all_hubs: bool,
    /// Whether a hub was killed, after another, while not all shares had two hubs.
    pub(crate) has_risked_chunks: bool,
    /// Whether the manager has lost a hub, or has not heard it for so long that a rank's word suffices.
    pub(crate) has_lost_hubs: bool,
}

impl Scenario {
    /// Whether the job must go through whatever else happens: nobody dies but the manager, and nothing lasts as long as
    /// the time after which something gives up. All streams were open (`connected`) before the first fault between
    /// workers and hubs.
    pub(crate) fn must_finish(&self, connected: Option<Duration>, has_risked_chunks: bool) -> bool {
        let is_early = |at: Duration| connected.is_none_or(|connected| at <= connected);
        let faults = |early: bool| -> Vec<Fault> {
            self.faults.iter().filter(|&&(at, _)| is_early(at) == early).map(|&(_, fault)| fault).collect()
        };
        if self.replicas {
            return self.survive_gathering(&faults(true))
                && self.keeps_hubs(&faults(false), has_risked_chunks);
        }
        let survives = self.keeps_workers(&faults(false))
            || match self.outlives_workers() {
                // Another process joins a job as a first one does. One that is killed is replaced.
                true => {
                    // A twin that comes before its rank has opened all streams ends it, which the others outlive.
                    let is_outlived = |fault: &Fault| match fault {
                        Fault::Replace(..) => true,
                        Fault::Restart(..) => self.rewind_every.is_some(),
                        Fault::Twin(_) => self.rewind_every.is_none(),
                        _ => false,
                    };
                    let is_other = |fault: &Fault| !is_outlived(fault);
                    let (others, replaced): (Vec<Fault>, Vec<Fault>) =
                        faults(false).into_iter().partition(is_other);
                    let absent: Duration = replaced.iter().map(|fault| fault.length()).sum();
                    self.survive_gathering(&others) && (self.rewind_every.is_none() || absent <= ABSENT)
                }
                false => false,
            };
        self.survive_gathering(&faults(true)) && survives
    }

    /// Whether a job with standbys survives these faults: those between hubs cost standbys at most, and one hub may be killed
    /// if nothing else has cost its standby, or its counterpart. Another may be killed when all shares have two hubs again.
    fn keeps_hubs(&self, faults: &[Fault], has_risked_chunks: bool) -> bool {
        let is_kill = |fault: &&Fault| fault.kills_hub();
        let kills = faults.iter().filter(is_kill).count();
        let others: Vec<Fault> =
            faults.iter().filter(|fault| !is_kill(fault) && !fault.is_between_hubs()).copied().collect();
        let costs_a_hub = |fault: &&Fault| match fault {
            Fault::Pause(process, _) => matches!(process, Process::Hub(_) | Process::Manager),
            fault if fault.is_between_hubs() => true,
            Fault::Crash { .. } => false,
            fault => fault.is_of_manager(),
        };
        // A hub that is drained is left for its standby, too, which may be the one that stands still or is cut off.
        let leaves_none = kills == 0 && !faults.iter().any(|fault| matches!(fault, Fault::Drain(..)));
        let is_alone = leaves_none || !faults.iter().any(|fault| costs_a_hub(&fault));
        !has_risked_chunks && is_alone && self.survive_running(&others)
    }

    /// Whether no worker may be lost although its streams may be cut.
    pub(crate) fn must_keep_workers(&self, connected: Option<Duration>) -> bool {
        let is_early = |at: Duration| connected.is_none_or(|connected| at <= connected);
        let (early, late): (Vec<_>, Vec<_>) = self.faults.iter().partition(|&&(at, _)| is_early(at));
        let [early, late] = [early, late].map(|faults: Vec<(Duration, Fault)>| {
            faults.into_iter().map(|(_, fault)| fault).collect::<Vec<_>>()
        });
        self.survive_gathering(&early) && self.keeps_workers(&late)
    }

    /// Whether these faults of a job that runs cost no worker.
    fn keeps_workers(&self, faults: &[Fault]) -> bool {
        // Where a rank may be taken by another process, one that comes may be the one that has it.
        let is_other = |fault: &Fault| matches!(fault, Fault::Twin(_) | Fault::Rival(_));
        self.survive_running(faults) && !(self.outlives_workers() && faults.iter().any(is_other))
    }

    fn survive_gathering(&self, faults: &[Fault]) -> bool {
        let is_survived = |fault: &Fault| match fault {
            Fault::Break(..) | Fault::Block(..) | Fault::Part(..) => fault.is_of_manager(),
            Fault::Pause(..) | Fault::Crash { .. } => true,
            // A job that has yet to find its hubs waits for that one, or goes on without it.
            Fault::Drain(..) => false,
            // A rival that comes first has the rank.
            Fault::Cut { .. }
            | Fault::Silence(..)
            | Fault::Kill(_)
            | Fault::Reboot(..)
            | Fault::Twin(_)
            | Fault::Replace(..)
            | Fault::Restart(..)
            | Fault::Rival(_) => false,
        };
        let is_crash = |fault: &&Fault| matches!(fault, Fault::Crash { .. });
        let away: Duration = faults.iter().filter(is_crash).map(|fault| fault.length()).sum();
        let others = faults.iter().filter(|fault| !is_crash(fault));
        let outages: Duration = others.map(|fault| fault.length()).sum();
        let breaks = faults.iter().filter(|fault| matches!(fault, Fault::Break(..) | Fault::Crash { .. }));
        let breaks = breaks.count() + self.lost_answers as usize;
        away <= AWAY && outages <= BRIEF_GATHERING && breaks <= BREAKS && faults.iter().all(is_survived)
    }

    fn survive_running(&self, faults: &[Fault]) -> bool {
        let is_survived = |fault: &Fault| match fault {
            Fault::Break(..) | Fault::Silence(..) if fault.is_of_manager() => true,
            Fault::Silence(..) => self.continues,
            // The grace is looked at below.
            Fault::Break(..) | Fault::Cut { .. } => true,
            Fault::Block(..) | Fault::Part(..) | Fault::Pause(..) | Fault::Drain(..) => true,
            Fault::Twin(_) | Fault::Rival(_) | Fault::Crash { .. } => true,
            Fault::Kill(_) | Fault::Reboot(..) | Fault::Replace(..) | Fault::Restart(..) => false,
        };
        // A job that runs needs no manager, however long it is away, and for long not one that hears its hubs.
        let is_cut = |fault: &&Fault| fault.is_of_manager() && !matches!(fault, Fault::Crash { .. });
        let unheard: Duration = faults.iter().filter(is_cut).map(|fault| fault.length()).sum();
        let is_of_streams = |fault: &&Fault| !fault.is_of_manager() && !matches!(fault, Fault::Drain(..));
        let of_streams = faults.iter().filter(is_of_streams);
        let lengths: Duration = of_streams.clone().map(|fault| fault.length()).sum();
        let silences = of_streams.filter(|fault| matches!(fault, Fault::Silence(..))).count();
        let is_redialled = |fault: &&Fault| match fault {
            Fault::Cut { .. } => true,
            Fault::Break(..) => !fault.is_of_manager() && !self.continues,
            _ => false,
        };
        let cuts: Vec<Fault> = faults.iter().filter(is_redialled).copied().collect();
        // The first silence makes the worker dial if no cut does; others may hit the handshakes that follow.
        let of_handshakes = (silences as u32).saturating_sub(u32::from(cuts.is_empty()));
        let outages = lengths + SILENT_HANDSHAKE * (of_handshakes + self.late_hellos);
        let has_grace = cuts.is_empty() || self.redial_grace >= outages + self.redialling(&cuts);
        outages <= BRIEF && unheard <= UNHEARD && has_grace && faults.iter().all(is_survived)
    }

    /// How long it takes until another stream is in the place of one that was cut so often, if nothing else fails. Its
    /// worker may learn of a cut only when it sends a heartbeat. A later cut may hit a handshake; if only the hub learns it,
    /// the worker waits for the hub's answer for long.
    fn redialling(&self, cuts: &[Fault]) -> Duration {
        let terms = ResumeTerms {
            redial_grace: self.redial_grace,
            moves: self.continues,
            has_standbys: self.replicas,
        };
        let rules = LivenessRules::of_stream(terms.heartbeat(HEARTBEAT), self.dead_after);
        let learning = rules.heartbeat + rules.check_every();
        // Either of two hubs may be the one that dials.
        let is_of_hubs = |process: &Process| matches!(process, Process::Hub(_));
        let of_hub = |fault: &&Fault| match fault {
            Fault::Cut { learns: Learns::Hub, .. } => true,
            Fault::Cut { learns: Learns::Neighbour, neighbour, .. } => is_of_hubs(neighbour),
            _ => false,
        };
        let again = cuts.len() as u32 - 1;
        let waiting = SILENT_HANDSHAKE * again.min(cuts.iter().filter(of_hub).count() as u32);
        (learning + self.delay.end * 4 + ADMISSION) * (again + 1) + waiting
    }
}

impl Ends<'_> {
    /// Checks that all agree on an end that had to come.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) fn check(&self) -> Result<(), String> {
        // A Leave that a hub has had goes with it, and its sender may have ended.
        let may_lack_leaves = self.scenario.replicas
            && !self.has_all_hubs
            && self.workers.iter().any(|worker| matches!(worker.outcome, Some(Ok(()))));
        let must_finish =
            self.scenario.must_finish(self.connected, self.has_risked_chunks) && !may_lack_leaves;
        for worker in self.workers.iter().filter(|worker| !worker.was_killed) {
            let (process, steps) = (worker.process, worker.steps);
            let is_first = matches!(process, Process::Worker(_, 0));
            match worker.outcome {
                Some(Ok(())) if steps < self.scenario.steps => {
                    return Err(format!("{process:?} has ended well after {steps} steps"));
                }
                Some(Err(error)) if must_finish && is_first && !self.scenario.outlives_workers() => {
                    return Err(format!("{process:?} has failed although nobody died: {error}"));
                }
                Some(Err(error)) if !names_somebody(error) => {
                    return Err(format!("{process:?} has failed, and this names nobody: {error}"));
                }
                _ => {}
            }
        }
        for (number, end) in &self.hubs {
            let Some(end) = end.filter(|end| !end.finished) else { continue };
            if must_finish {
                return Err(format!("hub {number} reports a failure although nobody died: {}", end.reason));
            }
            if !names_somebody(&end.reason) {
                return Err(format!("hub {number} reports a failure that names nobody: {}", end.reason));
            }
        }
        if let Some(rank) = self.lost.first().filter(|_| self.scenario.must_keep_workers(self.connected)) {
            return Err(format!("rank {rank} was lost although nobody died"));
        }
        self.check_record(must_finish)
    }

    /// Checks that the manager has recorded what has happened.
    fn check_record(&self, must_finish: bool) -> Result<(), String> {
        let JobStatus { state, message, .. } = self.recorded;
        if *state == JobState::Finished {
            let has_worked = |rank| {
                let of_rank = self.workers.iter().filter(|worker| worker.rank == rank);
                of_rank.map(|worker| worker.steps).max() == Some(self.scenario.steps)
            };
            if let Some(&rank) = self.always_there.iter().find(|&&rank| !has_worked(rank)) {
                return Err(format!(
                    "the manager records that the job has finished, and rank {rank} has not"
                ));
            }
            let must_agree = self.scenario.rewind_every.is_some()
                || self.scenario.racks.is_some()
                || self.scenario.replicas;
            if must_agree && self.common_version != Some(self.scenario.steps) {
                return Err(format!(
                    "the manager records that the job has finished, and chunks have not made all steps: {:?}",
                    self.common_version
                ));
            }
            // A worker that has left one of two hubs of a share may be lost to the other, which cannot know that all steps are made.
            let has_lost_a_worker = |end: &JobEnd| {
                self.scenario.replicas && matches!(end.cause, CauseKind::PeerLost | CauseKind::GaveUp)
            };
            let is_over = |end: &JobEnd| end.finished || has_lost_a_worker(end);
            return match self.hubs.iter().find(|(_, end)| end.is_none_or(|end| !is_over(end))) {
                None => Ok(()),
                Some((number, end)) => Err(format!(
                    "the manager records that the job has finished, and hub {number} says {end:?}"
                )),
            };
        }
        if must_finish {
            return Err(format!("the manager records a failure although nobody died: {message}"));
        }
        if !names_somebody(message) {
            return Err(format!("the manager records a failure that names nobody: {message}"));
        }
        let have_finished =
            self.has_all_hubs && self.hubs.iter().all(|(_, end)| end.is_some_and(|end| end.finished));
        // A hub that a rank has lost and whose calls do not reach the manager counts as gone.
        let keeps_from_calling = |fault: &Fault| {
            let is_between = fault.is_of_manager() || matches!(fault, Fault::Pause(Process::Hub(_), _));
            is_between && fault.length() >= MISSED_AFTER
        };
        let is_missed = message.contains("does not hear either")
            && self.scenario.faults.iter().any(|(_, fault)| keeps_from_calling(fault));
        match have_finished && !self.has_lost_hubs && !is_missed {
            true => Err(format!("the manager records a failure of a job that has finished: {message}")),
            false => Ok(()),
        }
    }
}

/// Whether a failure names who is at fault.
fn names_somebody(failure: &str) -> bool {
    let named = ["rank ", "hub ", "hub)", "Hub(", "no worker", "ranks "];
    named.iter().any(|name| failure.contains(name))
}
