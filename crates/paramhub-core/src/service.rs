//! The connection manager's requests and answers, where workers, hubs, manager and command line meet.
//!
//! PHub section 3.1: CreateService, ConnectService and InitService keep their names. All of it is JSON over HTTP;
//! each type says which route carries it.

mod probe;

use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::auth::{Incarnation, Namespace, Nonce, Proof};
use crate::checkpoint::{CheckpointStatus, Every, Resume};
use crate::composition::{Composition, OptimizeAt, Place, Reduction, SiteId};
use crate::consistency::Consistency;
#[cfg(doc)]
use crate::limits::WEIGHT_MAX;
use crate::placement::{HubShape, Imbalance};
use crate::scheme::{Cluster, Roster};
use crate::settings::Settings;
use crate::stragglers::Stragglers;

pub use probe::{LinkStatus, ProbeLinks, ProbeOrder, ProbeOutcome, ProbeReport};

/// The port a connection manager listens on unless told otherwise.
pub const MANAGER_PORT: u16 = 7770;
/// The port a hub's interfaces listen on unless told otherwise.
pub const HUB_PORT: u16 = 7771;

/// `POST /v1/jobs`: CreateService. Needs the admin token unless the manager listens on loopback only.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateService {
    /// Unique among the jobs that have not ended: 1 to 128 bytes of letters, digits, `.`, `_`, `-` and `/`.
    pub name: String,
    /// Ranks 0 to `workers - 1` make up the job.
    pub workers: u32,
    /// Waits and lifetimes.
    #[serde(default)]
    pub options: JobOptions,
}

/// Waits and lifetimes of one job, in seconds, and what it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct JobOptions {
    /// How long ConnectService and InitService wait for the other ranks; the error lists those missing.
    pub rendezvous_timeout_s: f64,
    /// How long a job may stay without any sign of its workers before it is ended and its memory freed.
    pub lease_s: f64,
    /// How long a worker may be silent on its streams before the job is failed; at least 1.
    pub dead_after_s: f64,
    /// How sums become those of all workers where hubs serve racks or hosts.
    pub reduction: Reduction,
    /// Where the optimizer runs if there are several sites.
    pub optimize_at: OptimizeAt,
    /// What the job gets of a hub core's time against others with work there, whose weights are 1 unless they say so too;
    /// at most [`WEIGHT_MAX`]. Who creates jobs says it, not who works in them.
    #[serde(skip_serializing_if = "is_one")]
    pub weight: u32,
    /// ConnectService waits until so many hubs have joined, at most 1,024; every hub that has joined by then serves the
    /// job. `None` waits for the first hub only; with 0 the ranks only meet, and no hub serves them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hubs: Option<u32>,
    /// What becomes of the job when a network interface that its streams go through goes down.
    #[serde(skip_serializing_if = "is_default")]
    pub on_interface_down: OnInterfaceDown,
    /// What becomes of workers that come late to a step: `wait`, `drop:FRACTION` or `backup:N`. Other than `wait` for
    /// synchronous jobs at one site with an optimizer; [`Settings::may_leave_out`] says which.
    #[serde(skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, example = "backup:1"))]
    pub stragglers: Stragglers,
    /// Ends the job when its ranks have waited so long for one of them, with that rank's name; `None` only says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress_timeout_s: Option<f64>,
    /// How often the job's hubs write a checkpoint; `None` writes none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub checkpoint_every: Option<Every>,
    /// The checkpoint that parameters, optimizer state, step and hyperparameters come from; `None` begins with rank 0's.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub resume: Option<Resume>,
}

impl JobOptions {
    /// Whether streams are to go on over other interfaces.
    pub fn continues(&self) -> bool {
        self.on_interface_down == OnInterfaceDown::Continue
    }

    /// Whether a job of such settings has parameters that stay as they are until every worker has contributed to the next step.
    pub fn stands_still(&self, settings: &Settings) -> bool {
        settings.consistency == Consistency::Synchronous && !self.stragglers.leaves_out()
    }

