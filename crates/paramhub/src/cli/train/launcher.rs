//! `paramhub train` where it starts the workers itself. [`worker`](super::worker) is the other side.

use std::path::Path;
use std::process::Command;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use anyhow::{Context, bail};
use paramhub_train::THREADS_VARIABLE;

use super::parameters;
use super::progress::Display;
use super::report::Summary;
use super::spec::{self, Message, Spec, WorkerReport};
use super::venue::Venue;
use crate::cli::checkpoints::check;
use crate::cli::run::announce_end;
use crate::cli::{ExitCode, Usage};
use crate::config::{Config, ExchangeKind, TrainSection};
use crate::launch::{Charge, Ended, Launch, Line, Seat, Signals, Stream, Watch, describe, this_program};
use crate::service::CoreCounters;

/// Trains in processes that it starts.
pub(super) fn launch(config: &Config) -> anyhow::Result<ExitCode> {
    let section = &config.train;
    let signals = Signals::catch()?;
    spec::check(section).map_err(Usage)?;
    check(config.url.is_some(), section.checkpoints.as_deref(), section.checkpoint_every, section.resume)?;
    spec::rehearse(section)?;
    spec::check_destinations(section)?;
    let scratch = tempfile::Builder::new()
        .prefix("paramhub-train-")
        .tempdir()
        .context("cannot create a folder for the workers' parameters")?;
    let venue = Venue::open(config)?;
    let charge = venue.job().filter(|_| venue.outlives_the_launcher()).map(|(client, job)| Charge {
        url: client.url().to_owned(),
        token: config.admin_token(),
        job: job.namespace,
    });
    let launched = commands(section, &venue, scratch.path()).and_then(|commands| {
        let processes = commands.len();
        Ok((processes, Launch::start(commands, charge.as_ref())?))
    });
    let (processes, launch) = match launched {
        Ok(launched) => launched,
        Err(error) => {
            venue.close(None);
            return Err(error);
        }
    };
    let mut observer = Observer::new(section, &venue, processes);
    let ended = launch.supervise(&signals, &mut observer);
    if section.stragglers.leaves_out() {
        venue.say_left_out();
    }
    let hub_busy = observer.hub_busy();
    // A hub that others share goes on.
    let ended_too = if config.url.is_none() && section.exchange == ExchangeKind::Hub {
        "workers and hub"
    } else {
        "its workers"
    };
    let Observer { display, reported, .. } = observer;
    display.finish();
    venue.close(Some(&ended));
    let reports = match judge(ended, &reported, scratch.path())? {
        Verdict::Done(reports) => reports,
        Verdict::Interrupted(signal) => {
            let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
            eprintln!("paramhub: training was interrupted by {name}; {ended_too} have ended");
            return Ok(ExitCode::from(128 + u8::try_from(signal).unwrap_or(0)));
        }
        Verdict::Failed(reason) => bail!("training failed: {reason}"),
    };

    let difference = parameters::largest_difference(scratch.path(), reports.len())?;
    let summary = Summary::new(section, reports, hub_busy, Some(difference));
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

fn commands(section: &TrainSection, venue: &Venue, scratch: &Path) -> anyhow::Result<Vec<Command>> {
    let spec = Spec { train: section.clone(), folder: scratch.to_path_buf() };
    let spec_file = scratch.join("spec.json");
    std::fs::write(&spec_file, serde_json::to_vec(&spec)?)
        .context("cannot write what the workers are to do")?;
    let processes = if venue.seats().is_some() { section.workers() } else { 1 };
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
    /// Which have written their report.
    reported: Vec<bool>,
    /// The cores' counters at the first step, so that their share is of the training alone.
    cores_before: Option<Vec<CoreCounters>>,
    /// And when the first worker was done.
    cores_after: Option<Vec<CoreCounters>>,
    checked: Instant,
}

impl<'a> Observer<'a> {
    fn new(section: &TrainSection, venue: &'a Venue, processes: usize) -> Self {
        // The first rank reports for itself; the others do the same at the same pace.
        let examples_factor = if processes == 1 { 1.0 } else { f64::from(section.workers()) };
        Observer {
            venue,
            display: Display::new(section, examples_factor),
            reported: vec![false; processes],
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
            Some(Message::Reported) => {
                if self.cores_after.is_none() {
                    self.cores_after = Some(self.venue.cores());
                }
                self.reported[line.rank] = true;
            }
            None => self.display.print(&format!("[{}] {}", line.rank, String::from_utf8_lossy(&line.bytes))),
        }
    }

    fn interrupted(&mut self, signal: i32) -> Option<Receiver<()>> {
        let (client, job) = self.venue.job()?;
        announce_end(client, job, signal)
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

fn judge(ended: Ended, reported: &[bool], folder: &Path) -> anyhow::Result<Verdict> {
    if let Some(signal) = ended.signal {
        return Ok(Verdict::Interrupted(signal));
    }
    if let Some(reason) = ended.stopped {
        return Ok(Verdict::Failed(reason));
    }
    // One that was killed explains the others, who report what its death did to them.
    let killed = ended.failed.iter().find(|&&rank| ended.exits[rank].code().is_none());
    if let Some(&rank) = killed.or(ended.failed.first()) {
        return Ok(Verdict::Failed(format!("worker {rank} {}", describe(ended.exits[rank]))));
    }
    if let Some(rank) = reported.iter().position(|is_reported| !is_reported) {
        return Ok(Verdict::Failed(format!("worker {rank} ended without a report")));
    }
    let reports = (0..reported.len()).map(|rank| WorkerReport::read(folder, rank));
    Ok(Verdict::Done(reports.collect::<anyhow::Result<_>>()?))
}
