//! A core whose turns are taken one by one, and workers whose frames follow random bytes: over TCP and shared
//! memory, with resumed streams, Leave frames, ends of jobs and invalid frames. Every sum that comes back is
//! computed again.
//!
//! A module of its own because three programs run it: libFuzzer (`fuzz/fuzz_targets/hub_core.rs`), the example `exercise`
//! and a seeded test of this crate.

mod program_states;
mod sums;
mod worker;

use std::collections::VecDeque;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use paramhub_core::arena::ArenaLayout;
use paramhub_core::auth::{Epoch, EpochSecret, Incarnation, Namespace, Nonce};
use paramhub_core::codec::Codec;
use paramhub_core::key::Key;
use paramhub_core::resuming::ResumeTerms;
use paramhub_core::settings::OptimizerChoice;
use paramhub_core::stragglers::Stragglers;
use paramhub_core::stream_admission::{JobStreams, StreamSecrets, StreamTerms};
use paramhub_core::wire::{
    Attempt, CHALLENGE_BYTES, Caller, Capabilities, Direction, Failure, Header, Hello, Operation,
};
use paramhub_transport::shm::{RING_BYTES_DEFAULT, Segment, create_rings};
use paramhub_transport::{Connection, Scratch, ShmStream, Stream, TcpStream};
use paramhub_trust::{Cipher, StreamKeys};

use program_states::RankStates;
use sums::ChunkSums;
use worker::{Inbox, Worker};

use super::stepped_hub::{SteppedHub, TURNS_MAX, plan_with};
use super::{AcceptedStream, Carrier, CoreCommand, CoreEvent, ShardPlan};
use crate::directory::{Directory, JobEntry, Origin};
use crate::local::JobMemory;

/// A chunk that does not fit into the buffers of a socket from which nothing is read.
const LARGE_CHUNK_BYTES: u32 = 512 << 10;

/// The epoch of the jobs.
const EPOCH: u64 = 3;

/// Drives a core as the bytes of `random` select until there are none left.
pub(crate) fn exercise(mut random: impl FnMut() -> Option<u8>) -> Exercised {
    let mut hub = SteppedHub::new();
    let listener = Rc::new(TcpListener::bind("127.0.0.1:0").expect("a port"));
    let mut exercised = Exercised { accepted: 0, jobs: 0 };
    while let (Some(shape), Some(length)) = (random(), random()) {
        exercised.jobs += 1;
        let mut job = FuzzJob::begin(&mut hub, listener.clone(), exercised.jobs, shape, length % 2 == 1);
        while !job.is_over && job.step(&mut hub, &mut random).is_some() {}
        job.end(&mut hub);
        exercised.accepted += job.accepted;
    }
    exercised
}

/// Drives a core as so many pseudorandom bytes select, which follow from the seed alone.
pub(crate) fn exercise_seeded(seed: u64, choices: u64) -> Exercised {
    let (mut random, mut left) = (RandomBytes::new(seed), choices);
    exercise(|| {
        left = left.checked_sub(1)?;
        Some(random.next())
    })
}

/// What a core has done.
pub(crate) struct Exercised {
    /// Frames that the core has accepted: each counts when its answer has come and was right.
    pub(crate) accepted: u64,
    pub(crate) jobs: u64,
}

/// Pseudorandom bytes.
struct RandomBytes(u64);

impl RandomBytes {
    /// The seed's bits are mixed, because consecutive seeds would otherwise begin alike.
    fn new(seed: u64) -> RandomBytes {
        let mut mixed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        // The generator must not begin with 0.
        RandomBytes((mixed ^ mixed >> 31).max(1))
    }

    fn next(&mut self) -> u8 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u8
    }
}

/// One job.
struct FuzzJob {
    plan: ShardPlan,
    directory: Directory,
    workers: Vec<Worker>,
    /// `true` if little of what it does ends it, or its checks.
    is_long: bool,
    /// Where its streams are accepted.
    listener: Rc<TcpListener>,
    /// What each chunk must be.
    sums: Vec<ChunkSums>,
    /// `true` if a worker has violated the protocol or has left while others wait: it may fail, and sums are
    /// not checked.
    is_invalid: bool,
    is_over: bool,
    accepted: u64,
    scratch: Scratch,
}

