//! A worker that speaks the protocol by hand, and so can break it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use paramhub_core::auth::{Incarnation, Proof, Purpose, RankClaim};
use paramhub_core::chunk::ChunkMap;
use paramhub_core::codec::Codec;
use paramhub_core::placement::Placement;
use paramhub_core::scheme::{self, Plan};
use paramhub_core::service::{ConnectService, InitService};
use paramhub_core::settings::Settings;
use paramhub_core::wire::{
    Attempt, CHALLENGE_BYTES, CHALLENGE_MESSAGE_BYTES, Caller, CallerHandshake, Capabilities, Direction,
    Failure, HEADER_BYTES, Header, Hello, Operation, VERDICT_BYTES, Verdict,
};

use crate::cluster::{Cluster, Ticket, WAIT_TIMEOUT, keys};

/// A job of one key and one chunk, for peers that speak the protocol by hand.
pub(crate) fn settings() -> Settings {
    Settings::new(keys(&[4]))
}

/// A worker that speaks the protocol by hand.
pub(crate) struct Raw {
    pub(crate) socket: TcpStream,
}

pub(crate) fn hello(ticket: &Ticket, rank: u32, settings: &Settings, cluster: &Cluster) -> Hello {
    let map = ChunkMap::new(&settings.keys, settings.chunk_bytes).unwrap();
    let shape = cluster.client.hubs().unwrap().remove(0).shape;
    let spreads =
        Plan::new(settings, &scheme::Cluster::beside_workers(ticket.workers)).spreads(settings.keys.len());
    let placement = Placement::planned(&settings.keys, &map, &[shape], &spreads).unwrap();
    Hello {
        caller: Caller::Worker { rank, shares_parameters: false },
        interface: 0,
        core: 0,
        standby_route: None,
        offered: Capabilities::default(),
        required: Capabilities::default(),
        attempt: Attempt::first(1),
        namespace: ticket.namespace,
        incarnation: Incarnation([rank as u8 + 1; 16]),
        placement: *placement.hash().as_bytes(),
        challenge: [7; CHALLENGE_BYTES],
    }
}

/// The proof with which the Hello's rank answers this challenge.
pub(crate) fn proof(
    ticket: &Ticket,
    hello: &Hello,
    challenge_message: &[u8; CHALLENGE_MESSAGE_BYTES],
) -> Proof {
    let Caller::Worker { rank, .. } = hello.caller else { panic!("only workers are made by hand") };
    CallerHandshake::begin(*hello).answer(&ticket.secret(rank), challenge_message).unwrap()
}

impl Raw {
    pub(crate) fn dial(address: SocketAddr) -> Raw {
        let socket = TcpStream::connect(address).unwrap();
        socket.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        socket.set_nodelay(true).unwrap();
        Raw { socket }
    }

    /// Joins as any worker does: ConnectService, InitService, handshake.
    pub(crate) fn join(cluster: &Cluster, ticket: &Ticket, rank: u32) -> Raw {
        let (mut raw, hello) = Raw::join_but_for_streams(cluster, ticket, rank);
        match raw.shake_hands(&hello, ticket) {
            Verdict::Welcome { .. } => raw,
            Verdict::Refused { message, .. } => panic!("refused: {message}"),
        }
    }

    /// Joins up to a new connection, and returns it with the Hello to be sent.
    pub(crate) fn join_but_for_streams(cluster: &Cluster, ticket: &Ticket, rank: u32) -> (Raw, Hello) {
        Raw::join_with(cluster, ticket, rank, &settings())
    }

    /// The same, into a job with these settings.
    pub(crate) fn join_with(
        cluster: &Cluster,
        ticket: &Ticket,
        rank: u32,
        settings: &Settings,
    ) -> (Raw, Hello) {
        let hello = hello(ticket, rank, settings, cluster);
        let (namespace, incarnation) = (ticket.namespace, hello.incarnation);
        let connect = ConnectService {
            rank,
            incarnation,
            proof: ticket.nonce.prove_rank(Purpose::Connect, namespace, rank, incarnation),
            claim: Some(RankClaim([rank as u8; 32])),
            host: "by hand".into(),
            process: 0,
            place: Default::default(),
            peer_address: None,
            workers: None,
        };
        let connected = cluster.client.connect_service(namespace, &connect, WAIT_TIMEOUT).unwrap();
        let secret = connected.secrets.unwrap().rank;
        ticket.secrets.lock().unwrap().insert(rank, secret);
        let proof = secret.prove_rank(Purpose::Init, namespace, rank, incarnation);
        let init = InitService { rank, incarnation, proof, settings: settings.clone() };
        cluster.client.init_service(ticket.namespace, &init, WAIT_TIMEOUT).unwrap();
        (Raw::dial(cluster.hub().addresses()[0]), hello)
    }

