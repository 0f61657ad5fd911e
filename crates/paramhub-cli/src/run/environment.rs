//! This module starts or finds what serves a run: hubs that already run, or the hub that this launcher
//! starts on its host, and on the first host also their connection manager.

use std::io::ErrorKind;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

use anyhow::Context;
use paramhub::embedded::{EmbeddedConfig, EmbeddedHub};
use paramhub::service::{CreateService, ErrorCode, JobOptions, JobState, OnWorkerLoss, ServiceCreated};
use paramhub::{HubConfig, Manager, ManagerClient, ManagerConfig, ManagerError, RunningHub, RunningManager};
use paramhub_core::combinations::{self, Feature, Features};
use paramhub_core::composition::Reduction;
use paramhub_harness::launch::{LaunchEnd, Signals};
use paramhub_syncer::address_towards;

use super::end_job;
use crate::checkpoints::{effective_every, effective_resume, kept, say_next_start};
use crate::config::{Config, Deployment, RunSection};
use crate::jobs::{check_max_workers, elastic};
use crate::{Usage, checkpoints, client, deployment};

/// Bytes of a rank's program state, in a job whose ranks go back to earlier steps, if no other number is given.
const PROGRAM_STATE_BYTES: u32 = 4 << 20;

/// The interval at which a launcher polls for what the launcher of another host has yet to do.
const LOOK: Duration = Duration::from_millis(200);
/// The time that the first host's connection manager outlasts a job on several hosts.
const MANAGER_GRACE: Duration = Duration::from_millis(1500);
/// Bytes of a job's name that becomes part of its racks' names.
const NAME_BYTES_MAX: usize = 100;

/// The job of a run, and the parts of the run that are on this host.
pub(super) struct RunEnvironment {
    pub(super) client: ManagerClient,
    pub(super) job: ServiceCreated,
    /// The number of this host, from 0; `hosts` is how many there are.
    host: u32,
    hosts: u32,
    /// The rack that workers of this host report.
    pub(super) rack: Option<String>,
    /// A hub and its manager for a run on this host alone.
    embedded: Option<EmbeddedHub>,
    // The hub sends its last report to its manager, so it is dropped first.
    hub: Option<RunningHub>,
    manager: Option<RunningManager>,
    /// Where the job's other workers may be started by others.
    shared: Option<SharedJob>,
}

/// A job of which other launchers may start workers, too.
#[derive(Clone, Copy, Debug)]
struct SharedJob {
    /// The rank of the first worker that is started here.
    first_rank: u32,
    /// The number of ranks of the job.
    workers: u32,
}

/// The error of a run whose signal came before the first host's launcher had created the job.
#[derive(Debug)]
pub(super) struct Interrupted {
    name: String,
    pub(super) signal: i32,
}

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "interrupted before the first host had created job `{}`", self.name)
    }
}

impl std::error::Error for Interrupted {}

/// Refuses options that are out of bounds, or do not combine.
pub(crate) fn check(config: &Config) -> Result<(), Usage> {
    let refused = |problem: String| Err(Usage(problem));
    let section = &config.run;
    let all_workers = section.workers.checked_mul(section.hosts);
    if all_workers.is_none_or(|workers| workers > paramhub_core::limits::WORKERS_MAX) {
        return refused(format!(
            "{} workers on each of {} hosts are too many: a job has at most {}",
            section.workers,
            section.hosts,
            paramhub_core::limits::WORKERS_MAX
        ));
    }
    check_max_workers(section.workers * section.hosts, section.max_workers)?;
    let names_racks = section.hosts > 1 || deployment::is_colocated(section.deployment);
    if let Some(name) = section.name.as_ref().filter(|name| names_racks && name.len() > NAME_BYTES_MAX) {
        return refused(format!(
            "--name has {} characters: at most {NAME_BYTES_MAX} with --hosts, or with --deployment cc or cs",
            name.len()
        ));
    }
    match section.host_rank {
        Some(rank) if section.hosts > 1 && rank >= section.hosts => {
            refused(format!("--host-rank {rank} does not fit --hosts {}: hosts count from 0", section.hosts))
        }
        _ => combinations::check(asked(config)).map_err(|conflict| Usage(conflict.to_string())),
    }
}

