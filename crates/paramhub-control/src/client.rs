//! The manager's calls as methods.

use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::auth::{Fingerprint, Namespace};
use paramhub_core::scheme::{BestScheme, InformationBook};
use paramhub_core::service::{
    AuthorityStatus, Commands, ConnectService, CreateService, CreateToken, ErrorCode, HubRegistered,
    HubReport, HubStatus, InitService, JobStatus, LeaveService, LinkStatus, PollCommands, ProbeLinks,
    RegisterHub, ReplaceAuthority, ReplaceSecret, ServiceConnected, ServiceCreated, ServiceInitialised,
    TeamQuotas, TeamStatus, TokenCreated, TokenStatus,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use ureq::Agent;
use ureq::unversioned::resolver::DefaultResolver;
use ureq::unversioned::transport::{Connector, TcpConnector};

use crate::address::ManagerAddress;
use crate::call::{Call, decode};
use crate::error::ControlError;
use crate::tls::{Recognition, TlsConnector};

/// The time that a call that waits for no rank may take; a stop includes the wait for the hubs.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// Added to InitService's rendezvous timeout: the manager's own timeout should come first, because its error
/// names the missing ranks.
const RENDEZVOUS_MARGIN: Duration = Duration::from_secs(30);
/// Added to the time that a poll waits.
const POLL_MARGIN: Duration = Duration::from_secs(10);
/// The time between two looks for a job that is about to begin.
const FIND_PAUSE: Duration = Duration::from_millis(100);

/// A client of one connection manager. Cheap to clone, and usable from several threads at once.
#[derive(Clone)]
pub struct ManagerClient {
    agent: Agent,
    address: ManagerAddress,
    recognition: Arc<Recognition>,
    token: Option<String>,
    retry_timeout: Duration,
}

impl ManagerClient {
    /// A client of the manager at `url`: `https://host:port`, `http://host:port`, or without a scheme, which calls
    /// loopback in clear and other hosts over TLS. `token` is the admin token or another, where the manager has
    /// one: by it the client recognises the manager, and so calls it over TLS wherever it is not on this machine.
    /// Dials nothing yet.
    ///
    /// # Errors
    /// [`ControlError::Url`] says what is wrong with the URL.
    pub fn new(url: &str, token: Option<String>) -> Result<Self, ControlError> {
        Ok(Self::with(ManagerAddress::parse(url)?, token, None))
    }

    /// A client for a worker, which has a job's secret and no token. With the secret's `authority` it recognises
    /// the manager, and calls it over TLS wherever it is not on this machine.
    ///
    /// # Errors
    /// [`ControlError::Url`] says what is wrong with the URL.
    pub fn of_worker(url: &str, authority: Option<Fingerprint>) -> Result<Self, ControlError> {
        Ok(Self::with(ManagerAddress::parse(url)?, None, authority))
    }

    fn with(address: ManagerAddress, token: Option<String>, authority: Option<Fingerprint>) -> Self {
        // Every manager speaks TLS, even one that lets others call it in clear.
        let is_recognisable = token.is_some() || authority.is_some();
        let address = if is_recognisable { address.encrypted() } else { address };
        // A proxy from the environment leads out of the network, and the manager is inside it.
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(None)
            .max_idle_connections(0)
            .timeout_connect(Some(Duration::from_secs(10)))
            .user_agent(concat!("paramhub/", env!("CARGO_PKG_VERSION")))
            .build();
        let recognition = Arc::new(Recognition::new(token.clone(), authority));
        let connector = ().chain(TcpConnector::default()).chain(TlsConnector(recognition.clone()));
        let agent = Agent::with_parts(config, connector, DefaultResolver::default());
        ManagerClient { agent, address, recognition, token, retry_timeout: Duration::ZERO }
    }

    /// Lets every call retry a refused connection for this long, for a manager that is just starting.
    pub fn with_retry_timeout(mut self, retry_timeout: Duration) -> Self {
        self.retry_timeout = retry_timeout;
        self
    }

    /// The manager's URL, in the form `https://host:port` or `http://host:port`.
    pub fn url(&self) -> &str {
        &self.address.url
    }

    /// The manager's URL for the workers of a job, which have no token: without a fingerprint in the job's secret they
    /// call it in clear.
    pub fn url_for_workers(&self, job: &ServiceCreated) -> String {
        self.address.of_workers(job.authority.is_some())
    }

    /// Where the manager answers, as `host:port`.
    pub fn host_and_port(&self) -> &str {
        self.address.host_and_port()
    }

    /// CreateService: a new job, its namespace and its secret. Needs the admin token where the manager has
    /// one.
    pub fn create_service(&self, request: &CreateService) -> Result<ServiceCreated, ControlError> {
        let call = Call { repeatable: false, ..self.post("/v1/jobs", request)? };
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
        self.answer(Call { timeout: wait + POLL_MARGIN, token: Some(&hub.token), ..call })
    }

    /// Reports an event at a hub to the manager. An event reported twice counts once.
    pub fn report(&self, hub: &HubRegistered, report: &HubReport) -> Result<(), ControlError> {
        let path = format!("/v1/hubs/{}/events", hub.hub);
        let call = self.post(&path, report)?;
        self.send(Call { token: Some(&hub.token), ..call }).map(drop)
    }

    fn admin<'a>(&'a self, method: &'static str, path: &'a str) -> Call<'a> {
        let token = self.token.as_deref();
        Call { method, path, token, body: None, timeout: CALL_TIMEOUT, repeatable: true }
    }

    fn post<'a>(&'a self, path: &'a str, request: &impl Serialize) -> Result<Call<'a>, ControlError> {
        let body = serde_json::to_vec(request).map_err(|cause| ControlError::Request {
            url: self.address.url.clone(),
            cause: cause.to_string(),
        })?;
        Ok(Call { body: Some(body), ..self.admin("POST", path) })
    }

    fn answer<T: DeserializeOwned>(&self, call: Call) -> Result<T, ControlError> {
        decode(&self.send(call)?, &self.address.url)
    }

    fn send(&self, call: Call) -> Result<Vec<u8>, ControlError> {
        call.make(&self.agent, &self.address.url, &self.recognition, self.retry_timeout)
    }
}

