//! The time of a step if only computation and one link per host took time.

use crate::profile::Passes;

/// Steps after which the time of a step no longer changes.
const SETTLED: usize = 8;

/// Seconds of a step, once steps follow one another. `transfers` are the seconds for which each layer uses
/// the link of the busiest host, front layers first. Layers go over the link one after another, in the order
/// of backpropagation, and a layer's parameters are there when its transfer ends. Without `overlaps` layers
/// are sent when all have been computed, and the next step begins when all have come.
pub(super) fn step_seconds(passes: &[Passes], transfers: &[f64], overlaps: bool) -> f64 {
    let computing: f64 = passes.iter().map(|passes| passes.forward_seconds + passes.backward_seconds).sum();
    if !overlaps {
        return computing + transfers.iter().sum::<f64>();
    }
    let mut arrived = vec![0.0_f64; passes.len()];
    let (mut now, mut link) = (0.0_f64, 0.0_f64);
    let mut ends = [0.0; 2 * SETTLED];
    for end in &mut ends {
        for (passes, &arrived) in passes.iter().zip(&arrived) {
            now = now.max(arrived) + passes.forward_seconds;
        }
        for (layer, passes) in passes.iter().enumerate().rev() {
            now += passes.backward_seconds;
            link = link.max(now) + transfers[layer];
            arrived[layer] = link;
        }
        *end = now;
    }
    (ends[2 * SETTLED - 1] - ends[SETTLED - 1]) / SETTLED as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_near(left: f64, right: f64) {
        assert!((left - right).abs() < 1e-9, "{left} and {right}");
    }

    /// Three layers that compute for 3 and 6 seconds each.
    const EVEN: [Passes; 3] = [Passes { forward_seconds: 3.0, backward_seconds: 6.0 }; 3];

    #[test]
    fn times_without_overlap_add_up() {
        assert_near(step_seconds(&EVEN, &[1.0, 2.0, 4.0], false), 34.0);
    }

    #[test]
    fn a_transfer_that_fits_beside_computation_takes_no_time() {
        // The transfers of the last two layers have the 12 seconds of the backward passes that follow that of
        // the last layer.
        assert_near(step_seconds(&EVEN, &[0.0, 1.0, 11.0], true), 27.0);
        // A layer waits for those before it on the link, and the next step waits for the first layer.
        assert_near(step_seconds(&EVEN, &[0.0, 1.0, 12.0], true), 28.0);
        assert_near(step_seconds(&EVEN, &[2.0, 1.0, 1.0], true), 29.0);
        assert_near(step_seconds(&EVEN, &[0.0; 3], true), 27.0);
    }

    #[test]
    fn a_link_that_is_always_busy_sets_the_pace() {
        // The link is always busy, except for the pauses in which no layer is ready: from the first forward
        // pass until the first backward pass has ended.
        let step = step_seconds(&EVEN, &[40.0, 40.0, 40.0], true);
        assert!((120.0..=120.0 + 27.0).contains(&step), "{step}");
        // This is the time from the arrival of the first layer's parameters to the next gradient of the last:
        // three forward passes and one backward pass.
        assert_near(step, 120.0 + 9.0 + 6.0);
    }
}
