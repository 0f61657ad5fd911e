use std::sync::{Arc, mpsc};
use std::time::Duration;

use paramhub_core::codec::{Codec, Dtype};
use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::norms::clip_factor;
use paramhub_core::settings::Settings;
use paramhub_core::wire::{Header, Norm, Notice, Operation, Release, Retune, State};
use paramhub_kernels::convert;
use paramhub_worker::{Options, WorkerError};

use super::hub::{CHUNK, Hub, Peer, WAIT_TIMEOUT, ramp, settings};

/// Ends a job whose scripted streams send nothing more.
fn part(job: paramhub_worker::Job, peers: Vec<Peer>) {
    std::thread::scope(|scope| {
        for mut peer in peers {
            scope.spawn(move || {
                assert_eq!(peer.request().expect("a leave message").0.operation, Operation::Leave);
                assert!(peer.frame().is_none(), "nothing follows the leave message");
            });
        }
        job.leave().unwrap();
    });
}

#[test]
fn a_push_pull_gives_back_the_very_buffers_with_the_answer_in_them() {
    let hub = Hub::new(2);
    let (job, mut peers) = hub.open_plain(settings(&[(2 * CHUNK + 7) as u64]));
    let (gradient, out) = (ramp(2 * CHUNK + 7), vec![0.0_f32; 2 * CHUNK + 7]);
    let (from, into) = (gradient.as_ptr(), out.as_ptr());
    let handle = job.push_pull(0, gradient, out).unwrap();
    let mut chunks = 0;
    for peer in &mut peers {
        let here = if peer.hello.core == 0 { 2 } else { 1 };
        peer.echo(here);
        chunks += here;
    }
    let (gradient, out) = handle.wait().unwrap();
    assert_eq!(out, gradient);
    assert_eq!((gradient.as_ptr(), out.as_ptr()), (from, into), "no buffer was copied");
    let statistics = job.statistics();
    let bytes = (4 * gradient.len() + 16 * chunks) as u64;
    assert_eq!((statistics.bytes_sent, statistics.bytes_received), (bytes, bytes));
    assert_eq!(statistics.requests, 1);
    assert!(statistics.in_flight > Duration::ZERO);
    assert_eq!(job.next_step(0).unwrap(), 1);
    part(job, peers);
}

#[test]
fn a_later_urgent_key_overtakes_a_large_one() {
    const LARGE: usize = 8 << 10;
    let hub = Hub::new(1);
    let settings = settings(&[10, (LARGE * CHUNK) as u64]);
    let options = Options { socket_send_bytes: Some(64 << 10), ..Options::default() };
    let (job, mut peers) = hub.open(hub.job_config(1, settings), options);
    // No peer reads, so the stream fills up long before the large key is sent.
    let large = job.push(1, ramp(LARGE * CHUNK)).unwrap();
    let mut urgent = job.push(0, ramp(10)).unwrap();
    let mut overtaken = None;
    for position in 0..=LARGE {
        let (header, payload) = peers[0].request().unwrap();
        if header.chunk == 0 {
            overtaken = Some(LARGE - position);
        } else {
            let at = (header.chunk as usize - 1) * CHUNK;
            let expected: Vec<f32> = (at..at + CHUNK).map(|index| index as f32 * 0.5 - 3.0).collect();
            assert_eq!(payload, bytemuck::cast_slice::<f32, u8>(&expected), "chunk {}", header.chunk);
        }
        peers[0].applied(header.chunk, header.step + 1);
    }
    let overtaken = overtaken.expect("the urgent key was sent");
    assert!(overtaken > LARGE / 2, "the urgent key overtook only {overtaken} of {LARGE} chunks");
    assert!(urgent.wait_timeout(WAIT_TIMEOUT).unwrap());
    large.wait().unwrap();
    part(job, peers);
}

