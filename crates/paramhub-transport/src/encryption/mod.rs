//! Encryption of a stream: frames are copied into a buffer that stays in cache, sealed there and sent; what comes is
//! opened where it was read.

mod records;

use std::cell::RefCell;
use std::fmt;
use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::AsFd;

use paramhub_trust::StreamKeys;
use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::stream::StreamError;
use records::{Opener, RECORD_HEAD_BYTES, RECORD_OVERHEAD, Sealer, TAG_BYTES};

/// The bytes that are sealed before they are written: enough to save system calls, and little enough to stay in a
/// core's L2 beside the frames.
const SEALED_BYTES: usize = 128 << 10;
/// Short frames share a record of about this size.
const SHARED_RECORD_BYTES: usize = 4 << 10;

thread_local! {
    /// Where the thread's streams seal what they send. It is empty until the first of them does.
    static SEALED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The encryption of one stream: keys of both directions, and what is under way in each.
pub struct Encryption {
    sealer: Sealer,
    opener: Opener,
    /// The most bytes of one frame, with its header.
    frame_bytes_max: usize,
    /// Records that were sealed and that the socket has not taken.
    unsent: Box<[u8]>,
    unsent_range: Range<usize>,
    /// The beginning of a record whose end has not come.
    begun: Box<[u8]>,
    begun_bytes: usize,
}

/// Why nothing can be received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncryptionError {
    /// An error of the system.
    Errno(Errno),
    /// A record does not open, or has a length that none has.
    Forged,
}

/// What one read of an encrypted stream has brought.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadRecords {
    /// Bytes that came.
    pub bytes: usize,
    /// Bytes that there was room for.
    pub wanted: usize,
}

impl Encryption {
    /// Bytes of memory that an encryption takes of a stream whose frames have at most so many bytes, headers included.
    pub const fn memory_bytes(frame_bytes_max: usize) -> usize {
        let record_bytes_max = record_bytes_max(frame_bytes_max);
        unsent_bytes(record_bytes_max) + record_bytes_max
    }

    /// The encryption of a stream whose frames have at most so many bytes, headers included. Room for what is under
    /// way is allocated here and nothing later.
    pub fn new(keys: &StreamKeys, frame_bytes_max: usize) -> Encryption {
        let record_bytes_max = record_bytes_max(frame_bytes_max);
        Encryption {
            sealer: Sealer::new(keys),
            opener: Opener::new(keys),
            frame_bytes_max: frame_bytes_max.max(SHARED_RECORD_BYTES),
            unsent: vec![0; unsent_bytes(record_bytes_max)].into_boxed_slice(),
            unsent_range: 0..0,
            begun: vec![0; record_bytes_max].into_boxed_slice(),
            begun_bytes: 0,
        }
    }

    /// Whether records that were sealed are still here, and [`flush`](Self::flush) is to be called when the socket has
    /// room.
    pub fn has_unsent(&self) -> bool {
        !self.unsent_range.is_empty()
    }

    /// Whether the stream may end here: no record has come in part.
    pub fn at_boundary(&self) -> bool {
        self.begun_bytes == 0
    }

    /// Writes what is left of earlier records; `true` if nothing is left.
    pub fn flush(&mut self, socket: impl AsFd) -> Result<bool, Errno> {
        while self.has_unsent() {
            match write(&socket, &self.unsent[self.unsent_range.clone()]) {
                Ok(wrote) => self.unsent_range.start += wrote,
                Err(Errno::AGAIN) => return Ok(false),
                Err(errno) => return Err(errno),
            }
        }
        Ok(true)
    }

