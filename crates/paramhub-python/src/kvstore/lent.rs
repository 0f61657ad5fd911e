//! Memory of Python's while a store's operations have it: one array for each tensor, however many calls name it, so that the engine
//! knows their order.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use paramhub::collective::engine::Engine;
use paramhub::collective::kvstore::Array;
use pyo3::prelude::*;

use crate::errors;
use crate::memory::{Borrowed, Memory};

#[derive(Default)]
pub(super) struct Lent {
    /// By address; none overlaps another.
    places: Mutex<BTreeMap<usize, Place>>,
}

struct Place {
    array: Array,
    bytes: usize,
    leases: usize,
}

/// A tensor's array, until a call is done with it.
pub(super) struct Lease {
    array: Array,
    /// None of no bytes, which are in no place.
    address: Option<usize>,
    lent: Arc<Lent>,
}

impl Lent {
    pub(super) fn lease(self: &Arc<Self>, engine: &Engine, memory: &Bound<'_, Memory>) -> PyResult<Lease> {
        let described = memory.get().description();
        let (address, bytes, dtype) = (described.address, described.bytes, described.dtype);
        let make = || {
            let owner = memory.clone().into_any().unbind();
            // SAFETY: a `Memory` keeps what it describes, and the package leaves it alone until the handle has ended: of what is only
            // read nobody else writes, and what is written, which was lent for that, nobody else looks at. The engine lets no two
            // operations meet in it, since there is one array for it.
            Array::over(engine, unsafe { Borrowed::new(owner, address, bytes) }.into_receive(), dtype)
        };
        let lease = |array, address| Lease { array, address, lent: Arc::clone(self) };
        if bytes == 0 {
            return Ok(lease(make(), None));
        }
        let mut places = self.places();
        if let Some(place) = places.get_mut(&address)
            && (place.bytes, place.array.dtype()) == (bytes, dtype)
        {
            place.leases += 1;
            return Ok(lease(place.array.clone(), Some(address)));
        }
        let before = places.range(..address + bytes).next_back();
        if let Some((_, place)) = before.filter(|(other, place)| *other + place.bytes > address) {
            let (others, of) = (place.bytes, place.array.dtype());
            // An exception may let another thread have the GIL, which may then wait for this lock.
            drop(places);
            let problem = format!(
                "{bytes} bytes of {dtype} overlap {others} bytes of {of} that are under way: wait for these first"
            );
            return Err(errors::misuse(memory.py(), &problem));
        }
        let array = make();
        places.insert(address, Place { array: array.clone(), bytes, leases: 1 });
        Ok(lease(array, Some(address)))
    }

    fn places(&self) -> MutexGuard<'_, BTreeMap<usize, Place>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lease {
    pub(super) fn array(&self) -> &Array {
        &self.array
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(address) = self.address else { return };
        let mut places = self.lent.places();
        let Some(place) = places.get_mut(&address) else { return };
        place.leases -= 1;
        if place.leases == 0 {
            let last = places.remove(&address);
            // Its owner may be told, which may be Python's code.
            drop(places);
            drop(last);
        }
    }
}
