//! A communicator that compares the ranks' calls before it makes them.

use std::sync::{Mutex, MutexGuard, PoisonError};

use paramhub_core::codec::Dtype;

use super::Communicator;
use super::collective::Collective;
use super::error::CommunicatorError;

/// Bytes in which a rank describes a call.
const CALL_BYTES: usize = 128;
/// The range of the name; the length of the name and its digest come before.
const NAME: std::ops::Range<usize> = 40..CALL_BYTES;

/// Before every collective it compares the number, kind, name, length, type and root of the call over all
/// ranks. The first mismatch fails the call at every rank, with an error that names both sides, and all calls
/// after it: no rank waits for ever, and no values are summed that do not belong together.
///
/// It costs an allgather of 128 bytes a rank and call, and serialises the calls of several threads. It is for
/// debugging, not for production.
pub struct CheckedCommunicator<C> {
    inner: C,
    /// The number of calls so far, and the error that they have failed with.
    calls: Mutex<(u64, Option<CommunicatorError>)>,
}

/// A call, in all that must be the same at all ranks.
#[derive(Clone, Copy)]
struct Call<'a> {
    kind: &'static str,
    name: &'a str,
    bytes: usize,
    dtype: Option<Dtype>,
    root: Option<u32>,
}

impl<'a> Call<'a> {
    fn new(name: &'a str, collective: &Collective<'_>) -> Self {
        let (bytes, dtype, root) = (collective.bytes(), collective.dtype(), collective.root());
        Call { kind: collective.kind(), name, bytes, dtype, root }
    }
}

/// The kinds of calls; a call's description has the position of its kind.
const KINDS: [&str; 6] = ["allreduce", "broadcast", "reduce-scatter", "allgather", "barrier", "duplicate"];

impl<C: Communicator> CheckedCommunicator<C> {
    /// Checks all calls of `inner`, which no rank may have called directly.
    pub fn new(inner: C) -> Self {
        CheckedCommunicator { inner, calls: Mutex::new((0, None)) }
    }

    /// Makes a call if all ranks make the same.
    fn checked<T>(
        &self,
        call: &Call<'_>,
        make: impl FnOnce(&C) -> Result<T, CommunicatorError>,
    ) -> Result<T, CommunicatorError> {
        let mut calls = self.lock();
        if let Some(failure) = &calls.1 {
            return Err(failure.clone());
        }
        let sequence = calls.0;
        calls.0 += 1;
        let made = self.compare(sequence, call).and_then(|()| make(&self.inner));
        made.inspect_err(|error| calls.1 = Some(error.clone()))
    }

    fn compare(&self, sequence: u64, call: &Call<'_>) -> Result<(), CommunicatorError> {
        let own = call.encode(sequence);
        let mut all = vec![0; CALL_BYTES * self.inner.size() as usize];
        self.inner.allgather("calls", &own, &mut all)?;
        let mut calls = all.chunks(CALL_BYTES);
        let zeros = calls.next().expect("there is a rank 0");
        match (1..).zip(calls).find(|(_, theirs)| *theirs != zeros) {
            None => Ok(()),
            Some((rank, theirs)) => Err(CommunicatorError::Mismatch {
                rank,
                sequence: u64_at(zeros, 0),
                theirs: describe(theirs),
                zeros: describe(zeros),
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, (u64, Option<CommunicatorError>)> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Call<'_> {
    fn encode(&self, sequence: u64) -> [u8; CALL_BYTES] {
        let mut call = [0; CALL_BYTES];
        call[..8].copy_from_slice(&sequence.to_le_bytes());
        call[8..16].copy_from_slice(&(self.bytes as u64).to_le_bytes());
        call[16..20].copy_from_slice(&self.root.map_or(u32::MAX, |root| root).to_le_bytes());
        call[20] = KINDS.iter().position(|kind| *kind == self.kind).expect("one of them") as u8;
        call[21] = self.dtype.map_or(0, |dtype| dtype.codec().number() + 1);
        let shown = self.name.floor_char_boundary(NAME.len());
        call[22] = shown as u8;
        // The digest distinguishes names with the same beginning.
        call[24..40].copy_from_slice(&blake3::hash(self.name.as_bytes()).as_bytes()[..16]);
        call[NAME][..shown].copy_from_slice(&self.name.as_bytes()[..shown]);
        call
    }
}

fn u64_at(call: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(call[at..at + 8].try_into().expect("eight bytes"))
}

/// Describes a call for people.
fn describe(call: &[u8]) -> String {
    let kind = KINDS.get(usize::from(call[20])).unwrap_or(&"no collective");
    let name = String::from_utf8_lossy(&call[NAME][..usize::from(call[22]).min(NAME.len())]);
    let dtype = [Dtype::F32, Dtype::F16, Dtype::BF16]
        .into_iter()
        .find(|dtype| dtype.codec().number() + 1 == call[21]);
    let root = u32::from_le_bytes(call[16..20].try_into().expect("four bytes"));
    let mut text = kind.to_string();
    if !name.is_empty() {
        text += &format!(" of `{name}`");
    }
    let bytes = u64_at(call, 8);
    match dtype {
        Some(dtype) => text += &format!(", {bytes} bytes of {dtype}"),
        None if bytes > 0 => text += &format!(", {bytes} bytes"),
        None => {}
    }
    if root != u32::MAX {
        text += &format!(" from rank {root}");
    }
    // The ranks' counts show whether they made different calls before.
    text + &format!(" (its call {})", u64_at(call, 0))
}

impl<C: Communicator> Communicator for CheckedCommunicator<C> {
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn size(&self) -> u32 {
        self.inner.size()
    }

    fn transport(&self) -> &'static str {
        self.inner.transport()
    }

    fn call(&self, name: &str, collective: Collective<'_>) -> Result<(), CommunicatorError> {
        self.checked(&Call::new(name, &collective), |inner| inner.call(name, collective))
    }

    fn duplicate(&self) -> Result<Box<dyn Communicator>, CommunicatorError> {
        let call = Call { kind: "duplicate", name: "", bytes: 0, dtype: None, root: None };
        let duplicate = self.checked(&call, Communicator::duplicate)?;
        Ok(Box::new(CheckedCommunicator::new(duplicate)))
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn leave(&self) -> Result<(), CommunicatorError> {
        self.inner.leave()
    }

    fn failure(&self) -> Option<CommunicatorError> {
        self.inner.failure()
    }

    fn check_threads(&self) -> Result<(), CommunicatorError> {
        self.inner.check_threads()
    }
}
