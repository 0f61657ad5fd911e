//! Opens a broken stream again: to the same core, by the same path or, in a job whose streams may move, to another
//! address of its hub or from another address of this host. In a job with standbys the stream may also go to the other hub
//! that has the chunks.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use paramhub_core::auth::StreamSecret;
use paramhub_core::placement::{Route, RouteId};
use paramhub_core::resuming::{AfterRound, Attempts, BrokenPath, HANDSHAKE, HANDSHAKE_OF_TWO, path_order};
use paramhub_core::wire::{Attempt, Direction, Hello, Refusal};
use paramhub_transport::dialling::dial_from;
use paramhub_transport::interface::Selector;
use paramhub_transport::{Connection, TcpStream, Waker};

use crate::dial::Dialler;
use crate::error::{WorkerError, WorkerId};
use crate::interfaces::Interfaces;
use crate::job::Shared;
use crate::share_hubs::{Asked, ShareHubs};

/// How long a hub may say that a job has ended before a worker believes it whose job may go on at another hub.
const ENDED_AFTER: Duration = Duration::from_secs(3);

/// How long a worker looks for the other hub that it knows before it asks the manager which others there are.
const ASKS_AFTER: Duration = Duration::from_millis(200);

/// An event that concerns the streams, for the I/O thread of a job whose streams are opened again.
pub(crate) enum StreamEvent {
    /// An interface of this host with this address does not work.
    InterfaceDown { address: IpAddr, what: String },
    /// A stream was opened again, or cannot be opened.
    ResumeOver { lane: usize, outcome: Result<Box<ResumedStream>, WorkerError> },
}

/// A stream that takes the place of another.
pub(crate) struct ResumedStream {
    pub(crate) stream: Connection,
    /// The address that was dialled.
    pub(crate) hub: Arc<str>,
    /// The local address from which it was dialled.
    pub(crate) source: Option<IpAddr>,
    /// Connections whose handshake failed here and may have succeeded at the hub. They stay open until a
    /// frame comes on the stream, so that the hub does not take their end for the end of this process.
    pub(crate) unheard: Vec<std::net::TcpStream>,
    /// Why the previous stream broke.
    pub(crate) why: String,
}

/// Sends events to the I/O thread.
#[derive(Clone)]
pub(crate) struct StreamEventSender {
    pub(crate) events: SyncSender<StreamEvent>,
    pub(crate) waker: Waker,
}

impl StreamEventSender {
    /// False once the I/O thread has ended. An event that finds no room is dropped: the stream's silence
    /// reports the failure, too.
    pub(crate) fn send(&self, event: StreamEvent) -> bool {
        let sent = self.events.try_send(event);
        self.waker.wake();
        !matches!(sent, Err(TrySendError::Disconnected(_)))
    }
}

/// Opens the streams of a job again.
pub(crate) struct Redialler {
    pub(crate) who: WorkerId,
    pub(crate) secret: StreamSecret,
    /// The job's epoch.
    pub(crate) epoch: u64,
    pub(crate) encrypts: bool,
    /// Whether streams may go by other paths than before.
    pub(crate) moves: bool,
    /// The hubs of each share, in a job with standbys: another may have taken over from the one that is lost.
    pub(crate) share_hubs: Option<ShareHubs>,
    pub(crate) selector: Selector,
    pub(crate) shared: Weak<Shared>,
    pub(crate) chunk_bytes: usize,
    pub(crate) send_bytes: Option<usize>,
    pub(crate) receive_bytes: Option<usize>,
    /// The endpoint of each lane.
    pub(crate) endpoints: Vec<StreamEndpoint>,
}

/// The core that a lane leads to.
pub(crate) struct StreamEndpoint {
    /// The hello that was sent, but for the challenge.
    pub(crate) hello: Hello,
    /// The route, by its number and as the placement has it.
    pub(crate) route: (RouteId, Route),
    /// The addresses of its hub in the placement, that of the route first.
    pub(crate) places: Vec<RoutePlace>,
    /// The number of the newest stream: 0 for the first. A stream whose handshake has failed here may have
    /// opened at the hub, so each one that is begun has a number of its own.
    pub(crate) attempts: AtomicU32,
}

