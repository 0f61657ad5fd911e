//! The results of a sweep, as a table, as JSON and as a plot.

use comfy_table::{CellAlignment, Table, presets};
use paramhub_harness::exchange::driver::Measured;
use paramhub_harness::exchange::numbers::Verdict;
use paramhub_harness::exchange::report::milliseconds;
use paramhub_harness::exchange::spec::Spec;
use paramhub_harness::exchange::spec::Transport;
use paramhub_harness::exchange::statistics::{mean, quantile, sorted};
use paramhub_harness::exchange::{ExchangeFlags, Settings, place};
use serde::Serialize;

use super::axis::{Axis, Value};
use crate::plot::{Heading, Lines, Point, Series};
use crate::rounds::{Round, median};

/// All points of a sweep.
pub(super) struct Sweep {
    axis: Axis,
    rounds: u32,
    model: String,
    transport: Transport,
    setup: String,
    pub(super) points: Vec<SweepPoint>,
}

/// One point and its rounds.
pub(super) struct SweepPoint {
    pub(super) value: Value,
    pub(super) spec: Spec,
    settings: Settings,
    rounds: Vec<Round>,
    verdict: Verdict,
}

/// Written with `--json`. Seconds and bytes are those of one exchange; what was not measured is null.
#[derive(Serialize)]
pub(super) struct Results<'a> {
    sweep: Axis,
    model: &'a str,
    transport: Transport,
    rounds: u32,
    points: Vec<PointResults<'a>>,
    version: &'static str,
}

#[derive(Serialize)]
struct PointResults<'a> {
    value: Value,
    workers: u32,
    /// Bytes of gradients one way. As many bytes of parameters come back.
    bytes_per_worker: u64,
    /// The median of the rounds' medians.
    seconds_median: f64,
    /// Each round's median.
    seconds: Vec<f64>,
    exchanges_per_second: f64,
    /// GB/s of all workers' gradients together.
    gradients: f64,
    raw_seconds_median: Option<f64>,
    raw_seconds: Option<Vec<f64>>,
    /// The median of the rounds' ratios; 1 would be as fast as bare streams.
    raw_ratio: Option<f64>,
    cpu_seconds_worker: f64,
    cpu_seconds_hub: f64,
    max_abs_error: f64,
    settings: &'a Settings,
}

impl SweepPoint {
    pub(super) fn new(value: Value, settings: Settings, spec: Spec) -> SweepPoint {
        SweepPoint { value, spec, settings, rounds: Vec::new(), verdict: Verdict::default() }
    }

    /// Adds a round.
    pub(super) fn add(&mut self, measured: &Measured) {
        self.rounds.push(Round::of(measured));
        self.verdict = self.verdict.and(measured.verdict);
    }

    fn over_rounds(&self, value: impl Fn(&Round) -> Option<f64>) -> Option<f64> {
        median(self.rounds.iter().filter_map(value))
    }

    fn seconds(&self) -> f64 {
        self.over_rounds(|round| Some(round.seconds)).expect("at least one round")
    }

    fn raw_seconds(&self) -> Option<f64> {
        self.over_rounds(|round| round.raw_seconds)
    }

    fn raw_ratio(&self) -> Option<f64> {
        self.over_rounds(|round| Some(round.raw_seconds? / round.seconds))
    }

    /// GB/s of all workers' gradients in an exchange of this time.
    fn gradients(&self, seconds: f64) -> f64 {
        f64::from(self.spec.workers) * self.spec.keys.bytes() as f64 / seconds / 1e9
    }

    fn results(&self) -> PointResults<'_> {
        let raw: Option<Vec<f64>> = self.rounds.iter().map(|round| round.raw_seconds).collect();
        let over_rounds = |value: fn(&Round) -> f64| mean(self.rounds.iter().map(value));
        PointResults {
            value: self.value,
            workers: self.spec.workers,
            bytes_per_worker: self.spec.keys.bytes(),
            seconds_median: self.seconds(),
            seconds: self.rounds.iter().map(|round| round.seconds).collect(),
            exchanges_per_second: 1.0 / self.seconds(),
            gradients: self.gradients(self.seconds()),
            raw_seconds_median: self.raw_seconds(),
            raw_seconds: raw,
            raw_ratio: self.raw_ratio(),
            cpu_seconds_worker: over_rounds(|round| round.cpu_seconds_worker),
            cpu_seconds_hub: over_rounds(|round| round.cpu_seconds_hub),
            max_abs_error: self.verdict.max_abs_error,
            settings: &self.settings,
        }
    }
}