/// The features of a run's options.
fn asked(config: &Config) -> Features {
    let (section, is_managed) = (&config.run, config.url.is_some());
    let runs = is_managed && !deployment::is_colocated(section.deployment);
    let of_run = Features::of([
        (Feature::HubCores, section.cores != RunSection::default().cores),
        (Feature::UnnamedJob, section.name.is_none()),
        (Feature::MaxRestarts, section.max_restarts > 0),
        (Feature::JoinsRunningJob, section.join.is_some()),
        (Feature::RunsMaxWorkers, section.max_workers.is_some()),
        (Feature::JobName, section.name.is_some()),
        (Feature::SeveralHosts, section.hosts > 1),
        (Feature::OneHost, section.hosts == 1),
        (Feature::HostRank, section.host_rank.is_some_and(|rank| rank > 0)),
        (Feature::NoHostRank, section.host_rank.is_none()),
    ]);
    let (_, start_workers) = elastic(section.workers * section.hosts, section.max_workers);
    let mut options = JobOptions { hubs: section.hubs, start_workers, ..options(section) };
    if section.join.is_some() {
        // A job that takes others goes on when it loses workers.
        options.on_worker_loss = match options.on_worker_loss {
            OnWorkerLoss::Fail => OnWorkerLoss::Continue,
            chosen => chosen,
        };
    }
    of_run
        .and(options.features())
        .and(deployment::asked(section.deployment, section.hubs, is_managed))
        .and(checkpoints::asked(runs, section.checkpoints.as_deref()))
}

/// The options of the job, except those that follow from the hubs.
pub(super) fn options(section: &RunSection) -> JobOptions {
    JobOptions {
        rendezvous_timeout_s: section.rendezvous_timeout_s,
        dead_after_s: section.dead_after_s,
        weight: section.weight,
        reduction: section.reduction,
        optimize_at: section.optimize_at,
        between_sites: section.between_sites,
        encrypt: section.encrypt,
        on_interface_down: section.on_interface_down,
        redial_grace_s: section.redial_grace_s,
        on_worker_loss: section.on_worker_loss,
        min_workers: section.min_workers,
        rewind_every: section.rewind_every,
        max_hubs: section.max_hubs,
        hub_label: section.hub_label,
        replicas: section.replicas,
        linger_s: section.linger_s,
        program_state_bytes: section.program_state_bytes.unwrap_or(match section.on_worker_loss {
            OnWorkerLoss::Rewind => PROGRAM_STATE_BYTES,
            OnWorkerLoss::Fail | OnWorkerLoss::Continue => 0,
        }),
        stragglers: section.stragglers,
        progress_timeout_s: section.progress_timeout_s,
        checkpoint_every: effective_every(section.checkpoints.as_deref(), section.checkpoint_every),
        resume: effective_resume(section.checkpoints.as_deref(), section.name.as_deref(), section.resume),
        ..JobOptions::default()
    }
}

impl RunEnvironment {
    /// A job for which nothing runs on this host.
    fn of(client: ManagerClient, job: ServiceCreated, section: &RunSection) -> RunEnvironment {
        RunEnvironment {
            client,
            job,
            host: section.host_rank.unwrap_or(0),
            hosts: section.hosts,
            rack: None,
            embedded: None,
            hub: None,
            manager: None,
            shared: None,
        }
    }

    /// Starts what belongs to this host and creates the job, or finds the one that the first host creates.
    pub(super) fn open(config: &Config, signals: &Signals) -> anyhow::Result<RunEnvironment> {
        let section = &config.run;
        let host = section.host_rank.unwrap_or(0);
        if config.url.is_none() && section.hubs == Some(0) {
            let manager = Manager::start(EmbeddedConfig::default().manager)?;
            let client = ManagerClient::new(&manager.url(), None)?;
            let job = create(section, &name(section)?, &client)?;
            return Ok(RunEnvironment { manager: Some(manager), ..RunEnvironment::of(client, job, section) });
        }
        if config.url.is_none() {
            let mut embedded = EmbeddedConfig::with_cores(section.cores);
            embedded.hub.checkpoints = section.checkpoints.clone().map(kept);
            let hub = EmbeddedHub::start(embedded)?;
            let client = hub.client().clone();
            let job = create(section, &name(section)?, &client)?;
            return Ok(RunEnvironment { embedded: Some(hub), ..RunEnvironment::of(client, job, section) });
        }
        if let Some(name) = &section.join {
            let client = client(config)?;
            let (job, shared) = join(section, name, &client)?;
            return Ok(RunEnvironment { shared: Some(shared), ..RunEnvironment::of(client, job, section) });
        }
        let is_colocated = deployment::is_colocated(section.deployment);
        let manager = match is_colocated && host == 0 {
            true => run_manager(config)?,
            false => None,
        };
        let client = client(config)?;
        let name = name(section)?;
        let rack_of = |host: u32| format!("{name}/{host}");
        let (rack, has_hub) = match section.deployment {
            Some(Deployment::Cc) => (Some(rack_of(0)), host == 0),
            Some(Deployment::Cs) => (Some(rack_of(host)), true),
            _ => (None, false),
        };
        // The job is created before its hub is started, so that no hub starts for a job whose name is taken.
        let job = match host {
            0 => create(section, &name, &client)?,
            _ => find(section, &name, &client, signals)?,
        };
        let shared =
            section.max_workers.map(|workers| SharedJob { first_rank: host * section.workers, workers });
        let mut environment =
            RunEnvironment { rack, manager, shared, ..RunEnvironment::of(client, job, section) };
        if has_hub {
            match start_hub(config, &environment) {
                Ok(hub) => environment.hub = Some(hub),
                Err(error) => {
                    end_job(&environment.client, &environment.job, None);
                    return Err(error);
                }
            }
        }
        Ok(environment)
    }