/// One place at which a hub has the chunks of a route.
pub(crate) struct RoutePlace {
    /// The address of the hub's interface.
    pub(crate) address: Arc<str>,
    /// The interface and the core there, as the hello names them.
    pub(crate) interface: u16,
    pub(crate) core: u16,
    /// The route, if the hub is not its own in the placement.
    pub(crate) standby_route: Option<RouteId>,
}

/// How a lane's stream broke.
pub(crate) struct StreamFailure {
    /// The hub's address.
    pub(crate) hub: Arc<str>,
    /// The local address of the stream.
    pub(crate) source: Option<IpAddr>,
    pub(crate) broken: BrokenPath,
    /// What happened, also to this host's own interface.
    pub(crate) reason: String,
    /// How long to try.
    pub(crate) patience: Duration,
}

impl StreamFailure {
    fn why(&self) -> String {
        match self.broken {
            BrokenPath::OwnInterface => format!("its {}", self.reason),
            BrokenPath::Somewhere | BrokenPath::Nowhere => {
                format!("the stream to {}: {}", self.hub, self.reason)
            }
        }
    }
}

/// Why one attempt has not led to a stream.
enum NotOpened {
    /// No process listens at the hub's address: the hub's has ended.
    HubGone(WorkerError),
    Failed(WorkerError),
}

struct DialAttempt<'a> {
    place: &'a RoutePlace,
    address: SocketAddr,
    source: Option<IpAddr>,
}

