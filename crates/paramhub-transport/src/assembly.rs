//! Makes frames from a byte stream, whatever pieces it arrives in.

use std::io::IoSliceMut;

use paramhub_core::limits::CONTROL_BYTES_MAX;
use paramhub_core::wire::{Direction, FrameError, HEADER_BYTES, Header};
use paramhub_kernels::shared;

use crate::stream::{FrameSink, Landing, ReceiveError};

/// Shorter payloads are copied through the caches.
const STREAMED_BYTES_MIN: usize = 512;

/// The state of the receiving side of a stream between two reads.
#[derive(Debug)]
pub(crate) struct Assembly {
    direction: Direction,
    frame_bytes_max: usize,
    /// Whether payloads of tensors do not follow their headers, because they are in an arena.
    has_arena: bool,
    /// Bytes of such payloads since the last [`Assembly::absorb`] began.
    placed_bytes: usize,
    state: AssemblyState,
    head: [u8; HEADER_BYTES],
    /// The payload of a staged frame that a read cut off. It has room for the largest from the start.
    stash: Box<[u8]>,
}

#[derive(Clone, Copy, Debug)]
enum AssemblyState {
    /// `filled` bytes of the next header are in `head`.
    Head { filled: usize },
    /// `filled` bytes of the payload are in `stash`.
    Staged { header: Header, filled: usize },
    /// `filled` bytes of the payload are where the sink wants them.
    InPlace { header: Header, filled: usize },
}

/// Where one read's bytes went: first to the unfinished frame, the rest to the read-ahead.
pub(crate) struct Filled {
    pub(crate) wanted: usize,
    pub(crate) bytes: usize,
    into_frame: usize,
}

impl Assembly {
    /// For frames that travel in `direction` with at most `frame_bytes_max` bytes of tensor payload. Control
    /// frames have their own, small bound, for which even a job of tiny chunks needs room.
    pub(crate) fn new(direction: Direction, frame_bytes_max: usize) -> Self {
        let stash = frame_bytes_max.max(CONTROL_BYTES_MAX as usize);
        Assembly {
            direction,
            frame_bytes_max,
            has_arena: false,
            placed_bytes: 0,
            state: AssemblyState::Head { filled: 0 },
            head: [0; HEADER_BYTES],
            stash: vec![0; stash].into_boxed_slice(),
        }
    }

    /// The same with tensors in an arena, so that frames only announce them.
    pub(crate) fn with_arena(mut self) -> Self {
        self.has_arena = true;
        self
    }

    /// The same for a stream that passes on whole frames only, so that none is kept here in part.
    pub(crate) fn of_whole_frames(self) -> Self {
        Assembly { stash: Box::default(), ..self }
    }

    /// Passes on frames that are whole. Returns whether they were.
    pub(crate) fn take_whole<S: FrameSink>(
        &mut self,
        sink: &mut S,
        frames: &[u8],
    ) -> Result<bool, ReceiveError<S::Error>> {
        let mut rest = frames;
        while let Some((head, after)) = rest.split_first_chunk() {
            let header = Header::decode(head, self.direction)?;
            if after.len() < header.length as usize {
                return Ok(false);
            }
            rest = self.begin(sink, head, after)?;
        }
        Ok(rest.is_empty())
    }

    /// Whether the stream may end here.
    pub(crate) fn at_boundary(&self) -> bool {
        matches!(self.state, AssemblyState::Head { filled: 0 })
    }

