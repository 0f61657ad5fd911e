//! The launcher's side of a benchmark: gives the orders, collects the numbers.

use std::io::ErrorKind;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressStyle};

use super::hosts::Hosts;
use super::numbers::Verdict;
use super::spec::{HubSeat, HubUse, Line, Meeting, Order, Report, Spec, Turn};
use super::statistics::mean;
use super::usage;
use crate::service::JobOptions;

/// How long processes may take to start.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// How long one answer may take: a very large exchange, or the check of its numbers.
const ANSWER_PATIENCE: Duration = Duration::from_secs(600);
/// From the first order of a turn to its start: all workers have theirs by then.
pub(super) const LEAD: Duration = Duration::from_millis(5);

/// What to do.
pub(super) struct Program {
    pub(super) spec: Spec,
    pub(super) hosts: Hosts,
    pub(super) warmup: u32,
    pub(super) iterations: u32,
    /// What the progress bar says is going on.
    pub(super) label: String,
}

/// What came of it.
#[derive(Default)]
pub(super) struct Measured {
    pub(super) exchanges: Vec<Timed>,
    /// Interleaved with the exchanges; empty without `--raw`.
    pub(super) raw: Vec<Timed>,
    /// Of the largest worker.
    pub(super) worker_peak_bytes: u64,
    /// Of the largest hub.
    pub(super) hub_peak_bytes: u64,
    pub(super) verdict: Verdict,
}

/// One turn of all workers.
pub(super) struct Timed {
    /// The slowest worker's.
    pub(super) seconds: f64,
    /// Bytes of frames that a worker has sent and received, in the mean of all.
    pub(super) frame_bytes: [f64; 2],
    /// Mean of the workers.
    pub(super) cpu_seconds_worker: f64,
    /// The whole processes of all hubs together.
    pub(super) cpu_seconds_hub: f64,
    /// Processor seconds of each hub core, hub after hub.
    pub(super) core_seconds: Vec<f64>,
}

