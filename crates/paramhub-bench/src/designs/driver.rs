//! The launcher's side: scenarios take turns.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use indicatif::{ProgressBar, ProgressStyle};
use paramhub_harness::exchange::driver::{accept, create, open};
use paramhub_harness::exchange::hosts::{Hosts, Site};
use paramhub_harness::exchange::messages::{JsonConnection, ProcessReport};
use paramhub_harness::exchange::numbers::Verdict;
use paramhub_harness::exchange::processes::{NamedCommand, add_process_arguments};
use paramhub_harness::exchange::spec::Spec;

use super::messages::{IsolatedTimes, RankSpec, ScenarioReply, TrainingTimes, TurnTimes};
use super::mpi;
use super::scenario::{Design, KeyOrder};
use super::scenario_ranks::ScenarioRanks;
use super::timeline::Timeline;
use crate::rounds::{median, order};

/// Turns of collectives alone, from which the length of the computation is derived.
const TRIALS: usize = 5;

/// The measurements with one number of ranks.
pub(super) struct Program {
    /// The specification of each scenario.
    pub(super) rank_specs: Vec<RankSpec>,
    pub(super) orders: Vec<KeyOrder>,
    /// The specification that hubs need.
    pub(super) spec: Spec,
    pub(super) hosts: Hosts,
    /// The place where `mpirun` starts ranks.
    pub(super) sites: Vec<Site>,
    pub(super) rounds: u32,
    pub(super) pace: Pace,
}

/// The time that layers compute.
#[derive(Clone, Copy)]
pub(super) enum Pace {
    /// This many times the time in their workload.
    Times(f64),
    /// A time of which the first scenario's collectives, alone, take this share. The workload's own time is
    /// `seconds`.
    Share { share: f64, seconds: f64 },
}

/// The results.
pub(super) struct Measured {
    /// The factor by which the workload's times were multiplied.
    pub(super) stretch: f64,
    pub(super) rows: Vec<Row>,
    pub(super) verdict: Verdict,
}

/// The results of a scenario in one order of keys.
pub(super) struct Row {
    /// The scenario's number.
    pub(super) scenario: usize,
    pub(super) order: KeyOrder,
    /// The mean of all ranks in every round.
    pub(super) alone: Vec<IsolatedTimes>,
    /// The turns of every rank in every round.
    pub(super) turns: Vec<Vec<TurnTimes>>,
    /// Every rank's timeline, if they were asked for.
    pub(super) timelines: Vec<Timeline>,
}

impl Program {
    /// The commands that start all processes: ranks without `mpirun` one by one, then the hubs, then one
    /// `mpirun` for each other scenario.
    pub(super) fn commands(&self, socket: &Path) -> anyhow::Result<Vec<NamedCommand>> {
        let workers = self.own().len() * self.spec.workers as usize;
        let mut commands = Vec::new();
        for process in 0..workers + self.hosts.hubs().len() {
            let mut command = self.hosts.command(process, workers)?;
            add_process_arguments(&mut command, socket, process);
            let name = match process < workers {
                true => {
                    let (rank, number) = (process / self.own().len(), process % self.own().len());
                    let host = self.hosts.name(process, workers);
                    format!("{} of {}, {host}", rank, self.rank_specs[self.own()[number]].scenario.label())
                }
                false => self.hosts.name(process, workers),
            };
            commands.push(NamedCommand { name, command });
        }
        let mut process = commands.len();
        for rank_spec in self.rank_specs.iter().filter(|rank_spec| rank_spec.scenario.is_by_mpi()) {
            commands.push(mpi::command(rank_spec, &self.sites, socket, process)?);
            process += rank_spec.ranks as usize;
        }
        Ok(commands)
    }

    /// The scenarios whose processes are started one by one.
    fn own(&self) -> Vec<usize> {
        (0..self.rank_specs.len()).filter(|&number| !self.rank_specs[number].scenario.is_by_mpi()).collect()
    }

