//! The numbers of an optimizer, and the step from which they hold.

mod changes_of_members;
mod extra;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use changes_of_members::{Change, ChangesOfMembers};
pub use extra::{EXTRA_NAME_BYTES_MAX, EXTRA_VALUES_MAX, ExtraValues};

/// The built-in values by name, in the order of the wire form.
const BUILT_IN: [&str; 8] =
    ["learning_rate", "momentum", "dampening", "nesterov", "weight_decay", "beta1", "beta2", "epsilon"];

/// The numbers that an optimizer uses for all elements of a chunk, under the names of torch.optim.
///
/// They are `f64` although the arithmetic on elements is `f32`: torch.optim keeps them as Python floats and rounds
/// each scalar coefficient (say `1 - beta1`, or Adam's bias corrections) to `f32` only where it meets a tensor. The
/// built-in optimizers do the same.
///
/// The type is `Copy` and owns no heap memory, so a new value can come with any step. An optimizer ignores
/// values that it does not use. An optimizer that needs values with other names gets up to
/// [`EXTRA_VALUES_MAX`] of them:
///
/// ```
/// use paramhub_core::hyperparameters::Hyperparameters;
/// let h = Hyperparameters { momentum: 0.9, ..Hyperparameters::default() }.with("trust", 0.02).unwrap();
/// assert_eq!(h.value("trust"), Some(0.02));
/// assert_eq!(h.value("momentum"), Some(0.9));
/// assert_eq!(h.value("rho"), None);
/// ```
///
/// In JSON the built-in values are fields, and `extra` is an object of names and numbers. A missing field has
/// the value of [`Hyperparameters::default`], whatever the optimizer's own default is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(
    feature = "openapi",
    derive(utoipa::ToSchema),
    schema(
        description = "The numbers that an optimizer uses for all elements of a chunk, under the names of torch.optim. An optimizer \
                       ignores values that it does not use. A field that is left out has the default below, whatever the \
                       optimizer's own default is."
    )
)]
#[serde(deny_unknown_fields, default)]
pub struct Hyperparameters {
    /// Step size, `lr` in torch. Default 1e-3; the own defaults of `adagrad` and `rmsprop` are 0.01, of `adadelta` 1, of `nadam`
    /// 2e-3, of `lion` 1e-4.
    pub learning_rate: f64,
    /// SGD, RMSprop and LARS: the share of the momentum buffer that is kept. Default 0, no buffer; `lars`' own default is 0.9.
    pub momentum: f64,
    /// SGD: the share of the gradient that does not enter the momentum buffer. Default 0.
    pub dampening: f64,
    /// SGD: Nesterov's momentum; needs `momentum > 0` and `dampening == 0`. Default false.
    pub nesterov: bool,
    /// Decoupled decay (`adamw`, `lion`, `lamb`) or L2 penalty (the others). Default 0; the own default of `adamw` and
    /// `lamb` is 0.01.
    pub weight_decay: f64,
    /// Adam, LAMB and Lion: decay of the first moment, `betas[0]` in torch. Default 0.9.
    pub beta1: f64,
    /// Adam and LAMB: decay of the second moment, `betas[1]` in torch; Lion: decay of the momentum. Default 0.999; `lion`'s own default
    /// is 0.99.
    pub beta2: f64,
    /// Added to a denominator, `eps` in torch. Default 1e-8; the own default of `adagrad` is 1e-10, that of `adadelta` and
    /// `lamb` 1e-6.
    pub epsilon: f64,
    /// Up to 8 values with other names of 1 to 23 bytes. `maximize` (0 or 1) and `ema_decay` (by default no average) of all built-in
    /// optimizers with parameters, `amsgrad` (0 or 1) of `adam` and `adamw`, `lr_decay` and `initial_accumulator` of `adagrad`
    /// (0), `alpha` (0.99), `centered` and `epsilon_in_root` (0 or 1) of `rmsprop`, `rho` (0.9) of `adadelta`, `momentum_decay` (0.004) and
    /// `decoupled` (0 or 1) of `nadam`, `trust_coefficient` of `lars` (0.001) and `lamb` (1), and those of optimizers registered by users. Default none.
    #[cfg_attr(feature = "openapi", schema(value_type = std::collections::BTreeMap<String, f64>))]
    pub extra: ExtraValues,
}

