//! Values under keys that are never used twice.

/// Names a value for as long as it is stored. The lower half is its place, the upper half distinguishes the
/// successive values of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlabKey(u64);

impl SlabKey {
    /// The key as it travels.
    pub(crate) fn to_wire(self) -> u64 {
        self.0
    }

    pub(crate) fn from_wire(number: u64) -> Self {
        SlabKey(number)
    }

    fn place(self) -> usize {
        (self.0 & u64::from(u32::MAX)) as usize
    }
}

#[derive(Debug)]
pub(crate) struct Slab<T> {
    places: Vec<SlabEntry<T>>,
    ready: Vec<u32>,
    used: usize,
}

#[derive(Debug)]
struct SlabEntry<T> {
    tenancy: u32,
    value: Option<T>,
}

impl<T> Slab<T> {
    pub(crate) fn new() -> Self {
        Slab { places: Vec::new(), ready: Vec::new(), used: 0 }
    }

    pub(crate) fn insert(&mut self, value: T) -> SlabKey {
        self.used += 1;
        let index = self.ready.pop().unwrap_or_else(|| {
            self.places.push(SlabEntry { tenancy: 0, value: None });
            self.places.len() as u32 - 1
        });
        let place = &mut self.places[index as usize];
        place.tenancy = place.tenancy.wrapping_add(1);
        place.value = Some(value);
        SlabKey(u64::from(place.tenancy) << 32 | u64::from(index))
    }

    pub(crate) fn get(&self, key: SlabKey) -> Option<&T> {
        let place = self.places.get(key.place())?;
        if u64::from(place.tenancy) == key.0 >> 32 { place.value.as_ref() } else { None }
    }

    pub(crate) fn get_mut(&mut self, key: SlabKey) -> Option<&mut T> {
        let place = self.places.get_mut(key.place())?;
        if u64::from(place.tenancy) == key.0 >> 32 { place.value.as_mut() } else { None }
    }

    pub(crate) fn remove(&mut self, key: SlabKey) -> Option<T> {
        self.get(key)?;
        self.used -= 1;
        self.ready.push(key.place() as u32);
        self.places[key.place()].value.take()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SlabKey, &T)> {
        self.places.iter().enumerate().filter_map(|(index, place)| {
            let key = SlabKey(u64::from(place.tenancy) << 32 | index as u64);
            place.value.as_ref().map(|value| (key, value))
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.used
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.used == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_dies_with_its_value() {
        let mut slab = Slab::new();
        let first = slab.insert('a');
        assert_eq!(slab.remove(first), Some('a'));
        let second = slab.insert('b');
        assert_eq!((slab.get(first), slab.get(second)), (None, Some(&'b')));
        assert_eq!((slab.remove(first), slab.len()), (None, 1));
        assert_eq!(slab.iter().collect::<Vec<_>>(), [(second, &'b')]);
        assert_eq!(slab.get(SlabKey::from_wire(u64::MAX)), None);
    }
}
