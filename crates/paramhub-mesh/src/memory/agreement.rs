//! How the ranks of a mesh come to share memory, or agree that they do not.
//!
//! Rank 0 makes the memory and offers it to everybody over the connections that have just been made. Who can reach the name in
//! the offer is on its host, shows the token there, and gets the descriptors. Each rank answers whether it has the memory, and
//! rank 0 says whether all have. So they do all collectives the same way, or none would end.

use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_transport::shm::{connect, receive_segments, send_segments};
use paramhub_transport::{Events, Interest, Poller};
use rustix::io::Errno;
use rustix::net::SendFlags;

use super::commons::{Commons, RANKS_MAX};
use crate::config::MeshConfig;
use crate::error::MeshError;
use crate::wire::{NO_OFFER, OFFER_BYTES, Offer, TOKEN_BYTES};

/// How often the caller is asked whether to go on.
const ASK_EVERY: Duration = Duration::from_millis(100);
/// How long rank 0 may take to hand out what it has offered.
const HANDING: Duration = Duration::from_secs(5);
/// Descriptors of one message.
const HANDFUL: usize = 4;
/// Processes that may stand at the name beside those that are expected.
const STRANGERS_MAX: usize = 16;
const LISTENER: u64 = u64::MAX;
/// Tokens of guests begin here; those below are ranks.
const GUESTS: u64 = 1 << 32;

/// Memory, or why there is none.
pub(crate) type Agreed = Result<Commons, Arc<str>>;

/// Until when, and whether, to go on.
pub(crate) struct Patience<'a> {
    pub(crate) deadline: Instant,
    pub(crate) goes_on: &'a mut dyn FnMut() -> bool,
}

/// Agrees with all others. `sockets` are connections whose handshake is over, by rank.
pub(crate) fn agree(
    config: &MeshConfig,
    sockets: &[Option<OwnedFd>],
    patience: Patience<'_>,
) -> Result<Agreed, MeshError> {
    if config.size == 1 {
        return Ok(Err("there is one rank".into()));
    }
    let outcome = match config.rank {
        0 => offer(config, sockets, patience),
        _ => accept(config, sockets[0].as_ref().expect("rank 0 is another one"), patience),
    };
    match outcome {
        Ok(agreed) => Ok(agreed),
        Err(Failure::Mesh(error)) => Err(error),
        // What became of the connection the mesh's thread will say better.
        Err(Failure::System(error)) => Ok(Err(format!("agreeing on it failed: {error}").into())),
    }
}

enum Failure {
    System(io::Error),
    Mesh(MeshError),
}

impl<E: Into<io::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure::System(error.into())
    }
}

/// Rank 0's side.
fn offer(
    config: &MeshConfig,
    sockets: &[Option<OwnedFd>],
    patience: Patience<'_>,
) -> Result<Agreed, Failure> {
    let others = || sockets.iter().flatten();
    let (offering, why) = match Offering::new(config) {
        Ok(offering) => (Some(offering), None),
        Err(why) => (None, Some(why)),
    };
    let wire = offering.as_ref().map_or(NO_OFFER, |offering| offering.offer.encode());
    for socket in others() {
        // One that cannot be written to has gone; it will not answer either.
        let _ = say(socket, &wire);
    }
    let Some(mut offering) = offering else { return Ok(Err(why.expect("there is one"))) };
    let answers = offering.serve(config, sockets, patience)?;
    let refusal = answers.iter().position(|answer| *answer == Some(false));
    for socket in others() {
        let _ = say(socket, &[u8::from(refusal.is_none())]);
    }
    Ok(match refusal {
        None => Ok(offering.commons),
        Some(rank) => Err(format!("rank {rank} does not share this host's memory").into()),
    })
}

/// Memory that is being handed out.
struct Offering {
    commons: Commons,
    offer: Offer,
    listener: UnixListener,
    /// Those who have not shown a token yet; the oldest goes first.
    guests: Vec<(u64, UnixStream)>,
    next_guest: u64,
}