#[test]
fn gradients_travel_in_the_settings_codec_however_writes_break_off() {
    // Chunks are larger than the socket's buffer, so that nearly every write stops inside one.
    const CHUNK: usize = 16 << 10;
    const CHUNKS: usize = 60;
    for codec in [Codec::BF16, Codec::F16] {
        let hub = Hub::new(1);
        let settings = Settings {
            codec: Some(codec),
            chunk_bytes: 4 * CHUNK as u32,
            ..settings(&[(CHUNKS * CHUNK) as u64])
        };
        let options = Options { socket_send_bytes: Some(8 << 10), ..Options::default() };
        let (job, mut peers) = hub.open(hub.job_config(1, settings), options);
        let gradient: Vec<f32> = (0..CHUNKS * CHUNK).map(|index| (index as f32).sin() * 100.0).collect();
        let mut expected = vec![0; CHUNKS * CHUNK * 2];
        convert::encode(&gradient, &mut expected, codec);
        let handle = job.push_pull(0, gradient, vec![0.0_f32; CHUNKS * CHUNK]).unwrap();
        let answer = [1.0_f32; CHUNK];
        for _ in 0..CHUNKS {
            let (header, payload) = peers[0].request().unwrap();
            assert_eq!(header.codec, codec);
            let at = header.chunk as usize * CHUNK * 2;
            assert!(payload == expected[at..at + CHUNK * 2], "chunk {} is another", header.chunk);
            peers[0].parameters(header.chunk, 1, bytemuck::cast_slice(&answer));
        }
        let (_, out) = handle.wait().unwrap();
        assert!(out.iter().all(|&value| value == 1.0));
        part(job, peers);
    }
}

#[test]
fn every_chunk_of_an_exchange_in_place_leaves_unchanged_while_others_are_replaced() {
    const CHUNK: usize = 16 << 10;
    const CHUNKS: usize = 60;
    for codec in [Codec::F32, Codec::BF16] {
        let hub = Hub::new(1);
        let settings = Settings {
            codec: Some(codec),
            chunk_bytes: 4 * CHUNK as u32,
            ..settings(&[(CHUNKS * CHUNK) as u64])
        };
        // Nearly every write stops inside a chunk, and the chunks gathered behind it are gathered again.
        let options = Options { socket_send_bytes: Some(8 << 10), ..Options::default() };
        let (job, mut peers) = hub.open(hub.job_config(1, settings), options);
        let gradient: Vec<f32> = (0..CHUNKS * CHUNK).map(|index| (index as f32).cos() * 100.0).collect();
        let mut expected = vec![0; CHUNKS * CHUNK * codec.bytes()];
        convert::encode(&gradient, &mut expected, codec);
        let memory = gradient.as_ptr();
        let handle = job.push_pull_in_place(0, gradient).unwrap();
        for _ in 0..CHUNKS {
            let (header, payload) = peers[0].request().unwrap();
            let chunk = header.chunk as usize;
            let bytes = CHUNK * codec.bytes();
            assert!(payload == expected[chunk * bytes..(chunk + 1) * bytes], "chunk {chunk} is another");
            peers[0].parameters(header.chunk, 1, bytemuck::cast_slice(&[chunk as f32; CHUNK]));
        }
        let ((), out) = handle.wait().unwrap();
        assert_eq!(out.as_ptr(), memory);
        assert!(out.chunks(CHUNK).zip(0..).all(|(chunk, number)| chunk == [number as f32; CHUNK]));
        let refused = job.push_pull_in_place(0, vec![0.0_f32; 3]).unwrap_err().to_string();
        assert!(refused.contains("the gradient in place has 12"), "{refused}");
        part(job, peers);
    }
}

#[test]
fn half_precision_keys_travel_as_they_lie_in_memory() {
    let mut key = Key::new("half", [CHUNK as u64 + 1]);
    key.dtype = Dtype::BF16;
    let hub = Hub::new(1);
    let settings = Settings { keys: KeyTable::new(vec![key]).unwrap(), ..settings(&[1]) };
    let (job, mut peers) = hub.open_plain(settings);
    let gradient: Vec<u16> = (0..CHUNK as u16 + 1).collect();
    let handle = job.push_pull(0, gradient.clone(), vec![0_u16; CHUNK + 1]).unwrap();
    for _ in 0..2 {
        let (header, payload) = peers[0].request().unwrap();
        assert_eq!(header.codec, Codec::BF16);
        peers[0].parameters_as(Codec::BF16, header.chunk, 1, &payload);
    }
    assert_eq!(handle.wait().unwrap().1, gradient);
    part(job, peers);
}

