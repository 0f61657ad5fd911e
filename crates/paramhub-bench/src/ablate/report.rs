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

/// The results of the baseline and its variants.
pub(super) struct Ablation {
    model: String,
    rounds: u32,
    transport: Transport,
    bytes_per_worker: u64,
    settings: Settings,
    description: String,
    /// The variants, the baseline first.
    pub(super) variants: Vec<VariantRounds>,
}

/// One variant and its rounds.
pub(super) struct VariantRounds {
    pub(super) variant: Variant,
    pub(super) spec: Spec,
    pub(super) verdict: Verdict,
    rounds: Vec<Round>,
}

/// Written with `--json`. Seconds are those of one exchange, CPU seconds those of one worker or of the hub in it;
/// what was not measured is null.
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
    /// The median over the rounds of this variant's time divided by the baseline's. Above 1 is slower.
    factor: f64,
    cpu_seconds_worker: f64,
    cpu_seconds_hub: f64,
    chunk_bytes: u32,
    /// Null for variants that cannot compute the right numbers, which are not checked.
    max_abs_error: Option<f64>,
}

impl VariantRounds {
    pub(super) fn new(variant: Variant, spec: Spec) -> VariantRounds {
        VariantRounds { variant, spec, verdict: Verdict::default(), rounds: Vec::new() }
    }

    /// Adds a round.
    pub(super) fn add(&mut self, measured: &Measured) {
        self.rounds.push(Round::of(measured));
        self.verdict = self.verdict.and(measured.verdict);
    }

    fn seconds(&self) -> Vec<f64> {
        self.rounds.iter().map(|round| round.seconds).collect()
    }

    fn check_result(&self) -> &'static str {
        match self.verdict.wrong {
            _ if !self.variant.is_exact() => "not checked",
            0 => "exact",
            _ => "WRONG",
        }
    }

    fn results(&self, baseline: &VariantRounds) -> VariantResults {
        let mean_of_rounds = |value: fn(&Round) -> f64| mean(self.rounds.iter().map(value));
        let factors =
            self.rounds.iter().zip(&baseline.rounds).map(|(own, baseline)| own.seconds / baseline.seconds);
        VariantResults {
            variant: self.variant,
            seconds_median: median(self.seconds()).expect("at least one round"),
            seconds: self.seconds(),
            factor: median(factors).expect("at least one round"),
            cpu_seconds_worker: mean_of_rounds(|round| round.cpu_seconds_worker),
            cpu_seconds_hub: mean_of_rounds(|round| round.cpu_seconds_hub),
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
        variants: Vec<VariantRounds>,
    ) -> Ablation {
        let settings = flags.settings(spec);
        let bytes_per_worker = spec.keys.bytes();
        let description = place(&model, bytes_per_worker, flags.transport, &settings, None);
        Ablation {
            model,
            rounds,
            transport: flags.transport,
            bytes_per_worker,
            settings,
            description,
            variants,
        }
    }

    pub(super) fn headline(&self) -> String {
        let variants: Vec<&str> = self.variants.iter().map(|rounds| rounds.variant.name()).collect();
        format!("{}\n{} in {} rounds", self.description, variants.join("; "), self.rounds)
    }

    fn baseline(&self) -> &VariantRounds {
        &self.variants[0]
    }

    fn raw_seconds(&self) -> Vec<f64> {
        self.baseline().rounds.iter().filter_map(|round| round.raw_seconds).collect()
    }

    pub(super) fn results(&self) -> Results<'_> {
        Results {
            model: &self.model,
            workers: self.baseline().spec.workers,
            transport: self.transport,
            bytes_per_worker: self.bytes_per_worker,
            rounds: self.rounds,
            variants: self.variants.iter().map(|rounds| rounds.results(self.baseline())).collect(),
            raw_seconds_median: median(self.raw_seconds()),
            settings: &self.settings,
            version: env!("CARGO_PKG_VERSION"),
        }
    }

    pub(super) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY);
        table.set_header(["", "median", "factor", "worker CPU", "hub CPU", "numbers"]);
        for variant_rounds in &self.variants {
            let results = variant_rounds.results(self.baseline());
            table.add_row([
                variant_rounds.variant.name().into(),
                milliseconds(results.seconds_median),
                format!("{:.2}", results.factor),
                milliseconds(results.cpu_seconds_worker),
                milliseconds(results.cpu_seconds_hub),
                variant_rounds.check_result().into(),
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
            .variants
            .iter()
            .map(|rounds| {
                let colour = if rounds.variant.is_exact() { CHECKED } else { NOT_CHECKED };
                let factor = rounds.results(self.baseline()).factor;
                let factor = (rounds.variant != Variant::Normal).then_some(factor);
                bar(rounds.variant.name(), rounds.seconds(), colour, factor)
            })
            .collect();
        let mut parts = vec!["every number checked".into(), "numbers not checked".into()];
        let raw = self.raw_seconds();
        if !raw.is_empty() {
            bars.push(bar(self.transport.bound(), raw, RAW, None));
            parts.push("bare TCP".into());
        }
        let rounds = match self.rounds {
            1 => "one round".into(),
            rounds => format!(
                "medians of {rounds} rounds, and the lowest and the highest; each factor is the median of the rounds' factors"
            ),
        };
        Bars {
            heading: Heading {
                title: "One exchange: each design choice replaced".into(),
                notes: vec![self.description.clone(), rounds],
            },
            x_label: "milliseconds".into(),
            parts,
            line: None,
            marks: None,
            bars,
        }
    }
}
