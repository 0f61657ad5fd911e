//! `paramhub run`: a launcher of workers, on this host or started once on each of several.

mod environment;
mod job_variables;
mod job_watch;

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use paramhub::service::{HubLabel, JobState, JobStatus, OnInterfaceDown, OnWorkerLoss, ServiceCreated};
use paramhub::{ManagerClient, Stragglers};
use paramhub_core::checkpoint::{Every, ResumeChoice};
use paramhub_core::codec::Codec;
use paramhub_core::composition::{BetweenSites, OptimizeAt, Reduction};
use paramhub_core::consistency::Consistency;
use paramhub_core::limits::WEIGHT_MAX;
use paramhub_harness::launch::{
    Launch, LaunchEnd, LaunchObserver, Line, OnWorkerFailure, OutputStream, RankEnvironment, Signals,
    SupervisedJob, describe_exit, free_port, interruption_reason,
};

use super::{ManagerUrl, Usage, deployment, overlay};
use crate::ExitCode;
use crate::config::{Config, Deployment};
pub(super) use environment::check;
use environment::{Interrupted, RunEnvironment};
use job_watch::JobWatch;

/// The time that the manager may take to receive the last numbers of a job that is over.
const LAST_COUNTS: Duration = Duration::from_secs(2);
/// The interval at which the hub in this process is checked for failure.
const HEALTH_INTERVAL: Duration = Duration::from_millis(500);

