use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use paramhub_core::codec::Codec;
use paramhub_core::key::Key;
use paramhub_core::stragglers::Stragglers;
use paramhub_core::wire::{Direction, HEADER_BYTES, Header};

use super::stepped_hub::{SteppedHub, floats, is_opened, plan_with};
use super::*;

/// A worker's end of a stream.
fn connect(hub: &mut SteppedHub, namespace: Namespace) -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let worker = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    worker.set_nodelay(true).unwrap();
    let socket = listener.accept().unwrap().0.into();
    let stream = AcceptedStream { socket, carrier: Carrier::Tcp(None) };
    let (attempt, resumed_by) = (0, None);
    hub.handle.send(CoreCommand::Adopt {
        namespace,
        route: 0,
        port: 0,
        stream,
        epoch: 1,
        attempt,
        resumed_by,
        standby: None,
    });
    hub.turn();
    worker.set_nonblocking(true).unwrap();
    worker
}

/// The settings of a job of one worker whose hub keeps means.
fn plan(number: u8, elements: u64) -> ShardPlan {
    let change = |settings: &mut paramhub_core::settings::Settings| settings.chunk_bytes = 1 << 20;
    let plan = plan_with(1, vec![Key::new("w", [elements])], Stragglers::Wait, change);
    ShardPlan { namespace: Namespace([number; 16]), ..plan }
}

/// A worker that takes steps of one chunk of four numbers as fast as the core answers.
struct Stepping {
    stream: TcpStream,
    step: u32,
    answer: Vec<u8>,
}

impl Stepping {
    fn new(stream: TcpStream) -> Stepping {
        let mut stepping = Stepping { stream, step: 0, answer: Vec::new() };
        stepping.push();
        stepping
    }

    fn push(&mut self) {
        let (operation, codec) = (Operation::PushPull, Codec::F32);
        let header = Header { operation, codec, chunk: 0, step: self.step, length: 16 };
        let gradient = [self.step as f32; 4];
        self.stream.write_all(&[&header.encode()[..], bytemuck::cast_slice(&gradient)].concat()).unwrap();
    }

    /// Reads what has arrived, and begins the next step if the previous one is over.
    fn go_on(&mut self) {
        let mut bytes = [0; 256];
        while let Ok(read @ 1..) = self.stream.read(&mut bytes) {
            self.answer.extend_from_slice(&bytes[..read]);
        }
        while let Some(wire) = self.answer.first_chunk::<HEADER_BYTES>() {
            let header = Header::decode(wire, Direction::ToWorker).unwrap();
            let end = HEADER_BYTES + header.length as usize;
            let Some(payload) = self.answer.get(HEADER_BYTES..end) else { break };
            if header.operation == Operation::Parameters {
                assert_eq!((header.step, floats(payload)), (self.step + 1, vec![self.step as f32; 4]));
                self.step += 1;
                self.push();
            }
            self.answer.drain(..end);
        }
    }
}

const SMALL: Namespace = Namespace([1; 16]);
const LARGE: Namespace = Namespace([2; 16]);
/// The elements of the large job; its hub keeps two arrays of this size.
const ELEMENTS: u64 = 32 << 20;
/// Far fewer than the turns that take 256 MiB, and more than pass while one command is executed.
const STEPS: u32 = 16;

#[test]
fn a_small_job_goes_on_while_a_large_one_opens_and_is_freed() {
    let mut hub = SteppedHub::new();
    hub.open(plan(1, 4));
    let mut worker = Stepping::new(connect(&mut hub, SMALL));
    hub.handle.send(CoreCommand::Open { plan: Box::new(plan(2, ELEMENTS)), restored: None });
    while !hub.core_events.try_iter().any(|event| is_opened(&event, LARGE)) {
        hub.turn();
        worker.go_on();
    }
    assert!(worker.step >= STEPS, "{} steps while it opened", worker.step);
    let before = worker.step;
    let ended = |event: CoreEvent| matches!(event, CoreEvent::Closed { namespace: LARGE, .. });
    hub.handle.send(CoreCommand::End { namespace: LARGE, failure: None });
    while !hub.core_events.try_iter().any(ended) {
        hub.turn();
        worker.go_on();
    }
    assert!(worker.step >= before + STEPS, "{} steps while it was freed", worker.step - before);
}

#[test]
fn a_job_that_ends_while_it_opens_is_freed_and_closed_once() {
    let mut hub = SteppedHub::new();
    hub.handle.send(CoreCommand::Open { plan: Box::new(plan(2, ELEMENTS)), restored: None });
    hub.turn();
    hub.turn();
    assert_eq!(hub.core_events.try_iter().count(), 0, "it takes more turns than two");
    hub.handle.send(CoreCommand::End { namespace: LARGE, failure: None });
    let closed = hub.await_event(|event| match event {
        CoreEvent::Closed { namespace, counters, .. } => Some((*namespace, counters.memory_bytes)),
        CoreEvent::Opened { .. } => panic!("it was ended before"),
        _ => None,
    });
    assert_eq!(closed, (LARGE, 0));
    for _ in 0..10 {
        hub.turn();
    }
    assert_eq!(hub.core_events.try_iter().count(), 0);
    // The place is free.
    hub.open(plan(2, 4));
}
