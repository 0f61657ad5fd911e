//! The sending side of a connection to a peer: counted frames first, then one piece of each transfer in turn.

use std::collections::{HashMap, VecDeque};
use std::io::IoSlice;
use std::os::fd::AsFd;

use paramhub_transport::encryption::Encryption;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use super::kept_frames::KeptFrames;
use super::operations_in_flight::{OperationsInFlight, SendProgress, StepId};
use crate::schedule::BufferRange;
use crate::socket::PeerSocket;
use crate::wire::{HEADER_BYTES, Header, Kind, PIECE_BYTES, WHOLE_BYTES_MAX};

/// The maximum of pieces in one write.
const BATCH_PIECES: usize = 16;
/// The number of bytes in one write, about: what a socket may take at once.
const WRITE_BYTES_MAX: usize = 256 << 10;

/// A send that the peer is ready for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutgoingTransfer {
    pub(crate) id: StepId,
    from: BufferRange,
    ticket: u64,
    sent: usize,
    /// Whether all bytes have left once.
    has_left: bool,
}

impl OutgoingTransfer {
    pub(crate) fn new(id: StepId, from: BufferRange, ticket: u64) -> Self {
        OutgoingTransfer { id, from, ticket, sent: 0, has_left: false }
    }
}

/// A frame of a transfer.
#[derive(Clone, Copy, Debug)]
struct TransferPiece {
    transfer: OutgoingTransfer,
    head: [u8; HEADER_BYTES],
    bytes: usize,
    /// The number of bytes that have left, header included.
    gone: usize,
}

impl TransferPiece {
    fn next_of(transfer: OutgoingTransfer) -> Self {
        let bytes = (transfer.from.bytes - transfer.sent).min(PIECE_BYTES);
        let header = Header {
            length: bytes as u32,
            ticket: transfer.ticket,
            bytes: transfer.sent as u64,
            ..Header::bare(Kind::Data)
        };
        TransferPiece { transfer, head: header.encode(), bytes, gone: 0 }
    }

    fn payload<'a>(&self, in_flight: &'a OperationsInFlight) -> &'a [u8] {
        let span = self.transfer.from.part(self.transfer.sent, self.bytes);
        in_flight.operation(self.transfer.id.operation).bytes(span)
    }

    fn total(&self) -> usize {
        HEADER_BYTES + self.bytes
    }
}

#[derive(Debug, Default)]
pub(crate) struct Outbound {
    counted: KeptFrames,
    /// Whether the counted frames may wait until something else leaves.
    may_wait: bool,
    /// Frames that are not counted and leave before all others.
    uncounted: Vec<u8>,
    /// The bytes of them that have left.
    uncounted_gone: usize,
    /// On a connection that replaces another: whether the peer's Resume is still to come. Until then only uncounted
    /// frames may leave.
    awaits_resume: bool,
    /// The Data frame that a write cut in two.
    begun: Option<TransferPiece>,
    active: VecDeque<OutgoingTransfer>,
    /// Transfers of which all bytes have left, and which the peer has not reported as taken.
    untaken: VecDeque<OutgoingTransfer>,
    /// `true` if the socket takes no more for now.
    pub(crate) is_blocked: bool,
    /// Whether nothing can be sent any more.
    is_broken: bool,
    /// The error of a write, which the system reports once: a read then finds an orderly end.
    write_error: Option<Errno>,
    /// Whether encrypted bytes wait until the socket takes more.
    has_unsent: bool,
    /// Bytes written so far.
    pub(crate) written: u64,
}

impl Outbound {
    /// Queues a counted frame.
    pub(crate) fn control(&mut self, header: Header, payload: &[u8]) {
        self.may_wait = false;
        self.counted.push(header, payload);
    }

    /// Queues a counted frame that leaves with the next one, or after [`Outbound::hurry`]: a frame costs less with
    /// another one.
    pub(crate) fn control_later(&mut self, header: Header, payload: &[u8]) {
        self.may_wait |= self.counted.unsent().is_empty();
        self.counted.push(header, payload);
    }