/// Start the workers of a job on this machine, or this machine's share of a job on several
///
/// On several hosts it is started once on each, with the same -n, --hosts, --name and --hub, and its --host-rank. By
/// --deployment cc or cs the hubs stand beside the workers: then it starts the hub, and on the first host the connection manager
/// at --hub, unless one runs there.
///
/// Each worker finds its place in RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and its
/// job in PARAMHUB_URL, PARAMHUB_JOB and PARAMHUB_SECRET. Its output appears line by line, its rank in front. When one
/// worker fails, the others get some seconds to say what they lost, and are then ended. The exit code is the highest of
/// those workers that were not ended because of another; a worker killed by a signal counts as 128 and the signal. With
/// --on-worker-loss continue the others go on, and a worker that fails is started again up to --max-restarts times; the exit
/// code is then 0 if any worker has ended well.
#[derive(Args)]
#[command(args_override_self = true)]
pub(super) struct RunFlags {
    /// Workers to start on each host [default: 1]
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
    #[arg(long, value_name = "SECONDS", env = "PARAMHUB_JOB_DEAD_AFTER")]
    dead_after: Option<f64>,
    /// What the job gets of a hub core's time against other jobs with work there, 1 to 100; theirs is 1 unless they say so, too
    /// [default: 1]
    #[arg(long, value_name = "W", env = "PARAMHUB_JOB_WEIGHT", value_parser = clap::value_parser!(u32).range(1..=i64::from(WEIGHT_MAX)))]
    weight: Option<u32>,
    /// When workers that use paramhub.torch see the updates of others, if the hub optimises: sync, async, or staleness:STEPS
    /// [default: sync]
    #[arg(long, value_name = "WHEN", env = "PARAMHUB_JOB_CONSISTENCY")]
    consistency: Option<Consistency>,
    /// How workers that use paramhub.torch encode gradients if their program does not say: f32, f16, bf16, int8, one-bit or two-bit
    /// [default: as they are]
    #[arg(long, value_name = "CODEC", env = "PARAMHUB_JOB_CODEC")]
    codec: Option<Codec>,
    /// How sums become those of all workers where hubs serve racks or hosts: auto, flat, tree, ring, sharded or line
    /// [default: auto]
    #[arg(long, value_name = "HOW", env = "PARAMHUB_JOB_REDUCTION")]
    reduction: Option<Reduction>,
    /// Where the optimizer runs then: every-site or owner [default: every-site]
    #[arg(long, value_name = "WHERE", env = "PARAMHUB_JOB_OPTIMIZE_AT")]
    optimize_at: Option<OptimizeAt>,
    /// How sums cross between racks and hosts then: f32, bf16, int8, or the sums of matrices in one-bit or two-bit [default: f32]
    #[arg(long, value_name = "CODEC", env = "PARAMHUB_JOB_BETWEEN_SITES")]
    between_sites: Option<BetweenSites>,
    /// Encrypt the streams between hosts: of workers to hubs, of hubs to one another, and of collectives [default: false]
    #[arg(long, env = "PARAMHUB_JOB_ENCRYPT")]
    encrypt: Option<bool>,
    /// What becomes of the job when a network interface goes down: fail, or continue over those that are left [default: fail]
    #[arg(long, value_name = "WHAT", env = "PARAMHUB_JOB_ON_INTERFACE_DOWN")]
    on_interface_down: Option<OnInterfaceDown>,
    /// How long a hub waits for a worker whose connection was cut, 0 to 60; the worker dials again meanwhile. One whose
    /// process has ended is lost at once [default: 0.5]
    #[arg(long, value_name = "SECONDS", env = "PARAMHUB_JOB_REDIAL_GRACE")]
    redial_grace: Option<f64>,
    /// What becomes of the job when a worker is lost: fail; continue with those that are left, until another process takes the
    /// rank; or rewind, so that all ranks go back to an earlier step [default: fail]
    #[arg(long, value_name = "WHAT", env = "PARAMHUB_JOB_ON_WORKER_LOSS")]
    on_worker_loss: Option<OnWorkerLoss>,
    /// The least number of workers with which the job then goes on [default: 1]
    #[arg(long, value_name = "N", env = "PARAMHUB_JOB_MIN_WORKERS")]
    min_workers: Option<u32>,
    /// The most workers that the job may have. It begins with those that start here; others join it with --join [default: as
    /// many as start]
    #[arg(long, value_name = "N", env = "PARAMHUB_JOB_MAX_WORKERS")]
    max_workers: Option<u32>,
    /// Start workers for a running job of this name instead of a new one, in ranks that have no process: of a job with
    /// --max-workers, or of one that has lost workers
    #[arg(long, value_name = "JOB", env = "PARAMHUB_RUN_JOIN")]
    join: Option<String>,
    /// With --on-worker-loss rewind, the number of steps from one to which the job can go back to the next [default: 1]
    #[arg(long, value_name = "STEPS", env = "PARAMHUB_JOB_REWIND_EVERY")]
    rewind_every: Option<u32>,
    /// How long the job waits for others while it has fewer workers than a step needs [default: 300]
    #[arg(long, value_name = "SECONDS", env = "PARAMHUB_JOB_LINGER")]
    linger: Option<f64>,
    /// The largest number of bytes of a program state, of which a hub keeps the three newest of each rank [default: 4194304
    /// with --on-worker-loss rewind, else 0]
    #[arg(long, value_name = "BYTES", env = "PARAMHUB_JOB_PROGRAM_STATE_BYTES")]
    program_state_bytes: Option<u32>,
    /// How often a worker that fails is started again, with --on-worker-loss continue or rewind [default: 0]
    #[arg(long, value_name = "N", env = "PARAMHUB_RUN_MAX_RESTARTS")]
    max_restarts: Option<u32>,
    /// What becomes of workers that come late to a step: wait for them; drop:FRACTION, those later than this fraction of the
    /// time that the median took; or backup:N, the last N [default: wait]
    #[arg(long, value_name = "HOW", env = "PARAMHUB_JOB_STRAGGLERS")]
    stragglers: Option<Stragglers>,
    /// End the job, naming the rank, when others have waited so long for one of them [default: never]
    #[arg(long, value_name = "SECONDS", env = "PARAMHUB_JOB_PROGRESS_TIMEOUT")]
    progress_timeout: Option<f64>,
    /// How many hubs must have joined the connection manager at --hub before the job begins; all that have serve it. With 0, also
    /// without --hub, there is none, for workers that exchange among themselves [default: the first is enough]
    #[arg(long, value_name = "N", env = "PARAMHUB_JOB_HUBS")]
    hubs: Option<u32>,
    /// The most hubs that serve the job when it begins, those with the fewest jobs; hubs of racks and hosts do not count [default:
    /// all that have joined]
    #[arg(long, value_name = "N", env = "PARAMHUB_JOB_MAX_HUBS")]
    max_hubs: Option<u32>,
    /// The label that hubs must have to serve the job, as `paramhub hub --label` gives it [default: any hub will do]
    #[arg(long, value_name = "LABEL", env = "PARAMHUB_JOB_HUB_LABEL")]
    hub_label: Option<HubLabel>,
    /// The number of standbys of each chunk, 0 or 1: with 1 another hub has all that workers were answered, and takes over when
    /// the hub is lost; it takes two hubs or more [default: 0]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1), env = "PARAMHUB_JOB_REPLICAS")]
    replicas: Option<u32>,
    /// Where the hubs are: cc, one beside the workers of the first host; cs, one beside those of every host; ncc or ncs, one or
    /// several dedicated ones that have joined the connection manager at --hub [default: one here, or with --hub whichever have
    /// joined]
    #[arg(long, value_enum, hide_possible_values = true, env = "PARAMHUB_DEPLOYMENT")]
    deployment: Option<Deployment>,
    /// Hosts of the job [default: 1]
    #[arg(long, value_name = "H", env = "PARAMHUB_RUN_HOSTS")]
    hosts: Option<u32>,
    /// Which of them this is, from 0
    #[arg(long, value_name = "N", env = "PARAMHUB_RUN_HOST_RANK")]
    host_rank: Option<u32>,
    /// MASTER_ADDR of workers on several hosts, an address of the first [default: with cc and cs that in --hub; else as it is in
    /// the environment]
    #[arg(long, value_name = "ADDRESS", env = "PARAMHUB_RUN_MASTER_ADDR")]
    master_addr: Option<String>,
    /// MASTER_PORT that goes with it [default: 29500]
    #[arg(long, value_name = "PORT", env = "PARAMHUB_RUN_MASTER_PORT")]
    master_port: Option<u16>,
    /// Directory for checkpoints of the hub that is started where none is given; a hub that runs has its own [default: none]
    #[arg(long, value_name = "DIR", env = "PARAMHUB_JOB_CHECKPOINTS")]
    checkpoints: Option<PathBuf>,
    /// How often the hubs write a checkpoint: a number of steps, as in 1000, or of seconds, as in 30s [default: 30s with
    /// --checkpoints, else never]
    #[arg(long, value_name = "N|Ns", env = "PARAMHUB_JOB_CHECKPOINT_EVERY")]
    checkpoint_every: Option<Every>,
    /// Go on from a checkpoint of the job of this name: the newest, that of a step, with auto the newest of its last run
    /// unless that has finished, or never [default: auto with --name and --checkpoints, else never]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "latest", value_name = "latest|STEP|auto|never",
        env = "PARAMHUB_JOB_RESUME")]
    resume: Option<ResumeChoice>,
    /// What each worker runs
    #[arg(last = true, required_unless_present = "print_config", value_name = "CMD")]
    command: Vec<OsString>,
}

