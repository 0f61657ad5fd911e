//! The hub's side of a stream's handshake, and a caller whose messages are cut, altered, repeated and left out as
//! random bytes select, in clear and inside TLS. Whatever arrives, nothing is admitted that the caller has not asked
//! for, and both ends have the same keys.
//!
//! A module of its own because two programs run it: libFuzzer (`fuzz/fuzz_targets/handshake.rs`) and a seeded test of
//! this crate.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use paramhub_core::auth::{Epoch, EpochSecret, Incarnation, Namespace, Nonce, Proof, StreamSecret};
use paramhub_core::key::Key;
use paramhub_core::stragglers::Stragglers;
use paramhub_core::stream_admission::{JobStreams, StreamSecrets, StreamTerms};
use paramhub_core::wire::{
    Attempt, CHALLENGE_MESSAGE_BYTES, Caller, CallerHandshake, Capabilities, Hello, VERDICT_BYTES, VERSION,
    Welcome,
};
use paramhub_transport::greeting::draw;
use paramhub_trust::{StreamListener, StreamTls};

use super::RateLimitedWarnings;
use super::pending::{ConnectionOrigin, HandshakeStep, PendingConnection};
use crate::core::stepped_hub::plan_with;
use crate::directory::{Directory, JobEntry};
use crate::local::JobMemory;

const EPOCH: u64 = 3;
const NAMESPACE: Namespace = Namespace([9; 16]);

static LISTENER: LazyLock<StreamListener> = LazyLock::new(|| StreamListener::new().expect("random numbers"));

/// How a handshake has ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The hub has closed the connection, or waits for what does not come.
    NotAdmitted,
    /// The hub has admitted the stream; `true` if the caller knows it.
    Admitted(bool),
}

/// Plays one handshake as the bytes of `random` select until there are none left. The first selects who the caller is.
pub(crate) fn exercise(mut random: impl FnMut() -> Option<u8>) -> Ended {
    let first = random().unwrap_or_default();
    let (caller_encrypts, job_encrypts) = (first & 1 != 0, first & 2 != 0);
    let knows_secret = first & 4 == 0;
    let (directory, hello) = job(job_encrypts);
    let secret = directory.stream_secret(&hello, VERSION).expect("the job is known");
    let mut caller = RandomCaller::new(hello, secret, knows_secret, caller_encrypts);
    let (mut peer, socket) = UnixStream::pair().expect("sockets");
    peer.set_nonblocking(true).expect("a socket");
    socket.set_nonblocking(true).expect("a socket");
    let from = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
    let deadline = Instant::now() + Duration::from_secs(3600);
    let origin = ConnectionOrigin::Interfaces(from, 0..1);
    let mut connection = PendingConnection::new(socket.into(), origin, deadline);
    let mut warnings = RateLimitedWarnings::default();
    let mut admitted = false;
    while let Some(action) = random() {
        caller.meddle(action, &mut random);
        let _ = peer.write(&std::mem::take(&mut caller.to_hub));
        match connection.advance(&directory, &LISTENER, &mut warnings) {
            Ok(HandshakeStep::Wait) => {}
            Ok(HandshakeStep::Admit(given, stream)) => {
                assert!(!admitted, "a connection is admitted once");
                admitted = true;
                assert_eq!(given, caller.hello(), "the hub admits what the caller has not asked for");
                assert!(knows_secret, "a caller without the secret was admitted");
                assert!(
                    caller_encrypts || !job_encrypts,
                    "a stream in clear was admitted to an encrypted job"
                );
                assert_eq!(stream.place.epoch, EPOCH);
                let keys = connection.keys().map(|keys| keys.mirrored());
                let known = caller.tls.as_ref().map(StreamTls::keys);
                assert_eq!(keys.is_some(), caller_encrypts);
                if let (Some(keys), Some(known)) = (keys, known) {
                    let same = (keys.cipher, keys.sending, keys.receiving)
                        == (known.cipher, known.sending, known.receiving);
                    assert!(same, "the ends of an encrypted stream have different keys");
                }
            }
            Ok(HandshakeStep::Probe(_)) => panic!("nobody asked for a probe"),
            Ok(HandshakeStep::Leave) | Err(_) => break,
        }
        let mut heard = [0; 8192];
        let heard = match peer.read(&mut heard) {
            Ok(0) => break,
            Ok(read) => &mut heard[..read],
            Err(error) if error.kind() == ErrorKind::WouldBlock => &mut [],
            Err(_) => break,
        };
        if action & 0x80 != 0
            && let Some(place) = random()
            && !heard.is_empty()
        {
            // What the hub says is altered on the way.
            let place = usize::from(place) * 7 % heard.len();
            heard[place] ^= 1 << (action & 7);
        }
        if caller.hear(heard).is_none() {
            break;
        }
        if admitted {
            break;
        }
    }
    if let Some(welcome) = caller.welcome {
        assert!(admitted, "the caller takes itself for admitted, and the hub does not");
        let expected = if caller_encrypts { Capabilities::ENCRYPTED } else { Capabilities::default() };
        assert_eq!((welcome.granted, welcome.epoch), (expected, EPOCH));
    }
    if admitted { Ended::Admitted(caller.welcome.is_some()) } else { Ended::NotAdmitted }
}

