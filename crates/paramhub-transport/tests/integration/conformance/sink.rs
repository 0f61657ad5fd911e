use std::fmt;

use paramhub_core::wire::{Header, Operation};
use paramhub_transport::{FrameSink, Landing};

use super::Frame;

/// The memory in which frames land.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    Staged,
    InPlace,
    /// As on a worker: parameters in place, everything else staged.
    Mixed,
}

/// Keeps what arrives, and checks the stream's promises.
pub(crate) struct Collector {
    pub(crate) policy: Policy,
    pub(crate) frames: Vec<Frame>,
    /// Refuses the landing, or the frame, of this chunk.
    pub(crate) refuse_landing: Option<u32>,
    pub(crate) refuse_frame: Option<u32>,
    /// `true` if the memory of an unfinished frame is withdrawn.
    pub(crate) withdrawn: bool,
    pub(crate) slot: Vec<u8>,
    /// The frame that lands in `slot`, and how often `landing` was called for it.
    pub(crate) open: Option<(Header, usize)>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Refused(pub u32);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "chunk {} is refused", self.0)
    }
}

impl Collector {
    pub(crate) fn new(policy: Policy) -> Self {
        Collector {
            policy,
            frames: Vec::new(),
            refuse_landing: None,
            refuse_frame: None,
            withdrawn: false,
            slot: Vec::new(),
            open: None,
        }
    }
}

impl FrameSink for Collector {
    type Error = Refused;

    fn landing(&mut self, header: &Header) -> Result<Landing<'_>, Refused> {
        if self.refuse_landing == Some(header.chunk) || (self.withdrawn && self.open.is_some()) {
            return Err(Refused(header.chunk));
        }
        let in_place = match self.policy {
            Policy::Staged => false,
            Policy::InPlace => true,
            Policy::Mixed => header.operation == Operation::Parameters,
        };
        if !in_place {
            assert_eq!(self.open, None, "another frame began inside one");
            return Ok(Landing::Staged);
        }
        match &mut self.open {
            Some((open, asked)) => {
                assert_eq!(open, header, "another frame began inside one");
                *asked += 1;
            }
            None => {
                self.open = Some((*header, 1));
                self.slot.clear();
                self.slot.resize(header.length as usize, 0xee);
            }
        }
        Ok(Landing::InPlace(&mut self.slot))
    }

    fn frame(&mut self, header: &Header, payload: Option<&[u8]>) -> Result<(), Refused> {
        if self.refuse_frame == Some(header.chunk) {
            return Err(Refused(header.chunk));
        }
        let payload = match (payload, self.open.take()) {
            (None, Some((open, _))) => {
                assert_eq!(open, *header);
                self.slot.clone()
            }
            (Some(payload), None) => payload.to_vec(),
            (payload, open) => panic!("landed as {open:?}, handed over as {:?}", payload.map(<[u8]>::len)),
        };
        assert_eq!(payload.len(), header.length as usize);
        self.frames.push(Frame { header: *header, payload });
        Ok(())
    }
}
