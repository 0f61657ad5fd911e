//! Real training through a design's store.

use std::num::NonZeroUsize;
use std::sync::Arc;

use anyhow::bail;
use paramhub_kernels::Registry;
use paramhub_train::dataflow::{Learner, train};
use paramhub_train::net::Network;

use super::part::{Cue, Heard, Trained};
use super::stage::Stage;
use crate::cli::bench::spec::{Line, Order, Report};
use crate::cli::bench::usage;
use crate::config::TrainSection;

/// Trains once, when it is this contestant's turn.
pub(super) fn learn(stage: &Stage, section: &TrainSection, line: &mut Line) -> anyhow::Result<()> {
    let data = Arc::new(section.data.load()?);
    let mut network = Network::new(section.net, data.train.geometry(), section.seed)?;
    line.say(&Report::Design(Heard::Joined))?;
    let start = match line.hear()? {
        Some(Order::Design(Cue::Train { start })) => start,
        Some(_) => bail!("the launcher gave a cue out of turn"),
        None => return stage.leave(),
    };
    let registry = Registry::with_builtins();
    let optimizer = registry.optimizer(section.optimizer.kernel())?;
    let hyperparameters = section.hyperparameters(&registry)?;
    let (store, workers_per_rank) = (&*stage.store, NonZeroUsize::MIN);
    let learner = Learner { store, workers_per_rank, optimizer, hyperparameters };
    std::thread::sleep(start.saturating_sub(usage::monotonic()));
    let report = train(&section.trainer(false), &data, &mut network, &learner, &mut |_| {})?;
    let epochs = report.epochs.len().max(1) as f64;
    line.say(&Report::Design(Heard::Trained(Trained {
        seconds: report.seconds / epochs,
        computing: report.compute_seconds / epochs,
        hidden_share: report.hidden_fraction,
        loss: report.loss,
    })))?;
    // The others may still be at it: nobody leaves before all are done.
    let _: Option<Order> = line.hear()?;
    stage.leave()
}
