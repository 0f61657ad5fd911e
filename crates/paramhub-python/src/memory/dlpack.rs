//! DLPack: its structures as in dlpack.h 0.8, which every version since still reads and exports; and those of
//! 1.0 for consumers that ask for them, whose memory NumPy may write.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use paramhub_core::codec::Dtype;
use pyo3::exceptions::PyException;
use pyo3::ffi;
use pyo3::prelude::*;

use super::Description;
use crate::errors;

#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct ManagedTensor {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedTensor)>,
}

/// DLPack 1.0's structure: it has a version, so that others can follow, and flags, of which we set none:
/// consumers may write the memory.
#[repr(C)]
struct VersionedTensor {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut VersionedTensor)>,
    flags: u64,
    tensor: DlTensor,
}

const CPU: i32 = 1;
const PINNED_BY_CUDA: i32 = 3;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
const FRESH: &CStr = c"dltensor";
const USED: &CStr = c"used_dltensor";
const FRESH_VERSIONED: &CStr = c"dltensor_versioned";

/// A tensor taken over from another library; its drop gives the tensor back.
pub(super) struct Import {
    managed: NonNull<ManagedTensor>,
    pub(super) description: Description,
}

// SAFETY: this value owns the tensor on any thread, and gives it back with the GIL held.
unsafe impl Send for Import {}
// SAFETY: shared references reach `description` alone.
unsafe impl Sync for Import {}

impl Import {
    /// The memory of `object`, or `None` if it has no `__dlpack__`.
    pub(super) fn of(object: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        let py = object.py();
        let Some(method) = object.getattr_opt("__dlpack__")? else { return Ok(None) };
        let capsule = method.call0().map_err(|error| refused(py, error))?;
        // SAFETY: the object is alive and the GIL is held; for a wrong type or name the call returns null and
        // raises.
        let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), FRESH.as_ptr()) };
        let Some(managed) = NonNull::new(pointer.cast::<ManagedTensor>()) else {
            return Err(PyErr::fetch(py));
        };
        // SAFETY: the capsule has this name; renaming it marks the tensor as taken over.
        if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), USED.as_ptr()) } != 0 {
            return Err(PyErr::fetch(py));
        }
        // SAFETY: a capsule called `dltensor` points to this structure, by DLPack's convention.
        let tensor = unsafe { &managed.as_ref().tensor };
        let described = describe(tensor);
        let empty = Description { address: 0, bytes: 0, dtype: Dtype::F32, shape: Vec::new() };
        let import = Import { managed, description: described.as_ref().map_or(empty, Clone::clone) };
        described.map_err(|reason| errors::misuse(py, &reason))?;
        Ok(Some(import))
    }
}

/// The exception for a tensor that its library does not lend, for example because it takes part in computing
/// a gradient. Each library, and each version of it, raises an exception of its own, which becomes the cause.
fn refused(py: Python<'_>, error: PyErr) -> PyErr {
    if !error.is_instance_of::<PyException>(py) {
        return error;
    }
    let raised = errors::misuse(py, &format!("the tensor lends no memory: {}", error.value(py)));
    raised.set_cause(py, Some(error));
    raised
}

fn describe(tensor: &DlTensor) -> Result<Description, String> {
    if !matches!(tensor.device.kind, CPU | PINNED_BY_CUDA) {
        return Err(
            "the tensor is on a device: move it to the host, or use paramhub.torch, which does".into()
        );
    }
    let DataType { code, bits, lanes } = tensor.dtype;
    let dtype = match (code, bits, lanes) {
        (FLOAT, 32, 1) => Dtype::F32,
        (FLOAT, 16, 1) => Dtype::F16,
        (BFLOAT, 16, 1) => Dtype::BF16,
        _ => {
            return Err(format!(
                "elements of DLPack type {code} with {bits} bits cannot be exchanged: use f32, f16 or bf16"
            ));
        }
    };
    let dimensions = tensor.ndim as usize;
    let extents = |pointer: *mut i64| match dimensions {
        0 => &[][..],
        // SAFETY: DLPack has one extent and one stride a dimension, alive as long as the tensor.
        _ => unsafe { std::slice::from_raw_parts(pointer, dimensions) },
    };
    let shape: Vec<usize> = extents(tensor.shape).iter().map(|&extent| extent as usize).collect();
    if !tensor.strides.is_null() && !is_contiguous(&shape, extents(tensor.strides)) {
        return Err("the tensor is not contiguous: call .contiguous() on it first".into());
    }
    let bytes = shape.iter().product::<usize>() * dtype.bytes();
    let address = tensor.data as usize + tensor.byte_offset as usize;
    Ok(Description { address, bytes, dtype, shape })
}

fn is_contiguous(shape: &[usize], strides: &[i64]) -> bool {
    let mut expected = 1;
    for (&extent, &stride) in shape.iter().zip(strides).rev() {
        if extent > 1 && stride != expected {
            return false;
        }
        expected *= extent as i64;
    }
    true
}

impl Drop for Import {
    fn drop(&mut self) {
        // SAFETY: alive until its deleter has run, which is below.
        let Some(deleter) = (unsafe { self.managed.as_ref().deleter }) else { return };
        // Without an interpreter there is no library left to give it back to.
        // SAFETY: the deleter is called once, with the GIL held, as its maker expects.
        let _ = Python::try_attach(|_| unsafe { deleter(self.managed.as_ptr()) });
    }
}

