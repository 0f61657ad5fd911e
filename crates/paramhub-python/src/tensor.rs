use std::sync::Arc;

use paramhub_core::codec::Dtype;
use paramhub_core::key::Key;
use paramhub_transport::StableBytes;
use pyo3::prelude::*;

use crate::memory::export;

/// Memory of a job's that is exchanged where it lies; see `Job.gradient_tensor` and its like.
#[pyclass(frozen, module = "paramhub._native")]
pub(crate) struct Tensor {
    memory: Arc<Place>,
    dtype: Dtype,
    shape: Vec<u64>,
}

enum Place {
    Own(paramhub_worker::Tensor),
    /// Read by all workers of the host, and by Python at its own risk: the package's callers know when.
    Shared(paramhub_worker::SharedTensor),
}

impl Place {
    fn address(&self) -> usize {
        match self {
            Place::Own(tensor) => tensor.as_bytes().as_ptr() as usize,
            // SAFETY: of the slice only the address is used; whoever reads there waits for the answer to its last request first.
            Place::Shared(tensor) => unsafe { tensor.bytes() }.as_ptr() as usize,
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Place::Own(tensor) => tensor.as_bytes().len(),
            Place::Shared(tensor) => tensor.len(),
        }
    }
}

impl Tensor {
    /// A key's.
    pub(crate) fn of_key(memory: paramhub_worker::Tensor, key: &Key) -> Self {
        Tensor { memory: Arc::new(Place::Own(memory)), dtype: key.dtype, shape: key.shape.clone() }
    }

    /// Of several keys of one type, as a vector.
    pub(crate) fn flat(memory: paramhub_worker::Tensor, dtype: Dtype) -> Self {
        Self::vector(Place::Own(memory), dtype)
    }

    /// As [`flat`](Self::flat), shared with others.
    pub(crate) fn shared(memory: paramhub_worker::SharedTensor, dtype: Dtype) -> Self {
        Self::vector(Place::Shared(memory), dtype)
    }

    fn vector(place: Place, dtype: Dtype) -> Self {
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

    /// The memory, for `from_dlpack` of any library. It is given back to the job when nobody has it any more. With
    /// `max_version` the caller says which DLPack it knows; other options are no use here.
    #[pyo3(signature = (*, max_version = None, **_options))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        max_version: Option<(u32, u32)>,
        _options: Option<&Bound<'_, pyo3::types::PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        let keeper = Box::new(Arc::clone(&self.memory));
        export(py, self.address(), self.dtype, &self.shape, keeper, versioned)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (1, 0)
    }
}
