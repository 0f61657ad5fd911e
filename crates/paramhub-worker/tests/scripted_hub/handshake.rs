use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::{Duration, Instant};

use paramhub_core::auth::StreamSecret;
use paramhub_core::wire::{Attempt, CHALLENGE_BYTES, Caller, HubHandshake, PROOF_BYTES, Refusal, Welcome};
use paramhub_transport::greeting::{read_exact_by, write_all_by};
use paramhub_worker::{JobConfig, Options, WorkerError};

use super::hub::{Hub, WAIT_TIMEOUT, challenge, settings};

/// Sends the verdict that `conclude` makes after the worker's proof.
fn conclude(mut socket: std::net::TcpStream, verdict: impl FnOnce(&HubHandshake) -> Vec<u8>) {
    let handshake = challenge(&mut socket);
    let deadline = Instant::now() + WAIT_TIMEOUT;
    read_exact_by(&mut socket, &mut [0; PROOF_BYTES], deadline).unwrap();
    write_all_by(&mut socket, &verdict(&handshake), deadline).unwrap();
}

#[test]
fn a_hello_names_the_worker_and_its_route() {
    let hub = Hub::new(2);
    let job_config = hub.job_config(1, settings(&[1000]));
    let (job, peers) = hub.open(job_config.clone(), Options::default());
    let caller = Caller::Worker { rank: 1, shares_parameters: false };
    for (core, peer) in peers.iter().enumerate() {
        assert_eq!((peer.hello.caller, peer.hello.interface, peer.hello.core), (caller, 0, core as u16));
        assert_eq!(peer.hello.attempt, Attempt::first(job_config.epoch));
        assert_eq!(
            (peer.hello.namespace, peer.hello.incarnation),
            (job_config.namespace, job_config.incarnation)
        );
    }
    assert_ne!(peers[0].hello.challenge, peers[1].hello.challenge);
    assert_eq!(peers[0].hello.placement, peers[1].hello.placement);
    drop(peers);
    drop(job);
}

#[test]
fn a_core_without_chunks_is_not_dialled() {
    let hub = Hub::new(1);
    let mut job_config = hub.job_config(1, settings(&[10]));
    job_config.hubs[0].interfaces[0].cores = vec![0, 1, 2];
    let (job, peers) = hub.open(job_config, Options::default());
    assert_eq!(peers[0].hello.core, 0);
    drop(peers);
    drop(job);
}

#[test]
fn a_refusal_is_passed_on() {
    let refused = Hub::new(1).turn_away(Options::default(), |socket| {
        let message = "rank 1 is connected from node-7 already";
        conclude(socket, |handshake| handshake.refusal(Refusal::RankTaken, message));
    });
    assert!(matches!(refused, WorkerError::Refused { refusal: Refusal::RankTaken, .. }), "{refused}");
    assert!(refused.to_string().contains("node-7 already"), "{refused}");
}

#[test]
fn a_hub_that_does_not_know_the_secret_is_unmasked() {
    let refused = Hub::new(1).turn_away(Options::default(), |socket| {
        conclude(socket, |handshake| handshake.welcome(&StreamSecret([0; 32]), &Welcome::default()));
    });
    assert!(refused.to_string().contains("does not know the job's secret"), "{refused}");
}

#[test]
fn a_hub_of_the_release_before_is_recognised() {
    let refused = Hub::new(1).turn_away(Options::default(), |mut socket| {
        // It reads as much as a Hello of its version has, and refuses in its own form.
        let deadline = Instant::now() + WAIT_TIMEOUT;
        read_exact_by(&mut socket, &mut [0; 112], deadline).unwrap();
        let _ = socket.write_all(&[[0; CHALLENGE_BYTES].as_slice(), &[8, 0], &[0; 1058]].concat());
        let _ = socket.read_to_end(&mut Vec::new());
    });
    assert!(refused.to_string().contains("install the newer one at the hubs first"), "{refused}");
}

#[test]
fn a_hub_that_stalls_is_given_up() {
    let options = Options { dial_timeout: Duration::from_millis(200), ..Options::default() };
    let refused = Hub::new(1).turn_away(options, |mut socket| {
        // The socket stays open and silent until the worker gives up.
        let _ = socket.read_to_end(&mut Vec::new());
    });
    assert!(matches!(refused, WorkerError::Dial { .. }), "{refused}");
    assert!(refused.to_string().contains("did not answer in time"), "{refused}");
}

#[test]
fn something_else_than_a_hub_is_recognised() {
    let refused = Hub::new(1).turn_away(Options::default(), |mut socket| {
        let _ = socket.write_all(&[b'x'; 4096]);
        let _ = socket.read_to_end(&mut Vec::new());
    });
    assert!(refused.to_string().contains("does not answer like a paramhub hub"), "{refused}");
    let refused = Hub::new(1).turn_away(Options::default(), |mut socket| {
        let _ = socket.write_all(b"SSH-2.0-OpenSSH_9.6\r\n");
    });
    assert!(refused.to_string().contains("the handshake failed"), "{refused}");
}

#[test]
fn a_closed_port_says_what_to_look_at() {
    let hub = Hub::new(1);
    let mut job_config = hub.job_config(1, settings(&[10]));
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    job_config.hubs[0].interfaces[0].address = closed.clone();
    let refused = job_config.open(Options::default()).unwrap_err().to_string();
    assert!(refused.contains(&closed) && refused.contains("is the hub running?"), "{refused}");
}

#[test]
fn another_placement_is_refused_before_anything_is_dialled() {
    let hub = Hub::new(1);
    let job_config = JobConfig { placement_hash: Some("00".into()), ..hub.job_config(1, settings(&[10])) };
    let refused = job_config.open(Options::default()).unwrap_err();
    assert!(matches!(refused, WorkerError::Placement { .. }), "{refused}");
}
