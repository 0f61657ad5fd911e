//! The receiving side of a connection to a peer.

use std::io::IoSliceMut;
use std::os::fd::AsFd;
use std::sync::Arc;

use paramhub_transport::StreamError;
use paramhub_transport::encryption::{Encryption, EncryptionError};
use rustix::io::Errno;

use super::matching::{MatchOutcome, ReceiveAnnouncement};
use super::operations_in_flight::{Address, OperationsInFlight};
use super::peer::Peer;
use super::slab::SlabKey;
use crate::descriptor::Descriptor;
use crate::error::MeshError;
use crate::wire::{CONTROL_BYTES_MAX, HEADER_BYTES, Header, Kind};

/// The bytes read into the scratch at a time where a frame boundary may be near: one call reads many small
/// frames, and of a large payload little has to be copied.
const AHEAD_BYTES: usize = 16 << 10;

/// The receiving side of a connection between two reads.
#[derive(Debug)]
pub(crate) struct Inbound {
    head: [u8; HEADER_BYTES],
    head_filled: usize,
    /// The frame whose payload is coming.
    frame: Option<Header>,
    /// The number of bytes of its payload that have come.
    filled: usize,
    /// The payload of a control frame.
    control_payload: [u8; CONTROL_BYTES_MAX],
}

/// The result of one turn of reading.
#[derive(Debug, Default)]
pub(crate) struct Received {
    pub(crate) bytes: usize,
    /// The way in which the peer's side has ended, if it has.
    pub(crate) is_over: Option<PeerEnd>,
}

/// The way in which a peer's side ended.
#[derive(Debug)]
pub(crate) enum PeerEnd {
    /// The peer sent a leave message, after so many collectives.
    Left(u64),
    /// The peer sent a reason.
    Aborted { culprit: Option<u32>, reason: String },
    /// The connection broke or closed without a last message.
    Lost(String),
}

/// Why encrypted bytes were not taken.
enum ReadError {
    Mesh(MeshError),
    Encryption(EncryptionError),
}

impl From<EncryptionError> for ReadError {
    fn from(error: EncryptionError) -> ReadError {
        ReadError::Encryption(error)
    }
}

impl Inbound {
    pub(crate) fn new() -> Self {
        let (head, control_payload) = ([0; HEADER_BYTES], [0; CONTROL_BYTES_MAX]);
        Inbound { head, head_filled: 0, frame: None, filled: 0, control_payload }
    }

    fn missing(&self) -> usize {
        self.frame.map_or(0, |header| header.length as usize - self.filled)
    }
}

impl Peer {
    /// Reads until nothing is left for now, or about `budget` bytes were read.
    pub(crate) fn receive(
        &mut self,
        in_flight: &mut OperationsInFlight,
        scratch: &mut [u8],
        budget: usize,
    ) -> Result<Received, MeshError> {
        if let Some(mut encryption) = self.socket.encryption.take() {
            let received = self.receive_encrypted(&mut encryption, in_flight, scratch, budget);
            self.socket.encryption = Some(encryption);
            return received;
        }
        let mut received = Received::default();
        while received.bytes < budget {
            let missing = self.inbound.missing();
            let ticket = self
                .inbound
                .frame
                .filter(|frame| frame.kind == Kind::Data)
                .map(|frame| SlabKey::from_wire(frame.ticket));
            let window = ticket.and_then(|ticket| in_flight.window(ticket));
            let window = window.map_or(&mut [][..], |window| &mut window[..missing]);
            let in_place = window.len();
            let ahead = if in_place > 0 { AHEAD_BYTES } else { missing + AHEAD_BYTES };
            let ahead = ahead.min(scratch.len());
            let mut slices = [IoSliceMut::new(window), IoSliceMut::new(&mut scratch[..ahead])];
            let slices = if in_place > 0 { &mut slices[..] } else { &mut slices[1..] };
            let read = match rustix::io::readv(self.socket.as_fd(), slices) {
                Ok(0) => {
                    received.is_over = Some(PeerEnd::Lost(self.end_of_stream()));
                    return Ok(received);
                }
                Ok(read) => read,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(received),
                Err(errno) => {
                    received.is_over = Some(PeerEnd::Lost(format!("its connection broke: {errno}")));
                    return Ok(received);
                }
            };
            received.bytes += read;
            let placed = read.min(in_place);
            if placed > 0 {
                let ticket = ticket.expect("a window belongs to a transfer");
                in_flight.advance_receive(ticket, placed);
                self.inbound.filled += placed;
                received.is_over = self.finish_if_whole(in_flight)?;
            }
            if received.is_over.is_none() {
                received.is_over = self.parse(in_flight, &scratch[..read - placed])?;
            }
            if received.is_over.is_some() || read < in_place + ahead {
                return Ok(received);
            }
        }
        Ok(received)
    }

