//! What several rounds of one measurement come to.

use super::conductor::{Measured, Timed};
use super::statistics::{mean, quantile, sorted};

/// Medians and means over the iterations of one round, whose processes were started for it.
#[derive(Clone, Copy)]
pub(super) struct Round {
    pub(super) seconds: f64,
    /// None without `--raw`.
    pub(super) raw_seconds: Option<f64>,
    pub(super) cpu_seconds_worker: f64,
    pub(super) cpu_seconds_hub: f64,
}

impl Round {
    pub(super) fn of(measured: &Measured) -> Round {
        let seconds = |turns: &[Timed]| median(turns.iter().map(|turn| turn.seconds));
        let exchanges = &measured.exchanges;
        Round {
            seconds: seconds(exchanges).expect("at least one iteration"),
            raw_seconds: seconds(&measured.raw),
            cpu_seconds_worker: mean(exchanges.iter().map(|turn| turn.cpu_seconds_worker)),
            cpu_seconds_hub: mean(exchanges.iter().map(|turn| turn.cpu_seconds_hub)),
        }
    }
}

/// None of nothing.
pub(super) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let values = sorted(values);
    (!values.is_empty()).then(|| quantile(&values, 0.5))
}

/// Numbers from 0 on in the order of a round: every other round goes backwards, so that none always follows the same one.
pub(super) fn order(round: u32, count: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |number| if round.is_multiple_of(2) { number } else { count - 1 - number })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_other_round_goes_backwards() {
        assert_eq!(order(0, 3).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(order(1, 3).collect::<Vec<_>>(), [2, 1, 0]);
    }
}
