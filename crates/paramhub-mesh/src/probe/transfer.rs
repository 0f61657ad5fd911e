//! One pair's transfers, timed by the receiver.

use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

use paramhub_transport::measuring::{bits_per_second, incompressible};
use paramhub_transport::{ReceiveRegion, lend};

use crate::error::MeshError;
use crate::handle::Handle;
use crate::mesh::Mesh;
use crate::wire::PIECE_BYTES;

/// The tags of a probe's messages: its blocks, and the receiver's orders.
const BLOCKS: u64 = u64::from_be_bytes(*b"probe/bl");
const ORDERS: u64 = u64::from_be_bytes(*b"probe/or");
/// The number of blocks announced ahead: with them a round trip of 16 ms at 1 Gbit/s, or of 0.16 ms at 100
/// Gbit/s, leaves no gap.
const WINDOW: usize = 8;
const BLOCK_BYTES_MIN: u64 = 64 << 10;
/// One frame. Transfers take turns frame by frame, so several larger blocks would arrive at once, and the end
/// of one would not show how many bytes have arrived.
const BLOCK_BYTES_MAX: u64 = PIECE_BYTES as u64;
/// The number of blocks in a batch that has enough bytes for them: the clock is read after each.
const BLOCKS_AIM: u64 = 32;
/// A batch is this much larger than the rate requires, in case the rate is underestimated.
const MARGIN: f64 = 1.25;
/// How much larger than the previous batch a batch may be: a short one gives only a rough rate.
const GROWTH: f64 = 4.0;
/// The part of the time that the batch which counts must last. The shorter ones before it take at most a
/// third as long, and it may itself turn out longer by the margin, twice.
const SHARE: f64 = 0.4;
/// Enough batches to grow from the smallest to one of a second at a terabit, and some more.
const BATCHES_MAX: usize = 64;

/// The rates that one rank has measured from a peer, in bits per second.
pub(super) struct MeasuredRates {
    pub(super) alone: f64,
    pub(super) both: f64,
}

/// A batch of blocks; a batch without blocks ends the series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BlockBatch {
    blocks: u64,
    block_bytes: u64,
}

impl BlockBatch {
    const FIRST: BlockBatch = BlockBatch { blocks: 4, block_bytes: BLOCK_BYTES_MIN };
    const NONE: BlockBatch = BlockBatch { blocks: 0, block_bytes: 0 };

    /// A batch of about `bytes` bytes.
    fn of(bytes: f64) -> BlockBatch {
        let block_bytes =
            ((bytes / BLOCKS_AIM as f64) as u64).next_power_of_two().clamp(BLOCK_BYTES_MIN, BLOCK_BYTES_MAX);
        let blocks = (bytes / block_bytes as f64).ceil() as u64 + 1;
        BlockBatch { blocks: blocks.max(Self::FIRST.blocks), block_bytes }
    }

    fn bytes(self) -> f64 {
        self.blocks as f64 * self.block_bytes as f64
    }

    /// The next batch to try, after one that lasted less than `aim`.
    fn grown(self, bits_per_second: f64, aim: Duration) -> BlockBatch {
        let enough = bits_per_second / 8.0 * aim.as_secs_f64() * MARGIN;
        BlockBatch::of(enough.min(self.bytes() * GROWTH))
    }
}

/// Measures peers, one at a time.
pub(super) struct TimedTransfer<'a> {
    mesh: &'a Mesh,
    /// How long the batch that counts should last.
    aim: Duration,
    payload: Vec<u8>,
}

impl<'a> TimedTransfer<'a> {
    pub(super) fn new(mesh: &'a Mesh, part: Duration) -> Self {
        TimedTransfer { mesh, aim: part.mul_f64(SHARE), payload: incompressible(BLOCK_BYTES_MAX as usize) }
    }

    /// Measures the rates with a peer. Both ranks of a pair call it, one of them as the first.
    pub(super) fn measure(&mut self, peer: u32, is_first: bool) -> Result<MeasuredRates, MeshError> {
        let alone;
        if is_first {
            self.serve(peer)?;
            alone = self.receive_alone(peer)?;
        } else {
            alone = self.receive_alone(peer)?;
            self.serve(peer)?;
        }
        let both = self.both(peer, BlockBatch::of(alone / 8.0 * self.aim.as_secs_f64() * MARGIN))?;
        Ok(MeasuredRates { alone, both })
    }