impl FuzzJob {
    fn begin(
        hub: &mut SteppedHub,
        listener: Rc<TcpListener>,
        number: u64,
        shape: u8,
        is_long: bool,
    ) -> FuzzJob {
        let workers = u32::from(shape % 3) + 1;
        // Large chunks do not fit into a socket's buffers, so a resumed stream may cut their frames anywhere.
        let (chunk_bytes, more) = match shape / 18 % 4 {
            3 => (LARGE_CHUNK_BYTES, u64::from(LARGE_CHUNK_BYTES) / 4),
            _ => (1024, 300),
        };
        let keys = (0..=u32::from(shape / 3 % 3))
            .map(|key| Key::new(format!("k{key}"), [3 + more * u64::from(key)]));
        let plan = plan_with(workers, keys.collect(), Stragglers::Wait, |settings| {
            settings.optimizer = OptimizerChoice::named("sum");
            settings.reproducible = shape / 9 % 2 == 1;
            settings.chunk_bytes = chunk_bytes;
        });
        let mut namespace = [0; 16];
        namespace[..8].copy_from_slice(&number.to_le_bytes());
        let plan = ShardPlan {
            namespace: Namespace(namespace),
            // Its workers reset their streams when they give up, and the hub is to notice at once.
            resuming: ResumeTerms { moves: true, ..ResumeTerms::default() },
            program_state_bytes: program_states::BYTES_MAX,
            // A slow machine must not cost a worker.
            dead_after: Duration::from_secs(3600),
            ..plan
        };
        hub.open(plan.clone());
        let directory = Directory::default();
        let terms = StreamTerms {
            name: plan.name.clone(),
            secrets: StreamSecrets {
                nonce: Nonce([0; 32]),
                epoch: Epoch { number: EPOCH, secret: EpochSecret([0; 32]) },
                newest_epoch: EPOCH,
                version_1_ranks: Vec::new(),
            },
            composed: plan.composed.clone(),
            first_workers: plan.workers(),
            site: 0,
            position: 0,
            ports: [(0, plan.ports.clone())].into(),
            routes: [((0, 0), 0)].into(),
            standby_routes: [].into(),
            roles: [].into(),
            resumes: true,
            encrypts: false,
        };
        let memory = JobMemory::new(&plan.settings, plan.settings.features());
        let entry = JobEntry { streams: JobStreams::new(terms), state_slots: 0, memory };
        directory.insert(plan.namespace, entry);
        let chunks = plan.placement().chunks(0).len();
        let elements = |chunk| plan.map.extent(chunk).expect("it is placed").elements;
        let sums = (0..chunks as u32).map(|chunk| ChunkSums::new(chunk, elements(chunk))).collect();
        let mut job = FuzzJob {
            plan,
            directory,
            workers: Vec::new(),
            is_long,
            listener,
            sums,
            is_invalid: false,
            is_over: false,
            accepted: 0,
            scratch: Scratch::default(),
        };
        for rank in 0..workers {
            let (stream, arena) = match shape >> 5 >> rank & 1 {
                1 => job.connect_locally(hub, rank),
                _ => {
                    let (stream, adopt) = job.connect(rank, 0).expect("a place is free");
                    hub.handle.send(adopt);
                    (stream, None)
                }
            };
            job.workers.push(Worker {
                stream,
                attempt: 0,
                retired: Vec::new(),
                arena,
                to_send: VecDeque::new(),
                asked: vec![None; chunks],
                program_states: RankStates::default(),
                steps: vec![0; chunks],
                has_left: false,
                is_gone: false,
                has_ended: false,
            });
        }
        job
    }

    fn hello(&self, rank: u32, attempt: u32) -> Hello {
        Hello {
            caller: Caller::Worker { rank, shares_parameters: false },
            interface: 0,
            core: 0,
            standby_route: None,
            offered: Capabilities::default(),
            required: Capabilities::default(),
            attempt: Attempt::Numbered { epoch: EPOCH, number: attempt },
            namespace: self.plan.namespace,
            incarnation: Incarnation([rank as u8; 16]),
            placement: *self.plan.placement().hash().as_bytes(),
            challenge: [0; CHALLENGE_BYTES],
        }
    }

