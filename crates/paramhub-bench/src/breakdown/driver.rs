//! The launcher's side of a breakdown's processes.

use std::os::unix::net::UnixListener;
use std::sync::atomic::AtomicBool;

use anyhow::bail;
use paramhub_harness::exchange::driver::{BenchProcesses, LEAD, accept, ask};
use paramhub_harness::exchange::messages::{JobEndpoints, LauncherCommand};
use paramhub_harness::exchange::usage;

use super::SCENARIO;
use super::peer::{TrainingCommand, TrainingMeasurement, TrainingReport, TrainingTask};
use super::stage::BreakdownStage;

/// Runs one stage with the processes that connect to the listener. Returns the measurements of each worker.
pub(super) fn drive(
    task: &TrainingTask,
    listener: &UnixListener,
    is_over: &AtomicBool,
) -> anyhow::Result<Vec<TrainingMeasurement>> {
    let mut connections = accept(listener, task.train.workers() as usize + 1, is_over)?;
    let mut hub = connections.pop().expect("one more than workers");
    let at: Option<JobEndpoints> = match task.stage {
        // This stage needs no hub.
        BreakdownStage::Compute => None,
        _ => {
            let command = TrainingCommand::Host { task: task.clone() };
            match ask("the hub", &mut hub, &LauncherCommand::scenario(SCENARIO, &command)?)? {
                TrainingReport::Hosting(at) => Some(at),
                other => bail!("the hub answered {other:?}"),
            }
        }
    };
    let mut processes = BenchProcesses { workers: connections, hubs: vec![hub] };
    for (rank, connection) in (0..).zip(&mut processes.workers) {
        let command = TrainingCommand::Join { task: task.clone(), rank, at: at.clone() };
        connection.send(&LauncherCommand::scenario(SCENARIO, &command)?)?;
    }
    for report in processes.reports() {
        let TrainingReport::Joined = report? else { bail!("a worker answered out of turn") };
    }
    processes.order_workers(&TrainingCommand::Train { start: usage::monotonic() + LEAD })?;
    let mut measurement = Vec::new();
    for report in processes.reports() {
        let TrainingReport::Trained(of_one) = report? else { bail!("a worker answered out of turn") };
        measurement.push(of_one);
    }
    processes.shut_down();
    Ok(measurement)
}