    /// Makes `read` fill the rest of the unfinished frame and then `ahead`, about `budget` bytes in all.
    pub(crate) fn fill<S: FrameSink, E: From<ReceiveError<S::Error>>>(
        &mut self,
        sink: &mut S,
        ahead: &mut [u8],
        budget: usize,
        read: impl FnOnce(&mut [IoSliceMut<'_>]) -> Result<usize, E>,
    ) -> Result<Filled, E> {
        let missing: &mut [u8] = match self.state {
            AssemblyState::Head { filled: 0 } => &mut [],
            AssemblyState::Head { filled } => &mut self.head[filled..],
            AssemblyState::Staged { header, filled } => &mut self.stash[filled..header.length as usize],
            AssemblyState::InPlace { header, filled } => {
                match sink.landing(&header).map_err(ReceiveError::Sink)? {
                    Landing::InPlace(slice) => &mut checked(&header, slice)[filled..],
                    Landing::Staged => panic!("the sink changed its mind about the unfinished {header:?}"),
                }
            }
        };
        let into_frame = missing.len().min(budget);
        let ahead_bytes = ahead.len().min(budget - into_frame);
        let mut slices =
            [IoSliceMut::new(&mut missing[..into_frame]), IoSliceMut::new(&mut ahead[..ahead_bytes])];
        let bytes = read(if into_frame == 0 { &mut slices[1..] } else { &mut slices })?;
        Ok(Filled { wanted: into_frame + ahead_bytes, bytes, into_frame: bytes.min(into_frame) })
    }

    /// Passes on the frames that `filled` completed; `ahead` is the read-ahead that it went to. Returns the
    /// bytes of payloads that are in the arena.
    pub(crate) fn absorb<S: FrameSink>(
        &mut self,
        sink: &mut S,
        filled: &Filled,
        ahead: &[u8],
    ) -> Result<usize, ReceiveError<S::Error>> {
        self.placed_bytes = 0;
        self.hand_over(sink, filled, ahead)?;
        Ok(self.placed_bytes)
    }

    fn hand_over<S: FrameSink>(
        &mut self,
        sink: &mut S,
        filled: &Filled,
        ahead: &[u8],
    ) -> Result<(), ReceiveError<S::Error>> {
        let mut rest = &ahead[..filled.bytes - filled.into_frame];
        let new = filled.into_frame;
        match &mut self.state {
            AssemblyState::Head { filled: 0 } => {}
            AssemblyState::Head { filled } => {
                *filled += new;
                if *filled < HEADER_BYTES {
                    return Ok(());
                }
                let head = self.head;
                rest = self.begin(sink, &head, rest)?;
            }
            AssemblyState::Staged { header, filled } => {
                *filled += new;
                if *filled < header.length as usize {
                    return Ok(());
                }
                let header = *header;
                self.state = AssemblyState::Head { filled: 0 };
                let payload = &self.stash[..header.length as usize];
                sink.frame(&header, Some(payload)).map_err(ReceiveError::Sink)?;
            }
            AssemblyState::InPlace { header, filled } => {
                *filled += new;
                if *filled < header.length as usize {
                    return Ok(());
                }
                let header = *header;
                self.state = AssemblyState::Head { filled: 0 };
                sink.frame(&header, None).map_err(ReceiveError::Sink)?;
            }
        }
        while let Some((head, after)) = rest.split_first_chunk() {
            rest = self.begin(sink, head, after)?;
        }
        if !rest.is_empty() {
            self.head[..rest.len()].copy_from_slice(rest);
            self.state = AssemblyState::Head { filled: rest.len() };
        }
        Ok(())
    }

    /// Begins the frame of `head`, takes its part of `after`, and returns the rest. An incomplete frame takes
    /// everything.
    fn begin<'a, S: FrameSink>(
        &mut self,
        sink: &mut S,
        head: &[u8; HEADER_BYTES],
        after: &'a [u8],
    ) -> Result<&'a [u8], ReceiveError<S::Error>> {
        let header = Header::decode(head, self.direction)?;
        self.bound(&header)?;
        self.state = AssemblyState::Head { filled: 0 };
        if self.has_arena && header.operation.carries_tensor() {
            self.placed_bytes += header.length as usize;
            sink.placed(&header).map_err(ReceiveError::Sink)?;
            return Ok(after);
        }
        let length = header.length as usize;
        let here = length.min(after.len());
        let (payload, rest) = after.split_at(here);
        match sink.landing(&header).map_err(ReceiveError::Sink)? {
            Landing::Staged if here == length => {
                sink.frame(&header, Some(payload)).map_err(ReceiveError::Sink)?;
            }
            Landing::Staged => {
                self.stash[..here].copy_from_slice(payload);
                self.state = AssemblyState::Staged { header, filled: here };
            }
            Landing::InPlace(slice) => {
                land(payload, &mut checked(&header, slice)[..here]);
                if here == length {
                    sink.frame(&header, None).map_err(ReceiveError::Sink)?;
                } else {
                    self.state = AssemblyState::InPlace { header, filled: here };
                }
            }
        }
        Ok(rest)
    }

    /// The most bytes of a frame, with its header.
    pub(crate) fn frame_bytes_max(&self) -> usize {
        HEADER_BYTES + self.frame_bytes_max.max(CONTROL_BYTES_MAX as usize)
    }

    fn bound(&self, header: &Header) -> Result<(), FrameError> {
        let control = header.operation.length_max() <= CONTROL_BYTES_MAX;
        if control || header.length as usize <= self.frame_bytes_max {
            return Ok(());
        }
        let max = u32::try_from(self.frame_bytes_max).unwrap_or(u32::MAX);
        Err(FrameError::Length { operation: header.operation, length: header.length, max })
    }
}

/// Large payloads bypass the caches: nothing reads them before the whole tensor is here, and a line that is
/// overwritten whole need not be fetched first.
fn land(payload: &[u8], target: &mut [u8]) {
    if payload.len() < STREAMED_BYTES_MIN {
        target.copy_from_slice(payload);
    } else {
        shared::stream(payload, target);
    }
}

fn checked<'a>(header: &Header, slice: &'a mut [u8]) -> &'a mut [u8] {
    assert_eq!(slice.len(), header.length as usize, "the sink's slice does not fit {header:?}");
    slice
}
