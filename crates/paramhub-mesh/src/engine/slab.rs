//! Values under keys that are never used twice.

/// Names a value for as long as it is there. The lower half is its place, the upper half tells its tenants apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key(u64);

impl Key {
    /// For the wire.
    pub(crate) fn to_wire(self) -> u64 {
        self.0
    }

    pub(crate) fn from_wire(number: u64) -> Self {
        Key(number)
    }

    fn place(self) -> usize {
        (self.0 & u64::from(u32::MAX)) as usize
    }
}

#[derive(Debug)]
pub(crate) struct Slab<T> {
    places: Vec<Place<T>>,
    free: Vec<u32>,
    used: usize,
}

#[derive(Debug)]
struct Place<T> {
    tenancy: u32,
    value: Option<T>,
}

impl<T> Slab<T> {
    pub(crate) fn new() -> Self {
        Slab { places: Vec::new(), free: Vec::new(), used: 0 }
    }

    pub(crate) fn insert(&mut self, value: T) -> Key {
        self.used += 1;
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place { tenancy: 0, value: None });
            self.places.len() as u32 - 1
        });
        let place = &mut self.places[index as usize];
        place.tenancy = place.tenancy.wrapping_add(1);
        place.value = Some(value);
        Key(u64::from(place.tenancy) << 32 | u64::from(index))
    }

    pub(crate) fn get(&self, key: Key) -> Option<&T> {
        let place = self.places.get(key.place())?;
        if u64::from(place.tenancy) == key.0 >> 32 { place.value.as_ref() } else { None }
    }

    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let place = self.places.get_mut(key.place())?;
        if u64::from(place.tenancy) == key.0 >> 32 { place.value.as_mut() } else { None }
    }

    pub(crate) fn remove(&mut self, key: Key) -> Option<T> {
        self.get(key)?;
        self.used -= 1;
        self.free.push(key.place() as u32);
        self.places[key.place()].value.take()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        self.places.iter().enumerate().filter_map(|(index, place)| {
            let key = Key(u64::from(place.tenancy) << 32 | index as u64);
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
        assert_eq!(slab.get(Key::from_wire(u64::MAX)), None);
    }
}