impl std::fmt::Debug for ManagerClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ManagerClient").field("url", &self.address.url).finish_non_exhaustive()
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    /// A server that answers one connection with these bytes.
    fn answering(bytes: &'static [u8]) -> (String, std::thread::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = listener.local_addr().unwrap().to_string();
        let server = std::thread::spawn(move || {
            let mut connection = listener.accept().unwrap().0;
            assert!(connection.read(&mut [0; 4096]).unwrap() > 0);
            connection.write_all(bytes).unwrap();
        });
        (url, server)
    }

    #[test]
    fn a_silent_port_says_what_to_start() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let client = ManagerClient::new(&format!("127.0.0.1:{port}"), None).unwrap();
        let refused = client.jobs().unwrap_err();
        assert!(matches!(refused, ControlError::Unreachable { .. }), "{refused:?}");
        assert!(refused.to_string().contains("Is `paramhub hub`"), "{refused}");
        assert!(refused.to_string().contains(&port.to_string()), "{refused}");
    }

    #[test]
    fn another_server_is_distinguished_from_a_manager() {
        for bytes in [
            &b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"[..],
            b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n",
            b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        ] {
            let (url, server) = answering(bytes);
            let refused = ManagerClient::new(&url, None).unwrap().jobs().unwrap_err();
            assert!(matches!(refused, ControlError::Protocol { .. }), "{refused:?}");
            server.join().unwrap();
        }
    }

    #[test]
    fn retries_outlast_a_manager_that_starts_late() {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let server = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            let mut connection = TcpListener::bind(address).unwrap().accept().unwrap().0;
            assert!(connection.read(&mut [0; 4096]).unwrap() > 0);
            connection.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]").unwrap();
        });
        let client = ManagerClient::new(&address.to_string(), None).unwrap();
        assert!(client.with_retry_timeout(Duration::from_secs(30)).jobs().unwrap().is_empty());
        server.join().unwrap();
    }

    #[test]
    fn a_job_name_is_one_path_segment() {
        assert_eq!(job_path("team/run.7"), "/v1/jobs/team%2Frun%2E7");
        assert_eq!(job_path(".."), "/v1/jobs/%2E%2E");
    }
}