    /// Seals frames, each as header and payload, and writes them. Returns how many it took, which is all or as many as
    /// one write has room for; none if the socket has no room. What the socket has not taken of them stays here.
    ///
    /// # Panics
    /// If a frame is larger than the largest of the stream.
    pub fn send<'a>(
        &mut self,
        socket: impl AsFd,
        frames: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    ) -> Result<usize, Errno> {
        if !self.flush(&socket)? {
            return Ok(0);
        }
        SEALED.with_borrow_mut(|sealed| {
            if sealed.len() < self.unsent.len() {
                sealed.resize(self.unsent.len(), 0);
            }
            let (taken, bytes) = self.seal(sealed, frames);
            if taken == 0 {
                return Ok(0);
            }
            let wrote = match write(&socket, &sealed[..bytes]) {
                Err(Errno::AGAIN) => 0,
                wrote => wrote?,
            };
            let left = &sealed[wrote..bytes];
            self.unsent[..left.len()].copy_from_slice(left);
            self.unsent_range = 0..left.len();
            Ok(taken)
        })
    }

    /// Fills `sealed` with records of as many frames as it has room for. Returns their number and the bytes.
    fn seal<'a>(
        &mut self,
        sealed: &mut [u8],
        frames: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    ) -> (usize, usize) {
        let (mut taken, mut record, mut end) = (0, 0..RECORD_HEAD_BYTES, 0);
        for (header, payload) in frames {
            let bytes = header.len() + payload.len();
            let is_first = record.len() == RECORD_HEAD_BYTES;
            if !is_first && record.len() - RECORD_HEAD_BYTES + bytes > SHARED_RECORD_BYTES {
                end = record.end + TAG_BYTES;
                self.sealer.seal(&mut sealed[record.start..end]);
                record = end..end + RECORD_HEAD_BYTES;
            }
            if record.end + bytes + TAG_BYTES > sealed.len() {
                assert!(taken > 0, "a frame of {bytes} bytes is larger than the stream's largest");
                break;
            }
            let (head_place, rest) = sealed[record.end..].split_at_mut(header.len());
            head_place.copy_from_slice(header);
            rest[..payload.len()].copy_from_slice(payload);
            record.end += bytes;
            taken += 1;
        }
        if record.len() > RECORD_HEAD_BYTES {
            end = record.end + TAG_BYTES;
            self.sealer.seal(&mut sealed[record.start..end]);
        }
        (taken, end)
    }

    /// Reads once, into `buffer` as far as no earlier record is to be completed, and passes on the frames of every record
    /// that is whole, opened in place. 0 bytes mean that the peer has ended the stream.
    pub fn receive<E: From<EncryptionError>>(
        &mut self,
        socket: impl AsFd,
        buffer: &mut [u8],
        mut take: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<ReadRecords, E> {
        let missing = match self.begun_bytes {
            0 => 0,
            bytes if bytes < RECORD_HEAD_BYTES => RECORD_HEAD_BYTES - bytes,
            bytes => RECORD_HEAD_BYTES + self.length(&self.begun)? - bytes,
        };
        let begun = &mut self.begun[self.begun_bytes..self.begun_bytes + missing];
        let wanted = missing + buffer.len();
        let mut slices = [IoSliceMut::new(begun), IoSliceMut::new(buffer)];
        let slices = if missing == 0 { &mut slices[1..] } else { &mut slices };
        let bytes = rustix::io::readv(&socket, slices).map_err(EncryptionError::Errno)?;
        let into_begun = bytes.min(missing);
        self.begun_bytes += into_begun;
        let mut rest = &mut buffer[..bytes - into_begun];
        if self.begun_bytes >= RECORD_HEAD_BYTES {
            let length = self.length(&self.begun)?;
            if self.begun_bytes == RECORD_HEAD_BYTES && rest.len() >= length {
                let (body, after) = rest.split_at_mut(length);
                rest = after;
                let head = self.begun.first_chunk().expect("a head");
                take(self.opener.open(head, body).map_err(|_| EncryptionError::Forged)?)?;
                self.begun_bytes = 0;
            } else if self.begun_bytes == RECORD_HEAD_BYTES + length {
                let (head, body) = self.begun.split_first_chunk_mut().expect("a head");
                take(self.opener.open(head, &mut body[..length]).map_err(|_| EncryptionError::Forged)?)?;
                self.begun_bytes = 0;
            }
        }
        if self.begun_bytes == 0 {
            while rest.len() >= RECORD_HEAD_BYTES {
                let length = self.length(rest)?;
                if rest.len() < RECORD_HEAD_BYTES + length {
                    break;
                }
                let (record, after) = rest.split_at_mut(RECORD_HEAD_BYTES + length);
                rest = after;
                let (head, body) = record.split_first_chunk_mut().expect("a head");
                take(self.opener.open(head, body).map_err(|_| EncryptionError::Forged)?)?;
            }
        }
        self.begun[self.begun_bytes..self.begun_bytes + rest.len()].copy_from_slice(rest);
        self.begun_bytes += rest.len();
        Ok(ReadRecords { bytes, wanted })
    }

    /// Reads on until the next record is whole and takes it, but nothing of what follows; `false` if it has not come
    /// whole. It must have exactly as many bytes as `bytes`.
    pub fn receive_one(&mut self, socket: impl AsFd, bytes: &mut [u8]) -> std::io::Result<bool> {
        let mut buffer = vec![0; bytes.len() + RECORD_OVERHEAD];
        loop {
            let room = match self.begun_bytes {
                0 => buffer.len(),
                begun if begun < RECORD_HEAD_BYTES => buffer.len() - RECORD_HEAD_BYTES,
                _ => 0,
            };
            let mut is_here = false;
            let read = self.receive(&socket, &mut buffer[..room], |frames| {
                if frames.len() != bytes.len() || is_here {
                    return Err(EncryptionError::Forged);
                }
                bytes.copy_from_slice(frames);
                is_here = true;
                Ok(())
            });
            match read {
                Ok(_) if is_here => return Ok(true),
                Ok(ReadRecords { bytes: 0, .. }) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                Ok(_) | Err(EncryptionError::Errno(Errno::INTR)) => {}
                Err(EncryptionError::Errno(Errno::AGAIN)) => return Ok(false),
                Err(EncryptionError::Errno(errno)) => return Err(errno.into()),
                Err(EncryptionError::Forged) => return Err(std::io::Error::other(StreamError::Forged)),
            }
        }
    }

    /// The bytes that end the stream: the records that the socket has not taken, and records of `last`.
    pub fn last_records(&mut self, last: &[u8]) -> Vec<u8> {
        let mut records = self.unsent[std::mem::take(&mut self.unsent_range)].to_vec();
        for piece in last.chunks(self.frame_bytes_max) {
            let begin = records.len();
            records.extend([0; RECORD_HEAD_BYTES]);
            records.extend_from_slice(piece);
            records.extend([0; TAG_BYTES]);
            self.sealer.seal(&mut records[begin..]);
        }
        records
    }

    /// The bytes that follow the head of a record.
    fn length(&self, record: &[u8]) -> Result<usize, EncryptionError> {
        let head = record.first_chunk().expect("the head is here");
        let length = u32::from_le_bytes(*head) as usize;
        let is_possible = length > TAG_BYTES && length <= self.frame_bytes_max + TAG_BYTES;
        if is_possible { Ok(length) } else { Err(EncryptionError::Forged) }
    }
}

/// Bytes of the longest record of a stream whose frames have at most so many bytes.
const fn record_bytes_max(frame_bytes_max: usize) -> usize {
    let frames = if frame_bytes_max > SHARED_RECORD_BYTES { frame_bytes_max } else { SHARED_RECORD_BYTES };
    frames + RECORD_OVERHEAD
}

/// Bytes of the buffer of records that the socket has not taken.
const fn unsent_bytes(record_bytes_max: usize) -> usize {
    if record_bytes_max > SEALED_BYTES { record_bytes_max } else { SEALED_BYTES }
}

/// Writes once, as much as the socket takes.
pub fn write(socket: impl AsFd, bytes: &[u8]) -> Result<usize, Errno> {
    loop {
        // NOSIGNAL: an embedding process may not ignore SIGPIPE, as Rust's own start-up does.
        match rustix::net::send(&socket, bytes, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

impl fmt::Debug for Encryption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encryption").field("unsent", &self.unsent_range.len()).finish_non_exhaustive()
    }
}
