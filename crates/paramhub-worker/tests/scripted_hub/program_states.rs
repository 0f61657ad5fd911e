//! Program states against a hub that follows a script.

use std::time::Duration;

use paramhub_core::program_states::{Piece, StateInPieces};
use paramhub_core::service::{JobOptions, OnInterfaceDown};
use paramhub_core::wire::{Header, Operation, ProgramState};
use paramhub_worker::{Handle, Job, Options, WorkerError};

use crate::hub::{CHUNK, CHUNK_BYTES, Hub, Peer, WAIT_TIMEOUT, ramp, settings};

/// Five pieces, the last of them short.
const STATE_BYTES: usize = 4 * CHUNK_BYTES as usize + 100;
/// 8 MB of f32.
const ELEMENTS: usize = 2 << 20;

fn open(hub: &Hub, change: impl FnOnce(&mut JobOptions), options: Options) -> (Job, Vec<Peer>) {
    let mut job_options = JobOptions { program_state_bytes: STATE_BYTES as u32, ..JobOptions::default() };
    change(&mut job_options);
    let mut job_config = hub.job_config(1, settings(&[ELEMENTS as u64, 4]));
    job_config.job_options = job_options;
    hub.open(job_config, options)
}

fn state() -> Vec<u8> {
    (0..STATE_BYTES).map(|byte| (byte * 7) as u8).collect()
}

/// Receives a state from its first piece, and whatever comes between.
fn receive(peer: &mut Peer, between: &mut Vec<Header>) -> Vec<u8> {
    let mut bytes = Vec::new();
    loop {
        let (header, payload) = peer.request().unwrap();
        if header.operation != Operation::SaveProgramState {
            between.push(header);
            continue;
        }
        let piece = Piece::read(&header, &payload).unwrap();
        assert_eq!((piece.offset as usize, piece.total as usize), (bytes.len(), STATE_BYTES));
        bytes.extend_from_slice(piece.bytes);
        if bytes.len() == STATE_BYTES {
            return bytes;
        }
    }
}

fn saved(peer: &mut Peer, step: u32) {
    peer.send_frame(Header { step, ..Header::bare(Operation::ProgramStateSaved) }, &[]);
}

/// Sends these pieces of a state of a step.
fn send(peer: &mut Peer, step: u32, state: &[u8], pieces: impl IntoIterator<Item = u32>) {
    let state = StateInPieces::new(step, state, CHUNK_BYTES);
    for number in pieces {
        let (header, payload) = state.piece(number);
        peer.send_frame(Header { operation: Operation::ProgramState, ..header }, payload);
    }
}

fn outcome<G, P>(mut handle: Handle<G, P>) -> Result<P, WorkerError> {
    assert!(handle.wait_timeout(WAIT_TIMEOUT)?, "no answer came");
    handle.wait().map(|(_, received)| received)
}

/// Ends a job without waiting for what is under way.
fn end(job: Job, peers: Vec<Peer>) {
    job.abort_handle().abort("the test is over");
    drop(peers);
    drop(job);
}

#[test]
fn a_piece_leaves_with_each_write_though_chunks_wait() {
    let hub = Hub::new(1);
    // The hub reads nothing yet, and far more chunks wait than the buffers of the sockets take.
    let small = Options { socket_send_bytes: Some(64 << 10), ..Options::default() };
    let (job, mut peers) = open(&hub, |_| {}, small);
    let exchanged = job.push_pull(0, ramp(ELEMENTS), vec![0.0_f32; ELEMENTS]).unwrap();
    let saving = job.save_program_state(7, state()).unwrap();
    let mut chunks = Vec::new();
    assert_eq!(receive(&mut peers[0], &mut chunks), state());
    assert!(chunks.len() < ELEMENTS / CHUNK, "it came behind all chunks");
    saved(&mut peers[0], 7);
    outcome(saving).unwrap();
    end(job, peers);
    assert!(outcome(exchanged).is_err());
}

