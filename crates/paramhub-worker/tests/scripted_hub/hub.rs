//! The scripted hub: a test drives each of its streams by hand.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use paramhub_core::auth::{Incarnation, Namespace, Proof, StreamSecret};
use paramhub_core::chunk::ChunkId;
use paramhub_core::codec::Codec;
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::placement::{HubShape, InterfaceShape};
use paramhub_core::scheme::Roster;
use paramhub_core::service::JobOptions;
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_core::wire::{
    Direction, HELLO_BYTES, Header, Hello, HubHandshake, Operation, PROOF_BYTES, Welcome,
};
use paramhub_transport::greeting::{read_exact_by, write_all_by};
use paramhub_transport::{
    Events, FrameSink, Interest, Landing, Outgoing, Poller, Scratch, Stream, TcpStream,
};
use paramhub_worker::{Job, JobConfig, Options, WorkerError};

/// The time after which a hanging test ends, far above what a slow machine needs.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(30);
pub(crate) const SECRET: StreamSecret = StreamSecret([7; 32]);
pub(crate) const EPOCH: u64 = 4;
/// Small, so that little data makes many chunks: 256 elements of f32.
pub(crate) const CHUNK_BYTES: u32 = 1024;
pub(crate) const CHUNK: usize = 256;

pub(crate) struct Hub {
    listener: TcpListener,
    pub(crate) address: String,
    cores: u16,
}

impl Hub {
    pub(crate) fn new(cores: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        Hub { listener, address, cores }
    }

    pub(crate) fn job_config(&self, rank: u32, settings: Settings) -> JobConfig {
        let cores = (0..self.cores).collect();
        let interface = InterfaceShape { address: self.address.clone(), cores, weight: 1 };
        let hubs = vec![HubShape { local: None, between_hubs: None, interfaces: vec![interface] }];
        JobConfig {
            name: "digits".into(),
            namespace: Namespace([1; 16]),
            secret: SECRET,
            epoch: EPOCH,
            rank,
            workers: 2,
            incarnation: Incarnation([2; 16]),
            roster: Roster::beside_workers(2, &hubs),
            hubs,
            shares: Vec::new(),
            settings,
            job_options: JobOptions::default(),
            resumed_step: None,
            joined_running: false,
            placement_hash: None,
        }
    }

    /// Opens a job whose chunks lie on every core; the streams come in core order.
    pub(crate) fn open(&self, job_config: JobConfig, options: Options) -> (Job, Vec<Peer>) {
        std::thread::scope(|scope| {
            let job = scope.spawn(|| job_config.open(options));
            let peers: Vec<Peer> =
                (0..self.cores).map_while(|_| self.accept_unless(|| job.is_finished())).collect();
            // A job that cannot be opened says why here.
            let job = job.join().unwrap().unwrap();
            assert_eq!(peers.len(), usize::from(self.cores), "one stream for each core");
            (job, peers)
        })
    }

    /// [`Hub::open`] as rank 1 with every default.
    pub(crate) fn open_plain(&self, settings: Settings) -> (Job, Vec<Peer>) {
        self.open(self.job_config(1, settings), Options::default())
    }

    /// Accepts the next stream.
    pub(crate) fn accept(&self) -> Peer {
        self.accept_unless(|| false).expect("a stream comes in time")
    }

    /// Accepts the next stream; `None` if none has come and none will any more.
    fn accept_unless(&self, is_over: impl Fn() -> bool) -> Option<Peer> {
        let mut socket = self.next_connection(is_over)?;
        let handshake = challenge(&mut socket);
        let deadline = Instant::now() + WAIT_TIMEOUT;
        let mut proof = [0; PROOF_BYTES];
        read_exact_by(&mut socket, &mut proof, deadline).unwrap();
        assert!(handshake.is_proven(&SECRET, &Proof(proof)), "the worker's proof");
        let welcome = Welcome { state_slots: 2, epoch: EPOCH, ..Welcome::default() };
        write_all_by(&mut socket, &handshake.welcome(&SECRET, &welcome), deadline).unwrap();
        Some(Peer::new(socket, *handshake.hello()))
    }

    /// Waits for a connection as long as one may still come.
    fn next_connection(&self, is_over: impl Fn() -> bool) -> Option<std::net::TcpStream> {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let is_last = is_over();
            match self.listener.accept() {
                Ok((socket, _)) => return Some(socket),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
            }
            if is_last {
                return None;
            }
            assert!(Instant::now() < deadline, "the worker dialled nobody for {WAIT_TIMEOUT:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Passes one connection to the test's function, while a worker tries to open a job.
    pub(crate) fn turn_away(
        &self,
        options: Options,
        script: impl FnOnce(std::net::TcpStream) + Send,
    ) -> WorkerError {
        std::thread::scope(|scope| {
            scope.spawn(|| script(self.next_connection(|| false).expect("the worker dials")));
            self.job_config(1, settings(&[10])).open(options).unwrap_err()
        })
    }
}

/// Reads a Hello and sends a challenge.
pub(crate) fn challenge(socket: &mut std::net::TcpStream) -> HubHandshake {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    let mut hello = [0; HELLO_BYTES];
    read_exact_by(socket, &mut hello, deadline).unwrap();
    let handshake = HubHandshake::begin(&hello, [9; 32]).unwrap();
    write_all_by(socket, handshake.challenge_message(), deadline).unwrap();
    handshake
}

/// The hub's end of one stream.
pub(crate) struct Peer {
    pub(crate) hello: Hello,
    stream: TcpStream,
    poller: Poller,
    scratch: Scratch,
    frames: Frames,
    closed: bool,
}

/// The whole frames received.
#[derive(Default)]
struct Frames(VecDeque<(Header, Vec<u8>)>);

impl FrameSink for Frames {
    type Error = std::convert::Infallible;

    fn landing(&mut self, _: &Header) -> Result<Landing<'_>, Self::Error> {
        Ok(Landing::Staged)
    }

    fn frame(&mut self, header: &Header, payload: Option<&[u8]>) -> Result<(), Self::Error> {
        self.0.push_back((*header, payload.unwrap().to_vec()));
        Ok(())
    }
}

impl Peer {
    fn new(socket: std::net::TcpStream, hello: Hello) -> Self {
        let stream = TcpStream::new(socket, Direction::ToHub, 1 << 20).unwrap();
        let poller = Poller::new().unwrap();
        poller.add(&stream, 0, Interest::READABLE).unwrap();
        Peer { hello, stream, poller, scratch: Scratch::new(0), frames: Frames::default(), closed: false }
    }

