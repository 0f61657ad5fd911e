//! Barrier and broadcast.

use super::{BufferRange, PIECE_BYTES, SMALL_BYTES_MAX, STEPS_MAX, Schedule, Work, cut};

/// Dissemination (Hensgen, Finkel, Manber 1988): in round k every rank sends a message to the rank 2^k
/// further on.
pub(crate) fn barrier(rank: u32, size: u32) -> Schedule {
    let mut schedule = Schedule::default();
    let nothing = BufferRange::whole(super::SCRATCH, 0);
    let (mut received, mut distance, mut round) = (None, 1, 0);
    while distance < size {
        let (to, from) = ((rank + distance) % size, (rank + size - distance) % size);
        schedule.push(Work::Send { peer: to, index: round, from: nothing }, &[received]);
        // A round ends when its message and those of all rounds before have come, which the next message sent
        // confirms.
        let now = schedule.push(Work::Receive { peer: from, index: round, into: nothing }, &[]);
        received = Some(match received {
            None => now,
            Some(before) => {
                schedule.push(Work::Copy { into: nothing, from: nothing }, &[Some(before), Some(now)])
            }
        });
        distance *= 2;
        round += 1;
    }
    schedule
}

/// Sends buffer 0, `bytes` long, from `root` to all ranks.
pub(crate) fn broadcast(rank: u32, size: u32, root: u32, bytes: usize) -> Schedule {
    if size == 1 {
        Schedule::default()
    } else if bytes <= SMALL_BYTES_MAX || size == 2 {
        tree(rank, size, root, bytes)
    } else {
        scatter_and_forward(rank, size, root, bytes)
    }
}

/// A binomial tree: after round k, 2^k ranks have the bytes.
fn tree(rank: u32, size: u32, root: u32, bytes: usize) -> Schedule {
    let mut schedule = Schedule::default();
    let whole = BufferRange::whole(0, bytes);
    let place = (rank + size - root) % size;
    let at = |place: u32| (place + root) % size;
    let reach = reach(place, size);
    let arrived = (place != 0)
        .then(|| schedule.push(Work::Receive { peer: at(place - reach), index: 0, into: whole }, &[]));
    // The largest subtree goes first: it has the longest way to go.
    let mut distance = reach / 2;
    while distance > 0 {
        if place + distance < size {
            schedule.push(Work::Send { peer: at(place + distance), index: 0, from: whole }, &[arrived]);
        }
        distance /= 2;
    }
    schedule
}

/// In a binomial tree over places 0..size, the distance from `place` down to its parent; its children are
/// less than that above it.
pub(super) fn reach(place: u32, size: u32) -> u32 {
    if place == 0 { size.next_power_of_two() } else { place & place.wrapping_neg() }
}

/// The root sends each other rank one segment, and each passes its segment on to all others, piece by piece.
/// Every rank sends and receives about `bytes`, over two hops.
fn scatter_and_forward(rank: u32, size: u32, root: u32, bytes: usize) -> Schedule {
    let mut schedule = Schedule::default();
    let holders = size as usize - 1;
    let segment = |holder: usize| cut(BufferRange::whole(0, bytes), 1, holders, holder);
    let pieces = bytes.div_ceil(holders).div_ceil(PIECE_BYTES).clamp(1, (STEPS_MAX / holders).max(1));
    let at = |holder: usize| (root + 1 + holder as u32) % size;
    let own = (rank + size - root) % size; // 0 at the root, holder + 1 elsewhere
    for piece in 0..pieces {
        for holder in 0..holders {
            let (span, index) = (cut(segment(holder), 1, pieces, piece), (piece * holders + holder) as u32);
            if own == 0 {
                schedule.push(Work::Send { peer: at(holder), index, from: span }, &[]);
            } else if holder + 1 == own as usize {
                let arrived = schedule.push(Work::Receive { peer: root, index, into: span }, &[]);
                for other in (1..holders).map(|turn| (holder + turn) % holders) {
                    schedule.push(Work::Send { peer: at(other), index, from: span }, &[Some(arrived)]);
                }
            } else {
                schedule.push(Work::Receive { peer: at(holder), index, into: span }, &[]);
            }
        }
    }
    schedule
}
