use std::sync::{Arc, Mutex, PoisonError};

use paramhub::Hyperparameters;
use paramhub_worker::RegionRequest;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors;
use crate::factors::FactorLayers;
use crate::fork::{is_forked_child, refuse_in_child};
use crate::handle::{CompletionCounter, Handle};
use crate::memory::Borrowed;
use crate::parts::JobParts;
use crate::tensor::Tensor;
use crate::waiting::interruptible;

/// A worker's part in a running job. Memory is passed as an address, a number of bytes and an object that
/// keeps the memory alive. The package's callers have checked the memory; this code cannot.
#[pyclass(frozen, module = "paramhub._native")]
pub(crate) struct Job {
    /// None after the job was left.
    job: Mutex<Option<Arc<JobParts>>>,
    #[pyo3(get)]
    name: String,
    #[pyo3(get)]
    rank: u32,
    #[pyo3(get)]
    workers: u32,
    #[pyo3(get)]
    shares_memory: bool,
    #[pyo3(get)]
    shares_parameters: bool,
}

/// A range of memory: address and bytes.
pub(crate) type Range = (usize, usize);
/// A layer exchanged by factors: its name, the keys of its weight and its bias, the most samples in a step,
/// and the type of its factors.
type FactorLayer = (String, u32, Option<u32>, usize, String);

impl Job {
    pub(crate) fn new(job: paramhub::Job, factors: Option<FactorLayers>) -> Self {
        Job {
            name: job.name().to_owned(),
            rank: job.rank(),
            workers: job.workers(),
            shares_memory: job.shares_memory(),
            shares_parameters: job.shares_parameters(),
            job: Mutex::new(Some(Arc::new(JobParts { factors, job: Arc::new(job) }))),
        }
    }

    pub(crate) fn job(&self, py: Python<'_>) -> PyResult<Arc<paramhub::Job>> {
        Ok(Arc::clone(&self.parts(py)?.job))
    }

    fn parts(&self, py: Python<'_>) -> PyResult<Arc<JobParts>> {
        refuse_in_child(py)?;
        let parts = self.job.lock().unwrap_or_else(PoisonError::into_inner).clone();
        parts.ok_or_else(|| {
            errors::misuse(py, &format!("job `{}`, rank {}: the job was left", self.name, self.rank))
        })
    }

    /// Submits a request for all keys; the handle ends with the last. If one key is refused, nothing is submitted.
    fn submit_all(
        &self,
        py: Python<'_>,
        keys: &[u32],
        mut request: impl FnMut(usize) -> RegionRequest,
    ) -> PyResult<Handle> {
        let parts = self.parts(py)?;
        let (counter, handle) = CompletionCounter::new(1);
        let requests = keys.iter().enumerate().map(|(index, &key)| (key, request(index)));
        let submitted = parts.job.submit_many(requests).map_err(|error| errors::worker(py, &error))?;
        counter.follow(&submitted);
        Ok(handle)
    }
}

/// A range of `owner`'s memory, to make a region of.
///
/// # Safety
/// See [`Borrowed::new`].
unsafe fn borrow(py: Python<'_>, owner: &Py<PyAny>, (address, bytes): Range) -> Borrowed {
    // SAFETY: the caller keeps to the contract of [`Borrowed::new`].
    unsafe { Borrowed::new(owner.clone_ref(py), address, bytes) }
}

#[pymethods]
impl Job {
    /// The number of the key called `name`, if there is one.
    fn key(&self, py: Python<'_>, name: &str) -> PyResult<Option<u32>> {
        Ok(self.job(py)?.key(name))
    }

    /// The step that the next push of a key contributes to.
    fn next_step(&self, py: Python<'_>, key: u32) -> PyResult<u32> {
        let parts = self.parts(py)?;
        match parts.factors.as_ref().and_then(|factors| Some((factors, factors.part(key)?))) {
            Some((factors, part)) => factors.next_step(part).map_err(|error| errors::factors(py, &error)),
            None => parts.job.next_step(key).map_err(|error| errors::worker(py, &error)),
        }
    }

