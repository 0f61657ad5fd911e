//! Real trainings, compared.

use comfy_table::{Table, presets};
use indicatif::ProgressBar;
use paramhub_core::key::KeyTable;
use paramhub_harness::ExitCode;
use paramhub_harness::exchange::processes::{Run, interrupted, launch_all};
use paramhub_harness::exchange::report::{milliseconds, write_json};
use paramhub_harness::exchange::statistics::{mean, quantile, sorted};
use paramhub_harness::launch::Signals;
use paramhub_train::net::{NetKind, Network};
use serde::Serialize;

use super::DesignsCommand;
use super::driver::{Pace, Program};
use super::messages::{TrainingTimes, Work};
use super::scenario::{Carrier, Design, Scenario};
use crate::rounds::median;
use crate::training::TrainSection;
use crate::training::rehearse;

/// Written with `--json`. Seconds are those of an epoch.
#[derive(Serialize)]
struct Results {
    net: String,
    data: String,
    batch: u32,
    epochs: u32,
    rounds: u32,
    ranks: Vec<RanksResults>,
    version: &'static str,
}

#[derive(Serialize)]
struct RanksResults {
    ranks: u32,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    design: Design,
    over: Option<Carrier>,
    /// Seconds of the slowest rank, in the median of the rounds.
    seconds: f64,
    lowest: f64,
    highest: f64,
    computing: f64,
    hidden_share: f64,
    /// Funnel's time by this one's, with the same carrier and order, in the median of the rounds.
    against_funnel: Option<f64>,
    /// The loss of rank 0 in its last epoch, in the last round.
    loss: f64,
}

/// Trains all scenarios in every round, with new processes.
pub(super) fn compare(
    command: &DesignsCommand,
    net: NetKind,
    scenarios: &[Scenario],
    signals: &Signals,
) -> anyhow::Result<ExitCode> {
    let mut all = Vec::new();
    for &ranks in &command.ranks {
        let section = TrainSection {
            net,
            data: command.data.clone(),
            workers: Some(ranks),
            epochs: command.epochs as usize,
            batch: command.batch as usize,
            cores: command.cores.into(),
            ..TrainSection::default()
        };
        rehearse(&section)?;
        let network = Network::new(net, section.data.load()?.train.geometry(), section.seed)?;
        let program = Program {
            rank_specs: command.rank_specs(scenarios, ranks, &Work::Train(Box::new(section))),
            orders: Vec::new(),
            spec: command.spec(KeyTable::new(network.keys().to_vec())?, ranks),
            hosts: command.hosts(scenarios, ranks)?,
            sites: command.hosts.first(ranks).sites(ranks),
            rounds: command.rounds,
            pace: Pace::Times(1.0),
        };
        let progress = ProgressBar::new(command.rounds.into());
        let mut rounds: Vec<Vec<Vec<TrainingTimes>>> = Vec::new();
        for round in 0..command.rounds {
            let run = launch_all(
                |socket| program.commands(socket),
                signals,
                |listener, is_over| program.train(round, listener, is_over),
            )?;
            match run {
                Run::Measured(trained) => rounds.push(trained),
                Run::Interrupted(signal) => return Ok(interrupted(signal)),
            }
            progress.inc(1);
        }
        progress.finish_and_clear();
        let of_ranks = RanksResults::new(ranks, scenarios, &rounds);
        println!(
            "{ranks} ranks train {net} with {} examples each a step\n{}",
            command.batch,
            of_ranks.table()
        );
        all.push(of_ranks);
    }
    let results = Results {
        net: net.to_string(),
        data: command.data.to_string(),
        batch: command.batch,
        epochs: command.epochs,
        rounds: command.rounds,
        ranks: all,
        version: env!("CARGO_PKG_VERSION"),
    };
    if let Some(path) = &command.json {
        write_json(&results, path)?;
    }
    Ok(ExitCode::SUCCESS)
}

impl RanksResults {
    fn new(ranks: u32, scenarios: &[Scenario], rounds: &[Vec<Vec<TrainingTimes>>]) -> RanksResults {
        let slowest = |round: &[Vec<TrainingTimes>], number: usize| {
            round[number].iter().map(|rank| rank.seconds).fold(0.0, f64::max)
        };
        let rows = scenarios.iter().enumerate().map(|(number, scenario)| {
            let seconds = sorted(rounds.iter().map(|round| slowest(round, number)));
            let of_ranks = |value: fn(&TrainingTimes) -> f64| {
                mean(rounds.iter().flat_map(|round| &round[number]).map(value))
            };
            let funnel = scenarios
                .iter()
                .position(|other| other.design == Design::Funnel && other.over == scenario.over);
            Row {
                design: scenario.design,
                over: scenario.over,
                seconds: quantile(&seconds, 0.5),
                lowest: seconds[0],
                highest: seconds[seconds.len() - 1],
                computing: of_ranks(|rank| rank.computing),
                hidden_share: of_ranks(|rank| rank.hidden_share),
                against_funnel: funnel.and_then(|funnel| {
                    median(rounds.iter().map(|round| slowest(round, funnel) / slowest(round, number)))
                }),
                loss: rounds.last().map_or(0.0, |round| round[number][0].loss),
            }
        });
        RanksResults { ranks, rows: rows.collect() }
    }

    fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY);
        table.set_header(["", "epoch", "lowest", "highest", "computing", "hidden", "x funnel", "loss"]);
        for row in &self.rows {
            table.add_row([
                Scenario { design: row.design, over: row.over }.label(),
                milliseconds(row.seconds),
                milliseconds(row.lowest),
                milliseconds(row.highest),
                milliseconds(row.computing),
                format!("{:.0} %", 100.0 * row.hidden_share),
                row.against_funnel.map(|ratio| format!("{ratio:.2}")).unwrap_or_default(),
                format!("{:.4}", row.loss),
            ]);
        }
        table.to_string()
    }
}
