//! A communicator that compares what ranks call before they do it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use paramhub_core::codec::Dtype;

use super::Communicator;
use super::error::CommunicatorError;

/// Bytes of what a rank tells of a call.
const CALL_BYTES: usize = 128;
/// Of these, what tells how much of the rest there is, and the name's digest.
const NAME: std::ops::Range<usize> = 40..CALL_BYTES;

/// Compares, before every collective, number, kind, name, length, type and root of the call over all ranks. The first mismatch
/// fails the call at every rank, with an error that names both sides, and all calls after it: nobody waits for ever and nothing
/// is summed that does not belong together.
///
/// It costs an allgather of 128 bytes a rank and call, and calls of several threads go one after the other. For finding out, not
/// for every day.
pub struct Checking<C> {
    inner: C,
    /// Calls so far, and what they have failed with.
    calls: Mutex<(u64, Option<CommunicatorError>)>,
}

/// A call as all ranks must make it.
#[derive(Clone, Copy)]
struct Call<'a> {
    kind: &'static str,
    name: &'a str,
    bytes: usize,
    dtype: Option<Dtype>,
    root: Option<u32>,
}

/// By their numbers in what ranks tell.
const KINDS: [&str; 6] = ["allreduce", "broadcast", "reduce-scatter", "allgather", "barrier", "duplicate"];

impl<C: Communicator> Checking<C> {
    /// Checks all calls of `inner`, which no rank may have used by itself.
    pub fn new(inner: C) -> Self {
        Checking { inner, calls: Mutex::new((0, None)) }
    }

    /// Makes a call if all ranks make it.
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
        let mut told = all.chunks(CALL_BYTES);
        let zeros = told.next().expect("there is a rank 0");
        match (1..).zip(told).find(|(_, theirs)| *theirs != zeros) {
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
        let mut told = [0; CALL_BYTES];
        told[..8].copy_from_slice(&sequence.to_le_bytes());
        told[8..16].copy_from_slice(&(self.bytes as u64).to_le_bytes());
        told[16..20].copy_from_slice(&self.root.map_or(u32::MAX, |root| root).to_le_bytes());
        told[20] = KINDS.iter().position(|kind| *kind == self.kind).expect("one of them") as u8;
        told[21] = self.dtype.map_or(0, |dtype| dtype.codec() as u8 + 1);
        let shown = self.name.floor_char_boundary(NAME.len());
        told[22] = shown as u8;
        // Of names that begin alike.
        told[24..40].copy_from_slice(&blake3::hash(self.name.as_bytes()).as_bytes()[..16]);
        told[NAME][..shown].copy_from_slice(&self.name.as_bytes()[..shown]);
        told
    }
}

fn u64_at(told: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(told[at..at + 8].try_into().expect("eight bytes"))
}

/// For people.
fn describe(told: &[u8]) -> String {
    let kind = KINDS.get(usize::from(told[20])).unwrap_or(&"no collective");
    let name = String::from_utf8_lossy(&told[NAME][..usize::from(told[22]).min(NAME.len())]);
    let dtype =
        [Dtype::F32, Dtype::F16, Dtype::BF16].into_iter().find(|dtype| dtype.codec() as u8 + 1 == told[21]);
    let root = u32::from_le_bytes(told[16..20].try_into().expect("four bytes"));
    let mut text = kind.to_string();
    if !name.is_empty() {
        text += &format!(" of `{name}`");
    }
    let bytes = u64_at(told, 8);
    match dtype {
        Some(dtype) => text += &format!(", {bytes} bytes of {dtype}"),
        None if bytes > 0 => text += &format!(", {bytes} bytes"),
        None => {}
    }
    if root != u32::MAX {
        text += &format!(" from rank {root}");
    }
    // Other calls before it: the counts tell.
    text + &format!(" (its call {})", u64_at(told, 0))
}

impl<C: Communicator> Communicator for Checking<C> {
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn size(&self) -> u32 {
        self.inner.size()
    }

    fn transport(&self) -> &'static str {
        self.inner.transport()
    }

    fn allreduce(&self, name: &str, values: &mut [u8], dtype: Dtype) -> Result<(), CommunicatorError> {
        let call = Call { kind: "allreduce", name, bytes: values.len(), dtype: Some(dtype), root: None };
        self.checked(&call, |inner| inner.allreduce(name, values, dtype))
    }

    fn broadcast(&self, name: &str, bytes: &mut [u8], root: u32) -> Result<(), CommunicatorError> {
        let call = Call { kind: "broadcast", name, bytes: bytes.len(), dtype: None, root: Some(root) };
        self.checked(&call, |inner| inner.broadcast(name, bytes, root))
    }

    fn reduce_scatter(
        &self,
        name: &str,
        values: &[u8],
        sum: &mut [u8],
        dtype: Dtype,
    ) -> Result<(), CommunicatorError> {
        let call = Call { kind: "reduce-scatter", name, bytes: values.len(), dtype: Some(dtype), root: None };
        self.checked(&call, |inner| inner.reduce_scatter(name, values, sum, dtype))
    }

    fn allgather(&self, name: &str, block: &[u8], all: &mut [u8]) -> Result<(), CommunicatorError> {
        let call = Call { kind: "allgather", name, bytes: block.len(), dtype: None, root: None };
        self.checked(&call, |inner| inner.allgather(name, block, all))
    }

    fn barrier(&self) -> Result<(), CommunicatorError> {
        let call = Call { kind: "barrier", name: "", bytes: 0, dtype: None, root: None };
        self.checked(&call, Communicator::barrier)
    }

    fn duplicate(&self) -> Result<Box<dyn Communicator>, CommunicatorError> {
        let call = Call { kind: "duplicate", name: "", bytes: 0, dtype: None, root: None };
        let duplicate = self.checked(&call, Communicator::duplicate)?;
        Ok(Box::new(Checking::new(duplicate)))
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
