//! The launcher's side: jobs take turns.

use std::os::unix::net::UnixListener;
use std::sync::atomic::AtomicBool;

use anyhow::bail;
use indicatif::{ProgressBar, ProgressStyle};
use paramhub_harness::exchange::driver::{LEAD, accept, create, hub_use, open, receive};
use paramhub_harness::exchange::hosts::Hosts;
use paramhub_harness::exchange::messages::{JsonConnection, LauncherCommand, ProcessReport, Turn};
use paramhub_harness::exchange::numbers::Verdict;
use paramhub_harness::exchange::spec::Spec;
use paramhub_harness::exchange::usage;

/// The measurements to make.
pub(super) struct Program {
    pub(super) jobs: usize,
    /// The specification of each job.
    pub(super) spec: Spec,
    pub(super) hosts: Hosts,
    pub(super) warmup: u32,
    pub(super) iterations: u32,
}

/// The results.
#[derive(Default)]
pub(super) struct Measured {
    /// Turns of one job alone.
    pub(super) alone: Vec<Timed>,
    /// Turns of all jobs together.
    pub(super) together: Vec<Timed>,
    pub(super) verdict: Verdict,
}

/// One turn.
pub(super) struct Timed {
    /// The seconds of the slowest worker of each job in the turn.
    pub(super) job_seconds: Vec<f64>,
    /// Processor seconds of each hub core, hub after hub.
    pub(super) core_seconds: Vec<f64>,
}

impl Timed {
    /// The seconds of the job that finished last.
    pub(super) fn seconds(&self) -> f64 {
        self.job_seconds.iter().copied().fold(0.0, f64::max)
    }
}

/// Runs the program with the processes that connect to the listener; `is_over` is set when no more will.
pub(super) fn drive(
    program: &Program,
    listener: &UnixListener,
    is_over: &AtomicBool,
) -> anyhow::Result<Measured> {
    let mut processes = TenantProcesses::connect(program, listener, is_over)?;
    let mut measured = Measured::default();
    let turns = program.warmup + program.iterations;
    let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}").expect("a valid template");
    let progress = ProgressBar::new(turns.into()).with_style(style);
    progress.set_message("exchanges");
    for iteration in 0..turns {
        let one = iteration as usize % program.jobs;
        // Each comes first as often as second.
        let order = if iteration.is_multiple_of(2) { [true, false] } else { [false, true] };
        for is_alone in order {
            let jobs = if is_alone { one..one + 1 } else { 0..program.jobs };
            let timed = processes.take_turn(jobs)?;
            if iteration >= program.warmup {
                let turns = if is_alone { &mut measured.alone } else { &mut measured.together };
                turns.push(timed);
            }
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    measured.verdict = processes.check()?;
    processes.shut_down();
    Ok(measured)
}

/// The connections to all processes.
struct TenantProcesses {
    jobs: Vec<Tenant>,
    hubs: Vec<JsonConnection>,
}

struct Tenant {
    /// The workers, by rank.
    workers: Vec<JsonConnection>,
    exchanges: u64,
}

impl TenantProcesses {
    fn connect(
        program: &Program,
        listener: &UnixListener,
        is_over: &AtomicBool,
    ) -> anyhow::Result<TenantProcesses> {
        let Program { jobs, spec, hosts, .. } = program;
        let workers = jobs * spec.workers as usize;
        let mut connections = accept(listener, workers + hosts.hubs().len(), is_over)?;
        let mut hubs = connections.split_off(workers);
        open(spec, hosts, workers, &mut hubs)?;
        let mut processes = TenantProcesses {
            jobs: (0..*jobs).map(|_| Tenant { workers: Vec::new(), exchanges: 0 }).collect(),
            hubs,
        };
        for (process, connection) in connections.into_iter().enumerate() {
            processes.jobs[process % jobs].workers.push(connection);
        }
        for (number, job) in processes.jobs.iter_mut().enumerate() {
            let at = create(&mut processes.hubs[0], &format!("bench-{number}"), program.hosts.options)?;
            for (rank, connection) in (0..).zip(&mut job.workers) {
                connection.send(&LauncherCommand::Join {
                    spec: spec.clone(),
                    rank,
                    rack: None,
                    at: at.clone(),
                })?;
            }
        }
        for (number, job) in processes.jobs.iter_mut().enumerate() {
            for report in job.reports(number) {
                let ProcessReport::Joined = report? else { bail!("a worker answered out of turn") };
            }
        }
        Ok(processes)
    }

    fn take_turn(&mut self, jobs: std::ops::Range<usize>) -> anyhow::Result<Timed> {
        let before = hub_use(&mut self.hubs)?;
        let order = LauncherCommand::Turn { turn: Turn::Exchange, start: usage::monotonic() + LEAD };
        self.order(jobs.clone(), |_| &order)?;
        let mut job_seconds = Vec::new();
        for number in jobs {
            let job = &mut self.jobs[number];
            job.exchanges += 1;
            let mut slowest = 0.0_f64;
            for report in job.reports(number) {
                let ProcessReport::Done { seconds, .. } = report? else {
                    bail!("a worker answered out of turn")
                };
                slowest = slowest.max(seconds);
            }
            job_seconds.push(slowest);
        }
        let after = hub_use(&mut self.hubs)?;
        let cores = after.core_seconds.iter().zip(&before.core_seconds);
        Ok(Timed { job_seconds, core_seconds: cores.map(|(after, before)| after - before).collect() })
    }

    fn check(&mut self) -> anyhow::Result<Verdict> {
        let orders: Vec<LauncherCommand> =
            self.jobs.iter().map(|job| LauncherCommand::Check { exchanges: job.exchanges }).collect();
        self.order(0..self.jobs.len(), |job| &orders[job])?;
        let mut verdict = Verdict::default();
        for (number, job) in self.jobs.iter_mut().enumerate() {
            for report in job.reports(number) {
                let ProcessReport::Checked(of_one) = report? else { bail!("a worker answered out of turn") };
                verdict = verdict.and(of_one);
            }
        }
        Ok(verdict)
    }

    /// Sends commands rank by rank, so that no job always gets them first.
    fn order<'a>(
        &mut self,
        jobs: std::ops::Range<usize>,
        order: impl Fn(usize) -> &'a LauncherCommand,
    ) -> anyhow::Result<()> {
        for rank in 0..self.jobs[jobs.start].workers.len() {
            for job in jobs.clone() {
                self.jobs[job].workers[rank].send(order(job))?;
            }
        }
        Ok(())
    }

    /// Lets the workers leave before the hub ends.
    fn shut_down(mut self) {
        let mut workers: Vec<&mut JsonConnection> =
            self.jobs.iter_mut().flat_map(|job| &mut job.workers).collect();
        for worker in &mut workers {
            worker.close_write();
        }
        for worker in &mut workers {
            // The worker sends nothing more and hangs up.
            let _ = worker.receive::<ProcessReport>();
        }
    }
}

impl Tenant {
    /// Every worker's next report, by rank.
    fn reports(&mut self, number: usize) -> impl Iterator<Item = anyhow::Result<ProcessReport>> {
        let named = move |rank| format!("worker {rank} of job {number}");
        self.workers.iter_mut().enumerate().map(move |(rank, connection)| receive(&named(rank), connection))
    }
}