    /// Has every process that connects to the listener enter its scenario.
    fn connect(&self, listener: &UnixListener, is_over: &AtomicBool) -> anyhow::Result<ScenarioProcesses> {
        let (own, ranks) = (self.own(), self.spec.workers as usize);
        let workers = own.len() * ranks;
        let mut connections =
            accept(listener, self.rank_specs.len() * ranks + self.hosts.hubs().len(), is_over)?;
        let mut by_mpi = connections.split_off(workers + self.hosts.hubs().len()).into_iter();
        let mut hubs = connections.split_off(workers);
        let url = open(&self.spec, &self.hosts, workers, &mut hubs)?;
        let mut scenarios: Vec<ScenarioRanks> =
            self.rank_specs.iter().map(|rank_spec| ScenarioRanks::new(rank_spec.scenario)).collect();
        for (process, connection) in connections.into_iter().enumerate() {
            scenarios[own[process % own.len()]].connections.push(connection);
        }
        for (scenario, rank_spec) in scenarios.iter_mut().zip(&self.rank_specs) {
            if rank_spec.scenario.is_by_mpi() {
                scenario.connections = by_mpi.by_ref().take(ranks).collect();
            }
            let job = match rank_spec.scenario.design {
                Design::Hub => Some(create(&mut hubs[0], "designs", self.hosts.options)?.job),
                _ => None,
            };
            scenario.enter(rank_spec, &url, job.as_ref())?;
        }
        Ok(ScenarioProcesses { scenarios, hubs })
    }

    /// Measures with the processes that connect to the listener; `is_over` is set when no more will.
    pub(super) fn play(&self, listener: &UnixListener, is_over: &AtomicBool) -> anyhow::Result<Measured> {
        let mut processes = self.connect(listener, is_over)?;
        let stretch = match self.pace {
            Pace::Times(stretch) => stretch,
            Pace::Share { share, seconds } => {
                let trials = (0..TRIALS).map(|_| Ok(processes.scenarios[0].alone()?.seconds()));
                let trials = trials.collect::<anyhow::Result<Vec<f64>>>()?;
                median(trials).unwrap_or(0.0) / (share * seconds)
            }
        };
        let numbers = 0..self.rank_specs.len();
        let mut rows: Vec<Row> = numbers
            .flat_map(|scenario| self.orders.iter().map(move |&order| Row::new(scenario, order)))
            .collect();
        let progress = progress(u64::from(self.rounds) * rows.len() as u64);
        for round in 0..self.rounds {
            for number in order(round, rows.len()) {
                let row = &mut rows[number];
                let scenario = &mut processes.scenarios[row.scenario];
                row.alone.push(scenario.alone()?);
                row.turns.push(scenario.turn(row.order, stretch, false)?);
                progress.inc(1);
            }
        }
        progress.finish_and_clear();
        let mut verdict = Verdict::default();
        for row in &mut rows {
            let scenario = &mut processes.scenarios[row.scenario];
            if self.rank_specs[row.scenario].is_traced {
                scenario.turn(row.order, stretch, true)?;
                row.timelines = scenario.show()?;
            }
            verdict = verdict.and(scenario.verify()?);
        }
        processes.shut_down();
        Ok(Measured { stretch, rows, verdict })
    }

    /// Trains each scenario once, in turns. Returns the times of every rank of each scenario.
    pub(super) fn train(
        &self,
        round: u32,
        listener: &UnixListener,
        is_over: &AtomicBool,
    ) -> anyhow::Result<Vec<Vec<TrainingTimes>>> {
        let mut processes = self.connect(listener, is_over)?;
        let mut trained: Vec<Vec<TrainingTimes>> = self.rank_specs.iter().map(|_| Vec::new()).collect();
        for number in order(round, self.rank_specs.len()) {
            trained[number] = processes.scenarios[number].train()?;
        }
        processes.shut_down();
        Ok(trained)
    }
}

/// The connections to all processes.
struct ScenarioProcesses {
    scenarios: Vec<ScenarioRanks>,
    hubs: Vec<JsonConnection>,
}

impl ScenarioProcesses {
    /// Lets the ranks leave before the hubs end.
    fn shut_down(mut self) {
        self.scenarios
            .iter_mut()
            .flat_map(|scenario| &mut scenario.connections)
            .for_each(JsonConnection::close_write);
        for connection in self.scenarios.iter_mut().flat_map(|scenario| &mut scenario.connections) {
            // The process sends nothing more and hangs up.
            let _ = connection.receive::<ScenarioReply>();
        }
        // The first hub has the manager of the others.
        for hub in self.hubs.iter_mut().rev() {
            hub.close_write();
            let _ = hub.receive::<ProcessReport>();
        }
    }
}

impl Row {
    fn new(scenario: usize, order: KeyOrder) -> Row {
        Row { scenario, order, alone: Vec::new(), turns: Vec::new(), timelines: Vec::new() }
    }
}

fn progress(turns: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}").expect("a valid template");
    let progress = ProgressBar::new(turns).with_style(style);
    progress.set_message("turns");
    progress
}
