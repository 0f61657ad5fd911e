//! `paramhub bench plot`: draws results that were written as JSON by a scenario's run on a testbed, by
//! `bench tenants`, by `bench designs` or by trainings.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use paramhub_harness::exchange::check_destination;
use paramhub_harness::exchange::statistics::{quantile, sorted};
use paramhub_harness::{ExitCode, Usage};
use serde::Deserialize;

use super::curves::{Curve, Training, curves};
use super::designs;
use super::plot::{Bar, Bars, Heading, Part};

/// Draw results that were written as JSON
///
/// What `cargo xtask testbed run --json` writes: each row's time by what a worker's own link takes for the model, which is the
/// limit of a worker that sends each gradient once and receives each parameter once, with the lowest and highest round. And what
/// `paramhub bench tenants --json` writes: each job's time beside its fair share. What `paramhub bench designs
/// --json` writes: epochs over numbers of ranks. And what one or several of `paramhub train --json` write: what they learnt epoch by
/// epoch, a line each.
#[derive(Args)]
pub struct PlotFlags {
    /// The results: one file, or those of several trainings
    #[arg(value_name = "JSON", required = true)]
    results: Vec<PathBuf>,
    /// Of trainings: the loss of the training set, or the share of the test set that is wrong, which --test-every measures
    #[arg(long, value_enum, default_value_t)]
    curve: Curve,
    /// Where to draw them
    #[arg(long, value_name = "FILE")]
    svg: PathBuf,
}

pub(super) fn redraw(flags: &PlotFlags) -> anyhow::Result<ExitCode> {
    check_destination("--svg", Some(&flags.svg))?;
    let mut trainings = Vec::new();
    for path in &flags.results {
        let nothing =
            || Usage(format!("{}: nothing was measured in it, so there is nothing to draw", path.display()));
        let bars = match read(path)? {
            Results::Training(training) => {
                trainings.push(training);
                continue;
            }
            Results::Scenario(scenario) => scenario.bars(),
            Results::Tenants(tenants) => Some(tenants.bars()),
            Results::Designs(summary) if flags.results.len() == 1 => {
                summary.groups().write(&flags.svg)?;
                return Ok(ExitCode::SUCCESS);
            }
            Results::Designs(_) => None,
        };
        if flags.results.len() > 1 {
            return Err(Usage(format!("{}: only trainings are drawn together", path.display())).into());
        }
        bars.ok_or_else(nothing)?.write(&flags.svg)?;
        return Ok(ExitCode::SUCCESS);
    }
    curves(&trainings, flags.curve)?.write(&flags.svg)?;
    Ok(ExitCode::SUCCESS)
}

fn read(path: &Path) -> anyhow::Result<Results> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {shown}"))?;
    let results = serde_json::from_str(&text);
    Ok(results.map_err(|_| {
        Usage(format!(
            "{shown} has no results of `testbed run --json`, `bench tenants --json`, `bench designs --json` or `train --json` in it"
        ))
    })?)
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Results {
    Training(Training),
    Scenario(Scenario),
    Tenants(Tenants),
    Designs(designs::Summary),
}

/// The JSON that bench/rack/run writes.
#[derive(Deserialize)]
struct Scenario {
    scenario: String,
    machine: String,
    model: String,
    /// Bytes of one worker's gradients.
    bytes: f64,
    iters: u32,
    /// For each round, the links of each kind, those of hosts first.
    probes: Vec<Vec<Probed>>,
    rows: Vec<Row>,
}

#[derive(Deserialize)]
struct Probed {
    /// Bytes a second, each way.
    payload: f64,
}

#[derive(Deserialize)]
struct Row {
    title: String,
    label: String,
    optimizer: String,
    /// The bytes that the row's busiest link must carry, in models, by the rate of a worker's link, if known.
    least: Option<f64>,
    /// The rounds; `None` for one that failed.
    rounds: Vec<Option<Round>>,
}

impl Row {
    /// The bound of the row, if it differs from the line.
    fn bound(&self) -> Option<f64> {
        self.least.filter(|&least| least != 1.0)
    }
}

#[derive(Deserialize)]
struct Round {
    seconds: f64,
}

const OURS: &str = "paramhub";

impl Scenario {
    /// The bars; `None` if no row has a round.
    fn bars(&self) -> Option<Bars> {
        let bars: Vec<Bar> = self.rows.iter().filter_map(|row| self.bar(row)).collect();
        let payloads = sorted(self.probes.iter().filter_map(|kinds| kinds.first()).map(|kind| kind.payload));
        if bars.is_empty() || payloads.is_empty() {
            return None;
        }
        let payload = quantile(&payloads, 0.5);
        let rounds = match self.probes.len() {
            1 => "one round".into(),
            rounds => format!("medians of {rounds} rounds, lowest and highest"),
        };
        let notes = vec![
            format!(
                "{}, {:.1} MB of f32; {rounds}, of {} iterations; links carried {:.0} Mbit/s of payload each way, which takes {:.3} s",
                self.model,
                self.bytes / 1e6,
                self.iters,
                8e-6 * payload,
                self.bytes / payload
            ),
            self.machine.clone(),
        ];
        Some(Bars {
            heading: Heading { title: self.scenario.clone(), notes },
            x_label: "time of an exchange by that of the model on a worker's link".into(),
            parts: vec![],
            line: Some((1.0, "the limit of a worker's link".into())),
            marks: self
                .rows
                .iter()
                .any(|row| row.bound().is_some())
                .then(|| "what the row's busiest link needs".into()),
            bars,
        })
    }

