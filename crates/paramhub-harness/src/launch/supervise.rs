//! Watches over all workers of a launch until the last has ended.

use std::process::{Command, ExitStatus};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::Signal;

use super::lines::{Line, PipeLine};
use super::signals::Signals;
use super::worker::{Worker, describe_exit, exit_code};
use super::worker_supervisor::{SupervisedJob, WorkerSupervisor};

/// Lines that may wait to be printed.
const LINES_MAX: usize = 256;
/// The interval at which the launcher polls workers and signals.
const TICK: Duration = Duration::from_millis(20);
/// The time that a group gets from the signal that asks it to end to SIGKILL.
const KILL_GRACE: Duration = Duration::from_secs(5);
/// The time that the other workers get when one has failed: longer than hubs take to send them the reason.
const PEER_GRACE: Duration = Duration::from_secs(8);
/// The time that the launcher may hold back the signal from its workers while the job's hubs take a last
/// checkpoint.
const LAST_CHECKPOINT_TIMEOUT: Duration = Duration::from_secs(9);
/// The time that output may take to arrive after the last worker has ended.
const OUTPUT_GRACE: Duration = Duration::from_secs(2);

/// Receives the events of a launch.
pub trait LaunchObserver {
    /// A worker printed a line.
    fn line(&mut self, line: Line);

    /// A worker has failed, and the others go on. It is started again if `restarts` has the number of the restart and
    /// how many there can be.
    fn lost(&mut self, _worker: usize, _exit: ExitStatus, _restarts: Option<(u32, u32)>) {}

    /// Whether a worker that has failed may be started again.
    fn may_restart(&mut self) -> bool {
        true
    }

    /// A worker that has ended well, and whose rank its job awaits again; called after each [`tick`](Self::tick). It is
    /// started again like one that has failed.
    fn awaited(&mut self) -> Option<usize> {
        None
    }

    /// A worker that had ended well is started again.
    fn started_again(&mut self, _worker: usize, _restart: u32, _most: u32) {}

    /// A worker to kill, while the launcher has no reason to end all of them; called after each [`tick`](Self::tick).
    /// Another process is started in its place.
    fn worker_to_kill(&mut self) -> Option<usize> {
        None
    }

    /// A worker that was to be killed is dead, and another process is started in its place.
    fn killed(&mut self, _worker: usize) {}

    /// The launcher has received a signal and will end its workers: at once, or when the sender of the
    /// returned channel is dropped.
    fn interrupted(&mut self, _signal: i32) -> Option<Receiver<()>> {
        None
    }

    /// Called some fifty times a second. An error stops the workers, after a grace period in which they can
    /// report.
    fn tick(&mut self) -> Result<(), String> {
        Ok(())
    }
}

/// What a worker that fails means for the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnWorkerFailure {
    /// They end, too.
    EndAll,
    /// They go on, and the worker is started again.
    Restart {
        /// How often a worker is started again at most.
        most: u32,
        /// Whether all end when a worker fails that is not started again.
        needs_all: bool,
    },
}

/// Running workers.
pub struct Launch {
    workers: Vec<Worker>,
    /// The command of each worker.
    commands: Vec<Command>,
    on_failure: OnWorkerFailure,
    /// How often each worker has been started again.
    restarts: Vec<u32>,
    /// Which workers the launcher has killed and not yet reaped.
    killed: Vec<bool>,
    /// Workers that have failed and are not started again, while the others go on.
    lost: Vec<usize>,
    line_sender: SyncSender<PipeLine>,
    lines: Receiver<PipeLine>,
    /// Pipes that are not yet at their end.
    open_pipes: usize,
    stop: Option<Stop>,
    // Dropped last: it must know every worker that still runs.
    supervisor: WorkerSupervisor,
}

/// The times at which workers that do not end by themselves are signalled.
struct Stop {
    /// The time to send SIGTERM; `None` once it was sent.
    terminate_at: Option<Instant>,
    kill_at: Instant,
    /// `true` if the launcher ended the remaining workers because another one failed. Their exits are then no
    /// failures of their own.
    was_signalled: bool,
}

/// The way in which a launch ended.
pub struct LaunchEnd {
    /// The rank of the first of these workers. The indices below count from it.
    pub first_rank: u32,
    /// The exit status of each worker, in rank order.
    pub exits: Vec<ExitStatus>,
    /// Workers that failed by themselves, the first to fail first.
    pub failed: Vec<usize>,
    /// The first signal that the launcher passed on.
    pub signal: Option<i32>,
    /// `true` if that signal came before any worker had failed.
    pub was_interrupted_first: bool,
    /// The reason why [`LaunchObserver::tick`] stopped the workers.
    pub stopped: Option<String>,
}

