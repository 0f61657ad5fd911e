//! Jobs with encrypted streams: the numbers are those of others, and callers in clear and somebody in the middle are
//! refused.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use paramhub_core::service::{JobOptions, JobState};
use paramhub_core::settings::Settings;
use paramhub_core::wire::{
    CHALLENGE_MESSAGE_BYTES, Capabilities, Hello, Refusal, VERDICT_BYTES, Verdict, VerdictError,
};
use paramhub_transport::greeting::{GreetingError, greet};
use paramhub_trust::{StreamListener, StreamTls, TLS_HANDSHAKE};

use crate::cluster::{Cluster, Transports, WAIT_TIMEOUT, gradient, keys, sgd};
use crate::raw::{Raw, proof, settings};

fn encrypted() -> JobOptions {
    JobOptions { encrypt: true, rendezvous_timeout_s: 20.0, ..Default::default() }
}

/// The bits of the parameters of a job after a few steps.
fn trained(cluster: &Cluster, name: &str, options: JobOptions) -> Vec<Vec<u32>> {
    const SIZES: [u64; 3] = [100_000, 7, 20_000];
    let settings = Settings { optimizer: sgd(0.1, 0.9), reproducible: true, ..Settings::new(keys(&SIZES)) };
    let ticket = cluster.job_with(name, 3, options);
    let of_ranks = ticket.run(&settings, |job| {
        let mut parameters: Vec<Vec<f32>> = SIZES.iter().map(|&size| vec![1.0; size as usize]).collect();
        job.broadcast(&mut parameters, 0).unwrap();
        for step in 0..4 {
            parameters.clear();
            for (key, size) in (0..).zip(SIZES) {
                let gradient = gradient(job.rank(), key, step, size as usize);
                let out = vec![0.0_f32; size as usize];
                parameters.push(job.push_pull(key, gradient, out).unwrap().wait().unwrap().1);
            }
        }
        parameters.concat().into_iter().map(f32::to_bits).collect::<Vec<u32>>()
    });
    assert_eq!(cluster.await_end(name).state, JobState::Finished);
    of_ranks
}

#[test]
fn an_encrypted_job_has_the_numbers_of_one_in_clear() {
    for transports in [Transports::tcp(), Transports::mixed()] {
        let cluster = Cluster::new(transports, 2);
        let in_clear = trained(&cluster, "clear", JobOptions { encrypt: false, ..encrypted() });
        assert!(trained(&cluster, "encrypted", encrypted()) == in_clear);
    }
}

#[test]
fn a_hub_can_demand_it_of_every_job() {
    let cluster = Cluster::with(Transports::tcp(), |hub| hub.encrypt = true);
    let ticket = cluster.job("demanded", 1);
    let (mut raw, hello) = Raw::join_but_for_streams(&cluster, &ticket, 0);
    assert_refused_in_clear(&raw.shake_hands(&hello, &ticket));
    trained(&cluster, "trained", JobOptions { encrypt: false, ..encrypted() });
}

fn assert_refused_in_clear(verdict: &Verdict) {
    let Verdict::Refused { refusal, message } = verdict else { panic!("it was opened") };
    assert_eq!(*refusal, Refusal::Capability);
    assert!(message.contains("does not encrypt its stream"), "{message}");
}

#[test]
fn a_caller_in_clear_is_refused_and_the_job_waits_for_the_encrypted_stream() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    let ticket = cluster.job_with("job", 1, encrypted());
    let (mut raw, hello) = Raw::join_but_for_streams(&cluster, &ticket, 0);
    assert_refused_in_clear(&raw.shake_hands(&hello, &ticket));
    // Nor does it help to ask for it.
    let asking = Hello { offered: Capabilities::ENCRYPTED, required: Capabilities::ENCRYPTED, ..hello };
    let refused = Raw::dial(cluster.hub().addresses()[0]).shake_hands(&asking, &ticket);
    let Verdict::Refused { refusal, message } = refused else { panic!("it was opened") };
    assert_eq!(refusal, Refusal::Capability);
    assert!(message.contains("encrypted"), "{message}");
    let mut stream = TcpStream::connect(cluster.hub().addresses()[0]).unwrap();
    let deadline = Instant::now() + WAIT_TIMEOUT;
    let (welcome, keys) = greet(&mut stream, &ticket.secret(0), hello, true, deadline).unwrap();
    assert_eq!((welcome.granted, keys.is_some()), (Capabilities::ENCRYPTED, true));
    assert_eq!(cluster.await_state("job", JobState::Running).name, "job");
}

