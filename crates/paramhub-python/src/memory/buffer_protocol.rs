//! The buffer protocol, declared here: Python's stable interface has it only since 3.11, but the functions
//! and the structure are the same in 3.10 (CPython's Include/cpython/object.h).

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;

use paramhub_core::codec::Dtype;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi::{Py_ssize_t, PyObject};
use pyo3::prelude::*;

use super::Description;
use crate::errors;

#[repr(C)]
struct PyBuffer {
    buf: *mut c_void,
    obj: *mut PyObject,
    len: Py_ssize_t,
    itemsize: Py_ssize_t,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut Py_ssize_t,
    strides: *mut Py_ssize_t,
    suboffsets: *mut Py_ssize_t,
    internal: *mut c_void,
}

const WRITABLE: c_int = 0x0001;
const FORMAT: c_int = 0x0004;
const ND: c_int = 0x0008;
const STRIDES: c_int = 0x0010;
const C_CONTIGUOUS: c_int = 0x0020 | STRIDES;

unsafe extern "C" {
    fn PyObject_CheckBuffer(object: *mut PyObject) -> c_int;
    fn PyObject_GetBuffer(object: *mut PyObject, view: *mut PyBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut PyBuffer);
}

/// An exported buffer; its drop releases it.
pub(super) struct View {
    /// Boxed: an exporter may keep pointers into it.
    view: Box<PyBuffer>,
    pub(super) description: Description,
}

// SAFETY: this value owns the buffer on any thread, and releases it with the GIL held.
unsafe impl Send for View {}
// SAFETY: shared references reach `description` alone.
unsafe impl Sync for View {}

impl View {
    /// The buffer of `object`, or `None` if it has none.
    pub(super) fn of(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Option<Self>> {
        let py = object.py();
        // SAFETY: the object is alive and the GIL is held.
        if unsafe { PyObject_CheckBuffer(object.as_ptr()) } == 0 {
            return Ok(None);
        }
        let flags = C_CONTIGUOUS | ND | FORMAT | if writable { WRITABLE } else { 0 };
        let mut view = Box::new(MaybeUninit::<PyBuffer>::uninit());
        // SAFETY: the object is alive, the GIL is held, and `view` is a place for the structure.
        if unsafe { PyObject_GetBuffer(object.as_ptr(), view.as_mut_ptr(), flags) } != 0 {
            let cause = PyErr::fetch(py);
            if !cause.is_instance_of::<PyBufferError>(py)
                && !cause.is_instance_of::<pyo3::exceptions::PyValueError>(py)
            {
                return Err(cause);
            }
            let wanted = if writable { "contiguous and writable" } else { "contiguous" };
            return Err(errors::misuse(
                py,
                &format!("a {} lends no {wanted} memory: {}", object.get_type().name()?, cause.value(py)),
            ));
        }
        // SAFETY: PyObject_GetBuffer has filled it, for it returned 0.
        let view: Box<PyBuffer> = unsafe { view.assume_init() };
        let format = match view.format.is_null() {
            true => "B",
            // SAFETY: a C string that lives as long as the buffer.
            false => unsafe { CStr::from_ptr(view.format) }.to_str().unwrap_or("?"),
        };
        let dtype = match format.trim_start_matches(['@', '=', '<']) {
            "f" => Some(Dtype::F32),
            "e" => Some(Dtype::F16),
            _ => None,
        };
        let shape = match view.ndim {
            // A single element has no extents, and `shape` may point to none.
            0 => Vec::new(),
            // SAFETY: with PyBUF_ND the exporter fills `ndim` extents, which live as long as the buffer.
            _ => unsafe { std::slice::from_raw_parts(view.shape, view.ndim as usize) }
                .iter()
                .map(|&extent| extent as usize)
                .collect(),
        };
        let bytes = view.len as usize;
        let refused = format!(
            "elements of buffer format `{format}` cannot be exchanged: use f32 or f16 here, and bf16 through DLPack"
        );
        let description =
            Description { address: view.buf as usize, bytes, dtype: dtype.unwrap_or_default(), shape };
        // From here on the drop of `view` releases the buffer.
        let view = View { view, description };
        if dtype.is_none() {
            return Err(errors::misuse(py, &refused));
        }
        Ok(Some(view))
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // Without an interpreter there is no exporter left to release it to.
        // SAFETY: PyObject_GetBuffer has filled it; it is released once, with the GIL held.
        let _ = Python::try_attach(|_| unsafe { PyBuffer_Release(&mut *self.view) });
    }
}
