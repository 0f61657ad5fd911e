//! How long a step takes where nothing takes time but computation and one collective after the other.

use super::contestant::Design;
use crate::cli::bench::profile::Passes;

/// Steps after which the time of one has settled.
const SETTLED: usize = 8;

/// A step, as far as a bound knows it.
pub(super) struct Model<'a> {
    pub(super) design: Design,
    /// Of the keys.
    pub(super) order: &'a [usize],
    /// Of each layer, front layers first.
    pub(super) passes: &'a [Passes],
    /// Of each key, its layer.
    pub(super) layers: &'a [usize],
    /// Seconds of each key's collective, by itself.
    pub(super) collectives: &'a [f64],
    /// Of concom: seconds of a barrier, and keys between two.
    pub(super) barrier: f64,
    pub(super) outstanding: usize,
}

/// Where a run of steps has come to.
#[derive(Default)]
struct Run {
    /// Who pushes.
    caller: f64,
    /// What computes.
    stream: f64,
    /// What carries one collective at a time.
    link: f64,
    /// Of concom: sums that are to come before the next barrier.
    outstanding: Vec<f64>,
}

impl Model<'_> {
    /// Seconds of a step once they follow one another.
    ///
    /// All rules of the designs hold: funnel's caller waits for each sum before it pushes the next key, concom's for all that is
    /// outstanding and a barrier, depcha's chain is in the order of the pulls, and the next step is pushed when all keys are.
    /// A hub sends the front-most key first of all that are there, and goes on with a later one where it was when an earlier one came.
    pub(super) fn step_seconds(&self) -> f64 {
        let mut run = Run::default();
        let mut arrived = vec![0.0_f64; self.collectives.len()];
        let mut ends = [0.0; 2 * SETTLED];
        for end in &mut ends {
            let gradients = self.compute(&mut run, &arrived);
            *end = run.stream;
            match self.design {
                Design::Hub => arrived = self.by_priority(&gradients),
                _ => self.order.iter().for_each(|&key| {
                    arrived[key] = self.exchange(&mut run, gradients[key], self.collectives[key]);
                }),
            }
        }
        (ends[2 * SETTLED - 1] - ends[SETTLED - 1]) / SETTLED as f64
    }

    /// Both passes, each layer's forward pass when its parameters are there; when each key's gradient is.
    fn compute(&self, run: &mut Run, arrived: &[f64]) -> Vec<f64> {
        let mut ready = vec![run.caller; self.passes.len()];
        for (&layer, &arrived) in self.layers.iter().zip(arrived) {
            ready[layer] = ready[layer].max(arrived);
        }
        for (passes, ready) in self.passes.iter().zip(ready) {
            run.stream = run.stream.max(ready) + passes.forward;
        }
        let mut made = vec![0.0; self.passes.len()];
        for (passes, made) in self.passes.iter().zip(&mut made).rev() {
            run.stream += passes.backward;
            *made = run.stream;
        }
        self.layers.iter().map(|&layer| made[layer]).collect()
    }

    /// When a key's sum is there.
    fn exchange(&self, run: &mut Run, gradient: f64, seconds: f64) -> f64 {
        match self.design {
            Design::Funnel => {
                run.caller = run.caller.max(gradient) + seconds;
                run.caller
            }
            Design::ConCom => {
                if run.outstanding.len() == self.outstanding {
                    run.caller = run.outstanding.drain(..).fold(run.caller, f64::max) + self.barrier;
                }
                run.caller = run.caller.max(gradient);
                run.link = run.link.max(run.caller) + seconds;
                run.outstanding.push(run.link);
                run.link
            }
            Design::DepCha | Design::Hub => {
                run.link = run.link.max(gradient) + seconds;
                run.link
            }
        }
    }

    /// When each key is there where front keys overtake.
    fn by_priority(&self, gradients: &[f64]) -> Vec<f64> {
        let mut left = self.collectives.to_vec();
        let mut arrived: Vec<Option<f64>> = vec![None; left.len()];
        let mut now = gradients.iter().copied().fold(f64::INFINITY, f64::min);
        while let Some(next) =
            (0..left.len()).filter(|&key| arrived[key].is_none()).map(|key| gradients[key]).reduce(f64::min)
        {
            now = now.max(next);
            let front = (0..left.len()).find(|&key| arrived[key].is_none() && gradients[key] <= now);
            let front = front.expect("the next is there");
            // Until it has arrived or one before it comes.
            let overtaken =
                gradients[..front].iter().copied().filter(|&at| at > now).fold(f64::INFINITY, f64::min);
            if now + left[front] <= overtaken {
                now += left[front];
                arrived[front] = Some(now);
            } else {
                left[front] -= overtaken - now;
                now = overtaken;
            }
        }
        arrived.into_iter().map(Option::unwrap_or_default).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::bench::designs::contestant::KeyOrder;

    /// Three layers of one key, which compute for 1 and 2 seconds each.
    const EVEN: [Passes; 3] = [Passes { forward: 1.0, backward: 2.0 }; 3];

    fn step(design: Design, order: KeyOrder, collectives: [f64; 3]) -> f64 {
        let (layers, order) = (&[0, 1, 2], &*order.keys(&[1, 1, 2]));
        Model {
            design,
            order,
            passes: &EVEN,
            layers,
            collectives: &collectives,
            barrier: 0.5,
            outstanding: 2,
        }
        .step_seconds()
    }

    fn assert_near(left: f64, right: f64) {
        assert!((left - right).abs() < 1e-9, "{left} and {right}");
    }

    #[test]
    fn front_first_everything_waits_for_the_whole_backward_pass() {
        let order = KeyOrder::FrontFirst;
        // 9 seconds of computation, then all of the collectives.
        assert_near(step(Design::Funnel, order, [1.0; 3]), 12.0);
        // The last two collectives are hidden behind the forward passes of the layers in front of theirs.
        assert_near(step(Design::DepCha, order, [1.0; 3]), 10.0);
        assert_near(step(Design::DepCha, order, [2.0; 3]), 9.0 + 2.0 + 2.0);
        // Who pushes waits for two keys and a barrier: for the first two of a step, whose third is then outstanding, and in the next
        // step for that one and the first key.
        assert_near(step(Design::ConCom, order, [1.0; 3]), 9.0 + (2.0 + 0.5 + 1.0 + 0.5) / 2.0);
    }

    #[test]
    fn last_first_collectives_run_beside_the_backward_pass_and_the_first_layer_waits_for_all() {
        let order = KeyOrder::LastFirst;
        for design in [Design::Funnel, Design::DepCha] {
            assert_near(step(design, order, [1.0; 3]), 10.0);
            // From the first gradient, 5 seconds into the step, on.
            assert_near(step(design, order, [3.0; 3]), 5.0 + 9.0);
        }
        assert_near(step(Design::DepCha, order, [0.0; 3]), 9.0);
    }

    #[test]
    fn with_the_back_sent_before_the_front_both_passes_hide_collectives() {
        let order = KeyOrder::BackThenFront;
        // Key 2 beside the backward passes of layers 1 and 0, and key 1 beside the forward pass of layer 0.
        assert_near(step(Design::DepCha, order, [2.0, 2.0, 4.0]), 12.0);
        assert_near(step(Design::DepCha, KeyOrder::LastFirst, [2.0, 2.0, 4.0]), 13.0);
        // Who waits for the sums pushes the next step as late as ever.
        assert_near(step(Design::Funnel, order, [2.0, 2.0, 4.0]), 13.0);
    }

    #[test]
    fn a_hub_sends_front_keys_first_whatever_the_order() {
        for order in [KeyOrder::FrontFirst, KeyOrder::LastFirst, KeyOrder::BackThenFront] {
            // The last key, overtaken by both others when their gradients come, is there 2 seconds after the backward pass.
            let late = [1.0, 1.0, 5.0];
            assert_near(step(Design::Hub, order, late), 10.0);
            assert!(step(Design::DepCha, KeyOrder::LastFirst, late) > 11.0);
            assert_near(step(Design::Hub, order, [0.0; 3]), 9.0);
        }
    }

    #[test]
    fn no_design_is_quicker_than_computation_or_collectives() {
        for design in [Design::Funnel, Design::ConCom, Design::DepCha, Design::Hub] {
            for order in [KeyOrder::FrontFirst, KeyOrder::LastFirst, KeyOrder::BackThenFront] {
                for collectives in [[0.1, 0.2, 0.3], [3.0, 0.0, 1.0], [9.0, 9.0, 9.0]] {
                    let seconds = step(design, order, collectives);
                    assert!(seconds >= 9.0 - 1e-9 && seconds >= collectives.iter().sum::<f64>() - 1e-9);
                }
            }
        }
    }
}
