//! Reductions whose result goes to all ranks.

use super::{BufferRange, HALVING_BYTES_MAX, SMALL_BYTES_MAX, Schedule, Step, Work, cut, pieces};

/// Reduces buffer 0, elements of `width` bytes, to all ranks. The results have the same bits at all of them.
pub(crate) fn allreduce(rank: u32, size: u32, bytes: usize, width: usize, is_average: bool) -> Schedule {
    if size == 1 {
        Schedule::default()
    } else if bytes <= SMALL_BYTES_MAX || bytes / width < size as usize {
        doubling(rank, size, bytes, is_average)
    } else if bytes <= HALVING_BYTES_MAX && size.is_power_of_two() {
        halving(rank, size, bytes, width, is_average)
    } else {
        ring(rank, size, bytes, width, is_average)
    }
}

/// Recursive doubling (Thakur, Rabenseifner, Gropp 2005, section 4.5): in round k partners 2^k apart exchange
/// their partial results. Both compute `lower op higher`, so both get the same bits.
fn doubling(rank: u32, size: u32, bytes: usize, is_average: bool) -> Schedule {
    let mut schedule = Schedule::default();
    let whole = BufferRange::whole(0, bytes);
    // Where the number of ranks is no power of two, the first ranks form pairs, and the odd rank of a pair
    // takes part for both.
    let rounds = size.ilog2();
    let pairs = size - (1 << rounds);
    let last = rounds + 1;
    if rank < 2 * pairs && rank.is_multiple_of(2) {
        let peer = rank + 1;
        let sent = schedule.push(Work::Send { peer, index: 0, from: whole }, &[]);
        schedule.push(Work::Receive { peer, index: last, into: whole }, &[Some(sent.left())]);
        return schedule;
    }
    let (mut value, mut reduced, mut sends): (BufferRange, Option<Step>, Vec<Option<Step>>) =
        (whole, None, Vec::new());
    if rank < 2 * pairs {
        let lower = schedule.scratch(bytes);
        let arrived = schedule.push(Work::Receive { peer: rank - 1, index: 0, into: lower }, &[]);
        reduced = Some(schedule.push(Work::Reduce { into: lower, from: whole }, &[Some(arrived)]));
        value = lower;
    }
    let place = if rank < 2 * pairs { rank / 2 } else { rank - pairs };
    for round in 0..rounds {
        let partner = place ^ (1 << round);
        let peer = if partner < pairs { 2 * partner + 1 } else { partner + pairs };
        let index = round + 1;
        let theirs = schedule.scratch(bytes);
        let arrived = Some(schedule.push(Work::Receive { peer, index, into: theirs }, &[]));
        let sent = Some(schedule.push(Work::Send { peer, index, from: value }, &[reduced]));
        sends.push(sent);
        if rank < peer {
            let step = Work::Reduce { into: value, from: theirs };
            reduced = Some(schedule.push(step, &[arrived, sent]));
        } else {
            let step = Work::Reduce { into: theirs, from: value };
            reduced = Some(schedule.push(step, &[arrived, reduced]));
            value = theirs;
        }
    }
    if is_average {
        reduced = Some(schedule.push(Work::Divide { span: value }, &[reduced]));
    }
    if rank < 2 * pairs {
        schedule.push(Work::Send { peer: rank - 1, index: last, from: value }, &[reduced]);
    }
    if value != whole {
        sends.push(reduced);
        schedule.push(Work::Copy { into: whole, from: value }, &sends);
    }
    schedule
}

/// Recursive halving, then doubling (Rabenseifner 2004): twice as many rounds as the logarithm, and no more
/// bytes than a ring. The number of ranks is a power of two. In round k partners size/2^(k+1) apart split the
/// range that they have left, and each reduces its half; then they exchange the results in the opposite
/// order.
fn halving(rank: u32, size: u32, bytes: usize, width: usize, is_average: bool) -> Schedule {
    let mut schedule = Schedule::default();
    let rounds = size.ilog2();
    let (mut own, mut reduced) = (BufferRange::whole(0, bytes), None);
    let mut given = Vec::with_capacity(rounds as usize);
    for round in 0..rounds {
        let peer = rank ^ (size >> (round + 1));
        let is_upper = usize::from(rank > peer);
        let (kept, other) = (cut(own, width, 2, is_upper), cut(own, width, 2, 1 - is_upper));
        let theirs = schedule.scratch(kept.bytes);
        let arrived = Some(schedule.push(Work::Receive { peer, index: round, into: theirs }, &[]));
        let sent = schedule.push(Work::Send { peer, index: round, from: other }, &[reduced]);
        given.push((peer, other, sent));
        reduced = Some(schedule.push(Work::Reduce { into: kept, from: theirs }, &[arrived, reduced]));
        own = kept;
    }
    if is_average {
        reduced = Some(schedule.push(Work::Divide { span: own }, &[reduced]));
    }
    let mut whole = vec![reduced];
    for (turn, (peer, other, sent)) in given.into_iter().rev().enumerate() {
        let index = rounds + turn as u32;
        schedule.push(Work::Send { peer, index, from: own }, &whole);
        // The result replaces the bytes that were sent from there in the first half.
        whole.push(Some(schedule.push(Work::Receive { peer, index, into: other }, &[Some(sent.left())])));
        let start = own.start.min(other.start);
        own = BufferRange { start, bytes: own.bytes + other.bytes, ..own };
    }
    schedule
}

/// A ring (Patarasuk, Yuan 2009): each segment goes round once to be reduced and once to be distributed,
/// piece by piece, so that a rank reduces one piece while others travel.
fn ring(rank: u32, size: u32, bytes: usize, width: usize, is_average: bool) -> Schedule {
    let mut schedule = Schedule::default();
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    let hops = size - 1;
    let segment = |owner: u32| cut(BufferRange::whole(0, bytes), width, size as usize, owner as usize);
    let pieces = pieces(segment(0).bytes, 2 * hops as usize);
    for piece in 0..pieces {
        // The range of the segment `back` hops before this rank.
        let span = |back: u32| cut(segment((rank + size - back % size) % size), width, pieces, piece);
        let index = |hop: u32| hop * pieces as u32 + piece as u32;
        let (mut arrived, mut sends) = (None, Vec::with_capacity(hops as usize));
        for hop in 0..hops {
            let send = Work::Send { peer: next, index: index(hop), from: span(hop) };
            sends.push(Some(schedule.push(send, &[arrived]).left()));
            let receive = Work::ReceiveReduce { peer: previous, index: index(hop), into: span(hop + 1) };
            arrived = Some(schedule.push(receive, &[]));
        }
        if is_average {
            arrived = Some(schedule.push(Work::Divide { span: span(hops) }, &[arrived]));
        }
        for hop in 0..hops {
            let send = Work::Send { peer: next, index: index(hops + hop), from: span(hops + hop) };
            schedule.push(send, &[arrived]);
            // The result replaces the bytes that were sent from there in the first round.
            let receive = Work::Receive { peer: previous, index: index(hops + hop), into: span(hop) };
            arrived = Some(schedule.push(receive, &[sends[hop as usize]]));
        }
    }
    schedule
}
