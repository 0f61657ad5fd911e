//! A simulator of paramhub: jobs, hubs and workers in one thread, with virtual time and a network that fails.
//!
//! The state machines are those of the product: [`exchange`](paramhub_core::exchange),
//! [`job_control`](paramhub_core::job_control), [`stream_admission`](paramhub_core::stream_admission),
//! [`requests`](paramhub_core::requests), [`worker_job`](paramhub_core::worker_job),
//! [`resuming`](paramhub_core::resuming) and [`liveness`](paramhub_core::liveness). `hub` and `worker` do around them what
//! threads and sockets do in the product. In place of its numbers, a gradient has its rank and step, so that a sum
//! tells who is in it.
//!
//! A [`Scenario`] follows from a seed. [`run`] plays it and checks in the `ledger` that each contribution counts once,
//! that versions grow by one, and that workers receive what hubs have made; and at the end, that a job has gone
//! through if nothing has died, and is over everywhere within a bound otherwise. [`shrunk`] finds the faults without
//! which a run would not fail. The connection manager and jobs of several sites are not simulated yet.
#![forbid(unsafe_code)]

mod agenda;
mod hub;
mod job;
mod ledger;
mod message;
mod network;
mod random;
mod scenario;
mod worker;
mod world;

use std::ops::Range;

pub use network::Process;
pub use scenario::{Fault, Scenario};
pub use world::{Plant, Summary, run};

/// What has come of many seeds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Explored {
    /// Jobs of which every worker has done all steps.
    pub finished: u64,
    /// Steps that all workers have done.
    pub steps: u64,
    /// Streams that were broken by faults.
    pub broken_streams: u64,
}

/// Runs the scenarios of these seeds.
///
/// # Errors
/// The first that fails, made small: how it fails, and everything that happens in it.
pub fn explore(seeds: Range<u64>) -> Result<Explored, String> {
    let mut explored = Explored::default();
    for seed in seeds {
        let scenario = Scenario::new(seed);
        let Ok(summary) = run(&scenario) else {
            let (smallest, failure) = shrunk(&scenario);
            // What is printed shows the way to the failure.
            let _ = run(&Scenario { is_traced: true, ..smallest.clone() });
            return Err(format!("seed {seed}: {failure}\n{smallest:#?}"));
        };
        explored.finished += u64::from(summary.has_finished);
        explored.steps += summary.steps;
        explored.broken_streams += summary.broken as u64;
    }
    Ok(explored)
}

/// Leaves out faults as long as the scenario fails without them. Returns what is left, and how it fails.
///
/// # Panics
/// If the scenario does not fail.
pub fn shrunk(scenario: &Scenario) -> (Scenario, String) {
    let mut smallest = scenario.clone();
    let mut failure = run(scenario).expect_err("only a scenario that fails is made smaller");
    let mut number = 0;
    while number < smallest.faults.len() {
        let mut smaller = smallest.clone();
        smaller.faults.remove(number);
        match run(&smaller) {
            Err(other) => (smallest, failure) = (smaller, other),
            Ok(_) => number += 1,
        }
    }
    (smallest, failure)
}