    fn receive_encrypted(
        &mut self,
        encryption: &mut Encryption,
        in_flight: &mut OperationsInFlight,
        scratch: &mut [u8],
        budget: usize,
    ) -> Result<Received, MeshError> {
        let (socket, mut received) = (Arc::clone(&self.socket.socket), Received::default());
        while received.bytes < budget {
            let mut is_over = None;
            let mut take = |bytes: &[u8]| {
                if is_over.is_none() {
                    is_over = self.parse(in_flight, bytes).map_err(ReadError::Mesh)?;
                }
                Ok(())
            };
            let read = encryption.receive(&socket, scratch, &mut take);
            received.is_over = is_over;
            let why = match read {
                Ok(read) => {
                    received.bytes += read.bytes;
                    if read.bytes == 0 {
                        received.is_over = Some(PeerEnd::Lost(self.end_of_stream()));
                    }
                    if received.is_over.is_some() || read.bytes < read.wanted {
                        return Ok(received);
                    }
                    continue;
                }
                Err(ReadError::Mesh(error)) => return Err(error),
                Err(ReadError::Encryption(EncryptionError::Errno(Errno::INTR))) => continue,
                Err(ReadError::Encryption(EncryptionError::Errno(Errno::AGAIN))) => return Ok(received),
                Err(ReadError::Encryption(EncryptionError::Errno(errno))) => {
                    format!("its connection broke: {errno}")
                }
                Err(ReadError::Encryption(EncryptionError::Forged)) => StreamError::Forged.to_string(),
            };
            received.is_over.get_or_insert(PeerEnd::Lost(why));
            return Ok(received);
        }
        Ok(received)
    }

    fn end_of_stream(&self) -> String {
        let inside = self.inbound.frame.is_some() || self.inbound.head_filled > 0;
        let place = if inside { " inside a frame" } else { "" };
        format!("its connection ended{place} without a leave message: has its process died?")
    }

