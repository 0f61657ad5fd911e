//! A list that is short in most cases.

/// Room for the variables of most operations: one or two that it reads, one or two that it mutates.
const INLINE: usize = 4;

/// A list with up to [`INLINE`] elements in place, so that an operation with few variables is one allocation.
pub(super) struct SmallList<T> {
    inline: [Option<T>; INLINE],
    more: Vec<T>,
}

impl<T> SmallList<T> {
    pub(super) fn new() -> SmallList<T> {
        SmallList { inline: [const { None }; INLINE], more: Vec::new() }
    }

    pub(super) fn push(&mut self, value: T) {
        match self.inline.iter_mut().find(|slot| slot.is_none()) {
            Some(slot) => *slot = Some(value),
            None => self.more.push(value),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.iter().count()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.inline.iter().flatten().chain(&self.more)
    }

    pub(super) fn into_vec(self) -> Vec<T> {
        self.inline.into_iter().flatten().chain(self.more).collect()
    }
}

impl<T> FromIterator<T> for SmallList<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> SmallList<T> {
        let mut list = SmallList::new();
        values.into_iter().for_each(|value| list.push(value));
        list
    }
}