    /// The steps, by their divisor, whose gradients do not make up for what quantised ones before them have lost. Of these
    /// residuals each worker has its own and no checkpoint any: where a job is to be reproducible, whoever goes on from a checkpoint
    /// and whoever had none to go on from must be alike behind it.
    pub fn residuals_begin_every(&self, settings: &Settings) -> Option<NonZeroU32> {
        match self.checkpoint_every {
            Some(Every::Steps(steps)) if settings.reproducible => Some(steps),
            _ => None,
        }
    }
}

/// What becomes of a job when an interface goes down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum OnInterfaceDown {
    /// It fails, with the interface's name.
    #[default]
    Fail,
    /// Its streams go on over the interfaces that are left, as long as there are some. Of synchronous jobs at one site whose
    /// steps have one phase; [`Settings::may_resume`] says so.
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

/// Left out where nothing else is said, so that older hubs and managers understand it.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// As every job weighs unless it says otherwise; left out, so that older hubs understand it.
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
    /// Names the job from now on.
    pub namespace: Namespace,
    /// The job's secret, shown once more only to launchers, until every rank has joined; share it with the job's workers only.
    pub nonce: Nonce,
}

/// `POST /v1/jobs/{namespace}/connect`: ConnectService. Returns when every rank has called it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ConnectService {
    /// The caller's rank.
    pub rank: u32,
    /// Tells a retry of the same process from a second process with the same rank.
    pub incarnation: Incarnation,
    /// [`Purpose::Connect`](crate::auth::Purpose::Connect) over namespace, rank and incarnation.
    pub proof: Proof,
    /// Host name of the worker, for messages.
    #[serde(default)]
    pub host: String,
    /// Process id of the worker, for messages.
    #[serde(default)]
    pub process: u32,
    /// Where it is.
    #[serde(default)]
    pub place: Place,
    /// Where it listens for the job's other workers, if it does.
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
    /// The hubs at which the caller exchanges, with their interfaces and cores: those of its site.
    pub hubs: Vec<HubShape>,
    /// The job's waits and lifetimes.
    pub options: JobOptions,
    /// Where each rank listens for the others, in rank order; none of one that does not.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<Option<String>>))]
    pub peer_addresses: Vec<Option<SocketAddr>>,
}

/// `POST /v1/jobs/{namespace}/init`: InitService. Returns when every rank has called it with the same settings and
/// every hub has allocated its buffers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct InitService {
    /// The caller's rank.
    pub rank: u32,
    /// As given to [`ConnectService`].
    pub incarnation: Incarnation,
    /// [`Purpose::Init`](crate::auth::Purpose::Init) over namespace, rank and incarnation.
    pub proof: Proof,
    /// What this rank wants; every rank must want the same.
    pub settings: Settings,
}

/// Answer to [`InitService`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ServiceInitialised {
    /// Digest of the placement the hubs of the caller's site computed; the worker's own must equal it.
    pub placement_hash: String,
    /// How uneven the placement is at each level.
    pub imbalance: Imbalance,
    /// Who takes part: with the settings it makes the job's [information book](crate::scheme::Book).
    pub roster: Roster,
    /// The step that the parameters are of, where the hubs have them from a checkpoint: rank 0 sends none then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed_step: Option<u32>,
}

/// `POST /v1/jobs/{namespace}/leave`: a worker that reached no hub gives up its rank, or says that its work is done.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct LeaveService {
    /// The caller's rank.
    pub rank: u32,
    /// As given to [`ConnectService`].
    pub incarnation: Incarnation,
    /// [`Purpose::Leave`](crate::auth::Purpose::Leave) over namespace, rank and incarnation.
    pub proof: Proof,
    /// Why, for the others.
    #[serde(default)]
    pub reason: String,
    /// Its work is done without a hub. When every rank has said so, the job has finished.
    #[serde(default, skip_serializing_if = "is_default")]
    pub finished: bool,
}

