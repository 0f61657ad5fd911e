//! The results of several rounds of one measurement.

use paramhub_harness::exchange::driver::{Measured, Timed};
use paramhub_harness::exchange::statistics::{mean, quantile, sorted};

/// Medians and means over the iterations of one round. Each round has new processes.
#[derive(Clone, Copy)]
pub(super) struct Round {
    pub(super) seconds: f64,
    /// `None` without `--raw`.
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

/// The median; `None` if there are no values.
pub(super) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let values = sorted(values);
    (!values.is_empty()).then(|| quantile(&values, 0.5))
}

/// The numbers from 0 on in the order of a round. Every other round goes backwards, so that none always
/// follows the same one.
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
