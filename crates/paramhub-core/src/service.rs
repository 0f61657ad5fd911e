//! The requests and answers of the connection manager, which workers, hubs, manager and command line share.
//!
//! CreateService, ConnectService and InitService keep their names from PHub section 3.1. All of it is JSON
//! over HTTP; each type names the route that carries it.

mod probe;

use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::auth::{Incarnation, Namespace, Nonce, Proof};
use crate::checkpoint::{CheckpointStatus, Every, Resume};
use crate::composition::{Composition, OptimizeAt, Place, Reduction, SiteId};
#[cfg(doc)]
use crate::limits::WEIGHT_MAX;
use crate::placement::{HubShape, Imbalance};
use crate::scheme::{Cluster, Roster};
use crate::settings::Settings;
use crate::stragglers::Stragglers;

pub use probe::{LinkStatus, ProbeLinks, ProbeOrder, ProbeOutcome, ProbeReport};

/// The default port of a connection manager.
pub const MANAGER_PORT: u16 = 7770;
/// The default port of a hub's interfaces.
pub const HUB_PORT: u16 = 7771;

/// `POST /v1/jobs`: CreateService.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateService {
    /// Unique among the jobs that have not ended: 1 to 128 letters, digits, `.`, `_`, `-` and `/`.
    pub name: String,
    /// Number of workers, 1 to 1,024: ranks 0 to `workers - 1` make up the job.
    pub workers: u32,
    /// Waits, lifetimes and policies.
    #[serde(default)]
    pub options: JobOptions,
}

/// Waits and lifetimes of one job, in seconds, and its policies. A hub that does not know an option refuses
/// the job.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct JobOptions {
    /// The time that ConnectService, InitService and the opening of all streams may each take, 0.1 to 86,400;
    /// the error lists the missing ranks or hubs.
    pub rendezvous_timeout_s: f64,
    /// Ends a job that does not run yet, when no worker has called for so long and no call waits; 0.1 to
    /// 604,800. It never ends a job that runs at hubs.
    pub lease_s: f64,
    /// The time that a worker may be silent on its streams before the job fails; 1 to 86,400, and at least 15
    /// with `on_interface_down` `continue`.
    pub dead_after_s: f64,
    /// The way in which the sums of sites become those of all workers, if hubs serve racks or hosts.
    pub reduction: Reduction,
    /// The place where the optimizer runs if there are several sites.
    pub optimize_at: OptimizeAt,
    /// The job's share of a hub core's time, relative to the other jobs with work there; 1 to 100.
    /// The creator of the job sets it, not its workers.
    #[serde(skip_serializing_if = "is_one")]
    pub weight: u32,
    /// The number of hubs, at most 1,024, for which ConnectService waits; hubs of single hosts do not count.
    /// Every hub that has joined by then serves the job. `None` waits for the first hub only. With 0 the
    /// ranks only meet, no hub serves them, and options that only a hub can follow are refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hubs: Option<u32>,
    /// The reaction of the job when a network interface that its streams use goes down.
    #[serde(skip_serializing_if = "is_default")]
    pub on_interface_down: OnInterfaceDown,
    /// The treatment of workers that are late in a step: `wait`, `drop:FRACTION` or `backup:N`. All but
    /// `wait` are for synchronous jobs at one site with an optimizer; see
    /// [`combinations`](crate::combinations).
    #[serde(skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, example = "backup:1"))]
    pub stragglers: Stragglers,
    /// The time that the ranks may wait for one of them before the job ends with that rank's name, 1 to
    /// 604,800; with `None` the wait is only reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress_timeout_s: Option<f64>,
    /// The interval at which the job's hubs write a checkpoint: `1000` (steps) or `30s`; `None` writes none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub checkpoint_every: Option<Every>,
    /// The checkpoint from which parameters, optimizer state, step and hyperparameters come: `latest`, or a
    /// number of steps as text; with `None` the job begins with rank 0's.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub resume: Option<Resume>,
}

