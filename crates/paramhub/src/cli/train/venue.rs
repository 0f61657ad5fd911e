//! Who exchanges the gradients of a training, and how workers find it.

use anyhow::Context;

use crate::cli::checkpoints::{effective_every, kept};
use crate::cli::run::{end_job, say_left_out};
use crate::cli::{Usage, client, deployment};
use crate::config::{Config, ExchangeKind, TrainSection};
use crate::embedded::{EmbeddedConfig, EmbeddedHub};
use crate::launch::Ended;
use crate::service::{CoreCounters, CreateService, JobOptions, ServiceCreated};
use crate::{Manager, ManagerClient, RunningManager};

/// Where the workers of a training meet.
pub(super) enum Venue {
    /// The only worker exchanges with itself.
    Local,
    /// A hub in this process.
    Embedded(Box<EmbeddedHub>, ServiceCreated),
    /// Somebody's running hub.
    Running(ManagerClient, ServiceCreated),
    /// A connection manager in this process, for workers that only meet there.
    Meeting(RunningManager, ManagerClient, ServiceCreated),
}

impl Venue {
    pub(super) fn open(config: &Config) -> anyhow::Result<Venue> {
        let section = &config.train;
        if section.exchange == ExchangeKind::Local {
            return Ok(Venue::Local);
        }
        deployment::check(section.deployment, section.hubs, config.url.is_some())?;
        if config.url.is_some() && deployment::is_colocated(section.deployment) {
            let problem =
                "with --deployment cc or cs `train` runs the hub itself, beside its workers: leave out --hub";
            return Err(Usage(problem.into()).into());
        }
        if config.url.is_some() {
            let client = client(config)?;
            let job = create(section, &client)?;
            return Ok(Venue::Running(client, job));
        }
        if section.exchange.collective().is_some() {
            let manager = Manager::start(EmbeddedConfig::default().manager)?;
            let client = ManagerClient::new(&manager.url(), None)?;
            let job = create(section, &client)?;
            return Ok(Venue::Meeting(manager, client, job));
        }
        let mut embedded = EmbeddedConfig::with_cores(section.cores);
        embedded.hub.checkpoints = section.checkpoints.clone().map(kept);
        let hub = EmbeddedHub::start(embedded)?;
        let job = create(section, hub.client())?;
        Ok(Venue::Embedded(Box::new(hub), job))
    }

    pub(super) fn seats(&self) -> Option<(&str, &ServiceCreated)> {
        match self {
            Venue::Local => None,
            Venue::Embedded(hub, job) => Some((hub.url(), job)),
            Venue::Running(client, job) | Venue::Meeting(_, client, job) => Some((client.url(), job)),
        }
    }

    /// What each hub core has done so far. A running hub tells its manager now and then, so its numbers are a little old.
    pub(super) fn cores(&self) -> Vec<CoreCounters> {
        match self {
            Venue::Local | Venue::Meeting(..) => Vec::new(),
            Venue::Embedded(hub, _) => hub.cores(),
            Venue::Running(client, _) => {
                let hubs = client.hubs().unwrap_or_default();
                hubs.into_iter().flat_map(|hub| hub.cores).collect()
            }
        }
    }

    pub(super) fn failure(&self) -> Option<String> {
        match self {
            Venue::Embedded(hub, _) => hub.has_failed(),
            Venue::Local | Venue::Running(..) | Venue::Meeting(..) => None,
        }
    }

    /// How often which rank was left out.
    pub(super) fn say_left_out(&self) {
        match self {
            Venue::Local | Venue::Meeting(..) => {}
            Venue::Embedded(hub, job) => say_left_out(hub.client(), job),
            Venue::Running(client, job) => say_left_out(client, job),
        }
    }

    /// The job, and its manager's client.
    pub(super) fn job(&self) -> Option<(&ManagerClient, &ServiceCreated)> {
        match self {
            Venue::Local => None,
            Venue::Embedded(hub, job) => Some((hub.client(), job)),
            Venue::Running(client, job) | Venue::Meeting(_, client, job) => Some((client, job)),
        }
    }

    /// Whether the job's connection manager is not inside this process.
    pub(super) fn outlives_the_launcher(&self) -> bool {
        matches!(self, Venue::Running(..))
    }

    /// Leaves nothing of the job behind; `ended` is how its workers ended, where they could be started at all.
    pub(super) fn close(self, ended: Option<&Ended>) {
        if let Some((client, job)) = self.job() {
            end_job(client, job, ended);
        }
        self.stop();
    }

    /// Leaves nothing of a job behind whose ranks have all left.
    pub(super) fn close_when_all_have_left(self) {
        if let Some((client, job)) = self.job() {
            // There is nobody left to tell of a failure.
            let _ =
                client.workers_have_ended(&job.namespace.to_string(), "its workers ended without leaving");
        }
        self.stop();
    }

    fn stop(self) {
        match self {
            Venue::Local | Venue::Running(..) => {}
            Venue::Embedded(hub, _) => hub.stop(),
            Venue::Meeting(manager, ..) => manager.stop(),
        }
    }
}

fn create(section: &TrainSection, client: &ManagerClient) -> anyhow::Result<ServiceCreated> {
    let checkpoint_every = effective_every(section.checkpoints.as_deref(), section.checkpoint_every);
    let name = match &section.name {
        Some(name) => name.clone(),
        None if checkpoint_every.is_some() || section.resume.is_some() => "train".into(),
        None => {
            let suffix = getrandom::u32().context("the system has no random numbers")?;
            format!("train-{suffix:08x}")
        }
    };
    let hubs = match section.exchange.collective() {
        Some(_) => Some(0),
        None => deployment::hubs_needed(section.deployment, section.hubs, section.reduction, client)?,
    };
    let options = JobOptions {
        checkpoint_every,
        resume: section.resume,
        reduction: section.reduction,
        on_interface_down: section.on_interface_down,
        hubs,
        stragglers: section.stragglers,
        progress_timeout_s: section.progress_timeout_s,
        ..Default::default()
    };
    let request = CreateService { name, workers: section.workers(), options };
    Ok(client.create_service(&request)?)
}
