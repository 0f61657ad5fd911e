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

    /// The memory, for `from_dlpack` of any library. It is given back to the job when nobody has it any more.
    #[pyo3(signature = (**_options))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        _options: Option<&Bound<'_, pyo3::types::PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        export(py, self.address(), self.key.dtype, &self.key.shape, Box::new(Arc::clone(&self.memory)))
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (1, 0)
    }
}