impl JobOptions {
    /// Returns whether streams continue over other interfaces.
    pub fn continues(&self) -> bool {
        self.on_interface_down == OnInterfaceDown::Continue
    }

    /// The divisor of the steps in which gradients do not include the residuals of quantised gradients before
    /// them. Residuals are each worker's own and in no checkpoint. In a reproducible job, a run that goes on
    /// from a checkpoint and a run that was never interrupted must be equal after the checkpoint.
    pub fn residuals_begin_every(&self, settings: &Settings) -> Option<NonZeroU32> {
        match self.checkpoint_every {
            Some(Every::Steps(steps)) if settings.reproducible => Some(steps),
            _ => None,
        }
    }
}

/// The reaction of a job when an interface goes down. `fail`: the job fails, with the interface's name.
/// `continue`: its streams continue over the remaining interfaces; only for synchronous jobs at one site
/// whose steps have one phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum OnInterfaceDown {
    /// The job fails, with the interface's name.
    #[default]
    Fail,
    /// Its streams continue over the remaining interfaces, as long as there are any. Only for synchronous
    /// jobs at one site whose steps have one phase; see [`combinations`](crate::combinations).
    Continue,
}

impl fmt::Display for OnInterfaceDown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OnInterfaceDown::Fail => "fail",
            OnInterfaceDown::Continue => "continue",
        })
    }
}

impl FromStr for OnInterfaceDown {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "fail" => Ok(OnInterfaceDown::Fail),
            "continue" => Ok(OnInterfaceDown::Continue),
            _ => Err(format!("`{text}` is not what can be done about it: expected fail or continue")),
        }
    }
}

/// Returns whether a field has its default. It is then left out, so that older hubs and managers understand
/// the text.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Returns whether a job has the default weight, which is left out so that older hubs understand the text.
fn is_one(weight: &u32) -> bool {
    *weight == 1
}

impl Default for JobOptions {
    fn default() -> Self {
        JobOptions {
            rendezvous_timeout_s: 60.0,
            lease_s: 120.0,
            dead_after_s: 30.0,
            hubs: None,
            on_interface_down: OnInterfaceDown::default(),
            stragglers: Stragglers::default(),
            progress_timeout_s: None,
            checkpoint_every: None,
            resume: None,
            weight: 1,
            reduction: Reduction::default(),
            optimize_at: OptimizeAt::default(),
        }
    }
}

/// Answer to [`CreateService`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ServiceCreated {
    /// The name of the job from now on.
    pub namespace: Namespace,
    /// The job's secret. Until every rank has joined, launchers can ask for it again; no other answer shows
    /// it. Share it with the job's workers only.
    pub nonce: Nonce,
}

/// `POST /v1/jobs/{namespace}/connect`: ConnectService.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ConnectService {
    /// The caller's rank.
    pub rank: u32,
    /// Distinguishes a retry of the same process from a second process with the same rank.
    pub incarnation: Incarnation,
    /// The proof for [this call](crate::auth::Purpose::Connect), over namespace, rank and incarnation.
    pub proof: Proof,
    /// Host name of the worker, for messages.
    #[serde(default)]
    pub host: String,
    /// Process id of the worker, for messages.
    #[serde(default)]
    pub process: u32,
    /// The host and rack of the worker.
    #[serde(default)]
    pub place: Place,
    /// The address at which it listens for the job's other workers, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub peer_address: Option<SocketAddr>,
}

/// Answer to [`ConnectService`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ServiceConnected {
    /// The job's name.
    pub name: String,
    /// Ranks in the job.
    pub workers: u32,
    /// The hubs of the caller's site, at which it exchanges, with their interfaces and cores.
    pub hubs: Vec<HubShape>,
    /// The job's waits and lifetimes.
    pub options: JobOptions,
    /// The address at which each rank listens for the others, in rank order; `None` for a rank that does not.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<Option<String>>))]
    pub peer_addresses: Vec<Option<SocketAddr>>,
}

