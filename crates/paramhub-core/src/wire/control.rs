//! Payloads of the frames that carry no tensor data: a failed job, a notice, new hyperparameters.

use crate::hyperparameters::Hyperparameters;
use crate::limits::{CONTROL_BYTES_MAX, MESSAGE_BYTES_MAX};

/// Payload of [`Operation::Failure`](super::Operation::Failure): a rank, then UTF-8 text to the end.
///
/// ```text
///  0                   4
///  +-------------------+--------------------
///  |     rank, u32     |  message, UTF-8 ...
///  +-------------------+--------------------
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The rank at fault, if one is.
    pub rank: Option<u32>,
    /// The text: which rank or hub, what happened, and what to do.
    pub message: String,
}

/// Payload of [`Operation::Notice`](super::Operation::Notice), laid out like [`Failure`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The rank that the notice is about, if any.
    pub rank: Option<u32>,
    /// The text: which rank or hub, and what happened.
    pub message: String,
}

/// Payload of [`Operation::Retune`](super::Operation::Retune): [`Hyperparameters::to_wire`]. The header's
/// chunk is the number of the group, and its step is the first one for which they hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Retune(pub Hyperparameters);

const _: () = assert!(Hyperparameters::WIRE_BYTES <= CONTROL_BYTES_MAX as usize);

const NO_RANK: u32 = u32::MAX;

fn encode_message(rank: Option<u32>, message: &str) -> Vec<u8> {
    let mut wire = rank.unwrap_or(NO_RANK).to_le_bytes().to_vec();
    wire.extend_from_slice(&message.as_bytes()[..message.floor_char_boundary(MESSAGE_BYTES_MAX)]);
    wire
}

fn decode_message(wire: &[u8]) -> Option<(Option<u32>, String)> {
    let (rank, text) = wire.split_first_chunk::<4>()?;
    let rank = u32::from_le_bytes(*rank);
    Some(((rank != NO_RANK).then_some(rank), String::from_utf8_lossy(text).into_owned()))
}

impl Failure {
    /// The payload; the message is cut at [`MESSAGE_BYTES_MAX`].
    pub fn encode(&self) -> Vec<u8> {
        encode_message(self.rank, &self.message)
    }

    /// Reads a payload; `None` if it is too short.
    pub fn decode(wire: &[u8]) -> Option<Self> {
        decode_message(wire).map(|(rank, message)| Failure { rank, message })
    }
}

impl Notice {
    /// The payload; the message is cut at [`MESSAGE_BYTES_MAX`].
    pub fn encode(&self) -> Vec<u8> {
        encode_message(self.rank, &self.message)
    }

    /// Reads a payload; `None` if it is too short.
    pub fn decode(wire: &[u8]) -> Option<Self> {
        decode_message(wire).map(|(rank, message)| Notice { rank, message })
    }
}

impl Retune {
    /// Reads a payload; `None` if it is not the wire form of hyperparameters, or a number is not finite.
    pub fn decode(wire: &[u8]) -> Option<Self> {
        let read = Hyperparameters::from_wire(wire.try_into().ok()?)?;
        read.is_finite().then_some(Retune(read))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip_and_are_cut_between_characters() {
        let failure = Failure { rank: Some(3), message: "rank 3 died".into() };
        assert_eq!(Failure::decode(&failure.encode()), Some(failure));
        let long = Notice { rank: None, message: "ü".repeat(MESSAGE_BYTES_MAX) };
        let read = Notice::decode(&long.encode()).unwrap();
        assert_eq!((read.rank, read.message.len()), (None, MESSAGE_BYTES_MAX));
        assert_eq!(Failure::decode(&[1, 2, 3]), None);
        assert!(Failure::decode(&[0, 0, 0, 0, 0xff]).is_some(), "broken text is shown, not refused");
    }

    #[test]
    fn numbers_that_are_not_finite_are_refused() {
        let sound = Hyperparameters::default().with("trust", 0.5).unwrap();
        let wire = sound.to_wire();
        assert_eq!(Retune::decode(&wire), Some(Retune(sound)));
        assert_eq!(Retune::decode(&wire[1..]), None);
        for name in ["learning_rate", "epsilon", "trust"] {
            assert_eq!(Retune::decode(&sound.with(name, f64::NAN).unwrap().to_wire()), None, "{name}");
        }
        let mut broken = wire;
        broken[64] = 0xff;
        assert_eq!(Retune::decode(&broken), None, "no wire form");
    }
}