#[test]
fn broadcast_spreads_rank_zeros_parameters_and_their_version() {
    let hub = Hub::new(1);
    let (first, mut peers) =
        hub.open(hub.job_config(0, settings(&[10, CHUNK as u64 + 1])), Options::default());
    let mut parameters = [ramp(10), ramp(CHUNK + 1)];
    let payloads = std::thread::scope(|scope| {
        let broadcast = scope.spawn(|| first.broadcast(&mut parameters, 70));
        let mut payloads = vec![Vec::new(); 3];
        for _ in 0..3 {
            let (header, payload) = peers[0].request().unwrap();
            assert_eq!((header.operation, header.step), (Operation::Initialise, 70));
            peers[0].applied(header.chunk, 70);
            payloads[header.chunk as usize] = payload;
        }
        broadcast.join().unwrap().unwrap();
        payloads
    });
    assert_eq!(first.next_step(1).unwrap(), 70);
    part(first, peers);

    let (second, mut peers) = hub.open_plain(settings(&[10, CHUNK as u64 + 1]));
    let mut received = [vec![0.0_f32; 10], vec![0.0_f32; CHUNK + 1]];
    std::thread::scope(|scope| {
        let broadcast = scope.spawn(|| second.broadcast(&mut received, 0));
        for _ in 0..3 {
            let (header, _) = peers[0].request().unwrap();
            assert_eq!((header.operation, header.step, header.length), (Operation::Pull, 0, 0));
            peers[0].parameters(header.chunk, 70, &payloads[header.chunk as usize]);
        }
        broadcast.join().unwrap().unwrap();
    });
    assert_eq!(received, parameters);
    let push = second.push(0, ramp(10)).unwrap();
    let (header, _) = peers[0].request().unwrap();
    assert_eq!(header.step, 70, "steps count from the version that came with the parameters");
    peers[0].applied(0, 71);
    push.wait().unwrap();
    part(second, peers);
}

#[test]
fn a_scope_borrows_and_returns_when_all_is_answered() {
    let hub = Hub::new(1);
    let (job, mut peers) = hub.open_plain(settings(&[4, 6]));
    let (gradients, mut out) = ([ramp(4), ramp(6)], [vec![0.0_f32; 4], vec![0.0_f32; 6]]);
    std::thread::scope(|threads| {
        threads.spawn(|| peers[0].echo(2));
        let [first, second] = &mut out;
        job.scope(|scope| {
            let handle = scope.push_pull(0, &gradients[0], first).unwrap();
            // The test does not wait for this request: the scope does.
            scope.push_pull(1, &gradients[1], second).unwrap();
            handle.wait().unwrap();
        });
    });
    assert_eq!(out, gradients);
    part(job, peers);
}

#[test]
fn new_hyperparameters_leave_before_later_pushes_on_every_stream() {
    let hub = Hub::new(2);
    let mut settings = settings(&[2 * CHUNK as u64]);
    settings.optimizer.groups = vec![Hyperparameters::default()];
    let (job, mut peers) = hub.open_plain(settings);
    let changed = Hyperparameters { learning_rate: 0.125, ..Default::default() };
    job.set_hyperparameters(3, &changed).unwrap();
    job.set_group_hyperparameters(1, 4, &changed).unwrap();
    let handle = job.push_pull(0, ramp(2 * CHUNK), vec![0.0_f32; 2 * CHUNK]).unwrap();
    for peer in &mut peers {
        for (group, step) in [(0, 3), (1, 4)] {
            let (header, payload) = peer.request().unwrap();
            assert_eq!((header.operation, header.chunk, header.step), (Operation::Retune, group, step));
            assert_eq!(Retune::decode(&payload), Some(Retune(changed)));
        }
        peer.echo(1);
    }
    handle.wait().unwrap();
    let broken = Hyperparameters { learning_rate: f64::NAN, ..Default::default() };
    assert!(job.set_hyperparameters(4, &broken).unwrap_err().to_string().contains("finite"));
    let message = job.set_group_hyperparameters(2, 4, &changed).unwrap_err().to_string();
    assert!(message.contains("group 2, but the job has 2"), "{message}");
    part(job, peers);
}

