//! The smallest useful worker: joins a job, exchanges made-up gradients and checks every number that comes back.
//!
//! ```text
//! cargo build --release --bin paramhub --example exchange
//! target/release/paramhub run -n 4 -- target/release/examples/exchange --steps 100 --elements 1000000
//! ```
//! Every rank contributes gradients of `step + 1`, and the optimizer is plain SGD with a learning rate of
//! 2^-10, so a synchronous job's parameters are known at every step. In an asynchronous or bounded-staleness
//! job each contribution counts by itself, so each lowers the parameters. With `--seed` the gradients are
//! fractions that differ from rank to rank. The results are then not checked here, but can be compared by the
//! files of `--save`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;

use paramhub::scheme::{LayerSettings, Scheme, SchemeChoice};
use paramhub::settings::{OptimizerChoice, Settings};
use paramhub::{
    Codec, Consistency, FactorBuffers, Hyperparameters, Key, KeyTable, Member, Membership, Options,
};

const LEARNING_RATE: f32 = 1.0 / 1024.0;
/// Outputs, inputs and samples of the layer whose factors go to a hub.
const LAYER: [usize; 3] = [512, 300, 64];

#[derive(Parser)]
struct Arguments {
    /// Steps to take.
    #[arg(long, default_value_t = 100)]
    steps: u32,
    /// Elements of each of the job's keys.
    #[arg(long, default_value = "100000,10,70001", value_delimiter = ',')]
    elements: Vec<u64>,
    /// sync, async or staleness:STEPS.
    #[arg(long, default_value = "sync")]
    consistency: Consistency,
    /// Milliseconds of pretended computation a step.
    #[arg(long, default_value_t = 0)]
    compute_ms: u64,
    /// A rank that computes so many times as long, as in 7:10.
    #[arg(long, value_name = "RANK:FACTOR", value_parser = slow)]
    slow: Option<(u32, u32)>,
    /// Stop at the job's step instead of after as many of this worker's: they differ where late workers are left out. Gradients
    /// are ones then, whose mean is one whichever workers count.
    #[arg(long, conflicts_with_all = ["seed", "consistency"])]
    by_job_steps: bool,
    /// One of the hub's optimizers.
    #[arg(long, default_value = "sgd")]
    optimizer: String,
    /// How the keys travel: f32, f16, bf16, int8, one-bit or two-bit.
    #[arg(long)]
    codec: Option<Codec>,
    /// Sums that are equal to the bit from run to run.
    #[arg(long)]
    reproducible: bool,
    /// Clips the mean gradient to this norm.
    #[arg(long, requires = "seed")]
    clip_norm: Option<f64>,
    /// Draws gradients from -1 to 1 instead, unlike at every rank.
    #[arg(long)]
    seed: Option<u64>,
    /// Beside the keys, exchanges a fully connected layer whose factors go to the hub that has it.
    #[arg(long)]
    factors: bool,
    /// Writes the parameters at the end, key by key, as f32 of this machine's byte order.
    #[arg(long)]
    save: Option<PathBuf>,
}

