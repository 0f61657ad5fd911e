//! A queue of bytes in shared memory with one writer and one reader, each in its own process.
//!
//! ```text
//!   0        64       128              192              256            256 + capacity
//!   +--------+--------+----------------+----------------+--------------+
//!   |written | read   | reader sleeps  | writer sleeps  | bytes ...    |
//!   | u64    | u64    | u32            | ended, u32     |              |
//!   +--------+--------+----------------+----------------+--------------+
//! ```
//! `written` and `read` count bytes since the beginning; a byte's place is its number modulo the capacity, a
//! power of two. Each side keeps its own count and only publishes it, so that the other side can disturb only
//! itself.

use std::io::{self, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

use paramhub_kernels::shared;

use super::segment::Segment;

/// The default capacity of one direction of a stream: thousands of headers, or the control frames of minutes.
pub const RING_BYTES_DEFAULT: usize = 64 << 10;

const WRITTEN: usize = 0;
const READ: usize = 64;
const READER_SLEEPS: usize = 128;
const WRITER_SLEEPS: usize = 192;
const ENDED: usize = 196;
const BYTES: usize = 256;

/// Bytes of a segment that a ring of this capacity takes.
pub(super) const fn ring_bytes(capacity: usize) -> usize {
    BYTES + capacity
}

/// Prepares a ring in a new segment: its reader counts as asleep, so that the first byte wakes it whenever it
/// begins to listen.
pub(super) fn prepare(segment: &Segment, base: usize) {
    segment.flag(base + READER_SLEEPS).store(1, Release);
}

/// The place of a ring.
#[derive(Debug)]
struct RingMemory {
    segment: Arc<Segment>,
    base: usize,
    capacity: usize,
}

impl RingMemory {
    fn new(segment: Arc<Segment>, base: usize, capacity: usize) -> Self {
        assert!(capacity.is_power_of_two(), "a ring's capacity is a power of two");
        RingMemory { segment, base, capacity }
    }

    /// Calls `copy` with (offset in the segment, range of the `length` bytes) for each of the one or two
    /// pieces that hold the bytes from number `count` on.
    fn pieces(&self, count: u64, length: usize, mut copy: impl FnMut(usize, std::ops::Range<usize>)) {
        let at = count as usize & (self.capacity - 1);
        let first = length.min(self.capacity - at);
        copy(self.base + BYTES + at, 0..first);
        if first < length {
            copy(self.base + BYTES, first..length);
        }
    }
}

/// The writing end.
#[derive(Debug)]
pub(super) struct Writer {
    memory: RingMemory,
    written: u64,
    published: u64,
    /// The reader's count at the last look.
    read: u64,
}

impl Writer {
    pub(super) fn new(segment: Arc<Segment>, base: usize, capacity: usize) -> Self {
        Writer { memory: RingMemory::new(segment, base, capacity), written: 0, published: 0, read: 0 }
    }

    /// Copies as much of `bytes` as there is room for; [`publish`](Self::publish) makes it visible to the
    /// reader.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut room = self.memory.capacity - (self.written - self.read) as usize;
        if room < bytes.len() {
            self.look()?;
            room = self.memory.capacity - (self.written - self.read) as usize;
        }
        let length = room.min(bytes.len());
        self.memory.pieces(self.written, length, |offset, range| {
            self.memory.segment.write(offset, &bytes[range]);
        });
        self.written += length as u64;
        Ok(length)
    }

    /// Makes visible what was written. A reader that sleeps continues to sleep until it is woken: see
    /// [`wakes_reader`](Self::wakes_reader).
    pub(super) fn publish(&mut self) {
        if self.published < self.written {
            // Data that was streamed into an arena must be visible before its frame is.
            shared::fence();
            self.memory.segment.counter(self.memory.base + WRITTEN).store(self.written, Release);
            self.published = self.written;
        }
    }

    /// Whether the reader sleeps and must be woken; it counts as awake from now on.
    pub(super) fn wakes_reader(&self) -> bool {
        // The fence separates the store before from the load here, so that at least one side sees the other's
        // store.
        fence(SeqCst);
        let sleeps = self.memory.segment.flag(self.memory.base + READER_SLEEPS);
        sleeps.load(Relaxed) != 0 && sleeps.swap(0, AcqRel) != 0
    }

    /// Announces that this side will sleep until there is room; `false` if there is room already.
    pub(super) fn sleep(&mut self) -> io::Result<bool> {
        let sleeps = self.memory.segment.flag(self.memory.base + WRITER_SLEEPS);
        sleeps.store(1, Release);
        fence(SeqCst);
        self.look()?;
        if (self.written - self.read) as usize == self.memory.capacity {
            return Ok(true);
        }
        self.memory.segment.flag(self.memory.base + WRITER_SLEEPS).store(0, Relaxed);
        Ok(false)
    }

    /// Announces that no more will come; `true` if the reader must be woken.
    pub(super) fn end(&mut self) -> bool {
        self.memory.segment.flag(self.memory.base + ENDED).store(1, Release);
        self.wakes_reader()
    }

    fn look(&mut self) -> io::Result<()> {
        let read = self.memory.segment.counter(self.memory.base + READ).load(Acquire);
        if read < self.read || read > self.published {
            return Err(lies("read", read, self.read));
        }
        self.read = read;
        Ok(())
    }
}

