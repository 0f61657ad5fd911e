//! Lets streams in: accepts connections on every interface, proves that each knows its job's nonce, and hands it to the
//! core of its route. Strangers get a bounded time, a bounded place and nothing else.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use paramhub_core::auth::{Nonce, Proof};
use paramhub_core::placement::RouteId;
use paramhub_core::wire::{
    CHALLENGE_BYTES, HELLO_BYTES, Hello, PROOF_BYTES, Refusal, Verdict, stream_proofs,
};
use paramhub_transport::{Events, Interest, Poller, Waker};
use tracing::{debug, warn};

use crate::core::{CoreCommand, CoreHandle};
use crate::directory::Directory;

/// How long a connection may take to prove itself.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long a refused connection may take to read why.
const FAREWELL: Duration = Duration::from_secs(1);
/// Connections that may be proving themselves at once; the oldest makes room for the newest.
const GUESTS_MAX: usize = 4096;
const WAKER: u64 = u64::MAX;

/// The thread that accepts.
pub(crate) struct Door {
    poller: Poller,
    waker: Waker,
    stop: Arc<AtomicBool>,
    listeners: Vec<TcpListener>,
    /// How often each of them is listed among the hub's interfaces, side by side.
    copies: u16,
    guests: HashMap<u64, Guest>,
    next_token: u64,
    directory: Arc<Directory>,
    cores: Vec<CoreHandle>,
}

/// Stops a door.
#[derive(Clone, Debug)]
pub(crate) struct DoorStop {
    waker: Waker,
    stop: Arc<AtomicBool>,
}

impl DoorStop {
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
    }
}

/// A connection that has not proven itself.
struct Guest {
    socket: TcpStream,
    from: SocketAddr,
    /// Those that are the listener it came in by.
    interfaces: Range<u16>,
    deadline: Instant,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    stage: Stage,
}

enum Stage {
    Hello,
    Proof {
        hello: Hello,
        challenge: [u8; CHALLENGE_BYTES],
    },
    /// The welcome is on its way.
    Welcome(Hello, RouteId),
    /// The refusal is on its way; then our side closes and the guest may read it in peace.
    Refusal {
        closed: bool,
    },
}

/// What to do with a guest next.
enum Next {
    Wait,
    Leave,
    Admit(Hello, RouteId),
}

impl Door {
    pub(crate) fn new(
        listeners: Vec<TcpListener>,
        copies: u16,
        directory: Arc<Directory>,
        cores: Vec<CoreHandle>,
    ) -> io::Result<(Door, DoorStop)> {
        let (poller, waker) = (Poller::new()?, Waker::new()?);
        poller.add(&waker, WAKER, Interest::READABLE)?;
        for (token, listener) in listeners.iter().enumerate() {
            listener.set_nonblocking(true)?;
            poller.add(listener, token as u64, Interest::READABLE)?;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let handle = DoorStop { waker: waker.clone(), stop: stop.clone() };
        let next_token = listeners.len() as u64;
        let guests = HashMap::new();
        Ok((Door { poller, waker, stop, listeners, copies, guests, next_token, directory, cores }, handle))
    }

    /// Accepts until stopped.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(256);
        while !self.stop.load(Ordering::Acquire) {
            self.poller.wait(&mut events, Some(Duration::from_millis(500)))?;
            for event in events.iter() {
                match event.token {
                    WAKER => self.waker.drain(),
                    token if token < self.listeners.len() as u64 => self.accept(token as u16),
                    token => self.attend(token),
                }
            }
            self.show_out_the_late();
        }
        Ok(())
    }

    fn accept(&mut self, listener: u16) {
        loop {
            match self.listeners[usize::from(listener)].accept() {
                Ok((socket, from)) => self.welcome(socket, from, listener),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    // Out of descriptors, for example: the connection stays queued, and a moment's rest keeps the
                    // level-triggered poller from spinning on it. Strangers must not hold the last descriptors.
                    warn!("cannot accept a connection: {error}");
                    self.dismiss_oldest();
                    std::thread::sleep(Duration::from_millis(20));
                    return;
                }
            }
        }
    }

    fn welcome(&mut self, socket: TcpStream, from: SocketAddr, listener: u16) {
        if self.guests.len() >= GUESTS_MAX {
            self.dismiss_oldest();
        }
        let token = self.next_token;
        self.next_token += 1;
        let ready =
            socket.set_nonblocking(true).and_then(|()| self.poller.add(&socket, token, Interest::READABLE));
        if ready.is_ok() {
            let deadline = Instant::now() + HANDSHAKE;
            let interfaces = listener * self.copies..(listener + 1) * self.copies;
            let (inbox, outbox, stage) = (Vec::with_capacity(HELLO_BYTES), Vec::new(), Stage::Hello);
            self.guests.insert(token, Guest { socket, from, interfaces, deadline, inbox, outbox, stage });
        }
    }

    fn attend(&mut self, token: u64) {
        let Some(guest) = self.guests.get_mut(&token) else { return };
        match guest.attend(&self.directory) {
            Ok(Next::Wait) => {
                let interest = if guest.outbox.is_empty() { Interest::READABLE } else { Interest::BOTH };
                if self.poller.modify(&guest.socket, token, interest).is_err() {
                    self.dismiss(token);
                }
            }
            Ok(Next::Leave) => {
                self.dismiss(token);
            }
            Ok(Next::Admit(hello, route)) => {
                if let Some(guest) = self.dismiss(token) {
                    let core = &self.cores[usize::from(hello.core)];
                    let (namespace, rank, socket) = (hello.namespace, hello.rank, guest.socket);
                    core.send(CoreCommand::Adopt { namespace, route, rank, socket });
                }
            }
            Err(error) => {
                debug!("{} left during its handshake: {error}", guest.from);
                self.dismiss(token);
            }
        }
    }

    fn dismiss(&mut self, token: u64) -> Option<Guest> {
        let guest = self.guests.remove(&token)?;
        // Fails only if the descriptor is not in the set, and then there is nothing to take out.
        let _ = self.poller.remove(&guest.socket);
        Some(guest)
    }

    fn dismiss_oldest(&mut self) {
        if let Some(&oldest) = self.guests.keys().min() {
            self.dismiss(oldest);
        }
    }

    fn show_out_the_late(&mut self) {
        let now = Instant::now();
        let late: Vec<u64> =
            self.guests.iter().filter(|(_, guest)| now >= guest.deadline).map(|(&token, _)| token).collect();
        for token in late {
            if let Some(guest) = self.dismiss(token) {
                debug!("{} did not finish its handshake within {HANDSHAKE:?}", guest.from);
            }
        }
    }
}

