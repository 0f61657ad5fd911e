//! Text that the ranks of a run exchange through a store that others can read.

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use paramhub_core::auth::StreamSecret;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};

/// The admin token in the environment or in the file that it names.
#[pyfunction]
pub(crate) fn admin_token() -> PyResult<Option<String>> {
    paramhub_cli::admin_token_from_environment().map_err(PyValueError::new_err)
}

/// A secret of 32 bytes for one use, which is named by the label, from another secret.
#[pyfunction]
pub(crate) fn derive_secret<'py>(py: Python<'py>, secret: [u8; 32], label: &str) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &StreamSecret(secret).derive(label).0)
}

/// Encrypts and authenticates `text` under a secret and a label: a random nonce, then AES-256-GCM's
/// ciphertext and tag.
#[pyfunction]
pub(crate) fn seal<'py>(
    py: Python<'py>,
    secret: [u8; 32],
    label: &str,
    text: &str,
) -> PyResult<Bound<'py, PyBytes>> {
    let mut nonce = [0; NONCE_LEN];
    SystemRandom::new()
        .fill(&mut nonce)
        .map_err(|_| PyOSError::new_err("the system gives no random numbers"))?;
    let mut sealed = text.as_bytes().to_vec();
    key(&secret, label)
        .seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::empty(), &mut sealed)
        .map_err(|_| PyValueError::new_err("the text is too long"))?;
    Ok(PyBytes::new(py, &[&nonce, sealed.as_slice()].concat()))
}

/// The text that [`seal`] has encrypted; `None` if secret or label are others, or the bytes were changed.
#[pyfunction]
pub(crate) fn open_sealed(secret: [u8; 32], label: &str, sealed: &[u8]) -> Option<String> {
    let (nonce, sealed) = sealed.split_first_chunk::<NONCE_LEN>()?;
    let mut opened = sealed.to_vec();
    let nonce = Nonce::assume_unique_for_key(*nonce);
    let text = key(&secret, label).open_in_place(nonce, Aad::empty(), &mut opened).ok()?;
    String::from_utf8(text.to_vec()).ok()
}

/// Each label has a key of its own, so random nonces cannot meet.
fn key(secret: &[u8; 32], label: &str) -> LessSafeKey {
    let key = StreamSecret(*secret).derive(&format!("sealed {label}"));
    LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &key.0).expect("a key of 32 bytes"))
}
