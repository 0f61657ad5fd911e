//! The connection managers that a client may call: one, or several of which one leads.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use paramhub_core::auth::Fingerprint;
use ureq::Agent;
use ureq::http::{Request, StatusCode};
use ureq::unversioned::resolver::DefaultResolver;
use ureq::unversioned::transport::{Connector, TcpConnector};

use crate::address::ManagerAddress;
use crate::call::Call;
use crate::tls::{Recognition, TlsConnector};

/// The time that a connection may take to a manager that is the only one.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The same if there are others to call.
const CONNECT_TIMEOUT_OF_SEVERAL: Duration = Duration::from_secs(1);
/// How long one of several managers may be silent before the others are asked whether one of them leads: then this one
/// is frozen or cut off, and will not answer any more.
const MANAGERS_SILENT: Duration = Duration::from_secs(3);
/// The time between two such questions, and that one may take.
const MANAGERS_LOOK: Duration = Duration::from_secs(1);
/// What a manager that leads says of its health.
const LEADS: &[u8] = b"ok, leads";
/// The most bytes of an answer about health.
const HEALTH_BYTES_MAX: u64 = 64 << 10;

/// The managers of a client.
pub(crate) struct Managers {
    pub(crate) addresses: Vec<ManagerAddress>,
    /// Their URLs, separated by commas.
    pub(crate) url: String,
    agent: Agent,
    pub(crate) recognition: Arc<Recognition>,
    /// The manager that has answered last, by its place in the list.
    current: AtomicUsize,
}

/// What a manager has answered.
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    /// The body, or why it broke off.
    pub(crate) body: Result<Vec<u8>, String>,
}

/// Why there is no answer.
pub(crate) enum NoAnswer {
    Failed(ureq::Error),
    /// The manager is silent, and the one at this place in the list leads.
    Deposed(usize),
}

impl Managers {
    /// The managers of a list. What a caller knows of their authority is the same for all.
    pub(crate) fn new(
        addresses: Vec<ManagerAddress>,
        token: Option<String>,
        authority: Option<Fingerprint>,
    ) -> Managers {
        // A proxy from the environment leads out of the network, and the manager is inside it.
        let connect_timeout = if addresses.len() > 1 { CONNECT_TIMEOUT_OF_SEVERAL } else { CONNECT_TIMEOUT };
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(None)
            .max_idle_connections(0)
            .timeout_connect(Some(connect_timeout))
            .user_agent(concat!("paramhub/", env!("CARGO_PKG_VERSION")))
            .build();
        let recognition = Arc::new(Recognition::new(token, authority));
        let connector = ().chain(TcpConnector::default()).chain(TlsConnector(recognition.clone()));
        let agent = Agent::with_parts(config, connector, DefaultResolver::default());
        let urls: Vec<&str> = addresses.iter().map(|address| address.url.as_str()).collect();
        let url = urls.join(",");
        Managers { addresses, url, agent, recognition, current: AtomicUsize::new(0) }
    }

    pub(crate) fn are_several(&self) -> bool {
        self.addresses.len() > 1
    }

    /// The place of the manager to call first.
    pub(crate) fn current(&self) -> usize {
        self.current.load(Ordering::Relaxed)
    }

    /// The manager at this place has answered.
    pub(crate) fn remember(&self, place: usize) {
        self.current.store(place, Ordering::Relaxed);
    }

    /// The place of the manager that calls itself by this URL.
    pub(crate) fn place_of(&self, url: &str) -> Option<usize> {
        let wanted = ManagerAddress::parse(url).ok()?;
        self.addresses.iter().position(|address| address.host_and_port() == wanted.host_and_port())
    }

    /// Sends a request to the manager at this place, and reads the answer.
    pub(crate) fn ask(&self, place: usize, call: &Call, left: Duration) -> Result<Answer, NoAnswer> {
        let url = format!("{}{}", self.addresses[place].url, call.path);
        if !self.are_several() {
            return exchange(&self.agent, &url, call, left).map_err(NoAnswer::Failed);
        }
        let (sender, receiver) = sync_channel(1);
        let exchanging = {
            let (agent, call, url) = (self.agent.clone(), call.clone(), url.clone());
            // The answer of a manager that was given up is not taken.
            move || drop(sender.send(exchange(&agent, &url, &call, left)))
        };
        if std::thread::Builder::new().name("paramhub-call".into()).spawn(exchanging).is_err() {
            return exchange(&self.agent, &url, call, left).map_err(NoAnswer::Failed);
        }
        let mut patience = MANAGERS_SILENT;
        loop {
            match receiver.recv_timeout(patience) {
                Ok(answer) => return answer.map_err(NoAnswer::Failed),
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(leader) = self.another_that_leads(place) {
                        return Err(NoAnswer::Deposed(leader));
                    }
                    patience = MANAGERS_LOOK;
                }
                Err(RecvTimeoutError::Disconnected) => unreachable!("an exchange ends with an answer"),
            }
        }
    }

    /// The place of another manager that says that it leads.
    fn another_that_leads(&self, place: usize) -> Option<usize> {
        (0..self.addresses.len()).filter(|&other| other != place).find(|&other| {
            let url = format!("{}/health", self.addresses[other].url);
            let health = exchange(&self.agent, &url, &Call::of_health(), MANAGERS_LOOK);
            health.is_ok_and(|answer| answer.body.is_ok_and(|text| text.starts_with(LEADS)))
        })
    }
}

fn exchange(agent: &Agent, url: &str, call: &Call, left: Duration) -> Result<Answer, ureq::Error> {
    let mut request = Request::builder().method(call.method).uri(url);
    if let Some(token) = &call.token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    if let Some((name, value)) = &call.header {
        request = request.header(*name, value);
    }
    let mut answer = match &call.body {
        Some(body) => {
            let request = request.header("content-type", "application/json").body(body.as_slice())?;
            agent.run(agent.configure_request(request).timeout_global(Some(left)).build())
        }
        None => {
            let request = request.body(())?;
            agent.run(agent.configure_request(request).timeout_global(Some(left)).build())
        }
    }?;
    let read = answer.body_mut().with_config().limit(call.answer_bytes_max).read_to_vec();
    Ok(Answer { status: answer.status(), body: read.map_err(|cause| cause.to_string()) })
}

impl Call {
    fn of_health() -> Call {
        Call {
            method: "GET",
            path: String::new(),
            token: None,
            header: None,
            body: None,
            timeout: MANAGERS_LOOK,
            repeatable: true,
            answer_bytes_max: HEALTH_BYTES_MAX,
        }
    }
}