impl LaunchEnd {
    /// The highest exit code of the workers that failed by themselves.
    pub fn worst_exit_code(&self) -> u8 {
        self.failed.iter().map(|&rank| exit_code(self.exits[rank])).max().unwrap_or(0)
    }

    /// Returns the reason why the job of these workers is over; `joined` says whether any worker had joined
    /// it.
    pub fn reason(&self, joined: bool) -> String {
        if let Some(signal) = self.signal.filter(|_| self.was_interrupted_first) {
            return interruption_reason(signal);
        }
        match (self.failed.first(), joined) {
            (Some(&rank), _) => {
                format!("its worker {} {}", self.first_rank as usize + rank, describe_exit(self.exits[rank]))
            }
            (None, true) => "its workers ended without leaving".into(),
            (None, false) => "its workers ended without joining".into(),
        }
    }
}

/// Returns the reason why a job is over whose launcher was interrupted by this signal.
pub fn interruption_reason(signal: i32) -> String {
    let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
    format!("its launcher was interrupted by {name}")
}

impl Launch {
    /// Starts one worker per command, in rank order. If one cannot be started, those before it are ended.
    /// `supervised_job` is their job if its connection manager outlives the launcher.
    pub fn start(
        commands: Vec<Command>,
        on_failure: OnWorkerFailure,
        supervised_job: Option<&SupervisedJob>,
    ) -> anyhow::Result<Launch> {
        let (sender, lines): (SyncSender<PipeLine>, _) = sync_channel(LINES_MAX);
        let supervisor =
            WorkerSupervisor::start().context("cannot start a process to watch over the workers")?;
        let mut launch = Launch {
            workers: Vec::new(),
            restarts: vec![0; commands.len()],
            killed: vec![false; commands.len()],
            commands,
            on_failure,
            lost: Vec::new(),
            line_sender: sender,
            lines,
            open_pipes: 0,
            stop: None,
            supervisor,
        };
        if let Some(supervised_job) = supervised_job {
            launch
                .supervisor
                .set_job(supervised_job)
                .context("the process that watches over the workers is gone")?;
        }
        for rank in 0..launch.commands.len() {
            let worker = launch.spawn(rank)?;
            launch.workers.push(worker);
        }
        Ok(launch)
    }

    fn spawn(&mut self, rank: usize) -> anyhow::Result<Worker> {
        let command = &mut self.commands[rank];
        let program = command.get_program().to_string_lossy().into_owned();
        let worker = Worker::spawn(command, rank, &self.line_sender)
            .map_err(|error| anyhow::anyhow!("cannot start worker {rank}, `{program}`: {error}"))?;
        self.open_pipes += 2;
        self.supervisor.add(worker.pid()).context("the process that watches over the workers is gone")?;
        Ok(worker)
    }

    /// Returns when every worker has ended.
    pub fn supervise(mut self, signals: &Signals, watch: &mut dyn LaunchObserver) -> LaunchEnd {
        let mut failed = Vec::new();
        let (mut first_signal, mut was_interrupted_first) = (None, false);
        let mut last_checkpoint: Option<(i32, Receiver<()>, Instant)> = None;
        let mut stopped = None;
        let mut ended_at: Option<Instant> = None;
        loop {
            self.pass_lines(watch);
            if let Some(signal) = signals.poll() {
                let announced = match first_signal {
                    None if failed.is_empty() => watch.interrupted(signal),
                    _ => None,
                };
                match announced {
                    Some(announced) => {
                        last_checkpoint = Some((signal, announced, Instant::now() + LAST_CHECKPOINT_TIMEOUT))
                    }
                    None => {
                        last_checkpoint = None;
                        self.pass_signal(signal, first_signal.is_some());
                    }
                }
                if first_signal.is_none() {
                    (first_signal, was_interrupted_first) = (Some(signal), failed.is_empty());
                }
            }
            let is_announced = |(_, announced, until): &mut (i32, Receiver<()>, Instant)| {
                announced.try_recv() != Err(TryRecvError::Empty) || Instant::now() >= *until
            };
            if let Some((signal, ..)) = last_checkpoint.take_if(is_announced) {
                self.pass_signal(signal, false);
            }
            failed.extend(self.reap(watch));
            if self.workers.iter().all(|worker| worker.exit.is_some()) {
                let since = *ended_at.get_or_insert_with(Instant::now);
                if self.open_pipes == 0 || since.elapsed() > OUTPUT_GRACE {
                    break;
                }
                continue;
            }
            if stopped.is_none()
                && let Err(reason) = watch.tick()
            {
                stopped = Some(reason);
                self.stop_soon();
            }
            if let OnWorkerFailure::Restart { most, needs_all: true } = self.on_failure
                && self.stop.is_none()
                && let Some(worker) = watch.awaited()
            {
                self.start_again(worker, most, watch);
            }
            if first_signal.is_none()
                && self.stop.is_none()
                && let Some(worker) = watch.worker_to_kill()
            {
                self.killed[worker] = true;
                self.workers[worker].signal(Signal::KILL);
            }
            self.enforce_stop();
        }
        if self.workers.iter().all(|worker| worker.exit.is_some_and(|exit| !exit.success())) {
            failed.append(&mut self.lost);
        }
        let exits = self.workers.iter().map(|worker| worker.exit.expect("all have ended")).collect();
        LaunchEnd { first_rank: 0, exits, failed, signal: first_signal, was_interrupted_first, stopped }
    }

