//! The results of the designs, as a table and as JSON.

use comfy_table::{Table, presets};
use paramhub_harness::exchange::report::milliseconds;
use paramhub_harness::exchange::statistics::{mean, quantile, sorted};
use serde::{Deserialize, Serialize};

use super::bound::Model;
use super::driver::{Measured, Row};
use super::messages::{IsolatedTimes, TurnTimes, Workload};
use super::scenario::{Carrier, Design, KeyOrder, Scenario};
use crate::profile::Passes;
use crate::rounds::median;

/// The settings on which a result depends, beside the machine.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Setting {
    pub(super) model: String,
    pub(super) batch: u64,
    pub(super) scale: u64,
    /// Bytes of a rank's gradients.
    pub(super) bytes: u64,
    pub(super) keys: usize,
    /// The source of the layers' times.
    pub(super) profile: String,
    /// Keys between two barriers of concom.
    pub(super) outstanding: usize,
    /// Examples in an epoch.
    pub(super) epoch_examples: u64,
    pub(super) steps: u32,
    pub(super) rounds: u32,
}

/// Written with `--json`. Seconds are those of a step, except an epoch's.
#[derive(Serialize, Deserialize)]
pub(crate) struct Summary {
    pub(super) setting: Setting,
    pub(super) ranks: Vec<RanksResults>,
    version: String,
}

/// The results with one number of ranks.
#[derive(Serialize, Deserialize)]
pub(super) struct RanksResults {
    pub(super) ranks: u32,
    /// The factor by which the workload's times were multiplied.
    pub(super) stretch: f64,
    pub(super) compute_seconds: f64,
    pub(super) rows: Vec<Line>,
}

/// A scenario in one order of keys.
#[derive(Serialize, Deserialize)]
pub(super) struct Line {
    pub(super) design: Design,
    pub(super) over: Option<Carrier>,
    pub(super) order: KeyOrder,
    /// Seconds of the slowest rank, in the median of the turns.
    pub(super) seconds: f64,
    pub(super) lowest: f64,
    pub(super) highest: f64,
    pub(super) epoch_seconds: f64,
    pub(super) epoch_lowest: f64,
    pub(super) epoch_highest: f64,
    /// Seconds of all keys' collectives, one after the other, while nothing else runs.
    pub(super) alone_seconds: f64,
    /// Seconds if only computation and one collective after the other took time, each as long as alone.
    pub(super) bound_seconds: f64,
    pub(super) epoch_bound_seconds: f64,
    /// The share of the time with a key under way in which something computed.
    pub(super) hidden_share: f64,
    /// Processor time of all ranks together.
    pub(super) cpu_seconds: f64,
    /// Funnel's time by this one's, with the same carrier and order, in the median of the rounds.
    pub(super) against_funnel: Option<f64>,
    /// The time of funnel with keys front first by this one's, with the same carrier, in the median of the
    /// rounds.
    pub(super) against_front_first: Option<f64>,
}

impl Summary {
    pub(super) fn new(setting: Setting) -> Summary {
        Summary { setting, ranks: Vec::new(), version: env!("CARGO_PKG_VERSION").to_owned() }
    }
}

impl RanksResults {
    pub(super) fn new(
        setting: &Setting,
        workload: &Workload,
        scenarios: &[Scenario],
        ranks: u32,
        measured: &Measured,
    ) -> RanksResults {
        let Measured { stretch, rows, .. } = measured;
        let passes = workload.layers.iter().map(|layer| layer.passes.scaled(*stretch));
        let passes: Vec<Passes> = passes.collect();
        let epoch_steps = setting.epoch_examples as f64 / (setting.batch * u64::from(ranks)) as f64;
        let lines = rows.iter().map(|row| {
            let scenario = scenarios[row.scenario];
            let seconds = sorted(row.turns.iter().map(|turn| slowest(turn)));
            let (step, lowest, highest) = (quantile(&seconds, 0.5), seconds[0], seconds[seconds.len() - 1]);
            let same = rows.iter().filter(|other| other.scenario == row.scenario);
            let alone = middle(same.flat_map(|row| &row.alone));
            let bound = bound(scenario.design, row.order, &passes, workload, &alone, setting.outstanding);
            let ranks_of = |value: fn(&TurnTimes) -> f64| mean(row.turns.iter().flatten().map(value));
            let funnel = |order: KeyOrder| {
                let is_funnel = |other: &&Row| {
                    let of = scenarios[other.scenario];
                    of.design == Design::Funnel && of.over == scenario.over && other.order == order
                };
                let funnel = rows.iter().find(is_funnel)?;
                let turns = funnel.turns.iter().zip(&row.turns);
                median(turns.map(|(funnel, own)| slowest(funnel) / slowest(own)))
            };
            Line {
                design: scenario.design,
                over: scenario.over,
                order: row.order,
                seconds: step,
                lowest,
                highest,
                epoch_seconds: step * epoch_steps,
                epoch_lowest: lowest * epoch_steps,
                epoch_highest: highest * epoch_steps,
                alone_seconds: alone.seconds(),
                bound_seconds: bound,
                epoch_bound_seconds: bound * epoch_steps,
                hidden_share: share(ranks_of(|turn| turn.hidden), ranks_of(|turn| turn.in_flight)),
                cpu_seconds: ranks_of(|turn| turn.cpu) * f64::from(ranks),
                against_funnel: funnel(row.order),
                against_front_first: funnel(KeyOrder::FrontFirst),
            }
        });
        let compute_seconds =
            passes.iter().map(|passes| passes.forward_seconds + passes.backward_seconds).sum();
        RanksResults { ranks, stretch: *stretch, compute_seconds, rows: lines.collect() }
    }