impl RunFlags {
    pub(super) fn apply(self, config: &mut Config) -> Vec<OsString> {
        self.url.apply(config);
        overlay!(self => config.run;
            workers, cores, weight, consistency, reduction, optimize_at, between_sites, encrypt, on_interface_down, on_worker_loss, min_workers,
            rewind_every, replicas, max_restarts, stragglers, hosts, master_port;
            name, max_workers, join, codec, hubs, max_hubs, hub_label, deployment, host_rank, master_addr, checkpoints, checkpoint_every, resume, program_state_bytes);
        let section = &mut config.run;
        section.rendezvous_timeout_s = self.rendezvous_timeout.unwrap_or(section.rendezvous_timeout_s);
        section.progress_timeout_s = self.progress_timeout.or(section.progress_timeout_s);
        section.redial_grace_s = self.redial_grace.unwrap_or(section.redial_grace_s);
        section.linger_s = self.linger.unwrap_or(section.linger_s);
        section.dead_after_s = self.dead_after.unwrap_or(section.dead_after_s);
        self.command
    }
}

pub(super) fn run(config: &Config, command: Vec<OsString>) -> anyhow::Result<ExitCode> {
    let section = &config.run;
    if section.workers == 0 || section.hosts == 0 || section.cores == 0 {
        let problem = "a job needs at least one worker on at least one host, and a hub at least one core";
        return Err(Usage(problem.into()).into());
    }
    check(config)?;
    let signals = Signals::catch()?;
    let environment = match RunEnvironment::open(config, &signals) {
        Ok(environment) => environment,
        Err(error) => {
            let Some(interrupted) = error.downcast_ref::<Interrupted>() else { return Err(error) };
            eprintln!("paramhub: {interrupted}");
            return Ok(ExitCode::from(128 + u8::try_from(interrupted.signal).unwrap_or(0)));
        }
    };
    let first_rank = environment.first_rank(section);
    let supervise = || {
        // Elsewhere all workers end with their job, and the launcher with them.
        let may_outlast =
            section.hosts > 1 || section.join.is_some() || section.on_worker_loss != OnWorkerLoss::Fail;
        let job_watch =
            may_outlast.then(|| JobWatch::start(environment.client.clone(), &environment.job)).transpose()?;
        let is_supervised = environment.outlives_the_launcher() && !environment.is_shared();
        let supervised_job = is_supervised.then(|| SupervisedJob {
            url: environment.client.url().to_owned(),
            token: config.admin_token(),
            job: environment.job.namespace,
        });
        let on_failure = match section.on_worker_loss {
            OnWorkerLoss::Fail if section.join.is_none() => OnWorkerFailure::EndAll,
            OnWorkerLoss::Fail | OnWorkerLoss::Continue => {
                OnWorkerFailure::Restart { most: section.max_restarts, needs_all: false }
            }
            // Its workers make no step without one of them.
            OnWorkerLoss::Rewind => OnWorkerFailure::Restart { most: section.max_restarts, needs_all: true },
        };
        let launch =
            Launch::start(commands(config, &environment, &command)?, on_failure, supervised_job.as_ref())?;
        let mut watch = OutputPrinter {
            environment: &environment,
            job_watch,
            first_rank: first_rank as usize,
            checked: Instant::now(),
        };
        Ok(LaunchEnd { first_rank, ..launch.supervise(&signals, &mut watch) })
    };
    let ended: anyhow::Result<LaunchEnd> = supervise();
    if section.stragglers.leaves_out() && first_rank == 0 {
        say_left_out(&environment.client, &environment.job);
    }
    environment.close(ended.as_ref().ok(), &signals);
    Ok(ExitCode::from(conclude(&ended?)))
}

