//! `paramhub bench kernels`: every sum, conversion and optimizer with every instruction set, beside a triad.
//!
//! Rounds of a kernel and of the triad take turns, so that other load on the machine affects both. Optimizers
//! walk large arrays chunk by chunk, with state slots side by side, as a hub core does.

use std::hint::black_box;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use comfy_table::{Table, presets};
use paramhub::{Codec, Hyperparameters};
use paramhub_harness::ExitCode;
use paramhub_harness::Usage;
use paramhub_harness::exchange::report::{megabytes, write_json};
use paramhub_harness::exchange::statistics::{quantile, sorted};
use paramhub_harness::exchange::{check_destination, usage};
use paramhub_harness::values::Bytes;
use paramhub_kernels::{Adam, Aggregator, Isa, Mean, Optimizer, Sgd, Step, Sum, convert, finite, quantise};
use serde::Serialize;

const CACHED_BYTES: u64 = 32 << 10;
const CHUNK_ELEMENTS: usize = 8192;
const ROUNDS: usize = 7;
/// In shorter rounds the clock itself would count.
const ROUND: Duration = Duration::from_millis(2);
/// Arrays of the full size: model, sum, two of state, wire bytes.
const ARRAYS: u64 = 5;

/// Run every sum, conversion and optimizer with every instruction set of this machine, beside a triad
#[derive(Args)]
pub struct KernelsFlags {
    /// Bytes of an f32 array that no cache holds; 32K are measured beside it
    #[arg(long, value_name = "BYTES", default_value_t = Bytes(256 << 20))]
    size: Bytes,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Written with `--json`. Speeds are GB/s and count reads and writes.
#[derive(Serialize)]
struct Speed {
    operation: String,
    isa: &'static str,
    array_bytes: u64,
    speed: f64,
    triad: f64,
    ratio: f64,
}

pub(super) fn kernels(flags: &KernelsFlags) -> anyhow::Result<ExitCode> {
    check_destination("--json", flags.json.as_deref())?;
    let Bytes(size) = flags.size;
    if size < CACHED_BYTES || !size.is_multiple_of(4) {
        return Err(Usage(format!("--size {}: expected a multiple of 4 from 32K on", flags.size)).into());
    }
    if let Some(available) = usage::available_bytes().filter(|&available| available / ARRAYS < size) {
        let available = megabytes(available);
        return Err(Usage(format!(
            "--size {}: {ARRAYS} such arrays do not fit into {available}",
            flags.size
        ))
        .into());
    }
    let mut speeds = Vec::new();
    for array_bytes in [CACHED_BYTES, size] {
        let mut arrays = Arrays::new(array_bytes as usize);
        for isa in Isa::available() {
            for operation in operations(isa) {
                speeds.push(arrays.measure(operation, isa));
            }
        }
    }
    println!("{}", table(&speeds, size));
    flags.json.as_deref().map_or(Ok(()), |path| write_json(&speeds, path))?;
    Ok(ExitCode::SUCCESS)
}

/// A kernel, and how many bytes it moves for each element.
struct Operation {
    name: String,
    element_bytes: usize,
    run: Box<dyn Fn(&mut Arrays)>,
}

fn operations(isa: Isa) -> Vec<Operation> {
    let mut operations = Vec::new();
    let mut operation = |name: String, element_bytes, run: Box<dyn Fn(&mut Arrays)>| {
        operations.push(Operation { name, element_bytes, run });
    };
    let sum = Sum::with_isa(isa);
    operation("sum: add_f32".into(), 12, Box::new(move |a| sum.add_f32(&mut a.sum, &a.model)));
    for codec in [Codec::F32, Codec::BF16, Codec::F16] {
        let wire = codec.bytes();
        let assign = move |a: &mut Arrays| sum.assign(&mut a.sum, wire_of(&mut a.wire, codec), codec);
        let add = move |a: &mut Arrays| sum.add(&mut a.sum, wire_of(&mut a.wire, codec), codec);
        let encode =
            move |a: &mut Arrays| convert::encode_with(isa, &a.model, wire_of(&mut a.wire, codec), codec);
        let decode =
            move |a: &mut Arrays| convert::decode_with(isa, wire_of(&mut a.wire, codec), &mut a.sum, codec);
        let finite = move |a: &mut Arrays| {
            black_box(finite::first_non_finite_with(isa, wire_of(&mut a.wire, codec), codec));
        };
        operation(format!("sum: assign {codec}"), 4 + wire, Box::new(assign));
        operation(format!("sum: add {codec}"), 8 + wire, Box::new(add));
        operation(format!("convert: encode {codec}"), 4 + wire, Box::new(encode));
        operation(format!("convert: decode {codec}"), 4 + wire, Box::new(decode));
        operation(format!("convert: find non-finite {codec}"), wire, Box::new(finite));
    }
    for codec in [Codec::ONE_BIT, Codec::TWO_BIT, Codec::INT8] {
        // The bytes of the wire are few beside those of the values.
        let encode = move |a: &mut Arrays| {
            let wire = wire_of(&mut a.wire, codec);
            quantise::encode_with(isa, &a.model, &mut a.sum, wire, codec);
        };
        let change = move |a: &mut Arrays| {
            let wire = wire_of(&mut a.wire, codec);
            quantise::encode_change_with(isa, &a.model, &mut a.sum, wire, codec);
        };
        let add = move |a: &mut Arrays| sum.add(&mut a.sum, wire_of(&mut a.wire, codec), codec);
        operation(format!("quantise: encode {codec}"), 12, Box::new(encode));
        operation(format!("quantise: encode change {codec}"), 12, Box::new(change));
        operation(format!("sum: add {codec}"), 8, Box::new(add));
    }
    let plain = Hyperparameters::default();
    let momentum = Hyperparameters { momentum: 0.9, ..plain };
    let nesterov = Hyperparameters { nesterov: true, weight_decay: 1e-4, ..momentum };
    let optimizers: [(&str, usize, Box<dyn Optimizer>, Hyperparameters); 6] = [
        ("mean", 8, Box::new(Mean::with_isa(isa)), plain),
        ("sgd", 12, Box::new(Sgd::with_isa(isa)), plain),
        ("sgd with momentum", 20, Box::new(Sgd::with_isa(isa)), momentum),
        ("sgd with nesterov and decay", 20, Box::new(Sgd::with_isa(isa)), nesterov),
        ("adam", 28, Box::new(Adam::new().with_isa(isa)), plain),
        ("adamw", 28, Box::new(Adam::decoupled().with_isa(isa)), plain),
    ];
    for (name, element_bytes, optimizer, hyperparameters) in optimizers {
        let apply = move |a: &mut Arrays| {
            let step = Step {
                hyperparameters: &hyperparameters,
                number: 7,
                contributions: 4,
                factor: 1.0,
                tensor: None,
            };
            let chunks = a.model.chunks_mut(CHUNK_ELEMENTS).zip(a.sum.chunks(CHUNK_ELEMENTS));
            for ((model, sum), state) in chunks.zip(a.state.chunks_mut(2 * CHUNK_ELEMENTS)) {
                optimizer.apply(&step, model, sum, state);
            }
        };
        operation(format!("optimize: {name}"), element_bytes, Box::new(apply));
    }
    operations
}

/// The arrays on which kernels work.
struct Arrays {
    model: Vec<f32>,
    sum: Vec<f32>,
    state: Vec<f32>,
    /// One byte more: wire bytes have no alignment.
    wire: Vec<u8>,
}

impl Arrays {
    fn new(bytes: usize) -> Arrays {
        let values = || vec![0.0; bytes / 4];
        Arrays { model: values(), sum: values(), state: vec![0.0; bytes / 2], wire: vec![0; bytes + 1] }
    }

