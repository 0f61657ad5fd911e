//! The results of a benchmark, as a table and as JSON.

use std::path::Path;

use anyhow::Context;
use comfy_table::{Table, presets};
use serde::Serialize;

use super::Settings;
use super::driver::{Measured, Timed};
use super::spec::Transport;
use super::statistics::{bandwidths, mean, quantile, sorted};

/// Written with `--json`. Seconds and bytes are those of one exchange, bandwidths are GB/s; what was not
/// measured is null.
#[derive(Serialize)]
pub(super) struct Summary {
    model: String,
    workers: u32,
    transport: Transport,
    /// Bytes of gradients one way. As many bytes of parameters come back.
    bytes_per_worker: u64,
    /// Bytes of frames with their headers, as a mean over workers and iterations. Tensors in shared memory
    /// count as if they travelled.
    frame_bytes_sent: f64,
    frame_bytes_received: f64,
    seconds_median: f64,
    p10: f64,
    p90: f64,
    exchanges_per_second: f64,
    algbw: f64,
    busbw: f64,
    raw_seconds_median: Option<f64>,
    /// The time of bare streams by that of the exchange: 1 would be as fast as bare streams.
    raw_ratio: Option<f64>,
    /// The mean over workers and iterations.
    cpu_seconds_worker: f64,
    /// The mean over iterations, for the hubs' whole processes together.
    cpu_seconds_hub: f64,
    raw_cpu_seconds_worker: Option<f64>,
    raw_cpu_seconds_hub: Option<f64>,
    /// Each core's processor time by wall time during exchanges, hub after hub.
    hub_busy: Vec<f64>,
    hub_peak_bytes: u64,
    /// The peak of the largest worker.
    worker_peak_bytes: u64,
    max_abs_error: f64,
    pub(super) settings: Settings,
    version: &'static str,
}

/// The numbers shown of exchanges and of raw turns.
struct Column {
    median: f64,
    p10: f64,
    p90: f64,
    cpu_seconds_worker: f64,
    cpu_seconds_hub: f64,
}

impl Column {
    /// The numbers; `None` if there are no turns.
    fn of(turns: &[Timed]) -> Option<Column> {
        let seconds = sorted(turns.iter().map(|turn| turn.seconds));
        (!seconds.is_empty()).then(|| Column {
            median: quantile(&seconds, 0.5),
            p10: quantile(&seconds, 0.1),
            p90: quantile(&seconds, 0.9),
            cpu_seconds_worker: mean(turns.iter().map(|turn| turn.cpu_seconds_worker)),
            cpu_seconds_hub: mean(turns.iter().map(|turn| turn.cpu_seconds_hub)),
        })
    }
}

impl Summary {
    pub(super) fn new(
        model: String,
        transport: Transport,
        bytes_per_worker: u64,
        settings: Settings,
        measured: &Measured,
    ) -> Summary {
        let ours = Column::of(&measured.exchanges).expect("at least one iteration");
        let raw = Column::of(&measured.raw);
        let (algbw, busbw) = bandwidths(bytes_per_worker, ours.median, settings.workers);
        let [frame_bytes_sent, frame_bytes_received] =
            [0, 1].map(|way| mean(measured.exchanges.iter().map(|exchange| exchange.frame_bytes[way])));
        Summary {
            model,
            workers: settings.workers,
            transport,
            bytes_per_worker,
            frame_bytes_sent,
            frame_bytes_received,
            seconds_median: ours.median,
            p10: ours.p10,
            p90: ours.p90,
            exchanges_per_second: 1.0 / ours.median,
            algbw,
            busbw,
            raw_seconds_median: raw.as_ref().map(|raw| raw.median),
            raw_ratio: raw.as_ref().map(|raw| raw.median / ours.median),
            cpu_seconds_worker: ours.cpu_seconds_worker,
            cpu_seconds_hub: ours.cpu_seconds_hub,
            raw_cpu_seconds_worker: raw.as_ref().map(|raw| raw.cpu_seconds_worker),
            raw_cpu_seconds_hub: raw.as_ref().map(|raw| raw.cpu_seconds_hub),
            hub_busy: hub_busy(&measured.exchanges),
            hub_peak_bytes: measured.hub_peak_bytes,
            worker_peak_bytes: measured.worker_peak_bytes,
            max_abs_error: measured.verdict.max_abs_error,
            settings,
            version: env!("CARGO_PKG_VERSION"),
        }
    }