/// Where a job stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Created; not every rank has connected.
    Connecting,
    /// Every rank has connected; not every rank has handed in its settings, or a hub still allocates.
    Initialising,
    /// Buffers stand; workers exchange.
    Running,
    /// Every worker has left.
    Finished,
    /// Ended by an error, by its lease, or by an operator.
    Failed,
}

impl JobState {
    /// Whether the job holds no resources any more.
    pub const fn has_ended(self) -> bool {
        matches!(self, JobState::Finished | JobState::Failed)
    }
}

/// `GET /v1/jobs` (a list) and `GET /v1/jobs/{name or namespace}`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct JobStatus {
    /// As given to CreateService.
    pub name: String,
    /// The job's namespace.
    pub namespace: Namespace,
    /// Where it stands.
    pub state: JobState,
    /// Why it failed, or the newest warning while it runs; empty where there is none.
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
    /// How sums become those of all workers, and why; empty before the hubs are chosen, or where nobody asked and no hub serves
    /// a rack or a host.
    #[serde(default)]
    pub reduction: String,
    /// What the hubs count for it.
    pub counters: JobCounters,
    /// Of every rank, how many updates of chunks it was left out of because it was late; shorter where the last ranks never
    /// were. Of as many as `counters.updates`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<u64>,
    /// Who keeps the others waiting, for longer than the job's recent steps explain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub awaited: Option<AwaitedRanks>,
    /// Its checkpoints, where it has any to come.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoints: Option<CheckpointStatus>,
    /// Seconds since the Unix epoch.
    pub created_at: u64,
    /// Seconds since the Unix epoch; none while the job lives.
    pub ended_at: Option<u64>,
}

/// Ranks for which others wait.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AwaitedRanks {
    /// Ascending; of a site that is awaited all that exchange there or below.
    pub ranks: Vec<u32>,
    /// The key that has waited longest.
    pub key: String,
    /// What is awaited of it, such as `its contribution to step 7`.
    pub what: String,
    /// How long others have waited.
    pub seconds: f64,
}

/// What hubs count for a job, summed over its cores.
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
    /// Nanoseconds that hub cores spent on it.
    #[serde(default)]
    pub busy_ns: u64,
    /// Streams that went on over another interface.
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

/// What one hub core did with its time since the hub started.
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
    /// Given at registration.
    pub hub: u32,
    /// Interfaces and cores.
    pub shape: HubShape,
    /// Whom it serves.
    #[serde(default)]
    pub place: Place,
    /// Each core's time.
    pub cores: Vec<CoreCounters>,
    /// Seconds since the hub was last heard.
    pub silent_s: f64,
}

/// `POST /v1/hubs`: a hub joins the manager. Needs the admin token unless the manager listens on loopback only.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RegisterHub {
    /// Interfaces and cores the hub offers.
    pub shape: HubShape,
    /// Whom it serves: with a host, the workers there; else with a rack, those of the rack; else everybody.
    #[serde(default)]
    pub place: Place,
    /// What tells the machine it runs on from all others, as a worker's [`Place::host`] does; empty where nobody knows. It says
    /// only whether workers are on the same machine.
    #[serde(default)]
    pub machine: String,
    /// Whether it has a folder for checkpoints; `None` where nobody knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keeps_checkpoints: Option<bool>,
}

/// Answer to [`RegisterHub`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HubRegistered {
    /// Names the hub from now on.
    pub hub: u32,
    /// Bearer token of this hub's later calls.
    pub token: String,
}

/// `POST /v1/hubs/{hub}/poll`: waits for commands. Commands up to `acknowledged` are forgotten, later ones are
/// repeated until they are acknowledged, so that a lost answer loses no command.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct PollCommands {
    /// Sequence number of the last command taken; 0 at first.
    pub acknowledged: u64,
    /// How long to wait when there is nothing; the manager caps it at 10.
    pub wait_s: f64,
}

