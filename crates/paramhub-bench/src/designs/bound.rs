//! The bound with which the measured time of a step is compared: the time that the step would take if nothing
//! but the computation and the collectives took time, and the collectives ran one after the other.

use super::scenario::Design;
use crate::profile::Passes;

/// The number of steps that are left out at the beginning, and of those whose mean is then taken. With concom,
/// times may repeat in a pattern of several steps, so the mean is approximate.
const STEPS_TO_SETTLE: usize = 8;

/// The properties of a step on which the bound depends.
pub(super) struct Model<'a> {
    pub(super) design: Design,
    /// The keys in the order in which a step pushes and pulls them.
    pub(super) order: &'a [usize],
    /// The passes of each layer, front layers first.
    pub(super) passes: &'a [Passes],
    /// The layer of each key.
    pub(super) layers: &'a [usize],
    /// The seconds that each key's collective takes if nothing else runs. For a hub: the key's share, by its
    /// bytes, of the seconds in which all keys are exchanged together.
    pub(super) collectives: &'a [f64],
    /// For concom: the seconds that a barrier takes.
    pub(super) barrier: f64,
    /// For concom: the number of keys that are pushed between two barriers.
    pub(super) outstanding: usize,
}

/// The times that a simulated run of steps has reached, in seconds since its beginning.
#[derive(Default)]
struct SimulatedRun {
    /// The time at which the thread that pushes is free.
    caller_free: f64,
    /// The time at which the device that computes the passes is free.
    device_free: f64,
    /// The time at which the link, which carries one collective at a time, is free.
    link_free: f64,
    /// For concom: the times at which those sums arrive for which the next barrier waits.
    outstanding_arrivals: Vec<f64>,
}

