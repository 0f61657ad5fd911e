//! The manager's calls as methods.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::auth::{Fingerprint, Namespace};
use paramhub_core::scheme::{BestScheme, InformationBook};
use paramhub_core::service::{
    AuthorityStatus, Commands, ConnectService, CreateService, CreateToken, DrainHub, DrainStatus, ErrorCode,
    HubRegistered, HubReport, HubStatus, IDEMPOTENCY_KEY, InitService, JobStatus, LeaveService, LinkStatus,
    MoveJob, MoveStatus, PollCommands, ProbeLinks, RegisterHub, ReplaceAuthority, ReplaceSecret,
    ServiceConnected, ServiceCreated, ServiceInitialised, TeamQuotas, TeamStatus, TokenCreated, TokenStatus,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::address::ManagerAddress;
use crate::call::{ANSWER_BYTES_MAX, Call, decode};
use crate::error::ControlError;
use crate::managers::Managers;

/// The time that a call that waits for no rank may take; a stop includes the wait for the hubs.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// Added to InitService's rendezvous timeout: the manager's own timeout should come first, because its error
/// names the missing ranks.
const RENDEZVOUS_MARGIN: Duration = Duration::from_secs(30);
/// Added to the time that a poll waits.
const POLL_MARGIN: Duration = Duration::from_secs(10);
/// The time between two looks for a job that is about to begin.
const FIND_PAUSE: Duration = Duration::from_millis(100);

/// A client of one connection manager, or of several that share one store and of which one leads. Cheap to clone, and
/// usable from several threads at once. Clones share which manager has answered last, and call it first.
#[derive(Clone)]
pub struct ManagerClient {
    managers: Arc<Managers>,
    token: Option<String>,
    retry_timeout: Option<Duration>,
}

impl ManagerClient {
    /// A client of the manager at `url`: `https://host:port`, `http://host:port`, or without a scheme, which calls
    /// loopback in clear and other hosts over TLS. Several URLs, separated by commas, are those of managers that share one
    /// store. `token` is the admin token or another, where the manager has
    /// one: by it the client recognises the manager, and so calls it over TLS wherever it is not on this machine.
    /// Dials nothing yet.
    ///
    /// # Errors
    /// [`ControlError::Url`] says what is wrong with the URL.
    pub fn new(url: &str, token: Option<String>) -> Result<Self, ControlError> {
        Ok(Self::with(ManagerAddress::parse_list(url)?, token, None))
    }

    /// A client for a worker, which has a job's secret and no token. With the secret's `authority` it recognises
    /// the manager, and calls it over TLS wherever it is not on this machine.
    ///
    /// # Errors
    /// [`ControlError::Url`] says what is wrong with the URL.
    pub fn of_worker(url: &str, authority: Option<Fingerprint>) -> Result<Self, ControlError> {
        Ok(Self::with(ManagerAddress::parse_list(url)?, None, authority))
    }

    fn with(addresses: Vec<ManagerAddress>, token: Option<String>, authority: Option<Fingerprint>) -> Self {
        // Every manager speaks TLS, even one that lets others call it in clear.
        let is_recognisable = token.is_some() || authority.is_some();
        let encrypted = |address: ManagerAddress| if is_recognisable { address.encrypted() } else { address };
        let addresses = addresses.into_iter().map(encrypted).collect();
        let managers = Arc::new(Managers::new(addresses, token.clone(), authority));
        ManagerClient { managers, token, retry_timeout: None }
    }

    /// Lets every call retry a refused connection for this long, for a manager that is just starting, and go through
    /// several managers for this long until one leads. By default a single manager is not dialled again, and several are
    /// for 10 s.
    pub fn with_retry_timeout(mut self, retry_timeout: Duration) -> Self {
        self.retry_timeout = Some(retry_timeout);
        self
    }

    /// The manager's URL, in the form `https://host:port` or `http://host:port`; of several all, separated by commas.
    pub fn url(&self) -> &str {
        &self.managers.url
    }

    /// Whether the client has the URLs of several managers.
    pub fn has_several(&self) -> bool {
        self.managers.are_several()
    }

    /// The manager's URL for the workers of a job, which have no token: without a fingerprint in the job's secret they
    /// call it in clear. Of several managers all, separated by commas.
    pub fn url_for_workers(&self, job: &ServiceCreated) -> String {
        let of_workers = |address: &ManagerAddress| address.of_workers(job.authority.is_some());
        self.managers.addresses.iter().map(of_workers).collect::<Vec<_>>().join(",")
    }

    /// Where the manager answers, as `host:port`; of several the one that has answered last.
    pub fn host_and_port(&self) -> &str {
        self.managers.addresses[self.managers.current()].host_and_port()
    }

    /// CreateService: a new job, its namespace and its secret. Needs the admin token where the manager has
    /// one.
    pub fn create_service(&self, request: &CreateService) -> Result<ServiceCreated, ControlError> {
        // If the answer is lost, the next call finds the job by this. Without random numbers it fails, as it would find a
        // job of this name that may be another's.
        let mut namespace = [0; 16];
        let header = getrandom::fill(&mut namespace)
            .ok()
            .map(|()| (IDEMPOTENCY_KEY, Namespace(namespace).to_string()));
        let call = Call { repeatable: false, header, ..self.post("/v1/jobs", request)? };
        self.answer(call)
    }

    /// ConnectService: joins the job and waits until every rank has, at most for `timeout`. If `timeout` is
    /// longer than the job's rendezvous timeout, the manager gives up first, and its error names the missing
    /// ranks.
    pub fn connect_service(
        &self,
        namespace: Namespace,
        request: &ConnectService,
        timeout: Duration,
    ) -> Result<ServiceConnected, ControlError> {
        let path = format!("/v1/jobs/{namespace}/connect");
        self.answer(Call { timeout, ..self.post(&path, request)? })
    }

    /// InitService: sends this rank's settings and waits until every rank has sent its own and the hubs have
    /// allocated.
    pub fn init_service(
        &self,
        namespace: Namespace,
        request: &InitService,
        rendezvous_timeout: Duration,
    ) -> Result<ServiceInitialised, ControlError> {
        let path = format!("/v1/jobs/{namespace}/init");
        let timeout = rendezvous_timeout.saturating_add(RENDEZVOUS_MARGIN);
        self.answer(Call { timeout, ..self.post(&path, request)? })
    }

    /// LeaveService: gives up a rank that reached no hub, with the reason.
    pub fn leave_service(&self, namespace: Namespace, request: &LeaveService) -> Result<(), ControlError> {
        let path = format!("/v1/jobs/{namespace}/leave");
        self.send(self.post(&path, request)?).map(drop)
    }

    /// LeaveService of a rank that has lost the hub that the request names. Takes no longer than `timeout`.
    pub fn report_lost_hub(
        &self,
        namespace: Namespace,
        request: &LeaveService,
        timeout: Duration,
    ) -> Result<(), ControlError> {
        let path = format!("/v1/jobs/{namespace}/leave");
        self.send(Call { timeout, ..self.post(&path, request)? }).map(drop)
    }

    /// Makes a token. Needs the admin token.
    pub fn create_token(&self, request: &CreateToken) -> Result<TokenCreated, ControlError> {
        let call = Call { repeatable: false, ..self.post("/v1/tokens", request)? };
        self.answer(call)
    }

    /// Every token of the manager, without its text.
    pub fn tokens(&self) -> Result<Vec<TokenStatus>, ControlError> {
        self.answer(self.admin("GET", "/v1/tokens"))
    }

    /// Revokes a token, by its name.
    pub fn revoke_token(&self, name: &str) -> Result<TokenStatus, ControlError> {
        self.answer(self.admin("DELETE", &format!("/v1/tokens/{}", percent_encoded(name))))
    }

    /// The authority that signs the manager's certificates.
    pub fn authority(&self) -> Result<AuthorityStatus, ControlError> {
        self.answer(self.admin("GET", "/v1/authority"))
    }

    /// Makes a new authority, which signs the manager's certificates from now on. Needs the admin token.
    pub fn replace_authority(&self, request: &ReplaceAuthority) -> Result<AuthorityStatus, ControlError> {
        let call = Call { repeatable: false, ..self.post("/v1/authority", request)? };
        self.answer(call)
    }

    /// Adds a team, or replaces all of its quotas. Needs the admin token.
    pub fn set_team(&self, name: &str, quotas: &TeamQuotas) -> Result<TeamStatus, ControlError> {
        let path = team_path(name);
        self.answer(Call { method: "PUT", ..self.post(&path, quotas)? })
    }

    /// Every team with its quotas and what it has of them.
    pub fn teams(&self) -> Result<Vec<TeamStatus>, ControlError> {
        self.answer(self.admin("GET", "/v1/teams"))
    }

    /// Removes a team that has neither jobs that live nor valid tokens.
    pub fn remove_team(&self, name: &str) -> Result<TeamStatus, ControlError> {
        self.answer(self.admin("DELETE", &team_path(name)))
    }

    /// All that the manager keeps, with the secrets in it, as JSON that another manager can restore. Needs the admin
    /// token.
    pub fn state(&self) -> Result<Vec<u8>, ControlError> {
        self.send(self.admin("GET", "/v1/state"))
    }

    /// Every job that the manager remembers, oldest first.
    pub fn jobs(&self) -> Result<Vec<JobStatus>, ControlError> {
        self.answer(self.admin("GET", "/v1/jobs"))
    }

    /// One job, by name or namespace; of several with one name the living one, else the newest.
    pub fn job(&self, job: &str) -> Result<JobStatus, ControlError> {
        self.answer(self.admin("GET", &job_path(job)))
    }

    /// The namespace and secret of a living job, by name, for further workers; available until every rank has
    /// joined, and while the job runs if it goes on when it loses workers. Needs the admin token where the manager
    /// has one.
    pub fn membership(&self, job: &str) -> Result<ServiceCreated, ControlError> {
        self.answer(self.admin("GET", &format!("{}/membership", job_path(job))))
    }

    /// The [`membership`](Self::membership) of the living job of this name, or a new job if none lives. Returns whether
    /// it is new. A job that is between its ranks' settings and its first step takes nobody; this waits for it at most
    /// for `patience`.
    pub fn find_or_create(
        &self,
        request: &CreateService,
        patience: Duration,
    ) -> Result<(ServiceCreated, bool), ControlError> {
        let until = Instant::now() + patience;
        loop {
            match self.membership(&request.name) {
                Ok(found) => return Ok((found, false)),
                Err(error) if error.code() == Some(ErrorCode::NotFound) => {
                    return self.create_service(request).map(|created| (created, true));
                }
                Err(error) if error.code() == Some(ErrorCode::NameTaken) && Instant::now() < until => {
                    std::thread::sleep(FIND_PAUSE);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Replaces the secret of a living job, by name or namespace. Workers that have yet to join need the new one.
    pub fn replace_secret(&self, job: &str) -> Result<ServiceCreated, ControlError> {
        let path = format!("{}/secret", job_path(job));
        self.answer(Call { repeatable: false, ..self.post(&path, &ReplaceSecret::default())? })
    }

    /// Moves a job that runs, by name or namespace, off a hub: to another one, or to whichever has room.
    pub fn move_job(&self, job: &str, order: MoveJob) -> Result<MoveStatus, ControlError> {
        self.answer(self.post(&format!("{}/move", job_path(job)), &order)?)
    }

    /// How far the newest move of a job is.
    pub fn move_status(&self, job: &str) -> Result<MoveStatus, ControlError> {
        self.answer(self.admin("GET", &format!("{}/move", job_path(job))))
    }

    /// Ends a job, by name or namespace, and waits until its hubs have freed it. The job's message then is
    /// that an operator stopped it.
    pub fn stop_job(&self, job: &str) -> Result<JobStatus, ControlError> {
        self.answer(self.admin("DELETE", &job_path(job)))
    }

    /// [`stop_job`](Self::stop_job) with a reason, which the job's status, its workers and the logs then show
    /// instead: 1 to [`STOP_REASON_CHARS_MAX`](paramhub_core::service::STOP_REASON_CHARS_MAX) printable ASCII
    /// characters. A job that has ended already keeps the reason it ended with.
    pub fn stop_job_because(&self, job: &str, reason: &str) -> Result<JobStatus, ControlError> {
        let path = format!("{}?reason={}", job_path(job), percent_encoded(reason));
        self.answer(self.admin("DELETE", &path))
    }

    /// Announces that a job's workers are about to end because of `reason`. While the job goes on its hubs
    /// take a last checkpoint, if it has checkpoints; returns when they have, or after some seconds. If the
    /// job does not finish, `reason` is its message.
    pub fn announce_workers_end(&self, job: &str, reason: &str) -> Result<JobStatus, ControlError> {
        self.conclude(job, reason, "workers_ending")
    }

    /// Reports that the processes of a job's workers have ended. If all workers had left, the job finishes,
    /// even if its hubs do not know so yet; else it ends with the reason that the hubs have seen, or with
    /// `reason`. Returns when its hubs have freed it.
    pub fn workers_have_ended(&self, job: &str, reason: &str) -> Result<JobStatus, ControlError> {
        self.conclude(job, reason, "workers_ended")
    }

    fn conclude(&self, job: &str, reason: &str, when: &str) -> Result<JobStatus, ControlError> {
        let path = format!("{}?reason={}&when={when}", job_path(job), percent_encoded(reason));
        self.answer(self.admin("DELETE", &path))
    }

    /// The information book of a running job.
    pub fn information_book(&self, job: &str) -> Result<InformationBook, ControlError> {
        self.answer(self.admin("GET", &format!("{}/book", job_path(job))))
    }

    /// The scheme of a layer of a running job.
    pub fn best_scheme(&self, job: &str, layer: &str) -> Result<BestScheme, ControlError> {
        let path = format!("{}/best-scheme?layer={}", job_path(job), percent_encoded(layer));
        self.answer(self.admin("GET", &path))
    }

    /// Every hub that has joined.
    pub fn hubs(&self) -> Result<Vec<HubStatus>, ControlError> {
        self.answer(self.admin("GET", "/v1/hubs"))
    }

    /// Drains a hub, or ends that: one that is drained gets no new jobs, and jobs with standbys leave it without a lost step.
    /// Returns the jobs that have yet to leave.
    pub fn drain_hub(&self, hub: u32, drained: bool) -> Result<DrainStatus, ControlError> {
        self.answer(self.post(&format!("/v1/hubs/{hub}/drain"), &DrainHub { drained })?)
    }

    /// The jobs that have a part at a hub, and what they wait for if they are to leave it.
    pub fn drain_status(&self, hub: u32) -> Result<DrainStatus, ControlError> {
        self.answer(self.admin("GET", &format!("/v1/hubs/{hub}/drain")))
    }

    /// The hubs' measurements of the network between racks.
    pub fn links(&self) -> Result<Vec<LinkStatus>, ControlError> {
        self.answer(self.admin("GET", "/v1/links"))
    }

    /// Lets the hubs of all racks probe the network between them, and waits until they have, some seconds.
    pub fn probe_links(&self) -> Result<Vec<LinkStatus>, ControlError> {
        self.answer(self.post("/v1/links", &ProbeLinks::default())?)
    }

    /// Registers a hub. Needs the admin token where the manager has one.
    pub fn register_hub(&self, request: &RegisterHub) -> Result<HubRegistered, ControlError> {
        let call = Call { repeatable: false, ..self.post("/v1/hubs", request)? };
        self.answer(call)
    }

    /// Waits for a hub's commands. The errors `NotFound` and `Unauthorized` mean that the manager does not
    /// know the hub any more, because the hub was silent too long or the manager restarted: register again.
    pub fn poll_commands(
        &self,
        hub: &HubRegistered,
        request: &PollCommands,
    ) -> Result<Commands, ControlError> {
        let path = format!("/v1/hubs/{}/poll", hub.hub);
        let wait = Duration::try_from_secs_f64(request.wait_s).unwrap_or(POLL_MARGIN).min(POLL_MARGIN);
        let call = self.post(&path, request)?;
        self.answer(Call { timeout: wait + POLL_MARGIN, token: Some(hub.token.clone()), ..call })
    }

    /// Reports an event at a hub to the manager. An event reported twice counts once.
    pub fn report(&self, hub: &HubRegistered, report: &HubReport) -> Result<(), ControlError> {
        let path = format!("/v1/hubs/{}/events", hub.hub);
        let call = self.post(&path, report)?;
        self.send(Call { token: Some(hub.token.clone()), ..call }).map(drop)
    }

    fn admin(&self, method: &'static str, path: &str) -> Call {
        Call {
            method,
            path: path.to_owned(),
            token: self.token.clone(),
            header: None,
            body: None,
            timeout: CALL_TIMEOUT,
            repeatable: true,
            answer_bytes_max: ANSWER_BYTES_MAX,
        }
    }

    fn post(&self, path: &str, request: &impl Serialize) -> Result<Call, ControlError> {
        let body = serde_json::to_vec(request).map_err(|cause| ControlError::Request {
            url: self.url().to_owned(),
            cause: cause.to_string(),
        })?;
        Ok(Call { body: Some(Arc::new(body)), ..self.admin("POST", path) })
    }

    fn answer<T: DeserializeOwned>(&self, call: Call) -> Result<T, ControlError> {
        decode(&self.send(call)?, self.url())
    }

    fn send(&self, call: Call) -> Result<Vec<u8>, ControlError> {
        call.make(&self.managers, self.retry_timeout)
    }
}

impl std::fmt::Debug for ManagerClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ManagerClient").field("url", &self.url()).finish_non_exhaustive()
    }
}

fn team_path(name: &str) -> String {
    format!("/v1/teams/{}", percent_encoded(name))
}

fn job_path(job: &str) -> String {
    format!("/v1/jobs/{}", percent_encoded(job))
}

/// Encodes text for one segment of a path, or one value of a query.
fn percent_encoded(text: &str) -> String {
    use std::fmt::Write;
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => encoded.push(byte as char),
            _ => write!(encoded, "%{byte:02X}").expect("a String takes all"),
        }
    }
    encoded
}
