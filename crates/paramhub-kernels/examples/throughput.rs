//! Speed of the kernels on this machine, for each instruction set: bytes read and written per second, for a
//! 32 KiB chunk that stays in cache and for 256 MiB that do not, next to a triad `a[i] = b[i] + s * c[i]`.
//! Optimizers process the 256 MiB chunk by chunk, with state slots side by side, as a hub core does. (Two
//! arrays a multiple of 256 MiB apart evict each other from the L1 of AMD's cores; whole slots of that size
//! would.)
//!
//! `cargo run --release -p paramhub-kernels --example throughput`

use std::hint::black_box;
use std::time::{Duration, Instant};

use paramhub_kernels::{
    Adam, Aggregator, Codec, Hyperparameters, Isa, Mean, Optimizer, Sgd, Step, Sum, convert, finite,
};

const SIZES_BYTES: [(&str, usize); 2] = [("32 KiB", 32 << 10), ("256 MiB", 256 << 20)];
const CHUNK_ELEMENTS: usize = 8192;
const ROUNDS: usize = 5;

fn main() {
    let nesterov =
        Hyperparameters { momentum: 0.9, nesterov: true, weight_decay: 1e-4, ..Hyperparameters::default() };
    let adam = Hyperparameters::default();
    let step =
        |hyperparameters| Step { hyperparameters, number: 7, contributions: 4, factor: 1.0, tensor: None };

    println!("GB/s, reads and writes counted; median of {ROUNDS}");
    for (size, bytes) in SIZES_BYTES {
        let len = bytes / 4;
        let mut model = vec![0.5_f32; len];
        let mut sum = vec![0.25_f32; len];
        let mut state = vec![0.125_f32; 2 * len];
        // One byte off, since a wire buffer has no alignment.
        let mut wire = vec![0_u8; bytes + 1];
        let full = &mut wire[1..];
        convert::encode(&sum, full, Codec::F32);

        report(size, "triad", "", 3 * bytes, || triad(&mut model, &sum, &state[..len]));
        for isa in Isa::available() {
            let aggregator = Sum::with_isa(isa);
            let name = isa.name();
            let full = &mut wire[1..];
            report(size, "assign f32 wire", name, 2 * bytes, || {
                aggregator.assign(&mut sum, full, Codec::F32)
            });
            report(size, "add f32 wire", name, 3 * bytes, || aggregator.add(&mut sum, full, Codec::F32));
            report(size, "add_f32", name, 3 * bytes, || aggregator.add_f32(&mut sum, &model));
            report(size, "first_non_finite f32", name, bytes, || {
                assert_eq!(finite::first_non_finite_with(isa, full, Codec::F32), None);
            });
            for codec in [Codec::BF16, Codec::F16] {
                let half = &mut wire[1..1 + bytes / 2];
                let named = |what: &str| format!("{what} {codec}");
                report(size, &named("encode"), name, bytes + bytes / 2, || {
                    convert::encode_with(isa, &model, half, codec)
                });
                report(size, &named("assign"), name, bytes + bytes / 2, || {
                    aggregator.assign(&mut sum, half, codec)
                });
                report(size, &named("add"), name, 2 * bytes + bytes / 2, || {
                    aggregator.add(&mut sum, half, codec)
                });
                report(size, &named("first_non_finite"), name, bytes / 2, || {
                    assert_eq!(finite::first_non_finite_with(isa, half, codec), None);
                });
            }
            // Repetition must not lead to subnormals or infinity.
            sum.fill(0.25);
            convert::encode(&sum, &mut wire[1..], Codec::F32);
            let (mean, sgd, adam_w) =
                (Mean::with_isa(isa), Sgd::with_isa(isa), Adam::decoupled().with_isa(isa));
            report(size, "mean", name, 2 * bytes, || {
                by_chunks(&mean, &step(&adam), &mut model, &sum, &mut state)
            });
            report(size, "sgd", name, 3 * bytes, || {
                by_chunks(&sgd, &step(&adam), &mut model, &sum, &mut state)
            });
            report(size, "sgd nesterov decay", name, 5 * bytes, || {
                by_chunks(&sgd, &step(&nesterov), &mut model, &sum, &mut state);
            });
            report(size, "adamw", name, 7 * bytes, || {
                by_chunks(&adam_w, &step(&adam), &mut model, &sum, &mut state);
            });
        }
    }
}

fn by_chunks(optimizer: &dyn Optimizer, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
    let chunks = model.chunks_mut(CHUNK_ELEMENTS).zip(sum.chunks(CHUNK_ELEMENTS));
    for ((model, sum), state) in chunks.zip(state.chunks_mut(2 * CHUNK_ELEMENTS)) {
        optimizer.apply(step, model, sum, state);
    }
}

/// Runs `kernel`, which moves `bytes` bytes, for a while and prints its median speed.
fn report(size: &str, what: &str, isa: &str, bytes: usize, mut kernel: impl FnMut()) {
    let started = Instant::now();
    let mut calls = 0_u32;
    while started.elapsed() < Duration::from_millis(10) {
        kernel();
        calls += 1;
    }
    let mut rates: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let started = Instant::now();
            for _ in 0..calls {
                black_box(&mut kernel)();
            }
            bytes as f64 * f64::from(calls) / started.elapsed().as_secs_f64() / 1e9
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    println!("{size:>8}  {what:<22} {isa:<9} {:7.1}", rates[ROUNDS / 2]);
}

fn triad(a: &mut [f32], b: &[f32], c: &[f32]) {
    for ((a, b), c) in a.iter_mut().zip(b).zip(c) {
        *a = b + 0.5 * c;
    }
}
