//! The results of a run, as a table and as JSON.

use std::cmp::Reverse;
use std::path::Path;

use anyhow::Context;
use comfy_table::{Table, presets};
use serde::Serialize;

use super::chaos::ChaosSummary;
use super::spec::{EpochDone, WorkerReport};
use crate::config::{ExchangeKind, TrainSection};

/// Written with `--json`. Numbers about the exchange are null where nothing was exchanged.
#[derive(Serialize)]
pub(super) struct Summary {
    /// Share of the test set that is classified correctly.
    accuracy: f64,
    /// Rank 0's mean loss over the last epoch.
    loss: f64,
    steps: usize,
    /// Seconds from the first step to the last, of the slowest worker.
    seconds: f64,
    steps_per_second: f64,
    /// The rate of all workers together.
    examples_per_second: f64,
    /// Bytes sent and received, headers included, mean over workers.
    bytes_per_worker_per_step: Option<f64>,
    /// Share of the time with tensors under way during which the worker computed, mean over workers.
    hidden_fraction: Option<f64>,
    /// The largest difference from rank 0's parameters; null where they were not compared.
    max_parameter_difference: Option<f64>,
    /// Each core's busy share.
    hub_busy: Vec<f64>,
    workers: Vec<WorkerTimes>,
    epochs: Vec<EpochDone>,
    /// What the kills of `--chaos` did, if there were any. The times of a worker are then those of the newest process of
    /// its rank, and the epochs those of the process that has trained longest.
    #[serde(skip_serializing_if = "Option::is_none")]
    chaos: Option<ChaosSummary>,
    settings: TrainSection,
    version: &'static str,
}

#[derive(Serialize)]
struct WorkerTimes {
    rank: usize,
    seconds: f64,
    compute_seconds: f64,
    wait_seconds: f64,
    exchange_seconds: f64,
    hidden_seconds: f64,
    hidden_fraction: f64,
    bytes_sent: u64,
    bytes_received: u64,
    transport: String,
}

impl Summary {
    pub(super) fn new(
        section: &TrainSection,
        reports: Vec<WorkerReport>,
        hub_busy: Vec<f64>,
        max_parameter_difference: Option<f64>,
    ) -> Self {
        // Rank 0 alone has measured the accuracy; with --chaos all have, and one of them has trained longest.
        let standing =
            |report: &&WorkerReport| (report.accuracy.is_some(), report.steps, Reverse(report.rank));
        let first = reports.iter().max_by_key(standing).expect("a training has a worker");
        let steps = first.steps;
        let seconds = reports.iter().map(|report| report.seconds).fold(0.0, f64::max);
        let is_exchanged = section.exchange != ExchangeKind::Local;
        let bytes_per_step = |report: &WorkerReport| {
            (report.bytes_sent + report.bytes_received) as f64 / report.steps.max(1) as f64
        };
        let examples = steps * section.batch * section.workers() as usize;
        let settings = section.with_defaults();
        Summary {
            accuracy: first.accuracy.unwrap_or(f64::NAN),
            loss: first.loss,
            steps,
            seconds,
            steps_per_second: steps as f64 / seconds,
            examples_per_second: examples as f64 / seconds,
            bytes_per_worker_per_step: is_exchanged.then(|| mean(&reports, bytes_per_step)),
            hidden_fraction: is_exchanged.then(|| mean(&reports, |report| report.hidden_fraction)),
            max_parameter_difference,
            hub_busy,
            workers: reports.iter().map(WorkerTimes::new).collect(),
            epochs: first.epochs.clone(),
            chaos: None,
            settings,
            version: env!("CARGO_PKG_VERSION"),
        }
    }

    /// The results of a training whose workers were killed. Its steps are those that the launcher saw, since no process
    /// need have made all of them.
    pub(super) fn after(self, chaos: ChaosSummary) -> Summary {
        let share_made = 1.0 - chaos.missing_contributions.unwrap_or(0.0);
        let examples_per_step = (self.settings.batch * self.settings.workers() as usize) as f64 * share_made;
        // The first of the steps ends where the time begins.
        let steps_per_second = chaos.steps.saturating_sub(1) as f64 / chaos.seconds;
        Summary {
            steps: chaos.steps,
            seconds: chaos.seconds,
            steps_per_second,
            examples_per_second: steps_per_second * examples_per_step,
            chaos: Some(chaos),
            ..self
        }
    }

