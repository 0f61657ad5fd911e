//! Reductions whose result goes to one rank each: reduce and reduce_scatter.

use super::broadcast::reach;
use super::{BufferRange, SCRATCH_BYTES_MAX, SMALL_BYTES_MAX, STEPS_MAX, Schedule, Step, Work, cut, pieces};

/// Reduces buffer 0, elements of `width` bytes, to `root`. The contents of the other ranks' buffers are
/// unspecified afterwards.
pub(crate) fn reduce(
    rank: u32,
    size: u32,
    root: u32,
    bytes: usize,
    width: usize,
    is_average: bool,
) -> Schedule {
    if bytes <= SMALL_BYTES_MAX || size <= 2 {
        tree(rank, size, root, bytes, is_average)
    } else {
        by_segments(rank, size, root, bytes, width, is_average)
    }
}

/// The binomial tree of a broadcast upside down. The nearest child is added first, so the order of a sum
/// depends on root and size alone.
fn tree(rank: u32, size: u32, root: u32, bytes: usize, is_average: bool) -> Schedule {
    let mut schedule = Schedule::default();
    let whole = BufferRange::whole(0, bytes);
    let place = (rank + size - root) % size;
    let at = |place: u32| (place + root) % size;
    let reach = reach(place, size);
    let (mut summed, mut distance) = (None, 1);
    while distance < reach && place + distance < size {
        let peer = at(place + distance);
        summed = Some(if distance == 1 {
            schedule.push(Work::ReceiveReduce { peer, index: 0, into: whole }, &[])
        } else {
            let scratch = schedule.scratch(bytes);
            let arrived = schedule.push(Work::Receive { peer, index: 0, into: scratch }, &[]);
            schedule.push(Work::Reduce { into: whole, from: scratch }, &[summed, Some(arrived)])
        });
        distance *= 2;
    }
    if place != 0 {
        schedule.push(Work::Send { peer: at(place - reach), index: 0, from: whole }, &[summed]);
    } else if is_average {
        schedule.push(Work::Divide { span: whole }, &[summed]);
    }
    schedule
}

/// Every rank reduces one segment of all ranks' buffers and sends the result to the root.
fn by_segments(rank: u32, size: u32, root: u32, bytes: usize, width: usize, is_average: bool) -> Schedule {
    let mut schedule = Schedule::default();
    let segment = |owner: u32| cut(BufferRange::whole(0, bytes), width, size as usize, owner as usize);
    let pieces = pieces(segment(0).bytes, 2 * size as usize);
    for piece in 0..pieces {
        let span = |owner: u32| cut(segment(owner), width, pieces, piece);
        let (index, result) = (piece as u32, (pieces + piece) as u32);
        let own = span(rank);
        let mut reduced = accumulate(&mut schedule, rank, size, own, index, None);
        if is_average {
            reduced = Some(schedule.push(Work::Divide { span: own }, &[reduced]));
        }
        if rank != root {
            schedule.push(Work::Send { peer: root, index: result, from: own }, &[reduced]);
        }
        for owner in (1..size).map(|distance| (rank + distance) % size) {
            let sent = schedule.push(Work::Send { peer: owner, index, from: span(owner) }, &[]);
            if rank == root {
                let receive = Work::Receive { peer: owner, index: result, into: span(owner) };
                schedule.push(receive, &[Some(sent.left())]);
            }
        }
    }
    schedule
}

/// Buffers 0..size are the contributions to each rank's result, `lengths` long; buffer `size` is this rank's
/// result. If not `has_input`, this rank's own contribution is there already and buffer `rank` is not used.
pub(crate) fn reduce_scatter(
    rank: u32,
    lengths: &[usize],
    width: usize,
    is_average: bool,
    has_input: bool,
) -> Schedule {
    let mut schedule = Schedule::default();
    let size = lengths.len() as u32;
    let pieces_of = |owner: u32| {
        // All pieces that a rank sends, and all that come for one segment, together stay within the bound.
        pieces(lengths[owner as usize], size as usize).min((STEPS_MAX / size as usize).max(1))
    };
    let own = pieces_of(rank);
    for piece in 0..own {
        let into = cut(BufferRange::whole(size, lengths[rank as usize]), width, own, piece);
        let begun = has_input
            .then(|| schedule.push(Work::Copy { into, from: BufferRange { buffer: rank, ..into } }, &[]));
        let reduced = accumulate(&mut schedule, rank, size, into, piece as u32, begun);
        if is_average {
            schedule.push(Work::Divide { span: into }, &[reduced]);
        }
    }
    let most = (0..size).map(pieces_of).max().unwrap_or(0);
    for piece in 0..most {
        for owner in (1..size).map(|distance| (rank + distance) % size) {
            if piece < pieces_of(owner) {
                let from =
                    cut(BufferRange::whole(owner, lengths[owner as usize]), width, pieces_of(owner), piece);
                schedule.push(Work::Send { peer: owner, index: piece as u32, from }, &[]);
            }
        }
    }
    schedule
}

/// Adds all ranks' contributions to `own`, which holds this rank's own from the end of `begun` on. The order
/// is that of the ranks from the owner on, rotated piece by piece so that not all ranks wait for the same
/// one: it depends on owner, size and piece alone.
fn accumulate(
    schedule: &mut Schedule,
    rank: u32,
    size: u32,
    own: BufferRange,
    index: u32,
    begun: Option<Step>,
) -> Option<Step> {
    let others = size - 1;
    let peer = |turn: u32| (rank + 1 + (index % others + turn) % others) % size;
    let mut reduced = begun;
    if others > 1 && own.bytes * others as usize <= SCRATCH_BYTES_MAX {
        let arrivals: Vec<(BufferRange, Step)> = (0..others)
            .map(|turn| {
                let scratch = schedule.scratch(own.bytes);
                (scratch, schedule.push(Work::Receive { peer: peer(turn), index, into: scratch }, &[]))
            })
            .collect();
        for (scratch, arrived) in arrivals {
            let step = Work::Reduce { into: own, from: scratch };
            reduced = Some(schedule.push(step, &[reduced, Some(arrived)]));
        }
    } else {
        for turn in 0..others {
            let step = Work::ReceiveReduce { peer: peer(turn), index, into: own };
            reduced = Some(schedule.push(step, &[reduced]));
        }
    }
    reduced
}
