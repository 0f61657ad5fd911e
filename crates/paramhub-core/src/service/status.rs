//! The states of jobs and hubs, as users read them.

use serde::{Deserialize, Serialize};

use super::{HubLabel, is_default};
use crate::auth::Namespace;
use crate::checkpoint::CheckpointStatus;
use crate::composition::Place;
use crate::placement::HubShape;

/// The state of a job. `connecting`: not every rank has connected. `initialising`: not every rank has sent its
/// settings, or a hub still allocates. `running`: buffers are allocated; a job without hubs runs as soon as
/// its ranks have met. `finished`: every worker has left. `failed`: an error, the lease or an operator has
/// ended it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// The job is created; not every rank has connected.
    Connecting,
    /// Every rank has connected; not every rank has sent its settings, or a hub still allocates.
    Initialising,
    /// Buffers are allocated; workers exchange.
    Running,
    /// Every worker has left.
    Finished,
    /// The job was ended by an error, by its lease, or by an operator.
    Failed,
}

impl JobState {
    /// Returns whether the job has released its resources.
    pub const fn has_ended(self) -> bool {
        matches!(self, JobState::Finished | JobState::Failed)
    }
}

/// `GET /v1/jobs` (a list) and `GET /v1/jobs/{name or namespace}`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct JobStatus {
    /// The name given to CreateService.
    pub name: String,
    /// The job's namespace.
    pub namespace: Namespace,
    /// The state of the job.
    pub state: JobState,
    /// The reason why it failed, or the newest warning while it runs; empty where there is none.
    pub message: String,
    /// Ranks in the job.
    pub workers: u32,
    /// The number of ranks with which it began, if others may join while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_workers: Option<u32>,
    /// The number of ranks that take part now, in a job whose ranks go back and may then be more or fewer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_workers: Option<u32>,
    /// Ranks that have connected, ascending.
    pub connected: Vec<u32>,
    /// The ranks that are lost, in a job that goes on without them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<u32>,
    /// The job's newest epoch: one begins with each rank that is lost or is another process's.
    #[serde(default, skip_serializing_if = "is_default")]
    pub epoch: u64,
    /// Keys in the table; 0 before InitService.
    pub keys: u64,
    /// Bytes of one worker's gradients; 0 before InitService.
    pub bytes: u64,
    /// The optimizer's name; empty before InitService.
    pub optimizer: String,
    /// The consistency; empty before InitService.
    pub consistency: String,
    /// The options of the job that differ from their defaults, each with its value; empty if none does.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub options: String,
    /// The way in which the sums of sites become those of all workers, and why. Empty before the hubs are
    /// chosen, or if no reduction was asked for and no hub serves a rack or a host.
    #[serde(default)]
    pub reduction: String,
    /// The counters of the hubs for the job.
    pub counters: JobCounters,
    /// For each rank, how many of `counters.updates` left it out because it was late; shorter if the last
    /// ranks were never left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<u64>,
    /// What the job has lost, if it goes on when a worker is lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub losses: Option<LossCounters>,
    /// How many of its shares have a standby, if the job is to have standbys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standbys: Option<StandbyCounts>,
    /// The ranks that keep the others waiting for longer than the job's recent steps explain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub awaited: Option<AwaitedRanks>,
    /// The job's checkpoints, if it writes any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoints: Option<CheckpointStatus>,
    /// The time at which the job was created, in seconds since the Unix epoch.
    pub created_at: u64,
    /// The time at which the job ended, in seconds since the Unix epoch; `None` while it lives.
    pub ended_at: Option<u64>,
}

/// How many shares of a job with [standbys](crate::standbys) have one: if a hub is lost, the job goes on if all do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct StandbyCounts {
    /// The shares that have chunks.
    pub shares: u32,
    /// Those whose standby can take over.
    pub ready: u32,
    /// Those whose standby still receives the chunks.
    pub copying: u32,
}

/// What a job has lost that goes on when a worker is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LossCounters {
    /// Workers that were lost.
    pub workers_lost: u64,
    /// Processes that have taken the rank of a lost worker.
    pub workers_joined: u64,
    /// Seconds during which at least one rank was lost.
    pub incomplete_seconds: f64,
}

