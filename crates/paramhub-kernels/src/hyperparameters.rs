use std::fmt;

/// Named values a custom optimizer may have beside the built-in ones.
pub const EXTRA_VALUES_MAX: usize = 8;

/// Bytes of such a name.
pub const EXTRA_NAME_BYTES_MAX: usize = 23;

/// The numbers an optimizer runs on, for all elements of a chunk.
///
/// They are `f64` although the arithmetic on elements is `f32`: torch.optim keeps them as Python floats
/// and rounds each scalar coefficient (say `1 - beta1`, or Adam's bias corrections) to `f32` only where it
/// meets a tensor. The built-in optimizers do the same.
///
/// The type is `Copy` and owns no heap memory, so a new value can come with any step. An optimizer ignores
/// what it does not use. One that needs numbers with other names gets up to [`EXTRA_VALUES_MAX`] of them:
///
/// ```
/// use paramhub_kernels::Hyperparameters;
/// let h = Hyperparameters { momentum: 0.9, ..Hyperparameters::default() }.with("trust", 0.02).unwrap();
/// assert_eq!(h.value("trust"), Some(0.02));
/// assert_eq!(h.value("momentum"), Some(0.9));
/// assert_eq!(h.value("rho"), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyperparameters {
    /// Step size, `lr` in torch. Default 1e-3.
    pub learning_rate: f64,
    /// SGD: the share of the momentum buffer that is kept. Default 0, no buffer.
    pub momentum: f64,
    /// SGD: the share of the gradient that does not enter the momentum buffer. Default 0.
    pub dampening: f64,
    /// SGD: Nesterov's momentum; needs `momentum > 0` and `dampening == 0`. Default false.
    pub nesterov: bool,
    /// L2 penalty (`sgd`, `adam`) or decoupled decay (`adamw`). Default 0, and 0.01 for `adamw`.
    pub weight_decay: f64,
    /// Adam: decay of the first moment, `betas[0]` in torch. Default 0.9.
    pub beta1: f64,
    /// Adam: decay of the second moment, `betas[1]` in torch. Default 0.999.
    pub beta2: f64,
    /// Adam: added to the denominator, `eps` in torch. Default 1e-8.
    pub epsilon: f64,
    /// Values with other names, for custom optimizers; see [`Hyperparameters::with`].
    pub extra: ExtraValues,
}

impl Hyperparameters {
    /// `self` with the value called `name` changed: a built-in one by its field name (`nesterov` is true for
    /// anything but 0), or an extra one, which is added if it is new.
    ///
    /// # Errors
    /// If a new name is empty or longer than [`EXTRA_NAME_BYTES_MAX`] bytes, or if there are
    /// [`EXTRA_VALUES_MAX`] others already.
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
            _ => {
                let name = ExtraName::new(name)?;
                let place = self
                    .extra
                    .values
                    .iter_mut()
                    .find(|extra| extra.name == name || extra.name == ExtraName::NONE)
                    .ok_or_else(|| HyperparameterError::TooMany { name: name.as_str().into() })?;
                *place = Extra { name, value };
            }
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
            _ => self.extra.iter().find(|(extra, _)| *extra == name).map(|(_, value)| value),
        }
    }

    pub(crate) fn check_not_negative(&self, names: &[&'static str]) -> Result<(), HyperparameterError> {
        self.check(names, "0 or more", |value| value >= 0.0 && value.is_finite())
    }

    pub(crate) fn check_fraction(&self, names: &[&'static str]) -> Result<(), HyperparameterError> {
        self.check(names, "0 or more and less than 1", |value| (0.0..1.0).contains(&value))
    }

    pub(crate) fn check_finite(&self, names: &[&'static str]) -> Result<(), HyperparameterError> {
        self.check(names, "finite", f64::is_finite)
    }

    fn check(
        &self,
        names: &[&'static str],
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
}

impl Default for Hyperparameters {
    fn default() -> Self {
        Self {
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

/// Why hyperparameters were refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum HyperparameterError {
    /// A value lies outside the optimizer's range.
    #[error("{name} is {value}; it must be {expected}")]
    OutOfRange {
        /// The name of the value.
        name: String,
        /// What was given.
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
    /// A change in mid-job would need optimizer state that was not allocated at its start.
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
    /// A name does not fit.
    #[error("the hyperparameter name {name:?} must have 1 to {EXTRA_NAME_BYTES_MAX} bytes")]
    Name {
        /// The name given.
        name: String,
    },
    /// There is no room for one more.
    #[error("no room for the hyperparameter {name:?}: there are {EXTRA_VALUES_MAX} extra ones already")]
    TooMany {
        /// The name given.
        name: String,
    },
}

/// Up to [`EXTRA_VALUES_MAX`] named values, stored in place.
#[derive(Clone, Copy, PartialEq)]
pub struct ExtraValues {
    values: [Extra; EXTRA_VALUES_MAX],
}

impl ExtraValues {
    /// Names and values, in the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.values
            .iter()
            .take_while(|extra| extra.name != ExtraName::NONE)
            .map(|extra| (extra.name.as_str(), extra.value))
    }
}

impl Default for ExtraValues {
    fn default() -> Self {
        Self { values: [Extra { name: ExtraName::NONE, value: 0.0 }; EXTRA_VALUES_MAX] }
    }
}

impl fmt::Debug for ExtraValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

#[derive(Clone, Copy, PartialEq)]
struct Extra {
    name: ExtraName,
    value: f64,
}

/// A name stored in place; unused bytes are 0.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ExtraName {
    bytes: [u8; EXTRA_NAME_BYTES_MAX],
    len: u8,
}

impl ExtraName {
    const NONE: Self = Self { bytes: [0; EXTRA_NAME_BYTES_MAX], len: 0 };

    fn new(name: &str) -> Result<Self, HyperparameterError> {
        if name.is_empty() || name.len() > EXTRA_NAME_BYTES_MAX {
            return Err(HyperparameterError::Name { name: name.into() });
        }
        let mut bytes = [0; EXTRA_NAME_BYTES_MAX];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        Ok(Self { bytes, len: name.len() as u8 })
    }

    fn as_str(&self) -> &str {
        // The bytes are a whole `str`, so this cannot fail.
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUILT_IN: [&str; 8] =
        ["learning_rate", "momentum", "dampening", "nesterov", "weight_decay", "beta1", "beta2", "epsilon"];

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
    fn extra_values_are_replaced_and_bounded() {
        let mut h = Hyperparameters::default();
        for index in 0..EXTRA_VALUES_MAX {
            h = h.with(&format!("value{index}"), index as f64).unwrap();
        }
        h = h.with("value3", -1.0).unwrap();
        assert_eq!(h.value("value3"), Some(-1.0));
        assert_eq!(h.extra.iter().count(), EXTRA_VALUES_MAX);
        assert_eq!(h.with("one more", 0.0), Err(HyperparameterError::TooMany { name: "one more".into() }));
        assert!(h.with(&"n".repeat(EXTRA_NAME_BYTES_MAX + 1), 0.0).is_err());
        assert!(h.with("", 0.0).is_err());
        assert_eq!(
            Hyperparameters::default()
                .with(&"n".repeat(EXTRA_NAME_BYTES_MAX), 2.0)
                .unwrap()
                .extra
                .iter()
                .count(),
            1
        );
    }
}
