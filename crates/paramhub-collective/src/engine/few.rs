//! A list that is seldom long.

/// Room for the variables of most operations: one or two read, one or two mutated.
const INLINE: usize = 4;

/// Up to [`INLINE`] in place, so that an operation with few variables is one allocation.
pub(super) struct Few<T> {
    inline: [Option<T>; INLINE],
    more: Vec<T>,
}

impl<T> Few<T> {
    pub(super) fn new() -> Few<T> {
        Few { inline: [const { None }; INLINE], more: Vec::new() }
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

impl<T> FromIterator<T> for Few<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Few<T> {
        let mut few = Few::new();
        values.into_iter().for_each(|value| few.push(value));
        few
    }
}
