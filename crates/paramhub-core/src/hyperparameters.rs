//! An optimizer's numbers, and from which step on they hold.

use serde::{Deserialize, Serialize};

/// The numbers of every built-in optimizer, under torch.optim's names and defaults; each optimizer reads its own.
///
/// They are f64 because torch.optim computes scalar coefficients in double precision before they meet f32 tensors.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Hyperparameters {
    /// Step size.
    pub learning_rate: f64,
    /// SGD: share of the velocity kept; 0 turns it off.
    pub momentum: f64,
    /// SGD: share of the gradient kept out of the velocity.
    pub dampening: f64,
    /// SGD: Nesterov's look-ahead; needs momentum and no dampening.
    pub nesterov: bool,
    /// SGD and Adam: L2 penalty. AdamW: decoupled decay.
    pub weight_decay: f64,
    /// Adam: decay of the first moment.
    pub beta1: f64,
    /// Adam: decay of the second moment.
    pub beta2: f64,
    /// Adam: added to the denominator.
    pub epsilon: f64,
    /// Free for optimizers registered by users.
    pub extra: [f64; Hyperparameters::EXTRA],
}

impl Hyperparameters {
    /// Numbers free for optimizers registered by users.
    pub const EXTRA: usize = 4;
    /// Bytes on the wire: twelve little-endian f64, `nesterov` as 0 or 1.
    pub const WIRE_BYTES: usize = 8 * (8 + Self::EXTRA);

    /// The wire form, in declaration order.
    pub fn to_wire(&self) -> [u8; Self::WIRE_BYTES] {
        let mut wire = [0; Self::WIRE_BYTES];
        for (slot, number) in wire.chunks_exact_mut(8).zip(self.numbers()) {
            slot.copy_from_slice(&number.to_le_bytes());
        }
        wire
    }

    /// Reads the wire form; every bit pattern is some set of numbers.
    pub fn from_wire(wire: &[u8; Self::WIRE_BYTES]) -> Self {
        let number = |index: usize| {
            f64::from_le_bytes(wire[index * 8..index * 8 + 8].try_into().expect("eight bytes"))
        };
        Hyperparameters {
            learning_rate: number(0),
            momentum: number(1),
            dampening: number(2),
            nesterov: number(3) != 0.0,
            weight_decay: number(4),
            beta1: number(5),
            beta2: number(6),
            epsilon: number(7),
            extra: std::array::from_fn(|index| number(8 + index)),
        }
    }

    fn numbers(&self) -> impl Iterator<Item = f64> {
        [
            self.learning_rate,
            self.momentum,
            self.dampening,
            f64::from(u8::from(self.nesterov)),
            self.weight_decay,
            self.beta1,
            self.beta2,
            self.epsilon,
        ]
        .into_iter()
        .chain(self.extra)
    }
}

impl Default for Hyperparameters {
    fn default() -> Self {
        Hyperparameters {
            learning_rate: 0.01,
            momentum: 0.0,
            dampening: 0.0,
            nesterov: false,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            extra: [0.0; Self::EXTRA],
        }
    }
}

/// Hyperparameters versioned by step: a change carries the first step it holds for, so that it takes effect at the same
/// step on every chunk however the chunks race.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// By ascending first step; never empty, never above [`Schedule::CHANGES_MAX`].
    changes: Vec<(u32, Hyperparameters)>,
}

impl Schedule {
    /// Changes remembered. Steps under way at one time span far fewer, so what is dropped is long superseded.
    pub const CHANGES_MAX: usize = 64;

    /// A schedule that starts with these numbers at step 0; allocates all it will ever need.
    pub fn new(initial: Hyperparameters) -> Self {
        let mut changes = Vec::with_capacity(Self::CHANGES_MAX + 1);
        changes.push((0, initial));
        Schedule { changes }
    }

    /// Lets `hyperparameters` hold from `first_step` on, replacing what was said for that very step.
    pub fn change(&mut self, first_step: u32, hyperparameters: Hyperparameters) {
        let at = self.changes.partition_point(|&(step, _)| step < first_step);
        match self.changes.get_mut(at) {
            Some(change) if change.0 == first_step => change.1 = hyperparameters,
            _ => self.changes.insert(at, (first_step, hyperparameters)),
        }
        if self.changes.len() > Self::CHANGES_MAX {
            self.changes.remove(0);
        }
    }

    /// The numbers that hold at `step`.
    pub fn at(&self, step: u32) -> &Hyperparameters {
        let next = self.changes.partition_point(|&(first, _)| first <= step);
        &self.changes[next.saturating_sub(1)].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(learning_rate: f64) -> Hyperparameters {
        Hyperparameters { learning_rate, ..Default::default() }
    }

    #[test]
    fn a_change_holds_from_its_step_in_whatever_order_changes_arrive() {
        let mut schedule = Schedule::new(rate(1.0));
        schedule.change(20, rate(0.2));
        schedule.change(10, rate(0.1));
        schedule.change(20, rate(0.3));
        let rates: Vec<f64> = [0, 9, 10, 19, 20, 21].map(|step| schedule.at(step).learning_rate).into();
        assert_eq!(rates, [1.0, 1.0, 0.1, 0.1, 0.3, 0.3]);
    }

    #[test]
    fn the_schedule_stays_bounded_and_keeps_the_newest() {
        let mut schedule = Schedule::new(rate(0.0));
        let capacity = schedule.changes.capacity();
        for step in 0..1000 {
            schedule.change(step, rate(f64::from(step)));
        }
        assert_eq!(schedule.at(999).learning_rate, 999.0);
        assert_eq!(schedule.at(980).learning_rate, 980.0);
        assert_eq!(schedule.changes.capacity(), capacity);
    }

    #[test]
    fn wire_form_round_trips() {
        let all = Hyperparameters {
            nesterov: true,
            momentum: 0.9,
            extra: [1.0, -2.0, 3.5, f64::MAX],
            ..rate(3e-4)
        };
        assert_eq!(Hyperparameters::from_wire(&all.to_wire()), all);
    }
}