    /// Admits a stream over TCP as the hub's acceptor does, unless it is refused. Returns the worker's end and
    /// the command with which the acceptor passes the other end to the core.
    fn connect(&self, rank: u32, attempt: u32) -> Option<(Connection, CoreCommand)> {
        let admitted =
            self.directory.admit(&self.hello(rank, attempt), Origin::Interfaces(0..1), false).ok()?;
        let address = self.listener.local_addr().expect("an address");
        let worker = std::net::TcpStream::connect(address).expect("a stream");
        // Closing by reset keeps the ports from running out.
        rustix::net::sockopt::set_socket_linger(&worker, Some(Duration::ZERO)).expect("a socket");
        let socket = OwnedFd::from(self.listener.accept().expect("a stream").0);
        // The streams of every other rank are encrypted.
        let keys = (rank % 2 == 1).then_some(StreamKeys {
            cipher: Cipher::Aes128Gcm,
            sending: [rank as u8; 32],
            receiving: [attempt as u8; 32],
        });
        let adopt = CoreCommand::Adopt {
            namespace: self.plan.namespace,
            route: admitted.place.route,
            port: admitted.place.port,
            stream: AcceptedStream { socket, carrier: Carrier::Tcp(keys.clone()) },
            epoch: admitted.place.epoch,
            attempt: admitted.place.attempt,
            resumed_by: admitted.place.resumed_by,
            standby: None,
        };
        let max = self.plan.frame_bytes_max();
        let stream = TcpStream::new(worker, Direction::ToWorker, max).expect("a stream");
        let stream = stream.with_encryption(keys.map(|keys| keys.mirrored()).as_ref());
        Some((Connection::Tcp(stream), adopt))
    }

    fn connect_locally(&self, hub: &SteppedHub, rank: u32) -> (Connection, Option<Segment>) {
        let arena =
            Segment::create("arena", ArenaLayout::new(&self.plan.settings).bytes() as usize).expect("memory");
        let rings = create_rings(RING_BYTES_DEFAULT).expect("memory");
        let brought =
            [&arena, &rings].map(|memory| memory.as_fd().try_clone_to_owned().expect("a descriptor"));
        let origin = Origin::Local(brought.into());
        let Ok(admitted) = self.directory.admit(&self.hello(rank, 0), origin, false) else {
            panic!("a place is free")
        };
        let (worker, socket) = UnixStream::pair().expect("sockets");
        hub.handle.send(CoreCommand::Adopt {
            namespace: self.plan.namespace,
            route: admitted.place.route,
            port: admitted.place.port,
            stream: AcceptedStream {
                socket: socket.into(),
                carrier: admitted.memory.map_or(Carrier::Tcp(None), Carrier::Memory),
            },
            epoch: admitted.place.epoch,
            attempt: admitted.place.attempt,
            resumed_by: admitted.place.resumed_by,
            standby: None,
        });
        let max = self.plan.frame_bytes_max();
        let stream = ShmStream::new(worker, Arc::new(rings), RING_BYTES_DEFAULT, Direction::ToWorker, max);
        (Connection::Shm(stream.expect("a stream").with_arena()), Some(arena))
    }