impl Redialler {
    /// Opens a lane's stream again, on the calling thread, or returns why it cannot.
    pub(crate) fn resume(
        &self,
        lane: usize,
        failure: &StreamFailure,
    ) -> Result<Box<ResumedStream>, WorkerError> {
        let begun = Instant::now();
        let tries = Attempts::new(begun, failure.patience);
        let (mut last_error, mut unheard) =
            ("no interface of this worker leads there".to_owned(), Vec::new());
        let mut ended: Option<(Instant, WorkerError)> = None;
        loop {
            let round = Instant::now();
            let (mut is_hub_gone, mut is_strange, mut is_waited_for) = (false, false, false);
            let (mut gone, mut tried) = (0, 0);
            let interfaces = Interfaces::learn_running(&self.selector);
            let endpoint = &self.endpoints[lane];
            let known = self.share_hubs.as_ref();
            let known = known.map(|hubs| hubs.places(endpoint.route.0, &endpoint.route.1));
            let (places, seen) =
                known.as_ref().map_or((&endpoint.places, 0), |(places, seen)| (places, *seen));
            let attempts = match self.moves {
                true => self.attempts(places, failure, &interfaces),
                false => self.attempts_as_before(endpoint, places, failure),
            };
            if attempts.is_empty() && failure.broken == BrokenPath::OwnInterface {
                return Err(self.lost_error(failure, "no other that leads to a hub is left"));
            }
            for attempt in attempts {
                if tries.are_over(Instant::now()) {
                    break;
                }
                tried += 1;
                match self.open(lane, &attempt, &interfaces, &tries, &mut unheard) {
                    Ok((stream, source)) => {
                        let (hub, why) = (Arc::clone(&attempt.place.address), failure.why());
                        return Ok(Box::new(ResumedStream { stream, hub, source, unheard, why }));
                    }
                    // Another hub has come to this address, with another part in the job, or none.
                    Err(NotOpened::Failed(
                        error @ WorkerError::Refused { refusal: Refusal::Route | Refusal::WrongNonce, .. },
                    )) if self.share_hubs.is_some() => {
                        (is_strange, last_error) = (true, error.to_string());
                    }
                    // One of the two hubs may have lost sight of the job, which goes on at the other.
                    Err(NotOpened::Failed(error @ WorkerError::Refused { refusal, .. }))
                        if self.share_hubs.is_some() && refusal != Refusal::Busy =>
                    {
                        last_error = error.to_string();
                        ended.get_or_insert((round, error));
                    }
                    Err(NotOpened::Failed(error @ WorkerError::Refused { .. }))
                        if self.share_hubs.is_some() =>
                    {
                        (is_waited_for, last_error) = (true, error.to_string());
                    }
                    Err(NotOpened::HubGone(error)) if self.share_hubs.is_some() => {
                        (gone, last_error) = (gone + 1, error.to_string());
                    }
                    // The loss of the stream is what ends the job, not that this hub resumes none.
                    Err(NotOpened::Failed(WorkerError::Refused {
                        refusal: Refusal::Route, message, ..
                    })) => {
                        return Err(
                            self.lost_error(failure, &format!("the hub does not resume it: {message}"))
                        );
                    }
                    Err(NotOpened::Failed(error @ WorkerError::Refused { refusal, .. }))
                        if refusal != Refusal::Busy =>
                    {
                        return Err(error);
                    }
                    Err(NotOpened::HubGone(error)) => {
                        (is_hub_gone, last_error) = (true, error.to_string());
                        break;
                    }
                    Err(NotOpened::Failed(error)) => last_error = error.to_string(),
                }
            }
            let are_gone = tried > 0 && gone == tried;
            // The other hub mostly takes over within some time. Before this worker gives up, it asks once more.
            let is_in_vain = are_gone || is_strange || ended.is_some();
            let asks = is_in_vain || begun.elapsed() >= ASKS_AFTER;
            let since = if is_in_vain { round } else { begun };
            let asked = self.share_hubs.as_ref().filter(|_| asks).map(|hubs| hubs.ask(seen, since));
            if asked == Some(Asked::Elsewhere) {
                ended = None;
                continue;
            }
            // A hub that is about to serve or to end its part says more about how the job ended than the manager does.
            if let Some(Asked::Over(why)) = &asked
                && ended.is_none()
                && !is_waited_for
                && !are_gone
            {
                return Err(self.lost_error(failure, why));
            }
            // If the manager is away, another hub may have become the standby, and take over when it is back.
            let are_known = asked != Some(Asked::NoAnswer);
            // Whatever the hubs that are there have said is said by all of them, or by one for long, and none is about to serve.
            let counts = |since: Instant| gone + 1 >= tried || since.elapsed() >= ENDED_AFTER;
            if let Some((_, error)) =
                ended.take_if(|(since, _)| are_known && !is_waited_for && counts(*since))
            {
                return Err(error);
            }
            is_hub_gone |= self.share_hubs.is_some() && are_known && are_gone;
            let is_over = self.shared.upgrade().is_none_or(|shared| shared.inbox.closed().is_some());
            match tries.after_round(Instant::now(), is_over, is_hub_gone) {
                AfterRound::Again(pause) => std::thread::sleep(pause),
                AfterRound::GiveUp => {
                    let seconds = failure.patience.as_secs_f64();
                    let why = match (is_hub_gone, self.moves) {
                        (true, _) => format!("nobody listens there any more ({last_error})"),
                        (false, true) => format!("no way led there within {seconds} s ({last_error})"),
                        (false, false) => {
                            format!("it could not be dialled again within {seconds} s ({last_error})")
                        }
                    };
                    return Err(self.lost_error(failure, &why));
                }
            }
        }
    }

