//! What a worker can do wrong on a stream, in the words its owner will read.

use std::time::Duration;

use paramhub_core::codec::Codec;
use paramhub_core::exchange::{Offence, Stranded};
use paramhub_core::wire::{Failure, Operation};
use thiserror::Error;

/// Why a core gives up on a rank of a job, or on the job.
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
    #[error("broke the rules on chunk {chunk} of key `{key}`: {offence}")]
    Rules { chunk: u32, key: String, offence: Offence },
    #[error("broke the rules: {0}")]
    Release(Offence),
    #[error(
        "sent a gradient of key `{key}` whose element {element} is not finite, and the job rejects such gradients"
    )]
    NonFinite { key: String, element: u64 },
    #[error("sent hyperparameters of group {group} that cannot be used: {reason}")]
    Retune { group: u32, reason: String },
    #[error("sent {0:?} after it had left")]
    AfterLeave(Operation),
    #[error("sent something that is no frame: {0}")]
    Frame(String),
    #[error("gave up: {0}")]
    GaveUp(String),
    #[error("was lost: {0}")]
    Lost(String),
    /// Its connection stands, as far as anyone can tell: it may yet hear why.
    #[error("was lost: it has not been heard for {:.0} s", .0.as_secs_f64())]
    Silent(Duration),
    #[error("{0}")]
    Stranded(Stranded),
}

impl Fault {
    /// From what a rank says of its own failure.
    pub(crate) fn gave_up(payload: &[u8]) -> Fault {
        // Its words go into logs and terminals.
        let reason = Failure::decode(payload).map(|failure| failure.message.replace(char::is_control, " "));
        Fault::GaveUp(reason.unwrap_or_else(|| "it did not say why".into()))
    }

    /// The rank at fault where it showed on the stream of `rank`.
    pub(crate) fn culprit(&self, rank: u32) -> u32 {
        match self {
            Fault::Stranded(stranded) => stranded.rank,
            _ => rank,
        }
    }

    /// The message for everybody, which names the rank at fault.
    pub(crate) fn message(&self, rank: u32) -> String {
        match self {
            Fault::Stranded(stranded) => stranded.to_string(),
            other => format!("rank {rank} {other}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_rank_says_of_itself_is_one_line() {
        let said = Failure { rank: Some(9), message: "its disk\nis full\u{1b}[2J".into() };
        let fault = Fault::gave_up(&said.encode());
        assert_eq!(fault.message(3), "rank 3 gave up: its disk is full [2J", "and of nobody else");
        assert_eq!(fault.culprit(3), 3);
        assert_eq!(Fault::gave_up(&[1]).message(3), "rank 3 gave up: it did not say why");
    }
}