    fn bar(&self, row: &Row) -> Option<Bar> {
        let measured = || {
            row.rounds
                .iter()
                .zip(&self.probes)
                .filter_map(|(round, probed)| Some((round.as_ref()?, probed.first()?)))
        };
        let by_limit = sorted(measured().map(|(round, link)| round.seconds * link.payload / self.bytes));
        let seconds = sorted(measured().map(|(round, _)| round.seconds));
        let (&low, &high) = (by_limit.first()?, by_limit.last()?);
        let length = quantile(&by_limit, 0.5);
        let label = row.label.strip_suffix(&format!(", {}", row.optimizer)).unwrap_or(&row.label);
        let is_ours = row.title == OURS;
        Some(Bar {
            name: if is_ours { label.to_owned() } else { format!("{}, {label}", row.title) },
            parts: vec![Part { length, colour: if is_ours { 0 } else { 1 }, text: String::new() }],
            range: (by_limit.len() > 1).then_some((low, high)),
            mark: row.bound(),
            note: format!("{length:.2} ×, {:.3} s", quantile(&seconds, 0.5)),
        })
    }
}

/// The JSON that `bench tenants` writes.
#[derive(Deserialize)]
struct Tenants {
    model: String,
    workers: u32,
    transport: String,
    bytes_per_worker: f64,
    fair_seconds: f64,
    job_seconds: Vec<f64>,
    /// The lost share of the throughput of a fair share.
    lost: f64,
}

impl Tenants {
    fn bars(&self) -> Bars {
        let jobs = self.job_seconds.len();
        let bar = |(job, seconds): (usize, &f64)| {
            let length = 1e3 * seconds;
            Bar {
                name: format!("job {job}"),
                parts: vec![Part { length, colour: 0, text: String::new() }],
                range: None,
                mark: None,
                note: format!("{length:.1} ms"),
            }
        };
        let lost = match self.lost {
            lost if lost < 0.0 => format!("{:.1} % gained", -100.0 * lost),
            lost => format!("{:.1} % lost", 100.0 * lost),
        };
        Bars {
            heading: Heading {
                title: format!("{jobs} jobs at once on one hub"),
                notes: vec![format!(
                    "{}, {:.1} MB of f32, {} workers each, {}; medians of each job; {lost} by the last against its fair share",
                    self.model,
                    self.bytes_per_worker / 1e6,
                    self.workers,
                    self.transport
                )],
            },
            x_label: "milliseconds an exchange, while all exchange".into(),
            parts: vec![],
            line: Some((
                1e3 * self.fair_seconds,
                format!("a fair share: {jobs} times what one job alone takes"),
            )),
            marks: None,
            bars: self.job_seconds.iter().enumerate().map(bar).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_set_against_the_link_as_it_was_probed_in_its_round() {
        let results = r#"{"scenario": "s", "machine": "m", "model": "small", "bytes": 100, "iters": 3,
            "probes": [[{"payload": 100.0}], [{"payload": 50.0}], [{"payload": 200.0}]],
            "rows": [
                {"title": "paramhub", "label": "ours, mean", "optimizer": "mean", "least": 2.0,
                    "rounds": [{"seconds": 2.0}, {"seconds": 8.0}, null]},
                {"title": "gloo", "label": "buckets", "optimizer": "mean", "rounds": [null, null, {"seconds": 1.5}]},
                {"title": "gloo", "label": "never ran", "optimizer": "mean", "rounds": [null, null, null]}
            ]}"#;
        let Results::Scenario(scenario) = serde_json::from_str(results).unwrap() else { panic!("it is one") };
        let bars = scenario.bars().unwrap();
        let names: Vec<&str> = bars.bars.iter().map(|bar| bar.name.as_str()).collect();
        assert_eq!(names, ["ours", "gloo, buckets"]);
        let [ours, gloo] = &bars.bars[..] else { panic!("two rows were measured") };
        assert_eq!((ours.parts[0].length, ours.range, ours.mark), (3.0, Some((2.0, 4.0)), Some(2.0)));
        assert_eq!((gloo.parts[0].length, gloo.range, gloo.mark), (3.0, None, None));
        assert!(bars.marks.is_some());
        assert!(serde_json::from_str::<Results>(r#"{"scenario": "s"}"#).is_err());
    }
}
