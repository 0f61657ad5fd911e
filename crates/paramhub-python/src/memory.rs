//! Memory of other libraries: its address, its elements, and the object that keeps it alive.
//!
//! Two protocols describe it: the buffer protocol (NumPy arrays, bytearrays, `array.array`) and DLPack
//! (torch, JAX, CuPy; the only one with bf16). Nothing is copied.

mod buffer_protocol;
mod dlpack;

use paramhub_core::codec::Dtype;
use paramhub_transport::{ReceiveRegion, SendRegion, StableBytes};
use pyo3::prelude::*;

use crate::errors;

pub(crate) use dlpack::export;

/// Memory that an object lends: contiguous elements of one type, on the host.
#[pyclass(frozen, module = "paramhub._native")]
pub(crate) struct Memory {
    source: MemorySource,
}

enum MemorySource {
    Buffer(buffer_protocol::View),
    DlPack(dlpack::Import),
}

/// The description that both protocols give.
#[derive(Clone, Debug)]
pub(crate) struct Description {
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
}

impl Memory {
    pub(crate) fn description(&self) -> &Description {
        match &self.source {
            MemorySource::Buffer(view) => &view.description,
            MemorySource::DlPack(import) => &import.description,
        }
    }
}

#[pymethods]
impl Memory {
    /// Describes the memory of `tensor`. With `writable` the memory must allow writes.
    #[new]
    #[pyo3(signature = (tensor, writable = false))]
    fn new(tensor: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        if let Some(view) = buffer_protocol::View::of(tensor, writable)? {
            return Ok(Memory { source: MemorySource::Buffer(view) });
        }
        match dlpack::Import::of(tensor)? {
            Some(import) => Ok(Memory { source: MemorySource::DlPack(import) }),
            None => Err(errors::misuse(
                tensor.py(),
                &format!(
                    "a {} lends no memory: pass a tensor or array that has `__dlpack__` or the buffer protocol",
                    tensor.get_type().name()?
                ),
            )),
        }
    }

    /// The address of the first element.
    #[getter]
    fn address(&self) -> usize {
        self.description().address
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.description().bytes
    }

    /// `f32`, `f16` or `bf16`.
    #[getter]
    fn dtype(&self) -> String {
        self.description().dtype.to_string()
    }

    #[getter]
    fn shape(&self) -> Vec<usize> {
        self.description().shape.clone()
    }
}

/// A range of memory and the Python object that keeps it alive.
pub(crate) struct Borrowed {
    address: usize,
    bytes: usize,
    /// Keeps the memory alive. If it is dropped without the GIL, its reference is released when a thread next
    /// holds the GIL.
    _owner: Py<PyAny>,
}

impl Borrowed {
    /// # Safety
    /// `bytes` bytes from `address` on are initialised and stay valid for as long as `owner` lives. Until the
    /// regions made of them are dropped no other code writes them, nor reads them if they are received into.
    /// A null address has no bytes.
    pub(crate) unsafe fn new(owner: Py<PyAny>, address: usize, bytes: usize) -> Self {
        Borrowed { address: if bytes == 0 { 1 } else { address }, bytes, _owner: owner }
    }

    pub(crate) fn into_send(self) -> SendRegion {
        SendRegion::owned(self)
    }

    /// Writes numbers into the range.
    pub(crate) fn write_f32(&mut self, values: &[f32]) -> Result<(), String> {
        if self.bytes != 4 * values.len() {
            return Err(format!("{} numbers do not fit into {} bytes", values.len(), self.bytes));
        }
        for (place, value) in self.as_bytes_mut().chunks_exact_mut(4).zip(values) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        Ok(())
    }

    pub(crate) fn into_receive(self) -> ReceiveRegion {
        ReceiveRegion::owned(self)
    }
}

// SAFETY: address and length never change. The caller of `new` guarantees that the bytes are initialised,
// live as long as the owner that is kept here, and are left alone by other code. Any bytes are valid.
unsafe impl StableBytes for Borrowed {
    fn as_bytes(&self) -> &[u8] {
        // SAFETY: as above; a byte has no alignment, and `new` made the address of no bytes non-null.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.bytes) }
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; `&mut self` makes this the only slice.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.bytes) }
    }
}
