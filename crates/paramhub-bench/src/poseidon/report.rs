//! The results of the systems, as a table and as JSON.

use comfy_table::{Table, presets};
use paramhub_harness::exchange::report::{megabytes, milliseconds};
use paramhub_harness::exchange::statistics::{quantile, sorted};
use paramhub_harness::values::Deployment;
use serde::Serialize;

use super::driver::Measured;
use super::system::System;
use super::worker::TurnMeasurement;
use crate::plot::{Bar, Bars, Heading, Part};

/// The settings on which a result depends, beside the machine.
#[derive(Serialize)]
pub(super) struct Setting {
    pub(super) model: String,
    pub(super) workers: u32,
    /// Samples of each worker and step, before scaling.
    pub(super) batch: u64,
    /// The number by which all bytes and times are divided.
    pub(super) scale: u64,
    /// The number by which the times of computation are multiplied.
    pub(super) stretch: f64,
    /// The payload rate of a host's link, if it was given.
    pub(super) link_bits_per_second: Option<f64>,
    /// Samples of each worker and step, after scaling (Poseidon: K).
    pub(super) samples: u64,
    /// Bytes of a worker's gradients.
    pub(super) bytes: u64,
    /// Seconds of computation in a step.
    pub(super) compute_seconds: f64,
    /// The source of these seconds.
    pub(super) profile: String,
    pub(super) deployment: Option<Deployment>,
    pub(super) hubs: usize,
    pub(super) steps: u32,
    pub(super) rounds: u32,
    pub(super) expected: Vec<Expected>,
}

/// The plan of one system.
#[derive(Serialize)]
pub(super) struct Expected {
    pub(super) system: System,
    /// Seconds of a step if only links and computation took time; `None` if no link rate was given.
    pub(super) seconds: Option<f64>,
    /// Bytes that a host with a worker sends in a step, as a mean over these hosts, without headers.
    pub(super) bytes_sent: f64,
    /// The bytes that the busiest host sends, divided by that mean.
    pub(super) busiest_by_mean: f64,
    /// Layers that are exchanged by factors.
    pub(super) by_factors: Vec<String>,
}

/// Written with `--json`. Seconds and bytes are those of one step.
#[derive(Serialize)]
pub(super) struct Summary {
    systems: Vec<Row>,
    setting: Setting,
    version: &'static str,
}

/// What was measured of one system.
#[derive(Serialize)]
struct Row {
    system: System,
    /// Seconds of the slowest worker, in the median of the turns.
    seconds: f64,
    /// Seconds of the slowest worker in the fastest turn.
    lowest: f64,
    /// Seconds of the slowest worker in the slowest turn.
    highest: f64,
    /// Speed relative to one worker that computes alone.
    speed_up: f64,
    /// The share of a step in which a worker does not compute (figure 7).
    stalled: f64,
    /// Bytes sent by the host of one worker, as a mean over all workers (figure 10); 0 if all workers are on loopback.
    bytes_sent: f64,
    bytes_received: f64,
    /// The bytes that the busiest host sent, divided by that mean; 1 if the mean is 0.
    busiest_by_mean: f64,
    /// Processor seconds of a worker's process.
    cpu_seconds: f64,
}