    /// Contributes gradients from `sends`, one range a key; `owner` keeps all ranges alive.
    fn push(&self, py: Python<'_>, keys: Vec<u32>, sends: Vec<Range>, owner: Py<PyAny>) -> PyResult<Handle> {
        check_lengths(py, &keys, &[sends.len()])?;
        self.parts(py)?.check_through_hubs(py, &keys)?;
        self.submit_all(py, &keys, |index| {
            // SAFETY: the package keeps `owner`, and with it the range, alive and unchanged until the handle
            // has ended.
            RegionRequest::Push(unsafe { borrow(py, &owner, sends[index]) }.into_send())
        })
    }

    /// Receives parameters into `receives`.
    fn pull(
        &self,
        py: Python<'_>,
        keys: Vec<u32>,
        receives: Vec<Range>,
        owner: Py<PyAny>,
    ) -> PyResult<Handle> {
        check_lengths(py, &keys, &[receives.len()])?;
        self.submit_all(py, &keys, |index| {
            // SAFETY: the package keeps `owner`, and no code reads or writes the range until the handle has
            // ended.
            RegionRequest::Pull(unsafe { borrow(py, &owner, receives[index]) }.into_receive())
        })
    }

    /// Contributes gradients from `sends` and receives the updated parameters into `receives`. The two ranges of a key may be
    /// the same, but must not overlap otherwise.
    fn push_pull(
        &self,
        py: Python<'_>,
        keys: Vec<u32>,
        sends: Vec<Range>,
        receives: Vec<Range>,
        owner: Py<PyAny>,
    ) -> PyResult<Handle> {
        check_lengths(py, &keys, &[sends.len(), receives.len()])?;
        self.parts(py)?.check_through_hubs(py, &keys)?;
        self.submit_all(py, &keys, |index| {
            // SAFETY: as in `pull`.
            let receive = unsafe { borrow(py, &owner, receives[index]) }.into_receive();
            if sends[index] == receives[index] {
                return RegionRequest::PushPullInPlace(receive);
            }
            // SAFETY: as in `push`; ranges that differ do not overlap, as the caller of `push_pull` has promised.
            RegionRequest::PushPull(unsafe { borrow(py, &owner, sends[index]) }.into_send(), receive)
        })
    }

    /// Contributes gradients from `ranges` and receives the updated parameters into the same memory.
    fn push_pull_in_place(
        &self,
        py: Python<'_>,
        keys: Vec<u32>,
        ranges: Vec<Range>,
        owner: Py<PyAny>,
    ) -> PyResult<Handle> {
        check_lengths(py, &keys, &[ranges.len()])?;
        self.parts(py)?.check_through_hubs(py, &keys)?;
        self.submit_all(py, &keys, |index| {
            // SAFETY: as in `pull`.
            RegionRequest::PushPullInPlace(unsafe { borrow(py, &owner, ranges[index]) }.into_receive())
        })
    }

    /// Rank 0: sends the initial parameters, as of `version`.
    fn initialise(
        &self,
        py: Python<'_>,
        keys: Vec<u32>,
        sends: Vec<Range>,
        owner: Py<PyAny>,
        version: u32,
    ) -> PyResult<Handle> {
        check_lengths(py, &keys, &[sends.len()])?;
        self.submit_all(py, &keys, |index| {
            // SAFETY: as in `push`.
            RegionRequest::Initialise(unsafe { borrow(py, &owner, sends[index]) }.into_send(), version)
        })
    }

    /// Sets the hyperparameters, in JSON, of the keys of one group from `first_step` on.
    #[pyo3(signature = (first_step, hyperparameters, group = 0))]
    fn set_hyperparameters(
        &self,
        py: Python<'_>,
        first_step: u32,
        hyperparameters: &str,
        group: u16,
    ) -> PyResult<()> {
        let next: Hyperparameters = serde_json::from_str(hyperparameters)
            .map_err(|error| errors::misuse(py, &format!("hyperparameters cannot be used: {error}")))?;
        let parts = self.parts(py)?;
        if parts.factors.is_some() && self.rank != 0 {
            return Err(errors::misuse(
                py,
                &format!(
                    "job `{}`, rank {}: of layers that go by factors only rank 0 changes the hyperparameters, which the others \
                     learn with its factors: call it there",
                    self.name, self.rank
                ),
            ));
        }
        let set = py.detach(|| parts.job.set_group_hyperparameters(group, first_step, &next));
        set.map_err(|error| errors::worker(py, &error))?;
        let Some(factors) = &parts.factors else { return Ok(()) };
        factors
            .exchange()
            .set_hyperparameters(group, first_step, next)
            .map_err(|error| errors::misuse(py, &format!("job `{}`, rank {}: {error}", self.name, self.rank)))
    }