    fn parse(
        &mut self,
        in_flight: &mut OperationsInFlight,
        mut bytes: &[u8],
    ) -> Result<Option<PeerEnd>, MeshError> {
        while !bytes.is_empty() {
            let inbound = &mut self.inbound;
            if let Some(frame) = inbound.frame {
                let taken = inbound.missing().min(bytes.len());
                let (payload, rest) = bytes.split_at(taken);
                if frame.kind == Kind::Data {
                    in_flight.write_received(SlabKey::from_wire(frame.ticket), payload);
                } else {
                    inbound.control_payload[inbound.filled..][..taken].copy_from_slice(payload);
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
                let header = Header::decode(&inbound.head)
                    .map_err(|error| self.broke(in_flight, &error.to_string()))?;
                self.inbound.head_filled = 0;
                self.inbound.filled = 0;
                if header.kind == Kind::Data {
                    self.check_data(in_flight, &header)?;
                }
                self.inbound.frame = Some(header);
            }
            if let Some(over) = self.finish_if_whole(in_flight)? {
                return Ok(Some(over));
            }
        }
        Ok(None)
    }

    fn check_data(&self, in_flight: &OperationsInFlight, header: &Header) -> Result<(), MeshError> {
        let fault = match in_flight.receives.get(SlabKey::from_wire(header.ticket)) {
            None => "data that no operation waits for",
            Some(receive) if receive.from != Some(self.rank) => "data that another rank was asked for",
            Some(receive) if header.bytes != receive.arrived as u64 => "data out of order",
            Some(receive) if header.length as usize > receive.into.bytes - receive.arrived => {
                "more data than was asked for"
            }
            Some(receive) if header.length == 0 && receive.into.bytes > 0 => "an empty piece of data",
            Some(_) => return Ok(()),
        };
        Err(self.broke(in_flight, fault))
    }

    /// Handles the current frame if all of it has come.
    fn finish_if_whole(&mut self, in_flight: &mut OperationsInFlight) -> Result<Option<PeerEnd>, MeshError> {
        if self.inbound.missing() > 0 {
            return Ok(None);
        }
        match self.inbound.frame.take() {
            Some(header) => self.handle(in_flight, &header),
            None => Ok(None),
        }
    }

    fn handle(
        &mut self,
        in_flight: &mut OperationsInFlight,
        header: &Header,
    ) -> Result<Option<PeerEnd>, MeshError> {
        let address: Address = (header.channel, header.tag);
        let ticket = SlabKey::from_wire(header.ticket);
        match header.kind {
            Kind::Data => in_flight.finish_receive(ticket),
            Kind::Ready | Kind::ReadyAny => {
                let is_any = header.kind == Kind::ReadyAny;
                let offer = ReceiveAnnouncement { ticket: header.ticket, bytes: header.bytes, is_any };
                let outcome = self.matching.offer(address, offer);
                self.act(in_flight, address, outcome)?;
            }
            Kind::Claim => {
                if let Some(receive) = in_flight.receives.get_mut(ticket)
                    && receive.from.is_none()
                    && receive.address == address
                {
                    receive.from = Some(self.rank);
                    let grant = Header { kind: Kind::Grant, length: 0, ..*header };
                    self.outbound.control(grant, &[]);
                    in_flight.withdrawn.push((header.ticket, header.tag, self.rank));
                }
                // Otherwise another rank was faster, and the withdrawal is on its way.
            }
            Kind::Grant => {
                let Some(transfer) = self.matching.grant(address, header.ticket) else {
                    return Err(self.broke(in_flight, "a grant that was not claimed"));
                };
                self.outbound.transfer(transfer);
                let outcome = self.matching.pair(address);
                self.act(in_flight, address, outcome)?;
            }
            Kind::Withdraw => {
                self.matching.withdraw(address, header.ticket);
                let outcome = self.matching.pair(address);
                self.act(in_flight, address, outcome)?;
            }
            Kind::Begin => {
                let wire = self.inbound.control_payload[..header.length as usize]
                    .try_into()
                    .expect("bounded by its kind");
                let Some(descriptor) = Descriptor::decode(wire) else {
                    return Err(self.broke(in_flight, "a collective that does not exist"));
                };
                if !self.is_previous(in_flight)
                    || !in_flight.sequence.announced_by_previous(header.tag, descriptor)
                {
                    return Err(self.broke(in_flight, "a collective out of order"));
                }
            }
            Kind::Begun => {
                if !self.is_next(in_flight) || !in_flight.sequence.acknowledge(header.tag) {
                    return Err(self.broke(in_flight, "a count of collectives that cannot be"));
                }
            }
            Kind::Heartbeat => {}
            Kind::Leave => return Ok(Some(PeerEnd::Left(header.tag))),
            Kind::Abort => {
                let reason = String::from_utf8_lossy(&self.inbound.control_payload[..header.length as usize]);
                let culprit = u32::try_from(header.tag).ok().filter(|rank| *rank < in_flight.size);
                return Ok(Some(PeerEnd::Aborted { culprit, reason: reason.into_owned() }));
            }
        }
        Ok(None)
    }

    /// Acts on the outcome of matching an offer or a send.
    pub(crate) fn act(
        &mut self,
        in_flight: &OperationsInFlight,
        address: Address,
        outcome: MatchOutcome,
    ) -> Result<(), MeshError> {
        match outcome {
            MatchOutcome::Nothing => Ok(()),
            MatchOutcome::Matched(transfer) => {
                self.outbound.transfer(transfer);
                Ok(())
            }
            MatchOutcome::Claim(ticket) => {
                let claim = Header { ticket, tag: address.1, ..Header::bare(Kind::Claim) };
                self.outbound.control(claim, &[]);
                Ok(())
            }
            MatchOutcome::Mismatch(send, expected_bytes) => Err(MeshError::LengthMismatch {
                this_rank: in_flight.this_rank.clone(),
                what: in_flight.operation(send.id.operation).name(),
                sender: in_flight.this_rank.rank,
                sent_bytes: send.from.bytes as u64,
                receiver: self.rank,
                expected_bytes,
            }),
            MatchOutcome::TooMany => Err(self.broke(in_flight, "more announcements than a rank may have")),
        }
    }

    fn is_previous(&self, in_flight: &OperationsInFlight) -> bool {
        (self.rank + 1) % in_flight.size == in_flight.this_rank.rank
    }

    fn is_next(&self, in_flight: &OperationsInFlight) -> bool {
        (in_flight.this_rank.rank + 1) % in_flight.size == self.rank
    }

    fn broke(&self, in_flight: &OperationsInFlight, what: &str) -> MeshError {
        MeshError::Protocol {
            this_rank: in_flight.this_rank.clone(),
            rank: self.rank,
            reason: format!("it sent {what}").into(),
        }
    }
}
