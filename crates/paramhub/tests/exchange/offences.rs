//! What goes wrong, and what then happens: a clear error to the one at fault and to those who depend on it, and nothing to
//! anybody else.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use paramhub_core::auth::{Incarnation, Nonce, Purpose};
use paramhub_core::chunk::ChunkMap;
use paramhub_core::codec::Codec;
use paramhub_core::consistency::Consistency;
use paramhub_core::placement::Placement;
use paramhub_core::service::{ConnectService, CreateService, InitService, JobOptions, JobState};
use paramhub_core::settings::Settings;
use paramhub_core::wire::{
    CHALLENGE_BYTES, Direction, Failure, HEADER_BYTES, Header, Hello, Operation, VERDICT_BYTES, Verdict,
    stream_proofs,
};
use paramhub_hub::{HubConfig, RunningHub};
use paramhub_worker::{Job, Member, WorkerError};

use crate::cluster::{Cluster, PATIENCE, Ticket, keys, sgd};

/// A job of one key and one chunk, for peers that speak the protocol by hand.
fn settings() -> Settings {
    Settings::new(keys(&[4]))
}

/// A worker that speaks the protocol by hand, and so can break it.
struct Raw {
    socket: TcpStream,
}

fn hello(ticket: &Ticket, rank: u32, settings: &Settings, cluster: &Cluster) -> Hello {
    let map = ChunkMap::new(&settings.keys, settings.chunk_bytes).unwrap();
    let shape = cluster.client.hubs().unwrap().remove(0).shape;
    let placement = Placement::new(&settings.keys, &map, &[shape]).unwrap();
    Hello {
        rank,
        interface: 0,
        core: 0,
        namespace: ticket.namespace,
        incarnation: Incarnation([rank as u8 + 1; 16]),
        placement: *placement.hash().as_bytes(),
        challenge: [7; CHALLENGE_BYTES],
    }
}

impl Raw {
    fn dial(address: SocketAddr) -> Raw {
        let socket = TcpStream::connect(address).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.set_nodelay(true).unwrap();
        Raw { socket }
    }

    /// Joins as any worker does: ConnectService, InitService, handshake.
    fn join(cluster: &Cluster, ticket: &Ticket, rank: u32) -> Raw {
        let (mut raw, hello) = Raw::join_but_for_streams(cluster, ticket, rank);
        match raw.shake_hands(&hello, &ticket.nonce) {
            Verdict::Welcome { .. } => raw,
            Verdict::Refused { message, .. } => panic!("refused: {message}"),
        }
    }

    /// As far as a connection that has said nothing yet, and what it is to say first.
    fn join_but_for_streams(cluster: &Cluster, ticket: &Ticket, rank: u32) -> (Raw, Hello) {
        let hello = hello(ticket, rank, &settings(), cluster);
        let prove = |purpose| ticket.nonce.prove_rank(purpose, ticket.namespace, rank, hello.incarnation);
        let incarnation = hello.incarnation;
        let connect = ConnectService {
            rank,
            incarnation,
            proof: prove(Purpose::Connect),
            host: "by hand".into(),
            process: 0,
        };
        cluster.client.connect_service(ticket.namespace, &connect, PATIENCE).unwrap();
        let init = InitService { rank, incarnation, proof: prove(Purpose::Init), settings: settings() };
        cluster.client.init_service(ticket.namespace, &init, PATIENCE).unwrap();
        (Raw::dial(cluster.hub().addresses()[0]), hello)
    }

    fn shake_hands(&mut self, hello: &Hello, nonce: &Nonce) -> Verdict {
        self.socket.write_all(&hello.encode()).unwrap();
        let mut challenge = [0; CHALLENGE_BYTES];
        self.socket.read_exact(&mut challenge).unwrap();
        self.socket.write_all(&stream_proofs(nonce, hello, &challenge).0.0).unwrap();
        let mut verdict = [0; VERDICT_BYTES];
        self.socket.read_exact(&mut verdict).unwrap();
        Verdict::decode(&verdict).unwrap()
    }

