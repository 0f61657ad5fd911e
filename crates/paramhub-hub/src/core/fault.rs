//! The faults of a worker or another site on a stream, with their messages for people.

use std::time::Duration;

use paramhub_core::codec::Codec;
use paramhub_core::composition::Neighbour;
use paramhub_core::exchange::{Awaited, ProtocolViolation};
use paramhub_core::job_control::FaultCause;
use paramhub_core::ports::Side;
use paramhub_core::program_states::ProgramStateViolation;
use paramhub_core::service::CauseKind;
use paramhub_core::wire::{Failure, Operation};
use thiserror::Error;

/// The reason why a core gives up on the neighbour at the other end of a stream, or on the job.
#[derive(Clone, Debug, PartialEq, Error)]
pub(crate) enum Fault {
    #[error(
        "sent a frame for chunk {0}, which is not on this stream: was the same placement computed on both ends?"
    )]
    Chunk(u32),
    #[error(
        "sent {got} bytes of {codec} for chunk {chunk} of key `{key}`, which has {expected} bytes of {expected_codec}"
    )]
    Payload { chunk: u32, key: String, got: u32, codec: Codec, expected: u32, expected_codec: Codec },
    #[error(
        "named state slot {slot} of chunk {chunk} of key `{key}`, of which this optimizer keeps {slots}, counted from 0"
    )]
    StateSlot { chunk: u32, key: String, slot: u32, slots: usize },
    #[error(
        "asked for optimizer state of key `{key}`, part of which another site's hub keeps, where the optimizer runs: use \
         --optimize-at every-site to read it anywhere"
    )]
    StateElsewhere { key: String },
    #[error(
        "sent factors for chunk {chunk} of key `{key}`, with which no layer begins that goes by factors-to-hub"
    )]
    NoFactors { chunk: u32, key: String },
    #[error(
        "sent {got} bytes of {codec} as a piece of the factors of key `{key}`, which has 8 to {most} bytes of whole {expected_codec}"
    )]
    Factors { key: String, got: u32, codec: Codec, most: u32, expected_codec: Codec },
    #[error("sent factors of key `{key}` with a NaN or an infinity, and the job rejects such gradients")]
    NonFiniteFactors { key: String },
    #[error("broke the rules on chunk {chunk} of key `{key}`: {violation}")]
    Rules { chunk: u32, key: String, violation: ProtocolViolation },
    #[error("broke the rules: {0}")]
    Release(ProtocolViolation),
    #[error(
        "sent a gradient of key `{key}` whose element {element} is not finite, and the job rejects such gradients"
    )]
    NonFinite { key: String, element: u64 },
    #[error(
        "sent a gradient of key `{key}` with a NaN, an infinity or a sum that is one in the block from element {element} on, \
         which {codec} cannot carry: let the key travel as f32, or keep such steps from the hub"
    )]
    NonFiniteBlock { key: String, element: u64, codec: Codec },
    #[error("sent hyperparameters of group {group} that cannot be used: {reason}")]
    Retune { group: u32, reason: String },
    #[error(
        "sent {0:?}, but no program state can be saved in this job: create it with `program_state_bytes`"
    )]
    NoProgramStates(Operation),
    #[error("sent {0:?} on a stream for no program states: they go by the first route that carries chunks")]
    ProgramStateElsewhere(Operation),
    #[error("sent {got} bytes as a piece of a program state, which has 4 to {most}")]
    ProgramStatePiece { got: u32, most: u32 },
    #[error("broke the rules of program states: {0}")]
    ProgramState(ProgramStateViolation),
    #[error("sent {0:?} after it had left")]
    AfterLeave(Operation),
    #[error("sent something that is no frame: {0}")]
    Frame(String),
    #[error("gave up: {0}")]
    GaveUp(String),
    #[error("was lost: {0}. Its own output, or its machine's log, says why")]
    Lost(String),
    /// As far as can be known its connection works, so it may still receive the reason.
    #[error(
        "was lost: it has not been heard for {:.0} s. Look at its machine and at the network between; where such pauses are \
         normal, give the job a longer --dead-after",
        .0.as_secs_f64()
    )]
    Silent(Duration),
    #[error("sent {0:?}, which does not come from there")]
    NotFromThere(Operation),
    /// The fault of another neighbour.
    #[error("left the job, but other ranks wait for {awaited}")]
    LeftWhileAwaited { culprit: Neighbour, awaited: Awaited },
    /// Another site has ended the job.
    #[error("{}", .0.message)]
    Failed(Failure),
}

impl Fault {
    /// The fault of a rank that has sent its own failure.
    pub(crate) fn gave_up(payload: &[u8]) -> Fault {
        // The rank's text goes into logs and terminals.
        let reason = Failure::decode(payload).map(|failure| failure.message.replace(char::is_control, " "));
        Fault::GaveUp(reason.unwrap_or_else(|| "it did not say why".into()))
    }

    /// Returns the reason why the job is over, as sent by a worker that gives up, or by another site.
    pub(crate) fn reported(side: Side, payload: &[u8]) -> Fault {
        match (side, Failure::decode(payload)) {
            (Side::Worker(_), _) => Fault::gave_up(payload),
            (_, Some(failure)) => Fault::Failed(failure),
            (_, None) => Fault::Frame("a Failure that cannot be read".into()),
        }
    }

    /// Whether a step was asked for that this hub has not come to.
    pub(crate) fn is_ahead(&self) -> bool {
        matches!(self, Fault::Rules { violation: ProtocolViolation::StepAhead { .. }, .. })
    }

    /// The neighbour at fault, if the fault showed on the stream of `neighbour`.
    pub(crate) fn culprit(&self, neighbour: Neighbour) -> Neighbour {
        match self {
            Fault::LeftWhileAwaited { culprit, .. } => *culprit,
            _ => neighbour,
        }
    }

    /// Returns how certain it is that the culprit caused the fault.
    pub(crate) fn cause(&self) -> FaultCause {
        match self {
            Fault::Silent(_) => FaultCause::Silence,
            Fault::Lost(_) => FaultCause::Kind(CauseKind::PeerLost),
            Fault::GaveUp(_) | Fault::Failed(_) => FaultCause::Kind(CauseKind::GaveUp),
            _ => FaultCause::Kind(CauseKind::Known),
        }
    }

    /// The message for all ranks; `culprit` is the name of the neighbour at fault.
    pub(crate) fn message(&self, culprit: &str) -> String {
        match self {
            Fault::Failed(failure) => failure.message.clone(),
            other => format!("{culprit} {other}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_that_a_rank_gives_itself_is_one_line() {
        let failure = Failure { rank: Some(9), message: "its disk\nis full\u{1b}[2J".into() };
        let fault = Fault::gave_up(&failure.encode());
        assert_eq!(fault.message("rank 3"), "rank 3 gave up: its disk is full [2J", "and of no other rank");
        let worker = Neighbour::Worker(3);
        assert_eq!(fault.culprit(worker), worker);
        assert_eq!(Fault::gave_up(&[1]).message("rank 3"), "rank 3 gave up: it did not say why");
    }
}