    /// Sends the batches that the peer asks for until it asks for no more.
    fn serve(&self, peer: u32) -> Result<(), MeshError> {
        loop {
            let batch = self.hear(peer)?;
            if batch == BlockBatch::NONE {
                return Ok(());
            }
            self.send(peer, batch)?;
        }
    }

    fn receive_alone(&self, peer: u32) -> Result<f64, MeshError> {
        let mut batch = BlockBatch::FIRST;
        for count in 1.. {
            self.tell(peer, batch)?;
            let arrivals = self.receive(peer, batch)?;
            let rate = rate(&arrivals, batch.block_bytes);
            let lasted = arrivals[arrivals.len() - 1] - arrivals[0];
            if lasted >= self.aim || count == BATCHES_MAX {
                self.tell(peer, BlockBatch::NONE)?;
                return Ok(rate);
            }
            batch = batch.grown(rate, self.aim);
        }
        unreachable!("the number of batches is bounded")
    }

    /// The rate at which blocks arrive while this rank sends as well; `wanted` is the batch that should
    /// arrive.
    fn both(&self, peer: u32, wanted: BlockBatch) -> Result<f64, MeshError> {
        let asked = self.swap_orders(peer, wanted)?;
        let (sent, arrived) = thread::scope(|scope| {
            let sending = scope.spawn(|| self.send(peer, asked));
            let arrived = self.receive(peer, wanted);
            (sending.join().expect("sending does not panic"), arrived)
        });
        let (departures, arrivals) = (sent?, arrived?);
        // Towards the end one direction may have the link to itself.
        let within = during(&arrivals, &departures);
        Ok(rate(within.unwrap_or(&arrivals), wanted.block_bytes))
    }

    /// Receives a batch; returns when each block had arrived.
    fn receive(&self, peer: u32, batch: BlockBatch) -> Result<Vec<Instant>, MeshError> {
        let bytes = batch.block_bytes as usize;
        windowed(batch.blocks, || self.mesh.receive(peer, BLOCKS, ReceiveRegion::owned(vec![0_u8; bytes])))
    }

    /// Sends a batch; returns when each block had left.
    fn send(&self, peer: u32, batch: BlockBatch) -> Result<Vec<Instant>, MeshError> {
        let block = &self.payload[..batch.block_bytes as usize];
        lend(|lending| windowed(batch.blocks, || self.mesh.send(peer, BLOCKS, lending.send(block))))
    }

    fn tell(&self, peer: u32, batch: BlockBatch) -> Result<(), MeshError> {
        let order = [batch.blocks, batch.block_bytes];
        lend(|lending| self.mesh.send(peer, ORDERS, lending.send(&order))?.wait())
    }

    fn hear(&self, peer: u32) -> Result<BlockBatch, MeshError> {
        let mut order = [0_u64; 2];
        lend(|lending| self.mesh.receive(peer, ORDERS, lending.receive(&mut order))?.wait())?;
        self.checked(peer, order)
    }

    fn swap_orders(&self, peer: u32, wanted: BlockBatch) -> Result<BlockBatch, MeshError> {
        let order = [wanted.blocks, wanted.block_bytes];
        let mut asked = [0_u64; 2];
        lend(|lending| {
            let heard = self.mesh.receive(peer, ORDERS, lending.receive(&mut asked))?;
            self.mesh.send(peer, ORDERS, lending.send(&order))?.wait()?;
            heard.wait()
        })?;
        self.checked(peer, asked)
    }

    fn checked(&self, peer: u32, [blocks, block_bytes]: [u64; 2]) -> Result<BlockBatch, MeshError> {
        if block_bytes <= BLOCK_BYTES_MAX {
            return Ok(BlockBatch { blocks, block_bytes });
        }
        let this_rank = self.mesh.this_rank().clone();
        let reason = format!("it asks a probe for blocks of {block_bytes} bytes").into();
        Err(MeshError::Protocol { this_rank, rank: peer, reason })
    }
}

