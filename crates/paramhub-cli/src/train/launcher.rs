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

use super::chaos::Chaos;
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
    let chaos = Chaos::new(section)?;
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
    let mut training_observer = TrainingObserver::new(section, &environment, processes, chaos);
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
    let TrainingObserver { display, reported, chaos, .. } = training_observer;
    display.finish();
    let chaos_summary = chaos.as_ref().map(|chaos| chaos.summary(environment.last_status().as_ref()));
    environment.close(Some(&ended));
    let reports = match evaluate(ended, &reported, chaos.as_ref(), scratch.path())? {
        TrainingOutcome::Done(reports) => reports,
        TrainingOutcome::Interrupted(signal) => {
            let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
            eprintln!("paramhub: training was interrupted by {name}; {ended_too} have ended");
            return Ok(ExitCode::from(128 + u8::try_from(signal).unwrap_or(0)));
        }
        TrainingOutcome::Failed(reason) => bail!("training failed: {reason}"),
    };

    let ranks: Vec<usize> = reports.iter().map(|report| report.rank).collect();
    let difference = parameters::largest_difference(scratch.path(), &ranks)?;
    let mut summary = Summary::new(section, reports, hub_busy, Some(difference));
    if let Some(chaos_summary) = chaos_summary {
        summary = summary.after(chaos_summary);
    }
    println!("{}", summary.table());
    if let Some(path) = &section.json {
        summary.write(path)?;
    }
    if let Some(path) = &section.save {
        let saved = parameters::file_of(scratch.path(), ranks[0]);
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
    chaos: Option<Chaos>,
    /// `true` if each worker has written its report.
    reported: Vec<bool>,
    /// The cores' counters at the first progress message, so that their busy share covers the training alone.
    cores_before: Option<Vec<CoreCounters>>,
    /// The cores' counters when the first worker had finished.
    cores_after: Option<Vec<CoreCounters>>,
    checked: Instant,
}

impl<'a> TrainingObserver<'a> {
    fn new(
        section: &TrainSection,
        environment: &'a TrainEnvironment,
        processes: usize,
        chaos: Option<Chaos>,
    ) -> Self {
        // Rank 0 reports its own examples; the other ranks compute as many at the same pace.
        let examples_factor = if processes == 1 { 1.0 } else { f64::from(section.workers()) };
        let display = Display::new(section, examples_factor);
        if let Some(chaos) = &chaos {
            display.print(&chaos.title());
        }
        TrainingObserver {
            environment,
            display,
            chaos,
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
                let is_news = |chaos: &mut Chaos| chaos.stepped(&progress, Instant::now());
                if !self.chaos.as_mut().is_none_or(is_news) {
                    return;
                }
                if self.cores_before.is_none() {
                    self.cores_before = Some(self.environment.cores());
                }
                self.display.update(&progress);
            }
            Some(Message::Joined { step }) => {
                let chaos = self.chaos.as_mut();
                if let Some(back) = chaos.and_then(|chaos| chaos.joined(line.rank, step, Instant::now())) {
                    self.display.print(&back);
                }
            }
            Some(Message::Reported) => {
                if let Some(chaos) = &mut self.chaos {
                    chaos.finished();
                }
                if self.cores_after.is_none() {
                    self.cores_after = Some(self.environment.cores());
                }
                self.reported[line.rank] = true;
            }
            None => self.display.print(&format!("[{}] {}", line.rank, String::from_utf8_lossy(&line.bytes))),
        }
    }

    fn worker_to_kill(&mut self) -> Option<usize> {
        self.chaos.as_mut()?.victim(Instant::now())
    }

    fn killed(&mut self, worker: usize) {
        if let Some(chaos) = &mut self.chaos {
            self.display.print(&chaos.killed(worker));
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

fn evaluate(
    ended: LaunchEnd,
    reported: &[bool],
    chaos: Option<&Chaos>,
    folder: &Path,
) -> anyhow::Result<TrainingOutcome> {
    if let Some(signal) = ended.signal {
        return Ok(TrainingOutcome::Interrupted(signal));
    }
    if let Some(reason) = ended.stopped {
        return Ok(TrainingOutcome::Failed(reason));
    }
    // A process that was to take the rank of a killed one may have come when the others had made the last step.
    let came_too_late =
        |rank: usize| reported.contains(&true) && chaos.is_some_and(|chaos| chaos.is_away(rank));
    let failed: Vec<usize> = ended.failed.into_iter().filter(|&rank| !came_too_late(rank)).collect();
    // A worker that was killed is the cause. The others fail because of it and report that.
    let killed = failed.iter().find(|&&rank| ended.exits[rank].code().is_none());
    if let Some(&rank) = killed.or(failed.first()) {
        return Ok(TrainingOutcome::Failed(format!("worker {rank} {}", describe_exit(ended.exits[rank]))));
    }
    let is_missing = |&rank: &usize| !reported[rank] && !came_too_late(rank);
    if let Some(rank) = (0..reported.len()).find(is_missing) {
        return Ok(TrainingOutcome::Failed(format!("worker {rank} ended without a report")));
    }
    let ranks = (0..reported.len()).filter(|&rank| reported[rank]);
    let reports = ranks.map(|rank| WorkerReport::read(folder, rank));
    Ok(TrainingOutcome::Done(reports.collect::<anyhow::Result<_>>()?))
}
