//! Key-value stores for Python. One thread makes all calls of a store, in the order in which Python made
//! them. So no call blocks Python's thread, and calls that must keep their order do.

mod calls;
mod leases;
mod opening;
mod report;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use paramhub::Hyperparameters;
use paramhub::collective::kvstore::{Key, KvStore, OptimizerState, StoreError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors;
use crate::fork::{is_forked_child, refuse_in_child};
use crate::handle::{CompletionCounter, Handle};
use crate::memory::Memory;
use crate::waiting::{SIGNAL_INTERVAL, interruptible};

use calls::{CallRefusal, StoreCall, StoreCalls};
use leases::LeasedArrays;
pub(crate) use opening::open_store;
use report::{CallReport, LeasedPart, MemoryUse, arrays};

/// The time that a caller waits for the abort of a store to reach the other ranks.
const ABORT_TIMEOUT: Duration = Duration::from_secs(5);

/// A rank's key-value store. The memory passed to a call must be left alone until the call's handle has
/// ended.
#[pyclass(frozen, module = "paramhub._native")]
pub(crate) struct Store {
    calls: Arc<StoreCalls>,
    /// The store, which belongs to its thread; the thread drops it at its end.
    store: Weak<dyn KvStore>,
    leases: Arc<LeasedArrays>,
    store_name: Arc<str>,
    has_left: AtomicBool,
    #[pyo3(get)]
    kind: &'static str,
    #[pyo3(get)]
    rank: u32,
    #[pyo3(get)]
    size: u32,
}

/// A key as Python passes it: a name or a number.
#[derive(FromPyObject)]
pub(crate) enum Name {
    Number(u64),
    Text(String),
}

/// One key's part in a push, a pull or both.
struct KeyRequest {
    key: Key,
    values: Vec<LeasedPart>,
    outs: Vec<LeasedPart>,
}

type Memories<'py> = Vec<Bound<'py, Memory>>;

impl From<Name> for Key {
    fn from(name: Name) -> Key {
        match name {
            Name::Number(number) => Key::Number(number),
            Name::Text(text) => Key::Name(text.into()),
        }
    }
}

impl Store {
    fn new(store: Arc<dyn KvStore>) -> std::io::Result<Store> {
        let (kind, rank, size) = (store.kind().name(), store.rank(), store.size());
        let (calls, weak) = (Arc::new(StoreCalls::new()), Arc::downgrade(&store));
        let theirs = Arc::clone(&calls);
        std::thread::Builder::new().name("paramhub-store".into()).spawn(move || theirs.make(store))?;
        let store_name = format!("key-value store `{kind}`, rank {rank}").into();
        let (leases, has_left) = (Arc::default(), AtomicBool::new(false));
        Ok(Store { calls, store: weak, leases, store_name, has_left, kind, rank, size })
    }

    /// Queues a call for the store's thread. Waits while too many others wait.
    fn put(&self, py: Python<'_>, mut call: StoreCall) -> PyResult<()> {
        loop {
            let slice = Instant::now() + SIGNAL_INTERVAL;
            call = match py.detach(|| self.calls.put(call, slice)) {
                Ok(()) => return Ok(()),
                Err(CallRefusal::Closed) => return Err(self.gone(py)),
                Err(CallRefusal::Full(call)) => call,
            };
            py.check_signals()?;
        }
    }

    /// Queues a call whose handle ends when the store has made it.
    fn call(
        &self,
        py: Python<'_>,
        make: impl FnOnce(&dyn KvStore) -> Result<(), StoreError> + Send + 'static,
    ) -> PyResult<Handle> {
        self.check(py)?;
        let (counter, handle) = CompletionCounter::new(1);
        let report = CallReport::new(&self.store_name, &counter);
        self.put(py, StoreCall::Make(Box::new(move |store| report.end(&**store, make(&**store)))))?;
        Ok(handle)
    }

    /// Leases the memory of tensors for a call.
    fn parts(
        &self,
        py: Python<'_>,
        counter: &CompletionCounter,
        memories: &[Bound<'_, Memory>],
    ) -> PyResult<Vec<LeasedPart>> {
        let store = self.store.upgrade().ok_or_else(|| self.gone(py))?;
        let part = |memory| {
            let lease = self.leases.lease(store.engine(), memory)?;
            Ok(LeasedPart { lease, report: CallReport::new(&self.store_name, counter) })
        };
        memories.iter().map(part).collect()
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        refuse_in_child(py)?;
        match self.has_left.load(Ordering::Relaxed) {
            true => Err(self.gone(py)),
            false => Ok(()),
        }
    }

    fn gone(&self, py: Python<'_>) -> PyErr {
        errors::misuse(py, &format!("{}: the store was left", self.store_name))
    }

    /// Ends the store here, and at the other ranks, which receive the reason.
    fn give_up(&self, reason: &str) {
        self.has_left.store(true, Ordering::Relaxed);
        // Abort before the thread ends and drops the store, or the other ranks would see that first.
        if let Some(store) = self.store.upgrade() {
            store.abort(reason);
        }
        self.calls.close();
    }
}

#[pymethods]
impl Store {
    /// Gives keys their initial values; the handle ends when the values have been read.
    fn init(&self, py: Python<'_>, keys: Vec<(Name, Bound<'_, Memory>)>) -> PyResult<Handle> {
        self.check(py)?;
        let (counter, handle) = CompletionCounter::new(keys.len());
        let mut requests = Vec::with_capacity(keys.len());
        for (name, value) in keys {
            let values = self.parts(py, &counter, &[value])?;
            requests.push((Key::from(name), values));
        }
        let make = move |store: &Arc<dyn KvStore>| {
            for (key, values) in requests {
                for part in values {
                    let made = store.init(&key, part.lease.array());
                    part.follow(store, &key, made, MemoryUse::Reads);
                }
            }
        };
        self.put(py, StoreCall::Make(Box::new(make)))?;
        Ok(handle)
    }

    /// Pushes each key's values, then pulls into its outs, where it has any. The handle ends when the values
    /// have been read and the outs are written.
    fn exchange(
        &self,
        py: Python<'_>,
        keys: Vec<(Name, Memories<'_>, Memories<'_>)>,
        priority: i32,
    ) -> PyResult<Handle> {
        self.check(py)?;
        let parts = keys.iter().map(|(_, values, outs)| values.len() + outs.len()).sum();
        let (counter, handle) = CompletionCounter::new(parts);
        let mut requests = Vec::with_capacity(keys.len());
        for (name, values, outs) in keys {
            let (values, outs) = (self.parts(py, &counter, &values)?, self.parts(py, &counter, &outs)?);
            requests.push(KeyRequest { key: name.into(), values, outs });
        }
        self.put(py, StoreCall::Make(Box::new(move |store| exchange(store, requests, priority))))?;
        Ok(handle)
    }

    /// Chooses the optimizer, with hyperparameters in JSON or its defaults.
    #[pyo3(signature = (name, hyperparameters = None))]
    fn set_optimizer(&self, py: Python<'_>, name: String, hyperparameters: Option<&str>) -> PyResult<Handle> {
        let own = || {
            let known = paramhub::Registry::with_builtins().optimizer(&name);
            known.map_or_else(|_| Hyperparameters::default(), |optimizer| optimizer.defaults())
        };
        let numbers = match hyperparameters {
            Some(text) => parse(py, text)?,
            None => own(),
        };
        self.call(py, move |store| store.set_optimizer(&name, numbers))
    }

    /// Makes keys the next group, with hyperparameters in JSON.
    fn add_group(&self, py: Python<'_>, names: Vec<Name>, hyperparameters: &str) -> PyResult<Handle> {
        let numbers = parse(py, hyperparameters)?;
        let keys: Vec<Key> = names.into_iter().map(Key::from).collect();
        self.call(py, move |store| store.add_group(&keys, numbers).map(drop))
    }

    /// Sets the hyperparameters of a group, in JSON, from the next push on.
    #[pyo3(signature = (hyperparameters, group = 0))]
    fn set_hyperparameters(&self, py: Python<'_>, hyperparameters: &str, group: u16) -> PyResult<Handle> {
        let numbers = parse(py, hyperparameters)?;
        self.call(py, move |store| store.set_hyperparameters(group, numbers))
    }

    /// Returns a key's optimizer state, after all earlier calls: the f32 values of each slot, and the number of updates.
    fn optimizer_state<'py>(&self, py: Python<'py>, name: Name) -> PyResult<(Vec<Bound<'py, PyBytes>>, u64)> {
        self.check(py)?;
        let (give, given) = std::sync::mpsc::sync_channel(1);
        let key = Key::from(name);
        // A failure to send means that the caller no longer waits.
        let make = move |store: &Arc<dyn KvStore>| drop(give.send(store.optimizer_state(&key)));
        self.put(py, StoreCall::Make(Box::new(make)))?;
        let state = interruptible(py, move || given.recv())?.map_err(|_| self.gone(py))?;
        let state =
            state.map_err(|error| errors::store(py, &format!("{}: ", self.store_name), &error, None))?;
        let bytes = |slot: &Vec<f32>| slot.iter().copied().flat_map(f32::to_ne_bytes).collect::<Vec<u8>>();
        Ok((state.slots.iter().map(|slot| PyBytes::new(py, &bytes(slot))).collect(), state.updates))
    }

    /// Sets a key's optimizer state, from the f32 values of each slot.
    fn set_optimizer_state(
        &self,
        py: Python<'_>,
        name: Name,
        slots: Vec<Bound<'_, PyBytes>>,
        updates: u64,
    ) -> PyResult<Handle> {
        let key = Key::from(name);
        let value = |bytes: &[u8]| f32::from_ne_bytes(bytes.try_into().expect("four bytes each"));
        let values = |slot: &Bound<'_, PyBytes>| slot.as_bytes().chunks_exact(4).map(value).collect();
        let slots = slots.iter().map(values).collect();
        self.call(py, move |store| store.set_optimizer_state(&key, OptimizerState { slots, updates }))
    }

    /// Waits for every rank, and for this rank's earlier pushes and pulls.
    fn barrier(&self, py: Python<'_>) -> PyResult<Handle> {
        self.call(py, |store| store.barrier())
    }

    /// Leaves in order, after all earlier calls. No call may follow.
    fn leave(&self, py: Python<'_>) -> PyResult<Handle> {
        self.check(py)?;
        self.has_left.store(true, Ordering::Relaxed);
        let (counter, handle) = CompletionCounter::new(1);
        self.put(py, StoreCall::Leave(CallReport::new(&self.store_name, &counter)))?;
        Ok(handle)
    }

    /// Ends the store at once, here and at the other ranks, which receive the reason. Does nothing after it
    /// was left.
    fn abandon(&self, py: Python<'_>, reason: &str) {
        if !is_forked_child() {
            py.detach(|| {
                self.give_up(reason);
                self.calls.await_end(Instant::now() + ABORT_TIMEOUT);
            });
        }
    }
}