fn commands(
    config: &Config,
    environment: &RunEnvironment,
    command: &[OsString],
) -> anyhow::Result<Vec<Command>> {
    let (program, arguments) = command.split_first().context("give the workers' command after --")?;
    let section = &config.run;
    let master = master(config)?;
    let url = environment.client.url_for_workers(&environment.job);
    let commands = (0..section.workers).map(|local_rank| {
        let mut command = Command::new(program);
        command.args(arguments);
        if let Some((address, port)) = &master {
            command.env("MASTER_ADDR", address).env("MASTER_PORT", port.to_string());
        }
        job_variables::set(&mut command, section);
        if let Some(rack) = &environment.rack {
            command.env("PARAMHUB_RACK", rack);
        }
        let rank_environment = RankEnvironment {
            rank: environment.first_rank(section) + local_rank,
            workers: environment.workers(section),
            local_rank,
            local_workers: section.workers,
            url: &url,
            job: &environment.job,
        };
        rank_environment.prepare(&mut command);
        command
    });
    Ok(commands.collect())
}

/// The MASTER_ADDR and MASTER_PORT with which frameworks let the ranks meet: on rank 0's host. `None` if that
/// host is unknown.
fn master(config: &Config) -> anyhow::Result<Option<(String, u16)>> {
    let section = &config.run;
    if section.hosts == 1 {
        return Ok(Some(("127.0.0.1".into(), free_port().context("no free port for MASTER_PORT")?)));
    }
    let named = section.master_addr.clone();
    // With colocated hubs the connection manager runs on the first host, so its URL names that host.
    let url = config.url.as_deref().filter(|_| deployment::is_colocated(section.deployment));
    let of_url = url.map(|url| {
        let (_, authority) = url.split_once("://").unwrap_or(("", url));
        let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
        host.trim_matches(['[', ']']).to_owned()
    });
    Ok(named.or(of_url).map(|address| (address, section.master_port)))
}

/// Ends a job whose workers never joined or did not leave, and which would otherwise live until its lease
/// runs out. `ended` is how the workers ended; `None` if they could not be started.
pub(super) fn end_job(client: &ManagerClient, job: &ServiceCreated, ended: Option<&LaunchEnd>) {
    let name = job.namespace.to_string();
    let Ok(status) = client.job(&name) else { return };
    if status.state.has_ended() {
        return;
    }
    // If this fails, the manager is gone and there is nothing to end.
    let _ = match ended {
        Some(ended) => client.workers_have_ended(&name, &ended.reason(status.state != JobState::Connecting)),
        None => client.stop_job_because(&name, "its launcher could not start its workers"),
    };
}