/// Runs the program with the processes that come to the listener; `is_over` says that no more will.
pub(super) fn conduct(
    program: &Program,
    listener: &UnixListener,
    is_over: &AtomicBool,
) -> anyhow::Result<Measured> {
    let mut company = Company::gather(program, listener, is_over)?;
    let mut measured = Measured::default();
    let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}").expect("a valid template");
    let progress = ProgressBar::new(u64::from(program.warmup + program.iterations)).with_style(style);
    progress.set_message(program.label.clone());
    for iteration in 0..program.warmup + program.iterations {
        let mut turns = vec![Turn::Exchange];
        if program.spec.is_raw {
            turns.push(Turn::Raw);
        }
        // Each comes first as often as second, so that neither always finds what the other left.
        if !iteration.is_multiple_of(2) {
            turns.reverse();
        }
        for turn in turns {
            let timed = company.take_turn(turn, &mut measured)?;
            match turn {
                _ if iteration < program.warmup => {}
                Turn::Exchange => measured.exchanges.push(timed),
                Turn::Raw => measured.raw.push(timed),
            }
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    let exchanges = u64::from(program.warmup + program.iterations);
    if program.spec.variant.is_exact() {
        measured.verdict = company.check(exchanges)?;
    }
    company.part();
    Ok(measured)
}

/// All processes, by what they are.
pub(super) struct Company {
    pub(super) workers: Vec<Line>,
    pub(super) hubs: Vec<Line>,
}

impl Company {
    fn gather(program: &Program, listener: &UnixListener, is_over: &AtomicBool) -> anyhow::Result<Company> {
        let spec = &program.spec;
        let workers = spec.workers as usize;
        let mut lines = accept(listener, workers + program.hosts.hubs().len(), is_over)?;
        let mut hubs = lines.split_off(workers);
        open(spec, &program.hosts, workers, &mut hubs)?;
        let at = create(&mut hubs[0], "bench", program.hosts.options)?;
        let mut company = Company { workers: lines, hubs };
        for (rank, line) in (0..).zip(&mut company.workers) {
            let rack = program.hosts.rack(rank);
            line.say(&Order::Join { spec: spec.clone(), rank, rack, at: at.clone() })?;
        }
        for report in company.reports() {
            let Report::Joined = report? else { bail!("a worker answered out of turn") };
        }
        Ok(company)
    }

    fn take_turn(&mut self, turn: Turn, measured: &mut Measured) -> anyhow::Result<Timed> {
        let before = self.hub_use()?;
        let order = Order::Turn { turn, start: usage::monotonic() + LEAD };
        self.order_workers(&order)?;
        let (mut workers, mut frame_bytes) = (Vec::new(), Vec::new());
        for report in self.reports() {
            let Report::Done { seconds, bytes_sent, bytes_received, cpu_seconds, peak_bytes } = report?
            else {
                bail!("a worker answered out of turn")
            };
            workers.push((seconds, cpu_seconds));
            frame_bytes.push([bytes_sent as f64, bytes_received as f64]);
            measured.worker_peak_bytes = measured.worker_peak_bytes.max(peak_bytes);
        }
        let after = self.hub_use()?;
        measured.hub_peak_bytes = after.peak_bytes;
        let cores = after.core_seconds.iter().zip(&before.core_seconds);
        Ok(Timed {
            seconds: workers.iter().map(|&(seconds, _)| seconds).fold(0.0, f64::max),
            frame_bytes: [0, 1].map(|way| mean(frame_bytes.iter().map(|bytes| bytes[way]))),
            cpu_seconds_worker: mean(workers.iter().map(|&(_, cpu_seconds)| cpu_seconds)),
            cpu_seconds_hub: after.cpu_seconds - before.cpu_seconds,
            core_seconds: cores.map(|(after, before)| after - before).collect(),
        })
    }

    fn check(&mut self, exchanges: u64) -> anyhow::Result<Verdict> {
        self.order_workers(&Order::Check { exchanges })?;
        let mut verdict = Verdict::default();
        for report in self.reports() {
            let Report::Checked(of_one) = report? else { bail!("a worker answered out of turn") };
            verdict = verdict.and(of_one);
        }
        Ok(verdict)
    }

    /// Lets the workers leave before the hub ends.
    pub(super) fn part(mut self) {
        for worker in &mut self.workers {
            worker.hang_up();
        }
        for worker in &mut self.workers {
            // Nothing comes but the end.
            let _ = worker.hear::<Report>();
        }
    }

    pub(super) fn order_workers(&mut self, order: &Order) -> anyhow::Result<()> {
        for (rank, line) in self.workers.iter_mut().enumerate() {
            line.say(order).with_context(|| format!("worker {rank}"))?;
        }
        Ok(())
    }

    /// Every worker's next report, by rank.
    pub(super) fn reports(&mut self) -> impl Iterator<Item = anyhow::Result<Report>> {
        self.workers.iter_mut().enumerate().map(|(rank, line)| hear(&format!("worker {rank}"), line))
    }

    /// Of all together.
    fn hub_use(&mut self) -> anyhow::Result<HubUse> {
        hub_use(&mut self.hubs)
    }
}

/// Of all these hubs together.
pub(super) fn hub_use(hubs: &mut [Line]) -> anyhow::Result<HubUse> {
    let mut all = HubUse::default();
    for hub in hubs {
        match ask("a hub", hub, &Order::Tell)? {
            Report::Used(used) => all = all.and(used),
            other => bail!("a hub answered {other:?}"),
        }
    }
    Ok(all)
}

/// Hubs join the first one's manager, one after the other, so that their numbers are their seats', after so many workers'. Gives its
/// URL.
pub(super) fn open(spec: &Spec, hosts: &Hosts, workers: usize, hubs: &mut [Line]) -> anyhow::Result<String> {
    let token = token()?;
    let mut joins = None;
    for (number, (hub, host)) in hubs.iter_mut().zip(hosts.hubs()).enumerate() {
        let (listen, rack) = (host.listen.clone(), host.rack.clone());
        let seat = HubSeat { listen, joins: joins.clone(), rack, token: token.clone() };
        let name = hosts.name(workers + number, workers);
        match ask(&name, hub, &Order::Host { spec: spec.clone(), seat })? {
            Report::Ready { url } => joins = joins.or(Some(url)),
            other => bail!("{name} answered {other:?}"),
        }
    }
    joins.context("there is a hub")
}

/// A job at hubs that are open.
pub(super) fn create(first_hub: &mut Line, job: &str, options: JobOptions) -> anyhow::Result<Meeting> {
    match ask("the first hub", first_hub, &Order::Open { job: job.to_owned(), options })? {
        Report::Hosting(at) => Ok(at),
        other => bail!("the first hub answered {other:?}"),
    }
}

/// The manager of a run is nobody else's, wherever it listens.
fn token() -> anyhow::Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).context("the system has no random numbers")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

pub(super) fn ask(name: &str, line: &mut Line, order: &Order) -> anyhow::Result<Report> {
    line.say(order).with_context(|| name.to_owned())?;
    hear(name, line)
}

pub(super) fn hear(name: &str, line: &mut Line) -> anyhow::Result<Report> {
    line.hear().with_context(|| name.to_owned())?.with_context(|| format!("{name} ended too early"))
}

/// Lines to as many processes, by seat.
pub(super) fn accept(
    listener: &UnixListener,
    count: usize,
    is_over: &AtomicBool,
) -> anyhow::Result<Vec<Line>> {
    listener.set_nonblocking(true)?;
    let deadline = Instant::now() + START_PATIENCE;
    let mut seats: Vec<Option<Line>> = (0..count).map(|_| None).collect();
    while seats.iter().any(Option::is_none) {
        match listener.accept() {
            Ok((socket, _)) => {
                let (seat, line) = welcome(socket)?;
                *seats.get_mut(seat).context("a process came that was not started")? = Some(line);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if is_over.load(Ordering::Acquire) || Instant::now() > deadline {
                    let missing = seats.iter().filter(|seat| seat.is_none()).count();
                    bail!("{missing} of {count} processes did not start");
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => return Err(error).context("cannot hear from the processes"),
        }
    }
    Ok(seats.into_iter().flatten().collect())
}

fn welcome(socket: UnixStream) -> anyhow::Result<(usize, Line)> {
    socket.set_nonblocking(false)?;
    socket.set_read_timeout(Some(ANSWER_PATIENCE))?;
    let mut line = Line::new(socket);
    match hear("a process", &mut line)? {
        Report::Here { seat } => Ok((seat, line)),
        other => bail!("a process began with {other:?}"),
    }
}