    /// Closes with a reset, as a process does that ends with answers unread.
    fn reset(self) {
        rustix::net::sockopt::set_socket_linger(&self.socket, Some(Duration::ZERO)).unwrap();
    }

    fn send(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).unwrap();
    }

    /// Reads frames until one of this kind; its header and payload.
    fn await_frame(&mut self, operation: Operation) -> (Header, Vec<u8>) {
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

    fn await_failure(&mut self) -> Failure {
        Failure::decode(&self.await_frame(Operation::Failure).1).unwrap()
    }

    /// Whether the other side closes without another frame.
    fn is_closed(&mut self) -> bool {
        let mut byte = [0];
        matches!(self.socket.read(&mut byte), Ok(0) | Err(_))
    }
}

fn push(step: u32) -> Vec<u8> {
    let header = Header { operation: Operation::PushPull, codec: Codec::F32, chunk: 0, step, length: 16 };
    [&header.encode()[..], &[0; 16]].concat()
}

/// A job that goes on while something else goes wrong, and is right to the end.
fn beside_a_running_job(cluster: &Cluster, offend: impl FnOnce()) {
    let ticket = cluster.job("bystander", 2);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let bystanders = scope.spawn(|| {
            let settings = Settings::new(keys(&[30_000, 4]));
            ticket.run(&settings, |job| {
                let mut steps = 0;
                // Both ranks must agree on when to end: the sum tells whether either has seen that it is over.
                loop {
                    let end = if over.load(Ordering::SeqCst) { 1.0f32 } else { 0.0 };
                    let gradient = vec![end; 4];
                    let (_, votes) = job.push_pull(1, gradient, vec![0.0f32; 4]).unwrap().wait().unwrap();
                    let ones = vec![1.0f32; 30_000];
                    let (_, mean) = job.push_pull(0, ones, vec![0.0f32; 30_000]).unwrap().wait().unwrap();
                    assert!(mean.iter().all(|&value| value == 1.0));
                    steps += 1;
                    if votes[0] > 0.0 && steps > 20 {
                        return steps;
                    }
                }
            })
        });
        cluster.await_state("bystander", JobState::Running);
        let offended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(offend));
        over.store(true, Ordering::SeqCst);
        bystanders.join().unwrap();
        offended.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    assert_eq!(cluster.await_end("bystander").state, JobState::Finished);
}

