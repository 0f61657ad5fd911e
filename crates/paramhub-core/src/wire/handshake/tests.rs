use proptest::prelude::*;

use super::*;
use crate::auth::{Incarnation, Namespace, Proof, StreamSecret};

const SECRET: StreamSecret = StreamSecret([9; 32]);
const WELCOME: Welcome = Welcome { granted: Capabilities(0), epoch: 7, state_slots: 2 };

fn hello() -> Hello {
    Hello {
        caller: Caller::Worker { rank: 3, shares_parameters: true },
        interface: 1,
        core: 2,
        standby_route: Some(7),
        offered: Capabilities(Capabilities::ENCRYPTED.0 | Capabilities::FABRIC.0),
        required: Capabilities::default(),
        attempt: Attempt::Numbered { epoch: 7, number: 5 },
        namespace: Namespace([1; 16]),
        incarnation: Incarnation([2; 16]),
        placement: [3; 32],
        challenge: [4; 32],
    }
}

/// The Hello of the same worker in version 1, byte by byte.
fn hello_of_version_1(flags: u8) -> Vec<u8> {
    let mut wire = b"PHUB".to_vec();
    wire.extend([1, 0, flags, 0, 3, 0, 0, 0, 1, 0, 2, 0]);
    wire.extend([[1; 16], [2; 16]].concat());
    wire.extend([[3; 32], [4; 32]].concat());
    wire
}

/// The hub's handshake with a caller of version 2, up to the proof, which it returns as well.
fn meet(hello: Hello) -> (CallerHandshake, HubHandshake, Proof) {
    let mut caller = CallerHandshake::begin(hello);
    let hub = HubHandshake::begin(caller.hello_message(), [5; 32]).unwrap();
    let proof = caller.answer(&SECRET, hub.challenge_message().try_into().unwrap()).unwrap();
    (caller, hub, proof)
}

#[test]
fn a_hello_round_trips_and_other_protocols_are_recognised() {
    let site = Caller::Hub { site: 300, route: 700 };
    let worker = Caller::Worker { rank: 3, shares_parameters: false };
    for caller in [hello().caller, worker, site, Caller::Prober] {
        let hello = Hello { caller, ..hello() };
        assert_eq!(Hello::decode(&hello.encode()), Ok((hello, 2)));
    }
    let changed = |at: usize, to: u8| {
        let mut wire = hello().encode();
        wire[at] = to;
        Hello::decode(&wire)
    };
    assert_eq!(changed(0, b'G'), Err(HandshakeError::Magic));
    assert_eq!(changed(6, 143), Err(HandshakeError::Length(143)));
    assert_eq!(changed(8, 2), Err(HandshakeError::Caller(2)), "a standby, in a later release");
    assert_eq!(changed(9, 2), Err(HandshakeError::Reserved(2)));
    assert_eq!(changed(30, 1), Err(HandshakeError::Reserved(1)));
    assert_eq!(changed(44, 1), Err(HandshakeError::Reserved(1 << 32)));
    assert_eq!(changed(10, 3), Err(HandshakeError::CallerVersion { oldest: 3, newest: 2 }));
}

#[test]
fn a_caller_of_the_next_version_is_served_in_this_one() {
    let mut wire = [&hello().encode()[..], &[6; 56]].concat();
    wire[4] = 3;
    wire[6] = 200;
    wire[30] = 0xff;
    assert_eq!(hello_length(&wire[..8].try_into().unwrap()), Ok(200));
    let hub = HubHandshake::begin(&wire, [5; 32]).unwrap();
    assert_eq!((hub.version(), hub.hello()), (2, &hello()));
    // Its proof covers all that it has sent.
    let proves =
        |hello: &[u8]| SECRET.prove(crate::auth::Purpose::StreamCaller, &[hello, hub.challenge_message()]);
    assert!(hub.is_proven(&SECRET, &proves(&wire)) && !hub.is_proven(&SECRET, &proves(&wire[..144])));
    wire[10] = 3;
    let refused = HubHandshake::begin(&wire, [5; 32]).unwrap_err();
    assert_eq!(refused, HandshakeError::CallerVersion { oldest: 3, newest: 3 });
}