#[test]
fn heartbeats_go_out_while_the_user_computes() {
    let hub = Hub::new(1);
    let options = Options { heartbeat: Duration::from_millis(40), ..Options::default() };
    let (job, mut peers) = hub.open(hub.job_config(1, settings(&[4])), options);
    // The user's thread, which is this one, calls nothing meanwhile.
    for _ in 0..3 {
        assert_eq!(peers[0].frame().unwrap().0.operation, Operation::Heartbeat);
    }
    part(job, peers);
}

#[test]
fn leaving_waits_for_what_is_under_way() {
    let hub = Hub::new(1);
    let (job, mut peers) = hub.open_plain(settings(&[4]));
    let handle = job.push_pull(0, ramp(4), vec![0.0_f32; 4]).unwrap();
    std::thread::scope(|scope| {
        let leaving = scope.spawn(|| job.leave());
        let (header, payload) = peers[0].request().unwrap();
        assert_eq!(header.operation, Operation::PushPull);
        peers[0].parameters(0, 1, &payload);
        assert_eq!(peers[0].request().unwrap().0.operation, Operation::Leave);
        assert!(peers[0].frame().is_none());
        drop(peers);
        leaving.join().unwrap().unwrap();
    });
    assert_eq!(handle.wait().unwrap().1, ramp(4));
}

#[test]
fn leaving_with_an_unanswered_request_names_it() {
    let hub = Hub::new(1);
    let options = Options { leave_timeout: Duration::from_millis(50), ..Options::default() };
    let (job, mut peers) = hub.open(hub.job_config(1, settings(&[4])), options);
    let handle = job.push_pull(0, ramp(4), vec![0.0_f32; 4]).unwrap();
    std::thread::scope(|scope| {
        let leaving = scope.spawn(|| job.leave());
        assert_eq!(peers[0].request().unwrap().0.operation, Operation::PushPull);
        assert_eq!(peers[0].request().unwrap().0.operation, Operation::Leave);
        drop(peers);
        let left = leaving.join().unwrap().unwrap_err();
        assert!(matches!(left, WorkerError::LeftEarly { .. }), "{left}");
        assert!(left.to_string().contains("`k0`"), "{left}");
    });
    let finished = handle.finish();
    assert!(matches!(finished.outcome, Err(WorkerError::LeftEarly { .. })));
    assert_eq!(finished.gradient, ramp(4));
}

#[test]
fn a_request_that_does_not_fit_is_refused_and_changes_nothing() {
    let hub = Hub::new(1);
    let (job, mut peers) = hub.open_plain(settings(&[4, 6]));
    let refused = job.push(0, vec![0.0_f32; 3]).unwrap_err().to_string();
    for part in ["job `digits`, rank 1", "`k0` f32 [4]", "16 bytes", "gradient has 12"] {
        assert!(refused.contains(part), "{refused}");
    }
    let refused = job.push_pull(1, ramp(6), vec![0.0_f32; 7]).unwrap_err().to_string();
    assert!(refused.contains("parameters has 28"), "{refused}");
    assert!(job.pull(2, vec![0_u8; 1]).unwrap_err().to_string().contains("key 2 does not exist"));
    assert!(job.initialise(0, ramp(4), 0).unwrap_err().to_string().contains("rank 0"));
    assert!(matches!(job.broadcast(&mut [ramp(4)], 0), Err(WorkerError::Misused { .. })));
    assert_eq!((job.key("k1"), job.key("k2")), (Some(1), None));

    let handle = job.push_pull(0, ramp(4), vec![0.0_f32; 4]).unwrap();
    let busy = job.push(0, ramp(4)).unwrap_err();
    assert!(busy.to_string().contains("a PushPull of key `k0` f32 [4] is still under way"), "{busy}");
    peers[0].echo(1);
    handle.wait().unwrap();
    assert_eq!(job.next_step(0).unwrap(), 1, "what was refused counts for nothing");
    part(job, peers);
}

