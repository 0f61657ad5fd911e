use half::{bf16, f16};
use paramhub_mesh::{ElementType, Mesh, MeshError, Noted, ReceiveRegion, ReduceOp, SendRegion};
use paramhub_transport::lend;

use crate::common::{Random, Way, at_all, done, meshes, run, seed};

in_every_way!(
    every_collective_agrees_with_a_sequential_reference,
    sums_have_the_same_bits_on_all_ranks_and_every_time,
    many_collectives_may_be_outstanding,
    one_sided_collectives_do_not_run_away_or_stall,
    different_collectives_fail_with_both_names,
    an_allreduce_that_goes_another_way_is_compared_too,
    every_noted_collective_is_compared_like_the_operation,
    lengths_that_only_pairs_know_are_compared_by_pairs,
    what_has_come_whole_counts_though_a_peer_has_ended_the_mesh,
);

/// Numbers of elements: none, one, fewer than ranks, a prime, beyond the small algorithms, beyond a piece.
const LENGTHS: [usize; 8] = [0, 1, 2, 3, 1009, 16_384, 100_003, 400_000];

/// A number that every element type holds exactly, small enough that sums and products of five stay exact.
fn exact(random: &mut Random, element: ElementType, op: ReduceOp) -> f64 {
    let bound = if op == ReduceOp::Product { 3 } else { 11 };
    let value = random.below(bound) as f64;
    let is_signed = !matches!(element, ElementType::U8 | ElementType::Bool);
    if is_signed && random.below(2) == 1 { -value } else { value }
}

fn encode(element: ElementType, values: &[f64]) -> Vec<u8> {
    fn all<const N: usize>(values: &[f64], f: impl Fn(f64) -> [u8; N]) -> Vec<u8> {
        values.iter().flat_map(|value| f(*value)).collect()
    }
    match element {
        ElementType::F32 => all(values, |value| (value as f32).to_le_bytes()),
        ElementType::F64 => all(values, f64::to_le_bytes),
        ElementType::F16 => all(values, |value| f16::from_f64(value).to_le_bytes()),
        ElementType::BF16 => all(values, |value| bf16::from_f64(value).to_le_bytes()),
        ElementType::I8 => all(values, |value| (value as i64 as i8).to_le_bytes()),
        ElementType::U8 => all(values, |value| (value as i64 as u8).to_le_bytes()),
        ElementType::I16 => all(values, |value| (value as i16).to_le_bytes()),
        ElementType::I32 => all(values, |value| (value as i32).to_le_bytes()),
        ElementType::I64 => all(values, |value| (value as i64).to_le_bytes()),
        ElementType::Bool => all(values, |value| [u8::from(value != 0.0)]),
    }
}

/// The expected result of a reduction of exact numbers, computed without the code under test.
fn reduced(element: ElementType, op: ReduceOp, ranks: &[Vec<f64>]) -> Vec<f64> {
    let integer = |f: fn(i64, i64) -> i64| move |left: f64, right: f64| f(left as i64, right as i64) as f64;
    let sum = |values: &mut dyn Iterator<Item = f64>| match (element, op) {
        (ElementType::Bool, ReduceOp::Sum) => values.fold(0.0, f64::max),
        (_, ReduceOp::Sum) => values.sum(),
        (_, ReduceOp::Average) => values.sum::<f64>() / ranks.len() as f64,
        (_, ReduceOp::Product) => values.product(),
        (_, ReduceOp::Min) => values.fold(f64::INFINITY, f64::min),
        (_, ReduceOp::Max) => values.fold(f64::NEG_INFINITY, f64::max),
        (_, ReduceOp::BitAnd) => values.reduce(integer(|left, right| left & right)).unwrap(),
        (_, ReduceOp::BitOr) => values.reduce(integer(|left, right| left | right)).unwrap(),
        (_, ReduceOp::BitXor) => values.reduce(integer(|left, right| left ^ right)).unwrap(),
    };
    let truth = |value: f64| if element == ElementType::Bool { f64::from(value != 0.0) } else { value };
    (0..ranks[0].len()).map(|at| sum(&mut ranks.iter().map(|values| truth(values[at])))).collect()
}

/// -0 and 0 are one number here, and a product of a negative number and 0 may be either.
fn same(element: ElementType, left: &[u8], right: &[u8]) -> bool {
    let floats = |bytes: &[u8]| -> Option<Vec<f64>> {
        Some(match element {
            ElementType::F32 => {
                bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
            }
            ElementType::F64 => bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
            ElementType::F16 => bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f64()).collect(),
            ElementType::BF16 => {
                bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f64()).collect()
            }
            _ => return None,
        })
    };
    match (floats(left), floats(right)) {
        (Some(left), Some(right)) => left == right,
        _ => left == right,
    }
}

