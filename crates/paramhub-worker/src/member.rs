//! Joining: ConnectService, then InitService.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_control::{ControlError, ManagerClient};
use paramhub_core::auth::{Incarnation, Purpose, RankClaim, StreamSecret};
use paramhub_core::composition::Place;
use paramhub_core::service::{
    ConnectService, ErrorCode, InitService, LeaveService, RankSecrets, ServiceConnected,
};
use paramhub_core::settings::Settings;
use paramhub_transport::greeting::draw;
use paramhub_transport::host_identity;

use crate::error::{WorkerError, WorkerId};
use crate::job::Job;
use crate::job_config::JobConfig;
use crate::lease::JobLease;
use crate::loss_report::LossReporter;
use crate::membership::Membership;
use crate::options::Options;
use crate::share_hubs::ShareAsker;

/// How long a repeated ConnectService may take: the manager answers it at once.
const RENEW_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a worker calls for a rank that another process has, in a job that goes on when workers are lost. No hub may
/// have noticed yet that the other has died.
const TAKEN_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause between two such calls.
const TAKEN_PAUSE: Duration = Duration::from_millis(100);

/// A worker whose job is complete: every rank has connected. Dropped before [`Member::init`] is done, it
/// gives up its rank, so that the others need not wait for it.
#[derive(Debug)]
pub struct Member {
    membership: Membership,
    options: Options,
    manager: ManagerClient,
    incarnation: Incarnation,
    connected: ServiceConnected,
    /// This rank's secrets, with which it proves streams and further calls.
    secrets: RankSecrets,
    /// The call as the manager has it, for renewals.
    call: ConnectService,
    /// What the manager is told if this worker gives up; `None` once the hubs know this worker.
    gives_up: Option<GivesUp>,
}

/// Why a worker gives up.
#[derive(Debug)]
struct GivesUp {
    /// The reason that the other ranks get.
    reason: String,
    /// The hub that the worker cannot reach, if that is why.
    lost_hub: Option<String>,
}

impl Member {
    /// Joins a job and waits until every rank has.
    ///
    /// # Errors
    /// If the manager cannot be reached or refuses, for example because ranks are missing, which it names.
    pub fn connect(membership: Membership) -> Result<Member, WorkerError> {
        Member::connect_with(membership, Options::default())
    }

    /// [`Member::connect`] with other waits and sizes.
    pub fn connect_with(membership: Membership, options: Options) -> Result<Member, WorkerError> {
        let who = WorkerId { job: membership.namespace.to_string().into(), rank: membership.rank };
        let refused = |cause| manager_error(who.clone(), "ConnectService", cause);
        let manager = ManagerClient::of_worker(&membership.url, membership.secret.authority)
            .map_err(refused)?
            .with_retry_timeout(options.manager_retry_timeout);
        let random = |error: std::io::Error| WorkerError::System {
            who: who.clone(),
            what: "draw random numbers",
            reason: error.to_string().into(),
        };
        let incarnation = draw().map(Incarnation).map_err(random)?;
        let claim = draw().map(RankClaim).map_err(random)?;
        let (namespace, rank) = (membership.namespace, membership.rank);
        let request = ConnectService {
            rank,
            incarnation,
            proof: membership.secret.nonce.prove_rank(Purpose::Connect, namespace, rank, incarnation),
            claim: Some(claim),
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            process: std::process::id(),
            place: Place {
                rack: options.rack.clone().unwrap_or_default(),
                host: options.host.clone().unwrap_or_else(host_identity),
            },
            peer_address: options.peer_address,
            workers: options.started_workers,
        };
        let begun = Instant::now();
        let mut connected = loop {
            match manager.connect_service(namespace, &request, options.rendezvous_timeout) {
                Err(error) if begun.elapsed() < calls_for(&error, &options) => {
                    std::thread::sleep(TAKEN_PAUSE);
                }
                connected => break connected.map_err(refused)?,
            }
        };
        let secrets = connected.secrets.take().ok_or_else(|| WorkerError::Manager {
            who: who.clone(),
            call: "ConnectService",
            cause: Arc::new(ControlError::Protocol {
                url: membership.url.clone(),
                cause: "its answer has no secret for the rank".into(),
            }),
        })?;
        let gives_up = Some(GivesUp::because("it ended before it had handed in its settings"));
        // The job's nonce may be replaced while the rank renews its lease.
        let proof = secrets.rank.prove_rank(Purpose::Connect, namespace, rank, incarnation);
        let call = ConnectService { proof, ..request };
        Ok(Member { membership, options, manager, incarnation, connected, secrets, call, gives_up })
    }

