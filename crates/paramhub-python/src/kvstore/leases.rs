//! Memory of Python objects that a store's operations use: one array for each tensor, however many calls name
//! it, so that the engine knows their order.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use paramhub::collective::engine::Engine;
use paramhub::collective::kvstore::Array;
use pyo3::prelude::*;

use crate::errors;
use crate::memory::{Borrowed, Memory};

#[derive(Default)]
pub(super) struct LeasedArrays {
    /// The arrays by address; none overlaps another.
    places: Mutex<BTreeMap<usize, LeasedArray>>,
}

struct LeasedArray {
    array: Array,
    bytes: usize,
    leases: usize,
}

/// A call's lease of a tensor's array, until the call no longer uses it.
pub(super) struct ArrayLease {
    array: Array,
    /// `None` for an array without bytes, which has no place.
    address: Option<usize>,
    leases: Arc<LeasedArrays>,
}

impl LeasedArrays {
    pub(super) fn lease(
        self: &Arc<Self>,
        engine: &Engine,
        memory: &Bound<'_, Memory>,
    ) -> PyResult<ArrayLease> {
        let described = memory.get().description();
        let (address, bytes, dtype) = (described.address, described.bytes, described.dtype);
        let make = || {
            let owner = memory.clone().into_any().unbind();
            // SAFETY: a `Memory` keeps alive what it describes, and the package leaves it alone until the
            // handle has ended: no other code writes memory that is only read, and no other code reads or
            // writes memory that was lent for writing. The engine lets no two operations use it at the same
            // time, since there is one array for it.
            Array::over(engine, unsafe { Borrowed::new(owner, address, bytes) }.into_receive(), dtype)
        };
        let lease = |array, address| ArrayLease { array, address, leases: Arc::clone(self) };
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
            // Making an exception may give the GIL to another thread, which may then wait for this lock.
            drop(places);
            let problem = format!(
                "{bytes} bytes of {dtype} overlap {others} bytes of {of} that are under way: wait for these first"
            );
            return Err(errors::misuse(memory.py(), &problem));
        }
        let array = make();
        places.insert(address, LeasedArray { array: array.clone(), bytes, leases: 1 });
        Ok(lease(array, Some(address)))
    }

    fn places(&self) -> MutexGuard<'_, BTreeMap<usize, LeasedArray>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ArrayLease {
    pub(super) fn array(&self) -> &Array {
        &self.array
    }
}

impl Drop for ArrayLease {
    fn drop(&mut self) {
        let Some(address) = self.address else { return };
        let mut places = self.leases.places();
        let Some(place) = places.get_mut(&address) else { return };
        place.leases -= 1;
        if place.leases == 0 {
            let last = places.remove(&address);
            // Dropping the array may run Python code of its owner, so release the lock before.
            drop(places);
            drop(last);
        }
    }
}
