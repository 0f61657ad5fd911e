//! `paramhub run`: a local launcher.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use paramhub_core::checkpoint::{Every, Resume};
use paramhub_core::composition::{OptimizeAt, Reduction};

use super::checkpoints::{check, effective_every, kept};
use super::{ManagerUrl, Usage, client, overlay};
use crate::ManagerClient;
use crate::cli::ExitCode;
use crate::config::Config;
use crate::embedded::{EmbeddedConfig, EmbeddedHub};
use crate::launch::{Ended, Launch, Line, Seat, Signals, Stream, Watch, describe, free_port};
use crate::service::{CreateService, JobOptions, JobState, OnInterfaceDown, ServiceCreated};

/// How often the hub in this process is looked after.
const HEALTH_INTERVAL: Duration = Duration::from_millis(500);

/// Start the workers of a job on this machine.
///
/// Each worker finds its place in RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and its
/// job in PARAMHUB_URL, PARAMHUB_JOB and PARAMHUB_SECRET. Its output appears line by line, its rank in front. When one
/// worker fails, the others get some seconds to say what they lost, and are then ended. The exit code is the highest of
/// those workers that were not ended because of another; a worker killed by a signal counts as 128 and the signal.
#[derive(Args)]
#[command(args_override_self = true)]
pub(super) struct RunFlags {
    /// Workers to start [default: 1]
    #[arg(short = 'n', long, value_name = "N", env = "PARAMHUB_RUN_WORKERS", value_parser = clap::value_parser!(u32).range(1..=1024))]
    workers: Option<u32>,
    #[command(flatten)]
    url: ManagerUrl,
    /// The job's name [default: run- and eight random digits]
    #[arg(long, value_name = "JOB", env = "PARAMHUB_RUN_NAME")]
    name: Option<String>,
    /// Cores of the hub that is started where none is given [default: 1]
    #[arg(long, value_name = "N", env = "PARAMHUB_RUN_CORES")]
    cores: Option<usize>,
    /// How long workers wait for each other at the start [default: 60]
    #[arg(long, value_name = "SECONDS", env = "PARAMHUB_RUN_RENDEZVOUS_TIMEOUT")]
    rendezvous_timeout: Option<f64>,
    /// How long a worker may be silent before the job is failed [default: 30]
    #[arg(long, value_name = "SECONDS", env = "PARAMHUB_RUN_DEAD_AFTER")]
    dead_after: Option<f64>,
    /// How sums become those of all workers where hubs serve racks or hosts: auto, flat, tree, ring or sharded
    /// [default: auto]
    #[arg(long, value_name = "HOW", env = "PARAMHUB_RUN_REDUCTION")]
    reduction: Option<Reduction>,
    /// Where the optimizer runs then: every-site or owner [default: every-site]
    #[arg(long, value_name = "WHERE", env = "PARAMHUB_RUN_OPTIMIZE_AT")]
    optimize_at: Option<OptimizeAt>,
    /// What becomes of the job when a network interface goes down: fail, or continue over those that are left [default: fail]
    #[arg(long, value_name = "WHAT", env = "PARAMHUB_RUN_ON_INTERFACE_DOWN")]
    on_interface_down: Option<OnInterfaceDown>,
    /// How many hubs must have joined the connection manager at --hub before the job begins; all that have serve it
    /// [default: the first is enough]
    #[arg(long, value_name = "N", env = "PARAMHUB_RUN_HUBS")]
    hubs: Option<u32>,
    /// Directory for checkpoints of the hub that is started where none is given; a hub that runs has its own [default: none]
    #[arg(long, value_name = "DIR", env = "PARAMHUB_RUN_CHECKPOINTS")]
    checkpoints: Option<PathBuf>,
    /// How often the hubs write a checkpoint: a number of steps, as in 1000, or of seconds, as in 30s [default: 30s with
    /// --checkpoints, else never]
    #[arg(long, value_name = "N|Ns", env = "PARAMHUB_RUN_CHECKPOINT_EVERY")]
    checkpoint_every: Option<Every>,
    /// Go on from a checkpoint of the job of this name, the newest or that of a step [default: begin anew]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "latest", value_name = "latest|STEP",
        env = "PARAMHUB_RUN_RESUME")]
    resume: Option<Resume>,
    /// What each worker runs
    #[arg(last = true, required_unless_present = "print_config", value_name = "CMD")]
    command: Vec<OsString>,
}

impl RunFlags {
    pub(super) fn apply(self, config: &mut Config) -> Vec<OsString> {
        self.url.apply(config);
        overlay!(self => config.run; workers, cores, reduction, optimize_at, on_interface_down;
            name, hubs, checkpoints, checkpoint_every, resume);
        let section = &mut config.run;
        section.rendezvous_timeout_s = self.rendezvous_timeout.unwrap_or(section.rendezvous_timeout_s);
        section.dead_after_s = self.dead_after.unwrap_or(section.dead_after_s);
        self.command
    }
}

