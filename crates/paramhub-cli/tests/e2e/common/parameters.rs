//! The final parameters of trainings, and how far apart they may be.

/// The parameters that `paramhub train --save` wrote, tensor after tensor in the order of their names.
pub fn parameters(file: &[u8]) -> Vec<f32> {
    let tensors = safetensors::SafeTensors::deserialize(file).unwrap();
    let mut names = tensors.names();
    names.sort();
    let values = names.iter().flat_map(|name| tensors.tensor(name).unwrap().data().to_vec());
    values.collect::<Vec<u8>>().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

/// The largest difference of two parameters.
pub fn furthest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Asserts that two trainings differ by no more than the order in which they summed.
///
/// Another order changes the last bits of a sum. A ReLU or a maximum can then choose another side, which
/// changes a gradient by much more, so that no fixed bound holds for every network and processor: inception
/// has differed by anything from 6e-8 to 4e-4 after 22 steps, by seed. A contribution that is lost or counted
/// twice changes a large part of the distance that the parameters have moved from `initial`.
pub fn assert_differ_by_rounding(found: &[f32], expected: &[f32], initial: &[f32], what: &str) {
    let (moved, apart) = (furthest(expected, initial), furthest(found, expected));
    assert!(moved > 1e-2, "{what}: nothing was learnt");
    assert!(apart < moved / 20.0, "{what}: {apart} apart, where the training moved parameters by {moved}");
}
