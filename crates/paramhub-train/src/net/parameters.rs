use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use paramhub_kernels::factors::Factors;
use paramhub_kernels::product::{Operand, multiply};

use super::matrix::Matrix;

/// The parameters of one key. Clones share them: the layer computes with them, the exchange changes them.
///
/// They are behind a lock, so that threads can share them. A caller with several threads must order changes
/// and passes itself; then no thread waits for the lock.
#[derive(Clone)]
pub(crate) struct SharedParameters(Arc<RwLock<Vec<f32>>>);

impl SharedParameters {
    pub(super) fn new(values: Vec<f32>) -> SharedParameters {
        SharedParameters(Arc::new(RwLock::new(values)))
    }

    pub(super) fn read(&self) -> RwLockReadGuard<'_, Vec<f32>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `borrower`, which may change or replace the vector. If its length is then wrong, restores it (cut
    /// off, or filled with NaN) and returns the wrong length as the error.
    pub(super) fn lend<R>(&self, borrower: impl FnOnce(&mut Vec<f32>) -> R) -> Result<R, usize> {
        let mut values = self.write();
        let expected = values.len();
        let result = borrower(&mut values);
        match values.len() {
            found if found != expected => {
                values.resize(expected, f32::NAN);
                Err(found)
            }
            _ => Ok(result),
        }
    }

    /// Changes the parameters in place.
    pub(crate) fn update(&self, writer: impl FnOnce(&mut [f32])) {
        writer(&mut self.write());
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<f32>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A linear map: the weight, outputs x inputs, and the bias, one per output.
pub(super) struct LinearMap {
    pub(super) weight: SharedParameters,
    pub(super) bias: SharedParameters,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
}

impl LinearMap {
    /// A map with this weight and a bias of zeros.
    pub(super) fn new(weight: Vec<f32>, outputs: usize) -> LinearMap {
        let inputs = weight.len() / outputs;
        let (weight, bias) = (SharedParameters::new(weight), SharedParameters::new(vec![0.0; outputs]));
        LinearMap { weight, bias, outputs, inputs }
    }

    /// Maps rows x inputs to rows x outputs.
    pub(super) fn apply(&self, inputs: &Matrix) -> Matrix {
        let mut outputs = Matrix::zeros(inputs.rows(), self.outputs);
        let (weight, bias) = (self.weight.read(), self.bias.read());
        let weight = Operand::new(&weight, self.outputs, self.inputs).transposed();
        multiply(inputs.operand(), weight, outputs.values_mut(), self.outputs);
        for row in outputs.values_mut().chunks_exact_mut(self.outputs) {
            row.iter_mut().zip(&*bias).for_each(|(value, bias)| *value += bias);
        }
        outputs
    }

    /// The gradients of weight and bias, from the inputs and the gradient of the outputs, which has one
    /// row for each row of inputs.
    pub(super) fn gradients(&self, inputs: &Matrix, output_gradient: &[f32]) -> [Vec<f32>; 2] {
        let shape = (self.outputs, self.inputs);
        let factors = Factors::new(inputs.rows(), shape, inputs.values(), output_gradient);
        let (mut weight, mut bias) = (vec![0.0; self.outputs * self.inputs], vec![0.0; self.outputs]);
        factors.weight_gradient(0..self.outputs, 0..self.inputs, &mut weight);
        factors.bias_gradient(&mut bias);
        [weight, bias]
    }

    /// The gradient of the inputs.
    pub(super) fn input_gradient(&self, output_gradient: &Matrix) -> Matrix {
        let mut gradient = Matrix::zeros(output_gradient.rows(), self.inputs);
        let weight = self.weight.read();
        let weight = Operand::new(&weight, self.outputs, self.inputs);
        multiply(output_gradient.operand(), weight, gradient.values_mut(), self.inputs);
        gradient
    }
}