pub(super) fn run(config: &Config, command: Vec<OsString>) -> anyhow::Result<ExitCode> {
    let section = &config.run;
    if section.workers == 0 || section.cores == 0 {
        return Err(Usage("a job needs at least one worker, and a hub at least one core".into()).into());
    }
    if config.url.is_none() && section.hubs.is_some_and(|hubs| hubs > 1) {
        let problem =
            "the hub that `run` starts is the only one: several need --hub URL, a connection manager's";
        return Err(Usage(problem.into()).into());
    }
    check(config.url.is_some(), section.checkpoints.as_deref())?;
    let is_stable =
        section.checkpoints.is_some() || section.checkpoint_every.is_some() || section.resume.is_some();
    if is_stable && section.name.is_none() {
        let problem = "checkpoints are found again by the job's name: give it one with --name";
        return Err(Usage(problem.into()).into());
    }
    let signals = Signals::catch()?;
    let (embedded, client) = match config.url {
        Some(_) => (None, client(config)?),
        None => {
            let mut embedded = EmbeddedConfig::with_cores(section.cores);
            embedded.hub.checkpoints = section.checkpoints.clone().map(kept);
            let hub = EmbeddedHub::start(embedded)?;
            let client = hub.client().clone();
            (Some(hub), client)
        }
    };
    let job = create(config, &client)?;
    let started = commands(config, &client, &job, &command).and_then(Launch::start);
    let mut watch = Printer { embedded: embedded.as_ref(), checked: Instant::now() };
    let ended = started.map(|launch| launch.supervise(&signals, &mut watch));
    match embedded {
        Some(hub) => hub.stop(),
        None => end_job(&client, &job, ended.as_ref().ok()),
    }
    Ok(ExitCode::from(conclude(&ended?)))
}

fn create(config: &Config, client: &ManagerClient) -> anyhow::Result<ServiceCreated> {
    let section = &config.run;
    let name = match &section.name {
        Some(name) => name.clone(),
        None => format!("run-{:08x}", getrandom::u32().context("the system has no random numbers")?),
    };
    let options = JobOptions {
        rendezvous_timeout_s: section.rendezvous_timeout_s,
        dead_after_s: section.dead_after_s,
        reduction: section.reduction,
        optimize_at: section.optimize_at,
        on_interface_down: section.on_interface_down,
        hubs: section.hubs,
        checkpoint_every: effective_every(section.checkpoints.as_deref(), section.checkpoint_every),
        resume: section.resume,
        ..JobOptions::default()
    };
    Ok(client.create_service(&CreateService { name, workers: section.workers, options })?)
}

fn commands(
    config: &Config,
    client: &ManagerClient,
    job: &ServiceCreated,
    command: &[OsString],
) -> anyhow::Result<Vec<Command>> {
    let (program, arguments) = command.split_first().context("give the workers' command after --")?;
    let master_port = free_port().context("no free port for MASTER_PORT")?.to_string();
    let workers = config.run.workers;
    let commands = (0..workers).map(|rank| {
        let mut command = Command::new(program);
        command.args(arguments).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &master_port);
        Seat { rank, workers, url: client.url(), job }.prepare(&mut command);
        command
    });
    Ok(commands.collect())
}

/// Ends what workers that never joined, or did not leave, would keep alive until its lease runs out. `ended` is how they
/// ended, where they could be started at all.
pub(super) fn end_job(client: &ManagerClient, job: &ServiceCreated, ended: Option<&Ended>) {
    let name = job.namespace.to_string();
    let Ok(status) = client.job(&name) else { return };
    if status.state.has_ended() {
        return;
    }
    let reason = match ended {
        Some(ended) => ended.reason(status.state != JobState::Connecting),
        None => "its launcher could not start its workers".into(),
    };
    // There is nobody left to tell.
    let _ = client.stop_job_because(&name, &reason);
}

/// Puts the rank in front of each line.
struct Printer<'a> {
    embedded: Option<&'a EmbeddedHub>,
    checked: Instant,
}

impl Watch for Printer<'_> {
    fn line(&mut self, line: Line) {
        let mut prefixed = format!("[{}] ", line.rank).into_bytes();
        prefixed.extend_from_slice(&line.bytes);
        prefixed.push(b'\n');
        // A reader that has gone away must not keep the workers from ending.
        let _ = match line.stream {
            Stream::Output => std::io::stdout().lock().write_all(&prefixed),
            Stream::Error => std::io::stderr().lock().write_all(&prefixed),
        };
    }

    fn interrupted(&mut self) {
        if let Some(hub) = self.embedded {
            hub.leave_checkpoints();
        }
    }

    fn tick(&mut self) -> Result<(), String> {
        if self.checked.elapsed() < HEALTH_INTERVAL {
            return Ok(());
        }
        self.checked = Instant::now();
        match self.embedded.and_then(EmbeddedHub::has_failed) {
            Some(reason) => Err(format!("the hub has failed: {reason}")),
            None => Ok(()),
        }
    }
}

/// Says who failed, and what the launcher's own exit code is.
fn conclude(ended: &Ended) -> u8 {
    if let Some(reason) = &ended.stopped {
        eprintln!("paramhub: {reason}");
        return ended.worst_exit_code().max(1);
    }
    if ended.signal.is_none() {
        for &rank in &ended.failed {
            eprintln!("paramhub: worker {rank} {}", describe(ended.exits[rank]));
        }
    }
    ended.worst_exit_code()
}
