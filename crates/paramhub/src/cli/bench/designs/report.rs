//! What the designs come to, as a table and as JSON.

use comfy_table::{Table, presets};
use serde::{Deserialize, Serialize};

use super::bound::Model;
use super::conduct::{Measured, Row};
use super::contestant::{Carrier, Contestant, Design, KeyOrder};
use super::part::{Alone, Performed, Score};
use crate::cli::bench::profile::Passes;
use crate::cli::bench::report::milliseconds;
use crate::cli::bench::rounds::median;
use crate::cli::bench::statistics::{mean, quantile, sorted};

/// What a result depends on, beside the machine.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Setting {
    pub(super) model: String,
    pub(super) batch: u64,
    pub(super) scale: u64,
    /// Of a rank's gradients.
    pub(super) bytes: u64,
    pub(super) keys: usize,
    /// Where the times of layers come from.
    pub(super) profile: String,
    /// Keys between two barriers of concom.
    pub(super) outstanding: usize,
    /// Examples of an epoch.
    pub(super) epoch_examples: u64,
    pub(super) steps: u32,
    pub(super) rounds: u32,
}

/// Written with `--json`. Seconds are of a step, but for an epoch's.
#[derive(Serialize, Deserialize)]
pub(in crate::cli::bench) struct Summary {
    pub(super) setting: Setting,
    pub(super) ranks: Vec<OfRanks>,
    version: String,
}

/// So many ranks.
#[derive(Serialize, Deserialize)]
pub(super) struct OfRanks {
    pub(super) ranks: u32,
    /// Times the score's.
    pub(super) stretch: f64,
    pub(super) compute_seconds: f64,
    pub(super) rows: Vec<Line>,
}

/// A contestant in one order of keys.
#[derive(Serialize, Deserialize)]
pub(super) struct Line {
    pub(super) design: Design,
    pub(super) over: Option<Carrier>,
    pub(super) order: KeyOrder,
    /// Of the slowest rank, in the median of the turns.
    pub(super) seconds: f64,
    pub(super) lowest: f64,
    pub(super) highest: f64,
    pub(super) epoch_seconds: f64,
    pub(super) epoch_lowest: f64,
    pub(super) epoch_highest: f64,
    /// All keys' collectives, one after the other, beside nothing.
    pub(super) alone_seconds: f64,
    /// If nothing took time but computation and one collective after the other, each as long as alone.
    pub(super) bound_seconds: f64,
    pub(super) epoch_bound_seconds: f64,
    /// Of the time with a key under way, the share in which something computed.
    pub(super) hidden_share: f64,
    /// Processor time of all ranks together.
    pub(super) cpu_seconds: f64,
    /// How much longer funnel takes over the same, in the same order, in the median of the rounds.
    pub(super) against_funnel: Option<f64>,
    /// The same with keys front first.
    pub(super) against_front_first: Option<f64>,
}

impl Summary {
    pub(super) fn new(setting: Setting) -> Summary {
        Summary { setting, ranks: Vec::new(), version: env!("CARGO_PKG_VERSION").to_owned() }
    }
}

impl OfRanks {
    pub(super) fn new(
        setting: &Setting,
        score: &Score,
        contestants: &[Contestant],
        ranks: u32,
        measured: &Measured,
    ) -> OfRanks {
        let Measured { stretch, rows, .. } = measured;
        let passes = score.layers.iter().map(|layer| layer.passes.times(*stretch));
        let passes: Vec<Passes> = passes.collect();
        let epoch_steps = setting.epoch_examples as f64 / (setting.batch * u64::from(ranks)) as f64;
        let lines = rows.iter().map(|row| {
            let contestant = contestants[row.contestant];
            let seconds = sorted(row.turns.iter().map(|turn| slowest(turn)));
            let (step, lowest, highest) = (quantile(&seconds, 0.5), seconds[0], seconds[seconds.len() - 1]);
            let same = rows.iter().filter(|other| other.contestant == row.contestant);
            let alone = middle(same.flat_map(|row| &row.alone));
            let bound = bound(contestant.design, row.order, &passes, score, &alone, setting.outstanding);
            let ranks_of = |value: fn(&Performed) -> f64| mean(row.turns.iter().flatten().map(value));
            let funnel = |order: KeyOrder| {
                let is_funnel = |other: &&Row| {
                    let of = contestants[other.contestant];
                    of.design == Design::Funnel && of.over == contestant.over && other.order == order
                };
                let funnel = rows.iter().find(is_funnel)?;
                let turns = funnel.turns.iter().zip(&row.turns);
                median(turns.map(|(funnel, own)| slowest(funnel) / slowest(own)))
            };
            Line {
                design: contestant.design,
                over: contestant.over,
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
        let compute_seconds = passes.iter().map(|passes| passes.forward + passes.backward).sum();
        OfRanks { ranks, stretch: *stretch, compute_seconds, rows: lines.collect() }
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
            let contestant = Contestant { design: row.design, over: row.over };
            let times = |ratio: Option<f64>| ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default();
            table.add_row([
                contestant.label(),
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
    score: &Score,
    alone: &Alone,
    outstanding: usize,
) -> f64 {
    let mut layers = vec![0; alone.keys.len()];
    for (number, layer) in score.layers.iter().enumerate() {
        layer.keys.iter().for_each(|&key| layers[key as usize] = number);
    }
    let (collectives, barrier) = (&alone.keys, alone.barrier);
    let bytes: Vec<usize> =
        score.keys.keys().iter().map(|key| key.elements().unwrap_or(0) as usize).collect();
    let order = &order.keys(&bytes);
    Model { design, order, passes, layers: &layers, collectives, barrier, outstanding }.step_seconds()
}

/// Medians of the rounds.
fn middle<'a>(rounds: impl Iterator<Item = &'a Alone>) -> Alone {
    let rounds: Vec<&Alone> = rounds.collect();
    let keys = 0..rounds.first().map_or(0, |alone| alone.keys.len());
    let of_key = |key: usize| median(rounds.iter().map(|alone| alone.keys[key])).unwrap_or(0.0);
    let keys: Vec<f64> = keys.map(of_key).collect();
    // Medians of keys add up to less than the median of all.
    let whole = median(rounds.iter().map(|alone| alone.seconds())).unwrap_or(0.0);
    let sum: f64 = keys.iter().sum();
    let factor = if sum > 0.0 { whole / sum } else { 1.0 };
    Alone {
        keys: keys.into_iter().map(|seconds| seconds * factor).collect(),
        barrier: median(rounds.iter().map(|alone| alone.barrier)).unwrap_or(0.0),
    }
}

fn slowest(turn: &[Performed]) -> f64 {
    turn.iter().map(|rank| rank.seconds).fold(0.0, f64::max)
}

/// 0 of nothing.
pub(super) fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_alone_add_up_to_the_median_of_the_rounds() {
        let rounds = [[1.0, 5.0], [2.0, 2.0], [6.0, 1.0]];
        let rounds = rounds.map(|keys| Alone { keys: keys.into(), barrier: keys[0] });
        let middle = middle(rounds.iter());
        assert_eq!(middle.barrier, 2.0);
        // 6 in the middle of 6, 4 and 7, where the keys' medians are 2 and 2.
        assert_eq!(middle.keys, [3.0, 3.0]);
        assert_eq!(share(1.0, 0.0), 0.0);
    }
}