impl Model<'_> {
    /// The seconds of a step in a run of many steps.
    ///
    /// The simulation follows the rules of the designs in `paramhub_collective::kvstore`. Funnel's caller
    /// waits for each sum before it pushes the next key. Concom's caller waits for all outstanding sums and a
    /// barrier. Depcha's chain runs the collectives in the order of the pulls. The next step begins once the
    /// caller has pushed all keys of this one. A hub sends the front-most key whose gradient is ready; a key
    /// that it interrupts for another continues later where it stopped.
    pub(super) fn step_seconds(&self) -> f64 {
        let mut run = SimulatedRun::default();
        let mut arrived = vec![0.0_f64; self.collectives.len()];
        let mut ends = [0.0; 2 * STEPS_TO_SETTLE];
        for end in &mut ends {
            let gradients = self.compute(&mut run, &arrived);
            *end = run.device_free;
            match self.design {
                Design::Hub => arrived = self.by_priority(&gradients),
                _ => self.order.iter().for_each(|&key| {
                    arrived[key] = self.exchange(&mut run, gradients[key], self.collectives[key]);
                }),
            }
        }
        (ends[2 * STEPS_TO_SETTLE - 1] - ends[STEPS_TO_SETTLE - 1]) / STEPS_TO_SETTLE as f64
    }

    /// Computes both passes of a step. Each layer's forward pass begins once the layer's parameters have
    /// `arrived`. Returns the time at which each key's gradient is ready.
    fn compute(&self, run: &mut SimulatedRun, arrived: &[f64]) -> Vec<f64> {
        let mut ready = vec![run.caller_free; self.passes.len()];
        for (&layer, &arrived) in self.layers.iter().zip(arrived) {
            ready[layer] = ready[layer].max(arrived);
        }
        for (passes, ready) in self.passes.iter().zip(ready) {
            run.device_free = run.device_free.max(ready) + passes.forward_seconds;
        }
        let mut made = vec![0.0; self.passes.len()];
        for (passes, made) in self.passes.iter().zip(&mut made).rev() {
            run.device_free += passes.backward_seconds;
            *made = run.device_free;
        }
        self.layers.iter().map(|&layer| made[layer]).collect()
    }

    /// Exchanges a key whose gradient is ready at the time `gradient`, by a collective that takes this many
    /// `seconds`. Returns the time at which the key's sum arrives. It does not serve a hub, which does not
    /// send keys in the order of the pushes: see `by_priority`.
    fn exchange(&self, run: &mut SimulatedRun, gradient: f64, seconds: f64) -> f64 {
        match self.design {
            Design::Funnel => {
                run.caller_free = run.caller_free.max(gradient) + seconds;
                run.caller_free
            }
            Design::ConCom => {
                if run.outstanding_arrivals.len() == self.outstanding {
                    run.caller_free =
                        run.outstanding_arrivals.drain(..).fold(run.caller_free, f64::max) + self.barrier;
                }
                run.caller_free = run.caller_free.max(gradient);
                run.link_free = run.link_free.max(run.caller_free) + seconds;
                run.outstanding_arrivals.push(run.link_free);
                run.link_free
            }
            Design::DepCha | Design::Hub => {
                run.link_free = run.link_free.max(gradient) + seconds;
                run.link_free
            }
        }
    }

    /// Returns the time at which each key's sum arrives from a hub: keys of front layers overtake those of
    /// the layers behind. `gradients` has the time at which each key's gradient is ready.
    fn by_priority(&self, gradients: &[f64]) -> Vec<f64> {
        let mut seconds_left = self.collectives.to_vec();
        let mut arrived: Vec<Option<f64>> = vec![None; seconds_left.len()];
        let mut now = gradients.iter().copied().fold(f64::INFINITY, f64::min);
        while let Some(next) = (0..seconds_left.len())
            .filter(|&key| arrived[key].is_none())
            .map(|key| gradients[key])
            .reduce(f64::min)
        {
            now = now.max(next);
            let front = (0..seconds_left.len()).find(|&key| arrived[key].is_none() && gradients[key] <= now);
            let front = front.expect("the next is there");
            // The key is sent until it has arrived, or until the gradient of a key in front of it is ready.
            let overtaken =
                gradients[..front].iter().copied().filter(|&at| at > now).fold(f64::INFINITY, f64::min);
            if now + seconds_left[front] <= overtaken {
                now += seconds_left[front];
                arrived[front] = Some(now);
            } else {
                seconds_left[front] -= overtaken - now;
                now = overtaken;
            }
        }
        arrived.into_iter().map(Option::unwrap_or_default).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::designs::scenario::KeyOrder;

    /// Three layers of one key, which compute for 1 and 2 seconds each.
    const EVEN: [Passes; 3] = [Passes { forward_seconds: 1.0, backward_seconds: 2.0 }; 3];

    fn step(design: Design, order: KeyOrder, collectives: [f64; 3]) -> f64 {
        // The last key has half of the bytes, so that it alone is a back key.
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
        // 9 seconds of computation, and then all collectives.
        assert_near(step(Design::Funnel, order, [1.0; 3]), 12.0);
        // The last two collectives are hidden behind the forward passes of the layers in front of theirs.
        assert_near(step(Design::DepCha, order, [1.0; 3]), 10.0);
        assert_near(step(Design::DepCha, order, [2.0; 3]), 9.0 + 2.0 + 2.0);
        // The caller waits for two keys and a barrier. In one step it waits for the first two, and the third
        // is then outstanding; in the next step it waits for that one and the first key.
        assert_near(step(Design::ConCom, order, [1.0; 3]), 9.0 + (2.0 + 0.5 + 1.0 + 0.5) / 2.0);
    }

    #[test]
    fn last_first_collectives_run_beside_the_backward_pass_and_the_first_layer_waits_for_all() {
        let order = KeyOrder::LastFirst;
        for design in [Design::Funnel, Design::DepCha] {
            assert_near(step(design, order, [1.0; 3]), 10.0);
            // The collectives begin with the first gradient, 5 seconds into the step.
            assert_near(step(design, order, [3.0; 3]), 5.0 + 9.0);
        }
        assert_near(step(Design::DepCha, order, [0.0; 3]), 9.0);
    }

    #[test]
    fn both_passes_hide_collectives_if_the_back_is_sent_before_the_front() {
        let order = KeyOrder::BackThenFront;
        // Key 2 travels beside the backward passes of layers 1 and 0, and key 1 beside the forward pass of
        // layer 0.
        assert_near(step(Design::DepCha, order, [2.0, 2.0, 4.0]), 12.0);
        assert_near(step(Design::DepCha, KeyOrder::LastFirst, [2.0, 2.0, 4.0]), 13.0);
        // A caller that waits for the sums pushes the next step as late as before.
        assert_near(step(Design::Funnel, order, [2.0, 2.0, 4.0]), 13.0);
    }

    #[test]
    fn a_hub_sends_front_keys_first_whatever_the_order() {
        for order in [KeyOrder::FrontFirst, KeyOrder::LastFirst, KeyOrder::BackThenFront] {
            // The last key is overtaken by both others when their gradients come. It is there 2 seconds after
            // the backward pass.
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