fn main() -> ExitCode {
    match exchange(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn exchange(arguments: &Arguments) -> Result<(), Box<dyn std::error::Error>> {
    let key = |(i, &n): (usize, &u64)| Key { codec: arguments.codec, ..Key::new(format!("layer{i}"), [n]) };
    let mut keys: Vec<Key> = arguments.elements.iter().enumerate().map(key).collect();
    let weight = keys.len() as u32;
    let mut layers = Vec::new();
    if arguments.factors {
        let sides = LAYER.map(|side| side as u64);
        keys.extend([Key::new("fc.weight", [sides[0], sides[1]]), Key::new("fc.bias", [sides[0]])]);
        let layer = LayerSettings::fully_connected("fc", [weight, weight + 1], sides);
        layers.push(layer.by(SchemeChoice::Only(Scheme::FactorsToHub)));
    }
    let hyperparameters = Hyperparameters { learning_rate: f64::from(LEARNING_RATE), ..Default::default() };
    let settings = Settings {
        optimizer: OptimizerChoice {
            hyperparameters: Some(hyperparameters),
            ..OptimizerChoice::named(&arguments.optimizer)
        },
        consistency: arguments.consistency,
        reproducible: arguments.reproducible,
        clip_norm: arguments.clip_norm,
        layers,
        ..Settings::new(KeyTable::new(keys)?)
    };

    let member = Member::connect_with(Membership::from_env()?, Options::from_env()?)?;
    let job = member.init(settings)?;
    job.on_notice(|notice| println!("notice: {}", notice.message));
    let sizes = job.settings().keys.keys().iter().map(|key| key.elements().unwrap_or(0) as usize);
    let mut parameters: Vec<Vec<f32>> = sizes.map(|elements| vec![0.0; elements]).collect();
    job.broadcast(&mut parameters, 0)?;
    let mut layer = FactorBuffers {
        inputs: vec![1.0; LAYER[1] * LAYER[2]],
        output_gradients: vec![0.0; LAYER[0] * LAYER[2]],
        ..Default::default()
    };
    // Buffers move into a request and come back from its handle, so each key needs only these two.
    let mut gradients = parameters.clone();
    let rank = job.rank();
    println!("rank {rank} of {} exchanges {} keys", job.workers(), parameters.len());

    let begun = Instant::now();
    // A job that resumes goes on at the step of its checkpoint.
    let first_step = job.resumed_step().unwrap_or(0);
    let lower = |expected: f32, step: u32| expected - LEARNING_RATE * (step + 1) as f32;
    let mut expected = (0..first_step).fold(0.0f32, lower);
    let factor = arguments.slow.filter(|&(slow, _)| slow == rank).map_or(1, |(_, factor)| factor);
    let (mut step, mut taken) = (first_step, 0);
    while step < arguments.steps {
        std::thread::sleep(Duration::from_millis(arguments.compute_ms) * factor);
        // Keys are pushed back to front, as gradients come. The front layers still overtake.
        let layer_underway = arguments.factors.then(|| {
            match arguments.seed {
                // The samples together give a gradient of step + 1.
                None => layer.output_gradients.fill((step + 1) as f32 / LAYER[2] as f32),
                Some(seed) => {
                    let factors = [&mut layer.inputs, &mut layer.output_gradients];
                    for (values, number) in factors.into_iter().zip(1000..) {
                        draw(values, [seed, rank.into(), step.into(), number]);
                    }
                }
            }
            layer.weight = std::mem::take(&mut parameters[weight as usize]);
            layer.bias = Some(std::mem::take(&mut parameters[weight as usize + 1]));
            job.push_pull_factors(weight, std::mem::take(&mut layer))
        });
        let underway: Vec<_> = (0..weight as usize)
            .rev()
            .map(|key| {
                let (mut gradient, out) =
                    (std::mem::take(&mut gradients[key]), std::mem::take(&mut parameters[key]));
                match arguments.seed {
                    None if arguments.by_job_steps => gradient.fill(1.0),
                    None => gradient.fill((step + 1) as f32),
                    Some(seed) => draw(&mut gradient, [seed, rank.into(), step.into(), key as u64]),
                }
                job.push_pull(key as u32, gradient, out)
            })
            .collect::<Result<_, _>>()?;
        for (key, handle) in (0..weight as usize).rev().zip(underway) {
            (gradients[key], parameters[key]) = handle.wait()?;
        }
        if let Some(underway) = layer_underway {
            layer = underway?.wait()?;
            parameters[weight as usize] = std::mem::take(&mut layer.weight);
            parameters[weight as usize + 1] = layer.bias.take().unwrap_or_default();
        }
        taken += 1;
        if arguments.by_job_steps {
            check_by_job_steps(&parameters)?;
            step = job.next_step(0)?;
            continue;
        }
        expected = lower(expected, step);
        if arguments.seed.is_none() {
            check(&parameters, expected, arguments.consistency, step)?;
        }
        step += 1;
    }
    let seconds = begun.elapsed().as_secs_f64();
    let statistics = job.statistics();
    job.leave()?;
    println!(
        "rank {rank} finished {taken} steps in {seconds:.3} s: {:.1} MB sent, {:.1} MB received, {} streams moved{}",
        statistics.bytes_sent as f64 / 1e6,
        statistics.bytes_received as f64 / 1e6,
        statistics.streams_moved,
        if arguments.seed.is_none() { ", all numbers right" } else { "" },
    );
    if let Some(path) = &arguments.save {
        let bytes: Vec<u8> = parameters.iter().flatten().flat_map(|value| value.to_ne_bytes()).collect();
        std::fs::write(path, bytes)?;
    }
    Ok(())
}

/// Reads RANK:FACTOR.
fn slow(text: &str) -> Result<(u32, u32), String> {
    let read = |(rank, factor): (&str, &str)| Some((rank.parse().ok()?, factor.parse().ok()?));
    text.split_once(':').and_then(read).ok_or_else(|| "expected RANK:FACTOR, as in 7:10".into())
}

/// Checks that every element has been lowered by a whole number of steps, whichever contributions counted.
fn check_by_job_steps(parameters: &[Vec<f32>]) -> Result<(), String> {
    for (key, values) in parameters.iter().enumerate() {
        let steps = |value: f32| -value / LEARNING_RATE;
        if let Some(position) = values.iter().position(|&value| steps(value).fract() != 0.0 || value >= 0.0) {
            return Err(format!(
                "key {key}, element {position} is {}, no whole number of steps",
                values[position]
            ));
        }
    }
    Ok(())
}

/// Fills the gradient with numbers that follow from the seeds alone.
fn draw(gradient: &mut [f32], seeds: [u64; 4]) {
    // A step of SplitMix64 (Steele, Lea and Flood, 2014).
    let mixed = |state: u64| {
        let first = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let second = (first ^ (first >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        second ^ (second >> 31)
    };
    let mut state = seeds.into_iter().fold(0, |state, seed| mixed(state ^ seed).wrapping_add(seed));
    for value in gradient {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        *value = (mixed(state) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    }
}

/// Checks the parameters. In a synchronous job they must be exact; otherwise they must include at least this
/// rank's own contributions.
fn check(parameters: &[Vec<f32>], own: f32, consistency: Consistency, step: u32) -> Result<(), String> {
    let right = |value: f32| match consistency {
        Consistency::Synchronous => value == own,
        Consistency::Asynchronous | Consistency::BoundedStaleness(_) => value <= own,
    };
    for (key, values) in parameters.iter().enumerate() {
        if let Some(position) = values.iter().position(|&value| !right(value)) {
            let got = values[position];
            return Err(format!("key {key}, element {position} is {got} after step {step}, expected {own}"));
        }
    }
    Ok(())
}
