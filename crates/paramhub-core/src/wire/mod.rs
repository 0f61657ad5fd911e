//! Frames and handshake, byte for byte; docs/protocol.md draws them.

mod control;
mod factors;
mod handshake;
mod header;
mod phases;
mod state;

pub use control::{Failure, Notice, Retune};
pub use factors::{FACTORS_HEAD_BYTES, Factors};
pub use handshake::{
    CHALLENGE_BYTES, Caller, Challenge, HELLO_BYTES, HandshakeError, Hello, MAGIC, PROOF_BYTES, Refusal,
    VERDICT_BYTES, VERSION, Verdict, VerdictError, stream_proofs,
};
pub use header::{Direction, FrameError, HEADER_BYTES, Header, Operation};
pub use phases::{Norm, Release};
pub use state::{STATE_HEAD_BYTES, State};
