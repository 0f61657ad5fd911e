//! Runs all ranks' schedules against one another without a socket, in random orders that their dependencies
//! allow.

use std::collections::HashMap;
use std::sync::Arc;

use paramhub_transport::ReceiveRegion;
use proptest::prelude::*;

use super::*;
use crate::arithmetic;
use crate::descriptor::{Collective, Descriptor};
use crate::element::{ElementType, ReduceOp};
use crate::error::{MeshError, MeshRank};
use crate::handle::OperationCompleter;
use crate::operation::{Operation, OperationBuffer, OperationKind, OperationRequest};

const ELEMENT: ElementType = ElementType::I64;
const WIDTH: usize = 8;

/// One rank of a simulated collective.
struct Rank {
    operation: Operation,
    ready: Vec<u32>,
}

/// A possible next event.
#[derive(Clone, Copy)]
enum Event {
    /// A free step begins.
    Begin { rank: usize, at: usize },
    /// All bytes of a send leave, whose receive was announced.
    Leave { from: usize, to: usize, index: u32 },
    /// The bytes that have left arrive, and are taken.
    Arrive { from: usize, to: usize, index: u32 },
}

type Path = (usize, usize, u32);

/// Runs the schedules over `buffers[rank][buffer]` and returns the buffers afterwards. `dice` decides what
/// happens next.
fn simulate(
    schedules: Vec<Schedule>,
    buffers: Vec<Vec<Vec<u8>>>,
    op: ReduceOp,
    mut dice: impl FnMut(usize) -> usize,
) -> Vec<Vec<Vec<u8>>> {
    let size = schedules.len() as u32;
    let descriptor = Descriptor { reduction: Some((ELEMENT, op)), ..Descriptor::new(Collective::AllReduce) };
    let lengths: Vec<Vec<usize>> = buffers.iter().map(|all| all.iter().map(Vec::len).collect()).collect();
    let mut ranks: Vec<Rank> = std::iter::zip(schedules, buffers)
        .map(|(schedule, buffers)| {
            let scratch = vec![0xee; schedule.scratch_bytes];
            let buffers = buffers
                .into_iter()
                .map(|bytes| OperationBuffer::Receive(ReceiveRegion::owned(bytes)))
                .collect();
            let this_rank = MeshRank { mesh: Arc::from("simulated"), rank: 0 };
            let (completer, _) = OperationCompleter::new(None, |_| {}, MeshError::Left { this_rank });
            let request = OperationRequest {
                kind: OperationKind::Collective(descriptor),
                buffers,
                schedule,
                plan: None,
                completer,
            };
            let operation = Operation::new(request, 0, scratch);
            let ready = operation.order.ready().collect();
            Rank { operation, ready }
        })
        .collect();
    let mut sends: HashMap<Path, (u32, BufferRange)> = HashMap::new();
    let mut receives: HashMap<Path, (u32, BufferRange, bool)> = HashMap::new();
    // The sends whose bytes have left. They are read where they are when they arrive, as after a cut.
    let mut flying: HashMap<Path, (u32, BufferRange)> = HashMap::new();
    loop {
        let mut events: Vec<Event> = Vec::new();
        for (rank, state) in ranks.iter().enumerate() {
            events.extend((0..state.ready.len()).map(|at| Event::Begin { rank, at }));
        }
        let mut paths: Vec<Path> =
            sends.keys().filter(|path| receives.contains_key(*path)).copied().collect();
        paths.sort_unstable();
        events.extend(paths.into_iter().map(|(from, to, index)| Event::Leave { from, to, index }));
        let mut paths: Vec<Path> = flying.keys().copied().collect();
        paths.sort_unstable();
        events.extend(paths.into_iter().map(|(from, to, index)| Event::Arrive { from, to, index }));
        if events.is_empty() {
            break;
        }
        match events[dice(events.len())] {
            Event::Begin { rank, at } => {
                let step = ranks[rank].ready.swap_remove(at);
                let work = ranks[rank].operation.work(step);
                let taken = match work {
                    Work::Send { peer, index, from } => {
                        sends.insert((rank, peer as usize, index), (step, from)).map(|_| ())
                    }
                    Work::Receive { peer, index, into } => {
                        receives.insert((peer as usize, rank, index), (step, into, false)).map(|_| ())
                    }
                    Work::ReceiveReduce { peer, index, into } => {
                        receives.insert((peer as usize, rank, index), (step, into, true)).map(|_| ())
                    }
                    Work::ReceiveAny { .. } => unreachable!("no collective receives from anyone"),
                    _ => {
                        let mut done = 0;
                        let (Work::Copy { into: span, .. }
                        | Work::Reduce { into: span, .. }
                        | Work::Divide { span }) = work
                        else {
                            unreachable!()
                        };
                        assert_unused(&flying, rank, span);
                        while done < span.bytes {
                            done = ranks[rank].operation.compute(work, done, 1 << 16, size);
                        }
                        end(&mut ranks[rank], step);
                        None
                    }
                };
                assert!(taken.is_none(), "two transfers on one path: rank {rank}, {work:?}");
            }
            Event::Leave { from, to, index } => {
                let (step, span) = sends.remove(&(from, to, index)).unwrap();
                flying.insert((from, to, index), (step, span));
                let Rank { operation, ready } = &mut ranks[from];
                operation.order.left(step, |step| ready.push(step));
            }
            Event::Arrive { from, to, index } => {
                let (sent, span) = flying.remove(&(from, to, index)).unwrap();
                let bytes = ranks[from].operation.bytes(span).to_vec();
                end(&mut ranks[from], sent);
                let (step, span, is_reduced) = receives.remove(&(from, to, index)).unwrap();
                assert_unused(&flying, to, span);
                assert_eq!(bytes.len(), span.bytes, "from rank {from} to {to}, index {index}");
                let into = ranks[to].operation.bytes_mut(span);
                if is_reduced {
                    arithmetic::reduce(ELEMENT, op, into, &bytes);
                } else {
                    into.copy_from_slice(&bytes);
                }
                end(&mut ranks[to], step);
            }
        }
    }
    assert!(sends.is_empty() && receives.is_empty(), "some wait for ever: {sends:?} {receives:?}");
    std::iter::zip(ranks, lengths)
        .map(|(rank, lengths)| {
            assert_eq!(rank.operation.steps_left, 0, "some steps never became free");
            let whole = |(buffer, bytes): (usize, &usize)| {
                rank.operation.bytes(BufferRange::whole(buffer as u32, *bytes)).to_vec()
            };
            lengths.iter().enumerate().map(whole).collect()
        })
        .collect()
}