/// One random collective at this rank, checked against the reference. All ranks derive the same one from the
/// same random numbers.
fn one(mesh: &Mesh, random: &mut Random) -> Result<(), MeshError> {
    let (rank, size) = (mesh.rank() as usize, mesh.size() as usize);
    let op = random.pick(&ReduceOp::ALL);
    let elements: Vec<ElementType> =
        ElementType::ALL.into_iter().filter(|element| op.supports(*element)).collect();
    let element = random.pick(&elements);
    let length = random.pick(&LENGTHS);
    let root = random.below(size);
    let kind = random.below(9);
    let is_equal = random.below(2) == 0;
    let in_place = random.below(2) == 0;
    let mut length_of = |_: usize| if is_equal { length } else { random.pick(&LENGTHS[..6]) };
    // lengths[from][to]
    let lengths: Vec<Vec<usize>> = (0..size).map(|_| (0..size).map(&mut length_of).collect()).collect();
    let context = format!(
        "kind {kind}, {op} of {element}, length {length} {is_equal} {in_place}, root {root}, rank {rank} of {size}"
    );
    let mut values = |count: usize| -> Vec<f64> { (0..count).map(|_| exact(random, element, op)).collect() };
    match kind {
        0 => done(mesh.barrier()),
        1 => {
            let sent = encode(element, &values(length));
            let mut buffer = if rank == root { sent.clone() } else { vec![0; sent.len()] };
            lend(|lending| done(mesh.broadcast(lending.receive(&mut buffer), root as u32)))?;
            assert_eq!(buffer, sent, "{context}");
            Ok(())
        }
        2 | 3 => {
            let ranks: Vec<Vec<f64>> = (0..size).map(|_| values(length)).collect();
            let mut buffer = encode(element, &ranks[rank]);
            lend(|lending| {
                let region = lending.receive(&mut buffer);
                done(match kind {
                    2 => mesh.allreduce(region, element, op),
                    _ => mesh.reduce(region, element, op, root as u32),
                })
            })?;
            let expected = encode(element, &reduced(element, op, &ranks));
            assert!(same(element, &buffer, &expected) || (kind == 3 && rank != root), "{context}");
            Ok(())
        }
        4 => {
            let blocks: Vec<Vec<u8>> =
                lengths[0].iter().map(|length| encode(element, &values(*length))).collect();
            let mut outputs: Vec<Vec<u8>> = blocks.iter().map(|block| vec![0; block.len()]).collect();
            if in_place {
                outputs[rank].clone_from(&blocks[rank]);
            }
            lend(|lending| {
                let regions = outputs.iter_mut().map(|output| lending.receive(output)).collect();
                let input = (!in_place).then(|| lending.send(&blocks[rank]));
                done(mesh.allgather(input, regions))
            })?;
            assert_eq!(outputs, blocks, "{context}");
            Ok(())
        }
        5 => {
            let inputs: Vec<Vec<Vec<f64>>> =
                (0..size).map(|_| lengths[0].iter().map(|length| values(*length)).collect()).collect();
            let expected: Vec<Vec<f64>> = inputs.iter().map(|blocks| blocks[rank].clone()).collect();
            let expected = encode(element, &reduced(element, op, &expected));
            let mut own: Vec<Vec<u8>> = inputs[rank].iter().map(|block| encode(element, block)).collect();
            let mut output = vec![0; own[rank].len()];
            if in_place {
                output = std::mem::take(&mut own[rank]);
            }
            let before = own.clone();
            lend(|lending| {
                let regions = own.iter().map(|input| lending.send(input)).collect();
                done(mesh.reduce_scatter(regions, lending.receive(&mut output), in_place, element, op))
            })?;
            assert!(same(element, &output, &expected), "{context}");
            assert_eq!(own, before, "{context}: an input has changed");
            Ok(())
        }
        6 => {
            let blocks: Vec<Vec<u8>> =
                lengths[0].iter().map(|length| encode(element, &values(*length))).collect();
            if rank != root {
                return lend(|lending| {
                    done(mesh.gather(Some(lending.send(&blocks[rank])), Vec::new(), root as u32))
                });
            }
            let mut outputs: Vec<Vec<u8>> = blocks.iter().map(|block| vec![0; block.len()]).collect();
            lend(|lending| {
                let regions = outputs.iter_mut().map(|output| lending.receive(output)).collect();
                done(mesh.gather(Some(lending.send(&blocks[rank])), regions, root as u32))
            })?;
            assert_eq!(outputs, blocks, "{context}");
            Ok(())
        }
        7 => {
            let blocks: Vec<Vec<u8>> =
                lengths[0].iter().map(|length| encode(element, &values(*length))).collect();
            let mut output = vec![0; blocks[rank].len()];
            lend(|lending| {
                let inputs =
                    blocks.iter().filter(|_| rank == root).map(|block| lending.send(block)).collect();
                done(mesh.scatter(inputs, Some(lending.receive(&mut output)), root as u32))
            })?;
            assert_eq!(output, blocks[rank], "{context}");
            Ok(())
        }
        _ => {
            let all: Vec<Vec<Vec<u8>>> = lengths
                .iter()
                .map(|row| row.iter().map(|length| encode(element, &values(*length))).collect())
                .collect();
            let expected: Vec<Vec<u8>> = all.iter().map(|row| row[rank].clone()).collect();
            let mut outputs: Vec<Vec<u8>> = expected.iter().map(|block| vec![0; block.len()]).collect();
            lend(|lending| {
                let inputs = all[rank].iter().map(|block| lending.send(block)).collect();
                let regions = outputs.iter_mut().map(|output| lending.receive(output)).collect();
                done(mesh.all_to_all(inputs, regions))
            })?;
            assert_eq!(outputs, expected, "{context}");
            Ok(())
        }
    }
}