    /// Joins as a worker of protocol version 1 does, whose messages are written out here.
    pub(crate) fn join_as_version_1(cluster: &Cluster, ticket: &Ticket, rank: u32) -> Raw {
        let hello = hello(ticket, rank, &settings(), cluster);
        let (namespace, incarnation) = (ticket.namespace, hello.incarnation);
        let prove = |purpose| ticket.nonce.prove_rank(purpose, namespace, rank, incarnation);
        let connect = ConnectService {
            rank,
            incarnation,
            proof: prove(Purpose::Connect),
            claim: None,
            host: "by hand".into(),
            process: 0,
            place: Default::default(),
            peer_address: None,
            workers: None,
        };
        let connected = cluster.client.connect_service(namespace, &connect, WAIT_TIMEOUT).unwrap();
        assert!(connected.secrets.is_none());
        let init = InitService { rank, incarnation, proof: prove(Purpose::Init), settings: settings() };
        cluster.client.init_service(namespace, &init, WAIT_TIMEOUT).unwrap();
        let mut raw = Raw::dial(cluster.hub().addresses()[0]);
        let mut message = b"PHUB\x01\0\0\0".to_vec();
        message.extend(rank.to_le_bytes());
        message.extend([0; 4]);
        message.extend([namespace.0, incarnation.0].concat());
        message.extend([hello.placement, hello.challenge].concat());
        raw.send(&message);
        let mut challenge = [0; CHALLENGE_BYTES];
        raw.socket.read_exact(&mut challenge).unwrap();
        let parts: [&[u8]; 2] = [&message, &challenge];
        raw.send(&ticket.nonce.prove(Purpose::StreamWorkerVersion1, &parts).0);
        let mut verdict = [0; 1060];
        raw.socket.read_exact(&mut verdict).unwrap();
        assert_eq!(verdict[..2], [0; 2], "{}", String::from_utf8_lossy(&verdict[36..]));
        assert_eq!(verdict[4..36], ticket.nonce.prove(Purpose::StreamHubVersion1, &parts).0);
        raw
    }

    pub(crate) fn shake_hands(&mut self, hello: &Hello, ticket: &Ticket) -> Verdict {
        self.socket.write_all(&hello.encode()).unwrap();
        let mut challenge = [0; CHALLENGE_MESSAGE_BYTES];
        self.socket.read_exact(&mut challenge).unwrap();
        self.socket.write_all(&proof(ticket, hello, &challenge).0).unwrap();
        let mut verdict = [0; VERDICT_BYTES];
        self.socket.read_exact(&mut verdict).unwrap();
        Verdict::decode(&verdict).unwrap()
    }

    /// Closes with a reset, as a process does that ends with answers unread.
    pub(crate) fn reset(self) {
        rustix::net::sockopt::set_socket_linger(&self.socket, Some(Duration::ZERO)).unwrap();
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).unwrap();
    }

    /// Reads frames up to one of this kind. Returns its header and payload.
    pub(crate) fn await_frame(&mut self, operation: Operation) -> (Header, Vec<u8>) {
        loop {
            let mut wire = [0; HEADER_BYTES];
            self.socket.read_exact(&mut wire).unwrap();
            let header = Header::decode(&wire, Direction::ToWorker).unwrap();
            let mut payload = vec![0; header.length as usize];
            self.socket.read_exact(&mut payload).unwrap();
            if header.operation == operation {
                return (header, payload);
            }
        }
    }

    pub(crate) fn await_failure(&mut self) -> Failure {
        Failure::decode(&self.await_frame(Operation::Failure).1).unwrap()
    }

    /// Returns whether the other side closes without another frame.
    pub(crate) fn is_closed(&mut self) -> bool {
        let mut byte = [0];
        matches!(self.socket.read(&mut byte), Ok(0) | Err(_))
    }
}

pub(crate) fn push(step: u32) -> Vec<u8> {
    let header = Header { operation: Operation::PushPull, codec: Codec::F32, chunk: 0, step, length: 16 };
    [&header.encode()[..], &[0; 16]].concat()
}
