//! Memory with a variable, which operations of the engine read and mutate.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use paramhub_core::codec::Dtype;
use paramhub_kernels::{convert, sum};
use paramhub_transport::ReceiveRegion;

use crate::engine::{Engine, Failure, Variable};

/// Numbers of one type, and the engine's variable for them: MXNet's NDArray, without a shape. It is a handle;
/// clones are the same array.
///
/// Code that reads or writes the memory outside of an operation waits for the variable first. As long as all
/// code keeps to that, no thread waits for the lock around the memory.
#[derive(Clone)]
pub struct Array {
    inner: Arc<Inner>,
}

struct Inner {
    memory: Mutex<ReceiveRegion>,
    dtype: Dtype,
    elements: usize,
    variable: Variable,
}

impl Array {
    /// An array of these numbers.
    pub fn new(engine: &Engine, values: Vec<f32>) -> Array {
        Array::over(engine, ReceiveRegion::owned(values), Dtype::F32)
    }

    /// An array over memory of any owner, whose length is a whole number of elements; bytes beyond them are
    /// left alone.
    pub fn over(engine: &Engine, memory: ReceiveRegion, dtype: Dtype) -> Array {
        let elements = memory.bytes().len() / dtype.bytes();
        let inner = Inner { memory: Mutex::new(memory), dtype, elements, variable: engine.variable() };
        Array { inner: Arc::new(inner) }
    }

    /// The array's variable in the engine.
    pub fn variable(&self) -> &Variable {
        &self.inner.variable
    }

    /// The type of its numbers.
    pub fn dtype(&self) -> Dtype {
        self.inner.dtype
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.inner.elements
    }

    /// The number of bytes.
    pub fn bytes(&self) -> usize {
        self.inner.elements * self.inner.dtype.bytes()
    }

    /// Reads the numbers as they lie in memory; in an operation that reads or mutates the variable, or after
    /// a wait for it.
    pub fn read<R>(&self, look: impl FnOnce(&[u8]) -> R) -> R {
        look(&self.lock().bytes()[..self.bytes()])
    }

    /// Changes the numbers as they lie in memory; in an operation that mutates the variable, or after a wait
    /// for it.
    pub fn write<R>(&self, change: impl FnOnce(&mut [u8]) -> R) -> R {
        change(&mut self.lock().bytes_mut()[..self.bytes()])
    }

    /// Replaces the array's memory by these numbers; in an operation that mutates the variable, or after a
    /// wait for it.
    ///
    /// # Panics
    /// If there is another number of them, or the array is not f32.
    pub fn replace(&self, values: Vec<f32>) {
        assert_eq!(
            (self.dtype(), self.elements()),
            (Dtype::F32, values.len()),
            "other numbers than the array's"
        );
        *self.lock() = ReceiveRegion::owned(values);
    }

    /// The numbers, once all operations that mutate the array have ended.
    ///
    /// # Errors
    /// The failure that the array depends on.
    pub fn to_vec(&self, engine: &Engine) -> Result<Vec<f32>, Arc<Failure>> {
        engine.wait_for_var(self.variable())?;
        let mut values = vec![0.0; self.elements()];
        self.read(|bytes| convert::decode(bytes, &mut values, self.dtype().codec()));
        Ok(values)
    }

    /// Writes the sum of `values` here; in an operation that reads `values` and mutates this array.
    pub(super) fn gather(&self, values: &[Array]) {
        let codec = self.dtype().codec();
        self.write(|buffer| match values {
            [one] => one.read(|bytes| buffer.copy_from_slice(bytes)),
            several => {
                let mut total = vec![0.0; self.elements()];
                for value in several {
                    value.read(|bytes| sum::add(&mut total, bytes, codec));
                }
                convert::encode(&total, buffer, codec);
            }
        });
    }

    /// Copies the numbers to `outs`; in an operation that reads this array and mutates `outs`.
    pub(super) fn copy_to(&self, outs: &[Array]) {
        for out in outs {
            out.write(|out| self.read(|bytes| out.copy_from_slice(bytes)));
        }
    }

    /// Exchanges the memory for other memory of the same length, or none for a while; in an operation that
    /// mutates the variable.
    pub(super) fn swap(&self, memory: ReceiveRegion) -> ReceiveRegion {
        std::mem::replace(&mut *self.lock(), memory)
    }

    fn lock(&self) -> MutexGuard<'_, ReceiveRegion> {
        self.inner.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Array({} {})", self.elements(), self.dtype())
    }
}
