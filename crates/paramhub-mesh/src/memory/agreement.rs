//! The protocol by which the ranks of a mesh agree to share memory, or not to.
//!
//! Rank 0 makes the memory and offers it to all ranks over the new connections. A rank on rank 0's host can
//! reach the name in the offer; it shows the token there and gets the descriptors. Each rank reports whether
//! it has the memory, and rank 0 answers whether all have. So all ranks do the collectives the same way,
//! without which none would end.

use std::io::{self, Read};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_transport::greeting::draw;
use paramhub_transport::shm::{connect, receive_segments, send_segments};
use paramhub_transport::{Events, Interest, Poller};

use super::shared_segment::{RANKS_MAX, SharedSegment};
use crate::config::MeshConfig;
use crate::error::MeshError;
use crate::socket::PeerSocket;
use crate::wire::{NO_OFFER, OFFER_BYTES, SegmentOffer, TOKEN_BYTES};

/// The interval at which the caller's function is asked whether to go on.
const ASK_EVERY: Duration = Duration::from_millis(100);
/// The time that rank 0 may take to send the memory that it has offered.
const HANDOUT_TIMEOUT: Duration = Duration::from_secs(5);
/// The number of descriptors in one message.
const DESCRIPTORS_PER_MESSAGE: usize = 4;
/// Unexpected connections to the name that may wait beside the expected ones.
const UNEXPECTED_MAX: usize = 16;
const LISTENER: u64 = u64::MAX;
/// The first poller token of a connection; smaller tokens are ranks.
const FIRST_CONNECTION_TOKEN: u64 = 1 << 32;

/// The shared memory, or why there is none.
pub(crate) type SharedMemoryAgreement = Result<SharedSegment, Arc<str>>;

/// The time that joining may take, and a callback that may end it before.
pub(crate) struct JoinDeadline<'a> {
    pub(crate) at: Instant,
    pub(crate) goes_on: &'a mut dyn FnMut(&[u32]) -> bool,
}

/// Agrees with all other ranks. `sockets` are connections whose handshake is over, by rank.
pub(crate) fn agree(
    config: &MeshConfig,
    sockets: &mut [Option<PeerSocket>],
    deadline: JoinDeadline<'_>,
) -> Result<SharedMemoryAgreement, MeshError> {
    if config.size == 1 {
        return Ok(Err("there is one rank".into()));
    }
    let outcome = match config.rank {
        0 => offer(config, sockets, deadline),
        _ => accept(config, sockets[0].as_mut().expect("rank 0 is another one"), deadline),
    };
    match outcome {
        Ok(agreed) => Ok(agreed),
        Err(AgreementError::Mesh(error)) => Err(error),
        // The mesh's thread will report in more detail what happened to the connection.
        Err(AgreementError::System(error)) => Ok(Err(format!("agreeing on it failed: {error}").into())),
    }
}

enum AgreementError {
    System(io::Error),
    Mesh(MeshError),
}

impl<E: Into<io::Error>> From<E> for AgreementError {
    fn from(error: E) -> Self {
        AgreementError::System(error.into())
    }
}

/// The side of rank 0.
fn offer(
    config: &MeshConfig,
    sockets: &mut [Option<PeerSocket>],
    deadline: JoinDeadline<'_>,
) -> Result<SharedMemoryAgreement, AgreementError> {
    let (server, why) = match SegmentServer::new(config) {
        Ok(server) => (Some(server), None),
        Err(why) => (None, Some(why)),
    };
    let wire = server.as_ref().map_or(NO_OFFER, |server| server.offer.encode());
    for socket in sockets.iter_mut().flatten() {
        // A rank whose socket cannot be written has gone and will not answer either.
        let _ = socket.send_few(&wire);
    }
    let Some(mut server) = server else { return Ok(Err(why.expect("there is one"))) };
    let answers = server.serve(config, sockets, deadline)?;
    let refusal = answers.iter().position(|answer| *answer == Some(false));
    for socket in sockets.iter_mut().flatten() {
        let _ = socket.send_few(&[u8::from(refusal.is_none())]);
    }
    Ok(match refusal {
        None => Ok(server.segment),
        Some(rank) => Err(format!("rank {rank} does not share this host's memory").into()),
    })
}

/// Sends the descriptors of the memory to ranks that show the token.
struct SegmentServer {
    segment: SharedSegment,
    offer: SegmentOffer,
    listener: UnixListener,
    /// Connections that have not shown a token yet; the oldest is dropped first.
    connections: Vec<(u64, UnixStream)>,
    next_token: u64,
}