    /// This worker's rank.
    pub fn rank(&self) -> u32 {
        self.membership.rank
    }

    /// Ranks in the job.
    pub fn workers(&self) -> u32 {
        self.connected.workers
    }

    /// The address at which each rank listens for the others, in rank order: its [`Options::peer_address`].
    pub fn peer_addresses(&self) -> &[Option<SocketAddr>] {
        &self.connected.peer_addresses
    }

    /// The secret that this rank shares with each other rank, in rank order; `None` for itself and for ranks
    /// without a peer address. Empty if this rank has none.
    pub fn pair_secrets(&self) -> &[Option<StreamSecret>] {
        &self.secrets.pairs
    }

    /// Whether the job's streams between hosts are encrypted.
    pub fn encrypts(&self) -> bool {
        self.connected.options.encrypt
    }

    /// How long a connection of the job that was cut may take to be made again.
    pub fn redial_grace(&self) -> Duration {
        self.connected.options.redial_grace()
    }

    /// The job's name.
    pub fn job_name(&self) -> &str {
        &self.connected.name
    }

    /// Holds a lease in the job without calling InitService, for ranks that exchange among themselves. A
    /// thread renews the lease until this rank leaves. It calls `on_end` if the job ends first; `on_end` must
    /// not drop the lease, which waits for the thread.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn hold_lease(
        mut self,
        on_end: impl FnOnce(WorkerError) + Send + 'static,
    ) -> Result<JobLease, WorkerError> {
        self.gives_up = Some(GivesUp::because("it ended without having left the job"));
        JobLease::new(self, on_end)
    }

    /// Reports to the manager that this rank's work is done, without a hub. The job has finished when every
    /// rank has reported this.
    ///
    /// # Errors
    /// If the manager cannot be reached.
    pub fn leave(mut self) -> Result<(), WorkerError> {
        self.has_left();
        self.send_leave(String::new(), true).map_err(|cause| manager_error(self.who(), "LeaveService", cause))
    }

    /// Sends this rank's settings, waits until every rank has sent its own and the hubs have allocated, and
    /// opens the streams.
    ///
    /// # Errors
    /// If the ranks disagree, which the manager explains, the hubs cannot hold the job, or a stream cannot be
    /// opened.
    pub fn init(mut self, settings: Settings) -> Result<Job, WorkerError> {
        let result = self.try_init(settings);
        self.gives_up = result.as_ref().err().map(|error| GivesUp {
            reason: error.to_string(),
            lost_hub: error.lost_hub().map(|(hub, _)| hub.to_string()),
        });
        result
    }

    /// This worker's name in errors.
    pub(crate) fn who(&self) -> WorkerId {
        WorkerId { job: self.connected.name.as_str().into(), rank: self.membership.rank }
    }

    /// How long the manager waits for a rank's renewal.
    pub(crate) fn lease_duration(&self) -> Duration {
        Duration::try_from_secs_f64(self.connected.options.lease_s).unwrap_or(Duration::MAX)
    }

    /// Calls ConnectService again, which renews the lease and fails if the job no longer runs. It takes at most half of a
    /// lease, so that a manager that restarts meanwhile, and counts anew from there, is called again in time.
    pub(crate) fn renew(&self) -> Result<(), ControlError> {
        let manager = self.manager.clone().with_retry_timeout(Duration::ZERO);
        let timeout = RENEW_TIMEOUT.min(self.lease_duration() / 2);
        manager.connect_service(self.membership.namespace, &self.call, timeout).map(drop)
    }

    /// Reports to the manager that this rank leaves the job without having reached a hub. Does not retry a manager that
    /// is away: mostly it answered a moment ago.
    pub(crate) fn send_leave(&self, reason: String, finished: bool) -> Result<(), ControlError> {
        self.send(&LeaveService { finished, ..self.leave_call(reason) })
    }

    fn send(&self, call: &LeaveService) -> Result<(), ControlError> {
        let manager = self.manager.clone().with_retry_timeout(Duration::ZERO);
        manager.leave_service(self.membership.namespace, call)
    }

    fn leave_call(&self, reason: String) -> LeaveService {
        let Membership { namespace, rank, .. } = self.membership;
        let proof = self.secrets.rank.prove_rank(Purpose::Leave, namespace, rank, self.incarnation);
        let incarnation = self.incarnation;
        LeaveService { rank, incarnation, proof, reason, finished: false, lost_hub: None }
    }

    /// Keeps the drop of this member from reporting anything: the manager knows of its end, or has announced
    /// it.
    pub(crate) fn has_left(&mut self) {
        self.gives_up = None;
    }

    fn try_init(&self, settings: Settings) -> Result<Job, WorkerError> {
        let Membership { namespace, rank, .. } = self.membership;
        let who = self.who();
        settings
            .check()
            .map_err(|cause| WorkerError::Settings { who: who.clone(), cause: Arc::new(cause) })?;
        // Check before the hubs allocate for this rank.
        let ServiceConnected { options: job_options, hubs, .. } = &self.connected;
        self.options.check(&who, &settings, job_options, hubs.len())?;
        let request = InitService {
            rank,
            incarnation: self.incarnation,
            proof: self.secrets.rank.prove_rank(Purpose::Init, namespace, rank, self.incarnation),
            settings,
        };
        let timeout = Duration::try_from_secs_f64(self.connected.options.join_timeout_s())
            .unwrap_or(self.options.rendezvous_timeout);
        let initialised =
            self.manager.init_service(namespace, &request, timeout).map_err(|cause| match cause.code() {
                // With a wrong proof another process has got the rank since. It may be one that has died, whose call was late.
                Some(ErrorCode::Busy | ErrorCode::WrongNonce) if self.connected.options.rewinds() => {
                    WorkerError::Rewound { who, culprit: None, message: cause.to_string().into() }
                }
                // The manager shuts down, perhaps with a hub.
                Some(ErrorCode::Internal) if self.connected.options.outlives_hubs() => {
                    WorkerError::Rewound { who, culprit: None, message: cause.to_string().into() }
                }
                _ => manager_error(who, "InitService", cause),
            })?;
        let job_config = JobConfig {
            name: self.connected.name.clone(),
            namespace,
            secret: self.secrets.rank,
            epoch: self.connected.epoch,
            rank,
            workers: self.connected.workers,
            incarnation: self.incarnation,
            hubs: self.connected.hubs.clone(),
            shares: self.connected.shares.clone(),
            settings: request.settings,
            job_options: self.connected.options,
            resumed_step: initialised.resumed_step,
            joined_running: initialised.joined_running,
            placement_hash: Some(initialised.placement_hash),
            roster: initialised.roster,
        };
        let loss_reporter = LossReporter {
            manager: self.manager.clone().with_retry_timeout(Duration::ZERO),
            namespace,
            call: self.leave_call(String::new()),
        };
        let share_asker = ShareAsker {
            manager: self.manager.clone().with_retry_timeout(Duration::ZERO),
            namespace,
            call: self.call.clone(),
        };
        job_config.open_reporting(self.options.clone(), Some(loss_reporter), Some(share_asker))
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let Some(GivesUp { reason, lost_hub }) = self.gives_up.take() else { return };
        // Best effort: without it the other ranks learn of the failure when the rendezvous times out.
        let _ = self.send(&LeaveService { lost_hub, ..self.leave_call(reason) });
    }
}

/// How long a worker calls for its rank that is refused so.
fn calls_for(refused: &ControlError, options: &Options) -> Duration {
    match refused.code() {
        Some(ErrorCode::Busy) => TAKEN_TIMEOUT,
        // The manager shuts down, and is about to be away.
        Some(ErrorCode::Internal) => options.manager_retry_timeout,
        _ => Duration::ZERO,
    }
}

impl GivesUp {
    fn because(reason: &str) -> GivesUp {
        GivesUp { reason: reason.to_owned(), lost_hub: None }
    }
}

pub(crate) fn manager_error(who: WorkerId, call: &'static str, cause: ControlError) -> WorkerError {
    WorkerError::Manager { who, call, cause: Arc::new(cause) }
}