#[test]
fn each_bad_frame_fails_its_job_with_its_reason_and_no_other_job() {
    let cluster = Cluster::new(1);
    let mut wrong_length = push(0);
    wrong_length[12..16].copy_from_slice(&12u32.to_le_bytes());
    let mut oversized = push(0);
    oversized[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    let mut unknown_chunk = push(0);
    unknown_chunk[4] = 9;
    let mut bad_operation = push(0);
    bad_operation[0] = 200;
    let mut hubs_operation = push(0);
    hubs_operation[0] = Operation::Parameters as u8;
    let mut wrong_codec = push(0);
    wrong_codec[1] = Codec::F16 as u8;
    let offences = [
        ("bad operation", bad_operation, "operation 200 does not exist"),
        ("the hub's operation", hubs_operation, "does not go this way"),
        ("unknown chunk", unknown_chunk, "chunk 9, which is not on this stream"),
        ("wrong length", wrong_length, "12 bytes of f32 for chunk 0 of key `layer0`, which has 16 bytes"),
        ("oversized length", oversized, "announces 4294967295 bytes"),
        ("wrong codec", wrong_codec, "16 bytes of f16"),
        ("future step", push(5), "step 5 was asked for, but step 0 is under way"),
        ("old step", [push(0), push(0)].concat(), "before the first was answered"),
    ];
    beside_a_running_job(&cluster, || {
        for (number, (what, bytes, reason)) in offences.into_iter().enumerate() {
            let name = format!("offence{number}");
            let ticket = cluster.job(&name, 2);
            std::thread::scope(|scope| {
                let honest = scope.spawn(|| {
                    let exchange =
                        |job: Job| job.push_pull(0, vec![0.0f32; 4], vec![0.0f32; 4])?.wait().map(drop);
                    ticket.join(0, settings()).and_then(exchange)
                });
                let mut raw = Raw::join(&cluster, &ticket, 1);
                raw.send(&bytes);
                let failure = raw.await_failure();
                assert_eq!(failure.rank, Some(1), "{what}: {failure:?}");
                assert!(failure.message.contains(reason), "{what}: {}", failure.message);
                assert!(
                    failure.message.contains(&format!("job `{name}` failed: rank 1")),
                    "{what}: {}",
                    failure.message
                );
                assert!(raw.is_closed(), "{what}");
                if let Err(told) = honest.join().unwrap() {
                    let told = told.to_string();
                    assert!(told.contains(reason) && told.contains("rank 1"), "{what}: {told}");
                } else {
                    assert_eq!(
                        what, "old step",
                        "only there the honest rank's step can end before the offence"
                    );
                }
            });
            let status = cluster.await_end(&name);
            assert_eq!(status.state, JobState::Failed, "{what}");
            assert!(status.message.contains(reason), "{what}: {}", status.message);
        }
    });
}

#[test]
fn a_step_that_is_over_is_refused() {
    let cluster = Cluster::new(1);
    let ticket = cluster.job("late", 1);
    let mut raw = Raw::join(&cluster, &ticket, 0);
    for step in 0..2 {
        raw.send(&push(step));
        assert_eq!(raw.await_frame(Operation::Parameters).0.step, step + 1);
    }
    raw.send(&push(0));
    let message = raw.await_failure().message;
    assert!(message.contains("step 0 was pushed, but step 2 is due"), "{message}");
}

#[test]
fn frames_before_the_handshake_reach_nobody() {
    let cluster = Cluster::new(1);
    beside_a_running_job(&cluster, || {
        for _ in 0..20 {
            let mut stranger = Raw::dial(cluster.hub().addresses()[0]);
            stranger.send(&push(0).repeat(20));
            let mut answer = Vec::new();
            let _ = stranger.socket.read_to_end(&mut answer);
            let verdict = answer
                .get(CHALLENGE_BYTES..CHALLENGE_BYTES + VERDICT_BYTES)
                .map(|wire| Verdict::decode(wire.try_into().unwrap()).unwrap());
            match verdict {
                Some(Verdict::Refused { message, .. }) => {
                    assert!(message.contains("not paramhub's"), "{message}")
                }
                // Reset before it was read: also closed.
                None => {}
                Some(Verdict::Welcome { .. }) => panic!("a stranger was let in"),
            }
        }
    });
}

#[test]
fn random_bytes_on_both_ports_harm_nobody() {
    let cluster = Cluster::new(1);
    let seed: u64 = std::env::var("PARAMHUB_TEST_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or_else(|| std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64);
    println!("PARAMHUB_TEST_SEED={seed}");
    let manager: SocketAddr = cluster.client.url().trim_start_matches("http://").parse().unwrap();
    let mut state = seed | 1;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    beside_a_running_job(&cluster, || {
        for round in 0..60 {
            let address = if round % 2 == 0 { manager } else { cluster.hub().addresses()[0] };
            let mut bytes: Vec<u8> = (0..random() % 5000).map(|_| random() as u8).collect();
            match round % 3 {
                // As far as the hub's first check, then noise.
                0 if bytes.len() > 6 => bytes[..6].copy_from_slice(b"PHUB\x01\x00"),
                1 => bytes
                    .splice(0..0, *b"POST /v1/jobs HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n")
                    .for_each(drop),
                _ => {}
            }
            let mut stranger = TcpStream::connect(address).unwrap();
            stranger.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            let _ = stranger.write_all(&bytes);
            let _ = stranger.read(&mut [0; 64]);
        }
    });
}

#[test]
fn a_wrong_nonce_opens_neither_door() {
    let cluster = Cluster::new(1);
    let ticket = cluster.job("secret", 1);
    let guess = Ticket { nonce: Nonce([0; 32]), ..ticket.clone() };
    let refused = Member::connect(guess.membership(0)).expect_err("the nonce is wrong").to_string();
    assert!(
        refused.contains("PARAMHUB_SECRET") || refused.contains("nonce") || refused.contains("secret"),
        "{refused}"
    );
    ticket.run(&settings(), |_| {
        let mut raw = Raw::dial(cluster.hub().addresses()[0]);
        let hello = hello(&ticket, 0, &settings(), &cluster);
        match raw.shake_hands(&hello, &Nonce([0; 32])) {
            Verdict::Refused { message, .. } => assert!(message.contains("secret is wrong"), "{message}"),
            Verdict::Welcome { .. } => panic!("a wrong nonce was let in"),
        }
        assert!(raw.is_closed());
        // The right one, but a rank that is here already, as another process.
        let mut raw = Raw::dial(cluster.hub().addresses()[0]);
        match raw.shake_hands(&hello, &ticket.nonce) {
            Verdict::Refused { message, .. } => {
                assert!(message.contains("two processes have the same rank"), "{message}")
            }
            Verdict::Welcome { .. } => panic!("a second rank 0 was let in"),
        }
        let mut raw = Raw::dial(cluster.hub().addresses()[0]);
        let elsewhere = Hello { placement: [0; 32], ..hello };
        match raw.shake_hands(&elsewhere, &ticket.nonce) {
            Verdict::Refused { message, .. } => {
                assert!(message.contains("different placements"), "{message}")
            }
            Verdict::Welcome { .. } => panic!("another placement was let in"),
        }
    });
}

#[test]
fn a_second_process_of_a_rank_is_refused_and_told_who_has_it() {
    let cluster = Cluster::new(1);
    let ticket = cluster.job("twins", 2);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| Member::connect(ticket.membership(0)));
        cluster.await_job("twins", |status| status.connected == [0]);
        let second = Member::connect(ticket.membership(0)).expect_err("the rank is taken").to_string();
        assert!(second.contains("rank 0") && second.contains(&std::process::id().to_string()), "{second}");
        let other = Member::connect(ticket.membership(1)).unwrap();
        let job = first.join().unwrap().unwrap();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| other.init(settings()).unwrap().leave().unwrap());
            job.init(settings()).unwrap().leave().unwrap();
            other.join().unwrap();
        });
    });
}