impl SegmentServer {
    fn new(config: &MeshConfig) -> Result<SegmentServer, Arc<str>> {
        if !config.shares_memory {
            return Err("rank 0 is configured not to share memory".into());
        }
        if config.size > RANKS_MAX {
            return Err(format!("there are more than {RANKS_MAX} ranks").into());
        }
        let made = || -> io::Result<SegmentServer> {
            let offer = SegmentOffer { name: draw()?, token: draw()? };
            let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(offer.path())?)?;
            listener.set_nonblocking(true)?;
            let segment = SharedSegment::create(config.size)?;
            Ok(SegmentServer {
                segment,
                offer,
                listener,
                connections: Vec::new(),
                next_token: FIRST_CONNECTION_TOKEN,
            })
        };
        made().map_err(|error| format!("rank 0 cannot make it: {error}").into())
    }

    /// Sends descriptors until every rank has answered; returns the answers by rank.
    fn serve(
        &mut self,
        config: &MeshConfig,
        sockets: &mut [Option<PeerSocket>],
        deadline: JoinDeadline<'_>,
    ) -> Result<Vec<Option<bool>>, AgreementError> {
        let poller = Poller::new()?;
        poller.add(&self.listener, LISTENER, Interest::READABLE)?;
        for (rank, socket) in sockets.iter().enumerate() {
            if let Some(socket) = socket {
                poller.add(socket, rank as u64, Interest::READABLE)?;
            }
        }
        let mut answers = vec![None; sockets.len()];
        let mut events = Events::with_capacity(64);
        loop {
            let open: Vec<u32> = (1..config.size).filter(|rank| answers[*rank as usize].is_none()).collect();
            if open.is_empty() {
                return Ok(answers);
            }
            let timeout = wait_time(config, &deadline, &open)?;
            if !(deadline.goes_on)(&[]) {
                return Err(AgreementError::Mesh(MeshError::Interrupted { this_rank: config.this_rank() }));
            }
            poller.wait(&mut events, Some(timeout))?;
            for event in events.iter() {
                match event.token {
                    LISTENER => self.accept_all(&poller),
                    connection @ FIRST_CONNECTION_TOKEN.. => self.check_token(connection, &poller),
                    rank => {
                        let socket = sockets[rank as usize].as_mut().expect("it was added");
                        let mut answer = [0];
                        match socket.receive_few(&mut answer, &mut 0) {
                            Ok(false) => continue,
                            heard => answers[rank as usize] = Some(heard.is_ok() && answer[0] == 1),
                        }
                        poller.remove(&*socket)?;
                    }
                }
            }
        }
    }

    fn accept_all(&mut self, poller: &Poller) {
        while let Ok((connection, _)) = self.listener.accept() {
            if self.connections.len() >= self.segment.size() as usize + UNEXPECTED_MAX {
                let (_, oldest) = self.connections.remove(0);
                // This fails only if the descriptor is not in the set.
                let _ = poller.remove(&oldest);
            }
            let token = self.next_token;
            self.next_token += 1;
            if connection.set_nonblocking(true).is_ok()
                && poller.add(&connection, token, Interest::READABLE).is_ok()
            {
                self.connections.push((token, connection));
            }
        }
    }

    /// Handles the bytes of a connection: sends it the descriptors if they are the token. Either way the
    /// connection is done.
    fn check_token(&mut self, token: u64, poller: &Poller) {
        let Some(place) = self.connections.iter().position(|(connection, _)| *connection == token) else {
            return;
        };
        let (_, mut connection) = self.connections.remove(place);
        let _ = poller.remove(&connection);
        let mut shown = [0; TOKEN_BYTES];
        if connection.read_exact(&mut shown).is_ok() && is_equal(&shown, &self.offer.token) {
            for batch in self.segment.descriptors().chunks(DESCRIPTORS_PER_MESSAGE) {
                // A rank that does not get them answers so.
                if send_segments(&connection, &[batch.len() as u8], batch).is_err() {
                    return;
                }
            }
        }
    }
}

