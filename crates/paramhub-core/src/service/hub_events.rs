//! What hubs report of their jobs, and the reasons for which jobs end.

use serde::{Deserialize, Serialize};

use super::{AwaitedRanks, ProbeReport, is_default};
use crate::auth::Namespace;

/// Something that happened to a job at a hub.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum HubEvent {
    /// A probe has ended at this hub.
    Probed(ProbeReport),
    /// The buffers are allocated and the hub accepts streams.
    Allocated {
        /// The job.
        namespace: Namespace,
        /// Digest of the placement that this hub computed.
        placement_hash: String,
        /// The step of the checkpoint with which its chunks begin; `None` if there is no checkpoint, or no
        /// chunk.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        resumed_step: Option<u32>,
        /// Bytes of the job's buffers at this hub. A hub of an earlier release does not say it.
        #[serde(default, skip_serializing_if = "is_default")]
        memory_bytes: u64,
        /// Streams of the job to this hub. A hub of an earlier release does not say it.
        #[serde(default, skip_serializing_if = "is_default")]
        streams: u64,
        /// The number of the [further shares](super::FurtherShares) that it has allocated, while it is not known whether it
        /// becomes their standby.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        further: Option<u32>,
    },
    /// The hub cannot serve the job.
    Refused {
        /// The job.
        namespace: Namespace,
        /// The part that does not fit, and what would fit.
        reason: String,
    },
    /// Something that a person should know while the job goes on, such as a silent rank.
    Noticed {
        /// The job.
        namespace: Namespace,
        /// The message: which rank or hub, and what happened.
        message: String,
    },
    /// Ranks keep the others waiting for longer than recent steps explain; with `None` they no longer do.
    Awaited {
        /// The job.
        namespace: Namespace,
        /// The message for people.
        message: String,
        /// The ranks.
        awaited: Option<AwaitedRanks>,
    },
    /// A worker is lost to this hub, in a job that goes on without lost workers. The hub waits for what the manager
    /// decides.
    WorkerLost {
        /// The job.
        namespace: Namespace,
        /// The rank.
        rank: u32,
        /// The epoch since which its process has had the rank. Towards a manager that has restarted also the epoch since
        /// which the rank is lost, as an earlier manager has decided.
        epoch: u64,
        /// What has happened to it, beginning with its name.
        reason: String,
    },
    /// A worker has left this hub, in a job that goes on without lost workers. Until the job ends, another process may take
    /// the rank.
    WorkerLeft {
        /// The job.
        namespace: Namespace,
        /// The rank.
        rank: u32,
        /// The epoch since which its process has had the rank.
        epoch: u64,
    },
    /// The other hub of a share is lost to this one, in a job with standbys, or this hub leaves the job itself because it shuts
    /// down, or a core of it has panicked. The hub waits for what the manager decides.
    HubLost {
        /// The job.
        namespace: Namespace,
        /// The share, by its number.
        share: u16,
        /// The hub that is lost, by its position in the job.
        hub: u16,
        /// The number of the last change of the shares of which this hub has heard; 0 before the first.
        number: u32,
        /// What has happened.
        reason: String,
    },
    /// The new standby of a share has all chunks, as the hub reports that serves the share. From now on the hub waits for what the
    /// manager decides if it loses the standby.
    StandbyReady {
        /// The job.
        namespace: Namespace,
        /// The share, by its number.
        share: u16,
        /// The standby, by its position in the job.
        standby: u16,
    },
    /// The first step to which the process that takes a rank may contribute at this hub. No chunk of this hub goes
    /// beyond that step until the process joins. In a job that goes back, the newest step to which its chunks can.
    RankExpected {
        /// The job.
        namespace: Namespace,
        /// The rank.
        rank: u32,
        /// The epoch since which the process has the rank.
        epoch: u64,
        /// The step; `None` if a chunk has no parameters yet.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        step: Option<u32>,
    },
    /// A process that takes a rank may open its streams to this hub.
    RankJoined {
        /// The job.
        namespace: Namespace,
        /// The rank.
        rank: u32,
        /// The epoch since which the process has the rank.
        epoch: u64,
    },
    /// The last checkpoint of a job whose workers are about to end is in memory, or will not be taken.
    Kept {
        /// The job.
        namespace: Namespace,
    },
    /// The job is over at this hub and its memory is freed.
    Ended(JobEnd),
    /// The hub has reported all jobs that it has, as a manager that restarted has asked.
    AllReported {
        /// The number in the manager's question. A manager that has restarted again takes no answer to its predecessor
        /// for its own, since that one may have taken a part of it.
        question: u32,
    },
}