/// Announces to the job's hubs that its workers are about to be ended, so that they take a last checkpoint if
/// the job has any. The sender of the returned channel is dropped when they have. `None` if no thread can be
/// started for the call.
pub(super) fn announce_end(
    client: &ManagerClient,
    job: &ServiceCreated,
    signal: i32,
) -> Option<Receiver<()>> {
    let (client, name, reason) = (client.clone(), job.namespace.to_string(), interruption_reason(signal));
    let (is_running, ended) = channel();
    let announce = move || {
        // The workers end even if the manager does not answer.
        let _ = client.announce_workers_end(&name, &reason);
        drop(is_running);
    };
    std::thread::Builder::new().name("announce-end".into()).spawn(announce).ok().map(|_| ended)
}

/// The status of a job whose workers have ended. Hubs report a job's end to the manager a little later than to the
/// workers, so this waits for the last counts. `None` if the manager does not answer any more.
pub(super) fn last_status(client: &ManagerClient, job: &ServiceCreated) -> Option<JobStatus> {
    let (name, begun) = (job.namespace.to_string(), Instant::now());
    loop {
        let status = client.job(&name).ok()?;
        if status.state.has_ended() || begun.elapsed() > LAST_COUNTS {
            return Some(status);
        }
        std::thread::sleep(LAST_COUNTS / 40);
    }
}

/// Prints how often each rank was left out.
pub(super) fn say_left_out(client: &ManagerClient, job: &ServiceCreated) {
    for line in last_status(client, job).iter().flat_map(super::jobs::left_out) {
        eprintln!("paramhub: left out because it was late: {line}");
    }
}

/// Puts the rank in front of each line.
struct OutputPrinter<'a> {
    environment: &'a RunEnvironment,
    job_watch: Option<JobWatch>,
    first_rank: usize,
    checked: Instant,
}

impl LaunchObserver for OutputPrinter<'_> {
    fn line(&mut self, line: Line) {
        let mut prefixed = format!("[{}] ", self.first_rank + line.rank).into_bytes();
        prefixed.extend_from_slice(&line.bytes);
        prefixed.push(b'\n');
        // The workers must be able to end even if the reader has closed the pipe.
        let _ = match line.stream {
            OutputStream::Output => std::io::stdout().lock().write_all(&prefixed),
            OutputStream::Error => std::io::stderr().lock().write_all(&prefixed),
        };
    }

    fn lost(&mut self, worker: usize, exit: ExitStatus, restarts: Option<(u32, u32)>) {
        let (rank, how) = (self.first_rank + worker, describe_exit(exit));
        match restarts {
            Some((restart, most)) => {
                eprintln!("paramhub: worker {rank} {how}; it is started again ({restart} of {most})");
            }
            None if !self.may_restart() => {
                eprintln!("paramhub: worker {rank} {how}; it is not started again, since the job has ended");
            }
            None => eprintln!("paramhub: worker {rank} {how}; the others go on without it"),
        }
    }

    fn may_restart(&mut self) -> bool {
        !self.job_watch.as_mut().is_some_and(JobWatch::has_ended)
    }

    fn awaited(&mut self) -> Option<usize> {
        let rank = self.job_watch.as_mut()?.take_lost()? as usize;
        rank.checked_sub(self.first_rank)
    }

    fn started_again(&mut self, worker: usize, restart: u32, most: u32) {
        let rank = self.first_rank + worker;
        eprintln!(
            "paramhub: worker {rank} had ended, and its job goes back; it is started again ({restart} of {most})"
        );
    }

    fn interrupted(&mut self, signal: i32) -> Option<Receiver<()>> {
        // A job of which others start workers goes on without these.
        let ends_job = !self.environment.is_shared();
        ends_job.then(|| announce_end(&self.environment.client, &self.environment.job, signal)).flatten()
    }

    fn tick(&mut self) -> Result<(), String> {
        if self.checked.elapsed() < HEALTH_INTERVAL {
            return Ok(());
        }
        self.checked = Instant::now();
        if let Some(reason) = self.environment.failure() {
            return Err(format!("the hub has failed: {reason}"));
        }
        self.job_watch.as_mut().and_then(JobWatch::failure).map_or(Ok(()), Err)
    }
}

/// Prints which workers failed, and returns the launcher's own exit code.
fn conclude(ended: &LaunchEnd) -> u8 {
    if let Some(reason) = &ended.stopped {
        eprintln!("paramhub: {reason}");
        return ended.worst_exit_code().max(1);
    }
    if ended.signal.is_none() {
        for &rank in &ended.failed {
            let number = ended.first_rank as usize + rank;
            eprintln!("paramhub: worker {number} {}", describe_exit(ended.exits[rank]));
        }
    }
    ended.worst_exit_code()
}