    pub(super) fn write(&self, path: &Path) -> anyhow::Result<()> {
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    pub(super) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY);
        let mut row = |what: &str, value: String| {
            table.add_row([what.to_owned(), value]);
        };
        let share = |seconds: f64| format!("{seconds:.2} s  {:.0} %", 100.0 * seconds / self.mean_seconds());
        row("test accuracy", format!("{:.4}", self.accuracy));
        row("steps", format!("{} in {:.1} s", self.steps, self.seconds));
        row("steps/s", format!("{:.1}", self.steps_per_second));
        row("examples/s", format!("{:.0}", self.examples_per_second));
        if let Some(bytes) = self.bytes_per_worker_per_step {
            row("transport", self.transport());
            row("bytes per worker and step", human_bytes(bytes));
        }
        row("worker: compute", share(self.mean(|worker| worker.compute_seconds)));
        if let Some(hidden_fraction) = self.hidden_fraction {
            row("worker: waiting for the exchange", share(self.mean(|worker| worker.wait_seconds)));
            let hidden = self.mean(|worker| worker.hidden_seconds);
            let percent = 100.0 * hidden_fraction;
            row(
                "worker: exchange hidden by compute",
                format!("{hidden:.2} s  {percent:.0} % of the exchange"),
            );
        }
        for (core, busy) in self.hub_busy.iter().enumerate() {
            row(&format!("hub core {core} busy"), format!("{:.0} %", 100.0 * busy));
        }
        if let Some(difference) = self.max_parameter_difference.filter(|_| self.workers.len() > 1) {
            row("largest parameter difference", difference.to_string());
        }
        for (what, value) in self.chaos.iter().flat_map(ChaosSummary::rows) {
            row(what, value);
        }
        table.to_string()
    }

    /// Returns the way in which the workers' tensors travelled.
    fn transport(&self) -> String {
        let mut transports: Vec<(&str, usize)> = Vec::new();
        for WorkerTimes { transport, .. } in &self.workers {
            match transports.iter_mut().find(|(other, _)| other == transport) {
                Some((_, workers)) => *workers += 1,
                None => transports.push((transport, 1)),
            }
        }
        if let [(transport, _)] = transports[..] {
            return transport.to_owned();
        }
        let of = |(transport, workers): (&str, usize)| format!("{transport} for {workers} workers");
        transports.into_iter().map(of).collect::<Vec<_>>().join(", ")
    }

    fn mean_seconds(&self) -> f64 {
        self.mean(|worker| worker.seconds)
    }

    fn mean(&self, value: impl Fn(&WorkerTimes) -> f64) -> f64 {
        self.workers.iter().map(value).sum::<f64>() / self.workers.len() as f64
    }
}

impl WorkerTimes {
    fn new(report: &WorkerReport) -> Self {
        WorkerTimes {
            rank: report.rank,
            seconds: report.seconds,
            compute_seconds: report.compute_seconds,
            wait_seconds: report.wait_seconds,
            exchange_seconds: report.exchange_seconds,
            hidden_seconds: report.hidden_fraction * report.exchange_seconds,
            hidden_fraction: report.hidden_fraction,
            bytes_sent: report.bytes_sent,
            bytes_received: report.bytes_received,
            transport: report.transport.clone(),
        }
    }
}

fn mean(reports: &[WorkerReport], value: impl Fn(&WorkerReport) -> f64) -> f64 {
    reports.iter().map(value).sum::<f64>() / reports.len() as f64
}

/// Two or three significant digits, and the unit.
fn human_bytes(bytes: f64) -> String {
    match bytes {
        bytes if bytes >= 1e6 => format!("{:.2} MB", bytes / 1e6),
        bytes if bytes >= 1e3 => format!("{:.1} kB", bytes / 1e3),
        bytes => format!("{bytes:.0} B"),
    }
}