    /// The next frame of any kind, or `None` at the end of the stream.
    pub(crate) fn frame(&mut self) -> Option<(Header, Vec<u8>)> {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while self.frames.0.is_empty() && !self.closed {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "nothing came from the worker for {WAIT_TIMEOUT:?}");
            self.poller.wait(&mut Events::with_capacity(1), Some(left)).unwrap();
            self.closed = match self.stream.receive(&mut self.frames, &mut self.scratch, 1 << 16) {
                Ok(received) => received.closed,
                Err(_) => true,
            };
        }
        self.frames.0.pop_front()
    }

    /// The next frame that is no heartbeat.
    pub(crate) fn request(&mut self) -> Option<(Header, Vec<u8>)> {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            match self.frame() {
                Some((header, _)) if header.operation == Operation::Heartbeat => {
                    assert!(Instant::now() < deadline, "only heartbeats came for {WAIT_TIMEOUT:?}");
                }
                frame => return frame,
            }
        }
    }

    /// Waits until the worker has sent something, and leaves it there.
    pub(crate) fn await_something(&mut self) {
        let mut events = Events::with_capacity(1);
        self.poller.wait(&mut events, Some(WAIT_TIMEOUT)).unwrap();
        assert!(!events.is_empty(), "nothing came from the worker for {WAIT_TIMEOUT:?}");
    }

    /// Sends bytes that need not be a frame and fit into the socket's buffer.
    pub(crate) fn send_bytes(&mut self, bytes: &[u8]) {
        assert_eq!(rustix::io::write(&self.stream, bytes).unwrap(), bytes.len());
    }

    pub(crate) fn send_frame(&mut self, header: Header, payload: &[u8]) {
        let header = Header { length: payload.len() as u32, ..header };
        let deadline = Instant::now() + WAIT_TIMEOUT;
        let frame = [Outgoing { header, payload }];
        self.poller.modify(&self.stream, 0, Interest::BOTH).unwrap();
        while self.stream.send(&frame).unwrap().frames == 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "the worker took nothing for {WAIT_TIMEOUT:?}");
            self.poller.wait(&mut Events::with_capacity(1), Some(left)).unwrap();
        }
        self.poller.modify(&self.stream, 0, Interest::READABLE).unwrap();
    }

    pub(crate) fn parameters(&mut self, chunk: ChunkId, version: u32, payload: &[u8]) {
        self.send_frame(Header { chunk, step: version, ..Header::bare(Operation::Parameters) }, payload);
    }

    pub(crate) fn parameters_as(&mut self, codec: Codec, chunk: ChunkId, version: u32, payload: &[u8]) {
        self.send_frame(
            Header { codec, chunk, step: version, ..Header::bare(Operation::Parameters) },
            payload,
        );
    }

    pub(crate) fn applied(&mut self, chunk: ChunkId, version: u32) {
        self.send_frame(Header { chunk, step: version, ..Header::bare(Operation::Applied) }, &[]);
    }

    /// Answers the next `requests` PushPulls with their own gradients, as a hub would answer its only worker.
    pub(crate) fn echo(&mut self, requests: usize) {
        for _ in 0..requests {
            let (header, payload) = self.request().expect("a request");
            assert_eq!(header.operation, Operation::PushPull);
            self.parameters(header.chunk, header.step + 1, &payload);
        }
    }

    /// Closes the stream in order.
    pub(crate) fn hang_up(self) {
        rustix::net::shutdown(&self.stream, rustix::net::Shutdown::Both).unwrap();
    }
}

/// f32 keys of these sizes, the first the most urgent, with an optimizer and small chunks.
pub(crate) fn settings(sizes: &[u64]) -> Settings {
    let keys = sizes.iter().enumerate().map(|(index, &size)| Key::new(format!("k{index}"), [size])).collect();
    Settings {
        chunk_bytes: CHUNK_BYTES,
        optimizer: OptimizerChoice::named("sgd"),
        ..Settings::new(KeyTable::new(keys).unwrap())
    }
}

/// Numbers that differ from chunk to chunk and from element to element.
pub(crate) fn ramp(elements: usize) -> Vec<f32> {
    (0..elements).map(|index| index as f32 * 0.5 - 3.0).collect()
}
