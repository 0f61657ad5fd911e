//! Keys, the tensors of a job, and the table of them on which every rank must agree.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::codec::{Codec, Dtype};
use crate::limits::{KEY_DIMENSIONS_MAX, KEY_ELEMENTS_MAX, KEY_NAME_BYTES_MAX, KEYS_MAX};

/// One tensor, by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// Unique in its table.
    pub name: String,
    /// Extents, outermost first; empty for a scalar.
    pub shape: Vec<u64>,
    /// Element type in the worker's memory.
    #[serde(default)]
    pub dtype: Dtype,
    /// Higher is more urgent. Keys of equal priority go in table order, so a table in forward order needs no
    /// priorities.
    #[serde(default)]
    pub priority: i32,
    /// Keys of one group share hyperparameters: see [`OptimizerChoice`](crate::settings::OptimizerChoice).
    #[serde(default)]
    pub group: u16,
    /// The codec of this key, which overrides the job's [`codec`](crate::settings::Settings::codec).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub codec: Option<Codec>,
}

impl Key {
    /// An f32 key of neutral priority, in group 0.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<u64>>) -> Self {
        Key { name: name.into(), shape: shape.into(), dtype: Dtype::F32, priority: 0, group: 0, codec: None }
    }

    /// The same key in another group.
    pub fn in_group(self, group: u16) -> Self {
        Key { group, ..self }
    }

    /// The same key in a codec of its own.
    pub fn in_codec(self, codec: Codec) -> Self {
        Key { codec: Some(codec), ..self }
    }

    /// Product of the extents, or `None` where it exceeds [`KEY_ELEMENTS_MAX`].
    pub fn elements(&self) -> Option<u64> {
        self.shape
            .iter()
            .try_fold(1u64, |product, &extent| product.checked_mul(extent))
            .filter(|&elements| elements <= KEY_ELEMENTS_MAX)
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}` {} {:?}", self.name, self.dtype, self.shape)?;
        if self.priority != 0 {
            write!(f, " priority {}", self.priority)?;
        }
        if self.group != 0 {
            write!(f, " in group {}", self.group)?;
        }
        if let Some(codec) = self.codec {
            write!(f, " as {codec}")?;
        }
        Ok(())
    }
}

/// A job's keys, checked once: names are unique, sizes are bounded, no key is empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(try_from = "Vec<Key>", into = "Vec<Key>")]
pub struct KeyTable(Vec<Key>);

/// The reason why a list of keys is not a valid table.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum KeyTableError {
    /// The list is empty.
    #[error("the key table is empty: a job needs at least one key")]
    Empty,
    /// More keys than a table may have.
    #[error("the key table has {0} keys, more than the {KEYS_MAX} a job may have")]
    TooManyKeys(usize),
    /// The name is empty or too long.
    #[error("key {index} has a name of {bytes} bytes: names have 1 to {KEY_NAME_BYTES_MAX}")]
    Name {
        /// Position in the table.
        index: usize,
        /// Length found.
        bytes: usize,
    },
    /// Two keys share a name.
    #[error("key `{name}` appears twice, at positions {first} and {second}")]
    Duplicate {
        /// The shared name.
        name: String,
        /// Position of the first.
        first: usize,
        /// Position of the second.
        second: usize,
    },
    /// The shape has an extent of zero, too many dimensions, or too many elements.
    #[error(
        "key `{name}` has shape {shape:?}: a key has 1 to {KEY_ELEMENTS_MAX} elements in at most {KEY_DIMENSIONS_MAX} dimensions"
    )]
    Shape {
        /// The key.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
    },
}

impl KeyTable {
    /// Checks a list of keys.
    pub fn new(keys: Vec<Key>) -> Result<Self, KeyTableError> {
        if keys.is_empty() {
            return Err(KeyTableError::Empty);
        }
        if keys.len() > KEYS_MAX {
            return Err(KeyTableError::TooManyKeys(keys.len()));
        }
        let mut position_of = std::collections::HashMap::with_capacity(keys.len());
        for (index, key) in keys.iter().enumerate() {
            if key.name.is_empty() || key.name.len() > KEY_NAME_BYTES_MAX {
                return Err(KeyTableError::Name { index, bytes: key.name.len() });
            }
            if key.shape.len() > KEY_DIMENSIONS_MAX || key.elements().is_none_or(|elements| elements == 0) {
                return Err(KeyTableError::Shape { name: key.name.clone(), shape: key.shape.clone() });
            }
            if let Some(first) = position_of.insert(key.name.as_str(), index) {
                return Err(KeyTableError::Duplicate { name: key.name.clone(), first, second: index });
            }
        }
        Ok(KeyTable(keys))
    }

    /// The keys in table order.
    pub fn keys(&self) -> &[Key] {
        &self.0
    }

    /// Number of keys, at least one.
    #[allow(clippy::len_without_is_empty, reason = "a table is never empty")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Elements of all keys together.
    pub fn elements(&self) -> u64 {
        self.0.iter().map(elements_of).sum()
    }

    /// Bytes of one worker's gradients in its memory.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|key| elements_of(key) * key.dtype.bytes() as u64).sum()
    }

    /// Positions of the keys from the most to the least urgent.
    pub fn by_urgency(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.0.len()).collect();
        order.sort_by_key(|&index| std::cmp::Reverse(self.0[index].priority));
        order
    }

    /// A digest that two tables share only if they are equal.
    pub fn digest(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_derive_key("paramhub key table v2");
        for key in &self.0 {
            hasher.update(&(key.name.len() as u64).to_le_bytes()).update(key.name.as_bytes());
            hasher.update(&(key.shape.len() as u64).to_le_bytes());
            for extent in &key.shape {
                hasher.update(&extent.to_le_bytes());
            }
            hasher.update(&[key.dtype.codec().number()]).update(&key.priority.to_le_bytes());
            hasher.update(&key.group.to_le_bytes());
            hasher.update(&[key.codec.map_or(u8::MAX, |codec| codec.number())]);
        }
        hasher.finalize()
    }

    /// The first position at which two tables differ, with the key of each side there, if any.
    pub fn first_difference<'a>(
        &'a self,
        other: &'a KeyTable,
    ) -> Option<(usize, Option<&'a Key>, Option<&'a Key>)> {
        (0..self.len().max(other.len()))
            .map(|index| (index, self.0.get(index), other.0.get(index)))
            .find(|(_, mine, theirs)| mine != theirs)
    }
}

impl TryFrom<Vec<Key>> for KeyTable {
    type Error = KeyTableError;

    fn try_from(keys: Vec<Key>) -> Result<Self, KeyTableError> {
        KeyTable::new(keys)
    }
}

impl From<KeyTable> for Vec<Key> {
    fn from(table: KeyTable) -> Self {
        table.0
    }
}

/// Elements of a key that a table has checked.
pub(crate) fn elements_of(key: &Key) -> u64 {
    key.elements().expect("a table bounds its keys")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(keys: Vec<Key>) -> Result<KeyTable, KeyTableError> {
        KeyTable::new(keys)
    }

    #[test]
    fn refuses_what_cannot_be_exchanged() {
        assert_eq!(table(vec![]), Err(KeyTableError::Empty));
        assert!(matches!(table(vec![Key::new("", [1])]), Err(KeyTableError::Name { index: 0, bytes: 0 })));
        assert!(matches!(table(vec![Key::new("w", [4, 0])]), Err(KeyTableError::Shape { .. })));
        assert!(matches!(table(vec![Key::new("w", [u64::MAX, 2])]), Err(KeyTableError::Shape { .. })));
        assert!(matches!(table(vec![Key::new("w", vec![1; 17])]), Err(KeyTableError::Shape { .. })));
        assert_eq!(
            table(vec![Key::new("a", [1]), Key::new("b", [1]), Key::new("a", [2])]),
            Err(KeyTableError::Duplicate { name: "a".into(), first: 0, second: 2 })
        );
    }

    #[test]
    fn a_scalar_has_one_element_and_keys_pass_four_gibibytes() {
        assert_eq!(Key::new("step", []).elements(), Some(1));
        let large = table(vec![Key::new("embedding", [3_000_000, 2048])]).unwrap();
        assert_eq!(large.bytes(), 3_000_000 * 2048 * 4);
        assert!(large.bytes() > 4 << 30);
    }

    #[test]
    fn names_the_first_difference() {
        let mine = table(vec![Key::new("a", [1]), Key::new("b", [2])]).unwrap();
        let theirs = table(vec![Key::new("a", [1]), Key::new("b", [3]), Key::new("c", [1])]).unwrap();
        let (index, left, right) = mine.first_difference(&theirs).unwrap();
        assert_eq!((index, left.unwrap().shape[0], right.unwrap().shape[0]), (1, 2, 3));
        assert!(mine.first_difference(&mine.clone()).is_none());
        assert_ne!(mine.digest(), theirs.digest());
        let grouped = table(vec![Key::new("a", [1]), Key::new("b", [2]).in_group(3)]).unwrap();
        let (index, _, right) = mine.first_difference(&grouped).unwrap();
        assert_eq!((index, right.unwrap().to_string().as_str()), (1, "`b` f32 [2] in group 3"));
        assert_ne!(mine.digest(), grouped.digest());
        let coded = table(vec![Key::new("a", [1]), Key::new("b", [2]).in_codec(Codec::ONE_BIT)]).unwrap();
        let (index, _, right) = mine.first_difference(&coded).unwrap();
        assert_eq!((index, right.unwrap().to_string().as_str()), (1, "`b` f32 [2] as one-bit"));
        assert_ne!(mine.digest(), coded.digest());
    }

    #[test]
    fn urgency_follows_priority_then_position() {
        let mut keys = vec![Key::new("front", [1]), Key::new("middle", [1]), Key::new("head", [1])];
        keys[2].priority = 5;
        assert_eq!(table(keys).unwrap().by_urgency(), [2, 0, 1]);
    }

    #[test]
    fn json_is_checked_like_any_other_input() {
        let refused = serde_json::from_str::<KeyTable>(r#"[{"name":"a","shape":[0]}]"#).unwrap_err();
        assert!(refused.to_string().contains("shape [0]"), "{refused}");
        let accepted: KeyTable =
            serde_json::from_str(r#"[{"name":"a","shape":[2,3],"dtype":"bf16"}]"#).unwrap();
        assert_eq!((accepted.bytes(), accepted.keys()[0].group), (12, 0));
        let accepted: KeyTable = serde_json::from_str(r#"[{"name":"a","shape":[2],"group":7}]"#).unwrap();
        assert_eq!(accepted.keys()[0], Key::new("a", [2]).in_group(7));
        assert!(serde_json::from_str::<KeyTable>(r#"[{"name":"a","shape":[2],"group":65536}]"#).is_err());
    }
}
