//! The cost of sharing a hub, as a table and as JSON.

use comfy_table::{Table, presets};
use paramhub_harness::exchange::Settings;
use paramhub_harness::exchange::report::milliseconds;
use paramhub_harness::exchange::spec::Transport;
use paramhub_harness::exchange::statistics::{quantile, sorted};
use serde::Serialize;

use super::driver::{Measured, Timed};

/// Written with `--json`. Seconds are those of one exchange.
#[derive(Serialize)]
pub(super) struct Summary {
    model: String,
    jobs: usize,
    /// Workers of each job.
    workers: u32,
    transport: Transport,
    bytes_per_worker: u64,
    alone: Spread,
    /// The seconds of the job that finished last.
    together: Spread,
    /// The seconds of one job alone, times the number of jobs: the time of a job with its fair share.
    fair_seconds: f64,
    /// The lost share of the throughput of a fair share. It is below 0 if jobs together use what one alone
    /// leaves idle.
    lost: f64,
    /// Each job's median while all exchange at once.
    job_seconds: Vec<f64>,
    /// The time of the job that finished last by that of the first, in the median of the turns.
    last_by_first: f64,
    /// Processor seconds of all hub cores for one job's exchange, alone and together: what sharing costs the
    /// hub, whatever else uses the processors.
    core_seconds_alone: f64,
    core_seconds_together: f64,
    /// Each core's processor time by wall time, hub after hub.
    hub_busy_alone: Vec<f64>,
    hub_busy_together: Vec<f64>,
    max_abs_error: f64,
    settings: Settings,
    version: &'static str,
}

#[derive(Clone, Copy, Serialize)]
struct Spread {
    seconds_median: f64,
    p10: f64,
    p90: f64,
}

impl Spread {
    fn of(turns: &[Timed]) -> Spread {
        let seconds = sorted(turns.iter().map(Timed::seconds));
        let [p10, seconds_median, p90] = [0.1, 0.5, 0.9].map(|share| quantile(&seconds, share));
        Spread { seconds_median, p10, p90 }
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
        let (alone, together) = (Spread::of(&measured.alone), Spread::of(&measured.together));
        let jobs = measured.together[0].job_seconds.len();
        let fair_seconds = jobs as f64 * alone.seconds_median;
        let of_job = |job: usize| median(measured.together.iter().map(|turn| turn.job_seconds[job]));
        let uneven = measured.together.iter().map(|turn| {
            let first = turn.job_seconds.iter().copied().fold(f64::INFINITY, f64::min);
            turn.seconds() / first
        });
        Summary {
            model,
            jobs,
            workers: settings.workers,
            transport,
            bytes_per_worker,
            alone,
            together,
            fair_seconds,
            lost: 1.0 - fair_seconds / together.seconds_median,
            job_seconds: (0..jobs).map(of_job).collect(),
            last_by_first: median(uneven),
            core_seconds_alone: core_seconds(&measured.alone),
            core_seconds_together: core_seconds(&measured.together),
            hub_busy_alone: hub_busy(&measured.alone),
            hub_busy_together: hub_busy(&measured.together),
            max_abs_error: measured.verdict.max_abs_error,
            settings,
            version: env!("CARGO_PKG_VERSION"),
        }
    }

    pub(super) fn table(&self, measured: &Measured) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY);
        table.set_header(["", "one alone", &format!("{} at once", self.jobs)]);
        let mut row = |what: &str, value: &dyn Fn(&Spread) -> f64| {
            let values = [&self.alone, &self.together].map(|spread| milliseconds(value(spread)));
            table.add_row([what.to_owned()].into_iter().chain(values));
        };
        row("median, of the last job", &|spread| spread.seconds_median);
        row("10 % are faster than", &|spread| spread.p10);
        row("10 % are slower than", &|spread| spread.p90);
        let core_seconds = [self.core_seconds_alone, self.core_seconds_together].map(milliseconds);
        table.add_row(["time of hub cores for a job".to_owned()].into_iter().chain(core_seconds));
        for (core, (alone, together)) in self.hub_busy_alone.iter().zip(&self.hub_busy_together).enumerate() {
            let percent = |busy: &f64| format!("{:.0} %", 100.0 * busy);
            table.add_row([format!("hub core {core} busy"), percent(alone), percent(together)]);
        }
        let mut row = |what: &str, value: String| {
            table.add_row([what.to_owned(), String::new(), value]);
        };
        row("at fair shares", milliseconds(self.fair_seconds));
        match self.lost {
            lost if lost < 0.0 => row("gained against fair shares", format!("{:.1} %", -100.0 * lost)),
            lost => row("lost against fair shares", format!("{:.1} %", 100.0 * lost)),
        }
        row("the last job by the first", format!("{:.3}", self.last_by_first));
        let numbers = match measured.verdict.wrong {
            0 => "all exact".into(),
            wrong => format!("{wrong} WRONG, by up to {}", self.max_abs_error),
        };
        row("parameters of all workers", numbers);
        table.to_string()
    }
}

/// The median of at least one value.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    quantile(&sorted(values), 0.5)
}

/// Processor seconds of one job's exchange, in the median of the turns.
fn core_seconds(turns: &[Timed]) -> f64 {
    median(turns.iter().map(|turn| turn.core_seconds.iter().sum::<f64>() / turn.job_seconds.len() as f64))
}

/// Each core's share of the time of all turns.
fn hub_busy(turns: &[Timed]) -> Vec<f64> {
    let seconds: f64 = turns.iter().map(Timed::seconds).sum();
    let of_core = |core: usize| turns.iter().map(|turn| turn.core_seconds[core]).sum::<f64>();
    (0..turns[0].core_seconds.len()).map(|core| of_core(core) / seconds).collect()
}