#[test]
fn a_callback_may_ask_for_the_same_key_again() {
    let hub = Hub::new(1);
    let (job, mut peers) = hub.open_plain(settings(&[4]));
    let (sender, receiver) = mpsc::channel();
    let job = Arc::new(job);
    std::thread::scope(|scope| {
        scope.spawn(|| peers[0].echo(2));
        let again = Arc::clone(&job);
        let first = job.push_pull(0, ramp(4), vec![0.0_f32; 4]).unwrap();
        first.on_complete(move |outcome| {
            outcome.as_ref().unwrap();
            sender.send(again.push_pull(0, ramp(4), vec![0.0_f32; 4])).unwrap();
        });
        receiver.recv_timeout(WAIT_TIMEOUT).unwrap().unwrap().wait().unwrap();
    });
    assert_eq!(job.next_step(0).unwrap(), 2);
    drop(peers);
}

#[test]
fn many_threads_share_a_job_of_many_keys() {
    const THREADS: u32 = 4;
    const STEPS: usize = 20;
    let sizes: Vec<u64> = (0..24).map(|key| 1 + key * key * 17).collect();
    let chunks: usize = sizes.iter().map(|size| size.div_ceil(CHUNK as u64) as usize).sum();
    let hub = Hub::new(3);
    let (job, mut peers) = hub.open_plain(settings(&sizes));
    std::thread::scope(|scope| {
        for peer in &mut peers {
            scope.spawn(|| {
                // Answer as many as come: the placement decides how many chunks a core has.
                while let Some((header, payload)) = peer.request() {
                    match header.operation {
                        Operation::PushPull => peer.parameters(header.chunk, header.step + 1, &payload),
                        Operation::Leave => return,
                        other => panic!("{other:?} was not asked for"),
                    }
                }
            });
        }
        std::thread::scope(|users| {
            for user in 0..THREADS {
                let (job, sizes) = (&job, &sizes);
                users.spawn(move || {
                    for step in 0..STEPS {
                        let mine = (0..sizes.len() as u32).rev().filter(|key| key % THREADS == user);
                        let handles: Vec<_> = mine
                            .map(|key| {
                                let elements = sizes[key as usize] as usize;
                                let gradient = vec![(step + key as usize) as f32; elements];
                                job.push_pull(key, gradient, vec![-1.0_f32; elements]).unwrap()
                            })
                            .collect();
                        for handle in handles {
                            let (gradient, out) = handle.wait().unwrap();
                            assert_eq!(out, gradient);
                        }
                    }
                });
            }
        });
        let statistics = job.statistics();
        assert_eq!(statistics.requests, (sizes.len() * STEPS) as u64);
        let elements: u64 = sizes.iter().sum();
        assert!(statistics.bytes_sent >= STEPS as u64 * (4 * elements + 16 * chunks as u64));
        job.leave().unwrap();
    });
}

#[test]
fn notices_are_kept_and_passed_to_the_callback() {
    let hub = Hub::new(1);
    let (job, mut peers) = hub.open_plain(settings(&[4]));
    let (sender, receiver) = mpsc::channel();
    job.on_notice(move |notice| sender.send(notice.clone()).unwrap());
    let notice = Notice { rank: Some(2), message: "rank 2 has been silent for 3 s".into() };
    peers[0].send_frame(Header::bare(Operation::Notice), &notice.encode());
    let received = receiver.recv_timeout(WAIT_TIMEOUT).unwrap();
    assert_eq!(
        (received.rank, received.message.as_str(), &*received.hub),
        (Some(2), notice.message.as_str(), &*hub.address)
    );
    assert_eq!(job.notices(), [received]);
    part(job, peers);
}