#[test]
fn different_key_tables_are_told_to_both_sides() {
    let cluster = Cluster::new(1);
    let ticket = cluster.job("tables", 2);
    let told: Vec<String> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2u32)
            .map(|rank| {
                let (ticket, sizes) = (&ticket, [4, 5 + u64::from(rank)]);
                scope.spawn(move || ticket.join(rank, Settings::new(keys(&sizes))).err().unwrap().to_string())
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for told in told {
        assert!(
            told.contains("key 1") && told.contains("`layer1` f32 [5]") && told.contains("`layer1` f32 [6]"),
            "{told}"
        );
    }
    assert_eq!(cluster.await_end("tables").state, JobState::Failed);
}

#[test]
fn a_gradient_with_nan_passes_by_default_and_is_refused_where_asked() {
    let cluster = Cluster::new(1);
    for reject in [false, true] {
        let settings = Settings { reject_non_finite: reject, ..Settings::new(keys(&[3, 20_000])) };
        let ticket = cluster.job(if reject { "rejects" } else { "passes" }, 2);
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..2)
                .map(|rank| {
                    let (ticket, settings) = (&ticket, &settings);
                    scope.spawn(move || {
                        let mut gradient = vec![1.0f32; 20_000];
                        if rank == 1 {
                            gradient[12_345] = f32::NAN;
                        }
                        let job = ticket.join(rank, settings.clone())?;
                        let (_, mean) = job.push_pull(1, gradient, vec![0.0f32; 20_000])?.wait()?;
                        Ok::<_, WorkerError>(mean)
                    })
                })
                .collect();
            for rank in ranks {
                match rank.join().unwrap() {
                    Ok(mean) if !reject => {
                        assert!(
                            mean[12_345].is_nan() && mean.iter().filter(|value| value.is_nan()).count() == 1
                        );
                    }
                    Err(told) if reject => {
                        let told = told.to_string();
                        assert!(
                            told.contains("rank 1 sent a gradient of key `layer1` whose element 12345"),
                            "{told}"
                        );
                    }
                    other => panic!("reject {reject}: {:?}", other.map(|_| ())),
                }
            }
        });
    }
}