/// Answer to [`PollCommands`], oldest first; empty when the wait ran out.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Commands {
    /// Numbered from 1 without gaps.
    pub commands: Vec<NumberedCommand>,
}

/// A command with its place in the hub's sequence.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NumberedCommand {
    /// From 1, without gaps.
    pub sequence: u64,
    /// What to do.
    pub command: HubCommand,
}

/// What a manager asks of a hub.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum HubCommand {
    /// Allocate a job's buffers and expect its workers; answered by [`HubEvent::Allocated`] or [`HubEvent::Refused`].
    Allocate(Box<JobPlan>),
    /// All hubs of a job have allocated: open the streams to the sites above.
    Link {
        /// The job.
        namespace: Namespace,
    },
    /// End a job; answered by [`HubEvent::Ended`], and, where its workers are about to end, first by [`HubEvent::Kept`].
    Stop {
        /// The job.
        namespace: Namespace,
        /// Told to its workers.
        reason: String,
        /// What the hub waits for.
        #[serde(default, skip_serializing_if = "is_default")]
        when: StopWhen,
    },
    /// Tell the ranks that exchange there something that another hub has noticed.
    Tell {
        /// The job.
        namespace: Namespace,
        /// The rank it is about, if it is about one.
        rank: Option<u32>,
        /// Who and what.
        message: String,
    },
    /// Find out with another hub what the network between the two carries; answered by [`HubEvent::Probed`].
    Probe(ProbeOrder),
}

/// All a hub must know of a job.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct JobPlan {
    /// For messages.
    pub name: String,
    /// The job.
    pub namespace: Namespace,
    /// Its secret.
    pub nonce: Nonce,
    /// Waits and lifetimes.
    pub options: JobOptions,
    /// Every hub of the job, by site, and every rank.
    pub composition: Composition,
    /// Which site the receiver is at.
    pub site: SiteId,
    /// Which of the site's hubs it is.
    pub hub: u32,
    /// For which the [plan](crate::scheme::Plan) of schemes is made.
    pub cluster: Cluster,
    /// What the ranks agreed on.
    pub settings: Settings,
}

/// `POST /v1/hubs/{hub}/events`: what a hub tells its manager.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct HubReport {
    /// Oldest first.
    pub events: Vec<HubEvent>,
    /// Each core's time, in core order.
    pub cores: Vec<CoreCounters>,
    /// What each living job has counted on this hub.
    pub jobs: Vec<HubJobCounters>,
    /// The checkpoints of jobs that have any to come.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub checkpoints: Vec<HubJobCheckpoints>,
    /// Whether the hub is about to stop.
    #[serde(skip_serializing_if = "is_default")]
    pub presence: Presence,
}

/// Whether a hub is there for jobs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Presence {
    /// It is.
    #[default]
    Here,
    /// It shuts down: no further job is to be given to it.
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
    /// Of the reporting hub's part.
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
    /// Of every rank, how many updates of chunks there it was left out of because it was late; shorter where the last ranks
    /// never were.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<u64>,
}

/// Adds what was counted for every rank; a list ends where there is nothing more to count.
pub fn add_by_rank(sum: &mut Vec<u64>, counted: &[u64]) {
    if sum.len() < counted.len() {
        sum.resize(counted.len(), 0);
    }
    for (sum, counted) in sum.iter_mut().zip(counted) {
        *sum += counted;
    }
}

