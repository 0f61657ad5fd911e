//! What comes back on a stream: answers land in the user's memory, everything else is read and acted on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use paramhub_core::placement::RouteId;
use paramhub_core::wire::{Failure, HEADER_BYTES, Header, Norm, Notice, Operation, State};
use paramhub_transport::{FrameSink, Landing};

use crate::desk::Desk;
use crate::error::panic_message;
use crate::notices::HubNotice;

/// Takes the frames of one route's stream.
pub(crate) struct Inbound<'a> {
    pub(crate) desk: &'a mut Desk,
    pub(crate) route: RouteId,
    /// The position of the route among those that have streams.
    pub(crate) lane: usize,
    pub(crate) hub: &'a Arc<str>,
}

/// Why a frame ends the job.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The hub ended it.
    Failure(Failure),
    /// The hub broke the protocol.
    Offence(String),
    /// A callback panicked.
    Callback(Arc<str>),
}

impl Inbound<'_> {
    fn check_route(&self, header: &Header) -> Result<(), Fault> {
        let home = self.desk.placement.locate(header.chunk).map(|(route, _)| route);
        if home == Some(self.route) {
            return Ok(());
        }
        Err(Fault::Offence(format!(
            "it answered for chunk {} on a stream that does not carry it",
            header.chunk
        )))
    }
}

impl FrameSink for Inbound<'_> {
    type Error = Fault;

    fn landing(&mut self, header: &Header) -> Result<Landing<'_>, Fault> {
        if !matches!(header.operation, Operation::Parameters | Operation::State) {
            return Ok(Landing::Staged);
        }
        let extent =
            self.desk.requests.expect(header).map_err(|unasked| Fault::Offence(unasked.to_string()))?;
        self.check_route(header)?;
        match header.operation {
            // What stands ahead of its values belongs elsewhere.
            Operation::State => Ok(Landing::Staged),
            _ if header.codec.is_quantised() => Ok(Landing::Staged),
            _ => Ok(Landing::InPlace(self.desk.destination(&extent))),
        }
    }

    fn placed(&mut self, header: &Header) -> Result<(), Fault> {
        // The stream let through only what hubs send: of that, parameters alone carry tensors.
        let extent =
            self.desk.requests.expect(header).map_err(|unasked| Fault::Offence(unasked.to_string()))?;
        self.check_route(header)?;
        self.desk.collect(&extent);
        self.frame(header, None)
    }

    fn frame(&mut self, header: &Header, payload: Option<&[u8]>) -> Result<(), Fault> {
        self.desk.uncounted_bytes += HEADER_BYTES + header.length as usize;
        let unreadable = || Fault::Offence(format!("its {:?} frame cannot be read", header.operation));
        match header.operation {
            Operation::Parameters | Operation::Applied | Operation::State => {
                self.check_route(header)?;
                let extent = self.desk.requests.expect(header);
                let extent = extent.map_err(|unasked| Fault::Offence(unasked.to_string()))?;
                match header.operation {
                    Operation::State => {
                        let state = payload.and_then(State::decode).ok_or_else(unreadable)?;
                        self.desk.take_state(&extent, &state);
                    }
                    Operation::Parameters if header.codec.is_quantised() => {
                        self.desk.take_change(&extent, payload.ok_or_else(unreadable)?);
                    }
                    Operation::Parameters => self.desk.took_whole(&extent),
                    _ => {}
                }
                let answered = self.desk.requests.answered(header);
                let answered = answered.map_err(|unasked| Fault::Offence(unasked.to_string()))?;
                match answered.finished {
                    Some(request) => {
                        self.desk.finish(answered.key, request, answered.newest).map_err(Fault::Callback)
                    }
                    None => Ok(()),
                }
            }
            Operation::Norm => {
                let Norm(squares) = payload.and_then(Norm::decode).ok_or_else(unreadable)?;
                let told = self.desk.norm_part(self.lane, header.step, squares);
                let told = told.map_err(|unasked| Fault::Offence(unasked.to_string()))?;
                told.map_err(Fault::Callback)
            }
            Operation::Failure => {
                Err(payload.and_then(Failure::decode).map_or_else(unreadable, Fault::Failure))
            }
            Operation::Notice => {
                let notice = payload.and_then(Notice::decode).ok_or_else(unreadable)?;
                let notice =
                    HubNotice { hub: Arc::clone(self.hub), rank: notice.rank, message: notice.message };
                let shared = &self.desk.shared;
                catch_unwind(AssertUnwindSafe(|| shared.notices.add(notice)))
                    .map_err(|panic| Fault::Callback(panic_message(&*panic)))
            }
            Operation::Heartbeat => Ok(()),
            other => Err(Fault::Offence(format!("it sent a {other:?} frame, which only workers send"))),
        }
    }
}
