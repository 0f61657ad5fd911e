//! The messages of version 1, as its workers expect them. It has no epoch, attempt or capabilities, and its
//! proofs do not cover the verdict.

use super::{
    Attempt, Caller, Capabilities, Challenge, HandshakeError, Hello, Refusal, bytes, u16_at, u32_at,
};
use crate::auth::{Incarnation, Namespace, Proof, Purpose, StreamSecret};
use crate::limits::MESSAGE_BYTES_MAX;

pub(super) const HELLO_BYTES: usize = 112;
const PROOF_AT: usize = 4;
const TEXT_AT: usize = PROOF_AT + super::PROOF_BYTES;
const VERDICT_BYTES: usize = TEXT_AT + MESSAGE_BYTES_MAX;

/// Reads a worker's Hello. Hubs call one another in the newest version only.
pub(super) fn decode_hello(wire: &[u8; HELLO_BYTES]) -> Result<Hello, HandshakeError> {
    let flags = u16_at(wire, 6);
    if !matches!(flags, 0 | 1 | 4) {
        return Err(HandshakeError::Reserved(u64::from(flags)));
    }
    Ok(Hello {
        caller: Caller::Worker { rank: u32_at(wire, 8), shares_parameters: flags == 1 },
        interface: u16_at(wire, 12),
        core: u16_at(wire, 14),
        standby_route: None,
        offered: Capabilities::default(),
        required: Capabilities::default(),
        attempt: Attempt::Unnumbered { resumes: flags == 4 },
        namespace: Namespace(bytes(wire, 16)),
        incarnation: Incarnation(bytes(wire, 32)),
        placement: bytes(wire, 48),
        challenge: bytes(wire, 80),
    })
}

/// The two proofs: the worker's, then the hub's.
pub(super) fn proofs(secret: &StreamSecret, hello: &[u8], challenge: &Challenge) -> (Proof, Proof) {
    let parts: [&[u8]; 2] = [hello, challenge];
    (secret.prove(Purpose::StreamWorkerVersion1, &parts), secret.prove(Purpose::StreamHubVersion1, &parts))
}

pub(super) fn welcome(state_slots: u8, proof: &Proof) -> Vec<u8> {
    let mut wire = vec![0; VERDICT_BYTES];
    wire[2] = state_slots;
    wire[PROOF_AT..TEXT_AT].copy_from_slice(&proof.0);
    wire
}

pub(super) fn refused(refusal: Refusal, message: &str) -> Vec<u8> {
    let mut wire = vec![0; VERDICT_BYTES];
    let text = &message.as_bytes()[..message.floor_char_boundary(MESSAGE_BYTES_MAX)];
    // Version 1 ends with number 9. Its nearest reason stands for a later one; the text says what happened.
    let refusal = match refusal {
        Refusal::Stale => Refusal::Route,
        Refusal::Capability => Refusal::Protocol,
        known => known,
    };
    wire[0..2].copy_from_slice(&(refusal as u16).to_le_bytes());
    wire[2..4].copy_from_slice(&(text.len() as u16).to_le_bytes());
    wire[TEXT_AT..TEXT_AT + text.len()].copy_from_slice(text);
    wire
}