impl Offering {
    fn new(config: &MeshConfig) -> Result<Offering, Arc<str>> {
        if !config.shares_memory {
            return Err("rank 0 was told not to share memory".into());
        }
        if config.size > RANKS_MAX {
            return Err(format!("there are more than {RANKS_MAX} ranks").into());
        }
        let made = || -> io::Result<Offering> {
            let offer = Offer { name: draw()?, token: draw()? };
            let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(offer.path())?)?;
            listener.set_nonblocking(true)?;
            let commons = Commons::create(config.size)?;
            Ok(Offering { commons, offer, listener, guests: Vec::new(), next_guest: GUESTS })
        };
        made().map_err(|error| format!("rank 0 cannot make it: {error}").into())
    }

    /// Hands out descriptors until every rank has answered; what they did, by rank.
    fn serve(
        &mut self,
        config: &MeshConfig,
        sockets: &[Option<OwnedFd>],
        patience: Patience<'_>,
    ) -> Result<Vec<Option<bool>>, Failure> {
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
            let timeout = wait_time(config, &patience, &open)?;
            if !(patience.goes_on)() {
                return Err(Failure::Mesh(MeshError::Interrupted { who: config.who() }));
            }
            poller.wait(&mut events, Some(timeout))?;
            for event in events.iter() {
                match event.token {
                    LISTENER => self.welcome(&poller),
                    guest @ GUESTS.. => self.attend(guest, &poller),
                    rank => {
                        let socket = sockets[rank as usize].as_ref().expect("it was added");
                        let mut answer = [0];
                        match rustix::io::read(socket, &mut answer) {
                            Err(Errno::AGAIN | Errno::INTR) => continue,
                            read => answers[rank as usize] = Some(read == Ok(1) && answer[0] == 1),
                        }
                        poller.remove(socket)?;
                    }
                }
            }
        }
    }

    fn welcome(&mut self, poller: &Poller) {
        while let Ok((guest, _)) = self.listener.accept() {
            if self.guests.len() >= self.commons.size() as usize + STRANGERS_MAX {
                let (_, oldest) = self.guests.remove(0);
                // Fails only if the descriptor is not in the set.
                let _ = poller.remove(&oldest);
            }
            let token = self.next_guest;
            self.next_guest += 1;
            if guest.set_nonblocking(true).is_ok() && poller.add(&guest, token, Interest::READABLE).is_ok() {
                self.guests.push((token, guest));
            }
        }
    }

    /// A guest has said something: if it is the token, it gets what it came for. Either way it is done.
    fn attend(&mut self, token: u64, poller: &Poller) {
        let Some(place) = self.guests.iter().position(|(guest, _)| *guest == token) else { return };
        let (_, mut guest) = self.guests.remove(place);
        let _ = poller.remove(&guest);
        let mut shown = [0; TOKEN_BYTES];
        if guest.read_exact(&mut shown).is_ok() && is_equal(&shown, &self.offer.token) {
            for handful in self.commons.descriptors().chunks(HANDFUL) {
                // A rank that does not get them says so.
                if send_segments(&guest, &[handful.len() as u8], handful).is_err() {
                    return;
                }
            }
        }
    }
}

/// Every other rank's side.
fn accept(config: &MeshConfig, socket: &OwnedFd, mut patience: Patience<'_>) -> Result<Agreed, Failure> {
    let mut wire = [0; OFFER_BYTES];
    hear(config, socket, &mut wire, &mut patience)?;
    let offer = Offer::decode(&wire).map_err(|reason| {
        Failure::Mesh(MeshError::Protocol { who: config.who(), rank: 0, reason: reason.into() })
    })?;
    let Some(offer) = offer else { return Ok(Err("rank 0 does not share memory".into())) };
    let fetched = match config.shares_memory {
        true => fetch(config, &offer),
        false => Err(io::Error::other("this rank was told not to share memory")),
    };
    say(socket, &[u8::from(fetched.is_ok())])?;
    let mut verdict = [0];
    hear(config, socket, &mut verdict, &mut patience)?;
    Ok(match (fetched, verdict) {
        (Ok(commons), [1]) => Ok(commons),
        (Ok(_), _) => Err("another rank does not share this host's memory".into()),
        (Err(error), _) => Err(format!("rank 0's memory cannot be had: {error}").into()),
    })
}

/// Gets the memory.
fn fetch(config: &MeshConfig, offer: &Offer) -> io::Result<Commons> {
    let rank_0 = connect(&offer.path(), HANDING)?;
    rank_0.set_read_timeout(Some(HANDING))?;
    send_segments(&rank_0, &offer.token, &[])?;
    let wanted = 1 + config.size as usize;
    let mut descriptors = Vec::with_capacity(wanted);
    while descriptors.len() < wanted {
        let (heard, mut handful) = receive_segments(&rank_0, &mut [0])?;
        if heard == 0 || handful.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        descriptors.append(&mut handful);
    }
    descriptors.truncate(wanted);
    Commons::adopt(config.rank, config.size, descriptors)
}