/// Issues `count` operations, a few ahead, and returns when each has ended.
fn windowed(
    count: u64,
    mut issue: impl FnMut() -> Result<Handle, MeshError>,
) -> Result<Vec<Instant>, MeshError> {
    let (tell, told) = sync_channel(WINDOW);
    let mut ends = Vec::new();
    let mut issued = 0;
    while (ends.len() as u64) < count {
        if issued < count && issued - (ends.len() as u64) < WINDOW as u64 {
            let tell = tell.clone();
            // The mesh's thread reads the clock, for this thread may be woken much later. The callback never
            // waits for room: the channel holds as many results as operations can be under way. Once one has
            // failed, no thread reads the results.
            issue()?.on_complete(move |outcome| {
                let _ = tell.send((outcome.clone(), Instant::now()));
            });
            issued += 1;
        } else {
            let (outcome, end) = told.recv().expect("this function holds a sender");
            outcome?;
            ends.push(end);
        }
    }
    // The callback of an operation that had ended before it was registered reads the clock later.
    ends.sort_unstable();
    Ok(ends)
}

/// Bits per second between the end of the first block and that of the last: the time before the first is
/// waiting time.
fn rate(ends: &[Instant], block_bytes: u64) -> f64 {
    let time = ends[ends.len() - 1] - ends[0];
    bits_per_second((ends.len() as u64 - 1) * block_bytes, time, Duration::from_nanos(1))
}

/// The `arrivals` between the first and the last of `departures`; `None` where they are too few to be timed.
fn during<'a>(arrivals: &'a [Instant], departures: &[Instant]) -> Option<&'a [Instant]> {
    const FEWEST: usize = 4;
    let (begin, end) = (departures.first()?, departures.last()?);
    let from = arrivals.partition_point(|arrival| arrival < begin);
    let to = arrivals.partition_point(|arrival| arrival <= end);
    arrivals.get(from..to).filter(|within| within.len() >= FEWEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Instants that lie so many milliseconds after a common one.
    fn at(milliseconds: &[u64]) -> Vec<Instant> {
        let begin = Instant::now();
        milliseconds.iter().map(|&ms| begin + Duration::from_millis(ms)).collect()
    }

    #[test]
    fn the_first_block_starts_the_clock() {
        // 3 blocks of 125,000 bytes in 3 ms after the first: 1 Gbit/s, however long the first has taken.
        assert!((rate(&at(&[100, 101, 102, 103]), 125_000) - 1e9).abs() < 1.0);
    }

    #[test]
    fn what_arrives_when_nothing_leaves_any_more_does_not_count() {
        let arrivals = at(&[0, 1, 2, 3, 4, 5, 6, 7]);
        let begin = arrivals[0];
        let departures = [begin + Duration::from_millis(2), begin + Duration::from_millis(6)];
        assert_eq!(during(&arrivals, &departures).unwrap(), &arrivals[2..7]);
        assert_eq!(during(&arrivals, &[begin, arrivals[2]]), None);
        assert_eq!(during(&arrivals, &[]), None);
    }

    #[test]
    fn batches_grow_until_they_last_and_stay_countable() {
        let aim = Duration::from_millis(50);
        for bits_per_second in [1e6, 1e8, 1e9, 2.5e10, 4e11] {
            let (mut batch, mut total) = (BlockBatch::FIRST, 0.0);
            let lasts = |batch: BlockBatch| batch.bytes() * 8.0 / bits_per_second;
            for count in 1.. {
                assert!(count < 20, "{bits_per_second}: {batch:?} after {total} s");
                total += lasts(batch);
                assert!(
                    batch.blocks >= 4 && (BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&batch.block_bytes)
                );
                if lasts(batch) >= aim.as_secs_f64() {
                    break;
                }
                batch = batch.grown(bits_per_second, aim);
            }
            let first = lasts(BlockBatch::FIRST);
            assert!(total <= first.max(aim.as_secs_f64() / SHARE), "{bits_per_second}: {total} s");
        }
    }
}