    /// The step of the checkpoint that the hubs have begun with, if they have.
    #[getter]
    fn resumed_step(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        Ok(self.job(py)?.resumed_step())
    }

    /// Returns whether the job's hubs are to write checkpoints.
    #[getter]
    fn has_checkpoints(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.job(py)?.has_checkpoints())
    }

    /// Whether the job was running already when this worker joined it, in the place of one that was lost.
    #[getter]
    fn joined_running(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.job(py)?.joined_running())
    }

    /// The number of steps from one to which the job can go back to the next, if it goes back when a worker is lost.
    #[getter]
    fn rewind_every(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        Ok(self.job(py)?.rewind_every())
    }

    /// Whether the job goes on without ranks that are lost.
    #[getter]
    fn loses_workers(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.job(py)?.loses_workers())
    }

    /// The number of state values that the job's optimizer keeps for each parameter; its slots are counted
    /// from 0.
    #[getter]
    fn state_slots(&self, py: Python<'_>) -> PyResult<u8> {
        Ok(self.job(py)?.state_slots())
    }

    /// Receives a slot of the keys' optimizer state, f32 values, into `receives`, and returns for each key
    /// the number of updates it has had.
    fn pull_state(
        &self,
        py: Python<'_>,
        keys: Vec<u32>,
        slot: u8,
        receives: Vec<Range>,
        owner: Py<PyAny>,
    ) -> PyResult<Vec<u64>> {
        check_lengths(py, &keys, &[receives.len()])?;
        let parts = self.parts(py)?;
        let mut handles = Vec::with_capacity(keys.len());
        // The updates of keys that are exchanged by factors.
        let mut known = vec![None; keys.len()];
        for (index, (&key, &receive)) in keys.iter().zip(&receives).enumerate() {
            // SAFETY: as in `pull`. If a signal ends the wait, the range belongs to the request, which keeps
            // `owner`.
            let mut range = unsafe { borrow(py, &owner, receive) };
            if let Some(factors) = &parts.factors
                && let Some(part) = factors.part(key)
            {
                let state = py.detach(|| factors.state(part, slot));
                let (values, updates) = state.map_err(|error| errors::factors(py, &error))?;
                range.write_f32(&values).map_err(|problem| errors::misuse(py, &problem))?;
                known[index] = Some(updates);
                continue;
            }
            let handle = parts.job.submit(key, RegionRequest::PullState(range.into_receive(), slot));
            handles.push(handle.map_err(|error| errors::worker(py, &error))?);
        }
        let ended = interruptible(py, move || {
            handles.into_iter().map(paramhub_worker::Handle::finish).collect::<Vec<_>>()
        })?;
        let mut ended = ended.into_iter().map(|request| request.outcome.map(|()| request.updates));
        let updates = known
            .into_iter()
            .map(|known| known.map_or_else(|| ended.next().expect("the others were asked at the hubs"), Ok));
        updates.collect::<Result<_, _>>().map_err(|error| errors::worker(py, &error))
    }

    /// Rank 0: sends a slot of the keys' initial optimizer state, f32 values, and the number of updates that
    /// each key has had.
    fn initialise_state(
        &self,
        py: Python<'_>,
        keys: Vec<u32>,
        slot: u8,
        sends: Vec<Range>,
        updates: Vec<u64>,
        owner: Py<PyAny>,
    ) -> PyResult<Handle> {
        check_lengths(py, &keys, &[sends.len(), updates.len()])?;
        self.submit_all(py, &keys, |index| {
            // SAFETY: as in `push`.
            let send = unsafe { borrow(py, &owner, sends[index]) }.into_send();
            RegionRequest::InitialiseState(send, slot, updates[index])
        })
    }

    /// The newest step of a job with two-phase steps whose mean gradient's norm is known, and the norm.
    fn last_gradient_norm(&self, py: Python<'_>) -> PyResult<Option<(u32, f64)>> {
        Ok(self.job(py)?.last_gradient_norm())
    }

    /// Waits for the norm of the whole mean gradient of a step, in a job with two-phase steps.
    fn gradient_norm(&self, py: Python<'_>, step: u32) -> PyResult<f64> {
        let awaited = self.job(py)?.gradient_norm(step).map_err(|error| errors::worker(py, &error))?;
        let known = interruptible(py, move || awaited.wait())?;
        known.map(|((), norm)| norm).map_err(|error| errors::worker(py, &error))
    }

    /// Rank 0, in a job with two-phase steps: has the hubs end a step with its mean gradient times `factor`, or without an
    /// update if that is None.
    fn release(&self, py: Python<'_>, step: u32, factor: Option<f32>) -> PyResult<()> {
        let job = self.job(py)?;
        let released = factor.map_or_else(|| job.skip(step), |factor| job.release(step, factor));
        released.map_err(|error| errors::worker(py, &error))
    }

    /// Saves this rank's program state of a step at the hub.
    fn save_program_state(&self, py: Python<'_>, step: u32, state: &[u8]) -> PyResult<Handle> {
        let job = self.job(py)?;
        // The bytes are copied, which takes a while.
        let saving = py.detach(|| job.save_program_state(step, state));
        let (counter, handle) = CompletionCounter::new(1);
        counter.follow(&saving.map_err(|error| errors::worker(py, &error))?);
        Ok(handle)
    }

    /// Receives this rank's program state of a step; None if the hub does not have it.
    fn program_state<'py>(&self, py: Python<'py>, step: u32) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let pulling = self.job(py)?.program_state(step).map_err(|error| errors::worker(py, &error))?;
        let pulled = interruptible(py, move || pulling.wait())?;
        let ((), state) = pulled.map_err(|error| errors::worker(py, &error))?;
        Ok(state.map(|state| PyBytes::new(py, &state)))
    }

    /// [`Job::push_pull`] into the parameters that this host's workers share.
    fn push_pull_shared(
        &self,
        py: Python<'_>,
        keys: Vec<u32>,
        sends: Vec<Range>,
        owner: Py<PyAny>,
    ) -> PyResult<Handle> {
        check_lengths(py, &keys, &[sends.len()])?;
        self.parts(py)?.check_through_hubs(py, &keys)?;
        self.submit_all(py, &keys, |index| {
            // SAFETY: as in `push`.
            RegionRequest::PushPullShared(unsafe { borrow(py, &owner, sends[index]) }.into_send())
        })
    }

    /// Memory for the gradients of the keys from `first` to before `end`, as one tensor.
    fn gradient_tensors(&self, py: Python<'_>, first: u32, end: u32) -> PyResult<Tensor> {
        let job = self.job(py)?;
        let memory = job.gradient_tensors(first..end).map_err(|error| errors::worker(py, &error))?;
        Ok(Tensor::flat(memory, job.settings().keys.keys()[first as usize].dtype))
    }

    /// Memory for the parameters of the keys from `first` to before `end`, as one tensor.
    fn parameter_tensors(&self, py: Python<'_>, first: u32, end: u32) -> PyResult<Tensor> {
        let job = self.job(py)?;
        let memory = job.parameter_tensors(first..end).map_err(|error| errors::worker(py, &error))?;
        Ok(Tensor::flat(memory, job.settings().keys.keys()[first as usize].dtype))
    }

    /// The parameters of the keys from `first` to before `end` as one tensor, which this host's workers
    /// share: to be read from the end of a request until the next one of a key.
    fn shared_parameters(&self, py: Python<'_>, first: u32, end: u32) -> PyResult<Tensor> {
        let job = self.job(py)?;
        let memory = job.shared_parameters_of(first..end).map_err(|error| errors::worker(py, &error))?;
        Ok(Tensor::shared(memory, job.settings().keys.keys()[first as usize].dtype))
    }

    /// Memory for a key's gradient, from which it is exchanged without a copy.
    fn gradient_tensor(&self, py: Python<'_>, key: u32) -> PyResult<Tensor> {
        let job = self.job(py)?;
        let memory = job.gradient_tensor(key).map_err(|error| errors::worker(py, &error))?;
        Ok(Tensor::of_key(memory, &job.settings().keys.keys()[key as usize]))
    }

    /// Memory for a key's parameters, into which they are received without a copy.
    fn parameter_tensor(&self, py: Python<'_>, key: u32) -> PyResult<Tensor> {
        let job = self.job(py)?;
        let memory = job.parameter_tensor(key).map_err(|error| errors::worker(py, &error))?;
        Ok(Tensor::of_key(memory, &job.settings().keys.keys()[key as usize]))
    }

    /// Returns the counters of the exchange so far.
    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let parts = self.parts(py)?;
        let statistics = parts.job.statistics();
        let factors = parts.factors.as_ref().map(FactorLayers::statistics).unwrap_or_default();
        let dict = PyDict::new(py);
        dict.set_item("bytes_sent", statistics.bytes_sent + factors.bytes_sent)?;
        dict.set_item("bytes_received", statistics.bytes_received + factors.bytes_received)?;
        dict.set_item("factor_bytes_sent", factors.bytes_sent)?;
        dict.set_item("rebuilding_s", factors.rebuilding.as_secs_f64())?;
        dict.set_item("requests", statistics.requests)?;
        dict.set_item("in_flight_s", statistics.in_flight.as_secs_f64())?;
        dict.set_item("streams_moved", statistics.streams_moved)?;
        Ok(dict)
    }

    /// Properties of the information book, as a JSON object of names and values; the whole book if none is
    /// named.
    fn query(&self, py: Python<'_>, properties: Vec<String>) -> PyResult<String> {
        let job = self.job(py)?;
        let names: Vec<&str> = properties.iter().map(String::as_str).collect();
        let found = match names.is_empty() {
            true => serde_json::to_string(job.information_book()),
            false => {
                let found = job
                    .information_book()
                    .query(&names)
                    .map_err(|error| errors::misuse(py, &error.to_string()))?;
                serde_json::to_string(&found)
            }
        };
        Ok(found.expect("a book is plain data"))
    }

    /// The scheme of a layer, as JSON.
    fn best_scheme(&self, py: Python<'_>, layer: &str) -> PyResult<String> {
        let best = self.job(py)?.information_book().best_scheme(layer);
        let best = best.map_err(|error| errors::misuse(py, &error.to_string()))?;
        Ok(serde_json::to_string(&best).expect("an answer is plain data"))
    }

    /// The name, the scheme and the reason for it of each layer in the plan.
    fn plan(&self, py: Python<'_>) -> PyResult<Vec<(String, String, String)>> {
        let job = self.job(py)?;
        let layers = job.information_book().plan.layers.iter();
        Ok(layers
            .map(|planned| (planned.layer.name.clone(), planned.scheme.to_string(), planned.why.to_string()))
            .collect())
    }

    /// The layers that are exchanged by factors, by their numbers.
    fn factor_layers(&self, py: Python<'_>) -> PyResult<Vec<FactorLayer>> {
        let parts = self.parts(py)?;
        let layers = parts.factors.iter().flat_map(FactorLayers::planned);
        Ok(layers
            .map(|planned| {
                let layer = &planned.layer;
                (layer.name.to_string(), planned.weight, planned.bias, layer.samples, layer.codec.to_string())
            })
            .collect())
    }

    /// Begins the layers that are exchanged by factors with the parameters in `ranges`, which rank 0 has
    /// initialised and the others have pulled, and with the state at the hubs; `owner` keeps the ranges
    /// alive.
    fn begin_factors(
        &self,
        py: Python<'_>,
        keys: Vec<u32>,
        ranges: Vec<Range>,
        owner: Py<PyAny>,
    ) -> PyResult<()> {
        check_lengths(py, &keys, &[ranges.len()])?;
        let parts = self.parts(py)?;
        let Some(factors) = &parts.factors else { return Ok(()) };
        let own = keys.into_iter().zip(ranges).filter(|(key, _)| factors.part(*key).is_some());
        // SAFETY: as in `push`.
        let parameters = own.map(|(key, range)| (key, unsafe { borrow(py, &owner, range) })).collect();
        let begun = interruptible(py, move || {
            parts.factors.as_ref().map_or(Ok(()), |factors| factors.begin(&parts.job, &parameters))
        })?;
        begun.map_err(|failure| failure.raise(py))
    }

    /// Sends the factors of a layer's step, inputs and output gradients, rows of samples in the type of its
    /// keys, and receives its new parameters, weight and bias. It copies the factors before it returns;
    /// `owner` keeps the other ranges alive.
    fn push_factors(
        &self,
        py: Python<'_>,
        layer: usize,
        factors: (Range, Range),
        parameters: (Range, Option<Range>),
        owner: Py<PyAny>,
    ) -> PyResult<Handle> {
        let parts = self.parts(py)?;
        let layers = parts.factors(py, layer)?;
        let (inputs, output_gradients) = factors;
        // SAFETY: as in `push`.
        let inputs = unsafe { borrow(py, &owner, inputs) };
        // SAFETY: as in `push`.
        let output_gradients = unsafe { borrow(py, &owner, output_gradients) };
        // SAFETY: as in `pull`.
        let weight = unsafe { borrow(py, &owner, parameters.0) };
        // SAFETY: as in `pull`.
        let bias = parameters.1.map(|bias| unsafe { borrow(py, &owner, bias) });
        let pushed = py.detach(move || layers.push(layer, &inputs, &output_gradients, weight, bias));
        pushed.map_err(|error| errors::factors(py, &error))
    }

    /// The exception that the job has failed with, or None.
    fn failure(&self, py: Python<'_>) -> PyResult<Option<PyErr>> {
        let parts = self.parts(py)?;
        let of_factors = || parts.factors.as_ref()?.exchange().failure();
        Ok(match parts.job.failure() {
            Some(error) => Some(errors::worker(py, &error)),
            None => of_factors().map(|error| errors::factors(py, &error)),
        })
    }

    /// Drops the job without leaving it: the hub notices the end of this process, and reports it to the other
    /// ranks.
    fn abandon(&self) {
        std::mem::forget(self.job.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Gives up: the hubs take this rank for lost, and the other ranks hear the reason. Does nothing if the job was left
    /// before, or is over.
    fn give_up(&self, py: Python<'_>, reason: &str) {
        let Some(parts) = self.job.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        py.detach(move || {
            parts.job.abort_handle().abort(reason);
            drop(parts);
        });
    }

    /// Waits for the requests under way and leaves the job. Does nothing if the job was left before.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        refuse_in_child(py)?;
        let Some(job) = self.job.lock().unwrap_or_else(PoisonError::into_inner).take() else { return Ok(()) };
        // A call on another thread may still hold the job, and then ends it when it returns.
        let Some(parts) = Arc::into_inner(job) else { return Ok(()) };
        let JobParts { factors, job } = parts;
        let left = interruptible(py, move || {
            // When this returns, every peer has this rank's factors.
            let factors = factors.map_or(Ok(()), |factors| factors.leave());
            let job = Arc::into_inner(job).map_or(Ok(()), paramhub::Job::leave);
            (factors, job)
        })?;
        // The job's own reason comes first: a mesh only reports a lost rank, while the hubs know why it is
        // lost.
        left.1.map_err(|error| errors::worker(py, &error))?;
        left.0.map_err(|error| errors::factors(py, &error))
    }
}

fn check_lengths(py: Python<'_>, keys: &[u32], ranges: &[usize]) -> PyResult<()> {
    match ranges.iter().all(|&ranges| ranges == keys.len()) {
        true => Ok(()),
        false => Err(errors::misuse(py, &format!("{} keys came with {ranges:?} ranges", keys.len()))),
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let job = self.job.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if is_forked_child() {
            // The thread is the parent's, and so is the part in the job.
            std::mem::forget(job);
        } else if let Some(job) = job {
            // Leaving may take long, so release the GIL.
            Python::attach(|py| py.detach(move || drop(job)));
        }
    }
}