impl Summary {
    pub(super) fn new(setting: Setting, measured: &Measured) -> Summary {
        let rows = setting.expected.iter().zip(measured).map(|(expected, turns)| {
            let slowest =
                |turn: &Vec<TurnMeasurement>| turn.iter().map(|worker| worker.seconds).fold(0.0, f64::max);
            let seconds = sorted(turns.iter().map(slowest));
            let median = quantile(&seconds, 0.5);
            let per_step = |value: fn(&TurnMeasurement) -> f64, rank: usize| {
                let values = turns.iter().map(|turn| value(&turn[rank]) / f64::from(turn[rank].steps));
                quantile(&sorted(values), 0.5)
            };
            let ranks = 0..turns[0].len();
            let mean = |value: fn(&TurnMeasurement) -> f64| {
                ranks.clone().map(|rank| per_step(value, rank)).sum::<f64>() / ranks.len() as f64
            };
            let sent: fn(&TurnMeasurement) -> f64 = |worker| worker.bytes_sent as f64;
            let bytes_sent = mean(sent);
            let busiest = ranks.clone().map(|rank| per_step(sent, rank)).fold(0.0, f64::max);
            Row {
                system: expected.system,
                seconds: median,
                lowest: seconds[0],
                highest: seconds[seconds.len() - 1],
                speed_up: f64::from(setting.workers) * setting.compute_seconds / median,
                stalled: 1.0 - setting.compute_seconds / median,
                bytes_sent,
                bytes_received: mean(|worker| worker.bytes_received as f64),
                busiest_by_mean: if bytes_sent > 0.0 { busiest / bytes_sent } else { 1.0 },
                cpu_seconds: mean(|worker| worker.cpu_seconds),
            }
        });
        let systems = rows.collect();
        Summary { systems, setting, version: env!("CARGO_PKG_VERSION") }
    }

    pub(super) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY);
        table.set_header([
            "",
            "step",
            "lowest",
            "highest",
            "bound",
            "speed-up",
            "stalled",
            "sent by a host",
            "planned",
            "busiest of planned",
            "by factors",
        ]);
        for (row, expected) in self.systems.iter().zip(&self.setting.expected) {
            table.add_row([
                row.system.label().to_owned(),
                milliseconds(row.seconds),
                milliseconds(row.lowest),
                milliseconds(row.highest),
                expected.seconds.map(milliseconds).unwrap_or_default(),
                format!("{:.2} of {}", row.speed_up, self.setting.workers),
                format!("{:.0} %", 100.0 * row.stalled),
                megabytes(row.bytes_sent as u64),
                megabytes(expected.bytes_sent as u64),
                format!("{:.2} of {:.2}", row.busiest_by_mean, expected.busiest_by_mean),
                expected.by_factors.join(", "),
            ]);
        }
        table.to_string()
    }

    /// Each system's step: computation, and the wait beside it.
    pub(super) fn bars(&self) -> Bars {
        let Setting { model, workers, batch, compute_seconds, link_bits_per_second, rounds, .. } =
            &self.setting;
        let scaled = self.setting.scaled();
        let link = link_bits_per_second
            .map(|rate| format!("; links of {:.0} Mbit/s of payload each way", rate / 1e6))
            .unwrap_or_default();
        let bars = self.systems.iter().zip(&self.setting.expected).map(|(row, expected)| {
            let part = |seconds: f64, colour, text: &str| Part {
                length: 1e3 * seconds,
                colour,
                text: text.to_owned(),
            };
            let stalled = row.seconds - compute_seconds;
            Bar {
                name: row.system.label().to_owned(),
                parts: vec![
                    part(*compute_seconds, 0, ""),
                    part(stalled.max(0.0), 1, &format!("{:.0} %", 100.0 * row.stalled)),
                ],
                range: (*rounds > 1).then_some((1e3 * row.lowest, 1e3 * row.highest)),
                mark: expected.seconds.map(|seconds| 1e3 * seconds),
                note: format!("{:.2} of {workers}, {}", row.speed_up, megabytes(row.bytes_sent as u64)),
            }
        });
        Bars {
            heading: Heading {
                title: format!("{model}: a step of {workers} workers"),
                notes: vec![
                    format!(
                        "batch {batch}{scaled}; medians of {rounds} turns of {} steps, lowest and highest{link}",
                        self.setting.steps
                    ),
                    "beside each bar the speed-up over one worker, and what a host sends in a step".into(),
                ],
            },
            x_label: "milliseconds".into(),
            parts: vec!["computing".into(), "stalled".into()],
            line: None,
            marks: link_bits_per_second.map(|_| "if only links and computation took time".into()),
            bars: bars.collect(),
        }
    }
}
