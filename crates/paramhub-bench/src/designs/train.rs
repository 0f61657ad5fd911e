//! Real training through a design's store.

use std::num::NonZeroUsize;
use std::sync::Arc;

use anyhow::bail;
use paramhub_harness::exchange::messages::JsonConnection;
use paramhub_harness::exchange::usage;
use paramhub_kernels::Registry;
use paramhub_train::dataflow::{Learner, train};
use paramhub_train::net::Network;

use super::messages::{ScenarioCommand, ScenarioReply, TrainingTimes};
use super::rank_runtime::RankRuntime;
use crate::training::TrainSection;

/// Trains once, when it is this scenario's turn.
pub(super) fn train_rank(
    runtime: &RankRuntime,
    section: &TrainSection,
    connection: &mut JsonConnection,
) -> anyhow::Result<()> {
    let data = Arc::new(section.data.load()?);
    let mut network = Network::new(section.net, data.train.geometry(), section.seed)?;
    connection.send(&ScenarioReply::Joined)?;
    let start = match connection.receive()? {
        Some(ScenarioCommand::Train { start }) => start,
        Some(_) => bail!("the launcher sent a command out of turn"),
        None => return runtime.leave(),
    };
    let registry = Registry::with_builtins();
    let optimizer = registry.optimizer(section.optimizer.kernel())?;
    let hyperparameters = section.hyperparameters(&registry)?;
    let (store, workers_per_rank) = (&*runtime.store, NonZeroUsize::MIN);
    let learner = Learner { store, workers_per_rank, optimizer, hyperparameters };
    std::thread::sleep(start.saturating_sub(usage::monotonic()));
    let report = train(&section.trainer(false), &data, &mut network, &learner, &mut |_| {})?;
    let epochs = report.epochs.len().max(1) as f64;
    connection.send(&ScenarioReply::Trained(TrainingTimes {
        seconds: report.seconds / epochs,
        computing: report.compute_seconds / epochs,
        hidden_share: report.hidden_fraction,
        loss: report.loss,
    }))?;
    // Other ranks may still train: none leaves before all have finished.
    let _: Option<ScenarioCommand> = connection.receive()?;
    runtime.leave()
}