    /// Does one thing, which `random` selects; `None` when there are no bytes left.
    fn step(&mut self, hub: &mut SteppedHub, random: &mut impl FnMut() -> Option<u8>) -> Option<()> {
        let what = random()?;
        let rank = usize::from(what >> 4) % self.workers.len();
        match what & 15 {
            0..=3 => self.ask(rank, random()?, Operation::PushPull),
            4..=6 => self.ask_for_all(rank, random()?),
            7 => self.ask(rank, random()?, Operation::Pull),
            8..=9 => hub.turn(),
            10..=12 => self.read(rank),
            // A new stream takes longer than anything else.
            13 => match random()? {
                how @ 0..32 => self.resume(hub, rank, how % 2 == 1),
                _ => self.read(rank),
            },
            14 => match random()? {
                0..8 if self.may_end(random)? => self.corrupt(rank, random)?,
                8..16 if self.may_end(random)? => self.leave(rank),
                16..80 => self.save_program_state(rank, random()?),
                80..144 => self.pull_program_state(rank, random()?),
                _ => self.send(rank, Header::bare(Operation::Heartbeat), Rc::default()),
            },
            _ => match random()? {
                0..4 if self.may_end(random)? => self.is_over = true,
                4..12 if self.may_end(random)? => self.finish(hub),
                _ => hub.turn(),
            },
        }
        self.look(hub);
        Some(())
    }

    /// Selects whether something may happen that ends the job, or after which its sums are not checked.
    fn may_end(&self, random: &mut impl FnMut() -> Option<u8>) -> Option<bool> {
        Some(!self.is_long || self.is_invalid || random()? < 8)
    }

    /// Does what the job controller would do about the core's events.
    fn look(&mut self, hub: &mut SteppedHub) {
        for event in hub.core_events.try_iter() {
            match event {
                CoreEvent::Faulted { message, .. } => {
                    assert!(self.is_invalid, "no frame broke a rule, but the failure is: {message}");
                    self.is_over = true;
                }
                CoreEvent::Left { port, .. } => {
                    let worker = &mut self.workers[port as usize];
                    assert!(worker.has_left, "rank {port} has not sent a leave message");
                    assert!(!std::mem::replace(&mut worker.is_gone, true), "rank {port} has left before");
                }
                // On a slow machine a job takes seconds, and the core reports the ranks that keep others
                // waiting.
                CoreEvent::Moved { .. } | CoreEvent::Silence { .. } | CoreEvent::Awaited { .. } => {}
                other => panic!("nothing of the kind was asked for: {other:?}"),
            }
        }
    }

    /// Asks for every chunk, as a worker does in each step of a training.
    fn ask_for_all(&mut self, rank: usize, first: u8) {
        for choice in (0..self.sums.len()).map(|chunk| first.wrapping_add(chunk as u8)) {
            self.queue_ask(rank, choice, Operation::PushPull);
        }
        self.workers[rank].flush();
    }

    fn ask(&mut self, rank: usize, choice: u8, operation: Operation) {
        self.queue_ask(rank, choice, operation);
        self.workers[rank].flush();
    }

    fn queue_ask(&mut self, rank: usize, choice: u8, operation: Operation) {
        let worker = &mut self.workers[rank];
        let chunk = usize::from(choice) % worker.asked.len();
        if worker.asked[chunk].is_some() || worker.has_left || worker.has_ended {
            return;
        }
        let step = worker.steps[chunk];
        let extent = self.plan.map.extent(chunk as u32).expect("it is placed");
        let mut header = Header { chunk: chunk as u32, step, ..Header::bare(operation) };
        let mut payload: Rc<[u8]> = Rc::default();
        if operation == Operation::PushPull {
            // The sums of whole numbers are the same in any order.
            let values: Vec<f32> = (0..extent.elements)
                .map(|element| ((u32::from(choice) + element * 7 + rank as u32 * 31 + step) % 1009) as f32)
                .collect();
            self.sums[chunk].add(step, &values);
            payload = bytemuck::cast_slice(&values).into();
            (header.codec, header.length) = (Codec::F32, payload.len() as u32);
            if let Some(arena) = &worker.arena {
                arena.write(ArenaLayout::new(&self.plan.settings).gradient_chunk(&extent), &payload);
                payload = Rc::default();
            }
        }
        worker.asked[chunk] = Some((header, payload.clone()));
        worker.to_send.push_back((header, payload));
    }

    fn send(&mut self, rank: usize, header: Header, payload: Rc<[u8]>) {
        let worker = &mut self.workers[rank];
        if !worker.has_left && !worker.has_ended {
            // The core takes every Leave as valid, also one that `corrupt` has made.
            worker.has_left = header.operation == Operation::Leave;
            worker.to_send.push_back((header, payload));
        }
        worker.flush();
    }