    /// Lets the frames leave that may wait.
    pub(crate) fn hurry(&mut self) {
        self.may_wait = false;
    }

    /// Queues a heartbeat, unless something else will leave.
    pub(crate) fn heartbeat(&mut self) {
        self.hurry();
        if !self.has_something() {
            self.uncounted.extend_from_slice(&Header::bare(Kind::Heartbeat).encode());
        }
    }

    /// Queues a transfer for which the peer is ready.
    pub(crate) fn transfer(&mut self, transfer: OutgoingTransfer, in_flight: &OperationsInFlight) {
        let OutgoingTransfer { id, from, ticket, .. } = transfer;
        if from.bytes <= WHOLE_BYTES_MAX && self.counted.has_room() {
            let payload = in_flight.operation(id.operation).bytes(from);
            self.may_wait = false;
            self.counted.push_send(Header { ticket, ..Header::bare(Kind::Whole) }, payload, id);
        } else {
            self.active.push_back(transfer);
        }
    }

    /// Sends under way.
    pub(crate) fn transfers(&self) -> impl Iterator<Item = StepId> + '_ {
        let begun = self.begun.iter().map(|piece| &piece.transfer);
        let transfers = begun.chain(&self.active).chain(&self.untaken).map(|transfer| transfer.id);
        self.counted.sends().chain(transfers)
    }

    /// Notes that the peer has the first so many counted frames; `false` if it cannot.
    pub(crate) fn acknowledge(&mut self, frames: u64) -> bool {
        self.counted.acknowledge(frames)
    }

    /// The step whose transfer the peer has taken whole; `None` if it cannot have.
    pub(crate) fn taken(&mut self, ticket: u64) -> Option<StepId> {
        let place = self.untaken.iter().position(|transfer| transfer.ticket == ticket)?;
        self.untaken.remove(place).map(|transfer| transfer.id)
    }

    /// Why the last write failed, if it did.
    pub(crate) fn write_error(&self) -> Option<Errno> {
        self.write_error
    }

    /// Notes that the connection is cut: nothing can be written until another one replaces it.
    pub(crate) fn cut(&mut self) {
        self.is_broken = true;
    }

    /// Begins another connection with these frames. All others wait for [`Outbound::resume`].
    pub(crate) fn replace_connection(&mut self, frames: Vec<u8>) {
        (self.is_blocked, self.is_broken, self.has_unsent, self.write_error) = (false, false, false, None);
        (self.uncounted, self.uncounted_gone, self.awaits_resume) = (frames, 0, true);
    }

    /// Goes on where the peer is: it has the first `frames` counted frames, and of each transfer that it waits for so
    /// many bytes, by ticket. Fails with what the peer cannot have sent.
    pub(crate) fn resume(
        &mut self,
        frames: u64,
        arrived: &HashMap<u64, u64>,
        progress: &mut SendProgress,
    ) -> Result<(), &'static str> {
        if !self.counted.resend(frames, progress) {
            return Err("a count of frames that cannot be");
        }
        let begun = self.begun.take().map(|piece| piece.transfer);
        let (waiting, untaken) = (std::mem::take(&mut self.active), std::mem::take(&mut self.untaken));
        for mut transfer in untaken.into_iter().chain(begun).chain(waiting) {
            match arrived.get(&transfer.ticket) {
                Some(&bytes) if bytes < transfer.from.bytes as u64 => {
                    transfer.sent = bytes as usize;
                    self.active.push_back(transfer);
                }
                None if transfer.sent == transfer.from.bytes => self.untaken.push_back(transfer),
                _ => return Err("a count of bytes that cannot be"),
            }
        }
        (self.awaits_resume, self.may_wait) = (false, false);
        Ok(())
    }

    /// Returns whether there is something to write and the socket can take it.
    pub(crate) fn is_due(&self) -> bool {
        !self.is_blocked && self.has_something()
    }

    pub(crate) fn has_something(&self) -> bool {
        let has_transfer = !self.awaits_resume && (self.begun.is_some() || !self.active.is_empty());
        let has_control = match self.uncounted.is_empty() {
            true => !self.may_wait && !self.control_bytes().is_empty(),
            false => true,
        };
        !self.is_broken && (has_transfer || self.has_unsent || has_control)
    }

    /// Returns whether something waits to leave or to be taken, also while the connection is cut.
    pub(crate) fn is_outstanding(&self) -> bool {
        let has_frames = !self.counted.unsent().is_empty() || self.transfers().next().is_some();
        has_frames || self.has_unsent || self.is_broken || self.awaits_resume
    }

    /// What is to be written ahead of transfers.
    fn control_bytes(&self) -> &[u8] {
        match &self.uncounted[self.uncounted_gone..] {
            [] if self.awaits_resume => &[],
            [] => self.counted.unsent(),
            uncounted => uncounted,
        }
    }

    /// Writes until nothing is left, the socket takes no more, or about `budget` bytes have left.
    pub(crate) fn flush(
        &mut self,
        socket: &mut PeerSocket,
        in_flight: &OperationsInFlight,
        budget: u64,
        progress: &mut SendProgress,
    ) {
        let enough = self.written + budget;
        while self.is_due() && self.written < enough {
            let mut pieces = [None::<TransferPiece>; BATCH_PIECES];
            let (mut planned, mut bytes) = (0, self.control_bytes().len());
            let may_transfer = !self.awaits_resume;
            let begun = self.begun.take_if(|_| may_transfer);
            let has_begun = begun.is_some();
            let fresh = || self.active.pop_front_if(|_| may_transfer).map(TransferPiece::next_of);
            for piece in begun.into_iter().chain(std::iter::from_fn(fresh)) {
                bytes += piece.total() - piece.gone;
                pieces[planned] = Some(piece);
                planned += 1;
                if planned == BATCH_PIECES || bytes >= WRITE_BYTES_MAX {
                    break;
                }
            }
            let wrote = match &mut socket.encryption {
                None => self.write(&socket.socket, in_flight, &pieces[..planned], has_begun),
                Some(encryption) => {
                    self.write_encrypted(&socket.socket, encryption, in_flight, &pieces[..planned])
                }
            };
            self.account(wrote, &pieces[..planned], has_begun, progress);
            self.is_blocked |= wrote < bytes || self.has_unsent;
        }
    }

    /// Writes, in this order, the rest of the Data frame that has begun, the counted frames and new pieces.
    /// Returns the number of bytes that the socket took of each.
    fn write(
        &mut self,
        socket: impl AsFd,
        in_flight: &OperationsInFlight,
        pieces: &[Option<TransferPiece>],
        has_begun: bool,
    ) -> usize {
        let mut slices = [IoSlice::new(&[]); 2 * BATCH_PIECES + 1];
        let mut used = 0;
        let mut add = |slice| {
            slices[used] = IoSlice::new(slice);
            used += 1;
        };
        let control = self.control_bytes();
        if !has_begun {
            add(control);
        }
        for piece in pieces.iter().flatten() {
            add(&piece.head[piece.gone.min(HEADER_BYTES)..]);
            add(&piece.payload(in_flight)[piece.gone.saturating_sub(HEADER_BYTES)..]);
            if piece.gone > 0 {
                add(control);
            }
        }
        loop {
            // NOSIGNAL: an embedding process may not ignore SIGPIPE as Rust's own start-up does.
            let flags = SendFlags::NOSIGNAL;
            match sendmsg(&socket, &slices[..used], &mut SendAncillaryBuffer::default(), flags) {
                Ok(wrote) => {
                    self.written += wrote as u64;
                    return wrote;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return 0,
                Err(errno) => {
                    (self.is_broken, self.write_error) = (true, Some(errno));
                    return 0;
                }
            }
        }
    }

    /// The same, encrypted: of each frame the whole or nothing. What the socket has not taken stays with the encryption.
    fn write_encrypted(
        &mut self,
        socket: impl AsFd,
        encryption: &mut Encryption,
        in_flight: &OperationsInFlight,
        pieces: &[Option<TransferPiece>],
    ) -> usize {
        let control = self.control_bytes().chunks(PIECE_BYTES);
        let transfers = pieces.iter().flatten();
        let frames = control
            .map(|control| (control, &[][..]))
            .chain(transfers.map(|piece| (&piece.head[..], piece.payload(in_flight))));
        let mut wrote = 0;
        let counted = frames.clone().map(|(head, payload)| head.len() + payload.len());
        match encryption.send(socket, frames) {
            Ok(taken) => wrote = counted.take(taken).sum(),
            Err(errno) => (self.is_broken, self.write_error) = (true, Some(errno)),
        }
        self.has_unsent = encryption.has_unsent();
        self.written += wrote as u64;
        wrote
    }

    fn account(
        &mut self,
        wrote: usize,
        pieces: &[Option<TransferPiece>],
        has_begun: bool,
        progress: &mut SendProgress,
    ) {
        let mut left = wrote;
        if !has_begun {
            self.account_control(&mut left, progress);
        }
        let mut untouched = 0;
        for piece in pieces.iter().flatten() {
            let mut piece = *piece;
            let was_begun = piece.gone > 0;
            let taken = left.min(piece.total() - piece.gone);
            left -= taken;
            piece.gone += taken;
            if piece.gone == piece.total() {
                let mut transfer = piece.transfer;
                transfer.sent += piece.bytes;
                if transfer.sent == transfer.from.bytes {
                    if !std::mem::replace(&mut transfer.has_left, true) {
                        progress.left.push(transfer.id);
                    }
                    self.untaken.push_back(transfer);
                } else {
                    self.active.push_back(transfer);
                }
            } else if piece.gone > 0 {
                self.begun = Some(piece);
            } else {
                // Put the transfer back in its place, behind those before it.
                self.active.insert(untouched, piece.transfer);
                untouched += 1;
            }
            if was_begun {
                self.account_control(&mut left, progress);
            }
        }
    }

    fn account_control(&mut self, left: &mut usize, progress: &mut SendProgress) {
        let taken = (*left).min(self.control_bytes().len());
        *left -= taken;
        if self.uncounted.is_empty() {
            return self.counted.left(taken, progress);
        }
        self.uncounted_gone += taken;
        if self.uncounted_gone == self.uncounted.len() {
            self.uncounted.clear();
            self.uncounted_gone = 0;
        }
    }

    /// The bytes that must still leave before the peer can read a last frame: a copy of the rest of the Data frame
    /// that has begun, the counted frames, and `last`. Drops the transfers.
    pub(crate) fn last_messages(
        &mut self,
        in_flight: &OperationsInFlight,
        last: Header,
        payload: &[u8],
    ) -> Vec<u8> {
        if self.is_broken || self.awaits_resume {
            return Vec::new();
        }
        let mut last_messages = Vec::new();
        if let Some(piece) = self.begun.take() {
            last_messages.extend_from_slice(&piece.head[piece.gone.min(HEADER_BYTES)..]);
            last_messages
                .extend_from_slice(&piece.payload(in_flight)[piece.gone.saturating_sub(HEADER_BYTES)..]);
        }
        last_messages.extend_from_slice(&self.uncounted[self.uncounted_gone..]);
        last_messages.extend_from_slice(self.counted.unsent());
        let last = Header { length: payload.len() as u32, ..last };
        last_messages.extend_from_slice(&last.encode());
        last_messages.extend_from_slice(payload);
        last_messages
    }
}