/// Ranks for which others wait.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AwaitedRanks {
    /// The ranks, ascending; for a site, all ranks that exchange there or below.
    pub ranks: Vec<u32>,
    /// The key for which others have waited longest.
    pub key: String,
    /// The event that they wait for, such as `its contribution to step 7`.
    pub what: String,
    /// The time that others have waited.
    pub seconds: f64,
}

/// The counters of hubs for a job, summed over their cores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct JobCounters {
    /// Bytes of model, merge, optimizer and staging buffers.
    pub memory_bytes: u64,
    /// Payload and header bytes received.
    pub bytes_received: u64,
    /// Payload and header bytes sent.
    pub bytes_sent: u64,
    /// Contributions summed.
    pub contributions: u64,
    /// Chunks optimised.
    pub updates: u64,
    /// Nanoseconds that hub cores spent on the job.
    #[serde(default)]
    pub busy_ns: u64,
    /// Streams that were cut and opened again, over the same interface or another.
    #[serde(default)]
    pub streams_moved: u64,
    /// The steps made: the newest version of a chunk.
    #[serde(default)]
    pub steps: u64,
}

impl std::ops::AddAssign for JobCounters {
    fn add_assign(&mut self, other: Self) {
        self.memory_bytes += other.memory_bytes;
        self.bytes_received += other.bytes_received;
        self.bytes_sent += other.bytes_sent;
        self.contributions += other.contributions;
        self.updates += other.updates;
        self.busy_ns += other.busy_ns;
        self.streams_moved += other.streams_moved;
        // Those of all hubs are the same ones.
        self.steps = self.steps.max(other.steps);
    }
}

/// The way in which a hub core has used its time since the hub started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CoreCounters {
    /// Nanoseconds spent on frames.
    pub busy_ns: u64,
    /// Nanoseconds spent waiting for frames.
    pub idle_ns: u64,
}

/// `GET /v1/hubs`: one entry a hub.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HubStatus {
    /// The hub's number, given at registration.
    pub hub: u32,
    /// Interfaces and cores.
    pub shape: HubShape,
    /// The workers that the hub serves.
    #[serde(default)]
    pub place: Place,
    /// Each core's time.
    pub cores: Vec<CoreCounters>,
    /// Seconds since the manager last heard from the hub.
    pub silent_s: f64,
    /// `true` if that is longer than `--hub-dead-after`: the hub gets no new jobs, and its running jobs go on.
    #[serde(default)]
    pub unheard: bool,
    /// `true` if an operator drains the hub: it gets no new jobs, and those that can go on elsewhere leave it.
    #[serde(default)]
    pub drained: bool,
    /// The labels by which jobs choose the hub.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<HubLabel>,
    /// The number of jobs that have a part there.
    #[serde(default)]
    pub jobs: u32,
}

/// `GET /v1/hubs/{hub}/drain`, and the answer to [`DrainHub`](super::DrainHub): the jobs that have yet to leave a hub.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DrainStatus {
    /// The hub's number.
    pub hub: u32,
    /// The hub's number and first address, for people.
    pub name: String,
    /// Whether the hub is drained.
    pub drained: bool,
    /// The jobs that have a part there, oldest first.
    pub jobs: Vec<JobAtHub>,
}

/// `GET /v1/jobs/{job}/move`, and the answer to [`MoveJob`](super::MoveJob): how far the newest move of a job is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MoveStatus {
    /// The hub that the job leaves.
    pub from: u32,
    /// The hub that is to have what it leaves behind; absent if that may be any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<u32>,
    /// Whether it has left.
    pub has_left: bool,
    /// Whether `to` has all chunks of what the job leaves behind.
    pub has_arrived: bool,
    /// What it waits for until it leaves; empty once it has. A part of a sentence that begins with `it`.
    pub why: String,
    /// How many of its shares have a standby; absent once it has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standbys: Option<StandbyCounts>,
}

/// A job that has a part at a hub.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct JobAtHub {
    /// The job's name.
    pub name: String,
    /// The job's namespace.
    pub namespace: Namespace,
    /// What it waits for until it leaves the hub, or why it stays until it ends. A part of a sentence that begins with `it`.
    pub why: String,
}
