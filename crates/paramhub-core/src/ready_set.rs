//! A set of slots from which the most urgent is taken first, in constant time and without allocating.

/// Slots `0..capacity`, lowest first. Both ends use it to decide what to send next. Slots are numbered by
/// urgency, so an urgent chunk overtakes the remaining chunks of a large key, and a slot that is owed twice
/// is sent once.
///
/// A bitmap with summary levels above it: each bit of a level states whether the word below it is non-zero.
/// Three levels hold a quarter of a million slots, six hold all slots that a job can have.
#[derive(Clone, Debug)]
pub struct ReadySet {
    /// `levels[0]` has a bit a slot; the last level has one word.
    levels: Vec<Vec<u64>>,
    capacity: u32,
    len: u32,
}

impl ReadySet {
    /// An empty set for `capacity` slots. It allocates all the memory it will ever need.
    pub fn new(capacity: u32) -> Self {
        let mut levels = Vec::new();
        let mut words = (capacity as usize).div_ceil(64).max(1);
        loop {
            levels.push(vec![0; words]);
            if words == 1 {
                return ReadySet { levels, capacity, len: 0 };
            }
            words = words.div_ceil(64);
        }
    }

    /// Number of slots in the set.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Returns whether nothing is ready.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds a slot and returns whether it was new.
    ///
    /// # Panics
    /// If `slot` is not below the capacity.
    pub fn insert(&mut self, slot: u32) -> bool {
        assert!(slot < self.capacity, "slot {slot} in a set of {}", self.capacity);
        let mut index = slot as usize;
        let mut new = false;
        for (depth, level) in self.levels.iter_mut().enumerate() {
            let (word, bit) = (&mut level[index / 64], 1 << (index % 64));
            let was_empty = *word == 0;
            new |= depth == 0 && *word & bit == 0;
            *word |= bit;
            if !was_empty {
                break;
            }
            index /= 64;
        }
        self.len += u32::from(new);
        new
    }

    /// The lowest slot.
    pub fn first(&self) -> Option<u32> {
        if self.is_empty() {
            return None;
        }
        let lowest = self
            .levels
            .iter()
            .rev()
            .fold(0, |index, level| index * 64 + level[index].trailing_zeros() as usize);
        Some(lowest as u32)
    }

    /// Takes the lowest slot out.
    pub fn pop_first(&mut self) -> Option<u32> {
        let slot = self.first()?;
        self.remove(slot);
        Some(slot)
    }

    /// Takes a slot out and returns whether it was in the set.
    pub fn remove(&mut self, slot: u32) -> bool {
        if !self.contains(slot) {
            return false;
        }
        let mut index = slot as usize;
        for level in &mut self.levels {
            let word = &mut level[index / 64];
            *word &= !(1 << (index % 64));
            if *word != 0 {
                break;
            }
            index /= 64;
        }
        self.len -= 1;
        true
    }

    /// Returns whether the slot is in the set.
    pub fn contains(&self, slot: u32) -> bool {
        slot < self.capacity && self.levels[0][slot as usize / 64] & (1 << (slot % 64)) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn behaves_like_an_ordered_set(
            capacity in prop::sample::select(vec![1u32, 63, 64, 65, 4096, 4097, 300_000]),
            steps in prop::collection::vec((0u8..4, any::<u32>()), 0..400),
        ) {
            let (mut set, mut model) = (ReadySet::new(capacity), BTreeSet::new());
            for (operation, number) in steps {
                let slot = number % capacity;
                match operation {
                    0 | 1 => prop_assert_eq!(set.insert(slot), model.insert(slot)),
                    2 => prop_assert_eq!(set.remove(slot), model.remove(&slot)),
                    _ => prop_assert_eq!(set.pop_first(), model.pop_first()),
                }
                prop_assert_eq!(set.len() as usize, model.len());
                prop_assert_eq!(set.first(), model.first().copied());
                prop_assert_eq!(set.contains(slot), model.contains(&slot));
            }
        }
    }

    #[test]
    fn holds_as_many_slots_as_a_job_can_have() {
        let mut set = ReadySet::new(u32::MAX - 1);
        set.insert(u32::MAX - 2);
        set.insert(70_000);
        assert_eq!(
            [set.pop_first(), set.pop_first(), set.pop_first()],
            [Some(70_000), Some(u32::MAX - 2), None]
        );
    }
}
