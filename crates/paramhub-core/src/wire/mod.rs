//! Frames and handshake, byte for byte; docs/protocol.md draws them.

mod control;
mod factors;
mod handshake;
mod header;
mod phases;
mod program_state;
mod state;

pub use control::{Failure, Notice, Retune};
pub use factors::{FACTORS_HEAD_BYTES, Factors};
pub use handshake::{
    Attempt, CHALLENGE_BYTES, CHALLENGE_MESSAGE_BYTES, Caller, CallerHandshake, Capabilities, Challenge,
    HELLO_BYTES, HELLO_BYTES_MAX, HELLO_HEAD_BYTES, HandshakeError, Hello, HubHandshake, MAGIC, PROOF_BYTES,
    Refusal, VERDICT_BYTES, VERSION, VERSION_OLDEST, Verdict, VerdictError, Welcome, hello_length,
};
pub use header::{Direction, FrameError, HEADER_BYTES, Header, Operation};
pub use phases::{Norm, Release, Tensors};
pub use program_state::{PROGRAM_STATE_HEAD_BYTES, ProgramState};
pub use state::{STATE_HEAD_BYTES, State};
