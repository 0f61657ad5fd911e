//! The receiving side of a stream: tensors land in the user's memory; other frames are read whole and
//! handled.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use paramhub_core::placement::RouteId;
use paramhub_core::program_states::{Piece, UnexpectedState};
use paramhub_core::requests::ExpectedAnswer;
use paramhub_core::wire::{Failure, HEADER_BYTES, Header, Norm, Notice, Operation, State};
use paramhub_transport::runtime::panic_message;
use paramhub_transport::{FrameSink, Landing};

use crate::notices::HubNotice;
use crate::program_state::Answered;
use crate::requests_in_flight::RequestsInFlight;

/// Receives the frames of one route's stream.
pub(crate) struct InboundSink<'a> {
    pub(crate) in_flight: &'a mut RequestsInFlight,
    pub(crate) route: RouteId,
    /// The position of the lane: that of the route among those that have streams.
    pub(crate) lane: usize,
    pub(crate) hub: &'a Arc<str>,
    /// The answer whose frame has begun to come.
    pub(crate) begun: &'a mut Option<ExpectedAnswer>,
}

/// Why a frame ends the job.
#[derive(Debug)]
pub(crate) enum FrameFault {
    /// The hub ended the job.
    Failure(Failure),
    /// All workers of the job go back to an earlier step.
    Rewound(Notice),
    /// The hub broke the protocol.
    Protocol(String),
    /// A callback panicked.
    Callback(Arc<str>),
}

impl InboundSink<'_> {
    /// Checks that an answer was asked for, on this stream.
    fn expect(&self, header: &Header) -> Result<ExpectedAnswer, FrameFault> {
        let expected = self.in_flight.requests.expect(header);
        let expected = expected.map_err(|unasked| FrameFault::Protocol(unasked.to_string()))?;
        let home = self.in_flight.placement.locate(header.chunk).map(|(route, _)| route);
        if home == Some(self.route) {
            return Ok(expected);
        }
        Err(FrameFault::Protocol(format!(
            "it answered for chunk {} on a stream that does not carry it",
            header.chunk
        )))
    }

    /// Takes an answer that has come whole. Parameters that are not in `payload` are in the user's memory; `is_in_arena`: they
    /// came through shared memory.
    fn take_answer(
        &mut self,
        header: &Header,
        expected: ExpectedAnswer,
        payload: Option<&[u8]>,
        is_in_arena: bool,
    ) -> Result<(), FrameFault> {
        let extent = expected.extent();
        match header.operation {
            Operation::State => {
                let state = payload.and_then(State::decode).ok_or_else(|| unreadable(header))?;
                self.in_flight.take_state(extent, &state);
            }
            Operation::Parameters if header.codec.is_quantised() => {
                self.in_flight.take_change(extent, payload.ok_or_else(|| unreadable(header))?);
            }
            // Through shared memory no answer is a change.
            Operation::Parameters if !is_in_arena => self.in_flight.took_whole(extent, payload),
            _ => {}
        }
        let answered = self.in_flight.requests.answered(expected);
        match answered.finished {
            Some(request) => {
                let finished = self.in_flight.finish(answered.key, request, answered.newest);
                finished.map_err(FrameFault::Callback)
            }
            None => Ok(()),
        }
    }
}

impl InboundSink<'_> {
    /// Takes an answer about a program state.
    fn take_program_state(&mut self, header: &Header, payload: &[u8]) -> Answered {
        let claims = &self.in_flight.shared.program_states;
        let requests = &mut self.in_flight.program_states;
        match header.operation {
            Operation::ProgramStateSaved => requests.saved(claims, header.step),
            _ => requests.piece(claims, &Piece::read(header, payload).map_err(UnexpectedState::from)?),
        }
    }
}

fn unreadable(header: &Header) -> FrameFault {
    FrameFault::Protocol(format!("its {:?} frame cannot be read", header.operation))
}

fn is_answer(header: &Header) -> bool {
    matches!(header.operation, Operation::Parameters | Operation::Applied | Operation::State)
}

impl FrameSink for InboundSink<'_> {
    type Error = FrameFault;

    fn landing(&mut self, header: &Header) -> Result<Landing<'_>, FrameFault> {
        if !is_answer(header) {
            return Ok(Landing::Staged);
        }
        if self.begun.is_none() {
            *self.begun = Some(self.expect(header)?);
        }
        let begun = self.begun.as_ref().expect("it was just looked for");
        // Optimizer state has a head, which does not belong in the user's memory.
        if header.operation != Operation::Parameters
            || !self.in_flight.come_as_they_lie(header, begun.extent())
        {
            return Ok(Landing::Staged);
        }
        Ok(Landing::InPlace(self.in_flight.destination(begun.extent())))
    }

    fn placed(&mut self, header: &Header) -> Result<(), FrameFault> {
        // The stream accepts only operations that hubs send, and of those only parameters carry tensors.
        let expected = self.expect(header)?;
        self.in_flight.uncounted_bytes += HEADER_BYTES + header.length as usize;
        self.in_flight.collect(expected.extent());
        self.take_answer(header, expected, None, true)
    }

    fn frame(&mut self, header: &Header, payload: Option<&[u8]>) -> Result<(), FrameFault> {
        self.in_flight.uncounted_bytes += HEADER_BYTES + header.length as usize;
        let unreadable = || unreadable(header);
        match header.operation {
            Operation::Parameters | Operation::Applied | Operation::State => {
                let expected = self.begun.take().expect("an answer lands before it is whole");
                self.take_answer(header, expected, payload, false)
            }
            Operation::Norm => {
                let (Norm(squares), tensors) = payload.and_then(Norm::decode).ok_or_else(unreadable)?;
                if !tensors.is_empty() && tensors.len() != self.in_flight.shared.settings.keys.len() {
                    return Err(unreadable());
                }
                let told = self.in_flight.norm_part(self.lane, header.step, squares, tensors);
                let told = told.map_err(|unasked| FrameFault::Protocol(unasked.to_string()))?;
                told.map_err(FrameFault::Callback)
            }
            Operation::ProgramStateSaved | Operation::ProgramState => {
                let answered = self.take_program_state(header, payload.unwrap_or_default());
                answered
                    .map_err(|unasked| FrameFault::Protocol(unasked.to_string()))?
                    .map_err(FrameFault::Callback)
            }
            Operation::Failure => {
                Err(payload.and_then(Failure::decode).map_or_else(unreadable, FrameFault::Failure))
            }
            Operation::Rewound => {
                Err(payload.and_then(Notice::decode).map_or_else(unreadable, FrameFault::Rewound))
            }
            Operation::Notice => {
                let notice = payload.and_then(Notice::decode).ok_or_else(unreadable)?;
                let notice =
                    HubNotice { hub: Arc::clone(self.hub), rank: notice.rank, message: notice.message };
                let shared = &self.in_flight.shared;
                catch_unwind(AssertUnwindSafe(|| shared.notices.add(notice)))
                    .map_err(|panic| FrameFault::Callback(panic_message(&*panic)))
            }
            Operation::Heartbeat => Ok(()),
            other => Err(FrameFault::Protocol(format!("it sent a {other:?} frame, which only workers send"))),
        }
    }
}