    /// Rank of this host's first worker.
    pub(super) fn first_rank(&self, section: &RunSection) -> u32 {
        self.shared.map_or(self.host * section.workers, |shared| shared.first_rank)
    }

    /// Whether others may start workers of the job, so that it does not end with those of this launcher.
    pub(super) fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// The number of ranks of the job.
    pub(super) fn workers(&self, section: &RunSection) -> u32 {
        self.shared.map_or(section.workers * section.hosts, |shared| shared.workers)
    }

    /// Returns the reason why the hub on this host has failed, if it has.
    pub(super) fn failure(&self) -> Option<String> {
        let embedded = self.embedded.as_ref().and_then(EmbeddedHub::failure);
        embedded.or_else(|| self.hub.as_ref().and_then(RunningHub::failure))
    }

    /// Returns whether the job's connection manager is not inside this process.
    pub(super) fn outlives_the_launcher(&self) -> bool {
        self.embedded.is_none() && self.manager.is_none()
    }

    /// Leaves nothing of the run behind. Parts that other hosts still use stay until the job has ended or a
    /// signal comes.
    pub(super) fn close(self, ended: Option<&LaunchEnd>, signals: &Signals) {
        let state = self.state();
        if let Some(hub) = self.embedded {
            // The hub may not know yet that the workers have left. A job that they never joined ends with the
            // hub.
            if state == Some(JobState::Running) {
                end_job(&self.client, &self.job, ended);
            }
            return hub.stop();
        }
        let is_well = ended.is_some_and(|ended| {
            ended.failed.is_empty() && ended.signal.is_none() && ended.stopped.is_none()
        });
        // A job of which others start workers goes on without these.
        if !self.is_shared() && (self.hosts == 1 || !is_well) {
            end_job(&self.client, &self.job, ended);
        }
        // Workers of other hosts may go on after those of this one have left. Not so in a job that no worker
        // of this host has joined: its name is free when its lease runs out.
        let goes_on =
            || self.state().is_some_and(|state| matches!(state, JobState::Initialising | JobState::Running));
        if self.hub.is_some() || self.manager.is_some() {
            while goes_on() && signals.wait(LOOK).is_none() {}
        }
        if let Some(hub) = self.hub {
            hub.stop();
        }
        if let Some(manager) = self.manager {
            // Launchers of other hosts find at their next poll that the job is over or has failed, and then
            // stop their hubs. They would log a warning if the manager stopped first.
            if self.hosts > 1 {
                let _ = signals.wait(MANAGER_GRACE);
            }
            manager.stop();
        }
    }

    /// The job's state; `None` if the manager does not answer any more.
    fn state(&self) -> Option<JobState> {
        self.client.job(&self.job.namespace.to_string()).ok().map(|job| job.state)
    }
}

fn name(section: &RunSection) -> anyhow::Result<String> {
    match &section.name {
        Some(name) => Ok(name.clone()),
        None => Ok(format!("run-{:08x}", getrandom::u32().context("the system has no random numbers")?)),
    }
}

fn create(section: &RunSection, name: &str, client: &ManagerClient) -> anyhow::Result<ServiceCreated> {
    let (hubs, reduction) = match section.deployment {
        // Each of several hubs sums what its host's workers send, and completes its share of the sums for
        // all.
        Some(Deployment::Cc) => (Some(1), or_sharded(section.reduction)),
        Some(Deployment::Cs) => (Some(section.hosts), or_sharded(section.reduction)),
        deployment => {
            let hubs = deployment::hubs_needed(deployment, section.hubs, &options(section), client)?;
            (hubs, section.reduction)
        }
    };
    let (workers, start_workers) = elastic(section.workers * section.hosts, section.max_workers);
    let options = JobOptions { reduction, hubs, start_workers, ..options(section) };
    say_next_start(section.checkpoints.as_deref(), name, options.resume);
    Ok(client.create_service(&CreateService { name: name.to_owned(), workers, options })?)
}

/// Resolves `auto`: the hubs of a run have a known purpose, so the network need not be probed.
fn or_sharded(reduction: Reduction) -> Reduction {
    if reduction == Reduction::Auto { Reduction::Sharded } else { reduction }
}

