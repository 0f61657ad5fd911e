use super::{
    CHALLENGE_BYTES, CHALLENGE_MESSAGE_BYTES, Challenge, HandshakeError, Hello, MAGIC, Refusal, Verdict,
    Welcome, version_1,
};
use crate::auth::{Proof, Purpose, StreamSecret};

/// The hub's side of a stream's handshake, from the Hello on, in the version that both ends speak.
#[derive(Clone, Debug)]
pub struct HubHandshake {
    hello: Hello,
    /// The Hello as it came, since the proofs cover also what this release does not know of it.
    hello_message: Vec<u8>,
    version: u16,
    challenge_message: Vec<u8>,
}

impl HubHandshake {
    /// Begins with a whole Hello. `challenge` is random, and fresh for each stream.
    ///
    /// # Errors
    /// If the bytes are no Hello, or of a version that this release does not serve. The answer to that are
    /// [`refuse_hello`](Self::refuse_hello)'s bytes.
    ///
    /// # Panics
    /// If the Hello is shorter than its [length](super::hello_length).
    pub fn begin(hello_message: &[u8], challenge: Challenge) -> Result<HubHandshake, HandshakeError> {
        let (hello, version) = Hello::decode(hello_message)?;
        let challenge_message = match version {
            1 => challenge.to_vec(),
            _ => challenge_message(version, &challenge).to_vec(),
        };
        Ok(HubHandshake { hello, hello_message: hello_message.to_vec(), version, challenge_message })
    }

    /// The bytes for a caller whose Hello cannot be read: an empty challenge, since the caller reads one first,
    /// and the refusal. `head` is what has come of the Hello.
    pub fn refuse_hello(head: &[u8], message: &str) -> Vec<u8> {
        let is_version_1 = head.get(4..6) == Some(&1u16.to_le_bytes());
        match is_version_1 {
            true => [vec![0; CHALLENGE_BYTES], version_1::refused(Refusal::Protocol, message)].concat(),
            false => [
                challenge_message(0, &[0; CHALLENGE_BYTES]).to_vec(),
                Verdict::refused(Refusal::Protocol, message),
            ]
            .concat(),
        }
    }

    /// The Hello, as this release understands it.
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    /// The version in which the two ends speak.
    pub fn version(&self) -> u16 {
        self.version
    }

    /// The message that challenges the caller.
    pub fn challenge_message(&self) -> &[u8] {
        &self.challenge_message
    }

    /// Whether the caller knows the secret, in constant time.
    pub fn is_proven(&self, secret: &StreamSecret, given: &Proof) -> bool {
        given.matches(&match self.version {
            1 => self.version_1_proofs(secret).0,
            _ => secret.prove(Purpose::StreamCaller, &[&self.hello_message, &self.challenge_message]),
        })
    }

    /// The verdict that opens the stream.
    pub fn welcome(&self, secret: &StreamSecret, welcome: &Welcome) -> Vec<u8> {
        match self.version {
            1 => version_1::welcome(welcome.state_slots, &self.version_1_proofs(secret).1),
            _ => Verdict::welcome(welcome, |head| {
                secret.prove(Purpose::StreamHub, &[&self.hello_message, &self.challenge_message, head])
            }),
        }
    }

    /// The verdict that refuses the stream.
    pub fn refusal(&self, refusal: Refusal, message: &str) -> Vec<u8> {
        match self.version {
            1 => version_1::refused(refusal, message),
            _ => Verdict::refused(refusal, message),
        }
    }

    fn version_1_proofs(&self, secret: &StreamSecret) -> (Proof, Proof) {
        let challenge = self.challenge_message.as_slice().try_into().expect("a challenge of version 1");
        version_1::proofs(secret, &self.hello_message, challenge)
    }
}

/// ```text
///   0      4         6      8           40
///   +------+---------+------+-----------+
///   | PHUB | version | zero | challenge |
///   +------+---------+------+-----------+
/// ```
/// `version` is the one in which both ends go on; 0 before a refusal without one.
fn challenge_message(version: u16, challenge: &Challenge) -> [u8; CHALLENGE_MESSAGE_BYTES] {
    let mut wire = [0; CHALLENGE_MESSAGE_BYTES];
    wire[0..4].copy_from_slice(&MAGIC);
    wire[4..6].copy_from_slice(&version.to_le_bytes());
    wire[8..].copy_from_slice(challenge);
    wire
}
