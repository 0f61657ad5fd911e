//! Plain slices of candle's CPU tensors, without copies.

use std::cell::RefCell;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Error, InplaceOp1, Layout, Result, Storage, Tensor};

/// Reads a contiguous f32 tensor in place.
pub(super) fn read<R>(tensor: &Tensor, reader: impl FnOnce(&[f32]) -> R) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        return Err(Error::Msg(format!("expected a tensor on the CPU, found one on {:?}", storage.device())));
    };
    let (start, end) = layout.contiguous_offsets().ok_or_else(not_contiguous)?;
    Ok(reader(&storage.as_slice::<f32>()?[start..end]))
}

/// Changes a contiguous f32 tensor in place. The caller must be the only one that still needs the old values.
pub(super) fn update(tensor: &Tensor, writer: impl FnOnce(&mut [f32])) -> Result<()> {
    update_vec(tensor, |values, start, end| {
        writer(&mut values[start..end]);
        Ok(())
    })
}

/// Lends a whole tensor's memory, which may be exchanged for other memory of the same length.
pub(crate) fn lend<R>(tensor: &Tensor, borrower: impl FnOnce(&mut Vec<f32>) -> R) -> Result<R> {
    let mut result = None;
    update_vec(tensor, |stored, start, end| {
        let expected = stored.len();
        if (start, end) != (0, expected) {
            return Err(not_contiguous());
        }
        result = Some(borrower(stored));
        match stored.len() {
            found if found != expected => {
                stored.resize(expected, f32::NAN);
                Err(Error::Msg(format!("expected {expected} parameters, found {found}")))
            }
            _ => Ok(()),
        }
    })?;
    Ok(result.expect("the borrower ran"))
}

/// Takes a tensor's memory. The tensor must be a fresh result that nobody else has seen.
pub(super) fn into_values(tensor: Tensor) -> Result<Vec<f32>> {
    let mut taken = Vec::new();
    update_vec(&tensor, |stored, start, end| {
        if (start, end) != (0, stored.len()) {
            return Err(not_contiguous());
        }
        taken = std::mem::take(stored);
        Ok(())
    })?;
    Ok(taken)
}

fn update_vec(tensor: &Tensor, writer: impl FnOnce(&mut Vec<f32>, usize, usize) -> Result<()>) -> Result<()> {
    tensor.inplace_op1(&InPlace(RefCell::new(Some(writer))))
}

fn not_contiguous() -> Error {
    Error::Msg("expected a contiguous tensor".into())
}

struct InPlace<F>(RefCell<Option<F>>);

impl<F: FnOnce(&mut Vec<f32>, usize, usize) -> Result<()>> InplaceOp1 for InPlace<F> {
    fn name(&self) -> &'static str {
        "in place"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let CpuStorage::F32(values) = storage else {
            return Err(Error::Msg(format!("expected f32, found {:?}", storage.dtype())));
        };
        let (start, end) = layout.contiguous_offsets().ok_or_else(not_contiguous)?;
        match self.0.borrow_mut().take() {
            Some(writer) => writer(values, start, end),
            None => Ok(()),
        }
    }
}