#[test]
fn a_stream_that_takes_the_place_of_another_brings_everything_again() {
    let hub = Hub::new(1);
    let heartbeat = Options { heartbeat: Duration::from_millis(100), ..Options::default() };
    let (job, mut peers) = open(&hub, |job| job.on_interface_down = OnInterfaceDown::Continue, heartbeat);
    let saving = job.save_program_state(7, state()).unwrap();
    let pulling = job.program_state(6).unwrap();
    let mut between = Vec::new();
    assert_eq!(receive(&mut peers[0], &mut between), state());
    // The worker may ask for a state after it has sent its own, and ends the job if it gets one that it has not asked for.
    while !between.iter().any(|header| header.operation == Operation::PullProgramState) {
        between.push(peers[0].request().unwrap().0);
    }
    send(&mut peers[0], 6, &state(), 0..2);
    // The hub says nothing more, so that the worker takes the stream for cut.
    let mut again = hub.accept();
    again.send_frame(Header::bare(Operation::Heartbeat), &[]);
    let mut asked = Vec::new();
    assert_eq!(receive(&mut again, &mut asked), state());
    let ask = Header { step: 6, ..Header::bare(Operation::PullProgramState) };
    assert_eq!(asked, [ask]);
    send(&mut again, 6, &state(), 0..5);
    saved(&mut again, 7);
    outcome(saving).unwrap();
    assert_eq!(outcome(pulling).unwrap(), Some(state()));
    peers.push(again);
    end(job, peers);
}

#[test]
fn the_answer_to_a_pull_may_begin_again_or_be_that_there_is_none() {
    let hub = Hub::new(1);
    let (job, mut peers) = open(&hub, |_| {}, Options::default());
    let peer = &mut peers[0];
    let pulling = job.program_state(3).unwrap();
    assert!(matches!(job.program_state(2), Err(WorkerError::Misused { .. })), "one at a time");
    assert_eq!(peer.request().unwrap().0.operation, Operation::PullProgramState);
    send(peer, 3, &[1; STATE_BYTES], 0..3);
    send(peer, 3, &state(), 0..5);
    assert_eq!(outcome(pulling).unwrap(), Some(state()));
    let pulling = job.program_state(2).unwrap();
    peer.request().unwrap();
    let header = Header { step: 2, ..Header::bare(Operation::ProgramState) };
    peer.send_frame(header, &ProgramState::head(ProgramState::MISSING));
    assert_eq!(outcome(pulling).unwrap(), None);
    end(job, peers);
}

#[test]
fn an_answer_that_belongs_to_nothing_ends_the_job() {
    let ask = |job: &Job, peer: &mut Peer| {
        let pulling = job.program_state(3).unwrap();
        peer.request().unwrap();
        pulling
    };
    type Script = fn(&mut Peer);
    let cases: [(Script, &str); 4] = [
        (
            |peer| saved(peer, 3),
            "it answered that the program state of step 3 is saved, which was not under way",
        ),
        (|peer| send(peer, 4, &[1], 0..1), "it sent a program state of step 4, which was not asked for"),
        (|peer| send(peer, 3, &state(), 1..2), "begins at byte 1024, but byte 0 of step 3 is due"),
        (
            |peer| send(peer, 3, &[0; STATE_BYTES + 1], 0..1),
            "that of step 3 has 4197 bytes, more than the 4196 of the job's `program_state_bytes`",
        ),
    ];
    for (script, reason) in cases {
        let hub = Hub::new(1);
        let (job, mut peers) = open(&hub, |_| {}, Options::default());
        let pulling = ask(&job, &mut peers[0]);
        script(&mut peers[0]);
        let error = outcome(pulling).unwrap_err();
        assert!(matches!(error, WorkerError::Protocol { .. }), "{error:?}");
        assert!(error.to_string().contains(reason), "{error}");
        assert!(matches!(job.save_program_state(9, []), Err(WorkerError::Protocol { .. })));
    }
}

#[test]
fn leaving_waits_for_a_state_that_is_being_saved() {
    let hub = Hub::new(1);
    let options = Options { leave_timeout: Duration::from_millis(100), ..Options::default() };
    let (job, mut peers) = open(&hub, |_| {}, options);
    let saving = job.save_program_state(7, state()).unwrap();
    receive(&mut peers[0], &mut Vec::new());
    let hears = std::thread::spawn(move || while peers[0].frame().is_some() {});
    let error = job.leave().unwrap_err();
    assert!(matches!(error, WorkerError::LeftEarly { .. }), "{error:?}");
    assert!(error.to_string().ends_with("under way for the program state of step 7"), "{error}");
    assert!(outcome(saving).is_err());
    hears.join().unwrap();
}
