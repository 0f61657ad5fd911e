//! The training of one worker, however it was started.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use paramhub::{Membership, Options, Registry};
use paramhub_collective::communicator::{CheckedCommunicator, Communicator, TracedCommunicator};
use paramhub_collective::engine::{Engine, Trace, write_chrome};
use paramhub_collective::kvstore::{StoreKind, StoreOptions, create};
use paramhub_core::scheme::SchemeChoice;
use paramhub_syncer::Syncers;
use paramhub_train::data::Data;
use paramhub_train::dataflow::{self, Learner};
use paramhub_train::exchange::Exchange;
use paramhub_train::hub::HubExchange;
use paramhub_train::local::LocalExchange;
use paramhub_train::net::Network;
use paramhub_train::trainer::{Progress, Report, train};

use crate::config::TrainSection;

/// The results of a worker's training, and its transport.
pub(super) struct TrainingResult {
    pub(super) report: Report,
    pub(super) transport: &'static str,
}

/// Trains through the hubs of the job that `membership` names. `on_joined` hears the first step to which this rank
/// contributes, from 1.
pub(super) fn train_through_hub(
    section: &TrainSection,
    data: &Data,
    network: &mut Network,
    membership: Membership,
    on_joined: impl FnOnce(usize),
    on_progress: &mut dyn FnMut(&Progress),
) -> anyhow::Result<TrainingResult> {
    let options = Options { transport: section.transport, ..Options::from_env()? };
    // A worker computes in one thread: the last argument of `join`.
    let settings = section.settings(network)?;
    let syncers = Syncers::join(membership, options, settings, &Registry::with_builtins(), 1)?;
    let job = syncers.job();
    let rank = job.rank();
    // With --chaos the launcher tells of each worker that is lost, and of its return.
    if rank == 0 && section.chaos_s.is_none() {
        job.on_notice(|notice| eprintln!("{notice}"));
    }
    let transport = if job.shares_memory() { "shared memory" } else { "tcp" };
    if rank == 0 && section.scheme != SchemeChoice::default() {
        for planned in &job.information_book().plan.layers {
            eprintln!("layer {} goes by {}: {}", planned.layer.name, planned.scheme, planned.why);
        }
    }
    let mut exchange = HubExchange::new(syncers);
    on_joined(exchange.first_step() + 1);
    // With --chaos rank 0 may have died when the test set is to be measured.
    let measures = rank == 0 || section.chaos_s.is_some();
    let report = train(&section.trainer(measures), data, network, &mut exchange, on_progress)?;
    exchange.leave()?;
    Ok(TrainingResult { report, transport })
}

/// Trains with the shares of all workers in this process.
pub(super) fn train_locally(
    section: &TrainSection,
    data: &Data,
    network: &mut Network,
    on_progress: &mut dyn FnMut(&Progress),
) -> anyhow::Result<TrainingResult> {
    let registry = Registry::with_builtins();
    let hyperparameters = section.hyperparameters(&registry)?;
    let mut exchange = LocalExchange::new(
        network.keys(),
        section.workers() as usize,
        registry.aggregator("sum")?,
        registry.optimizer(section.optimizer.kernel())?,
        hyperparameters,
    );
    let report = train(&section.trainer(true), data, network, &mut exchange, on_progress)?;
    Ok(TrainingResult { report, transport: "none" })
}

/// Trains by collectives of `communicator`, which a store of this kind calls.
pub(super) fn train_by_collectives(
    section: &TrainSection,
    kind: StoreKind,
    data: Data,
    network: &mut Network,
    communicator: Box<dyn Communicator>,
    on_progress: &mut dyn FnMut(&Progress),
) -> anyhow::Result<TrainingResult> {
    let registry = Registry::with_builtins();
    let (rank, transport) = (communicator.rank(), communicator.transport());
    let communicator = match section.check_collectives {
        true => Box::new(CheckedCommunicator::new(communicator)),
        false => communicator,
    };
    let mut config = dataflow::engine_config(section.compute_threads);
    let trace = section.trace.as_ref().filter(|_| rank == 0);
    let trace = trace.map(|path| (path, Arc::new(Trace::since(Instant::now()))));
    let communicator = match &trace {
        None => communicator,
        Some((_, trace)) => {
            config.observer = Some(trace.clone());
            Box::new(TracedCommunicator::new(communicator, Arc::clone(trace)))
        }
    };
    let engine = Arc::new(Engine::new(config)?);
    let options = StoreOptions { communicator: Some(communicator), ..StoreOptions::new(engine) };
    let store = create(kind, options)?;
    let learner = Learner {
        store: &*store,
        workers_per_rank: NonZeroUsize::MIN,
        optimizer: registry.optimizer(section.optimizer.kernel())?,
        hyperparameters: section.hyperparameters(&registry)?,
    };
    let config = section.trainer(rank == 0);
    if let Some((_, trace)) = &trace {
        trace.switch(true);
    }
    let report = dataflow::train(&config, &Arc::new(data), network, &learner, on_progress)?;
    store.leave()?;
    if let Some((path, trace)) = &trace {
        write_timeline(path, trace).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(TrainingResult { report, transport })
}

/// Writes the trace of rank 0.
fn write_timeline(path: &Path, trace: &Trace) -> std::io::Result<()> {
    let (spans, _) = trace.take();
    let mut file = BufWriter::new(File::create(path)?);
    write_chrome(&mut file, [(0, "rank 0", &spans[..])])?;
    file.flush()
}
