//! The receiving side of a connection to a peer.

use std::collections::HashMap;
use std::io::IoSliceMut;
use std::os::fd::AsFd;
use std::sync::Arc;

use paramhub_transport::StreamError;
use paramhub_transport::encryption::{Encryption, EncryptionError};
use rustix::io::Errno;

use super::matching::{MatchOutcome, OFFERS_MAX, ReceiveAnnouncement};
use super::operations_in_flight::{Address, OperationsInFlight, SendProgress};
use super::peer::Peer;
use super::slab::SlabKey;
use crate::descriptor::Descriptor;
use crate::error::MeshError;
use crate::operation::Operation;
use crate::wire::{CONTROL_BYTES_MAX, HEADER_BYTES, Header, Kind};

/// The most receives from one peer that a rank may have under way.
const RECEIVES_MAX: u64 = OFFERS_MAX as u64;
/// The counted frames, and the bytes of them, after which the peer hears how many have come.
const ACKNOWLEDGED_FRAMES: u64 = 256;
const ACKNOWLEDGED_BYTES: usize = 256 << 10;

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
    /// The first bytes of its payload that had come on a connection before.
    skipped: usize,
    /// The payload of a frame without a tensor.
    control_payload: [u8; CONTROL_BYTES_MAX],
    /// The counted frames that have come on all connections.
    counted: u64,
    /// Those that the peer knows of, and the bytes of the others.
    acknowledged: u64,
    unacknowledged_bytes: usize,
    /// Present on a connection that replaces another, until the peer's first frames have come.
    resuming: Option<PeerProgress>,
}

/// How far the peer says it is, at the beginning of a connection that replaces another.
#[derive(Debug, Default)]
struct PeerProgress {
    /// The counted frames that it has received; none before its Resume.
    frames: Option<u64>,
    /// The number of Arrived frames to come.
    to_come: u64,
    /// The bytes that have come, by ticket.
    arrived: HashMap<u64, u64>,
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
    /// The connection was closed without a last message, as that of a process that dies.
    Lost(String),
    /// The connection broke, for example by a reset, and may be made again.
    Cut(String),
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

fn cut(errno: Errno) -> PeerEnd {
    PeerEnd::Cut(format!("its connection broke: {errno}"))
}

impl Inbound {
    pub(crate) fn new() -> Self {
        Inbound {
            head: [0; HEADER_BYTES],
            head_filled: 0,
            frame: None,
            filled: 0,
            skipped: 0,
            control_payload: [0; CONTROL_BYTES_MAX],
            counted: 0,
            acknowledged: 0,
            unacknowledged_bytes: 0,
            resuming: None,
        }
    }

    fn missing(&self) -> usize {
        self.frame.map_or(0, |header| header.length as usize - self.filled)
    }

    /// The receive into which the rest of the current frame can be read straight.
    fn window_ticket(&self) -> Option<SlabKey> {
        let frame = self.frame.filter(|frame| matches!(frame.kind, Kind::Data | Kind::Whole))?;
        (self.filled >= self.skipped).then_some(SlabKey::from_wire(frame.ticket))
    }

    /// Forgets the frame that was cut, and expects the first frames of another connection. Returns the counted frames
    /// that have come.
    pub(crate) fn replace_connection(&mut self) -> u64 {
        (self.head_filled, self.frame, self.filled, self.skipped) = (0, None, 0, 0);
        self.resuming = Some(PeerProgress::default());
        (self.acknowledged, self.unacknowledged_bytes) = (self.counted, 0);
        self.counted
    }