impl Hyperparameters {
    /// Bytes on the wire.
    pub const WIRE_BYTES: usize = 8 * BUILT_IN.len() + ExtraValues::WIRE_BYTES;

    /// `self` with the value called `name` changed: a built-in one by its field name (`nesterov` is true for anything but
    /// 0), or an extra one, which is added if it is new.
    ///
    /// # Errors
    /// If a new name is empty or longer than [`EXTRA_NAME_BYTES_MAX`] bytes, or if there are [`EXTRA_VALUES_MAX`] others
    /// already.
    pub fn with(mut self, name: &str, value: f64) -> Result<Self, HyperparameterError> {
        match name {
            "learning_rate" => self.learning_rate = value,
            "momentum" => self.momentum = value,
            "dampening" => self.dampening = value,
            "nesterov" => self.nesterov = value != 0.0,
            "weight_decay" => self.weight_decay = value,
            "beta1" => self.beta1 = value,
            "beta2" => self.beta2 = value,
            "epsilon" => self.epsilon = value,
            _ => self.extra.set(name, value)?,
        }
        Ok(self)
    }

    /// The value called `name`, built-in or extra; `nesterov` is 0 or 1.
    pub fn value(&self, name: &str) -> Option<f64> {
        match name {
            "learning_rate" => Some(self.learning_rate),
            "momentum" => Some(self.momentum),
            "dampening" => Some(self.dampening),
            "nesterov" => Some(f64::from(u8::from(self.nesterov))),
            "weight_decay" => Some(self.weight_decay),
            "beta1" => Some(self.beta1),
            "beta2" => Some(self.beta2),
            "epsilon" => Some(self.epsilon),
            _ => self.extra.value(name),
        }
    }

    /// Returns whether every value is finite, the extra ones included.
    pub fn is_finite(&self) -> bool {
        self.built_in().into_iter().chain(self.extra.iter().map(|(_, value)| value)).all(f64::is_finite)
    }

    /// Checks that the values called `names` are finite and 0 or more.
    ///
    /// # Errors
    /// [`HyperparameterError::OutOfRange`] names the first one that is not; a missing value counts as NaN.
    pub fn check_not_negative(&self, names: &[&str]) -> Result<(), HyperparameterError> {
        self.check(names, "0 or more", |value| value >= 0.0 && value.is_finite())
    }

    /// Checks that the values called `names` are 0 or more and less than 1.
    ///
    /// # Errors
    /// As [`Hyperparameters::check_not_negative`].
    pub fn check_fraction(&self, names: &[&str]) -> Result<(), HyperparameterError> {
        self.check(names, "0 or more and less than 1", |value| (0.0..1.0).contains(&value))
    }

    /// [`Hyperparameters::check_not_negative`] for extra values that may be missing.
    ///
    /// # Errors
    /// As there.
    pub fn check_given_not_negative(&self, names: &[&str]) -> Result<(), HyperparameterError> {
        names
            .iter()
            .filter(|name| self.value(name).is_some())
            .try_for_each(|name| self.check_not_negative(&[name]))
    }

    /// [`Hyperparameters::check_fraction`] for extra values that may be missing.
    ///
    /// # Errors
    /// As there.
    pub fn check_given_fraction(&self, names: &[&str]) -> Result<(), HyperparameterError> {
        names
            .iter()
            .filter(|name| self.value(name).is_some())
            .try_for_each(|name| self.check_fraction(&[name]))
    }

    /// Checks that the values called `names` are finite.
    ///
    /// # Errors
    /// As [`Hyperparameters::check_not_negative`].
    pub fn check_finite(&self, names: &[&str]) -> Result<(), HyperparameterError> {
        self.check(names, "finite", f64::is_finite)
    }

