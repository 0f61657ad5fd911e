//! Shared memory, beyond what every collective must do either way.

use std::time::Duration;

use paramhub_mesh::{ElementType, Mesh, MeshConfig, ReceiveRegion, ReduceOp, SendRegion};
use paramhub_transport::lend;

use crate::common::{Random, WAIT_TIMEOUT, Way, at_all, done, meshes, meshes_with, run, seed};

fn sums(mesh: &Mesh, elements: usize) {
    let mut values: Vec<f32> = (0..elements).map(|at| (at % 97) as f32 + mesh.rank() as f32).collect();
    let own = (0..mesh.size()).map(|rank| rank as f32).sum::<f32>();
    lend(|lending| {
        done(mesh.allreduce(lending.receive(&mut values), ElementType::F32, ReduceOp::Sum)).unwrap();
    });
    let right = |(at, value): (usize, &f32)| *value == (at % 97) as f32 * mesh.size() as f32 + own;
    assert!(values.iter().enumerate().all(right), "{elements} elements at rank {}", mesh.rank());
}

/// [`run`] where no heartbeat wakes a rank within a test's timeout: a rank that no doorbell wakes when it
/// can go on hangs.
fn run_without_heartbeats(size: u32, f: impl Fn(&Mesh) + Sync) {
    let dead_after = 100 * WAIT_TIMEOUT;
    at_all(meshes_with(size, |config| MeshConfig { dead_after, ..config }), |mesh| {
        f(&mesh);
        mesh.leave(WAIT_TIMEOUT).unwrap();
    });
}

#[test]
fn one_rank_that_forbids_it_is_enough_for_all_to_go_over_tcp() {
    for forbids in 0..3 {
        let meshes = meshes_with(3, |config| MeshConfig { shares_memory: config.rank != forbids, ..config });
        at_all(meshes, |mesh| {
            assert!(mesh.shares_memory().is_err(), "{mesh:?}");
            assert!(format!("{mesh:?}").contains("memory"), "{mesh:?}");
            sums(&mesh, 70_000);
            mesh.leave(WAIT_TIMEOUT).unwrap();
        });
    }
}

#[test]
fn more_ranks_than_processors_get_through() {
    run_without_heartbeats(8, |mesh| {
        for elements in [1, 5000, 300_001] {
            for _ in 0..20 {
                sums(mesh, elements);
            }
        }
    });
}

/// The other ranks do not overwrite the bytes that a late rank has not read.
#[test]
fn stragglers_find_what_was_meant_for_them() {
    let seed = seed();
    run_without_heartbeats(4, |mesh| {
        let mut random = Random(seed ^ u64::from(mesh.rank()));
        for round in 0..60_u32 {
            if random.below(8) == 0 {
                std::thread::sleep(Duration::from_micros(random.below(3000) as u64));
            }
            let root = round % 4;
            let mut buffer = vec![0_u32; 40_000];
            if mesh.rank() == root {
                buffer.fill(round + 1);
            }
            lend(|lending| done(mesh.broadcast(lending.receive(&mut buffer), root)).unwrap());
            assert!(buffer.iter().all(|value| *value == round + 1), "round {round} at {}", mesh.rank());
            sums(mesh, 1 + random_of(seed, round) % 60_000);
        }
    });
}

/// A number that is the same at every rank.
fn random_of(seed: u64, round: u32) -> usize {
    Random(seed ^ (u64::from(round) << 32)).below(1 << 20)
}

/// Collectives in memory, those over TCP and messages between two ranks take turns.
#[test]
fn collectives_of_both_ways_keep_their_order() {
    run(Way::Memory, 3, |mesh| {
        let (rank, size) = (mesh.rank(), mesh.size());
        for round in 0..50_u32 {
            let block = |from: u32, to: u32| vec![round * 100 + from * 10 + to; 700];
            let mut values = vec![f64::from(round); 9000];
            let mut blocks: Vec<Vec<u32>> = (0..size).map(|_| vec![0; 700]).collect();
            let mut gathered: Vec<Vec<u32>> = blocks.clone();
            let inputs: Vec<Vec<u32>> = (0..size).map(|to| block(rank, to)).collect();
            lend(|lending| {
                let send = |input: &'_ Vec<u32>| SendRegion::owned(input.clone());
                let outputs = blocks.iter_mut().map(|block| lending.receive(block)).collect();
                let handles = [
                    mesh.allreduce(lending.receive(&mut values), ElementType::F64, ReduceOp::Max),
                    mesh.all_to_all(inputs.iter().map(send).collect(), outputs),
                    mesh.barrier(),
                    mesh.allgather(
                        Some(send(&inputs[0])),
                        gathered.iter_mut().map(|block| lending.receive(block)).collect(),
                    ),
                    mesh.send((rank + 1) % size, 9, send(&inputs[1])),
                    mesh.receive((rank + size - 1) % size, 9, ReceiveRegion::owned(vec![0_u32; 700])),
                ];
                handles.into_iter().for_each(|handle| done(handle).unwrap());
            });
            assert!(values.iter().all(|value| *value == f64::from(round)));
            for from in 0..size {
                assert_eq!(blocks[from as usize], block(from, rank));
                assert_eq!(gathered[from as usize], block(from, 0));
            }
        }
    });
}

#[test]
fn a_collective_in_memory_and_one_over_tcp_fail_with_both_names() {
    let errors = at_all(meshes(Way::Memory, 3), |mesh| {
        let handle = match mesh.rank() {
            1 => mesh.gather(Some(SendRegion::owned(vec![0_u8; 4])), Vec::new(), 0),
            _ => mesh.allreduce(ReceiveRegion::owned(vec![0_f32; 10]), ElementType::F32, ReduceOp::Sum),
        };
        done(handle).and_then(|()| done(mesh.barrier())).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("gather(root 0)"), "{error}");
        assert!(error.contains("allreduce(sum of f32, 40 bytes)"), "{error}");
    }
}

#[test]
fn the_ranks_that_an_operation_awaits_are_known() {
    let meshes = meshes(Way::Memory, 3);
    let handles: Vec<_> = [0, 2]
        .map(|rank| {
            let buffer = ReceiveRegion::owned(vec![1_f32; 100_000]);
            meshes[rank].allreduce(buffer, ElementType::F32, ReduceOp::Sum).unwrap()
        })
        .into();
    // The other ranks do their work before this loop ends.
    while handles.iter().any(|handle| handle.awaited_ranks() != [1]) {
        assert!(handles.iter().all(|handle| !handle.is_done()));
        std::thread::sleep(Duration::from_millis(1));
    }
    let late =
        meshes[1].allreduce(ReceiveRegion::owned(vec![1_f32; 100_000]), ElementType::F32, ReduceOp::Sum);
    done(late).unwrap();
    handles.iter().for_each(|handle| handle.wait().unwrap());
    at_all(meshes, |mesh| mesh.leave(WAIT_TIMEOUT).unwrap());
}
