//! The results of the variants, as a table, as JSON and as a plot.

use comfy_table::{CellAlignment, Table, presets};
use paramhub_harness::exchange::driver::Measured;
use paramhub_harness::exchange::numbers::Verdict;
use paramhub_harness::exchange::report::milliseconds;
use paramhub_harness::exchange::spec::Spec;
use paramhub_harness::exchange::spec::Transport;
use paramhub_harness::exchange::statistics::{mean, sorted};
use paramhub_harness::exchange::{ExchangeFlags, Settings, place};
use serde::Serialize;

use super::variant::Variant;
use crate::plot::{Bar, Bars, Heading, Part};
use crate::rounds::{Round, median};

/// The results of the normal path and its variants.
pub(super) struct Ablation {
    model: String,
    rounds: u32,
    transport: Transport,
    bytes_per_worker: u64,
    settings: Settings,
    place: String,
    /// The variants, the normal path first.
    pub(super) tried: Vec<Tried>,
}

/// One variant and its rounds.
pub(super) struct Tried {
    pub(super) variant: Variant,
    pub(super) spec: Spec,
    pub(super) verdict: Verdict,
    rounds: Vec<Round>,
}

/// Written with `--json`. Seconds are those of one exchange; what was not measured is null.
#[derive(Serialize)]
pub(super) struct Results<'a> {
    model: &'a str,
    workers: u32,
    transport: Transport,
    bytes_per_worker: u64,
    rounds: u32,
    variants: Vec<VariantResults>,
    raw_seconds_median: Option<f64>,
    settings: &'a Settings,
    version: &'static str,
}

#[derive(Serialize)]
struct VariantResults {
    variant: Variant,
    /// The median of the rounds' medians.
    seconds_median: f64,
    /// Each round's median.
    seconds: Vec<f64>,
    /// The median over the rounds of this variant's time by the normal path's. Above 1 is slower.
    factor: f64,
    cpu_seconds_worker: f64,
    cpu_seconds_hub: f64,
    chunk_bytes: u32,
    /// Null for variants that cannot compute the right numbers, which are not checked.
    max_abs_error: Option<f64>,
}

impl Tried {
    pub(super) fn new(variant: Variant, spec: Spec) -> Tried {
        Tried { variant, spec, verdict: Verdict::default(), rounds: Vec::new() }
    }

    /// Adds a round.
    pub(super) fn add(&mut self, measured: &Measured) {
        self.rounds.push(Round::of(measured));
        self.verdict = self.verdict.and(measured.verdict);
    }

    fn seconds(&self) -> Vec<f64> {
        self.rounds.iter().map(|round| round.seconds).collect()
    }

    fn numbers(&self) -> &'static str {
        match self.verdict.wrong {
            _ if !self.variant.is_exact() => "not checked",
            0 => "exact",
            _ => "WRONG",
        }
    }

    fn results(&self, normal: &Tried) -> VariantResults {
        let over_rounds = |value: fn(&Round) -> f64| mean(self.rounds.iter().map(value));
        let factors =
            self.rounds.iter().zip(&normal.rounds).map(|(own, normal)| own.seconds / normal.seconds);
        VariantResults {
            variant: self.variant,
            seconds_median: median(self.seconds()).expect("at least one round"),
            seconds: self.seconds(),
            factor: median(factors).expect("at least one round"),
            cpu_seconds_worker: over_rounds(|round| round.cpu_seconds_worker),
            cpu_seconds_hub: over_rounds(|round| round.cpu_seconds_hub),
            chunk_bytes: self.spec.chunk_bytes,
            max_abs_error: self.variant.is_exact().then_some(self.verdict.max_abs_error),
        }
    }
}