#[test]
fn a_worker_of_version_1_is_served_as_before() {
    let wire = hello_of_version_1(1);
    assert_eq!(hello_length(&wire[..8].try_into().unwrap()), Ok(112));
    let hub = HubHandshake::begin(&wire, [5; 32]).unwrap();
    let expected = Hello {
        standby_route: None,
        offered: Capabilities::default(),
        attempt: Attempt::Unnumbered { resumes: false },
        ..hello()
    };
    assert_eq!((hub.version(), hub.hello()), (1, &expected));
    assert_eq!(hub.challenge_message(), [5; 32]);
    let resumed = HubHandshake::begin(&hello_of_version_1(4), [5; 32]).unwrap();
    assert_eq!(resumed.hello().attempt, Attempt::Unnumbered { resumes: true });
    for hubs_and_probes in [2, 3, 5, 255] {
        let refused = HubHandshake::begin(&hello_of_version_1(hubs_and_probes), [5; 32]).unwrap_err();
        assert_eq!(refused, HandshakeError::Reserved(u64::from(hubs_and_probes)));
    }
    // Written out as docs/protocol.md had it for version 1.
    let keyed = |label: &[u8]| {
        let mut hasher = blake3::Hasher::new_keyed(&SECRET.0);
        for part in [label, &wire, &[5; 32]] {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        *hasher.finalize().as_bytes()
    };
    assert!(hub.is_proven(&SECRET, &Proof(keyed(b"paramhub v1 stream worker"))));
    assert!(!hub.is_proven(&SECRET, &Proof(keyed(b"paramhub v2 stream caller"))));
    let welcome = hub.welcome(&SECRET, &WELCOME);
    assert_eq!((welcome.len(), &welcome[..4]), (1060, &[0, 0, 2, 0][..]));
    assert_eq!(welcome[4..36], keyed(b"paramhub v1 stream hub"));
    let refused = hub.refusal(Refusal::Stale, "too old");
    assert_eq!((refused.len(), &refused[..4], &refused[36..43]), (1060, &[5, 0, 7, 0][..], &b"too old"[..]));
}

#[test]
fn a_welcome_proves_what_it_grants() {
    let (caller, hub, proof) = meet(hello());
    assert!(hub.is_proven(&SECRET, &proof) && !hub.is_proven(&StreamSecret([8; 32]), &proof));
    let granted = Welcome { granted: Capabilities::ENCRYPTED, ..WELCOME };
    let wire: [u8; VERDICT_BYTES] = hub.welcome(&SECRET, &granted).try_into().unwrap();
    assert_eq!(caller.open(&SECRET, &wire), Ok(granted));
    // Nobody in between can take a capability away, or change the epoch or the number of slots.
    for at in [4, 8, 16, 24, 55] {
        let mut altered = wire;
        altered[at] ^= 1;
        assert_eq!(caller.open(&SECRET, &altered), Err(VerdictError::Unproven), "byte {at}");
    }
    let other: [u8; VERDICT_BYTES] = hub.welcome(&StreamSecret([8; 32]), &granted).try_into().unwrap();
    assert_eq!(caller.open(&SECRET, &other), Err(VerdictError::Unproven));
}

#[test]
fn nobody_in_between_can_change_a_hello_or_the_version() {
    let (_, hub, proof) = meet(hello());
    for at in [9, 10, 12, 16, 20, 24, 26, 32, 40, 48, 64, 80, 112] {
        let mut altered = hello().encode();
        altered[at] ^= 1;
        if let Ok(hub) = HubHandshake::begin(&altered, [5; 32]) {
            assert!(!hub.is_proven(&SECRET, &proof), "byte {at}");
        }
    }
    let other_challenge = HubHandshake::begin(&hello().encode(), [6; 32]).unwrap();
    assert!(hub.is_proven(&SECRET, &proof) && !other_challenge.is_proven(&SECRET, &proof));
    let mut caller = CallerHandshake::begin(hello());
    let mut message: [u8; CHALLENGE_MESSAGE_BYTES] = hub.challenge_message().try_into().unwrap();
    message[4] = 1;
    assert_eq!(caller.answer(&SECRET, &message).unwrap_err(), HandshakeError::HubVersion(1));
    message[0] = b'G';
    assert_eq!(caller.answer(&SECRET, &message).unwrap_err(), HandshakeError::Magic);
}

#[test]
fn a_caller_insists_on_what_it_requires_and_takes_nothing_else() {
    let required = Hello { required: Capabilities::ENCRYPTED, ..hello() };
    let (caller, hub, _) = meet(required);
    let open = |granted| {
        let verdict = hub.welcome(&SECRET, &Welcome { granted, ..WELCOME });
        caller.open(&SECRET, &verdict.try_into().unwrap()).map(|welcome| welcome.granted)
    };
    let none = Capabilities::default();
    assert_eq!(open(none), Err(VerdictError::Capabilities(none)));
    assert_eq!(open(Capabilities::ENCRYPTED), Ok(Capabilities::ENCRYPTED));
    let more = Capabilities(Capabilities::ENCRYPTED.0 | Capabilities::REPLICA.0);
    assert_eq!(open(more), Err(VerdictError::Capabilities(more)));
    assert_eq!(Capabilities(1 | 8 | 1 << 30).to_string(), "encrypted, replica, capability 30");
}

#[test]
fn a_refused_hello_is_answered_in_the_form_that_its_caller_reads() {
    let of_version_1 = HubHandshake::refuse_hello(&hello_of_version_1(9), "why");
    assert_eq!((of_version_1.len(), &of_version_1[..32]), (32 + 1060, &[0; 32][..]));
    assert_eq!(of_version_1[32..36], [8, 0, 3, 0]);
    let wire = HubHandshake::refuse_hello(b"junk", "why");
    let (challenge, verdict) = wire.split_at(CHALLENGE_MESSAGE_BYTES);
    let mut caller = CallerHandshake::begin(hello());
    caller.answer(&SECRET, challenge.try_into().unwrap()).unwrap();
    let (refusal, message) = (Refusal::Protocol, "why".to_string());
    assert_eq!(
        caller.open(&SECRET, verdict.try_into().unwrap()),
        Err(VerdictError::Refused { refusal, message })
    );
    // A hub of version 1 reads 112 bytes of the Hello and refuses like this.
    let older: [u8; CHALLENGE_MESSAGE_BYTES] = of_version_1[..CHALLENGE_MESSAGE_BYTES].try_into().unwrap();
    assert_eq!(caller.answer(&SECRET, &older).unwrap_err(), HandshakeError::HubIsOlder);
}

#[test]
fn refusals_round_trip() {
    let message = "rank 3 is connected".to_string();
    for refusal in [Refusal::RankTaken, Refusal::Stale, Refusal::Capability] {
        let wire: [u8; VERDICT_BYTES] = Verdict::refused(refusal, &message).try_into().unwrap();
        let opened = Verdict::open(&wire, |_| panic!("a refusal has no proof"));
        assert_eq!(opened, Err(VerdictError::Refused { refusal, message: message.clone() }));
    }
    let unreadable = Verdict::open(&[0xff; VERDICT_BYTES], |_| Proof([0; 32]));
    assert!(matches!(unreadable, Err(VerdictError::Unreadable(_))), "{unreadable:?}");
}

proptest! {
    #[test]
    fn no_bytes_panic_the_decoders(
        mut bytes in prop::collection::vec(any::<u8>(), VERDICT_BYTES),
        status in 0u16..12,
        version in 0u16..5,
        length in prop_oneof![Just(144u16), any::<u16>()],
    ) {
        bytes[0..2].copy_from_slice(&status.to_le_bytes());
        let _ = Verdict::decode(bytes[..].try_into().unwrap());
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&version.to_le_bytes());
        bytes[6..8].copy_from_slice(&length.to_le_bytes());
        if let Ok(length) = hello_length(&bytes[..8].try_into().unwrap()) {
            prop_assert!(length <= HELLO_BYTES_MAX);
            let _ = HubHandshake::begin(&bytes[..length], [0; 32]);
        }
    }
}