    pub(super) fn headline(&self) -> String {
        format!("{} ranks, {} of computation a step", self.ranks, milliseconds(self.compute_seconds))
    }

    pub(super) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY);
        table.set_header([
            "",
            "keys",
            "step",
            "lowest",
            "highest",
            "epoch",
            "alone",
            "hidden",
            "bound",
            "of bound",
            "x funnel",
            "x funnel, front first",
            "cpu",
        ]);
        for row in &self.rows {
            let scenario = Scenario { design: row.design, over: row.over };
            let times = |ratio: Option<f64>| ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default();
            table.add_row([
                scenario.label(),
                row.order.label().to_owned(),
                milliseconds(row.seconds),
                milliseconds(row.lowest),
                milliseconds(row.highest),
                format!("{:.0} s", row.epoch_seconds),
                milliseconds(row.alone_seconds),
                format!("{:.0} %", 100.0 * row.hidden_share),
                milliseconds(row.bound_seconds),
                format!("{:.2}", row.seconds / row.bound_seconds),
                times(row.against_funnel),
                times(row.against_front_first),
                milliseconds(row.cpu_seconds),
            ]);
        }
        table.to_string()
    }
}

fn bound(
    design: Design,
    order: KeyOrder,
    passes: &[Passes],
    workload: &Workload,
    alone: &IsolatedTimes,
    outstanding: usize,
) -> f64 {
    let mut layers = vec![0; alone.keys.len()];
    for (number, layer) in workload.layers.iter().enumerate() {
        layer.keys.iter().for_each(|&key| layers[key as usize] = number);
    }
    let (collectives, barrier) = (&alone.keys, alone.barrier);
    let bytes: Vec<usize> =
        workload.keys.keys().iter().map(|key| key.elements().unwrap_or(0) as usize).collect();
    let order = &order.keys(&bytes);
    Model { design, order, passes, layers: &layers, collectives, barrier, outstanding }.step_seconds()
}

/// The medians of the rounds.
fn middle<'a>(rounds: impl Iterator<Item = &'a IsolatedTimes>) -> IsolatedTimes {
    let rounds: Vec<&IsolatedTimes> = rounds.collect();
    let keys = 0..rounds.first().map_or(0, |alone| alone.keys.len());
    let of_key = |key: usize| median(rounds.iter().map(|alone| alone.keys[key])).unwrap_or(0.0);
    let keys: Vec<f64> = keys.map(of_key).collect();
    // The sum of the keys' medians differs from the median of the sums, so they are scaled.
    let whole = median(rounds.iter().map(|alone| alone.seconds())).unwrap_or(0.0);
    let sum: f64 = keys.iter().sum();
    let factor = if sum > 0.0 { whole / sum } else { 1.0 };
    IsolatedTimes {
        keys: keys.into_iter().map(|seconds| seconds * factor).collect(),
        barrier: median(rounds.iter().map(|alone| alone.barrier)).unwrap_or(0.0),
    }
}

fn slowest(turn: &[TurnTimes]) -> f64 {
    turn.iter().map(|rank| rank.seconds).fold(0.0, f64::max)
}

/// The share; 0 if the whole is 0.
pub(super) fn share(rank_spec: f64, whole: f64) -> f64 {
    if whole > 0.0 { rank_spec / whole } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_alone_add_up_to_the_median_of_the_rounds() {
        let rounds = [[1.0, 5.0], [2.0, 2.0], [6.0, 1.0]];
        let rounds = rounds.map(|keys| IsolatedTimes { keys: keys.into(), barrier: keys[0] });
        let middle = middle(rounds.iter());
        assert_eq!(middle.barrier, 2.0);
        // The median of 6, 4 and 7 is 6, while the keys' medians are 2 and 2.
        assert_eq!(middle.keys, [3.0, 3.0]);
        assert_eq!(share(1.0, 0.0), 0.0);
    }
}
