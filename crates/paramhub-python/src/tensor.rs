use std::sync::Arc;

use paramhub_core::key::Key;
use paramhub_transport::StableBytes;
use pyo3::prelude::*;

use crate::memory::export;

/// Memory of a job's that is exchanged where it lies; see `Job.gradient_tensor` and `Job.parameter_tensor`.
#[pyclass(frozen, module = "paramhub._native")]
pub(crate) struct Tensor {
    memory: Arc<paramhub_worker::Tensor>,
    key: Key,
}

impl Tensor {
    pub(crate) fn new(memory: paramhub_worker::Tensor, key: Key) -> Self {
        Tensor { memory: Arc::new(memory), key }
    }
}

#[pymethods]
impl Tensor {
    #[getter]
    fn address(&self) -> usize {
        self.memory.as_bytes().as_ptr() as usize
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.memory.as_bytes().len()
    }

    /// `f32`, `f16` or `bf16`.
    #[getter]
    fn dtype(&self) -> String {
        self.key.dtype.to_string()
    }

    #[getter]
    fn shape(&self) -> Vec<u64> {
        self.key.shape.clone()
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
        export(py, self.address(), self.key.dtype, &self.key.shape, keeper, versioned)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (1, 0)
    }
}
