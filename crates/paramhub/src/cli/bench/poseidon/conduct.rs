//! The launcher's side: the systems take turns.

use std::os::unix::net::UnixListener;
use std::sync::atomic::AtomicBool;

use anyhow::bail;
use indicatif::{ProgressBar, ProgressStyle};

use super::part::{Part, Played};
use crate::cli::bench::conductor::{LEAD, accept, create, hear, open};
use crate::cli::bench::hosts::Hosts;
use crate::cli::bench::rounds::order;
use crate::cli::bench::spec::{Line, Order, Report, Turn};
use crate::cli::bench::usage;

/// What to do.
pub(super) struct Program {
    /// Of each system.
    pub(super) parts: Vec<Part>,
    pub(super) hosts: Hosts,
    pub(super) rounds: u32,
}

/// What came of it: of each system every turn, and of each turn every worker's.
pub(super) type Measured = Vec<Vec<Vec<Played>>>;

/// Runs the program with the processes that come to the listener; `is_over` says that no more will.
pub(super) fn conduct(
    program: &Program,
    listener: &UnixListener,
    is_over: &AtomicBool,
) -> anyhow::Result<Measured> {
    let Program { parts, hosts, rounds } = program;
    let spec = &parts[0].spec;
    let count = parts.len() * spec.workers as usize;
    let mut lines = accept(listener, count + hosts.hubs().len(), is_over)?;
    let mut hubs = lines.split_off(count);
    open(spec, hosts, count, &mut hubs)?;
    // Neighbours are ranks of different systems, so that each system is spread over all hosts.
    let mut systems: Vec<Vec<Line>> = parts.iter().map(|_| Vec::new()).collect();
    for (seat, line) in lines.into_iter().enumerate() {
        systems[seat % parts.len()].push(line);
    }
    for (number, (part, workers)) in parts.iter().zip(&mut systems).enumerate() {
        let at = create(&mut hubs[0], &format!("bench-{number}"), hosts.options)?;
        for (rank, line) in (0..).zip(&mut *workers) {
            line.say(&Order::Play { part: part.clone(), rank, at: at.clone() })?;
        }
        for report in reports(workers) {
            let Report::Joined = report? else { bail!("a worker answered out of turn") };
        }
    }

    let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}").expect("a valid template");
    let progress = ProgressBar::new(u64::from(*rounds) * parts.len() as u64).with_style(style);
    progress.set_message("turns");
    let mut measured: Measured = parts.iter().map(|_| Vec::new()).collect();
    for round in 0..*rounds {
        for system in order(round, parts.len()) {
            let workers = &mut systems[system];
            let turn = Order::Turn { turn: Turn::Exchange, start: usage::monotonic() + LEAD };
            workers.iter_mut().try_for_each(|line| line.say(&turn))?;
            for report in reports(workers) {
                let Report::Rested = report? else { bail!("a worker answered out of turn") };
            }
            workers.iter_mut().try_for_each(|line| line.say(&Order::Count))?;
            let played = reports(workers).map(|report| match report? {
                Report::Played(played) => Ok(played),
                other => bail!("a worker answered {other:?}"),
            });
            measured[system].push(played.collect::<anyhow::Result<_>>()?);
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    // The workers leave before the hubs end.
    systems.iter_mut().flatten().for_each(Line::hang_up);
    for line in systems.iter_mut().flatten() {
        // Nothing comes but the end.
        let _ = line.hear::<Report>();
    }
    Ok(measured)
}

/// Every worker's next report, by rank.
fn reports(workers: &mut [Line]) -> impl Iterator<Item = anyhow::Result<Report>> {
    workers.iter_mut().enumerate().map(|(rank, line)| hear(&format!("worker {rank}"), line))
}
