use paramhub_core::wire::VERDICT_BYTES;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use paramhub_mesh::{Mesh, MeshConfig, MeshError, MeshListener, Nonce};

use crate::common::{WAIT_TIMEOUT, config, done, listeners, secret};

/// Joins every listener with its configuration at once.
fn join_all(ranks: Vec<(MeshListener, MeshConfig)>) -> Vec<Result<Mesh, MeshError>> {
    thread::scope(|scope| {
        let joins: Vec<_> =
            ranks.into_iter().map(|(listener, config)| scope.spawn(move || listener.join(config))).collect();
        joins.into_iter().map(|join| join.join().unwrap()).collect()
    })
}

fn soon(config: MeshConfig) -> MeshConfig {
    MeshConfig { join_timeout: Duration::from_secs(2), ..config }
}

/// Checks that a mesh works: all ranks pass a barrier and leave.
fn works(meshes: Vec<Result<Mesh, MeshError>>) {
    let meshes: Vec<Mesh> = meshes.into_iter().map(Result::unwrap).collect();
    crate::common::at_all(meshes, |mesh| {
        done(mesh.barrier()).unwrap();
        mesh.leave(WAIT_TIMEOUT).unwrap();
    });
}

#[test]
fn ranks_may_come_in_any_order() {
    let (listeners, addresses) = listeners(4);
    let late = listeners.into_iter().enumerate().map(|(rank, listener)| {
        let config = config(rank as u32, &addresses);
        thread::spawn(move || {
            // Rank 0, which all others dial, comes last.
            thread::sleep(Duration::from_millis([200, 0, 100, 50][rank]));
            listener.join(config)
        })
    });
    let late: Vec<_> = late.collect();
    works(late.into_iter().map(|join| join.join().unwrap()).collect());
}

#[test]
fn ranks_that_do_not_come_are_named() {
    let (mut listeners, addresses) = listeners(4);
    // Rank 1 is bound and never joins; rank 3 does not exist any more.
    drop(listeners.pop());
    let idle = listeners.remove(1);
    let ranks = [0, 2].map(|rank| soon(config(rank, &addresses)));
    let errors: Vec<String> = join_all(listeners.into_iter().zip(ranks).collect())
        .into_iter()
        .map(|outcome| match outcome.unwrap_err() {
            error @ MeshError::Join { .. } => error.to_string(),
            other => panic!("{other}"),
        })
        .collect();
    drop(idle);
    assert!(errors[0].contains("rank 1 is missing (it has not dialled)"), "{}", errors[0]);
    assert!(errors[1].contains("has not called join"), "{}", errors[1]);
    for error in errors {
        assert!(error.contains("only 2 of 4 ranks") && error.contains("rank 3 is missing"), "{error}");
    }
}

#[test]
fn an_address_without_a_listener_is_named_in_the_error() {
    let (mut listeners, addresses) = listeners(2);
    drop(listeners.remove(0));
    let error = listeners.remove(0).join(soon(config(1, &addresses))).unwrap_err().to_string();
    assert!(error.contains("no program listens there"), "{error}");
}

#[test]
fn a_wrong_secret_is_refused_and_the_right_ranks_go_on() {
    let (listeners, addresses) = listeners(3);
    let wrong_rank = MeshListener::bind(addresses[0].ip()).unwrap();
    let wrong = MeshConfig { secrets: Nonce([1; 32]).into(), ..soon(config(2, &addresses)) };
    let wrong_rank = thread::spawn(move || wrong_rank.join(wrong));
    thread::sleep(Duration::from_millis(100));
    let ranks =
        listeners.into_iter().enumerate().map(|(rank, listener)| (listener, config(rank as u32, &addresses)));
    works(join_all(ranks.collect()));
    match wrong_rank.join().unwrap().unwrap_err() {
        MeshError::Refused { reason, .. } => assert!(reason.contains("the secret is wrong"), "{reason}"),
        // The mesh was complete, and its listeners closed, before any had answered.
        MeshError::Join { missing, .. } => assert_eq!(missing.len(), 2),
        other => panic!("{other}"),
    }
}

