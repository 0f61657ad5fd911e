use super::{
    CHALLENGE_MESSAGE_BYTES, HELLO_BYTES, HandshakeError, Hello, MAGIC, VERDICT_BYTES, VERSION, Verdict,
    VerdictError, Welcome, u16_at,
};
use crate::auth::{Proof, Purpose, StreamSecret};

/// The caller's side of a stream's handshake. Its messages go out in this order: the Hello, then the proof.
#[derive(Clone, Debug)]
pub struct CallerHandshake {
    hello: Hello,
    hello_message: [u8; HELLO_BYTES],
    challenge_message: [u8; CHALLENGE_MESSAGE_BYTES],
}

impl CallerHandshake {
    /// Begins with this Hello, whose challenge is random, and fresh for each stream.
    pub fn begin(hello: Hello) -> CallerHandshake {
        let hello_message = hello.encode();
        CallerHandshake { hello, hello_message, challenge_message: [0; CHALLENGE_MESSAGE_BYTES] }
    }

    /// The first message.
    pub fn hello_message(&self) -> &[u8; HELLO_BYTES] {
        &self.hello_message
    }

    /// Reads the hub's challenge and returns the proof to send.
    ///
    /// # Errors
    /// If the answer is no challenge, or of a version that this side does not speak.
    pub fn answer(
        &mut self,
        secret: &StreamSecret,
        challenge_message: &[u8; CHALLENGE_MESSAGE_BYTES],
    ) -> Result<Proof, HandshakeError> {
        // A hub of version 1 sends zeros in place of the challenge to a caller that it does not understand.
        if challenge_message[..32] == [0; 32] {
            return Err(HandshakeError::HubIsOlder);
        }
        if challenge_message[0..4] != MAGIC {
            return Err(HandshakeError::Magic);
        }
        match u16_at(challenge_message, 4) {
            // 0 comes before a refusal; the hub ignores the proof.
            0 | VERSION => {}
            other => return Err(HandshakeError::HubVersion(other)),
        }
        self.challenge_message = *challenge_message;
        Ok(secret.prove(Purpose::StreamCaller, &[&self.hello_message, challenge_message]))
    }

    /// Reads the hub's verdict.
    ///
    /// # Errors
    /// If it refuses the stream, does not prove that the hub knows the secret, or is unreadable.
    pub fn open(
        &self,
        secret: &StreamSecret,
        verdict: &[u8; VERDICT_BYTES],
    ) -> Result<Welcome, VerdictError> {
        let welcome = Verdict::open(verdict, |head| {
            secret.prove(Purpose::StreamHub, &[&self.hello_message, &self.challenge_message, head])
        })?;
        let (granted, Hello { offered, required, .. }) = (welcome.granted, self.hello);
        if !granted.without(offered).is_empty() || !required.without(granted).is_empty() {
            return Err(VerdictError::Capabilities(granted));
        }
        Ok(welcome)
    }
}