    /// Takes what has arrived, and computes again what it must be.
    fn read(&mut self, rank: usize) {
        let worker = &mut self.workers[rank];
        worker.flush();
        let mut inbox = Inbox::default();
        let received = worker.stream.receive(&mut inbox, &mut self.scratch, 64 << 10);
        if received.as_ref().is_ok_and(|received| received.bytes > 0) {
            worker.retired.clear();
        }
        worker.has_ended |= received.as_ref().map_or(true, |received| received.closed);
        let layout = ArenaLayout::new(&self.plan.settings);
        let mut answered = Vec::new();
        for (header, payload) in inbox.frames {
            if header.operation == Operation::Failure {
                assert!(
                    self.is_invalid,
                    "{:?}",
                    Failure::decode(&payload.expect("it does not lie in an arena"))
                );
            }
            if !self.is_invalid && RankStates::is_answer(header.operation) {
                let payload = payload.expect("it does not lie in an arena");
                self.accepted += u64::from(worker.program_states.take(&header, &payload));
                continue;
            }
            if header.operation != Operation::Parameters || self.is_invalid {
                continue;
            }
            let chunk = header.chunk as usize;
            let extent = self.plan.map.extent(header.chunk).expect("it is placed");
            let payload = payload.unwrap_or_else(|| {
                let mut placed = vec![0; header.length as usize];
                let arena = worker.arena.as_ref().expect("it came over shared memory");
                arena.read(layout.parameters_chunk(&extent), &mut placed);
                placed
            });
            let (asked, _) = worker.asked[chunk].take().expect("an answer to something that was asked");
            assert!(header.step >= asked.step + u32::from(asked.operation == Operation::PushPull));
            self.sums[chunk].check(header.step, &payload);
            worker.steps[chunk] = header.step;
            self.accepted += 1;
            answered.push(chunk);
        }
        // No worker is answered with older parameters than it has.
        for chunk in answered {
            let oldest = self.workers.iter().map(|worker| worker.steps[chunk]).min().unwrap_or_default();
            self.sums[chunk].forget_before(oldest);
        }
    }

    /// Replaces a worker's stream by another one, on which the worker repeats what may be lost. A stream over
    /// shared memory stays. With `overtakes` the new stream reaches the core before one that was opened before
    /// it.
    fn resume(&mut self, hub: &mut SteppedHub, rank: usize, overtakes: bool) {
        if self.workers[rank].has_ended {
            return;
        }
        let before = self.workers[rank].attempt;
        let older = overtakes.then(|| self.connect(rank as u32, before + 1)).flatten();
        let attempt = before + 1 + u32::from(overtakes);
        let newer = self.connect(rank as u32, attempt);
        assert!(self.connect(rank as u32, attempt).is_none(), "it is as old as the newest");
        let worker = &mut self.workers[rank];
        worker.attempt = attempt;
        assert_eq!(newer.is_none(), worker.arena.is_some(), "TCP alone is resumed");
        if let Some((stream, adopt)) = newer {
            hub.handle.send(adopt);
            // The worker drops its end of a stream that has not opened in time.
            older.into_iter().for_each(|(_, adopt)| hub.handle.send(adopt));
            worker.retired.push(std::mem::replace(&mut worker.stream, stream));
            worker.to_send = worker.asked.iter().flatten().cloned().collect();
            worker.to_send.extend(worker.program_states.resend());
            if worker.has_left {
                worker.to_send.push_back((Header::bare(Operation::Leave), Rc::default()));
            }
            worker.flush();
        }
    }