/// The way in which a job has ended at a hub.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct JobEnd {
    /// The job.
    pub namespace: Namespace,
    /// `true` if every worker left of its own accord.
    pub finished: bool,
    /// The reason, if it did not finish.
    pub reason: String,
    /// The way in which the hub knows the reason.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cause: CauseKind,
    /// The rank to which it happened, or that reported it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The seconds since it happened; the hub may have been unable to reach the manager since.
    #[serde(default, skip_serializing_if = "is_default")]
    pub ago_s: f64,
}

impl JobEnd {
    /// The end of a job whose workers have all just left.
    pub fn finished(namespace: Namespace) -> JobEnd {
        JobEnd { finished: true, ..JobEnd::failed(namespace, String::new(), CauseKind::Known) }
    }

    /// The end of a job that has just failed.
    pub fn failed(namespace: Namespace, reason: String, cause: CauseKind) -> JobEnd {
        JobEnd { namespace, finished: false, reason, cause, rank: None, ago_s: 0.0 }
    }
}

/// The way in which the reporter of a job's end knows the reason. Several parties report the same end, each
/// with what it has seen; the job's reason is the first cause. Causes in this order precede one another:
/// `known` (the default; the reporter caused the end itself, or has proof), `hub_lost` (the manager does
/// not hear a hub), `peer_lost` (a hub has lost a rank or a site), `gave_up` (a rank or a site has said why
/// it gave up), `hearsay` (the reporter was ordered to stop). An end that began too late to have caused
/// another does not precede it, and `peer_lost` does not precede what the same rank said itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum CauseKind {
    /// The reporter caused the end, or the reason is proven: a stop that was asked for, a hub that shuts
    /// down, an interface that is down, a violation.
    #[default]
    Known,
    /// The connection manager has lost a hub.
    HubLost,
    /// A hub has lost a rank, or a hub of another site.
    PeerLost,
    /// A rank, or another site, has given up and said why, often because of something that had happened
    /// elsewhere.
    GaveUp,
    /// The reporter knows of the end only from others: a launcher finds that its workers have ended, perhaps
    /// because of a message; a hub receives the order to end the job.
    Hearsay,
}

/// The event that the end of a job waits for. `now` (the default): nothing. `workers_ending`, from a
/// launcher that is about to end the workers: the hubs take a last checkpoint, if the job writes any, and
/// the job goes on; if it then ends without having finished, this is the reason. `workers_ended`: the
/// processes of the workers have ended; the hubs wait for Leaves that are under way. If every worker has
/// left, the job finishes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum StopWhen {
    /// Nothing.
    #[default]
    Now,
    /// The workers, whose launcher is about to end them: the hubs take a last checkpoint, if the job writes
    /// any, and the job goes on. If it then ends without having finished, this is the reason.
    WorkersEnding,
    /// The messages of the workers: their processes have ended. If every one of them has left, the job
    /// finishes.
    WorkersEnded,
}

/// Adds counts by rank. A list may be shorter than the number of ranks if the rest is 0.
pub fn add_by_rank(sum: &mut Vec<u64>, counted: &[u64]) {
    if sum.len() < counted.len() {
        sum.resize(counted.len(), 0);
    }
    for (sum, counted) in sum.iter_mut().zip(counted) {
        *sum += counted;
    }
}
