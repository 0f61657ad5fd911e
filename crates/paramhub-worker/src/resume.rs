//! Opens a stream that was cut again: to the same core, by another address of its hub or from another of this host's.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use paramhub_core::auth::Nonce;
use paramhub_core::limits::RESUME_S;
use paramhub_core::wire::{Caller, Direction, Hello, Refusal};
use paramhub_transport::interface::Selector;
use paramhub_transport::socket::dial_from;
use paramhub_transport::{Connection, TcpStream, Waker};

use crate::dial::Dialler;
use crate::error::{Who, WorkerError};
use crate::interfaces::Interfaces;
use crate::job::Shared;

/// How long one way may take to connect before the next is tried.
const CONNECT: Duration = Duration::from_secs(1);
/// How long the handshake may take: a hub that has much to do answers late.
const HANDSHAKE: Duration = Duration::from_secs(3);
/// Between two rounds over all ways.
const PAUSE: Duration = Duration::from_millis(200);

/// News for the I/O thread of a job that goes on.
pub(crate) enum News {
    /// An interface of this host with this address does not work.
    Down { address: IpAddr, what: String },
    /// A stream was opened again, or cannot be.
    Resumed { lane: usize, outcome: Result<Box<Resumed>, WorkerError> },
}

/// A stream that takes the place of another.
pub(crate) struct Resumed {
    pub(crate) stream: Connection,
    /// The address that was dialled.
    pub(crate) hub: Arc<str>,
    /// The address it was dialled from.
    pub(crate) source: Option<IpAddr>,
    /// Attempts that came to nothing here, and may have come to something at the hub: their end is not to look like this process's
    /// before the stream is heard.
    pub(crate) kept: Vec<std::net::TcpStream>,
    /// Why the one before was cut.
    pub(crate) why: String,
}

/// Takes news to the I/O thread.
#[derive(Clone)]
pub(crate) struct Teller {
    pub(crate) news: SyncSender<News>,
    pub(crate) waker: Waker,
}

impl Teller {
    /// False once nobody listens. What there is no room for is dropped: silence tells it, too.
    pub(crate) fn tell(&self, news: News) -> bool {
        let sent = self.news.try_send(news);
        self.waker.wake();
        !matches!(sent, Err(TrySendError::Disconnected(_)))
    }
}

/// What it takes to open the streams of a job again.
pub(crate) struct Ways {
    pub(crate) who: Who,
    pub(crate) nonce: Nonce,
    pub(crate) selector: Selector,
    pub(crate) shared: Weak<Shared>,
    pub(crate) chunk_bytes: usize,
    pub(crate) send_bytes: Option<usize>,
    pub(crate) receive_bytes: Option<usize>,
    /// Of every lane.
    pub(crate) routes: Vec<Way>,
}

/// Where a lane leads.
pub(crate) struct Way {
    /// As it was sent, but for the challenge.
    pub(crate) hello: Hello,
    /// All addresses of the hub, that of the route first.
    pub(crate) addresses: Vec<Arc<str>>,
}

/// How a lane was cut.
pub(crate) struct Cut {
    /// Where it led.
    pub(crate) hub: Arc<str>,
    /// The address it left from.
    pub(crate) source: Option<IpAddr>,
    /// What happened to this host's own interface, if that was it.
    pub(crate) own: Option<String>,
    /// What else happened.
    pub(crate) reason: String,
}

impl Cut {
    fn why(&self) -> String {
        match &self.own {
            Some(down) => format!("its {down}"),
            None => format!("the stream to {}: {}", self.hub, self.reason),
        }
    }
}

struct Attempt<'a> {
    hub: &'a Arc<str>,
    address: SocketAddr,
    source: Option<IpAddr>,
}

