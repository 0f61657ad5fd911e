//! Hyperparameters of optimizers registered by users.

use std::fmt;

use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{BUILT_IN, HyperparameterError};

/// The number of values that an optimizer may have besides the built-in ones.
pub const EXTRA_VALUES_MAX: usize = 8;

/// Bytes of the name of such a value.
pub const EXTRA_NAME_BYTES_MAX: usize = 23;

/// Up to [`EXTRA_VALUES_MAX`] named values, stored in place;
/// [`Hyperparameters::with`](super::Hyperparameters::with) sets them.
#[derive(Clone, Copy, Default, PartialEq)]
pub struct ExtraValues {
    /// The entries in use come first, in ascending order, so that equal sets are equal in memory and on the
    /// wire.
    entries: [ExtraEntry; EXTRA_VALUES_MAX],
}

#[derive(Clone, Copy, Default, PartialEq)]
struct ExtraEntry {
    /// 0 if the entry is not in use.
    name_bytes: u8,
    /// A whole `str`, then zeros.
    name: [u8; EXTRA_NAME_BYTES_MAX],
    value: f64,
}

impl ExtraValues {
    const ENTRY_BYTES: usize = 1 + EXTRA_NAME_BYTES_MAX + 8;
    pub(super) const WIRE_BYTES: usize = EXTRA_VALUES_MAX * Self::ENTRY_BYTES;

    /// Names and values, by ascending name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.in_use().iter().map(|entry| {
            (std::str::from_utf8(entry.name()).expect("names are copied from a str"), entry.value)
        })
    }

    /// The value called `name`.
    pub fn value(&self, name: &str) -> Option<f64> {
        self.find(name).ok().map(|at| self.entries[at].value)
    }

    pub(super) fn set(&mut self, name: &str, value: f64) -> Result<(), HyperparameterError> {
        if BUILT_IN.contains(&name) {
            return Err(HyperparameterError::BuiltIn { name: name.into() });
        }
        let entry = ExtraEntry::new(name, value)?;
        let in_use = self.in_use().len();
        match self.find(name) {
            Ok(at) => self.entries[at] = entry,
            Err(_) if in_use == EXTRA_VALUES_MAX => {
                return Err(HyperparameterError::TooMany { name: name.into() });
            }
            Err(at) => {
                self.entries.copy_within(at..in_use, at + 1);
                self.entries[at] = entry;
            }
        }
        Ok(())
    }

    /// Writes [`ExtraValues::WIRE_BYTES`].
    pub(super) fn write(&self, wire: &mut [u8]) {
        for (entry, wire) in self.entries.iter().zip(wire.chunks_exact_mut(Self::ENTRY_BYTES)) {
            let (name, value) = wire.split_at_mut(1 + EXTRA_NAME_BYTES_MAX);
            name[0] = entry.name_bytes;
            name[1..].copy_from_slice(&entry.name);
            value.copy_from_slice(&entry.value.to_le_bytes());
        }
    }

    /// Reads every entry in use, in any order; the caller compares it with the form that it would write.
    pub(super) fn read(wire: &[u8]) -> Option<Self> {
        let mut extra = ExtraValues::default();
        for entry in wire.chunks_exact(Self::ENTRY_BYTES).filter(|entry| entry[0] != 0) {
            let (name, value) = entry.split_at(1 + EXTRA_NAME_BYTES_MAX);
            let name = std::str::from_utf8(name[1..].get(..usize::from(name[0]))?).ok()?;
            extra.set(name, f64::from_le_bytes(value.try_into().expect("eight bytes"))).ok()?;
        }
        Some(extra)
    }

    fn in_use(&self) -> &[ExtraEntry] {
        let end = self.entries.iter().position(|entry| entry.name_bytes == 0);
        &self.entries[..end.unwrap_or(EXTRA_VALUES_MAX)]
    }

    fn find(&self, name: &str) -> Result<usize, usize> {
        self.in_use().binary_search_by(|entry| entry.name().cmp(name.as_bytes()))
    }
}

impl ExtraEntry {
    fn new(name: &str, value: f64) -> Result<Self, HyperparameterError> {
        if name.is_empty() || name.len() > EXTRA_NAME_BYTES_MAX {
            return Err(HyperparameterError::Name { name: name.into() });
        }
        let mut entry = ExtraEntry { name_bytes: name.len() as u8, value, ..ExtraEntry::default() };
        entry.name[..name.len()].copy_from_slice(name.as_bytes());
        Ok(entry)
    }

    fn name(&self) -> &[u8] {
        &self.name[..usize::from(self.name_bytes)]
    }
}

impl fmt::Debug for ExtraValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl Serialize for ExtraValues {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

impl<'de> Deserialize<'de> for ExtraValues {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ExtraVisitor)
    }
}

struct ExtraVisitor;

impl<'de> Visitor<'de> for ExtraVisitor {
    type Value = ExtraValues;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "up to {EXTRA_VALUES_MAX} names and numbers")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ExtraValues, A::Error> {
        let mut extra = ExtraValues::default();
        while let Some((name, value)) = map.next_entry::<String, f64>()? {
            if extra.value(&name).is_some() {
                return Err(A::Error::custom(format_args!("the hyperparameter {name:?} appears twice")));
            }
            extra.set(&name, value).map_err(A::Error::custom)?;
        }
        Ok(extra)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Hyperparameters;
    use super::*;

    #[test]
    fn extra_values_are_replaced_and_bounded() {
        let mut h = Hyperparameters::default();
        for index in (0..EXTRA_VALUES_MAX).rev() {
            h = h.with(&format!("value{index}"), index as f64).unwrap();
        }
        h = h.with("value3", -1.0).unwrap();
        let values: Vec<f64> = h.extra.iter().map(|(_, value)| value).collect();
        assert_eq!(values, [0.0, 1.0, 2.0, -1.0, 4.0, 5.0, 6.0, 7.0]);
        assert_eq!(h.value("value3"), Some(-1.0));
        assert_eq!(h.with("one more", 0.0), Err(HyperparameterError::TooMany { name: "one more".into() }));
        assert_eq!(Hyperparameters::from_wire(&h.to_wire()), Some(h));
    }

    #[test]
    fn names_have_one_byte_to_their_bound() {
        let h = Hyperparameters::default();
        let longest = "n".repeat(EXTRA_NAME_BYTES_MAX);
        assert_eq!(h.with(&longest, 2.0).unwrap().value(&longest), Some(2.0));
        assert!(h.with(&"n".repeat(EXTRA_NAME_BYTES_MAX + 1), 0.0).is_err());
        assert!(h.with("", 0.0).is_err());
        assert_eq!(h.value(""), None);
    }

    #[test]
    fn the_order_of_adding_does_not_matter() {
        let add = |names: [&str; 3]| {
            names.iter().fold(Hyperparameters::default(), |h, name| h.with(name, 1.0).unwrap())
        };
        assert_eq!(add(["c", "a", "b"]), add(["a", "b", "c"]));
        assert_eq!(add(["c", "a", "b"]).to_wire(), add(["b", "c", "a"]).to_wire());
    }
}