#[test]
fn a_wrong_secret_is_named_where_the_right_one_is_missed() {
    let (mut listeners, addresses) = listeners(2);
    let wrong = MeshConfig { secrets: Nonce([1; 32]).into(), ..config(1, &addresses) };
    let ranks = vec![(listeners.remove(0), soon(config(0, &addresses))), (listeners.remove(0), wrong)];
    let error = join_all(ranks).remove(0).unwrap_err().to_string();
    assert!(error.contains("said it was this rank, but the secret is wrong"), "{error}");
}

#[test]
fn addresses_in_another_order_are_found_out() {
    let (listeners, mut addresses) = listeners(3);
    let right = addresses.clone();
    addresses.swap(0, 1);
    let ranks = listeners.into_iter().enumerate().map(|(rank, listener)| {
        let addresses = if rank == 2 { &addresses } else { &right };
        (listener, soon(config(rank as u32, addresses)))
    });
    let error = join_all(ranks.collect()).remove(2).unwrap_err().to_string();
    assert!(error.contains("the ranks' addresses are in another order"), "{error}");
}

#[test]
fn sizes_that_differ_are_found_out() {
    let (mut listeners, addresses) = listeners(3);
    let ranks = vec![
        (listeners.remove(0), soon(config(0, &addresses[..2]))),
        (listeners.remove(0), soon(config(1, &addresses))),
    ];
    let error = join_all(ranks).remove(1).unwrap_err().to_string();
    assert!(error.contains("this mesh has 2 ranks, not 3"), "{error}");
}

#[test]
fn a_rank_that_comes_twice_is_refused_once() {
    let (mut listeners, addresses) = listeners(3);
    let second = MeshListener::bind(addresses[0].ip()).unwrap();
    let third = listeners.remove(2);
    let first: Vec<_> = listeners
        .into_iter()
        .chain([second])
        .zip([0, 1, 1])
        .map(|(listener, rank)| {
            let config = config(rank, &addresses);
            thread::spawn(move || listener.join(config))
        })
        .collect();
    // One of the two is refused before the last rank comes.
    let refused = Instant::now();
    while !first[1].is_finished() && !first[2].is_finished() {
        assert!(refused.elapsed() < WAIT_TIMEOUT, "no rank is refused");
        thread::sleep(Duration::from_millis(10));
    }
    let last = config(2, &addresses);
    let is_first_kept = !first[1].is_finished();
    // The last rank dials the address of rank 1, at which the second claimant does not listen.
    if is_first_kept {
        let third = thread::spawn(move || third.join(last));
        let mut outcomes: Vec<_> = first.into_iter().map(|join| join.join().unwrap()).collect();
        let error = outcomes.remove(2).unwrap_err().to_string();
        assert!(error.contains("two processes have the same rank"), "{error}");
        outcomes.push(third.join().unwrap());
        works(outcomes);
    } else {
        let mut first = first;
        let error = first.remove(1).join().unwrap().unwrap_err().to_string();
        assert!(error.contains("two processes have the same rank"), "{error}");
        // Rank 0 and the second claimant wait for the last rank in vain: they end with the test's process.
    }
}

#[test]
fn connections_that_are_no_peers_are_tolerated_and_bounded() {
    let (listeners, addresses) = listeners(3);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for address in &addresses {
            scope.spawn(|| open_hostile_connections(*address, &stop));
        }
        thread::sleep(Duration::from_millis(200));
        let ranks = listeners
            .into_iter()
            .enumerate()
            .map(|(rank, listener)| (listener, config(rank as u32, &addresses)));
        let meshes = join_all(ranks.collect());
        stop.store(true, Ordering::Release);
        works(meshes);
    });
    // No rank listens once all have joined.
    for address in addresses {
        assert!(TcpStream::connect_timeout(&address, Duration::from_secs(5)).is_err());
    }
}