/// The side of every other rank.
fn accept(
    config: &MeshConfig,
    socket: &mut PeerSocket,
    mut deadline: JoinDeadline<'_>,
) -> Result<SharedMemoryAgreement, AgreementError> {
    let mut wire = [0; OFFER_BYTES];
    receive_bytes(config, socket, &mut wire, &mut deadline)?;
    let offer = SegmentOffer::decode(&wire).map_err(|reason| {
        AgreementError::Mesh(MeshError::Protocol {
            this_rank: config.this_rank(),
            rank: 0,
            reason: reason.into(),
        })
    })?;
    let Some(offer) = offer else { return Ok(Err("rank 0 does not share memory".into())) };
    let fetched = match config.shares_memory {
        true => fetch(config, &offer),
        false => Err(io::Error::other("this rank is configured not to share memory")),
    };
    socket.send_few(&[u8::from(fetched.is_ok())])?;
    let mut verdict = [0];
    receive_bytes(config, socket, &mut verdict, &mut deadline)?;
    Ok(match (fetched, verdict) {
        (Ok(segment), [1]) => Ok(segment),
        (Ok(_), _) => Err("another rank does not share this host's memory".into()),
        (Err(error), _) => Err(format!("rank 0's memory cannot be had: {error}").into()),
    })
}

/// Fetches the memory from rank 0.
fn fetch(config: &MeshConfig, offer: &SegmentOffer) -> io::Result<SharedSegment> {
    let rank_0 = connect(&offer.path(), HANDOUT_TIMEOUT)?;
    rank_0.set_read_timeout(Some(HANDOUT_TIMEOUT))?;
    send_segments(&rank_0, &offer.token, &[])?;
    let wanted = 1 + config.size as usize;
    let mut descriptors = Vec::with_capacity(wanted);
    while descriptors.len() < wanted {
        let (received, mut batch) = receive_segments(&rank_0, &mut [0])?;
        if received == 0 || batch.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        descriptors.append(&mut batch);
    }
    descriptors.truncate(wanted);
    SharedSegment::adopt(config.rank, config.size, descriptors)
}

/// Fills `bytes` from rank 0.
fn receive_bytes(
    config: &MeshConfig,
    socket: &mut PeerSocket,
    bytes: &mut [u8],
    deadline: &mut JoinDeadline<'_>,
) -> Result<(), AgreementError> {
    let poller = Poller::new()?;
    poller.add(&*socket, 0, Interest::READABLE)?;
    let mut events = Events::with_capacity(1);
    let mut filled = 0;
    while !socket.receive_few(bytes, &mut filled)? {
        let timeout = wait_time(config, deadline, &[0])?;
        if !(deadline.goes_on)(&[]) {
            return Err(AgreementError::Mesh(MeshError::Interrupted { this_rank: config.this_rank() }));
        }
        poller.wait(&mut events, Some(timeout))?;
    }
    Ok(())
}

/// Returns the time to wait before asking again whether to go on; fails at the deadline.
fn wait_time(
    config: &MeshConfig,
    deadline: &JoinDeadline<'_>,
    open: &[u32],
) -> Result<Duration, AgreementError> {
    let left = deadline.at.saturating_duration_since(Instant::now());
    if left > Duration::ZERO {
        return Ok(left.min(ASK_EVERY));
    }
    let why: Arc<str> = "it is connected, but has not joined all others".into();
    Err(AgreementError::Mesh(MeshError::Join {
        this_rank: config.this_rank(),
        size: config.size,
        seconds: config.join_timeout.as_secs_f64(),
        missing: open.iter().map(|&rank| (rank, Arc::clone(&why))).collect(),
    }))
}

