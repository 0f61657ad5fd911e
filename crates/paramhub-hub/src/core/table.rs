//! A table whose entries have tokens that are never reused, so that a late event cannot reach another entry.

/// Entries at stable indices.
#[derive(Debug)]
pub(crate) struct Table<T> {
    entries: Vec<Entry<T>>,
    free: Vec<usize>,
}

#[derive(Debug)]
struct Entry<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Table { entries: Vec::new(), free: Vec::new() }
    }
}

impl<T> Table<T> {
    /// Adds a value and returns its token.
    pub(crate) fn insert(&mut self, value: T) -> u64 {
        let index = self.insert_index(value);
        u64::from(self.entries[index].generation) << 32 | index as u64
    }

    /// Adds a value and returns its index.
    pub(crate) fn insert_index(&mut self, value: T) -> usize {
        match self.free.pop() {
            Some(index) => {
                let entry = &mut self.entries[index];
                entry.generation = entry.generation.wrapping_add(1) & (u32::MAX >> 1);
                entry.value = Some(value);
                index
            }
            None => {
                self.entries.push(Entry { generation: 0, value: Some(value) });
                self.entries.len() - 1
            }
        }
    }

    /// The value with this token, if it is still here.
    pub(crate) fn at_mut(&mut self, token: u64) -> Option<&mut T> {
        let entry = self.entries.get_mut((token & u64::from(u32::MAX)) as usize)?;
        if u64::from(entry.generation) == token >> 32 { entry.value.as_mut() } else { None }
    }

    /// Removes the value with this token.
    pub(crate) fn remove(&mut self, token: u64) -> Option<T> {
        self.at_mut(token)?;
        self.remove_index((token & u64::from(u32::MAX)) as usize)
    }

    /// Removes the value at this index.
    pub(crate) fn remove_index(&mut self, index: usize) -> Option<T> {
        let value = self.entries[index].value.take()?;
        self.free.push(index);
        Some(value)
    }

    /// The value at this index.
    ///
    /// # Panics
    /// If there is none.
    pub(crate) fn index(&self, index: usize) -> &T {
        self.entries[index].value.as_ref().expect("a lane's shard outlives it")
    }

    /// The value at this index.
    ///
    /// # Panics
    /// If there is none.
    pub(crate) fn index_mut(&mut self, index: usize) -> &mut T {
        self.entries[index].value.as_mut().expect("a lane's shard outlives it")
    }

    /// Returns whether there is a value at this index.
    pub(crate) fn contains_index(&self, index: usize) -> bool {
        self.entries[index].value.is_some()
    }

    /// The index of the first wanted value.
    pub(crate) fn position(&self, wanted: impl Fn(&T) -> bool) -> Option<usize> {
        self.entries.iter().position(|entry| entry.value.as_ref().is_some_and(&wanted))
    }

    /// The tokens of all values.
    pub(crate) fn tokens(&self) -> Vec<u64> {
        let here = self.entries.iter().enumerate().filter(|(_, entry)| entry.value.is_some());
        here.map(|(index, entry)| u64::from(entry.generation) << 32 | index as u64).collect()
    }

    /// All values.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.entries.iter_mut().filter_map(|entry| entry.value.as_mut())
    }

    /// All values, removed from the table.
    pub(crate) fn into_values(self) -> impl Iterator<Item = T> {
        self.entries.into_iter().filter_map(|entry| entry.value)
    }

    /// All values.
    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().filter_map(|entry| entry.value.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_never_given_twice() {
        let mut table = Table::default();
        let first = table.insert('a');
        assert_eq!(table.remove(first), Some('a'));
        let second = table.insert('b');
        assert_ne!(first, second);
        assert_eq!(table.at_mut(first), None);
        assert_eq!(table.at_mut(second), Some(&mut 'b'));
        assert_eq!(table.remove(first), None);
        assert_eq!(table.tokens(), [second]);
        assert_eq!(table.values().collect::<String>(), "b");
    }
}
