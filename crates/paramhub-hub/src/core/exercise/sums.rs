//! What the sums of a chunk must be.

use std::collections::VecDeque;

use crate::core::stepped_hub::floats;

/// The versions of a chunk that a worker may still receive, computed from what workers have pushed.
pub(super) struct ChunkSums {
    chunk: u32,
    /// The first of them.
    oldest: u32,
    versions: VecDeque<Vec<f32>>,
}

impl ChunkSums {
    /// A chunk of zeros.
    pub(super) fn new(chunk: u32, elements: u32) -> ChunkSums {
        ChunkSums { chunk, oldest: 0, versions: [vec![0.0; elements as usize]].into() }
    }

    /// Adds what a worker contributes to a step.
    pub(super) fn add(&mut self, step: u32, values: &[f32]) {
        // The step makes the next version.
        let index = (step + 1 - self.oldest) as usize;
        if index == self.versions.len() {
            self.versions.push_back(vec![0.0; values.len()]);
        }
        self.versions[index].iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
    }

    /// Compares what a worker has received to the bit.
    pub(super) fn check(&self, version: u32, payload: &[u8]) {
        let index = version.checked_sub(self.oldest).expect("nobody has asked for it");
        let expected = self.versions.get(index as usize).expect("nobody has contributed to it");
        // The message would take long to make for each.
        if payload != bytemuck::cast_slice::<f32, u8>(expected) {
            let (chunk, found) = (self.chunk, floats(payload));
            panic!("chunk {chunk} of version {version} must be {expected:?}, and is {found:?}");
        }
    }

    /// Frees versions that no worker can receive any more.
    pub(super) fn forget_before(&mut self, version: u32) {
        while self.oldest < version {
            self.versions.pop_front();
            self.oldest += 1;
        }
    }
}
