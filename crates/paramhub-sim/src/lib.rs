//! A simulator of paramhub: a job, its connection manager, hubs and workers in one thread, with virtual time and a
//! network that fails.
//!
//! The state machines are those of the product: [`exchange`](paramhub_core::exchange),
//! [`job_control`](paramhub_core::job_control), [`membership`](paramhub_core::membership),
//! [`between_sites`](paramhub_core::between_sites), [`stream_admission`](paramhub_core::stream_admission),
//! [`requests`](paramhub_core::requests), [`worker_job`](paramhub_core::worker_job), [`resuming`](paramhub_core::resuming) and
//! [`liveness`](paramhub_core::liveness). `manager`, `hub`, `member` and `worker` do around them what threads, sockets and
//! the store do in the product. In place of its numbers, a gradient has its rank and step, so that a sum tells who is in
//! it.
//!
//! A [`Scenario`] follows from a seed. [`run`] plays it and checks in the `ledger` that each contribution counts once,
//! that versions grow by one, or go back to one step from which all ranks go on, that workers receive what hubs have made,
//! and that what the manager has told survives it; and in the `verdict`, that a job has gone through if nobody has died but
//! the manager, or workers that it outlives and that are replaced; that it is over everywhere within a bound otherwise; and
//! that the manager has recorded what has happened. [`shrunk`] finds the faults without which a run would not fail.
//! In a job of several sites, hubs open streams to one another, and the `ledger` checks that all sites make the same
//! versions of the same sums. Where chunks have standbys, it checks that a hub that takes over has all that workers were
//! answered, and that the hub before it answers with nothing newer. Launchers and several jobs are not simulated yet.
#![forbid(unsafe_code)]

mod agenda;
mod call;
mod hub;
mod job;
mod ledger;
mod manager;
mod member;
mod message;
mod network;
mod plant;
mod random;
mod scenario;
mod verdict;
mod worker;
mod world;

use std::ops::Range;

pub use network::Process;
pub use scenario::{Fault, Learns, Scenario};
pub use world::{Plant, Summary, run};

/// What has come of many seeds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Explored {
    /// Jobs that have finished.
    pub finished: u64,
    /// Jobs that had to finish although something failed.
    pub had_to_finish: u64,
    /// Those of them whose manager was away.
    pub without_manager: u64,
    /// Those whose workers died and were replaced while the job went on.
    pub without_workers: u64,
    /// How often all ranks of jobs have gone back to an earlier step and gone on from there.
    pub rewinds: u64,
    /// How often they have begun anew instead, because parameters to start from were missing.
    pub begun_anew: u64,
    /// Steps that all workers have done.
    pub steps: u64,
    /// Jobs that went through with all their workers although streams of theirs were cut.
    pub cut: u64,
    /// Jobs of several sites that have finished.
    pub with_sites: u64,
    /// Those of them that had to although streams between their hubs were cut.
    pub sites_cut: u64,
    /// Jobs with standbys that have finished.
    pub with_standbys: u64,
    /// Those of them that had to although a hub was killed.
    pub without_hubs: u64,
    /// How often hubs that have joined running jobs had all chunks of a share as its standby.
    pub new_standbys: u64,
    /// How often a hub that served a share became the standby of a further one.
    pub further_standbys: u64,
    /// How many such hubs have taken over.
    pub took_over_later: u64,
    /// Jobs that had to finish although hubs were killed twice or more, each time after the standbys were complete again.
    pub without_several_hubs: u64,
    /// How often a job has left a hub that was drained, for its standby.
    pub left_drained: u64,
    /// Streams that were broken by faults.
    pub broken_streams: u64,
    /// Restarts of managers.
    pub restarts: u64,
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
        let had_to_finish = summary.had_to_finish && !scenario.faults.is_empty();
        explored.had_to_finish += u64::from(had_to_finish);
        explored.without_manager += u64::from(had_to_finish && summary.restarts > 0);
        let is_replacement = |&(_, fault): &(_, Fault)| matches!(fault, Fault::Replace(..));
        let outlives_workers = scenario.outlives_workers() && scenario.faults.iter().any(is_replacement);
        explored.without_workers += u64::from(had_to_finish && outlives_workers);
        let has_cuts = scenario.faults.iter().any(|(_, fault)| matches!(fault, Fault::Cut { .. }));
        explored.cut += u64::from(summary.had_to_keep_all && has_cuts);
        let has_sites = scenario.racks.is_some();
        explored.with_sites += u64::from(summary.has_finished && has_sites);
        let is_between_hubs = |(_, fault): &(_, Fault)| {
            matches!(
                fault,
                Fault::Cut { neighbour: Process::Hub(_), .. }
                    | Fault::Break(Process::Hub(_), Process::Hub(_))
            )
        };
        let are_hubs_cut = scenario.faults.iter().any(is_between_hubs);
        explored.sites_cut += u64::from(summary.had_to_keep_all && has_sites && are_hubs_cut);
        explored.with_standbys += u64::from(summary.has_finished && scenario.replicas);
        let is_hub_killed = |&(_, fault): &(_, Fault)| fault.kills_hub();
        let loses_hub = scenario.replicas && scenario.faults.iter().any(is_hub_killed);
        explored.without_hubs += u64::from(had_to_finish && loses_hub);
        explored.new_standbys += summary.new_standbys as u64;
        explored.further_standbys += summary.further_standbys as u64;
        explored.took_over_later += summary.took_over_later as u64;
        explored.left_drained += summary.left_drained as u64;
        let loses_several = scenario.replicas && summary.hub_losses > 1;
        explored.without_several_hubs += u64::from(had_to_finish && loses_several);
        explored.rewinds += summary.rewinds as u64;
        explored.begun_anew += summary.begun_anew as u64;
        explored.steps += summary.steps;
        explored.broken_streams += summary.broken as u64;
        explored.restarts += u64::from(summary.restarts);
    }
    Ok(explored)
}

/// Leaves out late and lost messages and faults as long as the scenario fails without them. Returns what is left, and how
/// it fails.
///
/// # Panics
/// If the scenario does not fail.
pub fn shrunk(scenario: &Scenario) -> (Scenario, String) {
    let mut smallest = scenario.clone();
    let mut failure = run(scenario).expect_err("only a scenario that fails is made smaller");
    let mut fails = |smaller: Scenario| match run(&smaller) {
        Err(other) => {
            (smallest, failure) = (smaller, other);
            true
        }
        Ok(_) => false,
    };
    let quiet = Scenario { late_hellos: 0, lost_answers: 0, ..scenario.clone() };
    let mut smaller = if fails(quiet.clone()) { quiet } else { scenario.clone() };
    let mut number = 0;
    while number < smaller.faults.len() {
        let mut without = smaller.clone();
        without.faults.remove(number);
        match fails(without.clone()) {
            true => smaller = without,
            false => number += 1,
        }
    }
    (smallest, failure)
}
