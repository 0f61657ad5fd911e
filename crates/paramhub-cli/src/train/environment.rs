//! The system that exchanges the gradients of a training, and its addresses for workers.

use anyhow::Context;
use paramhub::embedded::{EmbeddedConfig, EmbeddedHub};
use paramhub::service::{
    CoreCounters, CreateService, JobOptions, JobState, JobStatus, OnWorkerLoss, ServiceCreated,
};
use paramhub::{Manager, ManagerClient, RunningManager};
use paramhub_harness::launch::LaunchEnd;

use crate::checkpoints::{effective_every, effective_resume, kept, say_next_start};
use crate::config::{Config, ExchangeKind, TrainSection};
use crate::run::{end_job, last_status, say_left_out};
use crate::{client, deployment};

/// The place where the workers of a training meet.
pub(super) enum TrainEnvironment {
    /// One process computes the shares of all workers and exchanges with none.
    Local,
    /// A hub in this process.
    Embedded(Box<EmbeddedHub>, ServiceCreated),
    /// A hub that already runs.
    Running(ManagerClient, ServiceCreated),
    /// A connection manager in this process, for workers that only meet there.
    Rendezvous(RunningManager, ManagerClient, ServiceCreated),
}

impl TrainEnvironment {
    pub(super) fn open(config: &Config) -> anyhow::Result<TrainEnvironment> {
        let section = &config.train;
        if section.exchange == ExchangeKind::Local {
            return Ok(TrainEnvironment::Local);
        }
        if config.url.is_some() {
            let client = client(config)?;
            let job = create(section, &client)?;
            return Ok(TrainEnvironment::Running(client, job));
        }
        if section.exchange.collective().is_some() {
            let manager = Manager::start(EmbeddedConfig::default().manager)?;
            let client = ManagerClient::new(&manager.url(), None)?;
            let job = create(section, &client)?;
            return Ok(TrainEnvironment::Rendezvous(manager, client, job));
        }
        let mut embedded = EmbeddedConfig::with_cores(section.cores);
        embedded.hub.checkpoints = section.checkpoints.clone().map(kept);
        let hub = EmbeddedHub::start(embedded)?;
        let job = create(section, hub.client())?;
        Ok(TrainEnvironment::Embedded(Box::new(hub), job))
    }

    /// The manager's URL for workers, and their job.
    pub(super) fn membership(&self) -> Option<(String, &ServiceCreated)> {
        match self {
            TrainEnvironment::Local => None,
            TrainEnvironment::Embedded(hub, job) => Some((hub.url().to_owned(), job)),
            TrainEnvironment::Running(client, job) | TrainEnvironment::Rendezvous(_, client, job) => {
                Some((client.url_for_workers(job), job))
            }
        }
    }

    /// The time counters of each hub core. A running hub reports to its manager now and then, so its numbers
    /// are a little old.
    pub(super) fn cores(&self) -> Vec<CoreCounters> {
        match self {
            TrainEnvironment::Local | TrainEnvironment::Rendezvous(..) => Vec::new(),
            TrainEnvironment::Embedded(hub, _) => hub.cores(),
            TrainEnvironment::Running(client, _) => {
                let hubs = client.hubs().unwrap_or_default();
                hubs.into_iter().flat_map(|hub| hub.cores).collect()
            }
        }
    }

    pub(super) fn failure(&self) -> Option<String> {
        match self {
            TrainEnvironment::Embedded(hub, _) => hub.failure(),
            TrainEnvironment::Local | TrainEnvironment::Running(..) | TrainEnvironment::Rendezvous(..) => {
                None
            }
        }
    }

    /// Prints how often each rank was left out.
    pub(super) fn say_left_out(&self) {
        match self {
            TrainEnvironment::Local | TrainEnvironment::Rendezvous(..) => {}
            TrainEnvironment::Embedded(hub, job) => say_left_out(hub.client(), job),
            TrainEnvironment::Running(client, job) => say_left_out(client, job),
        }
    }

    /// What the manager knows of the job when its workers have ended.
    pub(super) fn last_status(&self) -> Option<JobStatus> {
        self.job().and_then(|(client, job)| last_status(client, job))
    }

    /// The job, and a client of its manager.
    pub(super) fn job(&self) -> Option<(&ManagerClient, &ServiceCreated)> {
        match self {
            TrainEnvironment::Local => None,
            TrainEnvironment::Embedded(hub, job) => Some((hub.client(), job)),
            TrainEnvironment::Running(client, job) | TrainEnvironment::Rendezvous(_, client, job) => {
                Some((client, job))
            }
        }
    }

    /// Returns whether the job's connection manager is not inside this process.
    pub(super) fn outlives_the_launcher(&self) -> bool {
        matches!(self, TrainEnvironment::Running(..))
    }

    /// Leaves nothing of the job behind. `ended` is how its workers ended; `None` if they could not be
    /// started.
    pub(super) fn close(self, ended: Option<&LaunchEnd>) {
        if let Some((client, job)) = self.job() {
            let is_running = || {
                let status = client.job(&job.namespace.to_string());
                status.is_ok_and(|status| status.state == JobState::Running)
            };
            // A job that the workers never joined ends with the manager if that is in this process.
            if self.outlives_the_launcher() || is_running() {
                end_job(client, job, ended);
            }
        }
        self.stop();
    }

    /// Leaves nothing of a job behind whose ranks have all left.
    pub(super) fn close_when_all_have_left(self) {
        if let Some((client, job)) = self.job() {
            // If this fails, the manager is gone and there is nothing to end.
            let _ =
                client.workers_have_ended(&job.namespace.to_string(), "its workers ended without leaving");
        }
        self.stop();
    }

    fn stop(self) {
        match self {
            TrainEnvironment::Local | TrainEnvironment::Running(..) => {}
            TrainEnvironment::Embedded(hub, _) => hub.stop(),
            TrainEnvironment::Rendezvous(manager, ..) => manager.stop(),
        }
    }
}

/// The options of the job, except the number of its hubs.
pub(super) fn options(section: &TrainSection) -> JobOptions {
    JobOptions {
        checkpoint_every: effective_every(section.checkpoints.as_deref(), section.checkpoint_every),
        resume: effective_resume(section.checkpoints.as_deref(), section.name.as_deref(), section.resume),
        reduction: section.reduction,
        encrypt: section.encrypt,
        on_interface_down: section.on_interface_down,
        max_hubs: section.max_hubs,
        hub_label: section.hub_label,
        replicas: section.replicas,
        stragglers: section.stragglers,
        progress_timeout_s: section.progress_timeout_s,
        on_worker_loss: match section.chaos_s {
            Some(_) => OnWorkerLoss::Continue,
            None => OnWorkerLoss::Fail,
        },
        ..JobOptions::default()
    }
}

fn create(section: &TrainSection, client: &ManagerClient) -> anyhow::Result<ServiceCreated> {
    let options = options(section);
    let name = match &section.name {
        Some(name) => name.clone(),
        None if options.checkpoint_every.is_some() || options.resume.is_some() => "train".into(),
        None => {
            let suffix = getrandom::u32().context("the system has no random numbers")?;
            format!("train-{suffix:08x}")
        }
    };
    let hubs = match section.exchange.collective() {
        Some(_) => Some(0),
        None => deployment::hubs_needed(section.deployment, section.hubs, &options, client)?,
    };
    let options = JobOptions { hubs, ..options };
    say_next_start(section.checkpoints.as_deref(), &name, options.resume);
    let request = CreateService { name, workers: section.workers(), options };
    Ok(client.create_service(&request)?)
}