/// Something happened to a job at a hub.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum HubEvent {
    /// A probe has ended here.
    Probed(ProbeReport),
    /// Buffers stand and streams are accepted.
    Allocated {
        /// The job.
        namespace: Namespace,
        /// Digest of the placement this hub computed.
        placement_hash: String,
        /// The step of the checkpoint that its chunks begin with; none where there is no checkpoint, or no chunk.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        resumed_step: Option<u32>,
    },
    /// The hub cannot serve the job.
    Refused {
        /// The job.
        namespace: Namespace,
        /// What does not fit, and what would.
        reason: String,
    },
    /// Something a person should know while the job goes on, such as a silent rank.
    Noticed {
        /// The job.
        namespace: Namespace,
        /// Who and what.
        message: String,
    },
    /// Ranks keep the others waiting for longer than recent steps explain, or, `None`, do no more.
    Awaited {
        /// The job.
        namespace: Namespace,
        /// Who and what, for people.
        message: String,
        /// Which.
        awaited: Option<AwaitedRanks>,
    },
    /// The last checkpoint of a job whose workers are about to end is in memory, or will not be.
    Kept {
        /// The job.
        namespace: Namespace,
    },
    /// The job is over here and its memory freed.
    Ended(JobEnd),
}

/// How a job has ended at a hub.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct JobEnd {
    /// The job.
    pub namespace: Namespace,
    /// Whether every worker left of its own accord.
    pub finished: bool,
    /// Why, where it did not.
    pub reason: String,
    /// How the hub knows the reason.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cause: CauseKind,
    /// The rank to which it happened, or that said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// How many seconds ago it happened; the manager may have been out of reach since.
    #[serde(default, skip_serializing_if = "is_default")]
    pub ago_s: f64,
}

impl JobEnd {
    /// Every worker has just left.
    pub fn finished(namespace: Namespace) -> JobEnd {
        JobEnd { finished: true, ..JobEnd::failed(namespace, String::new(), CauseKind::Known) }
    }

    /// It has just failed.
    pub fn failed(namespace: Namespace, reason: String, cause: CauseKind) -> JobEnd {
        JobEnd { namespace, finished: false, reason, cause, rank: None, ago_s: 0.0 }
    }
}

/// How the reporter of a job's end knows its reason. The same end is reported by several, each with what it has seen; of two
/// reasons the lesser kind lies nearer to the root.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum CauseKind {
    /// It is the reporter's own doing, or is proven: a stop that was asked for, a hub that shuts down, an interface that is down,
    /// an offence.
    #[default]
    Known,
    /// The connection manager has lost a hub.
    HubLost,
    /// A hub has lost a rank, or a hub of another site.
    PeerLost,
    /// A rank, or another site, has given up and said why: often because of what had happened elsewhere.
    GaveUp,
    /// The reporter has only heard of it: a launcher finds its workers ended, which may have been told to; a hub is told to end
    /// the job.
    Hearsay,
}

/// What the end of a job waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum StopWhen {
    /// For nothing.
    #[default]
    Now,
    /// For its workers, whose launcher is about to end them: the hubs take a last checkpoint, where the job has any, and the job
    /// goes on. If it ends otherwise than finished, this is why.
    WorkersEnding,
    /// For what its workers have sent: their processes have ended. If every one of them has left, the job finishes.
    WorkersEnded,
}

/// Most characters of a stop's reason.
pub const STOP_REASON_CHARS_MAX: usize = 256;

/// The query of `DELETE /v1/jobs/{job}`: StopService.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StopService {
    /// Why the job is stopped, for its status, its workers and the logs: 1 to [`STOP_REASON_CHARS_MAX`] printable ASCII
    /// characters. Left out, it was an operator who wished so.
    #[serde(default)]
    pub reason: Option<String>,
    /// What the stop waits for; nothing, if it is left out.
    #[serde(default)]
    pub when: StopWhen,
}

/// The query of `GET /v1/jobs/{job}/book`: Query.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AskBook {
    /// Names of properties, separated by commas; the whole book where they are left out.
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
    /// For programs.
    pub code: ErrorCode,
    /// For people: who, what, and what to do.
    pub message: String,
}

/// What went wrong, for programs.
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
    /// Jobs run that it would hurt (409).
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
