//! What the ranks of these jobs contribute, and the parameters that result: all numbers are exact in f32.

use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::settings::{OptimizerChoice, Settings};

pub(in crate::core::shard) const STEPS: u32 = 12;
pub(in crate::core::shard) const CHUNKS: u32 = 5;
const CHUNK_ELEMENTS: usize = 256;
const ELEMENTS: usize = 1200;
pub(in crate::core::shard) const WORKERS: u32 = 4;

/// The learning rate of a step. Rank 0 sends it before it contributes to the step.
pub(in crate::core::shard) fn rate(step: u32) -> f64 {
    [0.5, 2.0, 1.0, 0.25][step as usize / 2 % 4]
}

/// What a rank contributes: with the others' a sum whose mean is exact, but which bf16 rounds in some steps.
pub(in crate::core::shard) fn gradient(rank: u32, chunk: u32, step: u32) -> f32 {
    (rank * rank + 64 * rank + 3 * chunk + step * step) as f32 * 4.0
}

pub(in crate::core::shard) fn start(chunk: u32) -> f32 {
    100.0 + chunk as f32
}

fn mean(chunk: u32, step: u32) -> f32 {
    let sum: f32 = (0..WORKERS).map(|rank| gradient(rank, chunk, step)).sum();
    sum / WORKERS as f32
}

/// The elements of a chunk.
pub(in crate::core::shard) fn elements(chunk: u32) -> usize {
    (ELEMENTS - chunk as usize * CHUNK_ELEMENTS).min(CHUNK_ELEMENTS)
}

/// The norm of a step's whole mean gradient. All squares are whole numbers, so the order of the sum does not matter.
pub(in crate::core::shard) fn norm(step: u32) -> f64 {
    let squares = |chunk| elements(chunk) as f64 * f64::from(mean(chunk, step)).powi(2);
    (0..CHUNKS).map(squares).sum::<f64>().sqrt()
}

/// The factor with which rank 0 releases a step of this norm; `None` if it skips the step.
pub(in crate::core::shard) fn factor(step: u32, norm: f64) -> Option<f32> {
    if step % 5 == 3 { None } else { Some(if norm > 18_000.0 { 0.25 } else { 1.0 }) }
}

/// A chunk's parameters after all steps, which have two phases or one.
pub(in crate::core::shard) fn expected(chunk: u32, two_phase: bool) -> f32 {
    (0..STEPS).fold(start(chunk), |value, step| {
        let factor = if two_phase { factor(step, norm(step)) } else { Some(1.0) };
        value - factor.map_or(0.0, |factor| rate(step) as f32 * (mean(chunk, step) * factor))
    })
}

/// The settings of these jobs.
pub(in crate::core::shard) fn settings() -> Settings {
    let mut settings = Settings::new(KeyTable::new(vec![Key::new("w", [12, ELEMENTS as u64 / 12])]).unwrap());
    settings.chunk_bytes = CHUNK_ELEMENTS as u32 * 4;
    // Nobody sends step 0's rate as a change.
    let first = Hyperparameters { learning_rate: rate(0), ..Default::default() };
    settings.optimizer = OptimizerChoice { hyperparameters: Some(first), ..OptimizerChoice::named("sgd") };
    settings
}