fn every_collective_agrees_with_a_sequential_reference(way: Way) {
    let seed = seed();
    for size in 1..=5 {
        run(way, size, |mesh| {
            let mut random = Random(seed ^ u64::from(size));
            for number in 0..60 {
                let mut numbers = Random(random.next());
                if let Err(error) = one(mesh, &mut numbers) {
                    panic!("PARAMHUB_TEST_SEED={seed}, size {size}, collective {number}: {error}");
                }
            }
        });
    }
}

fn sums_have_the_same_bits_on_all_ranks_and_every_time(way: Way) {
    let seed = seed();
    for size in 2..=5 {
        for element in [ElementType::F32, ElementType::F64, ElementType::F16, ElementType::BF16] {
            for length in [7, 5_000, 300_001] {
                let results: Vec<Vec<u8>> = (0..2)
                    .flat_map(|_| {
                        run(way, size, |mesh| {
                            let mut random = Random(seed ^ u64::from(mesh.rank()));
                            let values: Vec<f64> =
                                (0..length).map(|_| random.next() as f64 / 2f64.powi(63) - 1.0).collect();
                            let mut buffer = encode(element, &values);
                            lend(|lending| {
                                done(mesh.allreduce(lending.receive(&mut buffer), element, ReduceOp::Sum))
                            })
                            .unwrap();
                            buffer
                        })
                    })
                    .collect();
                let differs = results.iter().position(|result| *result != results[0]);
                assert_eq!(differs, None, "{element}, {length} elements, {size} ranks");
            }
        }
    }
}

fn many_collectives_may_be_outstanding(way: Way) {
    run(way, 3, |mesh| {
        let mut sums: Vec<Vec<f32>> =
            (0..300).map(|number| vec![number as f32; [5, 40_000][number % 2]]).collect();
        lend(|lending| {
            let handles: Vec<_> = sums
                .iter_mut()
                .map(|sum| mesh.allreduce(lending.receive(sum), ElementType::F32, ReduceOp::Sum))
                .collect();
            handles.into_iter().for_each(|handle| done(handle).unwrap());
        });
        for (number, sum) in sums.iter().enumerate() {
            assert!(sum.iter().all(|value| *value == 3.0 * number as f32));
        }
    });
}

fn one_sided_collectives_do_not_run_away_or_stall(way: Way) {
    // The leaves of a gather never wait for one another, so only the window holds them together.
    run(way, 3, |mesh| {
        for round in 0..1500_u32 {
            let own = round.to_le_bytes();
            let mut all = vec![vec![0_u8; 4]; 3];
            lend(|lending| {
                let outputs = match mesh.rank() {
                    0 => all.iter_mut().map(|output| lending.receive(output)).collect(),
                    _ => Vec::new(),
                };
                done(mesh.gather(Some(lending.send(&own)), outputs, 0)).unwrap();
            });
            assert!(mesh.rank() != 0 || all.iter().all(|output| *output == own));
        }
    });
}

fn different_collectives_fail_with_both_names(way: Way) {
    // Both roots only send, so neither would ever get a message from the other.
    let errors = at_all(meshes(way, 2), |mesh| {
        let buffer = ReceiveRegion::owned(vec![0_u8; 100]);
        done(mesh.broadcast(buffer, mesh.rank())).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("broadcast(100 bytes, root 0)"), "{error}");
        assert!(error.contains("broadcast(100 bytes, root 1)"), "{error}");
    }
    let errors = at_all(meshes(way, 3), |mesh| {
        let element = if mesh.rank() == 1 { ElementType::I32 } else { ElementType::F32 };
        let handle = mesh.broadcast_of(ReceiveRegion::owned(vec![0_f32; 25]), element, 0);
        done(handle).and_then(|()| done(mesh.barrier())).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("broadcast(f32, 100 bytes, root 0)"), "{error}");
        assert!(error.contains("broadcast(i32, 100 bytes, root 0)"), "{error}");
    }
    let errors = at_all(meshes(way, 4), |mesh| {
        let buffer = ReceiveRegion::owned(vec![0_f32; 25]);
        let op = if mesh.rank() == 2 { ReduceOp::Max } else { ReduceOp::Sum };
        let handle = mesh.allreduce(buffer, ElementType::F32, op);
        done(handle).and_then(|()| done(mesh.barrier())).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("sum of f32") && error.contains("max of f32"), "{error}");
    }
}