/// `POST /v1/jobs/{namespace}/init`: InitService. In the body `rank`, `incarnation` and `proof` must precede
/// `settings`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct InitService {
    /// The caller's rank.
    pub rank: u32,
    /// The incarnation given to [`ConnectService`].
    pub incarnation: Incarnation,
    /// The proof for [this call](crate::auth::Purpose::Init), over namespace, rank and incarnation.
    pub proof: Proof,
    /// The settings of this rank; those of all ranks must be equal.
    pub settings: Settings,
}

/// Answer to [`InitService`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ServiceInitialised {
    /// Digest of the placement that the hubs of the caller's site computed; the worker's own must equal it.
    pub placement_hash: String,
    /// The imbalance of the placement at each level.
    pub imbalance: Imbalance,
    /// The workers and hubs that take part: with the settings they make the job's [information
    /// book](crate::scheme::Book).
    pub roster: Roster,
    /// The step of the checkpoint from which the hubs have the parameters, if they have. Rank 0 then sends
    /// neither Initialise nor InitialiseState, and all ranks pull.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed_step: Option<u32>,
}

/// `POST /v1/jobs/{namespace}/leave`: LeaveService.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct LeaveService {
    /// The caller's rank.
    pub rank: u32,
    /// The incarnation given to [`ConnectService`].
    pub incarnation: Incarnation,
    /// The proof for [this call](crate::auth::Purpose::Leave), over namespace, rank and incarnation.
    pub proof: Proof,
    /// The reason, for the other ranks.
    #[serde(default)]
    pub reason: String,
    /// `true` if its work is done without a hub. When every rank has reported so, the job has finished. If
    /// some ranks do so and others call InitService, the job fails.
    #[serde(default, skip_serializing_if = "is_default")]
    pub finished: bool,
}

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
    /// Ranks that have connected, ascending.
    pub connected: Vec<u32>,
    /// Keys in the table; 0 before InitService.
    pub keys: u64,
    /// Bytes of one worker's gradients; 0 before InitService.
    pub bytes: u64,
    /// The optimizer's name; empty before InitService.
    pub optimizer: String,
    /// The consistency; empty before InitService.
    pub consistency: String,
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
    /// Streams that continued over another interface.
    #[serde(default)]
    pub streams_moved: u64,
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
}

/// `POST /v1/hubs`: a hub joins the manager.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RegisterHub {
    /// Interfaces and cores that the hub offers.
    pub shape: HubShape,
    /// The workers that the hub serves: with a host those on that host, otherwise with a rack those of that
    /// rack, otherwise all.
    #[serde(default)]
    pub place: Place,
    /// The id that distinguishes the hub's machine from all others, as a worker's [`Place::host`] does; empty
    /// if unknown. It serves only to find workers on the same machine.
    #[serde(default)]
    pub machine: String,
    /// `true` if the hub has a folder for checkpoints; `None` if unknown. Where all hubs that have joined say
    /// that they have none, CreateService refuses a job with `checkpoint_every` or `resume`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keeps_checkpoints: Option<bool>,
}

/// Answer to [`RegisterHub`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HubRegistered {
    /// The hub's number from now on.
    pub hub: u32,
    /// Bearer token of the hub's later calls.
    pub token: String,
}

/// `POST /v1/hubs/{hub}/poll`: waits for commands. The manager forgets commands up to `acknowledged` and
/// repeats later ones until they are acknowledged, so a lost answer loses no command.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct PollCommands {
    /// Sequence number of the last command that the hub has taken; 0 at first.
    pub acknowledged: u64,
    /// Seconds to wait if there is no command; the manager caps it at 10, and at a third of the time after
    /// which it counts a silent hub as lost.
    pub wait_s: f64,
}

/// Answer to [`PollCommands`], oldest first; empty when the wait ran out.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Commands {
    /// The commands, numbered from 1 without gaps.
    pub commands: Vec<NumberedCommand>,
}

