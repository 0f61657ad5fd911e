//! Key-value stores for Python. One thread makes all calls of a store, in the order in which Python made them: none of them waits in
//! Python, and what must not be called out of order is not.

mod calls;
mod lent;
mod opening;
mod report;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use paramhub::Hyperparameters;
use paramhub::collective::kvstore::{Key, KvStore, StoreError};
use pyo3::prelude::*;

use crate::errors;
use crate::fork::{is_forked_child, refuse_in_child};
use crate::handle::{Counter, Handle};
use crate::memory::Memory;
use crate::waiting::SIGNAL_INTERVAL;

use calls::{Call, Calls, Refusal};
use lent::Lent;
pub(crate) use opening::open_store;
use report::{Part, Report, Use, arrays};

/// How long one that is given up may take to tell the others, where somebody waits for that.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// A rank's end of a key-value store. What it is lent must be left alone until the call's handle has ended.
#[pyclass(frozen, module = "paramhub._native")]
pub(crate) struct Store {
    calls: Arc<Calls>,
    /// The thread's, which ends it.
    store: Weak<dyn KvStore>,
    lent: Arc<Lent>,
    who: Arc<str>,
    has_left: AtomicBool,
    #[pyo3(get)]
    kind: &'static str,
    #[pyo3(get)]
    rank: u32,
    #[pyo3(get)]
    size: u32,
}

/// A key as Python has it.
#[derive(FromPyObject)]
pub(crate) enum Name {
    Number(u64),
    Text(String),
}

