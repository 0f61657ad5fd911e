//! `paramhub train`: the launcher's side. [`worker`] is the other.

mod flags;
mod parameters;
mod progress;
mod report;
mod spec;
mod worker;

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, bail};
use paramhub_train::THREADS_VARIABLE;
use progress::Display;
use report::Summary;
use spec::{Message, Spec, WorkerReport};

use super::checkpoints::{check, effective_every, kept};
use super::run::{end_job, say_left_out};
use super::{Usage, client, deployment};
use crate::ManagerClient;
use crate::cli::ExitCode;
use crate::config::{Config, ExchangeKind, TrainSection};
use crate::embedded::{EmbeddedConfig, EmbeddedHub};
use crate::launch::{Ended, Launch, Line, Seat, Signals, Stream, Watch, describe, this_program};
use crate::service::{CoreCounters, CreateService, JobOptions, ServiceCreated};

pub(super) use flags::TrainFlags;
pub(super) use spec::rehearse;
pub(super) use worker::{WorkerFlags, work};

pub(super) fn train(config: &Config) -> anyhow::Result<ExitCode> {
    let section = &config.train;
    let signals = Signals::catch()?;
    spec::check(section).map_err(Usage)?;
    check(config.url.is_some(), section.checkpoints.as_deref())?;
    spec::rehearse(section)?;
    check_destinations(section)?;
    let scratch = tempfile::Builder::new()
        .prefix("paramhub-train-")
        .tempdir()
        .context("cannot create a folder for the workers' parameters")?;
    let venue = Venue::open(config)?;
    let commands = commands(section, &venue, scratch.path())?;
    let mut observer = Observer::new(section, &venue, commands.len());
    let ended = Launch::start(commands)?.supervise(&signals, &mut observer);
    if section.stragglers.leaves_out() {
        venue.say_left_out();
    }
    let hub_busy = observer.hub_busy();
    let Observer { display, reports, .. } = observer;
    display.finish();
    venue.close(&ended);
    let reports = match judge(ended, reports) {
        Verdict::Done(reports) => reports,
        Verdict::Interrupted(signal) => {
            let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
            eprintln!("paramhub: training was interrupted by {name}; workers and hub have ended");
            return Ok(ExitCode::from(128 + u8::try_from(signal).unwrap_or(0)));
        }
        Verdict::Failed(reason) => bail!("training failed: {reason}"),
    };

    let max_difference = parameters::largest_difference(scratch.path(), reports.len())?;
    let summary = Summary::new(section, reports, hub_busy, max_difference);
    println!("{}", summary.table());
    if let Some(path) = &section.json {
        summary.write(path)?;
    }
    if let Some(path) = &section.save {
        let saved = parameters::file_of(scratch.path(), 0);
        std::fs::copy(&saved, path)
            .with_context(|| format!("cannot save the parameters as {}", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Minutes of training are a poor way to find out that a folder does not exist.
fn check_destinations(section: &TrainSection) -> anyhow::Result<()> {
    for (flag, path) in [("--json", &section.json), ("--save", &section.save)] {
        let Some(path) = path else { continue };
        let parent = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
        if !parent.is_dir() {
            return Err(
                Usage(format!("{flag} {}: there is no folder {}", path.display(), parent.display())).into()
            );
        }
    }
    Ok(())
}

/// Who exchanges the gradients, and how workers find it.
enum Venue {
    /// The only worker exchanges with itself.
    Local,
    /// A hub in this process.
    Embedded(Box<EmbeddedHub>, ServiceCreated),
    /// Somebody's running hub.
    Running(ManagerClient, ServiceCreated),
}

impl Venue {
    fn open(config: &Config) -> anyhow::Result<Venue> {
        let section = &config.train;
        let create = |client: &ManagerClient| -> anyhow::Result<ServiceCreated> {
            let checkpoint_every = effective_every(section.checkpoints.as_deref(), section.checkpoint_every);
            let name = match &section.name {
                Some(name) => name.clone(),
                None if checkpoint_every.is_some() || section.resume.is_some() => "train".into(),
                None => {
                    let suffix = getrandom::u32().context("the system has no random numbers")?;
                    format!("train-{suffix:08x}")
                }
            };
            let hubs = deployment::hubs_needed(section.deployment, section.hubs, section.reduction, client)?;
            let options = JobOptions {
                checkpoint_every,
                resume: section.resume,
                reduction: section.reduction,
                on_interface_down: section.on_interface_down,
                hubs,
                stragglers: section.stragglers,
                ..Default::default()
            };
            let request = CreateService { name, workers: section.workers, options };
            Ok(client.create_service(&request)?)
        };
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
            let job = create(&client)?;
            return Ok(Venue::Running(client, job));
        }
        let mut embedded = EmbeddedConfig::with_cores(section.cores);
        embedded.hub.checkpoints = section.checkpoints.clone().map(kept);
        let hub = EmbeddedHub::start(embedded)?;
        let job = create(hub.client())?;
        Ok(Venue::Embedded(Box::new(hub), job))
    }

    fn seats(&self) -> Option<(&str, &ServiceCreated)> {
        match self {
            Venue::Local => None,
            Venue::Embedded(hub, job) => Some((hub.url(), job)),
            Venue::Running(client, job) => Some((client.url(), job)),
        }
    }

    /// What each hub core has done so far. A running hub tells its manager now and then, so its numbers are a little old.
    fn cores(&self) -> Vec<CoreCounters> {
        match self {
            Venue::Local => Vec::new(),
            Venue::Embedded(hub, _) => hub.cores(),
            Venue::Running(client, _) => {
                let hubs = client.hubs().unwrap_or_default();
                hubs.into_iter().flat_map(|hub| hub.cores).collect()
            }
        }
    }

    fn failure(&self) -> Option<String> {
        match self {
            Venue::Embedded(hub, _) => hub.has_failed(),
            Venue::Local | Venue::Running(..) => None,
        }
    }

    /// How often which rank was left out.
    fn say_left_out(&self) {
        match self {
            Venue::Local => {}
            Venue::Embedded(hub, job) => say_left_out(hub.client(), job),
            Venue::Running(client, job) => say_left_out(client, job),
        }
    }

    /// Leaves nothing of the job behind.
    fn close(self, ended: &Ended) {
        match self {
            Venue::Local => {}
            Venue::Embedded(hub, _) => hub.stop(),
            Venue::Running(client, job) => end_job(&client, &job, Some(ended)),
        }
    }
}

fn commands(section: &TrainSection, venue: &Venue, scratch: &Path) -> anyhow::Result<Vec<Command>> {
    let spec = Spec { train: section.clone(), folder: scratch.to_path_buf() };
    let spec_file = scratch.join("spec.json");
    std::fs::write(&spec_file, serde_json::to_vec(&spec)?)
        .context("cannot write what the workers are to do")?;
    let processes = if venue.seats().is_some() { section.workers } else { 1 };
    let commands = (0..processes).map(|rank| {
        let mut command = this_program().context("cannot find this program's own file")?;
        command.arg("train-worker").arg(&spec_file).env(THREADS_VARIABLE, "1");
        match venue.seats() {
            Some((url, job)) => {
                let (local_rank, local_workers) = (rank, processes);
                Seat { rank, workers: processes, local_rank, local_workers, url, job }.prepare(&mut command);
            }
            None => drop(command.env("RANK", "0")),
        }
        Ok(command)
    });
    commands.collect()
}

/// Follows the workers' messages.
struct Observer<'a> {
    venue: &'a Venue,
    display: Display,
    reports: Vec<Option<WorkerReport>>,
    /// The cores' counters at the first step, so that their share is of the training alone.
    cores_before: Option<Vec<CoreCounters>>,
    /// And when the first worker was done.
    cores_after: Option<Vec<CoreCounters>>,
    checked: Instant,
}

impl<'a> Observer<'a> {
    fn new(section: &TrainSection, venue: &'a Venue, processes: usize) -> Self {
        // The first rank reports for itself; the others do the same at the same pace.
        let examples_factor =
            section.workers as f64 / if processes == 1 { section.workers as f64 } else { 1.0 };
        Observer {
            venue,
            display: Display::new(section, examples_factor),
            reports: vec![None; processes],
            cores_before: None,
            cores_after: None,
            checked: Instant::now(),
        }
    }

    /// Each core's busy share of the training; nothing where a running hub told nothing new meanwhile.
    fn hub_busy(&self) -> Vec<f64> {
        let (Some(before), Some(after)) = (&self.cores_before, &self.cores_after) else { return Vec::new() };
        before
            .iter()
            .zip(after)
            .map(|(before, after)| {
                let busy = after.busy_ns.saturating_sub(before.busy_ns) as f64;
                let idle = after.idle_ns.saturating_sub(before.idle_ns) as f64;
                (busy + idle > 0.0).then(|| busy / (busy + idle))
            })
            .collect::<Option<_>>()
            .unwrap_or_default()
    }
}

impl Watch for Observer<'_> {
    fn line(&mut self, line: Line) {
        let message = match line.stream {
            Stream::Output => serde_json::from_slice(&line.bytes).ok(),
            Stream::Error => None,
        };
        match message {
            Some(Message::Progress(progress)) => {
                if self.cores_before.is_none() {
                    self.cores_before = Some(self.venue.cores());
                }
                self.display.update(&progress);
            }
            Some(Message::Report(report)) => {
                if self.cores_after.is_none() {
                    self.cores_after = Some(self.venue.cores());
                }
                self.reports[line.rank] = Some(*report);
            }
            None => self.display.print(&format!("[{}] {}", line.rank, String::from_utf8_lossy(&line.bytes))),
        }
    }

    fn interrupted(&mut self) {
        if let Venue::Embedded(hub, _) = self.venue {
            hub.leave_checkpoints();
        }
    }

    fn tick(&mut self) -> Result<(), String> {
        if self.checked.elapsed().as_millis() < 500 {
            return Ok(());
        }
        self.checked = Instant::now();
        match self.venue.failure() {
            Some(reason) => Err(format!("the hub has failed: {reason}")),
            None => Ok(()),
        }
    }
}

enum Verdict {
    Done(Vec<WorkerReport>),
    Interrupted(i32),
    Failed(String),
}

fn judge(ended: Ended, reports: Vec<Option<WorkerReport>>) -> Verdict {
    if let Some(signal) = ended.signal {
        return Verdict::Interrupted(signal);
    }
    if let Some(reason) = ended.stopped {
        return Verdict::Failed(reason);
    }
    // One that was killed explains the others, who report what its death did to them.
    let killed = ended.failed.iter().find(|&&rank| ended.exits[rank].code().is_none());
    if let Some(&rank) = killed.or(ended.failed.first()) {
        return Verdict::Failed(format!("worker {rank} {}", describe(ended.exits[rank])));
    }
    match reports.into_iter().collect() {
        Some(reports) => Verdict::Done(reports),
        None => Verdict::Failed("a worker ended without a report".into()),
    }
}