/// Connections that send nothing, garbage, half a hello, another version, or a hello without a proof of the
/// secret.
fn open_hostile_connections(address: SocketAddr, stop: &AtomicBool) {
    let mut hello = [0_u8; 72];
    hello[..4].copy_from_slice(b"PHUM");
    hello[4] = 1;
    hello[8] = 2; // rank
    hello[12] = 3; // size
    let mut newer = hello;
    newer[4] = 200;
    let mut kept = Vec::new();
    for round in 0.. {
        if stop.load(Ordering::Acquire) {
            return;
        }
        let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_secs(5)) else { return };
        stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let mut answer = [0; 32 + 1060];
        // Any of these may fail: the listener may close the connection at any time.
        let _ = match round % 5 {
            0 => Ok(()),
            1 => stream.write_all(&[0xff; 4096]),
            2 => stream.write_all(&hello[..40]),
            3 => stream.write_all(&newer).and_then(|()| stream.read(&mut answer).map(drop)),
            _ => stream
                .write_all(&hello)
                .and_then(|()| stream.read_exact(&mut answer[..32]))
                .and_then(|()| stream.write_all(&[7; 32])),
        };
        kept.push(stream);
        if kept.len() > 100 {
            kept.clear();
        }
    }
}

#[test]
fn a_refused_peer_that_goes_on_sending_is_cut_off() {
    const FLOOD: usize = 64 << 20;
    let (mut listeners, addresses) = listeners(2);
    let (listener, config) = (listeners.remove(0), config(0, &addresses));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let done = &done;
        let joining = scope.spawn(move || listener.join_while(config, |_| !done.load(Ordering::Acquire)));
        let mut stream = TcpStream::connect(addresses[0]).unwrap();
        let mut hello = [0_u8; 72];
        hello[..4].copy_from_slice(b"PHUM");
        hello[4] = 200;
        stream.write_all(&hello).unwrap();
        let flood = [0; 8 << 10];
        let is_cut_off = (0..FLOOD / flood.len()).any(|_| stream.write_all(&flood).is_err());
        done.store(true, Ordering::Release);
        assert!(joining.join().unwrap().is_err());
        assert!(is_cut_off, "{FLOOD} bytes were taken from a refused peer");
    });
}

#[test]
fn another_version_is_refused_with_the_reason() {
    let (mut listeners, addresses) = listeners(2);
    let (listener, config) = (listeners.remove(0), soon(config(0, &addresses)));
    let joining = thread::spawn(move || listener.join(config));
    let mut stream = TcpStream::connect(addresses[0]).unwrap();
    let mut hello = [0_u8; 72];
    hello[..4].copy_from_slice(b"PHUM");
    hello[4] = 200;
    stream.write_all(&hello).unwrap();
    stream.write_all(&[9; 32]).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert_eq!(answer.len(), 32 + VERDICT_BYTES);
    let text = String::from_utf8_lossy(&answer[32 + 56..]).into_owned();
    assert!(text.contains("mesh protocol version 200 is spoken"), "{text}");
    assert!(joining.join().unwrap().is_err());
}

#[test]
fn joining_can_be_given_up() {
    let (mut listeners, addresses) = listeners(2);
    let mut questions = 0;
    let outcome = listeners.remove(0).join_while(config(0, &addresses), |_| {
        questions += 1;
        questions < 3
    });
    assert!(matches!(outcome.unwrap_err(), MeshError::Interrupted { .. }));
}

#[test]
fn a_configuration_that_cannot_be_is_refused_at_once() {
    let (listeners, addresses) = listeners(5);
    let mut unspecified = addresses.clone();
    unspecified[0].set_ip("0.0.0.0".parse().unwrap());
    let wrong = [
        (config(5, &addresses), "ranks 0 to 4, not 5"),
        (MeshConfig { size: 6, ..config(0, &addresses) }, "5 addresses were given for 6 ranks"),
        (MeshConfig { size: 0, ..config(0, &addresses) }, "1 to 1024 ranks"),
        (MeshConfig::new(1, secret(), unspecified), "cannot be reached at 0.0.0.0"),
        (MeshConfig { dead_after: Duration::ZERO, ..config(0, &addresses) }, "dead_after is zero"),
    ];
    for (listener, (config, expected)) in listeners.into_iter().zip(wrong) {
        let error = listener.join(config).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
