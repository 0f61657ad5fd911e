//! The workers' final parameters, as files any tool can read.

use std::path::{Path, PathBuf};

use anyhow::Context;
use paramhub::Key;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

/// The file of one rank.
pub(super) fn file_of(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank}.safetensors"))
}

/// Writes one tensor for each key.
pub(super) fn save(path: &Path, keys: &[Key], parameters: &[Vec<f32>]) -> anyhow::Result<()> {
    let bytes: Vec<Vec<u8>> = parameters
        .iter()
        .map(|values| values.iter().flat_map(|value| value.to_le_bytes()).collect())
        .collect();
    let mut tensors = Vec::new();
    for (key, bytes) in keys.iter().zip(&bytes) {
        let shape = key.shape.iter().map(|&extent| extent as usize).collect();
        tensors.push((key.name.as_str(), TensorView::new(Dtype::F32, shape, bytes)?));
    }
    let file = safetensors::serialize(tensors, None)?;
    std::fs::write(path, file).with_context(|| format!("cannot write {}", path.display()))
}

/// The largest difference between the parameters of any of these ranks and those of the first; infinite where only one
/// of the two is a NaN.
pub(super) fn largest_difference(folder: &Path, ranks: &[usize]) -> anyhow::Result<f64> {
    let Some((&first, others)) = ranks.split_first() else { return Ok(0.0) };
    let read = |rank| {
        let path = file_of(folder, rank);
        std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let first = read(first)?;
    let first = SafeTensors::deserialize(&first)?;
    let mut largest = 0.0_f64;
    for &rank in others {
        let other = read(rank)?;
        let other = SafeTensors::deserialize(&other)?;
        for (name, tensor) in first.iter() {
            let differences = values(tensor.data()).zip(values(other.tensor(name)?.data()));
            largest = differences.map(|(a, b)| difference(a, b)).fold(largest, f64::max);
        }
    }
    Ok(largest)
}

fn values(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four bytes")))
}

/// Between two numbers: none between equal bits, infinite where one is a NaN.
pub(super) fn difference(a: f32, b: f32) -> f64 {
    let difference = (f64::from(a) - f64::from(b)).abs();
    match (a.to_bits() == b.to_bits(), difference.is_nan()) {
        (true, _) => 0.0,
        (false, true) => f64::INFINITY,
        (false, false) => difference,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_difference_is_found_and_equal_bits_have_none() {
        let folder = tempfile::tempdir().unwrap();
        let keys = [Key::new("a", [2]), Key::new("b", [1])];
        let write = |rank, a: [f32; 2], b: f32| {
            save(&file_of(folder.path(), rank), &keys, &[a.into(), vec![b]]).unwrap();
        };
        write(0, [1.0, f32::NAN], 3.0);
        write(1, [1.0, f32::NAN], 3.0);
        assert_eq!(largest_difference(folder.path(), &[0, 1]).unwrap(), 0.0);
        write(2, [0.75, f32::NAN], 3.5);
        assert_eq!(largest_difference(folder.path(), &[0, 1, 2]).unwrap(), 0.5);
        write(2, [1.0, 2.0], 3.0);
        assert_eq!(largest_difference(folder.path(), &[0, 2]).unwrap(), f64::INFINITY);
    }
}
