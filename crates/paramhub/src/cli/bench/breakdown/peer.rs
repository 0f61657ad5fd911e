//! The processes of a breakdown: a hub, and workers that train through it.

use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use paramhub_syncer::Syncers;
use paramhub_train::exchange::{Exchange, ExchangeError, ExchangeStatistics};
use paramhub_train::hub::HubExchange;
use paramhub_train::net::Network;
use paramhub_train::trainer::{Progress, train};
use paramhub_worker::{Options, Transport};
use serde::{Deserialize, Serialize};

use super::stage::Stage;
use crate::cli::bench::spec::{Line, Meeting, Order, Report};
use crate::cli::bench::usage;
use crate::config::TrainSection;
use crate::embedded::{EmbeddedConfig, EmbeddedHub};
use crate::service::CreateService;
use crate::{Member, Membership};

/// One stage of one network, as all processes must know it.
#[derive(Clone, Serialize, Deserialize)]
pub(in crate::cli::bench) struct Lesson {
    pub(super) stage: Stage,
    /// What is trained, and how.
    pub(super) train: TrainSection,
    /// Steps that do not count.
    pub(super) warmup: usize,
}

/// What a worker has done in the steps that count.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(in crate::cli::bench) struct Learnt {
    pub(super) steps: usize,
    pub(super) seconds: f64,
    pub(super) cpu_seconds: f64,
}

/// A hub with its manager.
pub(in crate::cli::bench) fn teach(lesson: &Lesson, line: &mut Line) -> anyhow::Result<()> {
    let workers = lesson.train.workers();
    let mut config = EmbeddedConfig::with_cores(lesson.train.cores);
    config.hub.registry = lesson.stage.registry(workers)?;
    let hub = EmbeddedHub::start(config)?;
    let request = CreateService { name: "breakdown".into(), workers, options: Default::default() };
    let job = hub.client().create_service(&request)?;
    let url = hub.url().to_owned();
    line.say(&Report::Hosting(Meeting { url, job, cores: Vec::new(), raw: Default::default() }))?;
    while let Some(order) = line.hear()? {
        let Order::Tell = order else { bail!("the launcher gave a hub a worker's order") };
        if let Some(reason) = hub.has_failed() {
            bail!("the hub has failed: {reason}");
        }
        line.say(&Report::Used(Default::default()))?;
    }
    hub.stop();
    Ok(())
}

/// A worker.
pub(in crate::cli::bench) fn learn(
    lesson: &Lesson,
    rank: u32,
    at: Option<Meeting>,
    line: &mut Line,
) -> anyhow::Result<()> {
    let data = lesson.train.data.load()?;
    let mut network = Network::new(lesson.train.net, data.train.geometry(), lesson.train.seed)?;
    let mut hub = match at {
        Some(Meeting { url, job, .. }) => {
            let membership = Membership { url, namespace: job.namespace, nonce: job.nonce, rank };
            let options = Options { transport: Transport::Tcp, ..Options::default() };
            let settings = lesson.train.settings(&network)?;
            let job = Member::connect_with(membership, options)?.init(settings)?;
            Some(HubExchange::new(Syncers::new(job)))
        }
        None => None,
    };
    line.say(&Report::Joined)?;
    let Some(Order::Learn { start }) = line.hear()? else { return Ok(()) };
    std::thread::sleep(start.saturating_sub(usage::monotonic()));
    let mut nobody = Nobody { rank: rank as usize, workers: lesson.train.workers() as usize };
    let mut watch = Watch::default();
    let exchange: &mut dyn Exchange = match &mut hub {
        Some(hub) => hub,
        None => &mut nobody,
    };
    let mut on_progress = |progress: &Progress| watch.note(progress, lesson.warmup);
    train(&lesson.train.trainer(false), &data, &mut network, exchange, &mut on_progress)?;
    line.say(&Report::Learnt(watch.learnt().context("there was no step that counts")?))?;
    // The others may still be at it: nobody leaves before all are done.
    let _: Option<Order> = line.hear()?;
    hub.map_or(Ok(()), |hub| Ok(hub.leave()?))
}

/// When the steps that count began, and when they ended.
#[derive(Default)]
struct Watch {
    begun: Option<(usize, Instant, f64)>,
    ended: Option<(usize, Instant, f64)>,
}

impl Watch {
    fn note(&mut self, progress: &Progress, warmup: usize) {
        let now = || Some((progress.step, Instant::now(), usage::cpu_seconds()));
        if progress.step == warmup {
            self.begun = now();
        } else if progress.step == progress.of {
            self.ended = now();
        }
    }

    fn learnt(&self) -> Option<Learnt> {
        let ((first, begun, cpu_before), (last, ended, cpu_after)) = (self.begun?, self.ended?);
        let seconds = (ended - begun).as_secs_f64();
        Some(Learnt { steps: last - first, seconds, cpu_seconds: cpu_after - cpu_before })
    }
}

/// Takes gradients and forgets them; parameters stay what they are.
struct Nobody {
    rank: usize,
    workers: usize,
}

impl Exchange for Nobody {
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
