use std::sync::Arc;

use paramhub_core::codec::Dtype;
use paramhub_core::key::Key;
use paramhub_transport::StableBytes;
use pyo3::prelude::*;

use crate::memory::export;

/// Memory of a job that is exchanged without a copy; see `Job.gradient_tensor` and the methods like it.
#[pyclass(frozen, module = "paramhub._native")]
pub(crate) struct Tensor {
    memory: Arc<TensorMemory>,
    dtype: Dtype,
    shape: Vec<u64>,
}

enum TensorMemory {
    Own(paramhub_worker::Tensor),
    /// All workers of the host read it. Python may read it only when the hub does not write it; the package's
    /// callers keep to that.
    Shared(paramhub_worker::SharedTensor),
}

impl TensorMemory {
    fn address(&self) -> usize {
        match self {
            TensorMemory::Own(tensor) => tensor.as_bytes().as_ptr() as usize,
            // SAFETY: only the address of the slice is used; code that reads there waits for the answer to
            // its last request first.
            TensorMemory::Shared(tensor) => unsafe { tensor.bytes() }.as_ptr() as usize,
        }
    }

    fn bytes(&self) -> usize {
        match self {
            TensorMemory::Own(tensor) => tensor.as_bytes().len(),
            TensorMemory::Shared(tensor) => tensor.len(),
        }
    }
}

impl Tensor {
    /// The memory of one key.
    pub(crate) fn of_key(memory: paramhub_worker::Tensor, key: &Key) -> Self {
        Tensor { memory: Arc::new(TensorMemory::Own(memory)), dtype: key.dtype, shape: key.shape.clone() }
    }

    /// The memory of several keys of one type, as a vector.
    pub(crate) fn flat(memory: paramhub_worker::Tensor, dtype: Dtype) -> Self {
        Self::vector(TensorMemory::Own(memory), dtype)
    }

    /// Does the same as [`flat`](Self::flat), but shared with other workers.
    pub(crate) fn shared(memory: paramhub_worker::SharedTensor, dtype: Dtype) -> Self {
        Self::vector(TensorMemory::Shared(memory), dtype)
    }

    fn vector(place: TensorMemory, dtype: Dtype) -> Self {
        let shape = vec![(place.bytes() / dtype.bytes()) as u64];
        Tensor { memory: Arc::new(place), dtype, shape }
    }
}

#[pymethods]
impl Tensor {
    #[getter]
    fn address(&self) -> usize {
        self.memory.address()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.memory.bytes()
    }

    /// `f32`, `f16` or `bf16`.
    #[getter]
    fn dtype(&self) -> String {
        self.dtype.to_string()
    }

    #[getter]
    fn shape(&self) -> Vec<u64> {
        self.shape.clone()
    }

    /// The memory, for `from_dlpack` of any library. The job gets it back when the last reference is dropped.
    /// `max_version` is the DLPack version that the caller knows; other options have no effect.
    #[pyo3(signature = (*, max_version = None, **_options))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        max_version: Option<(u32, u32)>,
        _options: Option<&Bound<'_, pyo3::types::PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        let owner = Box::new(Arc::clone(&self.memory));
        export(py, self.address(), self.dtype, &self.shape, owner, versioned)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (1, 0)
    }
}
