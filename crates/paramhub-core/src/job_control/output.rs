//! What the job control wants from the rest of the hub.

use std::time::Duration;

use super::{EndReport, RoleChange};
use crate::auth::Namespace;
use crate::composition::SiteId;
use crate::placement::{HubShape, RouteId};
use crate::service::{HubEvent, JobPlan, ProbeOrder};
use crate::standbys::Share;
use crate::wire::{Failure, Notice};

/// What a job's last checkpoint is the last one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastCheckpoint {
    /// The job has finished: all workers have left.
    Finish,
    /// The hub shuts down.
    Shutdown,
    /// The job's launcher ends the workers.
    EndOfWorkers,
    /// No process comes for workers that were lost. The command is answered when the checkpoint is on the disk.
    FailureForWorkers,
}

impl LastCheckpoint {
    /// Whether the job goes on for a while.
    pub fn goes_on(self) -> bool {
        matches!(self, LastCheckpoint::EndOfWorkers | LastCheckpoint::FailureForWorkers)
    }
}

/// A consequence of an event, for the hub to carry out. Consequences are in order. The hub knows the parts of a
/// job that are not named here by its namespace.
#[derive(Clone, Debug)]
pub enum Output {
    /// Read the job's checkpoint on a thread of its own. [`Event::Loaded`](super::Event::Loaded) answers.
    Load(Namespace),
    /// Let the cores allocate all routes of the job, with the checkpoint if one was read.
    /// [`CoreEvent::Opened`](super::CoreEvent::Opened) answers for each route.
    Open(Namespace),
    /// Let the cores allocate further routes of the job, for which this hub is a standby, and admit the streams of the hubs that
    /// serve them. [`CoreEvent::Opened`](super::CoreEvent::Opened) answers for each route.
    OpenFurther {
        /// The job.
        namespace: Namespace,
        /// The routes.
        routes: Vec<RouteId>,
    },
    /// Admit streams of the job.
    AdmitStreams(Namespace),
    /// Refuse further streams of the job, with this message.
    RefuseStreams {
        /// The job.
        namespace: Namespace,
        /// Why it has ended.
        message: String,
    },
    /// Open the streams to the sites above on a thread of its own, if there are any. If that fails,
    /// [`Event::SitesUnreachable`](super::Event::SitesUnreachable) follows.
    Link {
        /// The job.
        namespace: Namespace,
        /// The deadline for all of them together.
        until: Duration,
    },
    /// Start the thread that writes the job's checkpoints.
    StartCheckpoints(Namespace),
    /// Take a last checkpoint, if the workers reach a step together soon. The answer is
    /// [`Event::CheckpointKept`](super::Event::CheckpointKept) if the job [goes on](LastCheckpoint::goes_on), and
    /// otherwise [`Event::LastCheckpointTaken`](super::Event::LastCheckpointTaken). It comes in any case.
    TakeLastCheckpoint {
        /// The job.
        namespace: Namespace,
        /// What it is the last one before.
        before: LastCheckpoint,
    },
    /// End the thread that writes the job's checkpoints, since the cores are about to free what could be
    /// copied. It first writes what has been copied.
    StopCheckpoints(Namespace),
    /// Send a notice by way of a core.
    Notify {
        /// The job.
        namespace: Namespace,
        /// The core.
        core: u16,
        /// Who gets it.
        to: Recipient,
        /// The notice.
        notice: Notice,
    },
    /// Refuse the streams of a rank's former process.
    RefuseRank {
        /// The job.
        namespace: Namespace,
        /// The rank.
        rank: u32,
        /// The epoch since which the rank is lost.
        epoch: u64,
    },
    /// Admit the streams of the process that takes a rank.
    AdmitRank {
        /// The job.
        namespace: Namespace,
        /// The rank.
        rank: u32,
        /// The epoch since which the process has the rank.
        epoch: u64,
    },
    /// Let a core change the membership of its chunks.
    ChangeRank {
        /// The job.
        namespace: Namespace,
        /// The core.
        core: u16,
        /// The rank.
        rank: u32,
        /// The epoch that begins with the change, or in which it began.
        epoch: u64,
        /// The change.
        change: RankChange,
    },
    /// Let a core change what this hub is for a route, and admit its streams accordingly.
    ChangeRole {
        /// The job.
        namespace: Namespace,
        /// The core.
        core: u16,
        /// The route.
        route: RouteId,
        /// The change.
        role: RoleChange,
    },
    /// Note which hubs have the shares of the job: changes of roles follow.
    NoteShares {
        /// The job.
        namespace: Namespace,
        /// The shares.
        shares: Vec<Share>,
        /// The hubs that the job has got since it began.
        later_hubs: Vec<HubShape>,
    },
    /// Open the streams of these routes to their new standbys, on a thread of its own. If that fails,
    /// [`Event::StandbyUnreachable`](super::Event::StandbyUnreachable) follows.
    LinkStandbys {
        /// The job.
        namespace: Namespace,
        /// The routes.
        routes: Vec<RouteId>,
        /// The deadline for all of them together.
        until: Duration,
    },
    /// Refuse further streams of the job, which goes on at other hubs, so that their callers try these.
    SendElsewhere {
        /// The job.
        namespace: Namespace,
        /// Why it goes on elsewhere.
        message: String,
    },
    /// Let a core close all streams of a job whose workers go back to an earlier step.
    Rewind {
        /// The job.
        namespace: Namespace,
        /// The core.
        core: u16,
        /// The epoch that begins with this.
        epoch: u64,
        /// The rank that is lost, and what has happened.
        notice: Notice,
    },
    /// Free all memory of the job at a core and close its streams, with the reason if it failed.
    /// [`CoreEvent::Closed`](super::CoreEvent::Closed) answers for each route that was open.
    End {
        /// The job.
        namespace: Namespace,
        /// The core.
        core: u16,
        /// The reason.
        failure: Option<Failure>,
    },
    /// Forget the job: nothing is left of it here.
    Forget(Namespace),
    /// Plan a part of the job, whose former part has ended here. [`Event::Planned`](super::Event::Planned) or
    /// [`Event::CannotPlan`](super::Event::CannotPlan) answers.
    Plan(Box<JobPlan>),
    /// Take part in a probe, or only report why the hub cannot. [`Event::Probed`](super::Event::Probed)
    /// answers.
    Probe {
        /// The order of the manager.
        order: ProbeOrder,
        /// Why the hub takes no part.
        refused: Option<String>,
    },
    /// Report this to the manager.
    Report(HubEvent),
    /// Report to the manager that a job has ended, with its last counters: its cores have forgotten them.
    ReportEnd(EndReport),
    /// Report to the manager that the hub is about to stop.
    ReportLeaving,
    /// End the cores: the hub has no jobs any more, or has waited for them long enough.
    StopCores,
    /// Log that something went well.
    Info(String),
    /// Log that something went wrong.
    Warning(String),
}

/// A change of a job's membership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankChange {
    /// The rank is lost: its streams are closed, and steps end without it.
    Lose,
    /// Another process takes the rank. [`CoreEvent::RankExpected`](super::CoreEvent::RankExpected) answers.
    Expect,
    /// The process contributes from this step on. [`CoreEvent::RankJoined`](super::CoreEvent::RankJoined) answers.
    Join {
        /// The step; `None` if the process begins like the first ones. In a job that goes back, all ranks then begin anew.
        step: Option<u32>,
    },
}

/// Who gets a notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipient {
    /// One rank.
    Rank(u32),
    /// All ranks below a site whose sums come here.
    Site(SiteId),
    /// All ranks that exchange here.
    All,
}
