//! `paramhub train` where it starts the workers itself. [`worker`](super::worker) is the other side.

use std::path::Path;
use std::process::Command;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use anyhow::{Context, bail};
use paramhub::service::CoreCounters;
use paramhub_bench::training::rehearse;
use paramhub_harness::launch::{
    Launch, LaunchEnd, LaunchObserver, Line, OnWorkerFailure, OutputStream, RankEnvironment, Signals,
    SupervisedJob, describe_exit, this_program_command,
};

use super::environment::TrainEnvironment;
use super::parameters;
use super::progress::Display;
use super::report::Summary;
use super::spec::{self, Message, Spec, WorkerReport};
use crate::ExitCode;
use crate::config::{Config, ExchangeKind, TrainSection};
use crate::run::announce_end;

/// Trains in worker processes that it starts.
pub(super) fn launch(config: &Config) -> anyhow::Result<ExitCode> {
    let section = &config.train;
    let signals = Signals::catch()?;
    rehearse(section)?;
    spec::check_destinations(section)?;
    let scratch = tempfile::Builder::new()
        .prefix("paramhub-train-")
        .tempdir()
        .context("cannot create a folder for the workers' parameters")?;
    let environment = TrainEnvironment::open(config)?;
    let supervised_job =
        environment.job().filter(|_| environment.outlives_the_launcher()).map(|(client, job)| {
            SupervisedJob { url: client.url().to_owned(), token: config.admin_token(), job: job.namespace }
        });
    let launched = commands(section, &environment, scratch.path()).and_then(|commands| {
        let processes = commands.len();
        Ok((processes, Launch::start(commands, OnWorkerFailure::EndAll, supervised_job.as_ref())?))
    });
    let (processes, launch) = match launched {
        Ok(launched) => launched,
        Err(error) => {
            environment.close(None);
            return Err(error);
        }
    };
    let mut training_observer = TrainingObserver::new(section, &environment, processes);
    let ended = launch.supervise(&signals, &mut training_observer);
    if section.stragglers.leaves_out() {
        environment.say_left_out();
    }
    let hub_busy = training_observer.hub_busy();
    // A running hub may serve other jobs and goes on.
    let ended_too = if config.url.is_none() && section.exchange == ExchangeKind::Hub {
        "workers and hub"
    } else {
        "its workers"
    };
    let TrainingObserver { display, reported, .. } = training_observer;
    display.finish();
    environment.close(Some(&ended));
    let reports = match evaluate(ended, &reported, scratch.path())? {
        TrainingOutcome::Done(reports) => reports,
        TrainingOutcome::Interrupted(signal) => {
            let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
            eprintln!("paramhub: training was interrupted by {name}; {ended_too} have ended");
            return Ok(ExitCode::from(128 + u8::try_from(signal).unwrap_or(0)));
        }
        TrainingOutcome::Failed(reason) => bail!("training failed: {reason}"),
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

fn commands(
    section: &TrainSection,
    environment: &TrainEnvironment,
    scratch: &Path,
) -> anyhow::Result<Vec<Command>> {
    let spec = Spec { train: section.clone(), folder: scratch.to_path_buf() };
    let spec_file = scratch.join("spec.json");
    std::fs::write(&spec_file, serde_json::to_vec(&spec)?)
        .context("cannot write what the workers are to do")?;
    let processes = if environment.membership().is_some() { section.workers() } else { 1 };
    let commands = (0..processes).map(|rank| {
        let mut command = this_program_command().context("cannot find this program's own file")?;
        command.arg("train-worker").arg(&spec_file);
        match environment.membership() {
            Some((url, job)) => {
                let (local_rank, local_workers) = (rank, processes);
                RankEnvironment { rank, workers: processes, local_rank, local_workers, url: &url, job }
                    .prepare(&mut command);
            }
            None => drop(command.env("RANK", "0")),
        }
        Ok(command)
    });
    commands.collect()
}

/// Handles the workers' messages.
struct TrainingObserver<'a> {
    environment: &'a TrainEnvironment,
    display: Display,
    /// `true` if each worker has written its report.
    reported: Vec<bool>,
    /// The cores' counters at the first progress message, so that their busy share covers the training alone.
    cores_before: Option<Vec<CoreCounters>>,
    /// The cores' counters when the first worker had finished.
    cores_after: Option<Vec<CoreCounters>>,
    checked: Instant,
}

impl<'a> TrainingObserver<'a> {
    fn new(section: &TrainSection, environment: &'a TrainEnvironment, processes: usize) -> Self {
        // Rank 0 reports its own examples; the other ranks compute as many at the same pace.
        let examples_factor = if processes == 1 { 1.0 } else { f64::from(section.workers()) };
        TrainingObserver {
            environment,
            display: Display::new(section, examples_factor),
            reported: vec![false; processes],
            cores_before: None,
            cores_after: None,
            checked: Instant::now(),
        }
    }

    /// Each core's busy share of the training. Empty if a running hub reported nothing new meanwhile.
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

impl LaunchObserver for TrainingObserver<'_> {
    fn line(&mut self, line: Line) {
        let message = match line.stream {
            OutputStream::Output => serde_json::from_slice(&line.bytes).ok(),
            OutputStream::Error => None,
        };
        match message {
            Some(Message::Progress(progress)) => {
                if self.cores_before.is_none() {
                    self.cores_before = Some(self.environment.cores());
                }
                self.display.update(&progress);
            }
            Some(Message::Reported) => {
                if self.cores_after.is_none() {
                    self.cores_after = Some(self.environment.cores());
                }
                self.reported[line.rank] = true;
            }
            None => self.display.print(&format!("[{}] {}", line.rank, String::from_utf8_lossy(&line.bytes))),
        }
    }

    fn interrupted(&mut self, signal: i32) -> Option<Receiver<()>> {
        let (client, job) = self.environment.job()?;
        announce_end(client, job, signal)
    }

    fn tick(&mut self) -> Result<(), String> {
        if self.checked.elapsed().as_millis() < 500 {
            return Ok(());
        }
        self.checked = Instant::now();
        match self.environment.failure() {
            Some(reason) => Err(format!("the hub has failed: {reason}")),
            None => Ok(()),
        }
    }
}

enum TrainingOutcome {
    Done(Vec<WorkerReport>),
    Interrupted(i32),
    Failed(String),
}

fn evaluate(ended: LaunchEnd, reported: &[bool], folder: &Path) -> anyhow::Result<TrainingOutcome> {
    if let Some(signal) = ended.signal {
        return Ok(TrainingOutcome::Interrupted(signal));
    }
    if let Some(reason) = ended.stopped {
        return Ok(TrainingOutcome::Failed(reason));
    }
    // A worker that was killed is the cause. The others fail because of it and report that.
    let killed = ended.failed.iter().find(|&&rank| ended.exits[rank].code().is_none());
    if let Some(&rank) = killed.or(ended.failed.first()) {
        return Ok(TrainingOutcome::Failed(format!("worker {rank} {}", describe_exit(ended.exits[rank]))));
    }
    if let Some(rank) = reported.iter().position(|is_reported| !is_reported) {
        return Ok(TrainingOutcome::Failed(format!("worker {rank} ended without a report")));
    }
    let reports = (0..reported.len()).map(|rank| WorkerReport::read(folder, rank));
    Ok(TrainingOutcome::Done(reports.collect::<anyhow::Result<_>>()?))
}