impl Sweep {
    pub(super) fn new(
        axis: Axis,
        rounds: u32,
        flags: &ExchangeFlags,
        points: Vec<SweepPoint>,
    ) -> anyhow::Result<Sweep> {
        let (model, spec) = flags.spec()?;
        let setup =
            place(&model, spec.keys.bytes(), flags.transport, &flags.settings(&spec), Some(axis.name()));
        Ok(Sweep { axis, rounds, model, transport: flags.transport, setup, points })
    }

    pub(super) fn headline(&self) -> String {
        let values: Vec<String> = self.points.iter().map(|point| self.axis.text(point.value)).collect();
        format!("{}\n{} {} in {} rounds", self.setup, self.axis.name(), values.join(", "), self.rounds)
    }

    pub(super) fn verdict(&self) -> Verdict {
        self.points.iter().fold(Verdict::default(), |all, point| all.and(point.verdict))
    }

    pub(super) fn results(&self) -> Results<'_> {
        Results {
            sweep: self.axis,
            model: &self.model,
            transport: self.transport,
            rounds: self.rounds,
            points: self.points.iter().map(SweepPoint::results).collect(),
            version: env!("CARGO_PKG_VERSION"),
        }
    }

    pub(super) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY);
        let has_raw = self.points.iter().any(|point| point.raw_seconds().is_some());
        let mut titles =
            vec![self.axis.name(), "median", "exchanges/s", "gradients", "worker CPU", "hub CPU"];
        titles.extend(has_raw.then_some([self.transport.bound(), "by ours"]).into_iter().flatten());
        titles.push("numbers");
        let columns = titles.len();
        table.set_header(titles);
        for point in &self.points {
            let results = point.results();
            let mut row = vec![
                self.axis.text(point.value),
                milliseconds(results.seconds_median),
                format!("{:.2}", results.exchanges_per_second),
                format!("{:.2} GB/s", results.gradients),
                milliseconds(results.cpu_seconds_worker),
                milliseconds(results.cpu_seconds_hub),
            ];
            if let (Some(seconds), Some(ratio)) = (results.raw_seconds_median, results.raw_ratio) {
                row.extend([milliseconds(seconds), format!("{ratio:.3}")]);
            }
            row.push(if point.verdict.wrong == 0 { "exact".into() } else { "WRONG".into() });
            table.add_row(row);
        }
        for column in table.column_iter_mut().take(columns - 1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table.to_string()
    }

    /// Plots exchanges a second; over workers, whose number changes the bytes of an exchange, it plots bytes
    /// a second.
    pub(super) fn plot(&self) -> Lines {
        let (title, y_label) = match self.axis {
            Axis::Workers => ("Gradients through the hub", "GB/s of gradients, and as much back"),
            _ => ("Exchanges a second", "exchanges a second"),
        };
        let speed = |point: &SweepPoint, seconds: f64| match self.axis {
            Axis::Workers => point.gradients(seconds),
            _ => 1.0 / seconds,
        };
        let line = |value: fn(&Round) -> Option<f64>| -> Option<Vec<Point>> {
            let of_point = |point: &SweepPoint| {
                let all: Option<Vec<f64>> = point.rounds.iter().map(value).collect();
                let speeds = sorted(all?.into_iter().map(|seconds| speed(point, seconds)));
                Some(Point { median: quantile(&speeds, 0.5), low: speeds[0], high: speeds[speeds.len() - 1] })
            };
            self.points.iter().map(of_point).collect()
        };
        let series = |name: &str, is_reference, points| Series { name: name.into(), is_reference, points };
        let ours = line(|round| Some(round.seconds)).map(|points| series("paramhub", false, points));
        let raw = line(|round| round.raw_seconds).map(|points| series(self.transport.bound(), true, points));
        let rounds = match self.rounds {
            1 => "one round".into(),
            rounds => format!("medians of {rounds} rounds, and the lowest and the highest round"),
        };
        Lines {
            heading: Heading {
                title: format!("{title} by {}", self.axis.name()),
                notes: vec![self.setup.clone(), rounds],
            },
            x_label: self.axis.label().into(),
            y_label: y_label.into(),
            scale: self.axis.scale(),
            values: self
                .points
                .iter()
                .map(|point| (point.value as f64, self.axis.text(point.value)))
                .collect(),
            series: ours.into_iter().chain(raw).collect(),
        }
    }
}
