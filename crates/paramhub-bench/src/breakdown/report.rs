//! The results of the benchmark, as a table, as JSON and as a plot. Each stage runs the same training with
//! one more part of a step than the stage before it, so the difference in time is that of the added part.

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

/// The measurements of all networks.
pub(super) struct Breakdown {
    rounds: u32,
    /// What all networks were measured with: the data, the optimizer, the workers, the hub's cores, the
    /// chunks.
    setup: String,
    pub(super) networks: Vec<MeasuredNetwork>,
}

/// One network and its measurements.
pub(super) struct MeasuredNetwork {
    pub(super) train: TrainSection,
    /// The elements of all parameters.
    elements: u64,
    /// All steps of a stage in a round, of which the first `warmup` do not count.
    steps: usize,
    warmup: usize,
    /// The rounds of each stage, in the order of [`BreakdownStage::ALL`].
    rounds: [Vec<Round>; BreakdownStage::ALL.len()],
}

/// What a step took in one round of a stage: means over workers and steps.
#[derive(Clone, Copy)]
struct Round {
    seconds: f64,
    cpu_seconds: f64,
}

/// The contents of the file of `--json`. All times are those of one step.
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
    /// The share of `adds_seconds` in the time of the whole step.
    adds_share: f64,
    /// The processor time of one worker: the mean over workers, steps and rounds.
    cpu_seconds_worker: f64,
}

impl MeasuredNetwork {
    pub(super) fn new(train: TrainSection, elements: u64, steps: usize, warmup: usize) -> MeasuredNetwork {
        MeasuredNetwork { train, elements, steps, warmup, rounds: Default::default() }
    }

    /// Adds a round of a stage: the measurements of its workers.
    pub(super) fn add(&mut self, stage: BreakdownStage, workers: &[TrainingMeasurement]) {
        let per_step = |value: fn(&TrainingMeasurement) -> f64| {
            mean(workers.iter().map(|measurement| value(measurement) / measurement.steps as f64))
        };
        self.rounds[stage as usize].push(Round {
            seconds: per_step(|measurement| measurement.seconds),
            cpu_seconds: per_step(|measurement| measurement.cpu_seconds),
        });
    }

    /// The median over the rounds of a stage's seconds.
    fn seconds(&self, stage: BreakdownStage) -> f64 {
        let rounds = self.rounds[stage as usize].iter().map(|round| round.seconds);
        median(rounds).expect("at least one round")
    }

    fn stages(&self) -> Vec<StageResults> {
        let whole = self.seconds(BreakdownStage::Whole);
        let added = added_seconds(BreakdownStage::ALL.map(|stage| self.seconds(stage)));
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
    pub(super) fn new(flags: &BreakdownFlags, networks: Vec<MeasuredNetwork>) -> Breakdown {
        let setup = [
            format!("{} with {}", flags.data, flags.optimizer),
            count(flags.workers as usize, "worker"),
            format!("{} each", count(flags.batch as usize, "example")),
            format!("{} at the hub", count(flags.cores.into(), "core")),
            format!("chunks of {} over TCP", flags.chunk),
        ];
        Breakdown { rounds: flags.rounds, setup: setup.join(", "), networks }
    }

    /// What the processes have to do for a stage of the network with this index.
    pub(super) fn task(&self, network: usize, stage: BreakdownStage) -> TrainingTask {
        let MeasuredNetwork { train, warmup, .. } = &self.networks[network];
        let train = TrainSection { consistency: stage.consistency(), ..train.clone() };
        TrainingTask { stage, train, warmup: *warmup }
    }

    /// The text that is printed before the measurements.
    pub(super) fn headline(&self) -> String {
        let networks: Vec<String> = self
            .networks
            .iter()
            .map(|network| {
                let bytes = megabytes(4 * network.elements);
                format!("{} ({bytes}, {} steps)", network.train.net, network.steps - network.warmup)
            })
            .collect();
        format!("{}\n{} in {} rounds", self.setup, networks.join("; "), self.rounds)
    }

    pub(super) fn results(&self) -> Results {
        let train = &self.networks[0].train;
        let net = |network: &MeasuredNetwork| NetResults {
            net: network.train.net.to_string(),
            elements: network.elements,
            steps: network.steps - network.warmup,
            stages: network.stages(),
        };
        Results {
            data: train.data.to_string(),
            workers: train.workers(),
            cores: train.cores,
            batch: train.batch,
            optimizer: train.optimizer.to_string(),
            chunk_bytes: train.chunk_bytes.0,
            rounds: self.rounds,
            nets: self.networks.iter().map(net).collect(),
            version: env!("CARGO_PKG_VERSION"),
        }
    }

    pub(super) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY);
        table.set_header(["", "with", "a step", "adds", "of the step", "worker CPU"]);
        for network in &self.networks {
            let mut name = network.train.net.to_string();
            for stage in network.stages() {
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
        let bar = |network: &MeasuredNetwork| {
            let part = |(colour, stage): (usize, StageResults)| Part {
                length: 1e3 * stage.adds_seconds,
                colour,
                text: format!("{:.0} %", 100.0 * stage.adds_share),
            };
            let whole = sorted(
                network.rounds[BreakdownStage::Whole as usize].iter().map(|round| 1e3 * round.seconds),
            );
            Bar {
                name: network.train.net.to_string(),
                parts: network.stages().into_iter().enumerate().map(part).collect(),
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
                notes: vec![self.setup.clone(), rounds],
            },
            x_label: "milliseconds a step".into(),
            parts: BreakdownStage::ALL.into_iter().map(|stage| stage.adds().into()).collect(),
            line: None,
            marks: None,
            bars: self.networks.iter().map(bar).collect(),
        }
    }
}

/// The seconds that each stage adds to the one before it. A later stage does all that an earlier one does. If
/// the later one was measured as faster, the difference is noise, and the earlier one counts as no slower
/// than the later one.
fn added_seconds<const N: usize>(mut seconds: [f64; N]) -> [f64; N] {
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
        assert_eq!(added_seconds([1.0, 3.0, 4.0, 4.0, 6.0]), [1.0, 2.0, 1.0, 0.0, 2.0]);
        assert_eq!(added_seconds([4.0, 5.0, 3.0, 3.5, 6.0]), [3.0, 0.0, 0.0, 0.5, 2.5]);
        assert_eq!(added_seconds([2.0, 1.0]), [1.0, 0.0]);
    }
}
