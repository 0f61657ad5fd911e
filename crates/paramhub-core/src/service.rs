//! The requests and answers of the connection manager, which workers, hubs, manager and command line share.
//!
//! CreateService, ConnectService and InitService keep their names from PHub section 3.1. All of it is JSON
//! over HTTP; each type names the route that carries it.

mod authority;
mod error;
mod hub;
mod hub_events;
mod label;
mod options;
mod probe;
mod status;
mod teams;
mod tokens;

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::auth::{Fingerprint, Incarnation, JobSecret, Namespace, Nonce, Proof, RankClaim, StreamSecret};
use crate::composition::Place;
use crate::placement::{HubShape, Imbalance};
use crate::scheme::Roster;
use crate::settings::Settings;
use crate::standbys::Share;

pub use authority::{AuthorityStatus, ReplaceAuthority};
pub use error::{ErrorCode, ServiceError, refusal};
pub use hub::{
    Commands, DrainHub, FurtherShares, HubCommand, HubJobCheckpoints, HubJobCounters, HubRegistered,
    HubReport, JobPlan,
};
pub use hub::{NumberedCommand, PollCommands, Presence, RegisterHub};
pub use hub_events::{CauseKind, HubEvent, JobEnd, StopWhen, add_by_rank};
pub use label::{HubLabel, InvalidLabel, LABELS_MAX};
pub use options::{JobOptions, OnInterfaceDown, OnWorkerLoss};
pub use probe::{LinkStatus, ProbeLinks, ProbeOrder, ProbeOutcome, ProbeReport};
pub use status::{
    AwaitedRanks, CoreCounters, DrainStatus, HubStatus, JobAtHub, JobCounters, JobState, JobStatus,
    LossCounters, MoveStatus, StandbyCounts,
};
pub use teams::{Allowance, TeamAllowance, TeamQuotas, TeamStatus};
pub use tokens::{CreateToken, TokenCreated, TokenRole, TokenStatus};

/// The default port of a connection manager.
pub const MANAGER_PORT: u16 = 7770;
/// The default port of a hub's interfaces.
pub const HUB_PORT: u16 = 7771;

/// The header of [`CreateService`] with which a caller that repeats the call names the job's namespace.
pub const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// `POST /v1/jobs`: CreateService.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateService {
    /// Unique among the jobs that have not ended: 1 to 128 letters, digits, `.`, `_`, `-` and `/`. The name of a
    /// job of a team begins with that of the team and `/`, which the manager adds for the team's callers.
    pub name: String,
    /// Number of workers, 1 to 1,024: ranks 0 to `workers - 1` make up the job.
    pub workers: u32,
    /// Waits, lifetimes and policies.
    #[serde(default)]
    pub options: JobOptions,
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
    /// The authority that signs the manager's certificates; absent if the manager is reached in clear. Workers
    /// get it with the nonce, as `NONCE.FINGERPRINT`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<Fingerprint>,
}

impl ServiceCreated {
    /// What a worker needs beside namespace and rank.
    pub fn secret(&self) -> JobSecret {
        JobSecret { nonce: self.nonce, authority: self.authority }
    }
}

/// `POST /v1/jobs/{job}/secret`: a new nonce for a job that lives; the answer is [`ServiceCreated`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ReplaceSecret {}

/// `POST /v1/jobs/{namespace}/connect`: ConnectService.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ConnectService {
    /// The caller's rank.
    pub rank: u32,
    /// Distinguishes a retry of the same process from a second process with the same rank.
    pub incarnation: Incarnation,
    /// The proof for [this call](crate::auth::Purpose::Connect) by the nonce, over namespace, rank and
    /// incarnation.
    pub proof: Proof,
    /// The claim to the rank, the same in every call of the process. The first process to call has the rank,
    /// and the answer has its [`RankSecrets`]. Workers of protocol version 1 send none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<RankClaim>,
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
    /// The number of ranks that a launcher has started together with the caller, if it starts all of them again when one
    /// fails. A job whose ranks go back, and may be more or fewer than before, goes on with so many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<u32>,
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
    /// The job's epoch, which the rank's streams name.
    #[serde(default)]
    pub epoch: u64,
    /// The hubs of each share of the chunks, by their positions in `hubs`, if they have [standbys](crate::standbys).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<Share>,
    /// The hubs that a job with standbys has got since it began. Their positions follow those in `hubs`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub later_hubs: Vec<HubShape>,
    /// The secrets of the rank; `None` if the call has no claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secrets: Option<RankSecrets>,
}

/// The secrets of one rank in one epoch of a job.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RankSecrets {
    /// The secret with which the rank proves its streams to hubs, and its calls to the manager from here on.
    pub rank: StreamSecret,
    /// The secret that it shares with each other rank, in rank order; `None` for itself and for ranks that do
    /// not listen for others, and empty if it does not listen itself.
    #[serde(default)]
    pub pairs: Vec<Option<StreamSecret>>,
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
    /// The proof for [this call](crate::auth::Purpose::Init) by the secret in [`RankSecrets`], over
    /// namespace, rank and incarnation.
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
    /// book](crate::scheme::InformationBook).
    pub roster: Roster,
    /// The step of the checkpoint from which the hubs have the parameters, if they have. Rank 0 then sends
    /// neither Initialise nor InitialiseState, and all ranks pull.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed_step: Option<u32>,
    /// `true` if the job was running already, and the caller has taken a rank that was lost, or the job has begun again: other
    /// ranks may have been there before.
    #[serde(default, skip_serializing_if = "is_default")]
    pub joined_running: bool,
}

/// `POST /v1/jobs/{job}/move`: has a job that runs leave a hub, without a lost step. Only jobs with
/// [standbys](crate::standbys) can.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MoveJob {
    /// The number of the hub that it leaves, and to which it does not come back.
    pub from: u32,
    /// The number of the hub that is to become the standby of what it leaves behind; left out, any with room may.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<u32>,
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
    /// The proof for [this call](crate::auth::Purpose::Leave) by the secret in [`RankSecrets`], over
    /// namespace, rank and incarnation.
    pub proof: Proof,
    /// The reason, for the other ranks.
    #[serde(default)]
    pub reason: String,
    /// `true` if its work is done without a hub. When every rank has reported so, the job has finished. If
    /// some ranks do so and others call InitService, the job fails.
    #[serde(default, skip_serializing_if = "is_default")]
    pub finished: bool,
    /// The address of a hub of a running job that the rank has lost, without having learnt from it why the job ended. If
    /// the manager does not hear that hub either, the job fails.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_hub: Option<String>,
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

/// Returns whether a field has its default. It is then left out, so that older hubs and managers understand
/// the text.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