/// A hub's directory with one job of one rank, and the Hello of this rank.
fn job(encrypts: bool) -> (Directory, Hello) {
    let plan = plan_with(1, vec![Key::new("k", [3])], Stragglers::Wait, |_| {});
    let directory = Directory::default();
    let terms = StreamTerms {
        name: plan.name.clone(),
        secrets: StreamSecrets {
            nonce: Nonce([0; 32]),
            epoch: Epoch { number: EPOCH, secret: EpochSecret([5; 32]) },
            newest_epoch: EPOCH,
            version_1_ranks: Vec::new(),
        },
        composed: plan.composed.clone(),
        first_workers: 1,
        site: 0,
        position: 0,
        ports: [(0, plan.ports.clone())].into(),
        routes: [((0, 0), 0)].into(),
        standby_routes: [].into(),
        roles: [].into(),
        resumes: true,
        encrypts,
    };
    let memory = JobMemory::new(&plan.settings, plan.settings.features());
    let entry = JobEntry { streams: JobStreams::new(terms), state_slots: 0, memory };
    directory.insert(NAMESPACE, entry);
    let hello = Hello {
        caller: Caller::Worker { rank: 0, shares_parameters: false },
        interface: 0,
        core: 0,
        standby_route: None,
        offered: Capabilities::default(),
        required: Capabilities::default(),
        attempt: Attempt::Numbered { epoch: EPOCH, number: 0 },
        namespace: NAMESPACE,
        incarnation: Incarnation([1; 16]),
        placement: *plan.placement().hash().as_bytes(),
        challenge: draw().expect("random numbers"),
    };
    (directory, hello)
}

/// A caller whose messages change on their way.
struct RandomCaller {
    hello: Hello,
    handshake: CallerHandshake,
    secret: StreamSecret,
    /// Present if the caller encrypts.
    tls: Option<StreamTls>,
    /// What the caller has to say, before anybody meddles with it.
    outgoing: Vec<u8>,
    /// What is on its way to the hub.
    to_hub: Vec<u8>,
    /// What has come of the message that is awaited.
    incoming: Vec<u8>,
    has_proven: bool,
    welcome: Option<Welcome>,
}

impl RandomCaller {
    fn new(hello: Hello, secret: StreamSecret, knows_secret: bool, encrypts: bool) -> RandomCaller {
        let encrypted = if encrypts { Capabilities::ENCRYPTED } else { Capabilities::default() };
        let hello = Hello { offered: encrypted, required: encrypted, ..hello };
        let mut caller = RandomCaller {
            hello,
            handshake: CallerHandshake::begin(hello),
            secret: if knows_secret { secret } else { StreamSecret([3; 32]) },
            tls: encrypts.then(|| StreamTls::call().expect("random numbers")),
            outgoing: Vec::new(),
            to_hub: Vec::new(),
            incoming: Vec::new(),
            has_proven: false,
            welcome: None,
        };
        let message = *caller.handshake.hello_message();
        caller.say(&message);
        caller
    }

    fn hello(&self) -> Hello {
        self.hello
    }

    fn say(&mut self, message: &[u8]) {
        match &mut self.tls {
            None => self.outgoing.extend_from_slice(message),
            Some(tls) => {
                tls.write(message).expect("messages are short");
                tls.take_outgoing(&mut self.outgoing);
            }
        }
    }