#[test]
fn a_worker_whose_connection_ends_without_goodbye_is_named_to_the_others() {
    let cluster = Cluster::new(1);
    let ticket = cluster.job("lost", 2);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            // It may not even have its stream yet when the other is lost: it is told all the same.
            let exchange = |job: Job| job.push_pull(0, vec![0.0f32; 4], vec![0.0f32; 4])?.wait().map(drop);
            ticket.join(0, settings()).and_then(exchange).unwrap_err().to_string()
        });
        let mut raw = Raw::join(&cluster, &ticket, 1);
        // In the middle of a frame: none of it counts.
        raw.send(&push(0)[..20]);
        drop(raw);
        let told = waits.join().unwrap();
        assert!(told.contains("rank 1 was lost"), "{told}");
    });
    assert!(cluster.await_end("lost").message.contains("rank 1 was lost"));
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let cluster = Cluster::new(1);
    let options = JobOptions { rendezvous_timeout_s: 0.4, ..Default::default() };
    let ticket = cluster.job_with("incomplete", 3, options);
    let told = Member::connect(ticket.membership(1)).expect_err("two ranks are missing").to_string();
    assert!(told.contains("ranks 0 and 2"), "{told}");
}

#[test]
fn a_rank_that_stops_between_init_and_its_streams_is_named() {
    let cluster = Cluster::new(1);
    let options = JobOptions { rendezvous_timeout_s: 1.5, ..Default::default() };
    let ticket = cluster.job_with("halfway", 2, options);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            let job = ticket.join(0, settings()).unwrap();
            job.push_pull(0, vec![0.0f32; 4], vec![0.0f32; 4]).unwrap().wait().unwrap_err().to_string()
        });
        let hello = hello(&ticket, 1, &settings(), &cluster);
        let prove = |purpose| ticket.nonce.prove_rank(purpose, ticket.namespace, 1, hello.incarnation);
        let (rank, incarnation) = (1, hello.incarnation);
        let proof = prove(Purpose::Connect);
        let connect = ConnectService { rank, incarnation, proof, host: String::new(), process: 0 };
        cluster.client.connect_service(ticket.namespace, &connect, PATIENCE).unwrap();
        let init = InitService { rank, incarnation, proof: prove(Purpose::Init), settings: settings() };
        cluster.client.init_service(ticket.namespace, &init, PATIENCE).unwrap();
        let told = waits.join().unwrap();
        assert!(told.contains("rank 1 did not open all streams"), "{told}");
    });
}

#[test]
fn a_name_belongs_to_one_living_job() {
    let cluster = Cluster::new(1);
    cluster.job("mine", 1);
    let again = CreateService { name: "mine".into(), workers: 1, options: JobOptions::default() };
    let refused = cluster.client.create_service(&again).unwrap_err().to_string();
    assert!(refused.contains("`mine`") && refused.contains("paramhub jobs stop mine"), "{refused}");
    cluster.client.stop_job("mine").unwrap();
    cluster.client.create_service(&again).unwrap();
}

#[test]
fn stopping_a_job_tells_its_workers() {
    let cluster = Cluster::new(1);
    let ticket = cluster.job("stopped", 2);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2)
            .map(|rank| {
                let ticket = &ticket;
                scope.spawn(move || {
                    let job = ticket.join(rank, settings()).unwrap();
                    loop {
                        let exchanged = job.push_pull(0, vec![0.0f32; 4], vec![0.0f32; 4]);
                        if let Err(told) = exchanged.and_then(|handle| handle.wait()) {
                            return told.to_string();
                        }
                    }
                })
            })
            .collect();
        cluster.await_state("stopped", JobState::Running);
        cluster.client.stop_job("stopped").unwrap();
        for rank in ranks {
            let told = rank.join().unwrap();
            assert!(told.contains("job `stopped` failed") && told.contains("stop"), "{told}");
        }
    });
}