/// A command with its position in the hub's sequence.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NumberedCommand {
    /// The command's number: from 1, without gaps.
    pub sequence: u64,
    /// The command itself.
    pub command: HubCommand,
}

/// A command of the manager to a hub.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum HubCommand {
    /// Allocate a job's buffers and expect its workers. The hub answers with [`HubEvent::Allocated`] or
    /// [`HubEvent::Refused`].
    Allocate(Box<JobPlan>),
    /// Open the streams to the sites above: all hubs of the job have allocated. Only in jobs of several
    /// sites.
    Link {
        /// The job.
        namespace: Namespace,
    },
    /// End a job. The hub answers with [`HubEvent::Ended`], and first with [`HubEvent::Kept`] if its workers
    /// are about to end. A job whose ranks have all left has finished, whatever stop comes after that.
    Stop {
        /// The job.
        namespace: Namespace,
        /// The reason, which the hub sends to the job's workers.
        reason: String,
        /// The event that the hub waits for.
        #[serde(default, skip_serializing_if = "is_default")]
        when: StopWhen,
    },
    /// Send the ranks that exchange here a notice of something that another hub has noticed.
    Tell {
        /// The job.
        namespace: Namespace,
        /// The rank that the notice is about, if any.
        rank: Option<u32>,
        /// The text of the notice.
        message: String,
    },
    /// Measure with another hub what the network between the two carries. The hub answers with
    /// [`HubEvent::Probed`] within a second.
    Probe(ProbeOrder),
}

/// All that a hub must know of a job.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct JobPlan {
    /// The job's name, for messages.
    pub name: String,
    /// The job.
    pub namespace: Namespace,
    /// The job's secret.
    pub nonce: Nonce,
    /// Waits and lifetimes.
    pub options: JobOptions,
    /// Every rank and every hub of the job, by site.
    pub composition: Composition,
    /// The receiver's site.
    pub site: SiteId,
    /// The receiver's position among the hubs of its site.
    pub hub: u32,
    /// The cluster for which the [plan](crate::scheme::Plan) of schemes is made.
    pub cluster: Cluster,
    /// The settings on which the ranks agreed.
    pub settings: Settings,
}

/// `POST /v1/hubs/{hub}/events`: what a hub reports to its manager. The manager takes the counters before the
/// events, so the report with a job's [`HubEvent::Ended`] carries the job's last counters.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct HubReport {
    /// The events, oldest first.
    pub events: Vec<HubEvent>,
    /// Each core's time, in core order.
    pub cores: Vec<CoreCounters>,
    /// The counters of each living job on this hub. A hub that has joined again names here the jobs that it
    /// still serves.
    pub jobs: Vec<HubJobCounters>,
    /// The checkpoints of jobs that write any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub checkpoints: Vec<HubJobCheckpoints>,
    /// The availability of the hub, which may be about to stop.
    #[serde(skip_serializing_if = "is_default")]
    pub presence: Presence,
}

/// The availability of a hub for jobs. `here`: it is. `leaving`: it shuts down, and the manager must not
/// give it further jobs. `gone`: it has shut down, and this is its last report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Presence {
    /// The hub is available.
    #[default]
    Here,
    /// The hub shuts down: the manager must not give it further jobs.
    Leaving,
    /// It has shut down, and this is its last report.
    Gone,
}

/// One job's checkpoints on one hub.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HubJobCheckpoints {
    /// The job.
    pub namespace: Namespace,
    /// The status of the reporting hub's part.
    pub status: CheckpointStatus,
}

/// One job's counters on one hub.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HubJobCounters {
    /// The job.
    pub namespace: Namespace,
    /// Its counters on the reporting hub.
    pub counters: JobCounters,
    /// For each rank, how many updates of chunks on this hub left it out because it was late; shorter if the
    /// last ranks were never left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<u64>,
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
    /// The last checkpoint of a job whose workers are about to end is in memory, or will not be taken.
    Kept {
        /// The job.
        namespace: Namespace,
    },
    /// The job is over at this hub and its memory is freed.
    Ended(JobEnd),
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

