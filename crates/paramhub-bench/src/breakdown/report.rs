//! The results of the stages, as a table, as JSON and as a plot.

use comfy_table::{CellAlignment, Table, presets};
use paramhub_harness::exchange::count;
use paramhub_harness::exchange::report::{megabytes, milliseconds};
use paramhub_harness::exchange::statistics::{mean, sorted};
use serde::Serialize;

use super::BreakdownFlags;
use super::peer::{TrainingMeasurement, TrainingTask};
use super::stage::BreakdownStage;
use crate::plot::{Bar, Bars, Heading, Part};
use crate::rounds::median;
use crate::training::TrainSection;

/// The results of all networks.
pub(super) struct Breakdown {
    rounds: u32,
    place: String,
    pub(super) trained: Vec<Trained>,
}

/// One network and the rounds of its stages.
pub(super) struct Trained {
    pub(super) train: TrainSection,
    elements: u64,
    steps: usize,
    warmup: usize,
    /// The rounds of every stage.
    rounds: [Vec<Round>; BreakdownStage::ALL.len()],
}

/// Means over the workers for one step.
#[derive(Clone, Copy)]
struct Round {
    seconds: f64,
    cpu_seconds: f64,
}

/// Written with `--json`. Seconds are those of one step.
#[derive(Serialize)]
pub(super) struct Results {
    data: String,
    workers: u32,
    cores: usize,
    batch: usize,
    optimizer: String,
    chunk_bytes: u64,
    rounds: u32,
    nets: Vec<NetResults>,
    version: &'static str,
}

#[derive(Serialize)]
struct NetResults {
    net: String,
    elements: u64,
    /// Steps that count in each stage and round.
    steps: usize,
    stages: Vec<StageResults>,
}

#[derive(Serialize)]
struct StageResults {
    stage: BreakdownStage,
    /// The median of the rounds.
    seconds_median: f64,
    /// Each round's mean over workers and steps.
    seconds: Vec<f64>,
    /// The seconds that this stage adds to the one before it. No stage counts as slower than a later one.
    adds_seconds: f64,
    /// The share of that in the time of the whole step.
    adds_share: f64,
    cpu_seconds_worker: f64,
}

impl Trained {
    pub(super) fn new(train: TrainSection, elements: u64, steps: usize, warmup: usize) -> Trained {
        Trained { train, elements, steps, warmup, rounds: Default::default() }
    }

    /// Adds a round of a stage.
    pub(super) fn add(&mut self, stage: BreakdownStage, workers: &[TrainingMeasurement]) {
        let of_a_step = |value: fn(&TrainingMeasurement) -> f64| {
            mean(workers.iter().map(|measurement| value(measurement) / measurement.steps as f64))
        };
        self.rounds[stage as usize].push(Round {
            seconds: of_a_step(|measurement| measurement.seconds),
            cpu_seconds: of_a_step(|measurement| measurement.cpu_seconds),
        });
    }

    fn seconds(&self, stage: BreakdownStage) -> f64 {
        let rounds = self.rounds[stage as usize].iter().map(|round| round.seconds);
        median(rounds).expect("at least one round")
    }

    fn stages(&self) -> Vec<StageResults> {
        let whole = self.seconds(BreakdownStage::Whole);
        let added = added(BreakdownStage::ALL.map(|stage| self.seconds(stage)));
        let stages = BreakdownStage::ALL.into_iter().zip(added).map(|(stage, adds_seconds)| {
            let rounds = &self.rounds[stage as usize];
            StageResults {
                stage,
                seconds_median: self.seconds(stage),
                seconds: rounds.iter().map(|round| round.seconds).collect(),
                adds_seconds,
                adds_share: adds_seconds / whole,
                cpu_seconds_worker: mean(rounds.iter().map(|round| round.cpu_seconds)),
            }
        });
        stages.collect()
    }
}

impl Breakdown {
    pub(super) fn new(flags: &BreakdownFlags, trained: Vec<Trained>) -> Breakdown {
        let place = [
            format!("{} with {}", flags.data, flags.optimizer),
            count(flags.workers as usize, "worker"),
            format!("{} each", count(flags.batch as usize, "example")),
            format!("{} at the hub", count(flags.cores.into(), "core")),
            format!("chunks of {} over TCP", flags.chunk),
        ];
        Breakdown { rounds: flags.rounds, place: place.join(", "), trained }
    }

