//! `paramhub run`: a launcher of workers, on this host or started once on each of several.

mod lookout;
mod venue;

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use paramhub_core::checkpoint::{Every, Resume};
use paramhub_core::composition::{OptimizeAt, Reduction};

use super::checkpoints::check;
use super::{ManagerUrl, Usage, deployment, overlay};
use crate::cli::ExitCode;
use crate::config::{Config, Deployment};
use crate::launch::{
    Charge, Ended, Launch, Line, Seat, Signals, Stream, Watch, describe, free_port, interrupted_by,
};
use crate::service::{JobState, OnInterfaceDown, ServiceCreated};
use crate::{ManagerClient, Stragglers};
use lookout::Lookout;
use venue::{Interrupted, Venue};

/// How long the numbers of a job that is over may take to arrive.
const LAST_COUNTS: Duration = Duration::from_secs(2);
/// How often the hub in this process is looked after.
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
/// those workers that were not ended because of another; a worker killed by a signal counts as 128 and the signal.
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
    /// What becomes of workers that come late to a step: wait for them; drop:FRACTION, those later than this fraction of the
    /// time that the median took; or backup:N, the last N [default: wait]
    #[arg(long, value_name = "HOW", env = "PARAMHUB_RUN_STRAGGLERS")]
    stragglers: Option<Stragglers>,
    /// End the job, naming the rank, when others have waited so long for one of them [default: never]
    #[arg(long, value_name = "SECONDS", env = "PARAMHUB_RUN_PROGRESS_TIMEOUT")]
    progress_timeout: Option<f64>,
    /// How many hubs must have joined the connection manager at --hub before the job begins; all that have serve it. With 0, also
    /// without --hub, there is none, for workers that exchange among themselves [default: the first is enough]
    #[arg(long, value_name = "N", env = "PARAMHUB_RUN_HUBS")]
    hubs: Option<u32>,
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
        overlay!(self => config.run;
            workers, cores, reduction, optimize_at, on_interface_down, stragglers, hosts, master_port;
            name, hubs, deployment, host_rank, master_addr, checkpoints, checkpoint_every, resume);
        let section = &mut config.run;
        section.rendezvous_timeout_s = self.rendezvous_timeout.unwrap_or(section.rendezvous_timeout_s);
        section.progress_timeout_s = self.progress_timeout.or(section.progress_timeout_s);
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
    venue::check(config)?;
    if config.url.is_none() && section.hubs.is_some_and(|hubs| hubs > 1) {
        let problem =
            "the hub that `run` starts is the only one: several need --hub URL, a connection manager's";
        return Err(Usage(problem.into()).into());
    }
    let runs = config.url.is_some() && !deployment::is_colocated(section.deployment);
    check(runs, section.checkpoints.as_deref(), section.checkpoint_every, section.resume)?;
    let is_stable =
        section.checkpoints.is_some() || section.checkpoint_every.is_some() || section.resume.is_some();
    if is_stable && section.name.is_none() {
        let problem = "checkpoints are found again by the job's name: give it one with --name";
        return Err(Usage(problem.into()).into());
    }
    let signals = Signals::catch()?;
    let venue = match Venue::open(config, &signals) {
        Ok(venue) => venue,
        Err(error) => {
            let Some(interrupted) = error.downcast_ref::<Interrupted>() else { return Err(error) };
            eprintln!("paramhub: {interrupted}");
            return Ok(ExitCode::from(128 + u8::try_from(interrupted.signal).unwrap_or(0)));
        }
    };
    let first_rank = venue.first_rank(section);
    let supervise = || {
        let lookout =
            (section.hosts > 1).then(|| Lookout::start(venue.client.clone(), &venue.job)).transpose()?;
        let charge = venue.outlives_the_launcher().then(|| Charge {
            url: venue.client.url().to_owned(),
            token: config.admin_token(),
            job: venue.job.namespace,
        });
        let launch = Launch::start(commands(config, &venue, &command)?, charge.as_ref())?;
        let mut watch =
            Printer { venue: &venue, lookout, first_rank: first_rank as usize, checked: Instant::now() };
        Ok(Ended { first_rank, ..launch.supervise(&signals, &mut watch) })
    };
    let ended: anyhow::Result<Ended> = supervise();
    if section.stragglers.leaves_out() && first_rank == 0 {
        say_left_out(&venue.client, &venue.job);
    }
    venue.close(ended.as_ref().ok(), &signals);
    Ok(ExitCode::from(conclude(&ended?)))
}

