//! The launcher's side: whose turn it is.

use std::os::unix::net::UnixListener;
use std::sync::atomic::AtomicBool;

use anyhow::bail;
use indicatif::{ProgressBar, ProgressStyle};

use crate::cli::bench::conductor::{LEAD, accept, create, hear, hub_use, open};
use crate::cli::bench::hosts::Hosts;
use crate::cli::bench::numbers::Verdict;
use crate::cli::bench::spec::{Line, Order, Report, Spec, Turn};
use crate::cli::bench::usage;

/// What to do.
pub(super) struct Program {
    pub(super) jobs: usize,
    /// Of each of them.
    pub(super) spec: Spec,
    pub(super) hosts: Hosts,
    pub(super) warmup: u32,
    pub(super) iterations: u32,
}

/// What came of it.
#[derive(Default)]
pub(super) struct Measured {
    /// Of one job each.
    pub(super) alone: Vec<Timed>,
    /// Of all jobs.
    pub(super) together: Vec<Timed>,
    pub(super) verdict: Verdict,
}

/// One turn.
pub(super) struct Timed {
    /// Of each job that had it, its slowest worker's.
    pub(super) job_seconds: Vec<f64>,
    /// Processor seconds of each hub core, hub after hub.
    pub(super) core_seconds: Vec<f64>,
}

impl Timed {
    /// Of the last job.
    pub(super) fn seconds(&self) -> f64 {
        self.job_seconds.iter().copied().fold(0.0, f64::max)
    }
}

/// Runs the program with the processes that come to the listener; `is_over` says that no more will.
pub(super) fn conduct(
    program: &Program,
    listener: &UnixListener,
    is_over: &AtomicBool,
) -> anyhow::Result<Measured> {
    let mut house = House::gather(program, listener, is_over)?;
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
            let timed = house.take_turn(jobs)?;
            if iteration >= program.warmup {
                let turns = if is_alone { &mut measured.alone } else { &mut measured.together };
                turns.push(timed);
            }
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    measured.verdict = house.check()?;
    house.part();
    Ok(measured)
}

/// All processes.
struct House {
    jobs: Vec<Tenant>,
    hubs: Vec<Line>,
}

struct Tenant {
    /// By rank.
    workers: Vec<Line>,
    exchanges: u64,
}

impl House {
    fn gather(program: &Program, listener: &UnixListener, is_over: &AtomicBool) -> anyhow::Result<House> {
        let Program { jobs, spec, hosts, .. } = program;
        let workers = jobs * spec.workers as usize;
        let mut lines = accept(listener, workers + hosts.hubs().len(), is_over)?;
        let mut hubs = lines.split_off(workers);
        open(spec, hosts, workers, &mut hubs)?;
        let mut house =
            House { jobs: (0..*jobs).map(|_| Tenant { workers: Vec::new(), exchanges: 0 }).collect(), hubs };
        for (seat, line) in lines.into_iter().enumerate() {
            house.jobs[seat % jobs].workers.push(line);
        }
        for (number, job) in house.jobs.iter_mut().enumerate() {
            let at = create(&mut house.hubs[0], &format!("bench-{number}"), program.hosts.options)?;
            for (rank, line) in (0..).zip(&mut job.workers) {
                line.say(&Order::Join { spec: spec.clone(), rank, rack: None, at: at.clone() })?;
            }
        }
        for (number, job) in house.jobs.iter_mut().enumerate() {
            for report in job.reports(number) {
                let Report::Joined = report? else { bail!("a worker answered out of turn") };
            }
        }
        Ok(house)
    }

    fn take_turn(&mut self, jobs: std::ops::Range<usize>) -> anyhow::Result<Timed> {
        let before = hub_use(&mut self.hubs)?;
        let order = Order::Turn { turn: Turn::Exchange, start: usage::monotonic() + LEAD };
        self.order(jobs.clone(), |_| &order)?;
        let mut job_seconds = Vec::new();
        for number in jobs {
            let job = &mut self.jobs[number];
            job.exchanges += 1;
            let mut slowest = 0.0_f64;
            for report in job.reports(number) {
                let Report::Done { seconds, .. } = report? else { bail!("a worker answered out of turn") };
                slowest = slowest.max(seconds);
            }
            job_seconds.push(slowest);
        }
        let after = hub_use(&mut self.hubs)?;
        let cores = after.core_seconds.iter().zip(&before.core_seconds);
        Ok(Timed { job_seconds, core_seconds: cores.map(|(after, before)| after - before).collect() })
    }

    fn check(&mut self) -> anyhow::Result<Verdict> {
        let orders: Vec<Order> =
            self.jobs.iter().map(|job| Order::Check { exchanges: job.exchanges }).collect();
        self.order(0..self.jobs.len(), |job| &orders[job])?;
        let mut verdict = Verdict::default();
        for (number, job) in self.jobs.iter_mut().enumerate() {
            for report in job.reports(number) {
                let Report::Checked(of_one) = report? else { bail!("a worker answered out of turn") };
                verdict = verdict.and(of_one);
            }
        }
        Ok(verdict)
    }

    /// Rank by rank, so that no job always hears it first.
    fn order<'a>(
        &mut self,
        jobs: std::ops::Range<usize>,
        order: impl Fn(usize) -> &'a Order,
    ) -> anyhow::Result<()> {
        for rank in 0..self.jobs[jobs.start].workers.len() {
            for job in jobs.clone() {
                self.jobs[job].workers[rank].say(order(job))?;
            }
        }
        Ok(())
    }

    /// Lets the workers leave before the hub ends.
    fn part(mut self) {
        let mut workers: Vec<&mut Line> = self.jobs.iter_mut().flat_map(|job| &mut job.workers).collect();
        for worker in &mut workers {
            worker.hang_up();
        }
        for worker in &mut workers {
            // Nothing comes but the end.
            let _ = worker.hear::<Report>();
        }
    }
}

impl Tenant {
    /// Every worker's next report, by rank.
    fn reports(&mut self, number: usize) -> impl Iterator<Item = anyhow::Result<Report>> {
        let named = move |rank| format!("worker {rank} of job {number}");
        self.workers.iter_mut().enumerate().map(move |(rank, line)| hear(&named(rank), line))
    }
}