impl Guest {
    /// Reads and answers as far as it goes without waiting.
    fn attend(&mut self, directory: &Directory) -> io::Result<Next> {
        loop {
            match self.speak() {
                Ok(true) => {}
                Ok(false) => return Ok(Next::Wait),
                // It has its place, and the others count on it: its core finds the stream broken and says whose it was.
                Err(_) if matches!(self.stage, Stage::Welcome(..)) => {}
                Err(error) => return Err(error),
            }
            match &mut self.stage {
                Stage::Welcome(hello, route) => return Ok(Next::Admit(*hello, *route)),
                Stage::Refusal { closed } => {
                    if !std::mem::replace(closed, true) {
                        self.socket.shutdown(std::net::Shutdown::Write)?;
                    }
                    return self.hear_out();
                }
                Stage::Hello | Stage::Proof { .. } => {}
            }
            let wanted = if matches!(self.stage, Stage::Hello) { HELLO_BYTES } else { PROOF_BYTES };
            if !self.listen(wanted)? {
                return Ok(Next::Wait);
            }
            let heard = std::mem::take(&mut self.inbox);
            self.answer(&heard, directory)?;
        }
    }

    /// Sends what is to be sent; `true` when nothing is left.
    fn speak(&mut self) -> io::Result<bool> {
        while !self.outbox.is_empty() {
            match self.socket.write(&self.outbox) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    self.outbox.drain(..written);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Reads up to `wanted` bytes, not one more: what follows them belongs to the core. `true` when they are here.
    fn listen(&mut self, wanted: usize) -> io::Result<bool> {
        let mut buffer = [0; HELLO_BYTES];
        while self.inbox.len() < wanted {
            match self.socket.read(&mut buffer[..wanted - self.inbox.len()]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.inbox.extend_from_slice(&buffer[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Reads what a refused guest still says, so that closing does not reset the connection over an unread refusal.
    fn hear_out(&mut self) -> io::Result<Next> {
        let mut ignored = [0; 4096];
        for _ in 0..16 {
            match self.socket.read(&mut ignored) {
                Ok(0) => return Ok(Next::Leave),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Next::Wait),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Next::Wait)
    }

    fn answer(&mut self, heard: &[u8], directory: &Directory) -> io::Result<()> {
        match &self.stage {
            Stage::Hello => match Hello::decode(heard.try_into().expect("as many bytes as were wanted")) {
                Ok(hello) => {
                    let mut challenge = [0; CHALLENGE_BYTES];
                    getrandom::fill(&mut challenge).map_err(io::Error::other)?;
                    self.outbox.extend_from_slice(&challenge);
                    self.stage = Stage::Proof { hello, challenge };
                }
                Err(error) => {
                    // Where a verdict is looked for: behind a challenge.
                    self.outbox.extend_from_slice(&[0; CHALLENGE_BYTES]);
                    self.refuse(Refusal::Protocol, error.to_string());
                }
            },
            Stage::Proof { hello, challenge } => {
                let hello = *hello;
                // An unknown job is checked against a nonce nobody has, so that it takes as long as a known one.
                let nonce = directory.nonce(hello.namespace);
                let (worker, hub) = stream_proofs(&nonce.unwrap_or(Nonce([0; 32])), &hello, challenge);
                let given = Proof(heard.try_into().expect("as many bytes as were wanted"));
                if !given.matches(&worker) || nonce.is_none() {
                    let message = "the job is unknown here or the secret is wrong: check PARAMHUB_JOB and PARAMHUB_SECRET";
                    self.refuse(Refusal::WrongNonce, message.to_string());
                    return Ok(());
                }
                match directory.admit(&hello, &self.interfaces) {
                    Ok(route) => {
                        self.outbox.extend_from_slice(&Verdict::Welcome { proof: hub }.encode());
                        self.stage = Stage::Welcome(hello, route);
                    }
                    Err((refusal, message)) => self.refuse(refusal, message),
                }
            }
            Stage::Welcome(..) | Stage::Refusal { .. } => unreachable!("nothing is asked after the verdict"),
        }
        Ok(())
    }

    fn refuse(&mut self, refusal: Refusal, message: String) {
        warn!("turned {} away: {message}", self.from);
        self.outbox.extend_from_slice(&Verdict::Refused { refusal, message }.encode());
        self.stage = Stage::Refusal { closed: false };
        self.deadline = self.deadline.min(Instant::now() + FAREWELL);
    }
}