/// The reading end.
#[derive(Debug)]
pub(super) struct Reader {
    memory: RingMemory,
    read: u64,
    /// The writer's count at the last look.
    written: u64,
}

impl Reader {
    pub(super) fn new(segment: Arc<Segment>, base: usize, capacity: usize) -> Self {
        Reader { memory: RingMemory::new(segment, base, capacity), read: 0, written: 0 }
    }

    /// Fills `slices` as far as there is data.
    pub(super) fn read(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let wanted: usize = slices.iter().map(|slice| slice.len()).sum();
        if ((self.written - self.read) as usize) < wanted {
            self.look()?;
        }
        let mut taken = 0;
        for slice in slices {
            let length = slice.len().min((self.written - self.read) as usize);
            self.memory.pieces(self.read, length, |offset, range| {
                self.memory.segment.read(offset, &mut slice[range]);
            });
            self.read += length as u64;
            taken += length;
        }
        if taken > 0 {
            self.memory.segment.counter(self.memory.base + READ).store(self.read, Release);
        }
        Ok(taken)
    }

    /// Whether the writer waits for room and half of the ring is free, so that it must be woken; it counts as
    /// awake from now on. A writer that is woken for a few bytes would sleep again at once.
    pub(super) fn wakes_writer(&self) -> bool {
        if (self.written - self.read) as usize > self.memory.capacity / 2 {
            return false;
        }
        fence(SeqCst);
        let sleeps = self.memory.segment.flag(self.memory.base + WRITER_SLEEPS);
        sleeps.load(Relaxed) != 0 && sleeps.swap(0, AcqRel) != 0
    }

    /// Announces that this side will sleep until data comes; `false` if there is some already, or none will
    /// come.
    pub(super) fn sleep(&mut self) -> io::Result<bool> {
        self.memory.segment.flag(self.memory.base + READER_SLEEPS).store(1, Release);
        fence(SeqCst);
        if self.is_empty()? && !self.has_ended() {
            return Ok(true);
        }
        self.memory.segment.flag(self.memory.base + READER_SLEEPS).store(0, Relaxed);
        Ok(false)
    }

    pub(super) fn is_empty(&mut self) -> io::Result<bool> {
        self.look()?;
        Ok(self.written == self.read)
    }

    /// Drops the data that is there.
    pub(super) fn discard(&mut self) -> io::Result<()> {
        self.look()?;
        self.read = self.written;
        self.memory.segment.counter(self.memory.base + READ).store(self.read, Release);
        Ok(())
    }

    /// Whether the writer will write no more. Call it before the last look at what was written.
    pub(super) fn has_ended(&self) -> bool {
        self.memory.segment.flag(self.memory.base + ENDED).load(Acquire) != 0
    }

