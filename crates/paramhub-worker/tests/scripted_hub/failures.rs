use std::time::{Duration, Instant};

use paramhub_core::codec::Codec;
use paramhub_core::scheme::Roster;
use paramhub_core::service::JobOptions;
use paramhub_core::settings::Settings;
use paramhub_core::wire::{Failure, Header, Notice, Operation};
use paramhub_worker::{Job, JobConfig, Options, WorkerError};

use super::hub::{self, CHUNK, Hub, Peer, WAIT_TIMEOUT, ramp, settings};

/// Asserts that a request under way and a later one fail alike, and that the buffers of the first come back.
fn assert_failed(
    job: &Job,
    handle: paramhub_worker::Handle<Vec<f32>, Vec<f32>>,
    is_expected: impl Fn(&WorkerError) -> bool,
) -> String {
    let finished = handle.finish();
    let error = finished.outcome.unwrap_err();
    assert!(is_expected(&error), "{error}");
    assert!(!finished.gradient.is_empty() && !finished.parameters.is_empty());
    // Try twice: a refused request must not occupy its key.
    for _ in 0..2 {
        let later = job.push(1, ramp(4)).unwrap_err();
        assert_eq!(later.to_string(), error.to_string());
    }
    assert_eq!(job.failure().unwrap().to_string(), error.to_string());
    assert!(error.to_string().starts_with("job `digits`, rank 1: "), "{error}");
    error.to_string()
}

fn ask(job: &Job, elements: usize) -> paramhub_worker::Handle<Vec<f32>, Vec<f32>> {
    job.push_pull(0, ramp(elements), vec![0.0_f32; elements]).unwrap()
}

#[test]
fn a_hub_that_goes_away_fails_every_request_at_once() {
    let hub = Hub::new(1);
    let (job, mut peers) = hub.open_plain(settings(&[4, 4]));
    let handle = ask(&job, 4);
    peers[0].request().unwrap();
    peers.remove(0).hang_up();
    let error = assert_failed(&job, handle, |error| matches!(error, WorkerError::Lost { .. }));
    assert!(error.contains(&hub.address), "{error}");
    assert!(matches!(job.leave(), Err(WorkerError::Lost { .. })));
}

#[test]
fn the_hubs_reason_and_the_rank_at_fault_are_passed_on() {
    let hub = Hub::new(1);
    let (job, mut peers) = hub.open_plain(settings(&[4, 4]));
    let handle = ask(&job, 4);
    let failure = Failure { rank: Some(3), message: "rank 3 was lost: the connection was reset".into() };
    peers[0].send_frame(Header::bare(Operation::Failure), &failure.encode());
    let error = assert_failed(&job, handle, |error| error.culprit() == Some(3));
    assert!(error.contains("because of rank 3: rank 3 was lost"), "{error}");
}

#[test]
fn a_reason_on_one_stream_counts_more_than_the_end_of_another() {
    let hub = Hub::new(2);
    let (job, mut peers) = hub.open_plain(settings(&[2 * CHUNK as u64, 4]));
    let handle = ask(&job, 2 * CHUNK);
    peers.remove(0).hang_up();
    // The worker has seen the end by now, or will see it together with the reason.
    std::thread::sleep(Duration::from_millis(50));
    let failure = Failure { rank: Some(0), message: "rank 0 was killed".into() };
    peers[0].send_frame(Header::bare(Operation::Failure), &failure.encode());
    assert_failed(&job, handle, |error| error.culprit() == Some(0));
}

#[test]
fn a_hubs_reason_goes_on_to_the_hubs_that_do_not_know_it() {
    let hubs = [Hub::new(1), Hub::new(1)];
    let mut job_config = hubs[0].job_config(1, settings(&[2 * CHUNK as u64, 4]));
    job_config.hubs.extend(hubs[1].job_config(1, settings(&[4])).hubs);
    job_config.roster = Roster::beside_workers(2, &job_config.hubs);
    let (job, [mut first, mut second]) = std::thread::scope(|scope| {
        let job = scope.spawn(|| job_config.open(Options::default()));
        let peers = hubs.each_ref().map(Hub::accept);
        (job.join().unwrap().unwrap(), peers)
    });
    let handle = ask(&job, 2 * CHUNK);
    second.request().unwrap();
    let failure = Failure { rank: Some(0), message: "rank 0 was lost: the connection was reset".into() };
    first.send_frame(Header::bare(Operation::Failure), &failure.encode());
    // The worker waits for this hub to read that.
    let announced = loop {
        let (header, payload) = second.request().expect("the stream has a reason before its end");
        if header.operation == Operation::Failure {
            break Failure::decode(&payload).unwrap();
        }
    };
    assert_eq!(announced.rank, Some(1));
    let heard = format!("the hub at {} ended the job: rank 0 was lost", hubs[0].address);
    assert!(announced.message.starts_with(&heard), "{}", announced.message);
    second.hang_up();
    assert_failed(&job, handle, |error| error.culprit() == Some(0));
}

