//! Memory of other libraries: where it is, what is in it, and who keeps it alive.
//!
//! Two protocols tell: the buffer protocol (NumPy arrays, bytearrays, `array.array`) and DLPack (torch, JAX, CuPy; the only one
//! with bf16). Nothing is copied.

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
    lent: Lent,
}

enum Lent {
    Buffer(buffer_protocol::View),
    DlPack(dlpack::Import),
}

/// What both protocols tell.
#[derive(Clone, Debug)]
pub(crate) struct Description {
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
}

impl Memory {
    pub(crate) fn description(&self) -> &Description {
        match &self.lent {
            Lent::Buffer(view) => &view.description,
            Lent::DlPack(import) => &import.description,
        }
    }
}

#[pymethods]
impl Memory {
    /// Looks into `tensor`. With `writable` it must allow that it is written.
    #[new]
    #[pyo3(signature = (tensor, writable = false))]
    fn new(tensor: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        if let Some(view) = buffer_protocol::View::of(tensor, writable)? {
            return Ok(Memory { lent: Lent::Buffer(view) });
        }
        match dlpack::Import::of(tensor)? {
            Some(import) => Ok(Memory { lent: Lent::DlPack(import) }),
            None => Err(errors::misuse(
                tensor.py(),
                &format!(
                    "a {} lends no memory: pass a tensor or array that has `__dlpack__` or the buffer protocol",
                    tensor.get_type().name()?
                ),
            )),
        }
    }

    /// Where the first element lies.
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

/// A range of memory and the Python object that keeps it.
pub(crate) struct Borrowed {
    address: usize,
    bytes: usize,
    /// Keeps the memory. Dropped without the GIL, its reference is given back when a thread next has it.
    _owner: Py<PyAny>,
}

impl Borrowed {
    /// # Safety
    /// `bytes` bytes from `address` on are initialised and stay valid for as long as `owner` lives; until the regions made of
    /// them are dropped nobody writes them, nor reads them where they are received into. A null address has no bytes.
    pub(crate) unsafe fn new(owner: Py<PyAny>, address: usize, bytes: usize) -> Self {
        Borrowed { address: if bytes == 0 { 1 } else { address }, bytes, _owner: owner }
    }

    pub(crate) fn into_send(self) -> SendRegion {
        SendRegion::owned(self)
    }

    /// Fills it with numbers.
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

// SAFETY: address and length never change; `new`'s caller promised that the bytes are initialised, live as long as the owner
// that is kept here, and are left alone by others. Bytes are valid whatever is written.
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