/// Sends a few bytes, for which a connection without anything under way has room.
fn say(socket: &OwnedFd, bytes: &[u8]) -> io::Result<()> {
    loop {
        match rustix::net::send(socket, bytes, SendFlags::NOSIGNAL) {
            Ok(sent) if sent == bytes.len() => return Ok(()),
            Ok(_) => return Err(io::ErrorKind::WriteZero.into()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Fills `bytes` with what rank 0 says.
fn hear(
    config: &MeshConfig,
    socket: &OwnedFd,
    bytes: &mut [u8],
    patience: &mut Patience<'_>,
) -> Result<(), Failure> {
    let poller = Poller::new()?;
    poller.add(socket, 0, Interest::READABLE)?;
    let mut events = Events::with_capacity(1);
    let mut heard = 0;
    while heard < bytes.len() {
        match rustix::io::read(socket.as_fd(), &mut bytes[heard..]) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(read) => heard += read,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let timeout = wait_time(config, patience, &[0])?;
                if !(patience.goes_on)() {
                    return Err(Failure::Mesh(MeshError::Interrupted { who: config.who() }));
                }
                poller.wait(&mut events, Some(timeout))?;
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// How long to wait before asking again whether to go on.
fn wait_time(config: &MeshConfig, patience: &Patience<'_>, open: &[u32]) -> Result<Duration, Failure> {
    let left = patience.deadline.saturating_duration_since(Instant::now());
    if left > Duration::ZERO {
        return Ok(left.min(ASK_EVERY));
    }
    let why: Arc<str> = "it is connected, but has not joined all others".into();
    Err(Failure::Mesh(MeshError::Join {
        who: config.who(),
        size: config.size,
        seconds: config.join_timeout.as_secs_f64(),
        missing: open.iter().map(|&rank| (rank, Arc::clone(&why))).collect(),
    }))
}

/// Takes as long wherever they differ.
fn is_equal(left: &[u8; TOKEN_BYTES], right: &[u8; TOKEN_BYTES]) -> bool {
    left.iter().zip(right).fold(0, |differences, (left, right)| differences | (left ^ right)) == 0
}

/// Bytes that nobody can foresee.
fn draw<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::thread;

    use paramhub_core::auth::Nonce;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn config(rank: u32, size: usize) -> MeshConfig {
        MeshConfig::new(rank, Nonce([0; 32]), vec![([127, 0, 0, 1], 1).into(); size])
    }

    /// Rank 0 of `size`, and the other ends of its connections.
    fn rank_0(
        size: usize,
        patience: Duration,
    ) -> (thread::JoinHandle<Result<Agreed, MeshError>>, Vec<UnixStream>) {
        let (near, far): (Vec<_>, Vec<_>) = (1..size).map(|_| UnixStream::pair().unwrap()).unzip();
        let rank_0 = thread::spawn(move || {
            let sockets = near.into_iter().map(|socket| {
                socket.set_nonblocking(true).unwrap();
                Some(OwnedFd::from(socket))
            });
            let sockets: Vec<_> = std::iter::once(None).chain(sockets).collect();
            let deadline = Instant::now() + patience;
            agree(&config(0, size), &sockets, Patience { deadline, goes_on: &mut || true })
        });
        for socket in &far {
            socket.set_read_timeout(Some(LONG)).unwrap();
        }
        (rank_0, far)
    }

    fn offered(socket: &mut UnixStream) -> Offer {
        let mut wire = [0; OFFER_BYTES];
        socket.read_exact(&mut wire).unwrap();
        Offer::decode(&wire).unwrap().unwrap()
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
        // Some say nothing, some the wrong thing, some leave: nobody gets anything, and nobody is kept waiting.
        let _silent = connect(&offer.path(), LONG).unwrap();
        drop(connect(&offer.path(), LONG).unwrap());
        for said in [&[0_u8; TOKEN_BYTES][..], b"short"] {
            let mut stranger = connect(&offer.path(), LONG).unwrap();
            stranger.write_all(said).unwrap();
            stranger.set_read_timeout(Some(LONG)).unwrap();
            let got = receive_segments(&stranger, &mut [0; 8]);
            assert!(got.is_err() || got.is_ok_and(|(heard, descriptors)| heard + descriptors.len() == 0));
        }
        let commons: Vec<Commons> = (1..3).map(|rank| fetch(&config(rank, 3), &offer).unwrap()).collect();
        for socket in &mut others {
            socket.write_all(&[1]).unwrap();
        }
        assert_eq!([verdict(&mut others[0]), verdict(&mut others[1])], [1, 1]);
        let first = rank_0.join().unwrap().unwrap().unwrap();
        // It is one memory.
        first.put(5, 17, b"bytes");
        for commons in &commons {
            let mut seen = [0; 5];
            commons.take(0, 5, 17, &mut seen);
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
    fn what_is_no_offer_is_named() {
        let (near, mut far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        far.write_all(&[7; OFFER_BYTES]).unwrap();
        let deadline = Instant::now() + LONG;
        let sockets = [Some(OwnedFd::from(near)), None];
        let agreed = agree(&config(1, 2), &sockets, Patience { deadline, goes_on: &mut || true });
        assert!(matches!(agreed, Err(MeshError::Protocol { rank: 0, .. })));
    }
}
