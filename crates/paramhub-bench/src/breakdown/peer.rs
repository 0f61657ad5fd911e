//! The processes of a breakdown: a hub, and workers that train through it.

use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use paramhub::embedded::{EmbeddedConfig, EmbeddedHub};
use paramhub::service::CreateService;
use paramhub::{Member, Membership};
use paramhub_harness::exchange::messages::{JobEndpoints, JsonConnection};
use paramhub_harness::exchange::usage;
use paramhub_syncer::Syncers;
use paramhub_train::exchange::{Exchange, ExchangeError, ExchangeStatistics};
use paramhub_train::hub::HubExchange;
use paramhub_train::net::Network;
use paramhub_train::trainer::{Progress, train};
use paramhub_worker::{Options, Transport};
use serde::{Deserialize, Serialize};

use super::stage::BreakdownStage;
use crate::training::TrainSection;

/// One stage of one network, as all processes need it.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct TrainingTask {
    pub(super) stage: BreakdownStage,
    /// The training.
    pub(super) train: TrainSection,
    /// Steps that do not count.
    pub(super) warmup: usize,
}

/// A message from the launcher.
#[derive(Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub(crate) enum TrainingCommand {
    /// Be the hub of a training. Answered by [`TrainingReport::Hosting`].
    Host { task: TrainingTask },
    /// Be this rank of a training, through the hub if there is one. Answered by [`TrainingReport::Joined`].
    Join { task: TrainingTask, rank: u32, at: Option<JobEndpoints> },
    /// Train, from this instant of the monotonic clock on. Answered by [`TrainingReport::Trained`].
    Train { start: Duration },
}

/// A message to the launcher.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "snake_case")]
pub(super) enum TrainingReport {
    Hosting(JobEndpoints),
    Joined,
    Trained(TrainingMeasurement),
}

/// The measurements of a worker in the steps that count.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct TrainingMeasurement {
    pub(super) steps: usize,
    pub(super) seconds: f64,
    pub(super) cpu_seconds: f64,
}

/// Runs a process of a training until the launcher hangs up.
pub(crate) fn run_process(command: TrainingCommand, connection: &mut JsonConnection) -> anyhow::Result<()> {
    match command {
        TrainingCommand::Host { task } => run_hub(&task, connection),
        TrainingCommand::Join { task, rank, at } => run_worker(&task, rank, at, connection),
        TrainingCommand::Train { .. } => bail!("the launcher sent a command out of turn"),
    }
}

/// Runs a hub with its manager.
fn run_hub(task: &TrainingTask, connection: &mut JsonConnection) -> anyhow::Result<()> {
    let workers = task.train.workers();
    let mut config = EmbeddedConfig::with_cores(task.train.cores);
    config.hub.registry = task.stage.registry(workers)?;
    let hub = EmbeddedHub::start(config)?;
    let request = CreateService { name: "breakdown".into(), workers, options: Default::default() };
    let job = hub.client().create_service(&request)?;
    let url = hub.url().to_owned();
    connection.send(&TrainingReport::Hosting(JobEndpoints::new(url, job)))?;
    if connection.receive::<TrainingCommand>()?.is_some() {
        bail!("the launcher gave a hub a worker's command");
    }
    hub.stop();
    Ok(())
}

/// Runs a worker.
fn run_worker(
    task: &TrainingTask,
    rank: u32,
    at: Option<JobEndpoints>,
    connection: &mut JsonConnection,
) -> anyhow::Result<()> {
    let data = task.train.data.load()?;
    let mut network = Network::new(task.train.net, data.train.geometry(), task.train.seed)?;
    let mut hub = match at {
        Some(JobEndpoints { url, job, .. }) => {
            let membership = Membership::of_job(url, &job, rank);
            let options = Options { transport: Transport::Tcp, ..Options::default() };
            let settings = task.train.settings(&network)?;
            let job = Member::connect_with(membership, options)?.init(settings)?;
            Some(HubExchange::new(Syncers::new(job)))
        }
        None => None,
    };
    connection.send(&TrainingReport::Joined)?;
    let Some(TrainingCommand::Train { start }) = connection.receive()? else { return Ok(()) };
    std::thread::sleep(start.saturating_sub(usage::monotonic()));
    let mut null_exchange = NullExchange { rank: rank as usize, workers: task.train.workers() as usize };
    let mut timer = StepTimer::default();
    let exchange: &mut dyn Exchange = match &mut hub {
        Some(hub) => hub,
        None => &mut null_exchange,
    };
    let mut on_progress = |progress: &Progress| timer.record(progress, task.warmup);
    train(&task.train.trainer(false), &data, &mut network, exchange, &mut on_progress)?;
    connection
        .send(&TrainingReport::Trained(timer.measurement().context("there was no step that counts")?))?;
    // Other workers may still train: none leaves before all have finished.
    let _: Option<TrainingCommand> = connection.receive()?;
    hub.map_or(Ok(()), |hub| Ok(hub.leave()?))
}

/// The time at which the steps that count began and ended.
#[derive(Default)]
struct StepTimer {
    begun: Option<(usize, Instant, f64)>,
    ended: Option<(usize, Instant, f64)>,
}

impl StepTimer {
    fn record(&mut self, progress: &Progress, warmup: usize) {
        let now = || Some((progress.step, Instant::now(), usage::cpu_seconds()));
        if progress.step == warmup {
            self.begun = now();
        } else if progress.step == progress.of {
            self.ended = now();
        }
    }

    fn measurement(&self) -> Option<TrainingMeasurement> {
        let ((first, begun, cpu_before), (last, ended, cpu_after)) = (self.begun?, self.ended?);
        let seconds = (ended - begun).as_secs_f64();
        Some(TrainingMeasurement { steps: last - first, seconds, cpu_seconds: cpu_after - cpu_before })
    }
}

/// Discards gradients and leaves the parameters unchanged.
struct NullExchange {
    rank: usize,
    workers: usize,
}

impl Exchange for NullExchange {
    fn workers(&self) -> usize {
        self.workers
    }

    fn ranks(&self) -> Range<usize> {
        self.rank..self.rank + 1
    }

    fn push(&mut self, _: usize, _: Vec<f32>) -> Result<(), ExchangeError> {
        Ok(())
    }

    fn parameters(&mut self, _: usize, _: &mut Vec<f32>) -> Result<(), ExchangeError> {
        Ok(())
    }

    fn statistics(&self) -> ExchangeStatistics {
        ExchangeStatistics { in_flight: Duration::ZERO, ..ExchangeStatistics::default() }
    }
}
