//! What happens at a hub, as far as it concerns its jobs.

use std::ops::Range;
use std::time::Duration;

use super::JobTerms;
use crate::auth::Namespace;
use crate::composition::Neighbour;
use crate::exchange::Awaited;
use crate::placement::{HubShape, RouteId};
use crate::service::{CauseKind, FurtherShares, JobCounters, JobPlan, ProbeOrder, ProbeReport, StopWhen};
use crate::standbys::Share;

/// With what a job begins that was to look for a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Beginning {
    /// The checkpoint of this step.
    Checkpoint(u32),
    /// Rank 0's parameters, for this reason: there is no checkpoint from which the job may go on by itself
    /// ([`Resume::Auto`](crate::checkpoint::Resume::Auto)).
    Anew(String),
}

/// An event for the job control of a hub.
#[derive(Clone, Debug)]
pub enum Event {
    /// The manager wants a job allocated, and the hub has planned it.
    Planned(Box<JobTerms>),
    /// The manager wants further shares of a job allocated, and the hub has planned them.
    PlannedFurther {
        /// The job, with the routes of these shares only.
        terms: Box<JobTerms>,
        /// The shares.
        further: FurtherShares,
    },
    /// The manager wants a job allocated that the hub has planned before, or of which it still has a former part.
    AllocateAgain(Box<JobPlan>),
    /// The manager has restarted and wants every job reported.
    ReportJobs {
        /// The number of the question, for the answer.
        question: u32,
    },
    /// The manager wants a job allocated, and the hub cannot plan it.
    CannotPlan {
        /// The job.
        namespace: Namespace,
        /// Why the hub cannot serve it.
        reason: String,
    },
    /// The manager orders the streams to the sites above.
    Link {
        /// The job.
        namespace: Namespace,
    },
    /// The streams to the sites above cannot be ordered.
    CannotLink {
        /// The job.
        namespace: Namespace,
        /// Why not.
        reason: String,
    },
    /// The hubs of the sites above cannot be reached.
    SitesUnreachable {
        /// The job.
        namespace: Namespace,
        /// Which hubs, and why not.
        reason: String,
    },
    /// The manager wants the ranks that exchange here to have a notice.
    Tell {
        /// The job.
        namespace: Namespace,
        /// The rank that the notice is about, if any.
        rank: Option<u32>,
        /// The text of the notice.
        message: String,
    },
    /// The manager has decided that a rank is lost.
    LoseRank {
        /// The job.
        namespace: Namespace,
        /// The rank.
        rank: u32,
        /// The epoch that begins with this.
        epoch: u64,
        /// What has happened to the rank, beginning with its name.
        reason: String,
    },
    /// The manager has decided that a rank is lost, and that all ranks go back to an earlier step.
    Rewind {
        /// The job.
        namespace: Namespace,
        /// The rank that is lost; `None` if another hub is.
        rank: Option<u32>,
        /// The epoch that begins with this.
        epoch: u64,
        /// What has happened to the rank, beginning with its name.
        reason: String,
    },
    /// Another process takes a lost rank.
    ExpectRank {
        /// The job.
        namespace: Namespace,
        /// The rank.
        rank: u32,
        /// The epoch that begins with this.
        epoch: u64,
    },
    /// The manager has changed which hubs have the shares of a job.
    ChangeShares {
        /// The job.
        namespace: Namespace,
        /// The number of the change, from 1.
        number: u32,
        /// The shares from now on.
        shares: Vec<Share>,
        /// The hubs that the job has got since it began.
        later_hubs: Vec<HubShape>,
        /// What has happened, for people.
        reason: String,
    },
    /// The new standby of a route cannot be reached.
    StandbyUnreachable {
        /// The job.
        namespace: Namespace,
        /// The route.
        route: RouteId,
        /// The position of the standby in the job.
        standby: u16,
        /// Which hub, and why not.
        reason: String,
    },
    /// All workers of a job have left another of its hubs.
    Finish {
        /// The job.
        namespace: Namespace,
    },
    /// The process that takes a rank joins.
    JoinRank {
        /// The job.
        namespace: Namespace,
        /// The rank.
        rank: u32,
        /// The epoch since which the process has the rank.
        epoch: u64,
        /// The first step to which it contributes; `None` if it begins like the first ones.
        step: Option<u32>,
    },
    /// The manager orders a probe.
    Probe(ProbeOrder),
    /// A probe has ended.
    Probed(ProbeReport),
    /// The manager ends a job.
    Stop {
        /// The job.
        namespace: Namespace,
        /// The reason.
        reason: String,
        /// What the end waits for.
        when: StopWhen,
    },
    /// A job's checkpoint has been read, or cannot be.
    Loaded {
        /// The job.
        namespace: Namespace,
        /// With what the job begins, or why the checkpoint cannot be read.
        result: Result<Beginning, String>,
    },
    /// A core reports something of a job.
    Core {
        /// The job.
        namespace: Namespace,
        /// What has happened.
        event: CoreEvent,
    },
    /// Interfaces, numbered as in the hub's shape, have gone down for this reason, or are up again.
    Interfaces {
        /// The interfaces.
        numbers: Range<u16>,
        /// Why they do not work.
        down: Option<String>,
    },
    /// The last checkpoint of a job is in memory, or will not be taken.
    LastCheckpointTaken {
        /// The job.
        namespace: Namespace,
    },
    /// The last checkpoint of a job that goes on, and whose workers are about to be ended, is in memory or
    /// will not be taken.
    CheckpointKept {
        /// The job.
        namespace: Namespace,
    },
    /// The hub shuts down.
    ShutDown,
}