/// What is written must not be what another rank has not taken yet: it would have to be sent again after a cut.
fn assert_unused(flying: &HashMap<Path, (u32, BufferRange)>, rank: usize, written: BufferRange) {
    for ((from, to, index), (_, sent)) in flying {
        let overlaps =
            sent.buffer == written.buffer && sent.start < written.end() && written.start < sent.end();
        assert!(*from != rank || !overlaps, "{written:?} is written, which rank {to} takes as {index}");
    }
}

fn end(rank: &mut Rank, step: u32) {
    let ready = &mut rank.ready;
    rank.operation.ended(step, |step| ready.push(step));
}

fn numbers(seed: u64, elements: usize) -> Vec<u8> {
    (0..elements as u64)
        .flat_map(|at| {
            (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at.wrapping_mul(0xbf58_476d)).to_le_bytes()
        })
        .collect()
}

fn sum(contributions: impl Iterator<Item = Vec<u8>>) -> Vec<u8> {
    contributions
        .reduce(|mut left, right| {
            arithmetic::reduce(ELEMENT, ReduceOp::Sum, &mut left, &right);
            left
        })
        .unwrap()
}

fn dice(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed;
    move |sides| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % sides
    }
}

/// Numbers of elements: none, few, the small algorithms, the large ones with one and with many pieces.
fn elements() -> impl Strategy<Value = usize> {
    prop_oneof![Just(0), 1..9_usize, Just(1000), 8_193..20_000_usize, Just(150_001)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn allreduce_sums_everywhere(size in 1..9_u32, elements in elements(), seed: u64) {
        let bytes = elements * WIDTH;
        let schedules = (0..size).map(|rank| allreduce(rank, size, bytes, WIDTH, false)).collect();
        let own = |rank: u32| numbers(seed ^ u64::from(rank), elements);
        let after = simulate(schedules, (0..size).map(|rank| vec![own(rank)]).collect(), ReduceOp::Sum, dice(seed));
        let expected = sum((0..size).map(own));
        prop_assert!(after.iter().all(|buffers| buffers[0] == expected));
    }

    #[test]
    fn reduce_sums_at_the_root(size in 1..9_u32, root in 0..9_u32, elements in elements(), seed: u64) {
        let (root, bytes) = (root % size, elements * WIDTH);
        let schedules = (0..size).map(|rank| reduce(rank, size, root, bytes, WIDTH, false)).collect();
        let own = |rank: u32| numbers(seed ^ u64::from(rank), elements);
        let after = simulate(schedules, (0..size).map(|rank| vec![own(rank)]).collect(), ReduceOp::Sum, dice(seed));
        prop_assert!(after[root as usize][0] == sum((0..size).map(own)));
    }

    #[test]
    fn reduce_scatter_sums_each_block(size in 1..7_u32, lengths in prop::collection::vec(elements(), 7), in_place: bool, seed: u64) {
        let lengths: Vec<usize> = lengths[..size as usize].iter().map(|elements| elements * WIDTH).collect();
        let block = |from: u32, to: u32| numbers(seed ^ u64::from(from * 16 + to), lengths[to as usize] / WIDTH);
        let schedules = (0..size).map(|rank| reduce_scatter(rank, &lengths, WIDTH, false, !in_place)).collect();
        let buffers = (0..size).map(|rank| {
            let output = if in_place { block(rank, rank) } else { vec![0x55; lengths[rank as usize]] };
            (0..size).map(|to| block(rank, to)).chain([output]).collect()
        });
        let after = simulate(schedules, buffers.collect(), ReduceOp::Sum, dice(seed));
        for rank in 0..size {
            let expected = sum((0..size).map(|from| block(from, rank)));
            prop_assert!(after[rank as usize][size as usize] == expected);
        }
    }

    #[test]
    fn allgather_between_hosts_gives_every_block_to_every_rank(hosts in prop::collection::vec(0..4_u32, 1..9), lengths in prop::collection::vec(elements(), 9), in_place: bool, seed: u64) {
        let size = hosts.len() as u32;
        let lengths: Vec<usize> = lengths[..hosts.len()].iter().map(|elements| elements * WIDTH).collect();
        let block = |rank: u32| numbers(seed ^ u64::from(rank), lengths[rank as usize] / WIDTH);
        let schedules = (0..size).map(|rank| allgather_between_hosts(rank, &hosts, &lengths, !in_place));
        let buffers = (0..size).map(|rank| {
            let outputs = (0..size).map(|from| match in_place && from == rank {
                true => block(rank),
                false => vec![0x55; lengths[from as usize]],
            });
            outputs.chain((!in_place).then(|| block(rank))).collect()
        });
        let after = simulate(schedules.collect(), buffers.collect(), ReduceOp::Sum, dice(seed));
        for buffers in after {
            prop_assert!((0..size).all(|from| buffers[from as usize] == block(from)));
        }
    }

    #[test]
    fn broadcast_reaches_all_ranks(size in 1..12_u32, root in 0..12_u32, bytes in prop_oneof![0..100_usize, Just(70_001), Just(3_000_001)], seed: u64) {
        let root = root % size;
        let schedules = (0..size).map(|rank| broadcast(rank, size, root, bytes)).collect();
        let source: Vec<u8> = numbers(seed, bytes.div_ceil(WIDTH))[..bytes].to_vec();
        let own = |rank: u32| vec![if rank == root { source.clone() } else { vec![0; bytes] }];
        let after = simulate(schedules, (0..size).map(own).collect(), ReduceOp::Sum, dice(seed));
        prop_assert!(after.iter().all(|buffers| buffers[0] == source));
    }

    #[test]
    fn no_rank_leaves_a_barrier_before_all_have_come(size in 1..12_u32, late in 0..12_u32, seed: u64) {
        // The late rank has no steps: no rank may pass.
        let late = late % size;
        let mut schedules: Vec<Schedule> = (0..size).map(|rank| barrier(rank, size)).collect();
        simulate(schedules.clone(), vec![Vec::new(); size as usize], ReduceOp::Sum, dice(seed));
        schedules[late as usize] = Schedule::default();
        if size > 1 {
            let stuck = std::panic::catch_unwind(|| {
                simulate(schedules, vec![Vec::new(); size as usize], ReduceOp::Sum, dice(seed))
            });
            prop_assert!(stuck.is_err());
        }
    }
}

#[test]
fn parts_of_a_cut_are_the_whole() {
    for (bytes, width, parts) in [(0, 4, 3), (40, 4, 3), (40, 4, 11), (1000, 1, 7)] {
        let span = BufferRange { buffer: 1, start: 100, bytes };
        let all: Vec<BufferRange> = (0..parts).map(|part| cut(span, width, parts, part)).collect();
        assert_eq!((all[0].start, all[parts - 1].end()), (100, 100 + bytes));
        assert!(all.windows(2).all(|pair| pair[0].end() == pair[1].start));
        assert!(all.iter().all(|part| part.bytes % width == 0));
        let longest = all.iter().map(|part| part.bytes).max().unwrap();
        assert!(all.iter().all(|part| part.bytes + width >= longest));
    }
}

#[test]
fn schedules_stay_bounded_however_long_the_buffer() {
    for (size, bytes) in [2, 3, 64, 1024].into_iter().flat_map(|size| [(size, 1 << 40), (size, 64 << 20)]) {
        let schedules = [
            allreduce(1, size, bytes, 4, false),
            reduce(1, size, 0, bytes, 4, false),
            broadcast(0, size, 0, bytes),
            broadcast(1, size, 0, bytes),
            reduce_scatter(1, &vec![bytes / size as usize; size as usize], 4, false, true),
        ];
        for schedule in schedules {
            assert!(schedule.work.len() <= 6 * STEPS_MAX, "{} steps for {size} ranks", schedule.work.len());
            let scratch = schedule.scratch_bytes;
            assert!(scratch <= 8 << 20, "{scratch} bytes of scratch for {size} ranks and {bytes} bytes");
        }
    }
}