    /// Sends a frame of any kind.
    fn corrupt(&mut self, rank: usize, random: &mut impl FnMut() -> Option<u8>) -> Option<()> {
        const OPERATIONS: [Operation; 14] = [
            Operation::Push,
            Operation::PushPull,
            Operation::Pull,
            Operation::PullState,
            Operation::Initialise,
            Operation::InitialiseState,
            Operation::Retune,
            Operation::Release,
            Operation::Skip,
            Operation::Factors,
            Operation::SaveProgramState,
            Operation::PullProgramState,
            Operation::Leave,
            Operation::Failure,
        ];
        self.is_invalid = true;
        let operation = OPERATIONS[usize::from(random()?) % OPERATIONS.len()];
        let (chunk, step) = (u32::from(random()?) % 8, u32::from(random()?) % 8);
        let has_arena = self.workers[rank].arena.is_some() && operation.carries_tensor();
        let length =
            (u32::from(random()?) * 4).min(operation.length_max()).min(self.plan.frame_bytes_max() as u32);
        let codec = if random()? % 4 == 0 { Codec::F16 } else { Codec::F32 };
        let header = Header { operation, codec, chunk, step, length };
        let payload = vec![random()?; if has_arena { 0 } else { length as usize }];
        self.send(rank, header, payload.into());
        Some(())
    }

    fn leave(&mut self, rank: usize) {
        // Others may wait for this worker.
        self.is_invalid = true;
        self.send(rank, Header::bare(Operation::Leave), Rc::default());
    }

    /// Every worker completes what it has begun, and leaves.
    fn finish(&mut self, hub: &mut SteppedHub) {
        if self.is_invalid {
            self.is_over = true;
            return;
        }
        let newest = |job: &FuzzJob, chunk: usize| {
            let steps = job.workers.iter().map(|worker| {
                worker.steps[chunk]
                    + u32::from(matches!(&worker.asked[chunk], Some((ask, _)) if ask.operation == Operation::PushPull))
            });
            steps.max().expect("there are workers")
        };
        let ends: Vec<u32> = (0..self.sums.len()).map(|chunk| newest(self, chunk)).collect();
        for turn in 0.. {
            assert!(turn < TURNS_MAX, "an answer does not come");
            let mut waits = false;
            for rank in 0..self.workers.len() {
                self.read(rank);
                for (chunk, &end) in ends.iter().enumerate() {
                    let worker = &self.workers[rank];
                    waits |= worker.asked[chunk].is_some();
                    if worker.asked[chunk].is_none() && worker.steps[chunk] < end {
                        waits = true;
                        self.ask(rank, chunk as u8, Operation::PushPull);
                    }
                }
            }
            hub.turn();
            self.look(hub);
            if !waits {
                break;
            }
        }
        for rank in 0..self.workers.len() {
            self.send(rank, Header::bare(Operation::Leave), Rc::default());
        }
        for turn in 0.. {
            assert!(turn < TURNS_MAX, "a leave message has no effect");
            hub.turn();
            self.look(hub);
            if self.workers.iter().all(|worker| worker.is_gone) {
                break;
            }
            self.workers.iter_mut().for_each(Worker::flush);
        }
        self.is_over = true;
    }

    /// Ends the job as the job controller does.
    fn end(&mut self, hub: &mut SteppedHub) {
        self.is_invalid = true;
        let failure = Failure { rank: None, message: "it is over".into() };
        self.directory.remove(self.plan.namespace, failure.message.clone());
        hub.handle.send(CoreCommand::End { namespace: self.plan.namespace, failure: Some(failure) });
        hub.turn();
        (0..self.workers.len()).for_each(|rank| self.read(rank));
        self.workers.clear();
        let ended = self.plan.namespace;
        let memory = hub.await_event(|event| match event {
            CoreEvent::Closed { namespace, counters, .. } => {
                assert_eq!(*namespace, ended);
                Some(counters.memory_bytes)
            }
            _ => None,
        });
        assert_eq!(memory, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_is_right_whatever_workers_do() {
        let seed = std::env::var("PARAMHUB_TEST_SEED").ok().and_then(|text| text.parse().ok());
        let seed = seed.unwrap_or_else(|| std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64);
        println!("PARAMHUB_TEST_SEED={seed}");
        let choices = std::env::var("PARAMHUB_TEST_CHOICES").ok().and_then(|text| text.parse().ok());
        let Exercised { accepted, .. } = exercise_seeded(seed, choices.unwrap_or(100_000));
        println!("{accepted} frames accepted");
        assert!(accepted > 500, "{accepted} frames accepted");
    }
}