impl Ways {
    /// Opens a lane's stream again, on the calling thread, or says why it cannot be. Waits up to [`RESUME_S`].
    pub(crate) fn resume(&self, lane: usize, cut: &Cut) -> Result<Box<Resumed>, WorkerError> {
        let deadline = Instant::now() + Duration::from_secs(RESUME_S);
        let (mut last, mut kept) = ("no interface of this worker leads there".to_owned(), Vec::new());
        loop {
            let interfaces = Interfaces::learn_running(&self.selector);
            let attempts = self.attempts(&self.routes[lane], cut, &interfaces);
            if attempts.is_empty() && cut.own.is_some() {
                return Err(self.lost(cut, "no other that leads to a hub is left"));
            }
            for attempt in attempts {
                if Instant::now() >= deadline {
                    break;
                }
                match self.open(lane, &attempt, &interfaces, deadline, &mut kept) {
                    Ok((stream, source)) => {
                        let (hub, why) = (Arc::clone(attempt.hub), cut.why());
                        return Ok(Box::new(Resumed { stream, hub, source, kept, why }));
                    }
                    Err(error @ WorkerError::Refused { refusal, .. }) if refusal != Refusal::Busy => {
                        return Err(error);
                    }
                    Err(error) => last = error.to_string(),
                }
            }
            let is_over = self.shared.upgrade().is_none_or(|shared| shared.inbox.closed().is_some());
            if is_over || Instant::now() + PAUSE >= deadline {
                let why = format!("no other way led there within {RESUME_S} s ({last})");
                return Err(self.lost(cut, &why));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Every way there, those that have least in common with the one that was cut first.
    fn attempts<'a>(&self, way: &'a Way, cut: &Cut, interfaces: &Interfaces) -> Vec<Attempt<'a>> {
        let mut attempts = Vec::new();
        for hub in &way.addresses {
            // A name that cannot be resolved for now is asked for again.
            for address in hub.to_socket_addrs().into_iter().flatten() {
                let sources = interfaces.sources(address);
                attempts.extend(sources.into_iter().map(|source| Attempt { hub, address, source }));
            }
        }
        let in_common = |attempt: &Attempt<'_>| {
            let same_hub = *attempt.hub == cut.hub;
            match cut.own {
                // The hub's end is not at fault.
                Some(_) => usize::from(!same_hub),
                None => usize::from(same_hub) + usize::from(attempt.source == cut.source),
            }
        };
        attempts.sort_by_key(in_common);
        attempts
    }

    fn open(
        &self,
        lane: usize,
        attempt: &Attempt<'_>,
        interfaces: &Interfaces,
        deadline: Instant,
        kept: &mut Vec<std::net::TcpStream>,
    ) -> Result<(Connection, Option<IpAddr>), WorkerError> {
        let hub = attempt.hub;
        let by = |patience| deadline.min(Instant::now() + patience);
        let dialler =
            Dialler { who: &self.who, nonce: &self.nonce, interfaces, deadline: by(CONNECT + HANDSHAKE) };
        let left = by(CONNECT).saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let failed = |error: std::io::Error| dialler.fail(hub, error.to_string());
        let socket = dial_from(attempt.source, attempt.address, left).map_err(failed)?;
        let source = socket.local_addr().ok().map(|address| address.ip());
        kept.push(socket.try_clone().map_err(failed)?);
        let hello = self.routes[lane].hello;
        let Caller::Worker { rank, .. } = hello.caller else { unreachable!("workers dial hubs as workers") };
        let caller = Caller::Worker { rank, shares_parameters: false, resumes: true };
        let (socket, _) = dialler.greet(hub, socket, Hello { caller, ..hello })?;
        let stream = TcpStream::new(socket, Direction::ToWorker, self.chunk_bytes)
            .and_then(|stream| stream.with_buffer_bytes(self.send_bytes, self.receive_bytes))
            .map_err(failed)?;
        kept.pop();
        Ok((Connection::Tcp(stream), source))
    }

    fn lost(&self, cut: &Cut, why: &str) -> WorkerError {
        let who = self.who.clone();
        match &cut.own {
            Some(down) => WorkerError::InterfaceDown { who, what: format!("{down}; {why}").into() },
            None => {
                let reason = format!("{}, and {why}", cut.reason).into();
                WorkerError::Lost { who, hub: Arc::clone(&cut.hub), rank: None, reason }
            }
        }
    }
}