/// What a core reports of a job.
#[derive(Clone, Debug)]
pub enum CoreEvent {
    /// A route's chunks are allocated, or do not fit.
    Opened {
        /// The bytes that there was no memory for.
        missing_bytes: Option<u64>,
        /// Whether there is memory for snapshots of the route.
        has_snapshot: bool,
    },
    /// The job cannot go on.
    Faulted {
        /// The route of the stream.
        route: RouteId,
        /// The neighbour at fault.
        culprit: Neighbour,
        /// What has happened.
        message: String,
        /// Where it was caused.
        cause: FaultCause,
    },
    /// The core cannot go on with the job, and no neighbour is at fault.
    CannotGoOn {
        /// Why not.
        reason: String,
    },
    /// The core has panicked and dropped everything of the job. [`CoreEvent::Closed`] follows for each of its routes.
    Panicked {
        /// What has happened.
        reason: String,
    },
    /// Nothing more will arrive by a port of a route or, for a site above, leave.
    Left {
        /// The route.
        route: RouteId,
        /// The port.
        port: u32,
    },
    /// A neighbour has been silent for a while on some stream, or is heard again.
    Silence {
        /// The neighbour.
        neighbour: Neighbour,
        /// How long it has been silent; `None` if it is heard again.
        seconds: Option<f64>,
    },
    /// The new standby of a route has all chunks.
    Copied {
        /// The route.
        route: RouteId,
    },
    /// The chunks of a core expect the process that takes a rank.
    RankExpected {
        /// The rank.
        rank: u32,
        /// The epoch since which the process has the rank.
        epoch: u64,
        /// The first step to which the process may contribute at these chunks. In a job that goes back, the newest step to
        /// which they can. `None` if one of them has no parameters yet.
        step: Option<u32>,
    },
    /// The process that takes a rank has its step at all chunks of a core.
    RankJoined {
        /// The rank.
        rank: u32,
        /// The epoch since which the process has the rank.
        epoch: u64,
    },
    /// A neighbour's stream that was cut goes on over this interface.
    Moved {
        /// The route of the stream.
        route: RouteId,
        /// The neighbour.
        neighbour: Neighbour,
        /// The interface.
        by: u16,
    },
    /// Steps end without a rank or a site.
    Late(LateNeighbour),
    /// A rank or a site keeps the others waiting at a route, or no longer does.
    Awaited {
        /// The route.
        route: RouteId,
        /// What there is to report.
        event: OverdueEvent,
    },
    /// A route is freed and its streams are closed.
    Closed {
        /// What the route has counted.
        counters: JobCounters,
        /// For each rank, how many updates left it out.
        left_out: Vec<u64>,
    },
}

/// Where a fault was caused, as far as its report shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultCause {
    /// The cause, as the connection manager receives it.
    Kind(CauseKind),
    /// The culprit is silent, but it may be this hub that is cut off.
    Silence,
}

/// What to report about ranks and sites that others wait for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OverdueEvent {
    /// Others wait for longer than recent steps explain.
    Late(OverdueNeighbours),
    /// What others waited for has come.
    Over {
        /// How long they have waited.
        waited: Duration,
    },
}

/// A wait at a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverdueNeighbours {
    /// The ranks and sites that others wait for, in order.
    pub neighbours: Vec<Neighbour>,
    /// What others wait for.
    pub awaited: Awaited,
    /// The key for which others have waited longest.
    pub key: String,
    /// How long others have waited.
    pub waited: Duration,
    /// Whether the wait has reached the job's limit.
    pub has_expired: bool,
}

/// A report about a rank, or a site with all its ranks, that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LateNeighbour {
    /// The rank or site.
    pub neighbour: Neighbour,
    /// Steps that left it out, on average over the chunks of a core.
    pub steps: u64,
    /// All steps, on average over the chunks of a core.
    pub of: u64,
}