    /// Moves some of what the caller says on to the hub, unchanged or not.
    fn meddle(&mut self, action: u8, random: &mut impl FnMut() -> Option<u8>) {
        let mut number = || usize::from(random().unwrap_or_default());
        match action & 0x1f {
            // All of it, or a part.
            0..24 => self.to_hub.append(&mut self.outgoing),
            24 | 25 => {
                let bytes = number().min(self.outgoing.len());
                self.to_hub.extend(self.outgoing.drain(..bytes));
            }
            // One bit of it altered.
            26 => {
                if let place @ 1.. = self.outgoing.len() {
                    let place = number() * 7 % place;
                    self.outgoing[place] ^= 1 << (action >> 5);
                }
            }
            // Some of it left out.
            27 => {
                let bytes = number().min(self.outgoing.len());
                self.outgoing.drain(..bytes);
            }
            // Some of it twice.
            28 => {
                let bytes = number().min(self.outgoing.len());
                self.to_hub.extend_from_slice(&self.outgoing[..bytes]);
            }
            // Other bytes before it.
            _ => {
                for _ in 0..number() {
                    self.to_hub.push(number() as u8);
                }
            }
        }
    }

    /// Hears the hub. `None` if it gives up.
    fn hear(&mut self, bytes: &[u8]) -> Option<()> {
        match &mut self.tls {
            None => self.incoming.extend_from_slice(bytes),
            Some(tls) => {
                tls.absorb(bytes).ok()?;
                tls.take_outgoing(&mut self.outgoing);
                let mut piece = [0; 512];
                loop {
                    match tls.read(&mut piece) {
                        Ok(0) => return None,
                        Ok(read) => self.incoming.extend_from_slice(&piece[..read]),
                        Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                        Err(_) => return None,
                    }
                }
            }
        }
        let bound = |caller: &RandomCaller| match &caller.tls {
            Some(tls) => caller.secret.bound_to(&tls.binding()),
            None => caller.secret,
        };
        if !self.has_proven && self.incoming.len() >= CHALLENGE_MESSAGE_BYTES {
            let challenge = *self.incoming.first_chunk().expect("a challenge");
            let secret = bound(self);
            let Proof(proof) = self.handshake.answer(&secret, &challenge).ok()?;
            self.incoming.drain(..CHALLENGE_MESSAGE_BYTES);
            self.has_proven = true;
            self.say(&proof);
        }
        if self.has_proven && self.welcome.is_none() && self.incoming.len() >= VERDICT_BYTES {
            let verdict = *self.incoming.first_chunk().expect("a verdict");
            let secret = bound(self);
            self.welcome = Some(self.handshake.clone().open(&secret, &verdict).ok()?);
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_undisturbed_handshake_is_admitted_if_the_job_takes_its_stream() {
        for first in 0..8_u8 {
            let mut undisturbed = std::iter::once(first).chain(std::iter::repeat_n(0, 12));
            let (encrypts, job_encrypts, knows_secret) = (first & 1 != 0, first & 2 != 0, first & 4 == 0);
            let is_taken = knows_secret && (encrypts || !job_encrypts);
            let expected = if is_taken { Ended::Admitted(true) } else { Ended::NotAdmitted };
            assert_eq!(exercise(|| undisturbed.next()), expected, "caller {first:03b}");
        }
    }

    #[test]
    fn whatever_happens_to_a_handshake_both_ends_agree() {
        let seed: u64 = u64::from_le_bytes(draw().expect("random numbers"));
        println!("seed {seed}");
        let mut state = seed | 1;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        };
        let (mut admitted, mut known) = (0, 0);
        let runs = 4000;
        for _ in 0..runs {
            let mut left = 24;
            let ended = exercise(|| {
                left -= 1;
                (left >= 0).then(&mut next)
            });
            admitted += u32::from(matches!(ended, Ended::Admitted(_)));
            known += u32::from(ended == Ended::Admitted(true));
        }
        assert!(admitted > runs / 50, "only {admitted} of {runs} handshakes came to an end");
        assert!(admitted < runs && known < admitted, "{admitted} admitted, {known} of them known");
    }
}
