//! What comes from one peer.

use std::io::IoSliceMut;
use std::os::fd::AsFd;

use rustix::io::Errno;

use super::board::{Address, Board};
use super::matching::{Offer, Pairing};
use super::peer::Peer;
use super::slab::Key;
use crate::descriptor::Descriptor;
use crate::error::MeshError;
use crate::wire::{CONTROL_BYTES_MAX, HEADER_BYTES, Header, Kind};

/// Where a frame boundary may be near, so much is read through the scratch: many small frames to a call, and of a large payload
/// little that has to be copied.
const AHEAD_BYTES: usize = 16 << 10;

/// The receiving side of a connection between two reads.
#[derive(Debug)]
pub(crate) struct Inbound {
    head: [u8; HEADER_BYTES],
    head_filled: usize,
    /// The frame whose payload is coming.
    frame: Option<Header>,
    /// Bytes of its payload that have come.
    filled: usize,
    /// The payload of a control frame.
    stash: [u8; CONTROL_BYTES_MAX],
}

/// What one turn brought.
#[derive(Debug, Default)]
pub(crate) struct Received {
    pub(crate) bytes: usize,
    /// The peer's side is over.
    pub(crate) is_over: Option<Over>,
}

/// How a peer's side ended.
#[derive(Debug)]
pub(crate) enum Over {
    /// With a goodbye, after so many collectives.
    Left(u64),
    /// With a reason.
    Aborted { culprit: Option<u32>, reason: String },
    /// Without a word.
    Lost(String),
}

impl Inbound {
    pub(crate) fn new() -> Self {
        let (head, stash) = ([0; HEADER_BYTES], [0; CONTROL_BYTES_MAX]);
        Inbound { head, head_filled: 0, frame: None, filled: 0, stash }
    }

    fn missing(&self) -> usize {
        self.frame.map_or(0, |header| header.length as usize - self.filled)
    }
}

impl Peer {
    /// Reads until nothing is left for now, or about `budget` bytes were taken.
    pub(crate) fn receive(
        &mut self,
        board: &mut Board,
        scratch: &mut [u8],
        budget: usize,
    ) -> Result<Received, MeshError> {
        let mut received = Received::default();
        while received.bytes < budget {
            let missing = self.inbound.missing();
            let ticket = self
                .inbound
                .frame
                .filter(|frame| frame.kind == Kind::Data)
                .map(|frame| Key::from_wire(frame.ticket));
            let window = ticket.and_then(|ticket| board.window(ticket));
            let window = window.map_or(&mut [][..], |window| &mut window[..missing]);
            let in_place = window.len();
            let ahead = if in_place > 0 { AHEAD_BYTES } else { missing + AHEAD_BYTES };
            let ahead = ahead.min(scratch.len());
            let mut slices = [IoSliceMut::new(window), IoSliceMut::new(&mut scratch[..ahead])];
            let slices = if in_place > 0 { &mut slices[..] } else { &mut slices[1..] };
            let read = match rustix::io::readv(self.socket.as_fd(), slices) {
                Ok(0) => {
                    received.is_over = Some(Over::Lost(self.end_of_stream()));
                    return Ok(received);
                }
                Ok(read) => read,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(received),
                Err(errno) => {
                    received.is_over = Some(Over::Lost(format!("its connection broke: {errno}")));
                    return Ok(received);
                }
            };
            received.bytes += read;
            let placed = read.min(in_place);
            if placed > 0 {
                let ticket = ticket.expect("a window belongs to a transfer");
                board.landed(ticket, placed);
                self.inbound.filled += placed;
                received.is_over = self.finish_if_whole(board)?;
            }
            if received.is_over.is_none() {
                received.is_over = self.parse(board, &scratch[..read - placed])?;
            }
            if received.is_over.is_some() || read < in_place + ahead {
                return Ok(received);
            }
        }
        Ok(received)
    }

    fn end_of_stream(&self) -> String {
        let inside = self.inbound.frame.is_some() || self.inbound.head_filled > 0;
        let place = if inside { " inside a frame" } else { "" };
        format!("its connection ended{place} without a goodbye: has its process died?")
    }

    fn parse(&mut self, board: &mut Board, mut bytes: &[u8]) -> Result<Option<Over>, MeshError> {
        while !bytes.is_empty() {
            let inbound = &mut self.inbound;
            if let Some(frame) = inbound.frame {
                let taken = inbound.missing().min(bytes.len());
                let (payload, rest) = bytes.split_at(taken);
                if frame.kind == Kind::Data {
                    board.land(Key::from_wire(frame.ticket), payload);
                } else {
                    inbound.stash[inbound.filled..][..taken].copy_from_slice(payload);
                }
                inbound.filled += taken;
                bytes = rest;
            } else {
                let taken = (HEADER_BYTES - inbound.head_filled).min(bytes.len());
                inbound.head[inbound.head_filled..][..taken].copy_from_slice(&bytes[..taken]);
                inbound.head_filled += taken;
                bytes = &bytes[taken..];
                if inbound.head_filled < HEADER_BYTES {
                    return Ok(None);
                }
                let header =
                    Header::decode(&inbound.head).map_err(|error| self.broke(board, &error.to_string()))?;
                self.inbound.head_filled = 0;
                self.inbound.filled = 0;
                if header.kind == Kind::Data {
                    self.check_data(board, &header)?;
                }
                self.inbound.frame = Some(header);
            }
            if let Some(over) = self.finish_if_whole(board)? {
                return Ok(Some(over));
            }
        }
        Ok(None)
    }

