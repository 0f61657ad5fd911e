//! Records: the pieces in which an encrypted stream travels, and the keys that seal and open them.
//!
//! ```text
//!   0        4
//!   +--------+----------------------------+----------+
//!   | length | whole frames, encrypted    | tag (16) |
//!   +--------+----------------------------+----------+
//! ```
//! `length` counts what follows it. It is authenticated with the record. Records are numbered in each direction;
//! the number is the nonce. So a record that was altered, left out, repeated or moved does not open.

use paramhub_trust::{Cipher, StreamKeys};
use ring::aead::{AES_128_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Prk};

/// Bytes of a record before its frames.
pub(super) const RECORD_HEAD_BYTES: usize = 4;
/// Bytes of a record behind its frames.
pub(super) const TAG_BYTES: usize = 16;
/// What a record adds to its frames.
pub(super) const RECORD_OVERHEAD: usize = RECORD_HEAD_BYTES + TAG_BYTES;
/// The bytes that one key encrypts: 2^32 blocks of AES, after which an attacker who sees all of them tells them from
/// random ones with a probability of 2^-65. Both ends count them, and go on with the next key.
const KEY_BYTES_MAX: u64 = 1 << 36;

/// A record that does not open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Forged;

/// The key of one direction.
struct RecordKey {
    algorithm: &'static Algorithm,
    secret: Prk,
    key: LessSafeKey,
    /// The number of the next record under this key.
    number: u64,
    bytes_left: u64,
    bytes_max: u64,
}

struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

/// A part of what follows from a secret (RFC 5869, the expanding step).
fn expand<const N: usize>(secret: &Prk, label: &[u8]) -> [u8; N] {
    let mut expanded = [0; N];
    let output = secret.expand(&[label], Length(N)).and_then(|output| output.fill(&mut expanded));
    output.expect("a few bytes can be expanded");
    expanded
}

impl RecordKey {
    fn new(cipher: Cipher, secret: &[u8; 32], bytes_max: u64) -> RecordKey {
        let algorithm = match cipher {
            Cipher::Aes128Gcm => &AES_128_GCM,
            Cipher::ChaCha20Poly1305 => &CHACHA20_POLY1305,
        };
        let secret = Prk::new_less_safe(HKDF_SHA256, secret);
        let key = RecordKey::derive(algorithm, &secret);
        RecordKey { algorithm, secret, key, number: 0, bytes_left: bytes_max, bytes_max }
    }

    fn derive(algorithm: &'static Algorithm, secret: &Prk) -> LessSafeKey {
        let bytes: [u8; 32] = expand(secret, b"paramhub record key");
        let key = UnboundKey::new(algorithm, &bytes[..algorithm.key_len()]);
        LessSafeKey::new(key.expect("as many bytes as the key has"))
    }

    /// The nonce of the next record, which has so many bytes of frames, under the key that is in force.
    fn next(&mut self, bytes: usize) -> Nonce {
        if self.bytes_left < bytes as u64 {
            self.secret = Prk::new_less_safe(HKDF_SHA256, &expand::<32>(&self.secret, b"paramhub next key"));
            self.key = RecordKey::derive(self.algorithm, &self.secret);
            (self.number, self.bytes_left) = (0, self.bytes_max.max(bytes as u64));
        }
        self.bytes_left -= bytes as u64;
        let mut nonce = [0; NONCE_LEN];
        nonce[4..].copy_from_slice(&self.number.to_be_bytes());
        self.number += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

/// Encrypts the records that this end sends.
pub(super) struct Sealer(RecordKey);

impl Sealer {
    pub(super) fn new(keys: &StreamKeys) -> Sealer {
        Sealer(RecordKey::new(keys.cipher, &keys.sending, KEY_BYTES_MAX))
    }

    /// Makes a record of the frames in `record`, which begin behind its head and end before its tag.
    pub(super) fn seal(&mut self, record: &mut [u8]) {
        let length = record.len() - RECORD_HEAD_BYTES;
        let (head, body) = record.split_at_mut(RECORD_HEAD_BYTES);
        let (frames, tag_place) = body.split_at_mut(length - TAG_BYTES);
        head.copy_from_slice(&u32::try_from(length).expect("a record has few megabytes").to_le_bytes());
        let nonce = self.0.next(frames.len());
        let tag = self.0.key.seal_in_place_separate_tag(nonce, Aad::from(&*head), frames);
        tag_place.copy_from_slice(tag.expect("a record is far below the cipher's limit").as_ref());
    }
}

/// Decrypts the records that this end receives.
pub(super) struct Opener(RecordKey);

impl Opener {
    pub(super) fn new(keys: &StreamKeys) -> Opener {
        Opener(RecordKey::new(keys.cipher, &keys.receiving, KEY_BYTES_MAX))
    }

    /// Opens in place what follows the head of a record. Returns its frames.
    pub(super) fn open<'a>(
        &mut self,
        head: &[u8; RECORD_HEAD_BYTES],
        body: &'a mut [u8],
    ) -> Result<&'a [u8], Forged> {
        let frames = body.len().checked_sub(TAG_BYTES).ok_or(Forged)?;
        let nonce = self.0.next(frames);
        self.0.key.open_in_place(nonce, Aad::from(head), body).map(|frames| &*frames).map_err(|_| Forged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORD_BYTES: usize = RECORD_HEAD_BYTES + 40 + TAG_BYTES;

    fn keys() -> StreamKeys {
        StreamKeys { cipher: Cipher::Aes128Gcm, sending: [1; 32], receiving: [1; 32] }
    }

    fn sealed(sealer: &mut Sealer) -> Vec<u8> {
        let mut record = vec![9; RECORD_BYTES];
        sealer.seal(&mut record);
        record
    }

    fn opens(opener: &mut Opener, mut record: Vec<u8>) -> bool {
        let (head, body) = record.split_first_chunk_mut().unwrap();
        opener.open(head, body).is_ok_and(|frames| frames == [9; 40])
    }

    #[test]
    fn both_ends_go_on_with_the_next_key_after_as_many_bytes() {
        let key = || RecordKey::new(Cipher::Aes128Gcm, &[1; 32], 100);
        let (mut sealer, mut opener) = (Sealer(key()), Opener(key()));
        let mut with_one_key = Opener::new(&keys());
        for number in 0..10 {
            let record = sealed(&mut sealer);
            assert_eq!(opens(&mut with_one_key, record.clone()), number < 2, "record {number}");
            assert!(opens(&mut opener, record), "record {number}");
        }
        assert_eq!(sealer.0.number, 2, "records under the last key");
    }

    #[test]
    fn equal_frames_make_different_records() {
        let mut sealer = Sealer::new(&keys());
        let (first, second) = (sealed(&mut sealer), sealed(&mut sealer));
        assert_ne!(first, second);
        let mut opener = Opener::new(&keys());
        assert!(!opens(&mut opener, second), "the second in the place of the first");
    }
}