/// All pushes come before the first pull, as depcha needs for its order.
fn exchange(store: &Arc<dyn KvStore>, requests: Vec<KeyRequest>, priority: i32) {
    let mut pulls = Vec::with_capacity(requests.len());
    for KeyRequest { key, values, outs } in requests {
        let pushed = match values.is_empty() {
            true => Ok(()),
            false => store.push(&key, &arrays(&values), priority),
        };
        for part in values {
            part.follow(store, &key, pushed.clone(), MemoryUse::Reads);
        }
        pulls.push((key, outs, pushed));
    }
    for (key, outs, pushed) in pulls.into_iter().filter(|(_, outs, _)| !outs.is_empty()) {
        let pulled = pushed.and_then(|()| store.pull(&key, &arrays(&outs), priority));
        for part in outs {
            part.follow(store, &key, pulled.clone(), MemoryUse::Writes);
        }
    }
}

fn parse(py: Python<'_>, hyperparameters: &str) -> PyResult<Hyperparameters> {
    serde_json::from_str(hyperparameters)
        .map_err(|error| errors::misuse(py, &format!("hyperparameters cannot be used: {error}")))
}

impl Drop for Store {
    fn drop(&mut self) {
        // In a forked child the thread is the parent's, and so is the store.
        if !is_forked_child() && !self.has_left.load(Ordering::Relaxed) {
            let reason = format!("rank {} dropped its key-value store without leaving it", self.rank);
            Python::attach(|py| py.detach(|| self.give_up(&reason)));
        }
    }
}