/// What a push, a pull or both do with a key.
struct Errand {
    key: Key,
    values: Vec<Part>,
    outs: Vec<Part>,
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
        let (calls, weak) = (Arc::new(Calls::new()), Arc::downgrade(&store));
        let theirs = Arc::clone(&calls);
        std::thread::Builder::new().name("paramhub-store".into()).spawn(move || theirs.make(store))?;
        let who = format!("key-value store `{kind}`, rank {rank}").into();
        let (lent, has_left) = (Arc::default(), AtomicBool::new(false));
        Ok(Store { calls, store: weak, lent, who, has_left, kind, rank, size })
    }

    /// Hands a call to the store's thread. Where too many wait already, it waits, too.
    fn put(&self, py: Python<'_>, mut call: Call) -> PyResult<()> {
        loop {
            let slice = Instant::now() + SIGNAL_INTERVAL;
            call = match py.detach(|| self.calls.put(call, slice)) {
                Ok(()) => return Ok(()),
                Err(Refusal::Closed) => return Err(self.gone(py)),
                Err(Refusal::Full(call)) => call,
            };
            py.check_signals()?;
        }
    }

    /// A call that ends when the store has made it.
    fn call(
        &self,
        py: Python<'_>,
        make: impl FnOnce(&dyn KvStore) -> Result<(), StoreError> + Send + 'static,
    ) -> PyResult<Handle> {
        self.check(py)?;
        let (counter, handle) = Counter::new(1);
        let report = Report::new(&self.who, &counter);
        self.put(py, Call::Make(Box::new(move |store| report.end(&**store, make(&**store)))))?;
        Ok(handle)
    }

    /// Tensors as a call has them.
    fn parts(
        &self,
        py: Python<'_>,
        counter: &Counter,
        memories: &[Bound<'_, Memory>],
    ) -> PyResult<Vec<Part>> {
        let store = self.store.upgrade().ok_or_else(|| self.gone(py))?;
        let part = |memory| {
            let lease = self.lent.lease(store.engine(), memory)?;
            Ok(Part { lease, report: Report::new(&self.who, counter) })
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
        errors::misuse(py, &format!("{}: the store was left", self.who))
    }

    /// Ends it here, and at the others for this reason.
    fn give_up(&self, reason: &str) {
        self.has_left.store(true, Ordering::Relaxed);
        // Before the thread ends and drops it, of which others would hear first.
        if let Some(store) = self.store.upgrade() {
            store.abort(reason);
        }
        self.calls.close();
    }
}

#[pymethods]
impl Store {
    /// Gives keys their values; the handle ends when these have been read.
    fn init(&self, py: Python<'_>, keys: Vec<(Name, Bound<'_, Memory>)>) -> PyResult<Handle> {
        self.check(py)?;
        let (counter, handle) = Counter::new(keys.len());
        let mut errands = Vec::with_capacity(keys.len());
        for (name, value) in keys {
            let values = self.parts(py, &counter, &[value])?;
            errands.push((Key::from(name), values));
        }
        let make = move |store: &Arc<dyn KvStore>| {
            for (key, values) in errands {
                for part in values {
                    let made = store.init(&key, part.lease.array());
                    part.follow(store, &key, made, Use::Reads);
                }
            }
        };
        self.put(py, Call::Make(Box::new(make)))?;
        Ok(handle)
    }

    /// Pushes each key's values, then pulls into its outs, where it has any. The handle ends when the values have been read and the
    /// outs are there.
    fn exchange(
        &self,
        py: Python<'_>,
        keys: Vec<(Name, Memories<'_>, Memories<'_>)>,
        priority: i32,
    ) -> PyResult<Handle> {
        self.check(py)?;
        let parts = keys.iter().map(|(_, values, outs)| values.len() + outs.len()).sum();
        let (counter, handle) = Counter::new(parts);
        let mut errands = Vec::with_capacity(keys.len());
        for (name, values, outs) in keys {
            let (values, outs) = (self.parts(py, &counter, &values)?, self.parts(py, &counter, &outs)?);
            errands.push(Errand { key: name.into(), values, outs });
        }
        self.put(py, Call::Make(Box::new(move |store| exchange(store, errands, priority))))?;
        Ok(handle)
    }

    /// Chooses the optimizer, with hyperparameters in JSON or its own.
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

    /// Hyperparameters in JSON that hold from the next push on.
    fn set_hyperparameters(&self, py: Python<'_>, hyperparameters: &str) -> PyResult<Handle> {
        let numbers = parse(py, hyperparameters)?;
        self.call(py, move |store| store.set_hyperparameters(numbers))
    }

    /// Waits for every rank, and for what this one has pushed and pulled.
    fn barrier(&self, py: Python<'_>) -> PyResult<Handle> {
        self.call(py, |store| store.barrier())
    }

    /// Leaves the other ranks in order, after all calls before it. None follows.
    fn leave(&self, py: Python<'_>) -> PyResult<Handle> {
        self.check(py)?;
        self.has_left.store(true, Ordering::Relaxed);
        let (counter, handle) = Counter::new(1);
        self.put(py, Call::Leave(Report::new(&self.who, &counter)))?;
        Ok(handle)
    }

    /// Ends it at once, here and at the other ranks, which are told the reason. One that has been left stays so.
    fn abandon(&self, py: Python<'_>, reason: &str) {
        if !is_forked_child() {
            py.detach(|| {
                self.give_up(reason);
                self.calls.await_end(Instant::now() + LAST_WORDS);
            });
        }
    }
}

/// All pushes come before the first pull, as depcha likes them.
fn exchange(store: &Arc<dyn KvStore>, errands: Vec<Errand>, priority: i32) {
    let mut pulls = Vec::with_capacity(errands.len());
    for Errand { key, values, outs } in errands {
        let pushed = match values.is_empty() {
            true => Ok(()),
            false => store.push(&key, &arrays(&values), priority),
        };
        for part in values {
            part.follow(store, &key, pushed.clone(), Use::Reads);
        }
        pulls.push((key, outs, pushed));
    }
    for (key, outs, pushed) in pulls.into_iter().filter(|(_, outs, _)| !outs.is_empty()) {
        let pulled = pushed.and_then(|()| store.pull(&key, &arrays(&outs), priority));
        for part in outs {
            part.follow(store, &key, pulled.clone(), Use::Writes);
        }
    }
}

fn parse(py: Python<'_>, hyperparameters: &str) -> PyResult<Hyperparameters> {
    serde_json::from_str(hyperparameters)
        .map_err(|error| errors::misuse(py, &format!("hyperparameters cannot be used: {error}")))
}

impl Drop for Store {
    fn drop(&mut self) {
        // Of a forked child's the thread is the parent's, and so is the store.
        if !is_forked_child() && !self.has_left.load(Ordering::Relaxed) {
            let reason = format!("rank {} dropped its key-value store without leaving it", self.rank);
            Python::attach(|py| py.detach(|| self.give_up(&reason)));
        }
    }
}