    pub(super) fn task(&self, network: usize, stage: BreakdownStage) -> TrainingTask {
        let Trained { train, warmup, .. } = &self.trained[network];
        let train = TrainSection { consistency: stage.consistency(), ..train.clone() };
        TrainingTask { stage, train, warmup: *warmup }
    }

    pub(super) fn headline(&self) -> String {
        let networks: Vec<String> = self
            .trained
            .iter()
            .map(|trained| {
                let bytes = megabytes(4 * trained.elements);
                format!("{} ({bytes}, {} steps)", trained.train.net, trained.steps - trained.warmup)
            })
            .collect();
        format!("{}\n{} in {} rounds", self.place, networks.join("; "), self.rounds)
    }

    pub(super) fn results(&self) -> Results {
        let train = &self.trained[0].train;
        let net = |trained: &Trained| NetResults {
            net: trained.train.net.to_string(),
            elements: trained.elements,
            steps: trained.steps - trained.warmup,
            stages: trained.stages(),
        };
        Results {
            data: train.data.to_string(),
            workers: train.workers(),
            cores: train.cores,
            batch: train.batch,
            optimizer: train.optimizer.to_string(),
            chunk_bytes: train.chunk_bytes.0,
            rounds: self.rounds,
            nets: self.trained.iter().map(net).collect(),
            version: env!("CARGO_PKG_VERSION"),
        }
    }

    pub(super) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY);
        table.set_header(["", "with", "a step", "adds", "of the step", "worker CPU"]);
        for trained in &self.trained {
            let mut name = trained.train.net.to_string();
            for stage in trained.stages() {
                table.add_row([
                    std::mem::take(&mut name),
                    stage.stage.adds().into(),
                    milliseconds(stage.seconds_median),
                    milliseconds(stage.adds_seconds),
                    format!("{:.0} %", 100.0 * stage.adds_share),
                    milliseconds(stage.cpu_seconds_worker),
                ]);
            }
        }
        for column in table.column_iter_mut().skip(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table.to_string()
    }

    pub(super) fn plot(&self) -> Bars {
        let bar = |trained: &Trained| {
            let part = |(colour, stage): (usize, StageResults)| Part {
                length: 1e3 * stage.adds_seconds,
                colour,
                text: format!("{:.0} %", 100.0 * stage.adds_share),
            };
            let whole = sorted(
                trained.rounds[BreakdownStage::Whole as usize].iter().map(|round| 1e3 * round.seconds),
            );
            Bar {
                name: trained.train.net.to_string(),
                parts: trained.stages().into_iter().enumerate().map(part).collect(),
                range: None,
                mark: None,
                note: format!("{} a step", milliseconds(median(whole).expect("at least one round") / 1e3)),
            }
        };
        let rounds = match self.rounds {
            1 => "one round".into(),
            rounds => format!("medians of {rounds} rounds; each part is what those before it could not hide"),
        };
        Bars {
            heading: Heading {
                title: "Where a training step's time goes".into(),
                notes: vec![self.place.clone(), rounds],
            },
            x_label: "milliseconds a step".into(),
            parts: BreakdownStage::ALL.into_iter().map(|stage| stage.adds().into()).collect(),
            line: None,
            marks: None,
            bars: self.trained.iter().map(bar).collect(),
        }
    }
}

/// The seconds that each stage adds to the one before it. A later stage does all that an earlier one does. If
/// it was measured as faster, the difference is noise, and its time bounds that of the earlier one.
fn added<const N: usize>(mut seconds: [f64; N]) -> [f64; N] {
    for stage in (1..N).rev() {
        seconds[stage - 1] = seconds[stage - 1].min(seconds[stage]);
    }
    let mut before = 0.0;
    seconds.map(|seconds| seconds - std::mem::replace(&mut before, seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_never_negative_and_come_to_the_whole() {
        assert_eq!(added([1.0, 3.0, 4.0, 4.0, 6.0]), [1.0, 2.0, 1.0, 0.0, 2.0]);
        assert_eq!(added([4.0, 5.0, 3.0, 3.5, 6.0]), [3.0, 0.0, 0.0, 0.5, 2.5]);
        assert_eq!(added([2.0, 1.0]), [1.0, 0.0]);
    }
}
