//! Collectives in which every block goes straight from its source to its destination.

use super::{BufferRange, Schedule, Work};

/// Buffers 0..size are the blocks, `lengths` long; this rank's own comes from buffer `size` if `has_input`,
/// and is in its place already if not.
pub(crate) fn allgather(rank: u32, lengths: &[usize], has_input: bool) -> Schedule {
    let mut schedule = Schedule::default();
    let size = lengths.len() as u32;
    let block = |rank: u32| BufferRange::whole(rank, lengths[rank as usize]);
    let own = if has_input { BufferRange { buffer: size, ..block(rank) } } else { block(rank) };
    for distance in 1..size {
        let from = (rank + size - distance) % size;
        schedule.push(Work::Receive { peer: from, index: 0, into: block(from) }, &[]);
    }
    for distance in 1..size {
        schedule.push(Work::Send { peer: (rank + distance) % size, index: 0, from: own }, &[]);
    }
    if has_input {
        schedule.push(Work::Copy { into: block(rank), from: own }, &[]);
    }
    schedule
}

/// At the root, buffers 0..size are the blocks, `lengths` long, and buffer `size` is the root's own
/// contribution if it has one; elsewhere buffer 0 is the contribution, `lengths[0]` long.
pub(crate) fn gather(rank: u32, size: u32, root: u32, lengths: &[usize], has_input: bool) -> Schedule {
    if rank != root {
        return Schedule::of(Work::Send { peer: root, index: 0, from: BufferRange::whole(0, lengths[0]) });
    }
    let mut schedule = Schedule::default();
    for distance in 1..size {
        let from = (rank + distance) % size;
        let into = BufferRange::whole(from, lengths[from as usize]);
        schedule.push(Work::Receive { peer: from, index: 0, into }, &[]);
    }
    if has_input {
        let into = BufferRange::whole(rank, lengths[rank as usize]);
        schedule.push(Work::Copy { into, from: BufferRange { buffer: size, ..into } }, &[]);
    }
    schedule
}

/// At the root, buffers 0..size are the blocks for each rank, `lengths` long, and buffer `size` receives the
/// root's own block if `has_output`; elsewhere buffer 0 receives the block, `lengths[0]` long.
pub(crate) fn scatter(rank: u32, size: u32, root: u32, lengths: &[usize], has_output: bool) -> Schedule {
    if rank != root {
        return Schedule::of(Work::Receive { peer: root, index: 0, into: BufferRange::whole(0, lengths[0]) });
    }
    let mut schedule = Schedule::default();
    for distance in 1..size {
        let to = (rank + distance) % size;
        schedule
            .push(Work::Send { peer: to, index: 0, from: BufferRange::whole(to, lengths[to as usize]) }, &[]);
    }
    if has_output {
        let from = BufferRange::whole(rank, lengths[rank as usize]);
        schedule.push(Work::Copy { into: BufferRange { buffer: size, ..from }, from }, &[]);
    }
    schedule
}

/// Buffers 0..size go to the ranks, and buffers size..2*size receive from them.
pub(crate) fn all_to_all(rank: u32, inputs: &[usize], outputs: &[usize]) -> Schedule {
    let mut schedule = Schedule::default();
    let size = inputs.len() as u32;
    let input = |to: u32| BufferRange::whole(to, inputs[to as usize]);
    let output = |from: u32| BufferRange::whole(size + from, outputs[from as usize]);
    for distance in 1..size {
        let from = (rank + size - distance) % size;
        schedule.push(Work::Receive { peer: from, index: 0, into: output(from) }, &[]);
    }
    for distance in 1..size {
        let to = (rank + distance) % size;
        schedule.push(Work::Send { peer: to, index: 0, from: input(to) }, &[]);
    }
    schedule.push(Work::Copy { into: output(rank), from: input(rank) }, &[]);
    schedule
}
