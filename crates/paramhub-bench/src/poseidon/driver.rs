//! The launcher's side: the systems take turns.

use std::os::unix::net::UnixListener;
use std::sync::atomic::AtomicBool;

use anyhow::bail;
use indicatif::{ProgressBar, ProgressStyle};
use paramhub_harness::exchange::driver::{LEAD, accept, create, open, receive};
use paramhub_harness::exchange::hosts::Hosts;
use paramhub_harness::exchange::messages::{JsonConnection, LauncherCommand};
use paramhub_harness::exchange::usage;

use super::SCENARIO;
use super::worker::{SimulationCommand, SimulationReport, TurnMeasurement, WorkerSpec};
use crate::rounds::order;

/// The measurements to make.
pub(super) struct Program {
    /// The specification of each system's workers.
    pub(super) worker_specs: Vec<WorkerSpec>,
    pub(super) hosts: Hosts,
    pub(super) rounds: u32,
}

/// The results: for each system every turn, and for each turn every worker.
pub(super) type Measured = Vec<Vec<Vec<TurnMeasurement>>>;

/// Runs the program with the processes that connect to the listener; `is_over` is set when no more will.
pub(super) fn drive(
    program: &Program,
    listener: &UnixListener,
    is_over: &AtomicBool,
) -> anyhow::Result<Measured> {
    let Program { worker_specs, hosts, rounds } = program;
    let spec = &worker_specs[0].spec;
    let count = worker_specs.len() * spec.workers as usize;
    let mut connections = accept(listener, count + hosts.hubs().len(), is_over)?;
    let mut hubs = connections.split_off(count);
    open(spec, hosts, count, &mut hubs)?;
    // Neighbours are ranks of different systems, so that each system is spread over all hosts.
    let mut systems: Vec<Vec<JsonConnection>> = worker_specs.iter().map(|_| Vec::new()).collect();
    for (process, connection) in connections.into_iter().enumerate() {
        systems[process % worker_specs.len()].push(connection);
    }
    for (number, (worker_spec, workers)) in worker_specs.iter().zip(&mut systems).enumerate() {
        let at = create(&mut hubs[0], &format!("bench-{number}"), hosts.options)?;
        for (rank, connection) in (0..).zip(&mut *workers) {
            let command =
                SimulationCommand::Join { spec: Box::new(worker_spec.clone()), rank, at: at.clone() };
            connection.send(&LauncherCommand::scenario(SCENARIO, &command)?)?;
        }
        for report in reports(workers) {
            let SimulationReport::Joined = report? else { bail!("a worker answered out of turn") };
        }
    }

    let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}").expect("a valid template");
    let progress = ProgressBar::new(u64::from(*rounds) * worker_specs.len() as u64).with_style(style);
    progress.set_message("turns");
    let mut measured: Measured = worker_specs.iter().map(|_| Vec::new()).collect();
    for round in 0..*rounds {
        for system in order(round, worker_specs.len()) {
            let workers = &mut systems[system];
            let turn = SimulationCommand::Turn { start: usage::monotonic() + LEAD };
            workers.iter_mut().try_for_each(|connection| connection.send(&turn))?;
            for report in reports(workers) {
                let SimulationReport::TurnEnded = report? else { bail!("a worker answered out of turn") };
            }
            workers.iter_mut().try_for_each(|connection| connection.send(&SimulationCommand::Measure))?;
            let played = reports(workers).map(|report| match report? {
                SimulationReport::Measured(measured) => Ok(measured),
                other => bail!("a worker answered {other:?}"),
            });
            measured[system].push(played.collect::<anyhow::Result<_>>()?);
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    // The workers leave before the hubs end.
    systems.iter_mut().flatten().for_each(JsonConnection::close_write);
    for connection in systems.iter_mut().flatten() {
        // The process sends nothing more and hangs up.
        let _ = connection.receive::<SimulationReport>();
    }
    Ok(measured)
}

/// Every worker's next report, by rank.
fn reports(workers: &mut [JsonConnection]) -> impl Iterator<Item = anyhow::Result<SimulationReport>> {
    workers.iter_mut().enumerate().map(|(rank, connection)| receive(&format!("worker {rank}"), connection))
}