    /// Resets the values, which must not drift to subnormals or infinity.
    fn reset(&mut self) {
        self.model.fill(0.5);
        self.sum.fill(0.25);
        self.state.fill(0.125);
        self.wire.fill(0);
    }

    fn triad(&mut self) {
        for ((a, b), c) in self.model.iter_mut().zip(&self.sum).zip(&self.state) {
            *a = b + 0.5 * c;
        }
    }

    fn measure(&mut self, operation: Operation, isa: Isa) -> Speed {
        self.reset();
        let bytes = (self.sum.len() * operation.element_bytes) as f64;
        let triad_bytes = (self.sum.len() * 12) as f64;
        let calls = self.calls(&*operation.run);
        let triad_calls = self.calls(&Arrays::triad);
        let (mut seconds, mut triad_seconds) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            seconds.push(self.seconds(calls, &*operation.run));
            triad_seconds.push(self.seconds(triad_calls, &Arrays::triad));
        }
        let speed = bytes / quantile(&sorted(seconds), 0.5) / 1e9;
        let triad = triad_bytes / quantile(&sorted(triad_seconds), 0.5) / 1e9;
        Speed {
            operation: operation.name,
            isa: isa.name(),
            array_bytes: 4 * self.sum.len() as u64,
            speed,
            triad,
            ratio: speed / triad,
        }
    }

    /// The number of calls in a round.
    fn calls(&mut self, kernel: &dyn Fn(&mut Arrays)) -> u32 {
        let (started, mut calls) = (Instant::now(), 0);
        while started.elapsed() < ROUND {
            kernel(self);
            calls += 1;
        }
        calls
    }

    /// Seconds of one call in a round.
    fn seconds(&mut self, calls: u32, kernel: &dyn Fn(&mut Arrays)) -> f64 {
        let started = Instant::now();
        for _ in 0..calls {
            kernel(black_box(self));
        }
        started.elapsed().as_secs_f64() / f64::from(calls)
    }
}

fn wire_of(wire: &mut [u8], codec: Codec) -> &mut [u8] {
    let bytes = codec.payload_bytes((wire.len() - 1) / Codec::F32.bytes());
    &mut wire[1..=bytes]
}

fn table(speeds: &[Speed], size: u64) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    let columns = ["32K", "by triad", &Bytes(size).to_string(), "by triad"].map(str::to_owned);
    table.set_header(["GB/s, read and written".to_owned(), String::new()].into_iter().chain(columns));
    let (cached, large) = speeds.split_at(speeds.len() / 2);
    for (cached, large) in cached.iter().zip(large) {
        let of = |speed: &Speed| [format!("{:.1}", speed.speed), format!("{:.2}", speed.ratio)];
        let name = [cached.operation.clone(), cached.isa.to_owned()];
        table.add_row(name.into_iter().chain(of(cached)).chain(of(large)));
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_of_every_instruction_set_runs_on_any_length() {
        let mut arrays = Arrays::new(4 * (CHUNK_ELEMENTS + 3));
        for isa in Isa::available() {
            let operations = operations(isa);
            assert_eq!(operations.len(), 1 + 3 * 5 + 3 * 3 + 6);
            for operation in operations {
                arrays.reset();
                (operation.run)(&mut arrays);
                assert!(arrays.model.iter().chain(&arrays.sum).all(|value| value.is_finite()));
            }
        }
    }
}
