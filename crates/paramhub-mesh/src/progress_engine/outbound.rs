//! The sending side of a connection to a peer: control frames first, then one piece of each transfer in turn.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::AsFd;

use paramhub_transport::encryption::Encryption;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use super::operations_in_flight::{OperationsInFlight, StepId};
use crate::schedule::BufferRange;
use crate::socket::PeerSocket;
use crate::wire::{HEADER_BYTES, Header, Kind, PIECE_BYTES};

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
}

impl OutgoingTransfer {
    pub(crate) fn new(id: StepId, from: BufferRange, ticket: u64) -> Self {
        OutgoingTransfer { id, from, ticket, sent: 0 }
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
    control: Vec<u8>,
    control_gone: usize,
    /// The frame that a write cut in two.
    begun: Option<TransferPiece>,
    active: VecDeque<OutgoingTransfer>,
    /// `true` if the socket takes no more for now.
    pub(crate) is_blocked: bool,
    /// `true` if nothing can be sent any more; the frames received before will give the reason.
    is_broken: bool,
    /// Whether encrypted bytes wait until the socket takes more.
    has_unsent: bool,
    /// Bytes written so far.
    pub(crate) written: u64,
}

impl Outbound {
    /// Queues a frame that carries no tensor.
    pub(crate) fn control(&mut self, header: Header, payload: &[u8]) {
        let header = Header { length: payload.len() as u32, ..header };
        self.control.extend_from_slice(&header.encode());
        self.control.extend_from_slice(payload);
    }

    pub(crate) fn transfer(&mut self, transfer: OutgoingTransfer) {
        self.active.push_back(transfer);
    }

    /// Sends under way.
    pub(crate) fn transfers(&self) -> impl Iterator<Item = StepId> + '_ {
        self.begun.iter().map(|piece| piece.transfer.id).chain(self.active.iter().map(|transfer| transfer.id))
    }

    /// Returns whether there is something to write and the socket can take it.
    pub(crate) fn is_due(&self) -> bool {
        !self.is_blocked && self.has_something()
    }

    pub(crate) fn has_something(&self) -> bool {
        let has_frames = self.begun.is_some() || !self.control.is_empty() || !self.active.is_empty();
        !self.is_broken && (has_frames || self.has_unsent)
    }

    /// Writes until nothing is left, the socket takes no more, or about `budget` bytes have left. Adds the
    /// steps whose last byte has left to `done`.
    pub(crate) fn flush(
        &mut self,
        socket: &mut PeerSocket,
        in_flight: &OperationsInFlight,
        budget: u64,
        done: &mut Vec<StepId>,
    ) {
        let enough = self.written + budget;
        while self.is_due() && self.written < enough {
            let mut pieces = [None::<TransferPiece>; BATCH_PIECES];
            let (mut planned, mut bytes) = (0, self.control.len() - self.control_gone);
            let has_begun = self.begun.is_some();
            let begun = self.begun.take();
            let fresh = std::iter::from_fn(|| self.active.pop_front().map(TransferPiece::next_of));
            for piece in begun.into_iter().chain(fresh) {
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
            self.account(wrote, &pieces[..planned], has_begun, done);
            self.is_blocked |= wrote < bytes || self.has_unsent;
        }
    }

    /// Writes, in this order, the rest of the frame that has begun, the control frames and new pieces.
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
        let control = &self.control[self.control_gone..];
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
                Err(_) => {
                    self.is_broken = true;
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
        let control = self.control[self.control_gone..].chunks(PIECE_BYTES);
        let transfers = pieces.iter().flatten();
        let frames = control
            .map(|control| (control, &[][..]))
            .chain(transfers.map(|piece| (&piece.head[..], piece.payload(in_flight))));
        let mut wrote = 0;
        let counted = frames.clone().map(|(head, payload)| head.len() + payload.len());
        match encryption.send(socket, frames) {
            Ok(taken) => wrote = counted.take(taken).sum(),
            Err(_) => self.is_broken = true,
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
        done: &mut Vec<StepId>,
    ) {
        let mut left = wrote;
        if !has_begun {
            self.account_control(&mut left);
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
                    done.push(transfer.id);
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
                self.account_control(&mut left);
            }
        }
    }

    fn account_control(&mut self, left: &mut usize) {
        let taken = (*left).min(self.control.len() - self.control_gone);
        *left -= taken;
        self.control_gone += taken;
        if self.control_gone == self.control.len() {
            self.control.clear();
            self.control_gone = 0;
        }
    }

    /// The bytes that must still leave before the peer can read a last frame: a copy of the rest of the frame
    /// that has begun, the control frames, and `last`. Drops the transfers.
    pub(crate) fn last_messages(
        &mut self,
        in_flight: &OperationsInFlight,
        last: Header,
        payload: &[u8],
    ) -> Vec<u8> {
        if self.is_broken {
            return Vec::new();
        }
        let mut last_messages = Vec::new();
        if let Some(piece) = self.begun.take() {
            last_messages.extend_from_slice(&piece.head[piece.gone.min(HEADER_BYTES)..]);
            last_messages
                .extend_from_slice(&piece.payload(in_flight)[piece.gone.saturating_sub(HEADER_BYTES)..]);
        }
        last_messages.extend_from_slice(&self.control[self.control_gone..]);
        let last = Header { length: payload.len() as u32, ..last };
        last_messages.extend_from_slice(&last.encode());
        last_messages.extend_from_slice(payload);
        last_messages
    }
}