#[test]
fn a_port_in_use_is_named_with_what_to_do() {
    let cluster = Cluster::new(1);
    let mut config = HubConfig::new(cluster.client.clone());
    config.listen = cluster.hub().addresses().to_vec();
    let refused = RunningHub::start(config).expect_err("the port is in use").to_string();
    let port = cluster.hub().addresses()[0].to_string();
    assert!(refused.contains(&port) && refused.contains("in use"), "{refused}");
}

#[test]
fn a_hub_that_shuts_down_says_so_to_its_workers() {
    let mut cluster = Cluster::new(2);
    let ticket = cluster.job("orphaned", 1);
    let settings = Settings::new(keys(&[100_000]));
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let job = ticket.join(0, settings.clone()).unwrap();
            loop {
                let exchanged = job.push_pull(0, vec![0.0f32; 100_000], vec![0.0f32; 100_000]);
                if let Err(told) = exchanged.and_then(|handle| handle.wait()) {
                    return told.to_string();
                }
            }
        });
        cluster.await_state("orphaned", JobState::Running);
        cluster.hub.take().unwrap().stop();
        let told = worker.join().unwrap();
        assert!(told.contains("the hub is shutting down"), "{told}");
    });
}

#[test]
fn a_worker_that_is_gone_before_it_is_welcomed_is_named_to_the_others() {
    let cluster = Cluster::new(1);
    for round in 0..8 {
        let name = format!("gone{round}");
        let ticket = cluster.job(&name, 2);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let exchange =
                    |job: Job| job.push_pull(0, vec![0.0f32; 4], vec![0.0f32; 4])?.wait().map(drop);
                ticket.join(0, settings()).and_then(exchange).unwrap_err().to_string()
            });
            let (mut raw, hello) = Raw::join_but_for_streams(&cluster, &ticket, 1);
            raw.send(&hello.encode());
            let mut challenge = [0; CHALLENGE_BYTES];
            raw.socket.read_exact(&mut challenge).unwrap();
            // The proof has arrived when the hub learns that there is nobody to welcome.
            raw.send(&stream_proofs(&ticket.nonce, &hello, &challenge).0.0);
            raw.reset();
            let told = waits.join().unwrap();
            assert!(told.contains("rank 1 was lost"), "{told}");
        });
    }
}

#[test]
fn a_worker_may_leave_without_waiting_for_what_it_asked_for() {
    let cluster = Cluster::new(1);
    let ticket = cluster.job("hasty", 1);
    let mut raw = Raw::join(&cluster, &ticket, 0);
    raw.send(&[push(0), Header::bare(Operation::Leave).encode().to_vec()].concat());
    assert_eq!(raw.await_frame(Operation::Parameters).0.step, 1);
    assert_eq!(cluster.await_end("hasty").state, JobState::Finished);
    // The hub goes on.
    cluster.job("next", 1).run(&settings(), |_| ());
}

#[test]
fn a_rank_zero_that_leaves_without_parameters_strands_nobody_in_silence() {
    let cluster = Cluster::new(1);
    let settings =
        Settings { optimizer: sgd(0.1, 0.0), consistency: Consistency::Asynchronous, ..settings() };
    let ticket = cluster.job("headless", 2);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            let job = ticket.join(1, settings.clone()).unwrap();
            job.pull(0, vec![0.0f32; 4]).unwrap().wait().unwrap_err()
        });
        ticket.join(0, settings.clone()).unwrap().leave().unwrap();
        let told = waits.join().unwrap();
        assert!(told.to_string().contains("rank 0 left the job"), "{told}");
        assert!(matches!(told, WorkerError::Failed { culprit: Some(0), .. }), "{told:?}");
    });
}

#[test]
fn a_worker_that_is_heard_no_more_finds_out_why_its_job_is_over() {
    let cluster = Cluster::new(1);
    let options = JobOptions { rendezvous_timeout_s: 20.0, dead_after_s: 1.0, ..Default::default() };
    let ticket = cluster.job_with("frozen", 1, options);
    let mut raw = Raw::join(&cluster, &ticket, 0);
    let failure = raw.await_failure();
    assert_eq!(failure.rank, Some(0));
    assert!(failure.message.contains("rank 0 was lost: it has not been heard for"), "{failure:?}");
    assert!(raw.is_closed());
}