    /// Passes lines to the observer as they arrive, for one tick at most.
    fn pass_lines(&mut self, watch: &mut dyn LaunchObserver) {
        let deadline = Instant::now() + TICK;
        while let Some(left) = deadline.checked_duration_since(Instant::now()) {
            match self.lines.recv_timeout(left) {
                Ok(Some(line)) => watch.line(line),
                Ok(None) => self.open_pipes -= 1,
                Err(RecvTimeoutError::Timeout) => return,
                Err(RecvTimeoutError::Disconnected) => unreachable!("this has a sender"),
            }
        }
    }

    fn pass_signal(&mut self, signal: i32, again: bool) {
        let requested = Signal::from_named_raw(signal).unwrap_or(Signal::TERM);
        self.signal_all(if again { Signal::KILL } else { requested });
        let kill_at = Instant::now() + KILL_GRACE;
        self.stop = Some(Stop { terminate_at: None, kill_at, was_signalled: false });
    }

    /// Indices of the workers that have failed by themselves since the last call, for which the others must end.
    fn reap(&mut self, watch: &mut dyn LaunchObserver) -> Vec<usize> {
        let was_signalled = self.stop.as_ref().is_some_and(|stop| stop.was_signalled);
        let mut failed = Vec::new();
        for rank in 0..self.workers.len() {
            let worker = &mut self.workers[rank];
            let Some(exit) = worker.reap() else { continue };
            self.supervisor.remove(worker.pid());
            if exit.success() || was_signalled {
                continue;
            }
            if std::mem::take(&mut self.killed[rank]) && self.stop.is_none() {
                watch.killed(rank);
                match self.spawn(rank) {
                    Ok(worker) => self.workers[rank] = worker,
                    Err(_) => failed.push(rank),
                }
                continue;
            }
            match self.on_failure {
                // Whatever ends while the launcher ends all workers is not started again.
                OnWorkerFailure::Restart { most, needs_all } if self.stop.is_none() => {
                    if !self.replace(rank, exit, most, watch) {
                        match needs_all {
                            true => failed.push(rank),
                            false => {
                                watch.lost(rank, exit, None);
                                self.lost.push(rank);
                            }
                        }
                    }
                }
                OnWorkerFailure::Restart { .. } | OnWorkerFailure::EndAll => failed.push(rank),
            }
        }
        if !failed.is_empty() {
            self.stop_soon();
        }
        failed
    }

    /// Starts a worker again that has failed, if it may be. Returns whether it has.
    fn replace(&mut self, rank: usize, exit: ExitStatus, most: u32, watch: &mut dyn LaunchObserver) -> bool {
        let restart = self.restarts[rank] + 1;
        if restart <= most
            && watch.may_restart()
            && let Ok(worker) = self.spawn(rank)
        {
            watch.lost(rank, exit, Some((restart, most)));
            self.restarts[rank] = restart;
            self.workers[rank] = worker;
            return true;
        }
        false
    }

    /// Starts a worker again that has ended well, if it may be.
    fn start_again(&mut self, rank: usize, most: u32, watch: &mut dyn LaunchObserver) {
        // The job may await a rank of another host.
        let Some(worker) = self.workers.get(rank) else { return };
        let has_ended_well = worker.exit.is_some_and(|exit| exit.success());
        let restart = self.restarts[rank] + 1;
        if has_ended_well
            && restart <= most
            && let Ok(worker) = self.spawn(rank)
        {
            watch.started_again(rank, restart, most);
            self.restarts[rank] = restart;
            self.workers[rank] = worker;
        }
    }

    fn stop_soon(&mut self) {
        let at = Instant::now() + PEER_GRACE;
        self.stop.get_or_insert(Stop {
            terminate_at: Some(at),
            kill_at: at + KILL_GRACE,
            was_signalled: false,
        });
    }

    fn enforce_stop(&mut self) {
        let Some(stop) = &mut self.stop else { return };
        let now = Instant::now();
        if now >= stop.kill_at {
            self.signal_all(Signal::KILL);
        } else if stop.terminate_at.take_if(|at| now >= *at).is_some() {
            stop.was_signalled = true;
            self.signal_all(Signal::TERM);
        }
    }

    fn signal_all(&self, signal: Signal) {
        for worker in &self.workers {
            worker.signal(signal);
        }
    }
}
