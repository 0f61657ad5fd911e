//! The bound with which the measured time of a step is compared: the time that the step would take if only
//! the computation and one link per host took time.

use crate::profile::Passes;

/// The number of steps after which the time of a step no longer changes.
const STEPS_TO_SETTLE: usize = 8;

/// Returns the seconds of a step in a run of many steps. `transfers` has the seconds for which each layer
/// keeps its busiest link busy; the bound counts these as one link. It and `passes` begin with the front layer, which the forward pass
/// computes first.
///
/// The link carries one layer at a time, in the order in which the backward pass computes the gradients. A
/// layer's parameters arrive when its transfer ends. If a system `overlaps`, a transfer begins as soon as the
/// layer's gradient and the link are ready, and a layer's next forward pass waits for its own parameters
/// only. Otherwise transfers begin after the whole backward pass, and the next step begins after all
/// transfers.
pub(super) fn step_seconds(passes: &[Passes], transfers: &[f64], overlaps: bool) -> f64 {
    let computing: f64 = passes.iter().map(|passes| passes.forward_seconds + passes.backward_seconds).sum();
    if !overlaps {
        return computing + transfers.iter().sum::<f64>();
    }
    let mut arrived = vec![0.0_f64; passes.len()];
    let (mut now, mut link_free) = (0.0_f64, 0.0_f64);
    let mut ends = [0.0; 2 * STEPS_TO_SETTLE];
    for end in &mut ends {
        for (passes, &arrived) in passes.iter().zip(&arrived) {
            now = now.max(arrived) + passes.forward_seconds;
        }
        for (layer, passes) in passes.iter().enumerate().rev() {
            now += passes.backward_seconds;
            link_free = link_free.max(now) + transfers[layer];
            arrived[layer] = link_free;
        }
        *end = now;
    }
    (ends[2 * STEPS_TO_SETTLE - 1] - ends[STEPS_TO_SETTLE - 1]) / STEPS_TO_SETTLE as f64
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
        // After the last layer's backward pass, those of the other two layers take 12 seconds. The transfers
        // of the last two layers fit into that time.
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