impl Ablation {
    pub(super) fn new(
        model: String,
        rounds: u32,
        flags: &ExchangeFlags,
        spec: &Spec,
        tried: Vec<Tried>,
    ) -> Ablation {
        let settings = flags.settings(spec);
        let bytes_per_worker = spec.keys.bytes();
        let place = place(&model, bytes_per_worker, flags.transport, &settings, None);
        Ablation { model, rounds, transport: flags.transport, bytes_per_worker, settings, place, tried }
    }

    pub(super) fn headline(&self) -> String {
        let variants: Vec<&str> = self.tried.iter().map(|tried| tried.variant.name()).collect();
        format!("{}\n{} in {} rounds", self.place, variants.join("; "), self.rounds)
    }

    fn normal(&self) -> &Tried {
        &self.tried[0]
    }

    fn raw_seconds(&self) -> Vec<f64> {
        self.normal().rounds.iter().filter_map(|round| round.raw_seconds).collect()
    }

    pub(super) fn results(&self) -> Results<'_> {
        Results {
            model: &self.model,
            workers: self.normal().spec.workers,
            transport: self.transport,
            bytes_per_worker: self.bytes_per_worker,
            rounds: self.rounds,
            variants: self.tried.iter().map(|tried| tried.results(self.normal())).collect(),
            raw_seconds_median: median(self.raw_seconds()),
            settings: &self.settings,
            version: env!("CARGO_PKG_VERSION"),
        }
    }

    pub(super) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY);
        table.set_header(["", "median", "factor", "worker CPU", "hub CPU", "numbers"]);
        for tried in &self.tried {
            let results = tried.results(self.normal());
            table.add_row([
                tried.variant.name().into(),
                milliseconds(results.seconds_median),
                format!("{:.2}", results.factor),
                milliseconds(results.cpu_seconds_worker),
                milliseconds(results.cpu_seconds_hub),
                tried.numbers().into(),
            ]);
        }
        if let Some(seconds) = median(self.raw_seconds()) {
            table.add_row([self.transport.bound().into(), milliseconds(seconds)]);
        }
        for column in table.column_iter_mut().skip(1).take(4) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table.to_string()
    }

    pub(super) fn plot(&self) -> Bars {
        const CHECKED: usize = 0;
        const NOT_CHECKED: usize = 1;
        const RAW: usize = 2;
        let bar = |name: &str, seconds: Vec<f64>, colour, factor: Option<f64>| {
            let sorted = sorted(seconds.iter().map(|seconds| 1e3 * seconds));
            let length = median(sorted.iter().copied()).expect("at least one round");
            let factor = factor.map_or_else(String::new, |factor| format!(", {factor:.2} ×"));
            Bar {
                name: name.into(),
                parts: vec![Part { length, colour, text: String::new() }],
                range: Some((sorted[0], sorted[sorted.len() - 1])),
                mark: None,
                note: format!("{length:.1} ms{factor}"),
            }
        };
        let mut bars: Vec<Bar> = self
            .tried
            .iter()
            .map(|tried| {
                let colour = if tried.variant.is_exact() { CHECKED } else { NOT_CHECKED };
                let factor = tried.results(self.normal()).factor;
                let factor = (tried.variant != Variant::Normal).then_some(factor);
                bar(tried.variant.name(), tried.seconds(), colour, factor)
            })
            .collect();
        let mut parts = vec!["every number checked".into(), "numbers not checked".into()];
        let raw = self.raw_seconds();
        if !raw.is_empty() {
            bars.push(bar(self.transport.bound(), raw, RAW, None));
            parts.push("no hub at all".into());
        }
        let rounds = match self.rounds {
            1 => "one round".into(),
            rounds => format!(
                "medians of {rounds} rounds, and the lowest and the highest; factors are medians of the rounds' own"
            ),
        };
        Bars {
            heading: Heading {
                title: "One exchange, done otherwise".into(),
                notes: vec![self.place.clone(), rounds],
            },
            x_label: "milliseconds".into(),
            parts,
            line: None,
            marks: None,
            bars,
        }
    }
}
