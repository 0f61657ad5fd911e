//! One worker process of `paramhub train`.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use paramhub_core::scheme::SchemeChoice;
use paramhub_syncer::Syncers;
use paramhub_train::data::Data;
use paramhub_train::hub::HubExchange;
use paramhub_train::local::LocalExchange;
use paramhub_train::net::Network;
use paramhub_train::trainer::{Progress, Report, train};

use super::parameters;
use super::spec::{Message, Spec, WorkerReport};
use crate::cli::ExitCode;
use crate::config::ExchangeKind;
use crate::{Membership, Options, Registry};

/// A bar moves smoothly enough at this pace.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Args)]
pub(crate) struct WorkerFlags {
    spec: PathBuf,
}

pub(crate) fn work(flags: &WorkerFlags) -> anyhow::Result<ExitCode> {
    let text = std::fs::read(&flags.spec).with_context(|| format!("cannot read {}", flags.spec.display()))?;
    let spec: Spec = serde_json::from_slice(&text).context("cannot read what to do")?;
    let data = spec.train.data.load()?;
    let mut network = Network::new(spec.train.net, data.train.geometry(), spec.train.seed)?;
    let (rank, report, shares_memory) = match spec.train.exchange {
        ExchangeKind::Hub => through_the_hub(&spec, &data, &mut network)?,
        ExchangeKind::Local => (0, locally(&spec, &data, &mut network)?, false),
    };
    parameters::save(&parameters::file_of(&spec.folder, rank), network.keys(), &report.parameters)?;
    send(&Message::Report(Box::new(WorkerReport::new(&report, shares_memory))));
    Ok(ExitCode::SUCCESS)
}

/// The rank, what it did, and whether it shared memory with a hub.
fn through_the_hub(spec: &Spec, data: &Data, network: &mut Network) -> anyhow::Result<(usize, Report, bool)> {
    let membership = Membership::from_env()?;
    let options = Options { transport: spec.train.transport, ..Options::from_env()? };
    // A worker computes in one thread.
    let settings = spec.train.settings(network)?;
    let syncers = Syncers::join(membership, options, settings, &Registry::with_builtins(), 1)?;
    let job = syncers.job();
    let rank = job.rank() as usize;
    if rank == 0 {
        job.on_notice(|notice| eprintln!("{notice}"));
    }
    let shares_memory = job.shares_memory();
    if rank == 0 && spec.train.scheme != SchemeChoice::default() {
        for planned in &job.book().plan.layers {
            eprintln!("layer {} goes by {}: {}", planned.layer.name, planned.scheme, planned.why);
        }
    }
    let mut exchange = HubExchange::new(syncers);
    let config = spec.train.trainer(rank == 0);
    let mut progress = progress_of(rank);
    let report = train(&config, data, network, &mut exchange, &mut progress)?;
    exchange.leave()?;
    Ok((rank, report, shares_memory))
}

fn locally(spec: &Spec, data: &Data, network: &mut Network) -> anyhow::Result<Report> {
    let registry = Registry::with_builtins();
    let hyperparameters = spec.train.hyperparameters(&registry)?;
    let mut exchange = LocalExchange::new(
        network.keys(),
        spec.train.workers as usize,
        registry.aggregator("sum")?,
        registry.optimizer(spec.train.optimizer.kernel())?,
        hyperparameters,
    );
    Ok(train(&spec.train.trainer(true), data, network, &mut exchange, &mut progress_of(0))?)
}

/// Rank 0 speaks for all.
fn progress_of(rank: usize) -> impl FnMut(&Progress) {
    let mut told: Option<Instant> = None;
    move |progress| {
        let is_due =
            progress.step == progress.of || told.is_none_or(|told| told.elapsed() >= PROGRESS_INTERVAL);
        if rank == 0 && is_due {
            told = Some(Instant::now());
            send(&Message::Progress(progress.into()));
        }
    }
}

fn send(message: &Message) {
    let mut line = serde_json::to_vec(message).expect("messages are plain data");
    line.push(b'\n');
    let mut output = std::io::stdout().lock();
    // A launcher that is gone needs no messages; its warden ends this process.
    let _ = output.write_all(&line).and_then(|()| output.flush());
}