fn an_allreduce_that_goes_another_way_is_compared_too(way: Way) {
    let (element, op) = (ElementType::F32, ReduceOp::Sum);
    let note = |mesh: &Mesh, bytes| done(mesh.note(Noted::AllReduce { bytes, element, op }));
    run(way, 3, |mesh| {
        for bytes in [0, 4, 1 << 40] {
            note(mesh, bytes).unwrap();
        }
        done(mesh.barrier()).unwrap();
    });
    let errors = at_all(meshes(way, 3), |mesh| {
        let noted = note(&mesh, if mesh.rank() == 1 { 8 } else { 4 });
        // Through memory some barriers may be over before the announcements on the connections have come.
        let barriers = || (0..100_000).try_for_each(|_| done(mesh.barrier()));
        noted.and_then(|()| barriers()).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("allreduce(sum of f32, 4 bytes)"), "{error}");
        assert!(error.contains("allreduce(sum of f32, 8 bytes)"), "{error}");
    }
}

/// A collective of parts that are as long as these.
type NotedOf = fn(&[usize]) -> Noted<'_>;

fn every_noted_collective_is_compared_like_the_operation(way: Way) {
    const OF: ElementType = ElementType::F32;
    const BY: ReduceOp = ReduceOp::Sum;
    let cases: [(NotedOf, &str); 4] = [
        (
            |lengths| Noted::Reduce { bytes: lengths[0], element: OF, op: BY, root: 1 },
            "reduce(sum of f32, 8 bytes",
        ),
        (|lengths| Noted::Broadcast { bytes: lengths[0], element: None, root: 1 }, "broadcast(8 bytes"),
        (|lengths| Noted::AllGather { lengths }, "allgather(16 bytes"),
        (
            |lengths| Noted::ReduceScatter { lengths, element: OF, op: BY },
            "reduce_scatter(sum of f32, 16 bytes",
        ),
    ];
    for (noted, text) in cases {
        run(way, 2, |mesh| {
            done(mesh.note(noted(&[4, 8]))).unwrap();
            done(mesh.barrier()).unwrap();
        });
        let errors = at_all(meshes(way, 2), |mesh| {
            let lengths = if mesh.rank() == 1 { [8, 8] } else { [4, 8] };
            let noted = done(mesh.note(noted(&lengths)));
            let barriers = || (0..100_000).try_for_each(|_| done(mesh.barrier()));
            noted.and_then(|()| barriers()).unwrap_err().to_string()
        });
        for error in errors {
            assert!(error.contains(text), "{error}");
        }
    }
    run(way, 2, |mesh| {
        let lengths: &[usize] = &[4, 4, 4];
        let refused = done(mesh.note(Noted::AllGather { lengths })).unwrap_err().to_string();
        assert!(refused.contains("it takes 2 lengths, one for each rank, not 3"), "{refused}");
    });
}

fn lengths_that_only_pairs_know_are_compared_by_pairs(way: Way) {
    let errors = at_all(meshes(way, 3), |mesh| {
        let inputs = (0..3).map(|to| {
            let wrong = mesh.rank() == 1 && to == 2;
            SendRegion::owned(vec![0_u8; if wrong { 5 } else { 4 }])
        });
        let outputs = (0..3).map(|_| ReceiveRegion::owned(vec![0_u8; 4])).collect();
        let handle = mesh.all_to_all(inputs.collect(), outputs);
        done(handle).and_then(|()| done(mesh.barrier())).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("rank 1 sends 5 bytes and rank 2 expects 4"), "{error}");
        assert!(error.contains("all_to_all"), "{error}");
    }
}

fn what_has_come_whole_counts_though_a_peer_has_ended_the_mesh(way: Way) {
    for _ in 0..100 {
        at_all(meshes(way, 2), |mesh| {
            let (rank, mut sum) = (mesh.rank(), vec![1.0_f32; 20_000]);
            lend(|lending| {
                done(mesh.allreduce(lending.receive(&mut sum), ElementType::F32, ReduceOp::Sum)).unwrap();
            });
            assert!(sum.iter().all(|value| *value == 2.0), "{way:?}, rank {rank}");
            // The first of them to come here ends the mesh, while the other may not have noticed the end of its sum.
            mesh.abort("another mesh follows");
        });
    }
}
