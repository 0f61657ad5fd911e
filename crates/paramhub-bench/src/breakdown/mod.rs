//! `paramhub bench breakdown`: where a training step's time goes, one part switched on after the other.

mod driver;
mod peer;
mod report;
mod stage;

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, value_parser};
use indicatif::ProgressBar;
use paramhub::limits::CORES_MAX;
use paramhub_harness::ExitCode;
use paramhub_harness::Usage;
use paramhub_harness::exchange::check_destination;
use paramhub_harness::exchange::hosts::Hosts;
use paramhub_harness::exchange::processes::{Run, commands, interrupted, launch_all};
use paramhub_harness::exchange::report::write_json;
use paramhub_harness::launch::Signals;
use paramhub_harness::values::Bytes;
use paramhub_train::data::DataSource;
use paramhub_train::net::{NetKind, Network};

use super::rounds::order;
use crate::training::rehearse;
use crate::training::{TrainOptimizer, TrainSection};
use report::{Breakdown, MeasuredNetwork};
use stage::BreakdownStage;

pub(super) use peer::run_process;

/// The name by which a process learns that it takes part in this benchmark.
pub(super) const SCENARIO: &str = "breakdown";

/// Steps that do not count, at the start; at most half of an epoch's.
const WARMUP_STEPS: usize = 10;

/// Say where a training step's time goes, by switching one part on after the other (PHub, figures 5 and 14)
///
/// Worker processes of `paramhub train` do the same steps five times, with fresh processes, in rounds; each stage's time is
/// its median, and what is shown is what each adds to the one before:
///
///   compute                      forward and backward of all workers at once; gradients are thrown away
///   data copy and communication  each worker's gradients go to the hub, its parameters come back; the hub looks at
///                                nothing, and no worker waits for another
///   aggregation                  the hub adds every gradient to a sum
///   optimisation                 for every N gradients of N workers the hub runs the optimizer once
///   synchronisation and other    the real thing: an answer needs every worker's gradient, so they wait for each other
///
/// A part shows what those before it could not hide: what a worker computes meanwhile costs nothing. Workers and hub share
/// this machine's processors, so that the hub's work takes time from the workers', too, as it would not from another machine.
/// A later stage does all that an earlier one does: one that was measured slower than a later one counts as no slower than
/// that. The learning rate is 0, so that every stage computes with the same parameters; the optimizer does all its work.
#[derive(Args)]
#[command(verbatim_doc_comment)]
pub struct BreakdownFlags {
    /// Networks, a bar each: mlp, lenet, cifar-quick
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "mlp,lenet,cifar-quick")]
    net: Vec<NetKind>,
    /// What to learn: digits, idx:DIR (MNIST's files) or cifar10:DIR (the binary version)
    #[arg(long, default_value_t = DataSource::Digits)]
    data: DataSource,
    /// Worker processes
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = value_parser!(u32).range(1..=1024))]
    workers: u32,
    /// Examples per worker and step
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = value_parser!(u32).range(1..))]
    batch: u32,
    /// Passes over the training set in every stage and round
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = value_parser!(u32).range(1..=100_000))]
    epochs: u32,
    /// What the hub does with the gradients: sgd, nesterov, adam or adamw
    #[arg(long, default_value_t = TrainOptimizer::Nesterov)]
    optimizer: TrainOptimizer,
    /// Cores of the hub
    #[arg(long, value_name = "C", default_value_t = 1, value_parser = value_parser!(u16).range(1..=CORES_MAX as i64))]
    cores: u16,
    /// The unit of exchange, as in 32K
    #[arg(long, value_name = "BYTES", default_value_t = TrainSection::default().chunk_bytes)]
    chunk: Bytes,
    /// How often every stage is measured
    #[arg(long, value_name = "R", default_value_t = 5, value_parser = value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the results
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

pub(super) fn breakdown(flags: &BreakdownFlags) -> anyhow::Result<ExitCode> {
    let signals = Signals::catch()?;
    check_destination("--json", flags.json.as_deref())?;
    check_destination("--svg", flags.svg.as_deref())?;
    let mut breakdown = Breakdown::new(flags, flags.networks()?);
    println!("{}", breakdown.headline());
    let progress = ProgressBar::new(
        u64::from(flags.rounds) * (breakdown.networks.len() * BreakdownStage::ALL.len()) as u64,
    );
    for round in 0..flags.rounds {
        for network in 0..breakdown.networks.len() {
            for number in order(round, BreakdownStage::ALL.len()) {
                let stage = BreakdownStage::ALL[number];
                let task = breakdown.task(network, stage);
                let processes = |socket: &Path| commands(&Hosts::here(), task.train.workers(), socket);
                let run = launch_all(processes, &signals, |listener, is_over| {
                    driver::drive(&task, listener, is_over)
                });
                match run.with_context(|| format!("{} with {}", task.train.net, stage.adds()))? {
                    Run::Measured(measurement) => breakdown.networks[network].add(stage, &measurement),
                    Run::Interrupted(signal) => return Ok(interrupted(signal)),
                }
                progress.inc(1);
            }
        }
    }
    progress.finish_and_clear();
    println!("{}", breakdown.table());
    if let Some(path) = &flags.json {
        write_json(&breakdown.results(), path)?;
    }
    if let Some(path) = &flags.svg {
        breakdown.plot().write(path)?;
    }
    Ok(ExitCode::SUCCESS)
}

impl BreakdownFlags {
    /// Checks here, once, what would fail in every worker.
    fn networks(&self) -> anyhow::Result<Vec<MeasuredNetwork>> {
        let data = self.data.load()?;
        let mut networks: Vec<MeasuredNetwork> = Vec::new();
        for &net in &self.net {
            if networks.iter().any(|network| network.train.net == net) {
                return Err(Usage(format!("--net {net}: it is there twice")).into());
            }
            let train = TrainSection {
                net,
                data: self.data.clone(),
                workers: Some(self.workers),
                epochs: self.epochs as usize,
                batch: self.batch as usize,
                lr: Some(0.0),
                optimizer: self.optimizer,
                chunk_bytes: self.chunk,
                cores: self.cores.into(),
                ..TrainSection::default()
            };
            rehearse(&train)?;
            let steps = train.epochs * (data.train.len() / (train.workers() as usize * train.batch));
            if steps < 2 {
                return Err(Usage(format!(
                    "--epochs {}: that is one step, which would be timed by itself",
                    self.epochs
                ))
                .into());
            }
            let network = Network::new(net, data.train.geometry(), train.seed)?;
            let elements = network.keys().iter().filter_map(|key| key.elements()).sum();
            networks.push(MeasuredNetwork::new(train, elements, steps, WARMUP_STEPS.min(steps / 2)));
        }
        Ok(networks)
    }
}
