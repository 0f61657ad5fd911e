//! Joining: ConnectService, then InitService.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use paramhub_control::{ControlError, ManagerClient};
use paramhub_core::auth::{Incarnation, Purpose};
use paramhub_core::composition::Place;
use paramhub_core::service::{ConnectService, InitService, LeaveService, ServiceConnected};
use paramhub_core::settings::Settings;
use paramhub_transport::host_identity;

use crate::admission::Admission;
use crate::attendance::Attendance;
use crate::error::{Who, WorkerError};
use crate::job::Job;
use crate::membership::Membership;
use crate::options::Options;

/// Whoever has been in ConnectService before is answered at once.
const SIGN_TIMEOUT: Duration = Duration::from_secs(10);

/// A worker whose job is complete: every rank has connected. Dropped before [`Member::init`] is done, it gives up its rank,
/// so that the others need not wait for it.
#[derive(Debug)]
pub struct Member {
    membership: Membership,
    options: Options,
    manager: ManagerClient,
    incarnation: Incarnation,
    connected: ServiceConnected,
    /// As the manager has it, to be repeated.
    call: ConnectService,
    /// What the others are told if this worker gives up; none once the hubs count on it.
    gives_up: Option<String>,
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
        let who = Who { job: membership.namespace.to_string().into(), rank: membership.rank };
        let refused = |cause| manager_error(who.clone(), "ConnectService", cause);
        let manager = ManagerClient::new(&membership.url, None)
            .map_err(refused)?
            .with_patience(options.manager_patience);
        let mut incarnation = Incarnation([0; 16]);
        getrandom::fill(&mut incarnation.0).map_err(|error| WorkerError::System {
            who: who.clone(),
            what: "draw random numbers",
            reason: error.to_string().into(),
        })?;
        let (namespace, rank) = (membership.namespace, membership.rank);
        let request = ConnectService {
            rank,
            incarnation,
            proof: membership.nonce.prove_rank(Purpose::Connect, namespace, rank, incarnation),
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            process: std::process::id(),
            place: Place {
                rack: options.rack.clone().unwrap_or_default(),
                host: options.host.clone().unwrap_or_else(host_identity),
            },
            peer_address: options.peer_address,
        };
        let connected =
            manager.connect_service(namespace, &request, options.rendezvous_timeout).map_err(refused)?;
        let gives_up = Some("it ended before it had handed in its settings".to_owned());
        Ok(Member { membership, options, manager, incarnation, connected, call: request, gives_up })
    }

    /// This worker's rank.
    pub fn rank(&self) -> u32 {
        self.membership.rank
    }

    /// Ranks in the job.
    pub fn workers(&self) -> u32 {
        self.connected.workers
    }

    /// Where each rank listens for the others, in rank order: its [`Options::peer_address`].
    pub fn peer_addresses(&self) -> &[Option<SocketAddr>] {
        &self.connected.peer_addresses
    }

    /// The job's name.
    pub fn job_name(&self) -> &str {
        &self.connected.name
    }

    /// Stays in the job without calling InitService, for ranks that exchange among themselves: the manager hears of this one until
    /// it leaves, and `on_end` of the job's end, if that comes first. `on_end` must not drop the attendance, which waits for it.
    ///
    /// # Errors
    /// If there is no thread for it.
    pub fn stay(
        mut self,
        on_end: impl FnOnce(WorkerError) + Send + 'static,
    ) -> Result<Attendance, WorkerError> {
        self.gives_up = Some("it ended without having left the job".to_owned());
        Attendance::new(self, on_end)
    }

    /// Says that this rank's work is done without a hub. The job has finished when every rank has said so.
    ///
    /// # Errors
    /// If the manager cannot be told.
    pub fn leave(mut self) -> Result<(), WorkerError> {
        self.has_left();
        self.tell_leave(String::new(), true).map_err(|cause| manager_error(self.who(), "LeaveService", cause))
    }

    /// Hands in this rank's settings, waits until every rank has and the hubs have allocated, and opens the streams.
    ///
    /// # Errors
    /// If the ranks disagree, which the manager explains, the hubs cannot hold the job, or a stream cannot be opened.
    pub fn init(mut self, settings: Settings) -> Result<Job, WorkerError> {
        let result = self.try_init(settings);
        self.gives_up = result.as_ref().err().map(ToString::to_string);
        result
    }

    /// For errors.
    pub(crate) fn who(&self) -> Who {
        Who { job: self.connected.name.as_str().into(), rank: self.membership.rank }
    }

    /// How long the manager waits for a sign of anybody.
    pub(crate) fn lease(&self) -> Duration {
        Duration::try_from_secs_f64(self.connected.options.lease_s).unwrap_or(Duration::MAX)
    }

    /// Tells the manager again that this rank is there, and hears whether the job still is.
    pub(crate) fn call_again(&self) -> Result<(), ControlError> {
        let manager = self.manager.clone().with_patience(Duration::ZERO);
        manager.connect_service(self.membership.namespace, &self.call, SIGN_TIMEOUT).map(drop)
    }

    /// Tells the manager that this rank leaves the job without having reached a hub. No patience: the manager was there a moment
    /// ago.
    pub(crate) fn tell_leave(&self, reason: String, finished: bool) -> Result<(), ControlError> {
        let Membership { namespace, nonce, rank, .. } = self.membership;
        let proof = nonce.prove_rank(Purpose::Leave, namespace, rank, self.incarnation);
        let request = LeaveService { rank, incarnation: self.incarnation, proof, reason, finished };
        let manager = self.manager.clone().with_patience(Duration::ZERO);
        manager.leave_service(namespace, &request)
    }

    /// Its end is nobody's business any more: the manager has been told of it, or tells of it.
    pub(crate) fn has_left(&mut self) {
        self.gives_up = None;
    }

    fn try_init(&self, settings: Settings) -> Result<Job, WorkerError> {
        let Membership { namespace, nonce, rank, .. } = self.membership;
        let who = self.who();
        settings
            .check()
            .map_err(|cause| WorkerError::Settings { who: who.clone(), cause: Arc::new(cause) })?;
        // Before the hubs count on this rank.
        self.options.check(&who, &settings, self.connected.options.stands_still(&settings))?;
        let request = InitService {
            rank,
            incarnation: self.incarnation,
            proof: nonce.prove_rank(Purpose::Init, namespace, rank, self.incarnation),
            settings,
        };
        let timeout = Duration::try_from_secs_f64(self.connected.options.rendezvous_timeout_s)
            .unwrap_or(self.options.rendezvous_timeout);
        let initialised = self
            .manager
            .init_service(namespace, &request, timeout)
            .map_err(|cause| manager_error(who, "InitService", cause))?;
        let admission = Admission {
            name: self.connected.name.clone(),
            namespace,
            nonce,
            rank,
            workers: self.connected.workers,
            incarnation: self.incarnation,
            hubs: self.connected.hubs.clone(),
            settings: request.settings,
            job_options: self.connected.options,
            resumed_step: initialised.resumed_step,
            placement_hash: Some(initialised.placement_hash),
            roster: initialised.roster,
        };
        admission.open(self.options.clone())
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let Some(reason) = self.gives_up.take() else { return };
        // Best effort: without it the others learn of it when the rendezvous times out.
        let _ = self.tell_leave(reason, false);
    }
}

pub(crate) fn manager_error(who: Who, call: &'static str, cause: ControlError) -> WorkerError {
    WorkerError::Manager { who, call, cause: Arc::new(cause) }
}
