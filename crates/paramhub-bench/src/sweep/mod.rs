//! `paramhub bench sweep`: exchanges over chunk sizes, streams, cores or workers.

mod axis;
mod report;

use std::path::PathBuf;

use clap::{Args, value_parser};
use paramhub_harness::ExitCode;
use paramhub_harness::exchange::check_destination;
use paramhub_harness::exchange::driver::Program;
use paramhub_harness::exchange::hosts::Hosts;
use paramhub_harness::exchange::processes::{Run, interrupted, run};
use paramhub_harness::exchange::report::write_json;
use paramhub_harness::exchange::{ExchangeFlags, check_memory};
use paramhub_harness::launch::Signals;

use super::rounds::order;
use axis::Axis;
use report::{Sweep, SweepPoint};

/// Exchange over chunk sizes, streams, cores or workers
///
/// Every round measures every point, each with fresh processes; every other round goes through the points backwards, so
/// that no point always follows the same one. A round's time is the median of its iterations, a point's the median of its
/// rounds. Every number of every exchange that is checked must be right, as in `bench exchange`.
#[derive(Args)]
#[command(mut_arg("iters", |iters| iters.default_value("5").help("Iterations of a point and round that count")))]
#[command(mut_arg("warmup", |warmup| warmup.default_value("1")))]
pub struct SweepFlags {
    /// What differs from point to point
    #[arg(value_enum)]
    over: Axis,
    /// Points to measure, as in 4K,32K,1M or 1,2,4
    ///
    /// Without it: chunks of 4K to 4M; 1, 2, 4 and 8 streams; cores by doublings up to this machine's processors; 1, 2, 4
    /// and 8 workers.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    points: Option<Vec<String>>,
    /// How often every point is measured
    #[arg(long, value_name = "R", default_value_t = 5, value_parser = value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Draw the results, with `--raw` the bound beside them
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    exchange: ExchangeFlags,
}

pub(super) fn sweep(flags: &SweepFlags) -> anyhow::Result<ExitCode> {
    let signals = Signals::catch()?;
    check_destination("--json", flags.exchange.json.as_deref())?;
    check_destination("--svg", flags.svg.as_deref())?;
    let mut points = Vec::new();
    for value in flags.over.points(flags.points.as_deref())? {
        let flags = flags.over.at(value, &flags.exchange);
        let (_, spec) = flags.spec()?;
        check_memory(&spec, 1)?;
        points.push(SweepPoint::new(value, flags.settings(&spec), spec));
    }
    let mut sweep = Sweep::new(flags.over, flags.rounds, &flags.exchange, points)?;
    println!("{}", sweep.headline());
    for round in 0..flags.rounds {
        for number in order(round, sweep.points.len()) {
            let program = program(flags, round, &sweep.points[number]);
            match run(&program, &signals)? {
                Run::Measured(measured) => sweep.points[number].add(&measured),
                Run::Interrupted(signal) => return Ok(interrupted(signal)),
            }
        }
    }
    println!("{}", sweep.table());
    if let Some(path) = &flags.exchange.json {
        write_json(&sweep.results(), path)?;
    }
    if let Some(path) = &flags.svg {
        sweep.plot().write(path)?;
    }
    sweep.verdict().require_right()?;
    Ok(ExitCode::SUCCESS)
}

fn program(flags: &SweepFlags, round: u32, point: &SweepPoint) -> Program {
    let (rounds, axis) = (flags.rounds, flags.over);
    Program {
        spec: point.spec.clone(),
        hosts: Hosts::here(),
        warmup: flags.exchange.warmup,
        iterations: flags.exchange.iters,
        label: format!("round {} of {rounds}, {} {}", round + 1, axis.name(), axis.text(point.value)),
    }
}