/// Compares in constant time, so that the time does not show where they differ.
fn is_equal(left: &[u8; TOKEN_BYTES], right: &[u8; TOKEN_BYTES]) -> bool {
    left.iter().zip(right).fold(0, |differences, (left, right)| differences | (left ^ right)) == 0
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::OwnedFd;
    use std::thread;

    use paramhub_core::auth::Nonce;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn config(rank: u32, size: usize) -> MeshConfig {
        MeshConfig::new(rank, Nonce([0; 32]), vec![([127, 0, 0, 1], 1).into(); size])
    }

    /// Rank 0 of `size` ranks, and the other ends of its connections.
    fn rank_0(
        size: usize,
        deadline: Duration,
    ) -> (thread::JoinHandle<Result<SharedMemoryAgreement, MeshError>>, Vec<UnixStream>) {
        let (near, far): (Vec<_>, Vec<_>) = (1..size).map(|_| UnixStream::pair().unwrap()).unzip();
        let rank_0 = thread::spawn(move || {
            let sockets = near.into_iter().map(|socket| {
                socket.set_nonblocking(true).unwrap();
                Some(PeerSocket::from(OwnedFd::from(socket)))
            });
            let mut sockets: Vec<_> = std::iter::once(None).chain(sockets).collect();
            let deadline = Instant::now() + deadline;
            agree(&config(0, size), &mut sockets, JoinDeadline { at: deadline, goes_on: &mut |_| true })
        });
        for socket in &far {
            socket.set_read_timeout(Some(LONG)).unwrap();
        }
        (rank_0, far)
    }

    fn offered(socket: &mut UnixStream) -> SegmentOffer {
        let mut wire = [0; OFFER_BYTES];
        socket.read_exact(&mut wire).unwrap();
        SegmentOffer::decode(&wire).unwrap().unwrap()
    }

    fn verdict(socket: &mut UnixStream) -> u8 {
        let mut verdict = [9];
        socket.read_exact(&mut verdict).unwrap();
        verdict[0]
    }

    #[test]
    fn descriptors_are_for_those_with_the_token() {
        let (rank_0, mut others) = rank_0(3, LONG);
        let offer = offered(&mut others[0]);
        assert_eq!(offered(&mut others[1]), offer);
        // One connection stays silent, one shows a wrong token, some leave: none gets the memory, and no rank
        // waits for them.
        let _silent = connect(&offer.path(), LONG).unwrap();
        drop(connect(&offer.path(), LONG).unwrap());
        for sent in [&[0_u8; TOKEN_BYTES][..], b"short"] {
            let mut socket = connect(&offer.path(), LONG).unwrap();
            socket.write_all(sent).unwrap();
            socket.set_read_timeout(Some(LONG)).unwrap();
            let got = receive_segments(&socket, &mut [0; 8]);
            assert!(
                got.is_err() || got.is_ok_and(|(received, descriptors)| received + descriptors.len() == 0)
            );
        }
        let segment: Vec<SharedSegment> =
            (1..3).map(|rank| fetch(&config(rank, 3), &offer).unwrap()).collect();
        for socket in &mut others {
            socket.write_all(&[1]).unwrap();
        }
        assert_eq!([verdict(&mut others[0]), verdict(&mut others[1])], [1, 1]);
        let first = rank_0.join().unwrap().unwrap().unwrap();
        // All of them map the same memory.
        first.put(5, 17, b"bytes");
        for segment in &segment {
            let mut seen = [0; 5];
            segment.take(0, 5, 17, &mut seen);
            assert_eq!(&seen, b"bytes");
        }
    }

    #[test]
    fn one_that_has_none_keeps_all_from_it() {
        let (rank_0, mut others) = rank_0(3, LONG);
        let offer = offered(&mut others[0]);
        assert_eq!(offered(&mut others[1]), offer);
        fetch(&config(1, 3), &offer).unwrap();
        others[0].write_all(&[1]).unwrap();
        others[1].write_all(&[0]).unwrap();
        assert_eq!([verdict(&mut others[0]), verdict(&mut others[1])], [0, 0]);
        let why = rank_0.join().unwrap().unwrap().err().unwrap();
        assert!(why.contains("rank 2"), "{why}");
        assert!(fetch(&config(2, 3), &offer).is_err(), "it is not offered any more");
    }

    #[test]
    fn one_that_dies_is_left_to_the_mesh_and_one_that_is_silent_is_missing() {
        let (dead, mut others) = rank_0(3, LONG);
        drop(others.pop());
        others[0].write_all(&[1]).unwrap();
        assert!(dead.join().unwrap().unwrap().is_err());
        let (waits, _others) = rank_0(3, Duration::from_millis(300));
        let error = waits.join().unwrap().err().unwrap().to_string();
        assert!(error.contains("rank 1 is missing") && error.contains("rank 2 is missing"), "{error}");
    }

    #[test]
    fn bytes_that_are_no_offer_break_the_protocol() {
        let (near, mut far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        far.write_all(&[7; OFFER_BYTES]).unwrap();
        let deadline = Instant::now() + LONG;
        let mut sockets = [Some(PeerSocket::from(OwnedFd::from(near))), None];
        let agreed =
            agree(&config(1, 2), &mut sockets, JoinDeadline { at: deadline, goes_on: &mut |_| true });
        assert!(matches!(agreed, Err(MeshError::Protocol { rank: 0, .. })));
    }
}
