//! Connections between ranks that are reset while operations are under way.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use paramhub_mesh::{ElementType, Mesh, MeshConfig, MeshError, ReduceOp};
use paramhub_transport::lend;

use crate::common::{Random, WAIT_TIMEOUT, at_all, config, done, listeners, seed};
use crate::relay::{Learns, Relay};

const SIZE: u32 = 3;
/// Some that are sent in one counted frame, and some that are sent in pieces.
const LENGTHS: [usize; 7] = [0, 1, 1009, 16_384, 16_385, 65_536, 300_000];
/// More than the threads of a busy machine take to dial.
const GRACE: Duration = Duration::from_secs(30);
const CUTS: usize = 60;

/// All ranks' meshes, whose connections pass relays.
fn relayed(change: impl Fn(MeshConfig) -> MeshConfig + Sync) -> (Vec<Mesh>, Vec<Relay>) {
    let (listeners, addresses) = listeners(SIZE);
    let relays: Vec<Relay> = addresses
        .iter()
        .map(|address| {
            let relay = Relay::new();
            relay.lead_to(*address);
            relay
        })
        .collect();
    let addresses: Vec<_> = relays.iter().map(|relay| relay.address).collect();
    let meshes = thread::scope(|scope| {
        let joins: Vec<_> = (0..SIZE)
            .zip(listeners)
            .map(|(rank, listener)| {
                let config = MeshConfig { shares_memory: false, ..config(rank, &addresses) };
                let config = change(MeshConfig { redial_grace: GRACE, ..config });
                scope.spawn(move || listener.join(config).unwrap())
            })
            .collect();
        joins.into_iter().map(|join| join.join().unwrap()).collect()
    });
    (meshes, relays)
}

fn cut_all(relays: &[Relay], learns: Learns) {
    for relay in relays {
        relay.forget(None, learns);
    }
}

/// The working connections of each relay.
fn connections(relays: &[Relay]) -> Vec<usize> {
    relays.iter().map(Relay::connections).collect()
}

fn await_connections(relays: &[Relay], all: &[usize]) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while connections(relays) != all {
        assert!(Instant::now() < deadline, "{:?} connections of {all:?} are made again", connections(relays));
        thread::sleep(Duration::from_millis(5));
    }
}

fn value(round: u32, rank: u32, at: usize) -> f32 {
    ((round as usize * 7 + rank as usize * 13 + at) % 1000) as f32
}

/// Exchanges in every way and checks each number. Returns whether rank 0 has asked to end.
fn exchange(mesh: &Mesh, round: u32, random: &mut Random, is_last: bool) -> bool {
    let (rank, elements) = (mesh.rank(), random.pick(&LENGTHS));
    let mut sum: Vec<f32> = (0..elements).map(|at| value(round, rank, at)).collect();
    let ring: Vec<f32> = sum.iter().map(|value| value + 0.5).collect();
    let mut from_previous = vec![0.0_f32; elements];
    let mut from_any = vec![0.0_f32; elements];
    let mut end = [u8::from(is_last)];
    let (next, previous) = ((rank + 1) % SIZE, (rank + SIZE - 1) % SIZE);
    lend(|lending| {
        let handles = [
            mesh.receive(previous, 1, lending.receive(&mut from_previous)),
            mesh.receive_any(2, lending.receive(&mut from_any)),
            mesh.send(next, 1, lending.send(&ring)),
            mesh.send(next, 2, lending.send(&ring)),
            mesh.allreduce(lending.receive(&mut sum), ElementType::F32, ReduceOp::Sum),
            mesh.broadcast(lending.receive(&mut end), 0),
        ];
        handles.into_iter().for_each(|handle| done(handle).unwrap());
    });
    for (at, sum) in sum.iter().enumerate() {
        let expected: f32 = (0..SIZE).map(|rank| value(round, rank, at)).sum();
        assert_eq!(*sum, expected, "round {round}, element {at} of {elements} at rank {rank}");
    }
    let expected: Vec<f32> = (0..elements).map(|at| value(round, previous, at) + 0.5).collect();
    assert!(from_previous == expected && from_any == expected, "round {round} of {elements} at rank {rank}");
    end == [1]
}

fn connections_that_are_reset_change_no_number(encrypts: bool) {
    let seed = seed();
    let (meshes, relays) = relayed(|config| MeshConfig { encrypts, ..config });
    let all = connections(&relays);
    let (cuts, all_are_mended) = (AtomicUsize::new(0), Barrier::new(SIZE as usize));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(seed);
            let passed = || relays.iter().map(Relay::passed).sum::<u64>();
            while cuts.load(Ordering::Relaxed) < CUTS {
                let enough = passed() + random.below(2 << 20) as u64;
                while passed() <= enough {
                    thread::sleep(Duration::from_millis(1));
                }
                let only = random.pick(&[None, Some(0), Some(1)]);
                let learns = random.pick(&[Learns::Both, Learns::Caller, Learns::Listener]);
                cuts.fetch_add(relays[random.below(relays.len())].forget(only, learns), Ordering::Relaxed);
            }
        });
        at_all(meshes, |mesh| {
            let mut random = Random(seed);
            let mut round = 0;
            while !exchange(&mesh, round, &mut random, cuts.load(Ordering::Relaxed) >= CUTS) {
                round += 1;
            }
            // A last message on a connection that the relay has forgotten would be lost with it.
            await_connections(&relays, &all);
            all_are_mended.wait();
            mesh.leave(WAIT_TIMEOUT).unwrap();
        });
    });
}

#[test]
fn connections_in_clear_that_are_reset_change_no_number() {
    connections_that_are_reset_change_no_number(false);
}

#[test]
fn encrypted_connections_that_are_reset_change_no_number() {
    connections_that_are_reset_change_no_number(true);
}

#[test]
fn a_cut_of_which_only_one_end_learns_is_mended_while_nothing_is_sent() {
    let (meshes, relays) = relayed(|config| config);
    let all = connections(&relays);
    for learns in [Learns::Caller, Learns::Listener] {
        cut_all(&relays, learns);
        await_connections(&relays, &all);
    }
    at_all(meshes, |mesh| {
        exchange(&mesh, 0, &mut Random(1), true);
        mesh.leave(WAIT_TIMEOUT).unwrap();
    });
}

#[test]
fn without_a_grace_a_reset_ends_the_mesh_at_once() {
    let (meshes, relays) = relayed(|config| MeshConfig { redial_grace: Duration::ZERO, ..config });
    relays[0].forget(None, Learns::Both);
    at_all(meshes, |mesh| {
        let error = match mesh.barrier() {
            Ok(handle) => handle.wait().unwrap_err(),
            Err(error) => error,
        };
        let is_named = matches!(error, MeshError::Lost { .. } | MeshError::Aborted { .. });
        assert!(is_named && error.to_string().contains("its connection broke"), "{error}");
    });
}

#[test]
fn a_connection_that_cannot_be_made_again_ends_the_mesh_with_the_reason() {
    let grace = Duration::from_millis(300);
    let (meshes, relays) = relayed(|config| MeshConfig { redial_grace: grace, ..config });
    // Nobody listens there.
    let nowhere = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    relays.iter().for_each(|relay| relay.lead_to(nowhere));
    cut_all(&relays, Learns::Both);
    at_all(meshes, |mesh| {
        let error = match mesh.barrier() {
            Ok(handle) => handle.wait().unwrap_err(),
            Err(error) => error,
        };
        assert!(error.to_string().contains("and it cannot be made again: 0.3 s have passed"), "{error}");
    });
}