    fn look(&mut self) -> io::Result<()> {
        let written = self.memory.segment.counter(self.memory.base + WRITTEN).load(Acquire);
        if written < self.written || written - self.read > self.memory.capacity as u64 {
            return Err(lies("written", written, self.written));
        }
        self.written = written;
        Ok(())
    }
}

fn lies(what: &str, now: u64, before: u64) -> io::Error {
    let message =
        format!("the other side says {now} bytes are {what} after {before}, which its ring cannot hold");
    io::Error::new(io::ErrorKind::InvalidData, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(capacity: usize) -> (Writer, Reader, Arc<Segment>) {
        let segment = Arc::new(Segment::create("ring", ring_bytes(capacity)).unwrap());
        (Writer::new(segment.clone(), 0, capacity), Reader::new(segment.clone(), 0, capacity), segment)
    }

    fn take(reader: &mut Reader, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let taken = reader.read(&mut [IoSliceMut::new(&mut bytes)]).unwrap();
        bytes.truncate(taken);
        bytes
    }

    #[test]
    fn bytes_come_out_in_order_around_the_end() {
        let (mut writer, mut reader, _) = ring(64);
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for turn in 0..200_u8 {
            let piece: Vec<u8> = (0..turn % 50).map(|at| turn ^ at).collect();
            let wrote = writer.write(&piece).unwrap();
            sent.extend_from_slice(&piece[..wrote]);
            assert!(take(&mut reader, 0).is_empty());
            writer.publish();
            received.extend(take(&mut reader, usize::from(turn % 37)));
        }
        received.extend(take(&mut reader, 64));
        assert_eq!(sent, received);
        assert!(sent.len() > 1000);
    }

    #[test]
    fn nothing_is_seen_before_it_is_published_and_a_full_ring_takes_nothing() {
        let (mut writer, mut reader, _) = ring(64);
        assert_eq!(writer.write(&[1; 100]).unwrap(), 64);
        assert!(reader.is_empty().unwrap());
        assert!(writer.sleep().unwrap());
        writer.publish();
        assert!(!writer.wakes_reader() && !reader.is_empty().unwrap());
        assert_eq!(take(&mut reader, 31).len(), 31);
        assert!(!reader.wakes_writer(), "half of the ring is not free yet");
        assert_eq!(take(&mut reader, 1).len(), 1);
        assert!(reader.wakes_writer() && !reader.wakes_writer());
        assert!(!writer.sleep().unwrap());
        assert!(!reader.wakes_writer());
        assert_eq!(writer.write(&[2; 100]).unwrap(), 32);
    }

    #[test]
    fn a_sleeping_reader_is_woken_once() {
        let (mut writer, mut reader, _) = ring(64);
        assert!(reader.sleep().unwrap());
        writer.write(&[1]).unwrap();
        writer.publish();
        assert!(writer.wakes_reader());
        writer.write(&[1]).unwrap();
        writer.publish();
        assert!(!writer.wakes_reader());
        assert!(!reader.sleep().unwrap(), "something is there");
        take(&mut reader, 2);
        assert!(reader.sleep().unwrap());
        assert!(writer.end() && reader.has_ended() && !reader.sleep().unwrap());
    }

    #[test]
    fn counts_that_cannot_be_are_errors_on_either_side() {
        for count in [65, u64::MAX, 1 << 63] {
            let (mut writer, mut reader, segment) = ring(64);
            segment.counter(WRITTEN).store(count, Release);
            assert!(reader.is_empty().is_err());
            segment.counter(READ).store(count, Release);
            writer.write(&[0; 60]).unwrap();
            assert!(writer.write(&[0; 60]).is_err());
        }
        let (mut writer, mut reader, segment) = ring(64);
        writer.write(&[0; 60]).unwrap();
        writer.publish();
        take(&mut reader, 60);
        segment.counter(WRITTEN).store(59, Release);
        assert!(reader.is_empty().is_err(), "a count never goes back");
    }
}