#[test]
fn somebody_in_the_middle_can_pass_on_no_proof() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    for job in [encrypted(), JobOptions { encrypt: false, ..encrypted() }] {
        let name = format!("encrypts-{}", job.encrypt);
        let ticket = cluster.job_with(&name, 1, job);
        let (_, hello) = Raw::join_but_for_streams(&cluster, &ticket, 0);
        let middle = middle(cluster.hub().addresses()[0]);
        let mut stream = TcpStream::connect(middle).unwrap();
        let deadline = Instant::now() + WAIT_TIMEOUT;
        let refused = greet(&mut stream, &ticket.secret(0), hello, true, deadline).unwrap_err();
        let GreetingError::Verdict(VerdictError::Refused { refusal, .. }) = refused else {
            panic!("{refused}")
        };
        assert_eq!(refusal, Refusal::WrongNonce, "the hub does not take the proof of another connection");
    }
}

/// Listens as a hub does, and passes every message on to the hub over a TLS connection of its own.
fn middle(hub: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let tls = [StreamListener::new().unwrap().begin().unwrap(), StreamTls::call().unwrap()];
        let sockets = [listener.accept().unwrap().0, TcpStream::connect(hub).unwrap()];
        relay(tls, sockets);
    });
    address
}

fn relay(mut tls: [StreamTls; 2], mut sockets: [TcpStream; 2]) {
    sockets.iter().for_each(|socket| socket.set_nonblocking(true).unwrap());
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while Instant::now() < deadline {
        for side in 0..2 {
            let mut outgoing = Vec::new();
            tls[side].take_outgoing(&mut outgoing);
            if sockets[side].write_all(&outgoing).is_err() {
                return;
            }
            let mut bytes = vec![0; tls[side].wants()];
            match sockets[side].read(&mut bytes) {
                Ok(0) => return,
                Ok(read) => tls[side].absorb(&bytes[..read]).unwrap(),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
            let mut message = [0; 4096];
            if let Ok(read) = tls[side].read(&mut message) {
                tls[1 - side].write(&message[..read]).unwrap();
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn strangers_with_half_made_handshakes_keep_no_job_out() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    let hub = cluster.hub().addresses()[0];
    let mut hello = Vec::new();
    StreamTls::call().unwrap().take_outgoing(&mut hello);
    let beginnings: [&[u8]; 5] =
        [&[22], &[22, 3, 1, 0x40, 0], &[22, 3, 1, 0x0f, 0xff, 1, 0, 0xff, 0xff], &hello[..100], &hello];
    let strangers: Vec<TcpStream> = (0..500)
        .map(|number| {
            let mut stranger = TcpStream::connect(hub).unwrap();
            stranger.write_all(beginnings[number % beginnings.len()]).unwrap();
            stranger
        })
        .collect();
    assert_eq!(cluster.job_with("beside", 2, encrypted()).run(&settings(), |job| job.rank()), [0, 1]);
    drop(strangers);
}

#[test]
fn a_worker_that_must_encrypt_says_what_is_wrong_with_a_hub_that_cannot() {
    // A hub of a release before answers the first bytes of TLS as it answers every other protocol.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let older = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 112]);
        stream.write_all(&[0; 40]).unwrap();
        let _ = stream.read(&mut [0; 4096]);
    });
    let cluster = Cluster::new(Transports::tcp(), 1);
    let ticket = cluster.job_with("job", 1, encrypted());
    let (_, hello) = Raw::join_but_for_streams(&cluster, &ticket, 0);
    let mut stream = TcpStream::connect(address).unwrap();
    let deadline = Instant::now() + WAIT_TIMEOUT;
    let refused = greet(&mut stream, &ticket.secret(0), hello, true, deadline).unwrap_err().to_string();
    assert!(refused.contains("does not encrypt its streams"), "{refused}");
    drop(stream);
    older.join().unwrap();
}

#[test]
fn shared_memory_needs_no_encryption() {
    let cluster = Cluster::new(Transports::shm(), 1);
    let ticket = cluster.job_with("local", 1, encrypted());
    ticket.run(&settings(), |job| job.rank());
    assert_eq!(cluster.await_end("local").state, JobState::Finished);
}

#[test]
fn a_proof_that_begins_like_tls_is_a_proof() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    let ticket = cluster.job("job", 1);
    let (_, hello) = Raw::join_but_for_streams(&cluster, &ticket, 0);
    // One in 256 does.
    let (mut raw, proof) = (0..100_000)
        .find_map(|_| {
            let mut raw = Raw::dial(cluster.hub().addresses()[0]);
            raw.send(&hello.encode());
            let mut challenge = [0; CHALLENGE_MESSAGE_BYTES];
            raw.socket.read_exact(&mut challenge).unwrap();
            let proof = proof(&ticket, &hello, &challenge);
            (proof.0[0] == TLS_HANDSHAKE).then_some((raw, proof))
        })
        .expect("one of so many");
    raw.send(&proof.0);
    let mut verdict = [0; VERDICT_BYTES];
    raw.socket.read_exact(&mut verdict).unwrap();
    assert!(matches!(Verdict::decode(&verdict), Ok(Verdict::Welcome { .. })));
}