    fn check(
        &self,
        names: &[&str],
        expected: &'static str,
        holds: impl Fn(f64) -> bool,
    ) -> Result<(), HyperparameterError> {
        for name in names {
            let value = self.value(name).unwrap_or(f64::NAN);
            if !holds(value) {
                return Err(HyperparameterError::OutOfRange { name: (*name).into(), value, expected });
            }
        }
        Ok(())
    }

    /// The wire form. All numbers are little-endian.
    ///
    /// ```text
    ///   0  learning_rate, f64
    ///   8  momentum, f64
    ///  16  dampening, f64
    ///  24  nesterov, f64: 0 or 1
    ///  32  weight_decay, f64
    ///  40  beta1, f64
    ///  48  beta2, f64
    ///  56  epsilon, f64
    ///  64  8 places of 32 bytes for extra values, those in use first and in ascending order of their names' bytes:
    ///       0  bytes of the name, u8: 1 to 23, or 0 in a place not in use, whose other bytes are 0 too
    ///       1  the name, UTF-8, then zeros up to 23 bytes; it is unique and not that of a built-in value
    ///      24  the value, f64
    /// 320
    /// ```
    pub fn to_wire(&self) -> [u8; Self::WIRE_BYTES] {
        let mut wire = [0; Self::WIRE_BYTES];
        let (numbers, extra) = wire.split_at_mut(8 * BUILT_IN.len());
        for (place, number) in numbers.as_chunks_mut().0.iter_mut().zip(self.built_in()) {
            *place = number.to_le_bytes();
        }
        self.extra.write(extra);
        wire
    }

    /// Reads the wire form; `None` if [`Hyperparameters::to_wire`] would not have written these bytes. Numbers that are
    /// not finite are read: see [`Hyperparameters::is_finite`].
    pub fn from_wire(wire: &[u8; Self::WIRE_BYTES]) -> Option<Self> {
        let (numbers, extra) = wire.split_at(8 * BUILT_IN.len());
        let mut read = Hyperparameters { extra: ExtraValues::read(extra)?, ..Default::default() };
        for (name, number) in BUILT_IN.iter().zip(numbers.as_chunks().0) {
            read = read.with(name, f64::from_le_bytes(*number)).ok()?;
        }
        // Each value has one wire form: this refuses any other nesterov, order or padding.
        (read.to_wire() == *wire).then_some(read)
    }

    fn built_in(&self) -> [f64; BUILT_IN.len()] {
        BUILT_IN.map(|name| self.value(name).expect("a built-in value is always there"))
    }
}

impl Default for Hyperparameters {
    fn default() -> Self {
        Hyperparameters {
            learning_rate: 1e-3,
            momentum: 0.0,
            dampening: 0.0,
            nesterov: false,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            extra: ExtraValues::default(),
        }
    }
}

/// The reason why hyperparameters are refused.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum HyperparameterError {
    /// A value outside the optimizer's range.
    #[error("{name} is {value}; it must be {expected}")]
    OutOfRange {
        /// The name of the value.
        name: String,
        /// The value given.
        value: f64,
        /// The range in words.
        expected: &'static str,
    },
    /// torch.optim.SGD's condition on Nesterov's momentum.
    #[error(
        "nesterov needs a momentum above 0 and no dampening; got momentum {momentum}, dampening {dampening}"
    )]
    Nesterov {
        /// The momentum given.
        momentum: f64,
        /// The dampening given.
        dampening: f64,
    },
    /// A change during the job that would need optimizer state which was not allocated at its start.
    #[error(
        "these hyperparameters need {needed} state values per parameter, the job was started with {allocated}; \
         start it with them (SGD: a momentum above 0) to be able to change to them"
    )]
    MoreState {
        /// State slots the new values need.
        needed: usize,
        /// State slots the initial values needed.
        allocated: usize,
    },
    /// A name that is empty or too long.
    #[error("the hyperparameter name {name:?} must have 1 to {EXTRA_NAME_BYTES_MAX} bytes")]
    Name {
        /// The name given.
        name: String,
    },
    /// A built-in value among the extra ones.
    #[error("the hyperparameter {name:?} is built in: give it beside `extra`, not inside")]
    BuiltIn {
        /// The name given.
        name: String,
    },
    /// A change when too many others wait for their steps.
    #[error(
        "step {first_step} is too far ahead of step {step}, for {} changes wait already: announce each nearer to its step",
        Schedule::CHANGES_MAX - 1
    )]
    TooEarly {
        /// The step the change was for.
        first_step: u32,
        /// The newest step under way.
        step: u32,
    },
    /// An extra value when there is no room for another.
    #[error("no room for the hyperparameter {name:?}: there are {EXTRA_VALUES_MAX} extra ones already")]
    TooMany {
        /// The name given.
        name: String,
    },
}