fn commands(config: &Config, venue: &Venue, command: &[OsString]) -> anyhow::Result<Vec<Command>> {
    let (program, arguments) = command.split_first().context("give the workers' command after --")?;
    let section = &config.run;
    let master = master(config)?;
    let commands = (0..section.workers).map(|local_rank| {
        let mut command = Command::new(program);
        command.args(arguments);
        if let Some((address, port)) = &master {
            command.env("MASTER_ADDR", address).env("MASTER_PORT", port.to_string());
        }
        if let Some(rack) = &venue.rack {
            command.env("PARAMHUB_RACK", rack);
        }
        let seat = Seat {
            rank: venue.first_rank(section) + local_rank,
            workers: section.workers * section.hosts,
            local_rank,
            local_workers: section.workers,
            url: venue.client.url(),
            job: &venue.job,
        };
        seat.prepare(&mut command);
        command
    });
    Ok(commands.collect())
}

/// Where frameworks let the ranks meet: on rank 0's host. None where nobody has said which that is.
fn master(config: &Config) -> anyhow::Result<Option<(String, u16)>> {
    let section = &config.run;
    if section.hosts == 1 {
        return Ok(Some(("127.0.0.1".into(), free_port().context("no free port for MASTER_PORT")?)));
    }
    let named = section.master_addr.clone();
    // The first host's, where its launcher runs the connection manager.
    let url = config.url.as_deref().filter(|_| deployment::is_colocated(section.deployment));
    let of_url = url.map(|url| {
        let (_, authority) = url.split_once("://").unwrap_or(("", url));
        let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
        host.trim_matches(['[', ']']).to_owned()
    });
    Ok(named.or(of_url).map(|address| (address, section.master_port)))
}

/// Ends what workers that never joined, or did not leave, would keep alive until its lease runs out. `ended` is how they
/// ended, where they could be started at all.
pub(super) fn end_job(client: &ManagerClient, job: &ServiceCreated, ended: Option<&Ended>) {
    let name = job.namespace.to_string();
    let Ok(status) = client.job(&name) else { return };
    if status.state.has_ended() {
        return;
    }
    // There is nobody left to tell of a failure.
    let _ = match ended {
        Some(ended) => client.workers_have_ended(&name, &ended.reason(status.state != JobState::Connecting)),
        None => client.stop_job_because(&name, "its launcher could not start its workers"),
    };
}

/// Tells the job's hubs that its workers are about to be ended: they take a last checkpoint, if the job has any. What is returned
/// is dropped when they have; none where nobody can tell them.
pub(super) fn announce_end(
    client: &ManagerClient,
    job: &ServiceCreated,
    signal: i32,
) -> Option<Receiver<()>> {
    let (client, name, reason) = (client.clone(), job.namespace.to_string(), interrupted_by(signal));
    let (told, is_told) = channel();
    let tell = move || {
        // Where the manager does not answer, workers end all the same.
        let _ = client.announce_workers_end(&name, &reason);
        drop(told);
    };
    std::thread::Builder::new().name("announce-end".into()).spawn(tell).ok().map(|_| is_told)
}

/// Says how often which rank was left out. Hubs tell their manager of a job's end a little later than they tell workers.
pub(super) fn say_left_out(client: &ManagerClient, job: &ServiceCreated) {
    let (name, begun) = (job.namespace.to_string(), Instant::now());
    loop {
        let Ok(status) = client.job(&name) else { return };
        if status.state.has_ended() || begun.elapsed() > LAST_COUNTS {
            for line in super::jobs::left_out(&status) {
                eprintln!("paramhub: left out because it was late: {line}");
            }
            return;
        }
        std::thread::sleep(LAST_COUNTS / 40);
    }
}

/// Puts the rank in front of each line.
struct Printer<'a> {
    venue: &'a Venue,
    lookout: Option<Lookout>,
    first_rank: usize,
    checked: Instant,
}

impl Watch for Printer<'_> {
    fn line(&mut self, line: Line) {
        let mut prefixed = format!("[{}] ", self.first_rank + line.rank).into_bytes();
        prefixed.extend_from_slice(&line.bytes);
        prefixed.push(b'\n');
        // A reader that has gone away must not keep the workers from ending.
        let _ = match line.stream {
            Stream::Output => std::io::stdout().lock().write_all(&prefixed),
            Stream::Error => std::io::stderr().lock().write_all(&prefixed),
        };
    }

    fn interrupted(&mut self, signal: i32) -> Option<Receiver<()>> {
        announce_end(&self.venue.client, &self.venue.job, signal)
    }

    fn tick(&mut self) -> Result<(), String> {
        if self.checked.elapsed() < HEALTH_INTERVAL {
            return Ok(());
        }
        self.checked = Instant::now();
        if let Some(reason) = self.venue.has_failed() {
            return Err(format!("the hub has failed: {reason}"));
        }
        self.lookout.as_mut().and_then(Lookout::failure).map_or(Ok(()), Err)
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
            let number = ended.first_rank as usize + rank;
            eprintln!("paramhub: worker {number} {}", describe(ended.exits[rank]));
        }
    }
    ended.worst_exit_code()
}