    /// Counts a frame that has come whole. Returns how many have, if the peer is to hear it.
    fn count(&mut self, header: &Header) -> Option<u64> {
        self.counted += 1;
        self.unacknowledged_bytes += HEADER_BYTES + header.length as usize;
        let is_due = self.counted - self.acknowledged >= ACKNOWLEDGED_FRAMES
            || self.unacknowledged_bytes >= ACKNOWLEDGED_BYTES;
        if !is_due {
            return None;
        }
        (self.acknowledged, self.unacknowledged_bytes) = (self.counted, 0);
        Some(self.counted)
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
            let ticket = self.inbound.window_ticket();
            let window = ticket.and_then(|ticket| in_flight.window(ticket));
            let window = window.map_or(&mut [][..], |window| &mut window[..missing]);
            let in_place = window.len();
            let ahead = if in_place > 0 { AHEAD_BYTES } else { missing + AHEAD_BYTES };
            let ahead = ahead.min(scratch.len());
            let mut slices = [IoSliceMut::new(window), IoSliceMut::new(&mut scratch[..ahead])];
            let slices = if in_place > 0 { &mut slices[..] } else { &mut slices[1..] };
            let read = match rustix::io::readv(self.socket.as_fd(), slices) {
                Ok(0) => {
                    received.is_over = Some(self.end_of_stream());
                    return Ok(received);
                }
                Ok(read) => read,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(received),
                Err(errno) => {
                    received.is_over = Some(cut(errno));
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
            let end = match read {
                Ok(read) => {
                    received.bytes += read.bytes;
                    if read.bytes == 0 {
                        received.is_over = Some(self.end_of_stream());
                    }
                    if received.is_over.is_some() || read.bytes < read.wanted {
                        return Ok(received);
                    }
                    continue;
                }
                Err(ReadError::Mesh(error)) => return Err(error),
                Err(ReadError::Encryption(EncryptionError::Errno(Errno::INTR))) => continue,
                Err(ReadError::Encryption(EncryptionError::Errno(Errno::AGAIN))) => return Ok(received),
                Err(ReadError::Encryption(EncryptionError::Errno(errno))) => cut(errno),
                Err(ReadError::Encryption(EncryptionError::Forged)) => {
                    PeerEnd::Lost(StreamError::Forged.to_string())
                }
            };
            received.is_over.get_or_insert(end);
            return Ok(received);
        }
        Ok(received)
    }

    fn end_of_stream(&self) -> PeerEnd {
        // A write fails with PIPE after the peer has closed the connection.
        if let Some(errno) = self.outbound.write_error().filter(|errno| *errno != Errno::PIPE) {
            return cut(errno);
        }
        let inside = self.inbound.frame.is_some() || self.inbound.head_filled > 0;
        let place = if inside { " inside a frame" } else { "" };
        PeerEnd::Lost(format!("its connection ended{place} without a leave message: has its process died?"))
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
                if matches!(frame.kind, Kind::Data | Kind::Whole) {
                    let known = inbound.skipped.saturating_sub(inbound.filled).min(taken);
                    in_flight.write_received(SlabKey::from_wire(frame.ticket), &payload[known..]);
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
                (self.inbound.head_filled, self.inbound.filled, self.inbound.skipped) = (0, 0, 0);
                match header.kind {
                    Kind::Data => self.check_data(in_flight, &header)?,
                    Kind::Whole => self.inbound.skipped = self.check_whole(in_flight, &header)?,
                    _ => {}
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

    /// Checks the header of a whole transfer. Returns how many of its bytes had come before a cut.
    fn check_whole(&self, in_flight: &OperationsInFlight, header: &Header) -> Result<usize, MeshError> {
        let fault = match in_flight.receives.get(SlabKey::from_wire(header.ticket)) {
            None => "data that no operation waits for",
            Some(receive) if receive.from != Some(self.rank) => "data that another rank was asked for",
            Some(receive) if header.length as usize > receive.into.bytes => "more data than was asked for",
            Some(receive) if (header.length as usize) < receive.into.bytes => "less data than was asked for",
            Some(receive) => return Ok(receive.arrived),
        };
        Err(self.broke(in_flight, fault))
    }

    /// Handles the current frame if all of it has come.
    fn finish_if_whole(&mut self, in_flight: &mut OperationsInFlight) -> Result<Option<PeerEnd>, MeshError> {
        if self.inbound.missing() > 0 {
            return Ok(None);
        }
        let Some(header) = self.inbound.frame.take() else { return Ok(None) };
        if let Some(progress) = self.inbound.resuming.take() {
            return self.resume(in_flight, &header, progress).map(|()| None);
        }
        if header.kind.is_counted()
            && let Some(counted) = self.inbound.count(&header)
        {
            self.outbound.control(Header { tag: counted, ..Header::bare(Kind::Received) }, &[]);
        }
        self.handle(in_flight, &header)
    }

    /// Handles the first frames of a connection that replaces another.
    fn resume(
        &mut self,
        in_flight: &mut OperationsInFlight,
        header: &Header,
        mut progress: PeerProgress,
    ) -> Result<(), MeshError> {
        match (header.kind, progress.frames) {
            (Kind::Resume, None) if header.bytes <= RECEIVES_MAX => {
                (progress.frames, progress.to_come) = (Some(header.tag), header.bytes);
            }
            (Kind::Arrived, Some(_)) => {
                progress.arrived.insert(header.ticket, header.bytes);
                progress.to_come -= 1;
            }
            _ => return Err(self.broke(in_flight, "another frame than the first after a cut")),
        }
        let Some(frames) = progress.frames.filter(|_| progress.to_come == 0) else {
            self.inbound.resuming = Some(progress);
            return Ok(());
        };
        let mut sends = SendProgress::default();
        self.outbound
            .resume(frames, &progress.arrived, &mut sends)
            .map_err(|what| self.broke(in_flight, what))?;
        in_flight.note(&mut sends);
        Ok(())
    }

    fn handle(
        &mut self,
        in_flight: &mut OperationsInFlight,
        header: &Header,
    ) -> Result<Option<PeerEnd>, MeshError> {
        let address: Address = (header.channel, header.tag);
        let ticket = SlabKey::from_wire(header.ticket);
        match header.kind {
            Kind::Data => {
                if let Some(operation) = in_flight.finish_receive(ticket) {
                    let taken = Header { ticket: header.ticket, ..Header::bare(Kind::Taken) };
                    // In a collective the peer needs it for nothing but the end of its own operation.
                    match in_flight.operations.get(operation).is_some_and(Operation::receives) {
                        true => self.outbound.control_later(taken, &[]),
                        false => self.outbound.control(taken, &[]),
                    }
                }
            }
            Kind::Whole => {
                in_flight.finish_receive(ticket);
            }
            Kind::Taken => match self.outbound.taken(header.ticket) {
                Some(id) => in_flight.ended(id),
                None => return Err(self.broke(in_flight, "the end of a transfer that has not been sent")),
            },
            Kind::Received => {
                if !self.outbound.acknowledge(header.tag) {
                    return Err(self.broke(in_flight, "a count of frames that cannot be"));
                }
            }
            Kind::Resume | Kind::Arrived => {
                return Err(self.broke(in_flight, "what a connection after a cut begins with"));
            }
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
                self.outbound.transfer(transfer, in_flight);
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
                self.outbound.transfer(transfer, in_flight);
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