/// Hyperparameters by step: a change carries the first step for which it holds. So it takes effect at the
/// same step on every chunk, even if chunks are at different steps.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// The changes by ascending first step; at least one, at most [`Schedule::CHANGES_MAX`].
    changes: Vec<(u32, Hyperparameters)>,
}

impl Schedule {
    /// The number of changes kept. The steps under way at one time span far fewer changes, so those that are
    /// dropped are long superseded.
    pub const CHANGES_MAX: usize = 64;

    /// A schedule with these numbers from step 0 on. It allocates all the memory it will ever need.
    pub fn new(initial: Hyperparameters) -> Self {
        let mut changes = Vec::with_capacity(Self::CHANGES_MAX + 1);
        changes.push((0, initial));
        Schedule { changes }
    }

    /// Bytes that a schedule takes.
    pub const MEMORY_BYTES: u64 =
        ((Self::CHANGES_MAX + 1) * size_of::<(u32, Hyperparameters)>() + size_of::<Self>()) as u64;

    /// Makes `hyperparameters` hold from `first_step` on, and replaces an earlier change for that very step.
    /// `step` is the newest step under way: changes that are superseded by then make room.
    ///
    /// # Errors
    /// [`HyperparameterError::TooEarly`] if [`CHANGES_MAX`](Self::CHANGES_MAX) changes are kept and none of them is
    /// superseded at `step`.
    pub fn change(
        &mut self,
        step: u32,
        first_step: u32,
        hyperparameters: Hyperparameters,
    ) -> Result<(), HyperparameterError> {
        let at = self.changes.partition_point(|&(first, _)| first < first_step);
        match self.changes.get_mut(at) {
            Some(change) if change.0 == first_step => change.1 = hyperparameters,
            _ => self.changes.insert(at, (first_step, hyperparameters)),
        }
        if self.changes.len() > Self::CHANGES_MAX {
            if self.changes[1].0 > step {
                self.changes.remove(at);
                return Err(HyperparameterError::TooEarly { first_step, step });
            }
            self.changes.remove(0);
        }
        Ok(())
    }

    /// Returns whether exactly these hyperparameters were set for that very step.
    pub fn has_change(&self, first_step: u32, hyperparameters: &Hyperparameters) -> bool {
        let at = self.changes.partition_point(|&(first, _)| first < first_step);
        self.changes.get(at).is_some_and(|(first, change)| *first == first_step && change == hyperparameters)
    }

    /// The changes for `step` and later steps. Those for step 0 may be the initial numbers.
    pub fn changes_from(&self, step: u32) -> impl Iterator<Item = &(u32, Hyperparameters)> {
        self.changes[self.changes.partition_point(|&(first, _)| first < step)..].iter()
    }

    /// The change that holds at `step`, and those for later steps. The first may be the initial numbers.
    pub fn in_force_from(&self, step: u32) -> impl Iterator<Item = &(u32, Hyperparameters)> {
        let next = self.changes.partition_point(|&(first, _)| first <= step);
        self.changes[next.saturating_sub(1)..].iter()
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
        schedule.change(0, 20, rate(0.2)).unwrap();
        schedule.change(0, 10, rate(0.1)).unwrap();
        schedule.change(0, 20, rate(0.3)).unwrap();
        let rates: Vec<f64> = [0, 9, 10, 19, 20, 21].map(|step| schedule.at(step).learning_rate).into();
        assert_eq!(rates, [1.0, 1.0, 0.1, 0.1, 0.3, 0.3]);
    }