/// The largest number of characters in a stop's reason.
pub const STOP_REASON_CHARS_MAX: usize = 256;

/// The query of `DELETE /v1/jobs/{job}`: StopService.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StopService {
    /// The reason why the job is stopped, for its status, its workers and the logs: 1 to
    /// [`STOP_REASON_CHARS_MAX`] printable ASCII characters. Without it the reason is the operator's wish.
    #[serde(default)]
    pub reason: Option<String>,
    /// The event that the stop waits for; nothing by default.
    #[serde(default)]
    pub when: StopWhen,
}

/// The query of `GET /v1/jobs/{job}/book`: Query.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AskInformationBook {
    /// Names of properties, separated by commas; the whole book if left out.
    #[serde(default)]
    pub properties: Option<String>,
}

/// The query of `GET /v1/jobs/{job}/best-scheme`: BestScheme.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AskBestScheme {
    /// The layer's name.
    pub layer: String,
}

/// The body of every answer that is not a success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ServiceError {
    /// The code, for programs.
    pub code: ErrorCode,
    /// The text for people: which rank or hub, what happened, and what to do.
    pub message: String,
}

/// The kind of error, for programs.
///
/// - `bad_request` (400, also 408, 413, 415, 421): the request is malformed or out of bounds; its body is too
///   slow, too long or not declared as JSON; its `Host` is no name of loopback, and the manager has no token.
/// - `unauthorized` (401): the admin token or hub token is missing or wrong.
/// - `wrong_nonce` (403): no job of this namespace has the nonce that the proof was made with.
/// - `not_found` (404, also 405): no such job, hub or route, or the route does not take the method.
/// - `missing` (408): ranks or hubs, which the message names, did not arrive in time.
/// - `name_taken` (409): the name belongs to a job that has not ended.
/// - `rank_taken` (409): the rank belongs to another process.
/// - `disagreement` (409): the ranks want different things.
/// - `busy` (409): the request would harm jobs that run.
/// - `job_ended` (410): the job has ended.
/// - `does_not_fit` (507): a hub cannot hold the job, or the manager has too many jobs or hubs.
/// - `internal` (500, also 503): the manager itself failed or is shutting down. With 503 it had no place for
///   the call and has done nothing: try again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The request is malformed or out of bounds (400).
    BadRequest,
    /// The admin token or hub token is missing or wrong (401).
    Unauthorized,
    /// The proof does not match the job's nonce (403).
    WrongNonce,
    /// No such job, hub or route (404).
    NotFound,
    /// The job's name belongs to a living job (409).
    NameTaken,
    /// The rank belongs to another process (409).
    RankTaken,
    /// The ranks disagree on their settings (409).
    Disagreement,
    /// The request would harm jobs that run (409).
    Busy,
    /// Ranks or hubs did not arrive in time (408).
    Missing,
    /// The job has ended (410).
    JobEnded,
    /// A hub cannot hold the job (507).
    DoesNotFit,
    /// The manager itself failed, for example to write its store (500).
    Internal,
}

impl ErrorCode {
    /// The HTTP status that carries this code.
    pub const fn status(self) -> u16 {
        match self {
            ErrorCode::BadRequest => 400,
            ErrorCode::Unauthorized => 401,
            ErrorCode::WrongNonce => 403,
            ErrorCode::NotFound => 404,
            ErrorCode::NameTaken | ErrorCode::RankTaken | ErrorCode::Disagreement | ErrorCode::Busy => 409,
            ErrorCode::Missing => 408,
            ErrorCode::JobEnded => 410,
            ErrorCode::DoesNotFit => 507,
            ErrorCode::Internal => 500,
        }
    }
}

impl std::fmt::Display for ServiceError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ServiceError {}

/// Shorthand for a [`ServiceError`].
pub fn refusal(code: ErrorCode, message: impl Into<String>) -> ServiceError {
    ServiceError { code, message: message.into() }
}