/// An exported tensor, with the owners of its memory and its extents.
struct Exported<M> {
    managed: M,
    _extents: Vec<i64>,
    _owner: Box<dyn Send + Sync>,
}

/// A DLPack capsule over memory that lives as long as `owner`: row-major elements of `dtype` with the
/// extents `shape`. `versioned` chooses DLPack 1.0's structure.
pub(crate) fn export(
    py: Python<'_>,
    address: usize,
    dtype: Dtype,
    shape: &[u64],
    owner: Box<dyn Send + Sync>,
    versioned: bool,
) -> PyResult<Py<PyAny>> {
    let (code, bits) = match dtype {
        Dtype::F32 => (FLOAT, 32),
        Dtype::F16 => (FLOAT, 16),
        Dtype::BF16 => (BFLOAT, 16),
    };
    let mut extents: Vec<i64> = shape.iter().map(|&extent| extent as i64).collect();
    let mut stride = 1;
    let mut strides: Vec<i64> = extents
        .iter()
        .rev()
        .map(|&extent| {
            let this = stride;
            stride *= extent;
            this
        })
        .collect();
    strides.reverse();
    extents.append(&mut strides);
    let extents_at = extents.as_mut_ptr();
    let tensor = DlTensor {
        data: address as *mut c_void,
        device: Device { kind: CPU, id: 0 },
        ndim: shape.len() as i32,
        dtype: DataType { code, bits, lanes: 1 },
        // The extents stay in place when the vector moves into its box.
        shape: extents_at,
        strides: extents_at.wrapping_add(shape.len()),
        byte_offset: 0,
    };
    let context = std::ptr::null_mut();
    if versioned {
        let deleter = Some(give_back_versioned as unsafe extern "C" fn(_));
        let managed = VersionedTensor { major: 1, minor: 0, context, deleter, flags: 0, tensor };
        let exported = Box::into_raw(Box::new(Exported { managed, _extents: extents, _owner: owner }));
        // SAFETY: just allocated, so there is no other reference.
        let managed = unsafe { &mut (*exported).managed };
        managed.context = exported.cast();
        encapsulate(py, std::ptr::from_mut(managed).cast(), FRESH_VERSIONED, drop_unused_versioned)
    } else {
        let managed = ManagedTensor { tensor, context, deleter: Some(give_back) };
        let exported = Box::into_raw(Box::new(Exported { managed, _extents: extents, _owner: owner }));
        // SAFETY: just allocated, so there is no other reference.
        let managed = unsafe { &mut (*exported).managed };
        managed.context = exported.cast();
        encapsulate(py, std::ptr::from_mut(managed).cast(), FRESH, drop_unused)
    }
}

fn encapsulate(
    py: Python<'_>,
    managed: *mut c_void,
    name: &'static CStr,
    destructor: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Py<PyAny>> {
    // SAFETY: the GIL is held, and the name lives for ever.
    let capsule = unsafe { ffi::PyCapsule_New(managed, name.as_ptr(), Some(destructor)) };
    // SAFETY: a new reference, or null with the exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }.map(Bound::unbind)
}

/// The deleter, which the consumer calls when it no longer needs the tensor.
unsafe extern "C" fn give_back(managed: *mut ManagedTensor) {
    // SAFETY: alive until the box is dropped below.
    let exported = unsafe { (*managed).context }.cast::<Exported<ManagedTensor>>();
    // SAFETY: `export` put the box's own address there, and a deleter is called once.
    drop(unsafe { Box::from_raw(exported) });
}

/// See [`give_back`].
unsafe extern "C" fn give_back_versioned(managed: *mut VersionedTensor) {
    // SAFETY: alive until the box is dropped below.
    let exported = unsafe { (*managed).context }.cast::<Exported<VersionedTensor>>();
    // SAFETY: `export` put the box's own address there, and a deleter is called once.
    drop(unsafe { Box::from_raw(exported) });
}

/// The destructor of a capsule: deletes the tensor, too, if no consumer took it.
unsafe extern "C" fn drop_unused(capsule: *mut ffi::PyObject) {
    // SAFETY: called by Python with the capsule it destroys.
    if let Some(managed) = unsafe { unused(capsule, FRESH) } {
        // SAFETY: unused, so this is the only call.
        unsafe { give_back(managed.cast()) };
    }
}

/// See [`drop_unused`].
unsafe extern "C" fn drop_unused_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: called by Python with the capsule it destroys.
    if let Some(managed) = unsafe { unused(capsule, FRESH_VERSIONED) } {
        // SAFETY: unused, so this is the only call.
        unsafe { give_back_versioned(managed.cast()) };
    }
}

/// The pointer of a capsule whose tensor no consumer took, by its name.
///
/// # Safety
/// `capsule` is a capsule, and the GIL is held.
unsafe fn unused(capsule: *mut ffi::PyObject, name: &'static CStr) -> Option<*mut c_void> {
    // SAFETY: the caller passes a capsule and holds the GIL; a capsule whose tensor was taken has another
    // name.
    if unsafe { ffi::PyCapsule_IsValid(capsule, name.as_ptr()) } == 0 {
        return None;
    }
    // SAFETY: just found valid under this name.
    Some(unsafe { ffi::PyCapsule_GetPointer(capsule, name.as_ptr()) })
}