    #[test]
    fn changes_are_listed_from_the_step_for_which_they_were_set() {
        let mut schedule = Schedule::new(rate(1.0));
        schedule.change(0, 20, rate(0.2)).unwrap();
        schedule.change(0, 10, rate(0.1)).unwrap();
        let from = |step| schedule.changes_from(step).map(|&(first, _)| first).collect::<Vec<_>>();
        assert_eq!(
            [0, 1, 10, 11, 21].map(from),
            [vec![0, 10, 20], vec![10, 20], vec![10, 20], vec![20], vec![]]
        );
        let in_force = |step| schedule.in_force_from(step).map(|&(first, _)| first).collect::<Vec<_>>();
        assert_eq!(
            [0, 9, 10, 19, 20].map(in_force),
            [vec![0, 10, 20], vec![0, 10, 20], vec![10, 20], vec![10, 20], vec![20]]
        );
    }

    #[test]
    fn the_schedule_stays_bounded_and_keeps_the_newest() {
        let mut schedule = Schedule::new(rate(0.0));
        let capacity = schedule.changes.capacity();
        for step in 0..1000 {
            schedule.change(step, step, rate(f64::from(step))).unwrap();
        }
        assert_eq!(schedule.at(999).learning_rate, 999.0);
        assert_eq!(schedule.at(980).learning_rate, 980.0);
        assert_eq!(schedule.changes.capacity(), capacity);
    }

    #[test]
    fn a_change_that_is_in_force_is_never_dropped_for_a_later_one() {
        let mut schedule = Schedule::new(rate(1.0));
        for first_step in 1..Schedule::CHANGES_MAX as u32 {
            schedule.change(0, 100 * first_step, rate(0.5)).unwrap();
        }
        for first_step in [50, 10_000] {
            let refused = schedule.change(0, first_step, rate(0.1)).unwrap_err();
            assert_eq!(refused, HyperparameterError::TooEarly { first_step, step: 0 });
        }
        schedule.change(0, 100, rate(0.4)).unwrap();
        assert_eq!([0, 99, 100].map(|step| schedule.at(step).learning_rate), [1.0, 1.0, 0.4]);
        schedule.change(100, 10_000, rate(0.1)).unwrap();
        assert_eq!(schedule.at(100).learning_rate, 0.4);
    }

    #[test]
    fn every_built_in_value_is_set_and_read_by_its_name() {
        for name in BUILT_IN {
            let changed = Hyperparameters::default().with(name, 1.0).unwrap();
            assert_eq!(changed.value(name), Some(1.0), "{name}");
            assert_ne!(changed, Hyperparameters::default(), "{name}");
            assert_eq!(changed.extra.iter().count(), 0, "{name}");
        }
    }

    #[test]
    fn checks_name_what_is_out_of_range() {
        let h = rate(-1.0).with("trust", 1.0).unwrap();
        assert_eq!(
            h.check_not_negative(&["trust", "learning_rate"]).unwrap_err().to_string(),
            "learning_rate is -1; it must be 0 or more"
        );
        assert!(h.check_fraction(&["beta1", "beta2"]).is_ok());
        assert!(h.check_fraction(&["trust"]).unwrap_err().to_string().contains("trust is 1"));
        assert!(h.check_finite(&["trust", "learning_rate"]).is_ok());
        assert!(h.check_finite(&["rho"]).unwrap_err().to_string().contains("rho is NaN"), "a missing one");
    }

    #[test]
    fn every_value_counts_when_all_must_be_finite() {
        let h = rate(0.1).with("trust", 1.0).unwrap();
        assert!(h.is_finite());
        for name in BUILT_IN.into_iter().filter(|name| *name != "nesterov").chain(["trust"]) {
            assert!(!h.with(name, f64::NAN).unwrap().is_finite(), "{name}");
            assert!(!h.with(name, f64::NEG_INFINITY).unwrap().is_finite(), "{name}");
        }
    }

    fn all() -> Hyperparameters {
        let all = Hyperparameters { nesterov: true, momentum: 0.9, ..rate(3e-4) };
        all.with("ünïcode", f64::MAX).unwrap().with("trust", -2.0).unwrap()
    }