/// Finds the job that the first host creates, as soon as it exists.
fn find(
    section: &RunSection,
    name: &str,
    client: &ManagerClient,
    signals: &Signals,
) -> anyhow::Result<ServiceCreated> {
    let begun = Instant::now();
    let found = loop {
        let not_yet = match client.membership(name) {
            Ok(found) => break found,
            Err(error) if error.is_away() => error,
            Err(error) if error.code() == Some(ErrorCode::NotFound) => error,
            Err(error) => return Err(error.into()),
        };
        if begun.elapsed().as_secs_f64() >= section.rendezvous_timeout_s {
            anyhow::bail!(
                "the first host has not created job `{name}` within {} s: start it there with --host-rank 0 and the same --name \
                 and --hub. Last: {not_yet}",
                section.rendezvous_timeout_s
            );
        }
        if let Some(signal) = signals.wait(LOOK) {
            return Err(Interrupted { name: name.to_owned(), signal }.into());
        }
    };
    let (all, here) = (client.job(&found.namespace.to_string())?.workers, section.workers * section.hosts);
    if all != here {
        let problem = format!(
            "job `{name}` has {all} workers, and -n {} on --hosts {} make {here}: give every host the same",
            section.workers, section.hosts
        );
        return Err(Usage(problem).into());
    }
    Ok(found)
}

/// Finds a running job, and the first ranks of it, one after the other, that have no process.
fn join(
    section: &RunSection,
    name: &str,
    client: &ManagerClient,
) -> anyhow::Result<(ServiceCreated, SharedJob)> {
    let found = client.membership(name)?;
    let status = client.job(&found.namespace.to_string())?;
    let is_free = |rank: &u32| !status.connected.contains(rank);
    let free: Vec<u32> = (0..status.workers).filter(is_free).collect();
    let wanted = section.workers as usize;
    let adjacent = |ranks: &&[u32]| ranks[wanted - 1] - ranks[0] == section.workers - 1;
    match free.windows(wanted).find(adjacent) {
        Some(ranks) => Ok((found, SharedJob { first_rank: ranks[0], workers: status.workers })),
        None => anyhow::bail!(
            "job `{name}` has {} of its at most {} workers, and no {wanted} ranks in a row are free{}",
            status.connected.len(),
            status.workers,
            match free.as_slice() {
                [] => String::new(),
                free => format!(": only {free:?}, which can be started one by one"),
            }
        ),
    }
}

/// Starts the connection manager if the URL is an address of this host on which no process listens yet.
fn run_manager(config: &Config) -> anyhow::Result<Option<RunningManager>> {
    let client = client(config)?;
    if client.has_several() {
        // They share a store, which one that is started here for a job would not have.
        return Ok(None);
    }
    let listen: SocketAddr = client
        .host_and_port()
        .to_socket_addrs()
        .with_context(|| format!("{} leads nowhere", client.url()))?
        .next()
        .with_context(|| format!("{} leads nowhere", client.url()))?;
    let manager = ManagerConfig { listen, admin_token: config.admin_token(), ..ManagerConfig::default() };
    match Manager::start(manager) {
        Ok(manager) => Ok(Some(manager)),
        Err(ManagerError::Listen { cause, .. })
            if matches!(cause.kind(), ErrorKind::AddrInUse | ErrorKind::AddrNotAvailable) =>
        {
            Ok(None)
        }
        // Another machine's manager needs a token as well, so this is refused before the address is tried.
        Err(ManagerError::TokenNeeded { .. }) => Err(Usage(format!(
            "several hosts use the connection manager at {}: give all of them the same --admin-token or PARAMHUB_ADMIN_TOKEN, \
             for instance from `openssl rand -hex 32`",
            client.url()
        ))
        .into()),
        Err(error) => Err(error.into()),
    }
}

/// Starts this host's hub, for the workers of its rack alone.
fn start_hub(config: &Config, environment: &RunEnvironment) -> anyhow::Result<RunningHub> {
    let (listen, interfaces) = match &config.hub.listen {
        Some(listen) => (listen.clone(), config.hub.interfaces.clone()),
        None => (
            vec![SocketAddr::new(address_towards(environment.client.url()).map_err(anyhow::Error::msg)?, 0)],
            None,
        ),
    };
    let hub = HubConfig {
        listen,
        interfaces: interfaces.unwrap_or_default(),
        rack: environment.rack.clone(),
        cores: config.run.cores,
        checkpoints: config.run.checkpoints.clone().map(kept),
        ..HubConfig::default()
    };
    Ok(RunningHub::start(environment.client.clone(), hub)?)
}
