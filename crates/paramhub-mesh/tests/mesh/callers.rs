//! Callers that run the mesh while they wait, beside its thread and beside one another.

use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use paramhub_mesh::{ElementType, Handle, Mesh, MeshConfig, MeshError, ReceiveRegion, ReduceOp, SendRegion};
use paramhub_transport::lend;

use crate::common::{Random, WAIT_TIMEOUT, Way, at_all, done, meshes, meshes_with, run, seed};

in_every_way!(callers_of_all_kinds_get_what_they_wait_for, callers_that_wait_hear_of_the_end);

/// Waits in one of the ways in which a caller may, after some time in which it does something else.
fn finish(handle: Result<Handle, MeshError>, random: &mut Random) {
    let handle = handle.unwrap();
    if random.below(4) == 0 {
        std::thread::sleep(Duration::from_micros(random.below(1500) as u64));
    }
    let begun = Instant::now();
    match random.below(5) {
        0 => while !handle.wait_timeout(Duration::from_micros(random.below(300) as u64)).unwrap() {},
        1 => {
            let (sender, ended) = channel();
            handle.on_complete(move |outcome| sender.send(outcome.clone()).unwrap());
            return ended.recv_timeout(WAIT_TIMEOUT).unwrap().unwrap();
        }
        2 => {
            while !handle.is_done() {
                assert!(begun.elapsed() < WAIT_TIMEOUT, "nobody runs the mesh");
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        _ => {}
    }
    done(Ok(handle)).unwrap();
}

/// A number that is the same at every rank.
fn random_of(seed: u64, round: u32) -> usize {
    Random(seed ^ (u64::from(round) << 32)).below(1 << 20)
}

/// At every rank one thread calls collectives, and two others exchange messages with the neighbours.
fn callers_of_all_kinds_get_what_they_wait_for(way: Way) {
    let seed = seed();
    run(way, 3, |mesh| {
        std::thread::scope(|scope| {
            for tag in [1, 2] {
                scope.spawn(move || {
                    messages(mesh, tag, &mut Random(seed ^ tag ^ u64::from(mesh.rank()) << 8))
                });
            }
            let mut random = Random(seed ^ u64::from(mesh.rank()));
            for round in 0..150_u32 {
                // A few are larger than what a caller runs.
                let elements = [1, 900, 20_000, 300_000][random_of(seed, round) % 4];
                let mut values = vec![(round + mesh.rank()) as f32; elements];
                lend(|lending| {
                    let values = lending.receive(&mut values);
                    finish(mesh.allreduce(values, ElementType::F32, ReduceOp::Sum), &mut random);
                });
                let expected = (3 * round + 3) as f32;
                assert!(values.iter().all(|value| *value == expected), "round {round} at {}", mesh.rank());
            }
        });
    });
}

fn messages(mesh: &Mesh, tag: u64, random: &mut Random) {
    let (next, previous) = ((mesh.rank() + 1) % 3, (mesh.rank() + 2) % 3);
    for round in 0..150_u32 {
        let mut received = vec![0_u32; 500];
        lend(|lending| {
            let receives = mesh.receive(previous, tag, lending.receive(&mut received));
            let sends = mesh.send(next, tag, SendRegion::owned(vec![1000 * round + mesh.rank(); 500]));
            finish(receives, random);
            finish(sends, random);
        });
        assert!(received.iter().all(|value| *value == 1000 * round + previous), "round {round}, tag {tag}");
    }
}

/// A caller that runs the mesh and one that only waits both hear that another rank has given up.
fn callers_that_wait_hear_of_the_end(way: Way) {
    for round in 0..20 {
        let all_are_through = Barrier::new(3);
        at_all(meshes(way, 3), |mesh| {
            let allreduce = || {
                let values = ReceiveRegion::owned(vec![1_f32; 100]);
                mesh.allreduce(values, ElementType::F32, ReduceOp::Sum)
            };
            // From now on callers run the mesh.
            (0..3).for_each(|_| done(allreduce()).unwrap());
            // What a rank that gives up has not sent would be missing to the others.
            all_are_through.wait();
            if mesh.rank() == round % 3 {
                std::thread::sleep(Duration::from_micros(200 * u64::from(round)));
                return drop(mesh);
            }
            let error = std::thread::scope(|scope| {
                let other = scope.spawn(|| done(allreduce()).unwrap_err());
                let own = done(allreduce()).unwrap_err();
                (own, other.join().unwrap())
            });
            let culprit = format!("rank {}", round % 3);
            assert!(error.0.to_string().contains(&culprit), "{}", error.0);
            assert!(error.1.to_string().contains(&culprit), "{}", error.1);
        });
    }
}

/// No heartbeat helps: an operation that its caller has begun and then left goes on by the mesh's thread.
#[test]
fn what_a_caller_has_begun_and_left_goes_on() {
    for way in [Way::Memory, Way::Tcp] {
        let dead_after = 100 * WAIT_TIMEOUT;
        let shares_memory = way == Way::Memory;
        let meshes = meshes_with(3, |config| MeshConfig { dead_after, shares_memory, ..config });
        let all_are_through = Barrier::new(3);
        at_all(meshes, |mesh| {
            let allreduce = || {
                let values = ReceiveRegion::owned(vec![1_f32; 100]);
                mesh.allreduce(values, ElementType::F32, ReduceOp::Sum).unwrap()
            };
            for round in 0..30 {
                (0..3).for_each(|_| allreduce().wait().unwrap());
                // By then the mesh's thread waits for what happens, and one rank lets the others wait.
                std::thread::sleep(Duration::from_millis(2 + 2 * u64::from(mesh.rank() == round % 3)));
                let (left, begun) = (allreduce(), Instant::now());
                while !left.is_done() {
                    assert!(begun.elapsed() < WAIT_TIMEOUT, "{way:?}: nobody runs the mesh");
                    std::thread::sleep(Duration::from_micros(100));
                }
                // No rank begins another operation, which could wake one that has been forgotten.
                all_are_through.wait();
            }
            mesh.leave(WAIT_TIMEOUT).unwrap();
        });
    }
}

/// A callback may begin the next operation, and its panic fails the mesh, whichever thread runs it.
#[test]
fn callbacks_run_on_callers_too() {
    let allreduce = |mesh: &Mesh| {
        let values = ReceiveRegion::owned(vec![1_f32; 10]);
        mesh.allreduce(values, ElementType::F32, ReduceOp::Sum)
    };
    let errors = at_all(meshes(Way::Memory, 2), |mesh| {
        let mesh = Arc::new(mesh);
        for _ in 0..50 {
            let (sender, ended) = channel();
            let (first, of_callback) = (allreduce(&mesh).unwrap(), Arc::clone(&mesh));
            first.on_complete(move |_| sender.send(allreduce(&of_callback).unwrap()).unwrap());
            done(Ok(first)).unwrap();
            done(Ok(ended.recv_timeout(WAIT_TIMEOUT).unwrap())).unwrap();
        }
        if mesh.rank() == 1 {
            // The other rank's callback is there before its operation ends.
            std::thread::sleep(Duration::from_millis(20));
        }
        let failing = allreduce(&mesh).unwrap();
        if mesh.rank() == 0 {
            failing.on_complete(|_| panic!("a callback of the program"));
        }
        let _ = done(Ok(failing));
        // What is complete may still end well.
        let begun = Instant::now();
        loop {
            match done(allreduce(&mesh)) {
                Ok(()) => assert!(begun.elapsed() < WAIT_TIMEOUT, "the mesh goes on"),
                Err(error) => return error.to_string(),
            }
        }
    });
    assert!(errors.iter().all(|error| error.contains("a callback of the program")), "{errors:?}");
}