#[test]
fn a_norm_is_complete_with_every_routes_part_and_rank_zero_releases_it_on_every_stream() {
    let settings = || Settings { clip_norm: Some(1.0), ..settings(&[2 * CHUNK as u64]) };
    for rank in [0, 1] {
        let hub = Hub::new(2);
        let (job, mut peers) = hub.open(hub.job_config(rank, settings()), Options::default());
        for step in 0..3 {
            let mut norm = job.gradient_norm(step).unwrap();
            let handle = job.push_pull(0, ramp(2 * CHUNK), vec![0.0_f32; 2 * CHUNK]).unwrap();
            let (sender, receiver) = mpsc::channel();
            job.gradient_norm(step)
                .unwrap()
                .on_complete(move |outcome| sender.send(outcome.is_ok()).unwrap());
            let requests: Vec<_> = peers.iter_mut().map(|peer| peer.request().unwrap()).collect();
            for (peer, part) in peers.iter_mut().zip([9.0, 16.0]) {
                assert!(!norm.is_done(), "a part is missing");
                let header = Header { step, ..Header::bare(Operation::Norm) };
                peer.send_frame(header, &Norm(part).encode());
            }
            assert!(norm.wait_timeout(WAIT_TIMEOUT).unwrap());
            assert_eq!(norm.wait().unwrap().1, 5.0);
            assert!(receiver.recv_timeout(WAIT_TIMEOUT).unwrap());
            assert_eq!(job.last_gradient_norm(), Some((step, 5.0)));
            for (peer, (header, payload)) in peers.iter_mut().zip(requests) {
                if rank == 0 {
                    let (header, factor) = peer.request().unwrap();
                    assert_eq!((header.operation, header.step), (Operation::Release, step));
                    let (release, tensors) = Release::decode(&factor).unwrap();
                    assert_eq!((release, tensors.len()), (Release(clip_factor(1.0, 5.0)), 0));
                }
                peer.parameters(header.chunk, step + 1, &payload);
            }
            handle.wait().unwrap();
        }
        part(job, peers);
    }
}

#[test]
fn a_norm_that_nothing_waits_for_breaks_the_protocol() {
    let norm = |peer: &mut Peer, step| {
        peer.send_frame(Header { step, ..Header::bare(Operation::Norm) }, &Norm(1.0).encode());
    };
    let clipped = || Settings { clip_norm: Some(1.0), ..settings(&[10]) };
    for (settings, steps) in [(settings(&[10]), vec![0]), (clipped(), vec![4, 4]), (clipped(), vec![4, 6])] {
        let hub = Hub::new(1);
        let (job, mut peers) = hub.open_plain(settings);
        let handle = job.push(0, ramp(10)).unwrap();
        for &step in &steps {
            norm(&mut peers[0], step);
        }
        let error = handle.wait().unwrap_err();
        assert!(matches!(error, WorkerError::Protocol { .. }), "{steps:?}: {error}");
        assert!(error.to_string().contains("for which nothing waits"), "{error}");
        let late = job.gradient_norm(9).unwrap_err().to_string();
        assert!(late.contains("for which nothing waits") || late.contains("only in two phases"), "{late}");
    }
}

#[test]
fn optimizer_state_travels_chunk_by_chunk_behind_its_count() {
    let hub = Hub::new(1);
    let settings = settings(&[CHUNK as u64 + 3]);
    let (job, mut peers) = hub.open(hub.job_config(0, settings), Options::default());
    assert_eq!(job.state_slots(), 2);
    let values = ramp(CHUNK + 3);
    let handle = job.initialise_state(0, 1, values.clone(), 12).unwrap();
    for chunk in values.chunks(CHUNK) {
        let (header, payload) = peers[0].request().unwrap();
        assert_eq!((header.operation, header.step), (Operation::InitialiseState, 1));
        let values = bytemuck::cast_slice(chunk);
        assert_eq!(State::decode(&payload), Some(State { updates: 12, values }));
        peers[0].applied(header.chunk, 0);
    }
    assert_eq!(handle.wait().unwrap().0, values);
    let handle = job.pull_state(0, 1, vec![0.0_f32; CHUNK + 3]).unwrap();
    for (chunk, updates) in values.chunks(CHUNK).zip([14, 13]) {
        let (header, _) = peers[0].request().unwrap();
        assert_eq!((header.operation, header.step), (Operation::PullState, 1));
        let header = Header { chunk: header.chunk, step: 1, ..Header::bare(Operation::State) };
        peers[0].send_frame(header, &[&State::head(updates)[..], bytemuck::cast_slice(chunk)].concat());
    }
    let pulled = handle.finish();
    assert_eq!((pulled.parameters, pulled.updates), (values, 13), "the smallest count is returned");
    part(job, peers);
}