    /// Every path to the hub, sorted so that those with least in common with the broken one come first.
    fn attempts<'a>(
        &self,
        places: &'a [RoutePlace],
        failure: &StreamFailure,
        interfaces: &Interfaces,
    ) -> Vec<DialAttempt<'a>> {
        let mut attempts = Vec::new();
        for place in places {
            // A name that cannot be resolved now is looked up again in the next round.
            for address in place.address.to_socket_addrs().into_iter().flatten() {
                let sources = interfaces.sources(address);
                attempts.extend(sources.into_iter().map(|source| DialAttempt { place, address, source }));
            }
        }
        attempts.sort_by_key(|attempt| {
            let is_same_hub = attempt.place.address == failure.hub;
            path_order(failure.broken, is_same_hub, attempt.source == failure.source)
        });
        attempts
    }

    /// The path of the broken stream, chosen as at first, or those to both hubs that have the chunks. An interface that is down
    /// for a moment counts, so that its streams do not move.
    fn attempts_as_before<'a>(
        &self,
        endpoint: &StreamEndpoint,
        places: &'a [RoutePlace],
        failure: &StreamFailure,
    ) -> Vec<DialAttempt<'a>> {
        let Ok(interfaces) = Interfaces::learn(&self.selector) else { return Vec::new() };
        let mut attempts = Vec::new();
        let leads_there = |place: &&RoutePlace| self.share_hubs.is_some() || place.address == failure.hub;
        for place in places.iter().filter(leads_there) {
            for address in place.address.to_socket_addrs().into_iter().flatten() {
                if let Ok(source) = interfaces.source(address, usize::from(endpoint.hello.interface)) {
                    attempts.push(DialAttempt { place, address, source });
                }
            }
        }
        attempts
            .sort_by_key(|attempt| path_order(failure.broken, attempt.place.address == failure.hub, true));
        attempts
    }

    fn open(
        &self,
        lane: usize,
        attempt: &DialAttempt<'_>,
        interfaces: &Interfaces,
        tries: &Attempts,
        unheard: &mut Vec<std::net::TcpStream>,
    ) -> Result<(Connection, Option<IpAddr>), NotOpened> {
        let (hub, place) = (&attempt.place.address, attempt.place);
        let handshake = if self.share_hubs.is_some() { HANDSHAKE_OF_TWO } else { HANDSHAKE };
        let by = |patience| tries.by(Instant::now(), patience);
        let dialler = Dialler {
            who: &self.who,
            secret: &self.secret,
            interfaces,
            encrypts: self.encrypts,
            deadline: by(tries.connect_timeout() + handshake),
        };
        let left = by(tries.connect_timeout())
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1));
        let failed = |error: std::io::Error| {
            let is_hub_gone = error.kind() == ErrorKind::ConnectionRefused;
            let error = dialler.fail(hub, error.to_string());
            if is_hub_gone { NotOpened::HubGone(error) } else { NotOpened::Failed(error) }
        };
        let socket = dial_from(attempt.source, attempt.address, left).map_err(failed)?;
        let source = socket.local_addr().ok().map(|address| address.ip());
        unheard.push(socket.try_clone().map_err(failed)?);
        let endpoint = &self.endpoints[lane];
        let number = endpoint.attempts.fetch_add(1, Ordering::Relaxed) + 1;
        let attempt = Attempt::Numbered { epoch: self.epoch, number };
        let RoutePlace { interface, core, standby_route, .. } = *place;
        let hello = Hello { attempt, interface, core, standby_route, ..endpoint.hello };
        let opened = dialler.greet(hub, socket, hello).map_err(|error| {
            if let WorkerError::Refused { .. } = error {
                // The hub has not taken it for a stream.
                unheard.pop();
            }
            NotOpened::Failed(error)
        })?;
        let stream = TcpStream::new(opened.socket, Direction::ToWorker, self.chunk_bytes)
            .map(|stream| stream.with_encryption(opened.keys.as_ref()))
            .and_then(|stream| stream.with_buffer_bytes(self.send_bytes, self.receive_bytes))
            .map_err(failed)?;
        unheard.pop();
        Ok((Connection::Tcp(stream), source))
    }

    fn lost_error(&self, failure: &StreamFailure, why: &str) -> WorkerError {
        let who = self.who.clone();
        match failure.broken {
            BrokenPath::OwnInterface => {
                WorkerError::InterfaceDown { who, what: format!("{}; {why}", failure.reason).into() }
            }
            BrokenPath::Somewhere | BrokenPath::Nowhere => {
                let reason = format!("{}, and {why}", failure.reason).into();
                WorkerError::Lost { who, hub: Arc::clone(&failure.hub), rank: None, reason }
            }
        }
    }
}