    pub(super) fn table(&self, measured: &Measured) -> String {
        let columns: Vec<Column> =
            [&measured.exchanges, &measured.raw].into_iter().filter_map(|turns| Column::of(turns)).collect();
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY);
        let titles = ["", "exchange", "raw streams"];
        table.set_header(&titles[..columns.len() + 1]);
        let mut row = |what: &str, value: &dyn Fn(&Column) -> String| {
            table.add_row([what.to_owned()].into_iter().chain(columns.iter().map(value)));
        };
        row("median", &|column| milliseconds(column.median));
        row("10 % are faster than", &|column| milliseconds(column.p10));
        row("10 % are slower than", &|column| milliseconds(column.p90));
        row("a second", &|column| format!("{:.2}", 1.0 / column.median));
        let bandwidths = |column: &Column| bandwidths(self.bytes_per_worker, column.median, self.workers);
        row("algbw", &|column| format!("{:.2} GB/s", bandwidths(column).0));
        row("busbw", &|column| format!("{:.2} GB/s", bandwidths(column).1));
        row("CPU time of a worker", &|column| milliseconds(column.cpu_seconds_worker));
        row(
            if self.settings.hubs == 1 { "CPU time of the hub" } else { "CPU time of all hubs" },
            &|column| milliseconds(column.cpu_seconds_hub),
        );
        let mut row = |what: String, value: String| {
            table.add_row([what, value]);
        };
        for (core, busy) in self.hub_busy.iter().enumerate() {
            let (hub, of_hub) = (core / self.settings.cores, core % self.settings.cores);
            let name = match self.settings.hubs {
                1 => format!("hub core {core} busy"),
                _ => format!("hub {hub}, core {of_hub} busy"),
            };
            row(name, format!("{:.0} %", 100.0 * busy));
        }
        row("sent by a worker, with headers".into(), megabytes(self.frame_bytes_sent as u64));
        row("received by a worker".into(), megabytes(self.frame_bytes_received as u64));
        row("peak memory of a worker".into(), megabytes(self.worker_peak_bytes));
        row(
            format!("peak memory of the {}hub", if self.settings.hubs == 1 { "" } else { "largest " }),
            megabytes(self.hub_peak_bytes),
        );
        if let Some(ratio) = self.raw_ratio {
            row("raw time by exchange time".into(), format!("{ratio:.3}"));
        }
        let numbers = match measured.verdict.wrong {
            0 => "all exact".into(),
            _ if self.settings.between_sites.is_quantised() => {
                format!(
                    "off by up to {:.4}, with sums in {}",
                    self.max_abs_error, self.settings.between_sites
                )
            }
            wrong => format!("{wrong} WRONG, by up to {}", self.max_abs_error),
        };
        row("parameters of all workers".into(), numbers);
        table.to_string()
    }
}

/// Each core's share of the time of all exchanges.
fn hub_busy(exchanges: &[Timed]) -> Vec<f64> {
    let seconds: f64 = exchanges.iter().map(|exchange| exchange.seconds).sum();
    let cores = exchanges.iter().map(|exchange| exchange.core_seconds.len()).min().unwrap_or(0);
    let of_core = |core: usize| exchanges.iter().map(|exchange| exchange.core_seconds[core]).sum::<f64>();
    (0..cores).map(|core| of_core(core) / seconds).collect()
}

/// Writes results as indented JSON.
///
/// # Errors
/// If the file cannot be written.
pub fn write_json(results: &impl Serialize, path: &Path) -> anyhow::Result<()> {
    let mut text = serde_json::to_string_pretty(results)?;
    text.push('\n');
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Seconds, shown in milliseconds.
pub fn milliseconds(seconds: f64) -> String {
    format!("{:.2} ms", 1e3 * seconds)
}

/// Bytes, shown in megabytes of a million.
pub fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_is_busy_for_its_share_of_all_exchanges() {
        let exchange = |seconds, core_seconds: &[f64]| Timed {
            seconds,
            frame_bytes: [0.0; 2],
            cpu_seconds_worker: 0.0,
            cpu_seconds_hub: 0.0,
            core_seconds: core_seconds.into(),
        };
        let exchanges = [exchange(1.0, &[0.5, 0.25]), exchange(3.0, &[0.5, 2.75])];
        assert_eq!(hub_busy(&exchanges), [0.25, 0.75]);
        assert!(hub_busy(&[exchange(1.0, &[])]).is_empty());
    }
}
