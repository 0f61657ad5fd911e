//! Bytes that are no frames, and frames that break the rules: their own job fails with the reason, and no
//! other does.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use paramhub_core::codec::Codec;
use paramhub_core::service::JobState;
use paramhub_core::wire::{CHALLENGE_MESSAGE_BYTES, Header, Operation, VERDICT_BYTES, Verdict};
use paramhub_worker::Job;

use crate::bystander::beside_a_running_job;
use crate::cluster::{Cluster, Transports};
use crate::raw::{Raw, hello, push, settings};

#[test]
fn each_bad_frame_fails_its_job_with_its_reason_and_no_other_job() {
    let cluster = Cluster::new(Transports::tcp(), 1);
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
    wrong_codec[1] = Codec::F16.number();
    let retune = |group| Header { chunk: group, ..Header::bare(Operation::Retune) }.encode().to_vec();
    let offences = [
        ("bad operation", bad_operation, "operation 200 does not exist"),
        ("the hub's operation", hubs_operation, "does not go this way"),
        ("unknown chunk", unknown_chunk, "chunk 9, which is not on this stream"),
        ("wrong length", wrong_length, "12 bytes of f32 for chunk 0 of key `layer0`, which has 16 bytes"),
        ("oversized length", oversized, "announces 4294967295 bytes"),
        ("wrong codec", wrong_codec, "16 bytes of f16"),
        ("future step", push(5), "step 5 was asked for, but step 0 is under way"),
        ("unknown group", retune(1), "group 1 that cannot be used: the job has no such group"),
        (
            "group beyond 16 bits",
            retune(1 << 16),
            "group 65536 that cannot be used: the job has no such group",
        ),
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
                if let Err(error) = honest.join().unwrap() {
                    let error = error.to_string();
                    assert!(error.contains(reason) && error.contains("rank 1"), "{what}: {error}");
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
    let cluster = Cluster::new(Transports::tcp(), 1);
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
fn frames_before_the_handshake_reach_no_job() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    beside_a_running_job(&cluster, || {
        for _ in 0..20 {
            let mut unauthenticated = Raw::dial(cluster.hub().addresses()[0]);
            unauthenticated.send(&push(0).repeat(20));
            let mut answer = Vec::new();
            let _ = unauthenticated.socket.read_to_end(&mut answer);
            let verdict = answer
                .get(CHALLENGE_MESSAGE_BYTES..CHALLENGE_MESSAGE_BYTES + VERDICT_BYTES)
                .map(|wire| Verdict::decode(wire.try_into().unwrap()).unwrap());
            match verdict {
                Some(Verdict::Refused { message, .. }) => {
                    assert!(message.contains("not paramhub's"), "{message}")
                }
                // The connection was reset before the bytes were read: that counts as closed, too.
                None => {}
                Some(Verdict::Welcome { .. }) => panic!("a connection without a handshake was let in"),
            }
        }
    });
}

#[test]
fn a_refused_peer_that_goes_on_sending_is_cut_off() {
    const FLOOD: usize = 64 << 20;
    let cluster = Cluster::new(Transports::tcp(), 1);
    let mut unauthenticated = TcpStream::connect(cluster.hub().addresses()[0]).unwrap();
    let flood = [0; 8 << 10];
    let is_cut_off = (0..FLOOD / flood.len()).any(|_| unauthenticated.write_all(&flood).is_err());
    assert!(is_cut_off, "{FLOOD} bytes were taken from a refused peer");
}

#[test]
fn a_caller_that_does_not_wait_for_the_challenge_gets_none() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    let ticket = cluster.job("impatient", 1);
    let hello_bytes = hello(&ticket, 0, &settings(), &cluster).encode();
    let mut waits = Raw::dial(cluster.hub().addresses()[0]);
    waits.send(&hello_bytes);
    waits.socket.read_exact(&mut [0; CHALLENGE_MESSAGE_BYTES]).unwrap();
    let mut early = Raw::dial(cluster.hub().addresses()[0]);
    // One write, so that the hub receives both.
    early.send(&[&hello_bytes[..], &[0; 4096]].concat());
    let mut answer = Vec::new();
    // The connection ends by a reset, since bytes were left unread.
    let _ = early.socket.read_to_end(&mut answer);
    assert!(answer.is_empty(), "{} bytes came", answer.len());
}

#[test]
fn unauthenticated_connections_keep_no_job_out() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    // The hub and the unauthenticated connections share this process's descriptors, and workers need some,
    // too.
    let limit = paramhub_transport::handshakes::raise_descriptor_limit();
    let connections = (limit / 3).min(6000) as usize;
    let address = cluster.hub().addresses()[0];
    let mut silent = Vec::with_capacity(connections);
    beside_a_running_job(&cluster, || {
        for _ in 0..connections {
            silent.push(TcpStream::connect(address).unwrap());
        }
        let ticket = cluster.job("newcomer", 1);
        let mut raw = Raw::join(&cluster, &ticket, 0);
        raw.send(&push(0));
        assert_eq!(raw.await_frame(Operation::Parameters).0.step, 1);
    });
    println!("{connections} unauthenticated connections");
}

#[test]
fn random_bytes_on_both_ports_harm_no_job() {
    let cluster = Cluster::new(Transports::tcp(), 1);
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
                // Bytes that pass the hub's first check, then noise.
                0 if bytes.len() > 6 => bytes[..6].copy_from_slice(b"PHUB\x01\x00"),
                1 => bytes
                    .splice(0..0, *b"POST /v1/jobs HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n")
                    .for_each(drop),
                _ => {}
            }
            let mut unauthenticated = TcpStream::connect(address).unwrap();
            unauthenticated.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            let _ = unauthenticated.write_all(&bytes);
            let _ = unauthenticated.read(&mut [0; 64]);
        }
    });
}
