//! What goes to one peer: control frames first, then the transfers in turn, a piece each.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use super::board::{Board, StepId};
use crate::schedule::Span;
use crate::wire::{HEADER_BYTES, Header, Kind, PIECE_BYTES};

/// Pieces of one write.
const BATCH_PIECES: usize = 16;
/// Bytes of one write, about: what a socket may take at once.
const WRITE_BYTES_MAX: usize = 256 << 10;

/// A send that the peer is ready for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    pub(crate) id: StepId,
    from: Span,
    ticket: u64,
    sent: usize,
}

impl Transfer {
    pub(crate) fn new(id: StepId, from: Span, ticket: u64) -> Self {
        Transfer { id, from, ticket, sent: 0 }
    }
}

/// A frame of a transfer.
#[derive(Clone, Copy, Debug)]
struct Piece {
    transfer: Transfer,
    head: [u8; HEADER_BYTES],
    bytes: usize,
    /// Bytes that have left, header included.
    gone: usize,
}

impl Piece {
    fn next_of(transfer: Transfer) -> Self {
        let bytes = (transfer.from.bytes - transfer.sent).min(PIECE_BYTES);
        let header = Header {
            length: bytes as u32,
            ticket: transfer.ticket,
            bytes: transfer.sent as u64,
            ..Header::bare(Kind::Data)
        };
        Piece { transfer, head: header.encode(), bytes, gone: 0 }
    }

    fn payload<'a>(&self, board: &'a Board) -> &'a [u8] {
        let span = self.transfer.from.part(self.transfer.sent, self.bytes);
        board.operation(self.transfer.id.operation).bytes(span)
    }

    fn total(&self) -> usize {
        HEADER_BYTES + self.bytes
    }
}

#[derive(Debug, Default)]
pub(crate) struct Outbound {
    control: Vec<u8>,
    control_gone: usize,
    /// The frame that a write cut off.
    begun: Option<Piece>,
    active: VecDeque<Transfer>,
    /// The socket takes no more for now.
    pub(crate) is_blocked: bool,
    /// Nothing can be sent any more; what was received before will say why.
    is_broken: bool,
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

    pub(crate) fn transfer(&mut self, transfer: Transfer) {
        self.active.push_back(transfer);
    }

    /// Sends under way.
    pub(crate) fn transfers(&self) -> impl Iterator<Item = StepId> + '_ {
        self.begun.iter().map(|piece| piece.transfer.id).chain(self.active.iter().map(|transfer| transfer.id))
    }

    /// Whether there is something to write and no reason not to.
    pub(crate) fn is_due(&self) -> bool {
        !self.is_blocked && self.has_something()
    }

    pub(crate) fn has_something(&self) -> bool {
        !self.is_broken && (self.begun.is_some() || !self.control.is_empty() || !self.active.is_empty())
    }

    /// Writes until nothing is left, the socket takes no more, or about `budget` bytes have left. Steps whose last byte has left
    /// go to `done`.
    pub(crate) fn flush(&mut self, socket: impl AsFd, board: &Board, budget: u64, done: &mut Vec<StepId>) {
        let enough = self.written + budget;
        while self.is_due() && self.written < enough {
            let mut pieces = [None::<Piece>; BATCH_PIECES];
            let (mut planned, mut bytes) = (0, self.control.len() - self.control_gone);
            let has_begun = self.begun.is_some();
            let begun = self.begun.take();
            let fresh = std::iter::from_fn(|| self.active.pop_front().map(Piece::next_of));
            for piece in begun.into_iter().chain(fresh) {
                bytes += piece.total() - piece.gone;
                pieces[planned] = Some(piece);
                planned += 1;
                if planned == BATCH_PIECES || bytes >= WRITE_BYTES_MAX {
                    break;
                }
            }
            let wrote = self.write(&socket, board, &pieces[..planned], has_begun);
            self.account(wrote, &pieces[..planned], has_begun, done);
            self.is_blocked |= wrote < bytes;
        }
    }

    /// Returns the bytes the socket took of what was begun, the control frames and the fresh pieces, in this order.
    fn write(
        &mut self,
        socket: impl AsFd,
        board: &Board,
        pieces: &[Option<Piece>],
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
            add(&piece.payload(board)[piece.gone.saturating_sub(HEADER_BYTES)..]);
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

    fn account(&mut self, wrote: usize, pieces: &[Option<Piece>], has_begun: bool, done: &mut Vec<StepId>) {
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
                // Back to where it was, behind those before it.
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

    /// What must still leave so that the peer can read a last frame: the rest of the frame that has begun, copied, the control
    /// frames, and `last`. Transfers are given up.
    pub(crate) fn last_words(&mut self, board: &Board, last: Header, payload: &[u8]) -> Vec<u8> {
        if self.is_broken {
            return Vec::new();
        }
        let mut words = Vec::new();
        if let Some(piece) = self.begun.take() {
            words.extend_from_slice(&piece.head[piece.gone.min(HEADER_BYTES)..]);
            words.extend_from_slice(&piece.payload(board)[piece.gone.saturating_sub(HEADER_BYTES)..]);
        }
        words.extend_from_slice(&self.control[self.control_gone..]);
        let last = Header { length: payload.len() as u32, ..last };
        words.extend_from_slice(&last.encode());
        words.extend_from_slice(payload);
        words
    }
}