    #[test]
    fn wire_form_round_trips_and_lies_as_documented() {
        let wire = all().to_wire();
        assert_eq!(Hyperparameters::from_wire(&wire), Some(all()));
        assert_eq!(wire.len(), 320);
        assert_eq!(wire[..8], 3e-4_f64.to_le_bytes());
        assert_eq!(wire[8..16], 0.9_f64.to_le_bytes());
        assert_eq!(wire[24..32], 1.0_f64.to_le_bytes());
        assert_eq!(wire[56..64], 1e-8_f64.to_le_bytes());
        assert_eq!(wire[64..70], *b"\x05trust");
        assert_eq!(wire[70..88], [0; 18]);
        assert_eq!(wire[88..96], (-2.0_f64).to_le_bytes());
        assert_eq!(wire[96..106], *b"\x09\xc3\xbcn\xc3\xafcode");
        assert_eq!(wire[128..], [0; 192]);
    }

    #[test]
    fn bytes_that_are_no_wire_form_are_refused() {
        let write = |at: usize, bytes: &[u8]| {
            let mut wire = all().to_wire();
            wire[at..at + bytes.len()].copy_from_slice(bytes);
            Hyperparameters::from_wire(&wire)
        };
        assert_eq!(write(0, &[]), Some(all()));
        for (what, at, bytes) in [
            ("nesterov is 2", 24, &2.0_f64.to_le_bytes()[..]),
            ("a name cut inside a character", 96, &[1]),
            ("a name that is not UTF-8", 65, &[0xff]),
            ("a name longer than its place", 64, &[24]),
            ("bytes after a name", 64, &[4]),
            ("a value without a name", 160, &1.0_f64.to_le_bytes()),
            ("a name without a length", 129, b"rho"),
            ("a gap", 160, b"\x03zzz"),
            ("names out of order", 96, b"\x05aaaaa\0\0\0\0"),
            ("a name twice", 64, b"\x09\xc3\xbcn\xc3\xafcode"),
            ("a built-in name", 64, b"\x05beta1"),
        ] {
            assert_eq!(write(at, bytes), None, "{what}");
        }
    }

    #[test]
    fn json_names_the_built_in_values_and_maps_the_extra_ones() {
        let json = serde_json::to_value(all()).unwrap();
        assert_eq!(json["nesterov"], true);
        assert_eq!(json["extra"], serde_json::json!({ "trust": -2.0, "ünïcode": f64::MAX }));
        assert_eq!(serde_json::from_value::<Hyperparameters>(json).unwrap(), all());

        let partial: Hyperparameters =
            serde_json::from_str(r#"{ "momentum": 0.5, "extra": { "b": 1, "a": 2 } }"#).unwrap();
        let same = Hyperparameters { momentum: 0.5, ..Default::default() };
        assert_eq!(partial, same.with("a", 2.0).unwrap().with("b", 1.0).unwrap(), "in whatever order");
    }

    #[test]
    fn json_that_says_nothing_clear_is_refused() {
        let many: Vec<String> = (0..=EXTRA_VALUES_MAX).map(|index| format!("\"v{index}\": 0")).collect();
        let many = format!("{{ \"extra\": {{ {} }} }}", many.join(","));
        for (json, complaint) in [
            (r#"{ "lr": 1 }"#, "unknown field `lr`"),
            (r#"{ "extra": { "beta1": 1 } }"#, "\"beta1\" is built in"),
            (r#"{ "extra": { "a": 1, "a": 2 } }"#, "\"a\" appears twice"),
            (r#"{ "extra": { "": 1 } }"#, "must have 1 to 23 bytes"),
            (r#"{ "extra": { "a": null } }"#, "null"),
            (r#"{ "extra": [1, 2] }"#, "names and numbers"),
            (&many, "no room"),
        ] {
            let refused = serde_json::from_str::<Hyperparameters>(json).unwrap_err().to_string();
            assert!(refused.contains(complaint), "{json}: {refused}");
        }
    }
}