    fn check_data(&self, board: &Board, header: &Header) -> Result<(), MeshError> {
        let fault = match board.landings.get(Key::from_wire(header.ticket)) {
            None => "data that nobody waits for",
            Some(landing) if landing.from != Some(self.rank) => "data that another rank was asked for",
            Some(landing) if header.bytes != landing.arrived as u64 => "data out of order",
            Some(landing) if header.length as usize > landing.into.bytes - landing.arrived => {
                "more data than was asked for"
            }
            Some(landing) if header.length == 0 && landing.into.bytes > 0 => "an empty piece of data",
            Some(_) => return Ok(()),
        };
        Err(self.broke(board, fault))
    }

    /// Handles the frame at hand if all of it is here.
    fn finish_if_whole(&mut self, board: &mut Board) -> Result<Option<Over>, MeshError> {
        if self.inbound.missing() > 0 {
            return Ok(None);
        }
        match self.inbound.frame.take() {
            Some(header) => self.handle(board, &header),
            None => Ok(None),
        }
    }

    fn handle(&mut self, board: &mut Board, header: &Header) -> Result<Option<Over>, MeshError> {
        let address: Address = (header.channel, header.tag);
        let ticket = Key::from_wire(header.ticket);
        match header.kind {
            Kind::Data => board.finish_landing(ticket),
            Kind::Ready | Kind::ReadyAny => {
                let is_any = header.kind == Kind::ReadyAny;
                let offer = Offer { ticket: header.ticket, bytes: header.bytes, is_any };
                let pairing = self.matching.offer(address, offer);
                self.act(board, address, pairing)?;
            }
            Kind::Claim => {
                if let Some(landing) = board.landings.get_mut(ticket)
                    && landing.from.is_none()
                    && landing.address == address
                {
                    landing.from = Some(self.rank);
                    let grant = Header { kind: Kind::Grant, length: 0, ..*header };
                    self.outbound.control(grant, &[]);
                    board.withdrawn.push((header.ticket, header.tag, self.rank));
                }
                // Otherwise another rank was faster, and the withdrawal is on its way.
            }
            Kind::Grant => {
                let Some(transfer) = self.matching.grant(address, header.ticket) else {
                    return Err(self.broke(board, "a grant that nobody claimed"));
                };
                self.outbound.transfer(transfer);
                let pairing = self.matching.pair(address);
                self.act(board, address, pairing)?;
            }
            Kind::Withdraw => {
                self.matching.withdraw(address, header.ticket);
                let pairing = self.matching.pair(address);
                self.act(board, address, pairing)?;
            }
            Kind::Begin => {
                let wire =
                    self.inbound.stash[..header.length as usize].try_into().expect("bounded by its kind");
                let Some(descriptor) = Descriptor::decode(wire) else {
                    return Err(self.broke(board, "a collective that does not exist"));
                };
                if !self.is_previous(board) || !board.sequence.hear(header.tag, descriptor) {
                    return Err(self.broke(board, "a collective out of order"));
                }
            }
            Kind::Begun => {
                if !self.is_next(board) || !board.sequence.acknowledge(header.tag) {
                    return Err(self.broke(board, "a count of collectives that cannot be"));
                }
            }
            Kind::Heartbeat => {}
            Kind::Goodbye => return Ok(Some(Over::Left(header.tag))),
            Kind::Abort => {
                let reason = String::from_utf8_lossy(&self.inbound.stash[..header.length as usize]);
                let culprit = u32::try_from(header.tag).ok().filter(|rank| *rank < board.size);
                return Ok(Some(Over::Aborted { culprit, reason: reason.into_owned() }));
            }
        }
        Ok(None)
    }

    /// Does what came of an offer or a send.
    pub(crate) fn act(&mut self, board: &Board, address: Address, pairing: Pairing) -> Result<(), MeshError> {
        match pairing {
            Pairing::Nothing => Ok(()),
            Pairing::Matched(transfer) => {
                self.outbound.transfer(transfer);
                Ok(())
            }
            Pairing::Claim(ticket) => {
                let claim = Header { ticket, tag: address.1, ..Header::bare(Kind::Claim) };
                self.outbound.control(claim, &[]);
                Ok(())
            }
            Pairing::Mismatch(send, expected_bytes) => Err(MeshError::LengthMismatch {
                who: board.who.clone(),
                what: board.operation(send.id.operation).name(),
                sender: board.who.rank,
                sent_bytes: send.from.bytes as u64,
                receiver: self.rank,
                expected_bytes,
            }),
            Pairing::TooMany => Err(self.broke(board, "more announcements than a rank may have")),
        }
    }

    fn is_previous(&self, board: &Board) -> bool {
        (self.rank + 1) % board.size == board.who.rank
    }

    fn is_next(&self, board: &Board) -> bool {
        (board.who.rank + 1) % board.size == self.rank
    }

    fn broke(&self, board: &Board, what: &str) -> MeshError {
        MeshError::Protocol {
            who: board.who.clone(),
            rank: self.rank,
            reason: format!("it sent {what}").into(),
        }
    }
}