/// The frames of a hub, and words of the worker's error.
type Offence = (&'static str, fn(&mut Peer));

#[test]
fn answers_without_a_request_end_the_job_with_an_error() {
    let offences: [Offence; 7] = [
        ("chunk 99, which does not exist", |peer| peer.parameters(99, 1, &[0; 16])),
        ("waits for no such answer", |peer| peer.parameters(1, 1, &[0; 16])),
        ("waits for no such answer", |peer| peer.applied(0, 1)),
        ("older than version 1", |peer| peer.parameters(0, 0, &[0; 16])),
        ("12 bytes of f32", |peer| peer.parameters(0, 1, &[0; 12])),
        ("8 bytes of bf16", |peer| peer.parameters_as(Codec::BF16, 0, 1, &[0; 8])),
        ("Failure frame cannot be read", |peer| peer.send_frame(Header::bare(Operation::Failure), &[0; 2])),
    ];
    for (complaint, offend) in offences {
        let hub = Hub::new(1);
        let (job, mut peers) = hub.open_plain(settings(&[4, 4]));
        let handle = ask(&job, 4);
        peers[0].request().unwrap();
        offend(&mut peers[0]);
        let error = assert_failed(&job, handle, |error| matches!(error, WorkerError::Protocol { .. }));
        assert!(error.contains(complaint) && error.contains(&hub.address), "{error}");
    }
}

#[test]
fn an_answer_on_another_stream_than_the_chunks_is_an_offence() {
    let hub = Hub::new(2);
    let (job, mut peers) = hub.open_plain(settings(&[2 * CHUNK as u64, 4]));
    let handle = ask(&job, 2 * CHUNK);
    let (header, payload) = peers[0].request().unwrap();
    peers[1].request().unwrap();
    peers[1].parameters(header.chunk, 1, &payload);
    let error = assert_failed(&job, handle, |error| matches!(error, WorkerError::Protocol { .. }));
    assert!(error.contains("a stream that does not carry it"), "{error}");
}

#[test]
fn an_answer_before_the_request_has_left_whole_is_an_offence() {
    const LARGE: usize = 8 << 10;
    let hub = Hub::new(1);
    let options = Options { socket_send_bytes: Some(64 << 10), ..Options::default() };
    let (job, mut peers) = hub.open(hub.job_config(1, settings(&[(LARGE * CHUNK) as u64, 4])), options);
    let handle = ask(&job, LARGE * CHUNK);
    peers[0].request().unwrap();
    peers[0].parameters(LARGE as u32 - 1, 1, &[0; 4 * CHUNK]);
    assert_failed(&job, handle, |error| matches!(error, WorkerError::Protocol { .. }));
}

#[test]
fn an_exchange_in_place_overwrites_no_chunk_that_has_not_left_whole() {
    // A chunk larger than any socket's buffer, so that it begins to leave and never ends.
    const ELEMENTS: usize = 4 << 20;
    let hub = Hub::new(1);
    let settings = Settings { chunk_bytes: 4 * ELEMENTS as u32, ..settings(&[ELEMENTS as u64, 4]) };
    let (job, mut peers) = hub.open_plain(settings);
    let handle = job.push_pull_in_place(0, ramp(ELEMENTS)).unwrap();
    peers[0].await_something();
    let length = 4 * ELEMENTS as u32;
    let early = Header { step: 1, length, ..Header::bare(Operation::Parameters) };
    peers[0].send_bytes(&[&early.encode()[..], &[0xff; 4096]].concat());
    let finished = handle.finish();
    assert!(matches!(finished.outcome, Err(WorkerError::Protocol { .. })), "{:?}", finished.outcome);
    assert!(finished.parameters == ramp(ELEMENTS), "the gradient was overwritten while it left");

    // Some of the many chunks are answered in time and are new; the others are as they were.
    const CHUNKS: usize = 8 << 10;
    let options = Options { socket_send_bytes: Some(64 << 10), ..Options::default() };
    let (job, mut peers) = hub.open(hub.job_config(1, hub::settings(&[(CHUNKS * CHUNK) as u64, 4])), options);
    let handle = job.push_pull_in_place(0, ramp(CHUNKS * CHUNK)).unwrap();
    assert_eq!(peers[0].request().unwrap().0.chunk, 0);
    peers[0].parameters(0, 1, &[0; 4 * CHUNK]);
    peers[0].parameters(CHUNKS as u32 - 1, 1, &[0; 4 * CHUNK]);
    let finished = handle.finish();
    assert!(matches!(finished.outcome, Err(WorkerError::Protocol { .. })), "{:?}", finished.outcome);
    assert_eq!(finished.parameters[..CHUNK], [0.0; CHUNK]);
    assert!(finished.parameters[CHUNK..] == ramp(CHUNKS * CHUNK)[CHUNK..]);
}

#[test]
fn bytes_that_are_no_frame_end_the_job() {
    let hub = Hub::new(1);
    let (job, mut peers) = hub.open_plain(settings(&[4, 4]));
    let handle = ask(&job, 4);
    // Only workers send this frame.
    peers[0].send_frame(Header::bare(Operation::Leave), &[]);
    let error = assert_failed(&job, handle, |error| matches!(error, WorkerError::Protocol { .. }));
    assert!(error.contains("does not go this way"), "{error}");
}

#[test]
fn a_hub_that_falls_silent_is_named() {
    let hub = Hub::new(1);
    let job_options = JobOptions { dead_after_s: 0.2, ..JobOptions::default() };
    let job_config = JobConfig { job_options, ..hub.job_config(1, settings(&[4, 4])) };
    let options = Options { heartbeat: Duration::from_millis(100), ..Options::default() };
    let (job, _peers) = hub.open(job_config, options);
    let handle = ask(&job, 4);
    let error = assert_failed(&job, handle, |error| matches!(error, WorkerError::Silent { .. }));
    assert!(error.contains(&hub.address) && error.contains("has been silent for"), "{error}");
}

#[test]
fn heartbeats_keep_a_slow_hub_alive() {
    let hub = Hub::new(1);
    let job_options = JobOptions { dead_after_s: 2.0, ..JobOptions::default() };
    let job_config = JobConfig { job_options, ..hub.job_config(1, settings(&[4, 4])) };
    let (job, mut peers) = hub.open(job_config, Options::default());
    let mut handle = ask(&job, 4);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(2500) {
        peers[0].send_frame(Header::bare(Operation::Heartbeat), &[]);
        std::thread::sleep(Duration::from_millis(100));
    }
    peers[0].echo(1);
    assert!(handle.wait_timeout(WAIT_TIMEOUT).unwrap());
}

#[test]
fn a_worker_that_was_held_up_itself_does_not_blame_the_hub() {
    const DEAD_AFTER: Duration = Duration::from_millis(1500);
    let hub = Hub::new(1);
    let job_options = JobOptions { dead_after_s: DEAD_AFTER.as_secs_f64(), ..JobOptions::default() };
    let job_config = JobConfig { job_options, ..hub.job_config(1, settings(&[4, 4])) };
    let (job, mut peers) = hub.open(job_config, Options::default());
    let (sender, receiver) = std::sync::mpsc::channel();
    job.on_notice(move |_| {
        std::thread::sleep(DEAD_AFTER + Duration::from_millis(200));
        sender.send(()).unwrap();
    });
    let mut handle = ask(&job, 4);
    let notice = Notice { rank: None, message: "nothing in particular".into() };
    peers[0].send_frame(Header::bare(Operation::Notice), &notice.encode());
    receiver.recv_timeout(WAIT_TIMEOUT).unwrap();
    peers[0].echo(1);
    assert!(handle.wait_timeout(WAIT_TIMEOUT).unwrap());
}

#[test]
fn a_panicking_callback_ends_the_job_with_an_error() {
    let hub = Hub::new(1);
    let (job, mut peers) = hub.open_plain(settings(&[4, 4]));
    let handle = job.push_pull(1, ramp(4), vec![0.0_f32; 4]).unwrap();
    handle.on_complete(|_| panic!("the user's own fault"));
    let other = ask(&job, 4);
    let (header, payload) = loop {
        let (header, payload) = peers[0].request().unwrap();
        if header.chunk == 1 {
            break (header, payload);
        }
    };
    peers[0].parameters(header.chunk, 1, &payload);
    handle.wait().unwrap();
    let error = assert_failed(&job, other, |error| matches!(error, WorkerError::Callback { .. }));
    assert!(error.contains("the user's own fault"), "{error}");
}

#[test]
fn dropping_a_job_that_has_failed_waits_for_nothing() {
    let hub = Hub::new(1);
    let (job, mut peers) = hub.open_plain(settings(&[4, 4]));
    peers.remove(0).hang_up();
    drop(job);
}
