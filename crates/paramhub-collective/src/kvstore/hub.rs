//! This module has the key-value store whose sums and parameters a hub computes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use paramhub_core::codec::{Codec, Dtype};
use paramhub_core::consistency::Consistency;
use paramhub_core::key::{Key as TableKey, KeyTable};
use paramhub_core::settings::{OptimizerChoice, Settings, needs_tensor_norms};
use paramhub_kernels::Hyperparameters;
use paramhub_syncer::{PeerAddresses, PeerListener, PortRange};
use paramhub_transport::{BufferSlot, ReceiveRegion, SendRegion};
use paramhub_worker::{Job, Member, Membership, Options, RegionRequest, WorkerError};

use super::{Array, Key, KvStore, OptimizerState, StoreError, StoreKind};
use crate::communicator::{Communicator, MeshCommunicator};
use crate::engine::{Completion, Engine, Kind};

/// The job that a rank joins for its store, and the options with which it exchanges there.
#[derive(Clone, Debug)]
pub struct HubStoreConfig {
    /// The rank's membership in the job. No process may have joined the job as this rank yet.
    pub membership: Membership,
    /// The worker's options.
    pub options: Options,
    /// The codec of gradients; `None` if they travel in the dtype that they have in memory.
    pub codec: Option<Codec>,
    /// `true` if hubs sum in rank order, so that sums have the same bits in every run.
    pub reproducible: bool,
    /// How far ranks may be apart. An answer has the parameters after this rank's push, so that pulls of an asynchronous
    /// store get what the last push got.
    pub consistency: Consistency,
}

pub(super) struct HubStore {
    engine: Arc<Engine>,
    /// The communicator of all ranks of the job, which carries the initial values and the barriers.
    ranks: MeshCommunicator,
    config: HubStoreConfig,
    state: Mutex<HubStoreState>,
}

struct HubStoreState {
    /// The connected member. The first push turns it into the job, because all keys are known by then.
    member: Option<Member>,
    /// The job; `None` before the first push.
    job: Option<Arc<Job>>,
    entries: HashMap<Key, Arc<HubEntry>>,
    /// The entries in the order of the job's table.
    order: Vec<Arc<HubEntry>>,
    optimizer: Option<OptimizerChoice>,
    /// The optimizer's states with which the job begins.
    restored: Vec<(Arc<HubEntry>, OptimizerState)>,
}

/// A key's entry. Its memory goes to the hub with a gradient and comes back with the key's value.
struct HubEntry {
    key: Key,
    /// The position of the key in the job's key table.
    number: u32,
    /// The key's value, in one dimension.
    buffer: Array,
    memory: EntryMemory,
    /// The group whose hyperparameters the key's updates have.
    group: AtomicU16,
}

/// The memory of the buffer, which the worker's I/O thread borrows.
#[derive(Clone)]
enum EntryMemory {
    /// The elements are f32.
    Single(Arc<BufferSlot<Vec<f32>>>),
    /// The elements are f16 or bf16, and `u16` has their bits.
    Half(Arc<BufferSlot<Vec<u16>>>),
}

impl HubStoreConfig {
    /// A configuration with a job's defaults.
    pub fn new(membership: Membership) -> HubStoreConfig {
        let (codec, reproducible, consistency) = (None, false, Consistency::default());
        HubStoreConfig { membership, options: Options::default(), codec, reproducible, consistency }
    }
}

impl HubStore {
    /// Joins the job, and waits until every rank of the job has connected.
    pub(super) fn new(engine: Arc<Engine>, config: HubStoreConfig) -> Result<HubStore, StoreError> {
        let ranks_error = |error| StoreError::Ranks(Arc::new(error));
        let peer_listener = PeerListener::listen(&config.membership, PortRange::ANY).map_err(ranks_error)?;
        let options = Options { peer_address: Some(peer_listener.address()), ..config.options.clone() };
        let member = Member::connect_with(config.membership.clone(), options)?;
        let mesh = peer_listener.join(&PeerAddresses::of(&member), "key-value store").map_err(ranks_error)?;
        let state = HubStoreState {
            member: Some(member),
            job: None,
            entries: HashMap::new(),
            order: Vec::new(),
            optimizer: None,
            restored: Vec::new(),
        };
        Ok(HubStore { engine, ranks: MeshCommunicator::over(mesh), config, state: Mutex::new(state) })
    }

    /// Returns the entry of a key. Fails if the key has no value yet, or if an array's dtype or length
    /// differs from the value's.
    fn entry(&self, key: &Key, arrays: &[Array]) -> Result<Arc<HubEntry>, StoreError> {
        let entry = self.entry_of(key)?;
        super::entry_table::check(key, &entry.buffer, arrays)?;
        Ok(entry)
    }

    fn entry_of(&self, key: &Key) -> Result<Arc<HubEntry>, StoreError> {
        let entry = self.state().entries.get(key).cloned();
        entry.ok_or_else(|| super::entry_table::no_value(key))
    }

    /// Returns the job. The first call opens it, with all keys that have a value by then: these are the same
    /// keys at every rank.
    fn job(&self) -> Result<Arc<Job>, StoreError> {
        let mut state = self.state();
        if let Some(job) = &state.job {
            return Ok(Arc::clone(job));
        }
        let member = state.member.take().ok_or(StoreError::Sequence("its job could not be opened"))?;
        let keys = state.order.iter().map(|entry| TableKey {
            // A key that was initialised earlier is needed earlier, as in a network's forward pass.
            priority: -(entry.number as i32),
            dtype: entry.buffer.dtype(),
            group: entry.group(),
            ..TableKey::new(entry.key.to_string(), [entry.buffer.elements() as u64])
        });
        let table = KeyTable::new(keys.collect()).map_err(|error| StoreError::Options(error.to_string()))?;
        let optimizer = state.optimizer.clone().unwrap_or_else(|| OptimizerChoice::named("sum"));
        let HubStoreConfig { codec, reproducible, consistency, .. } = self.config;
        let settings = Settings { optimizer, codec, reproducible, consistency, ..Settings::new(table) };
        let job = Arc::new(member.init(settings)?);
        restore_state(&job, std::mem::take(&mut state.restored))?;
        if job.settings().has_parameters() {
            self.exchange_parameters(&job, &state.order)?;
        }
        state.job = Some(Arc::clone(&job));
        Ok(job)
    }

    /// Sets the hub's parameters to the initial values. All ranks have these values already, so rank 0 sends
    /// them and the others pull. In a job that goes on from a checkpoint all ranks pull, and get the checkpoint's.
    fn exchange_parameters(&self, job: &Job, entries: &[Arc<HubEntry>]) -> Result<(), StoreError> {
        let mut handles = Vec::with_capacity(entries.len());
        for entry in entries {
            self.engine.wait_to_mutate(entry.buffer.variable())?;
            entry.withdraw();
            let request = match sends_beginning(job) {
                true => RegionRequest::Initialise(entry.memory.lend_to_send(), 0),
                false => RegionRequest::Pull(entry.memory.lend()),
            };
            handles.push(job.submit(entry.number, request)?);
        }
        for (handle, entry) in handles.into_iter().zip(entries) {
            handle.wait()?;
            entry.restore();
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, HubStoreState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HubStoreState {
    fn check_has_optimizer(&self) -> Result<(), StoreError> {
        let optimizer = self.optimizer.as_ref().map(drop);
        optimizer.ok_or(StoreError::Sequence(super::entry_table::NO_OPTIMIZER))
    }
}

impl HubEntry {
    fn new(engine: &Engine, key: Key, number: u32, dtype: Dtype, elements: usize) -> HubEntry {
        let memory = match dtype {
            Dtype::F32 => EntryMemory::Single(Arc::new(BufferSlot::new(vec![0.0; elements]))),
            Dtype::F16 | Dtype::BF16 => EntryMemory::Half(Arc::new(BufferSlot::new(vec![0; elements]))),
        };
        let buffer = Array::over(engine, memory.lend(), dtype);
        HubEntry { key, number, buffer, memory, group: AtomicU16::new(0) }
    }

    fn group(&self) -> u16 {
        self.group.load(Ordering::Relaxed)
    }

    fn set_group(&self, group: u16) {
        self.group.store(group, Ordering::Relaxed);
    }

    /// Takes the memory from the buffer, so that the worker can borrow it.
    fn withdraw(&self) {
        drop(self.buffer.swap(ReceiveRegion::owned(Vec::<u8>::new())));
    }

    /// Gives the memory back to the buffer.
    fn restore(&self) {
        drop(self.buffer.swap(self.memory.lend()));
    }

    /// Sends the buffer's contents, and ends the operation when the answer has replaced them. The caller must
    /// be an operation that mutates the buffer.
    fn exchange(self: Arc<Self>, job: &Job, completion: Completion) {
        self.withdraw();
        match job.submit(self.number, RegionRequest::PushPullInPlace(self.memory.lend())) {
            Ok(handle) => handle.on_complete(move |outcome: &Result<(), WorkerError>| {
                self.restore();
                completion.end_with(outcome.clone());
            }),
            Err(error) => {
                self.restore();
                completion.fail(error);
            }
        }
    }
}

impl EntryMemory {
    fn lend(&self) -> ReceiveRegion {
        match self {
            EntryMemory::Single(slot) => ReceiveRegion::owned(slot.lend().expect("it was returned")),
            EntryMemory::Half(slot) => ReceiveRegion::owned(slot.lend().expect("it was returned")),
        }
    }

    fn lend_to_send(&self) -> SendRegion {
        match self {
            EntryMemory::Single(slot) => SendRegion::owned(slot.lend().expect("it was returned")),
            EntryMemory::Half(slot) => SendRegion::owned(slot.lend().expect("it was returned")),
        }
    }
}

impl KvStore for HubStore {
    fn kind(&self) -> StoreKind {
        StoreKind::Hub
    }

    fn rank(&self) -> u32 {
        self.ranks.rank()
    }

    fn size(&self) -> u32 {
        self.ranks.size()
    }

    fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    fn init(&self, key: &Key, value: &Array) -> Result<(), StoreError> {
        let entry = {
            let mut state = self.state();
            if state.job.is_some() {
                return Err(key_error(
                    key,
                    "a job's keys are known when it begins: init all of them before the first push".into(),
                ));
            }
            if state.entries.contains_key(key) {
                return Err(key_error(key, super::entry_table::HAS_VALUE.into()));
            }
            let number = state.order.len() as u32;
            let entry = HubEntry::new(&self.engine, key.clone(), number, value.dtype(), value.elements());
            let entry = Arc::new(entry);
            state.entries.insert(key.clone(), Arc::clone(&entry));
            state.order.push(Arc::clone(&entry));
            entry
        };
        let values = std::slice::from_ref(value);
        super::entry_table::sum_into_buffer(&self.engine, key, &entry.buffer, values, 0)?;
        self.engine.wait_to_mutate(entry.buffer.variable())?;
        entry.buffer.write(|bytes| self.ranks.broadcast(&key.to_string(), bytes, 0))?;
        Ok(())
    }

    fn push(&self, key: &Key, values: &[Array], priority: i32) -> Result<(), StoreError> {
        let entry = self.entry(key, values)?;
        let job = self.job()?;
        super::entry_table::sum_into_buffer(&self.engine, key, &entry.buffer, values, priority)?;
        let pushed = Arc::clone(&entry);
        self.engine
            .operation(format!("push and pull {key}"), Kind::Communicate)
            .mutates([entry.buffer.variable()])
            .priority(priority)
            .push_deferred(move |completion| pushed.exchange(&job, completion))?;
        Ok(())
    }

    fn pull(&self, key: &Key, outs: &[Array], priority: i32) -> Result<(), StoreError> {
        let entry = self.entry(key, outs)?;
        super::entry_table::copy_back(&self.engine, key, &entry.buffer, outs, priority)
    }

    fn set_optimizer(&self, name: &str, hyperparameters: Hyperparameters) -> Result<(), StoreError> {
        let mut state = self.state();
        if state.job.is_some() {
            return Err(StoreError::Sequence(super::entry_table::TOO_LATE));
        }
        if needs_tensor_norms(name) {
            // The push of a key could not end before all other keys are pushed, too.
            let reason = "at a hub it updates no key before all keys are pushed, and a store's keys are pushed one by one";
            return Err(StoreError::Options(format!(
                "a hub's store cannot have the optimizer {name}: {reason}"
            )));
        }
        let named = OptimizerChoice::named(name);
        state.optimizer = Some(OptimizerChoice { hyperparameters: Some(hyperparameters), ..named });
        state.order.iter().for_each(|entry| entry.set_group(0));
        Ok(())
    }

    fn add_group(&self, keys: &[Key], hyperparameters: Hyperparameters) -> Result<u16, StoreError> {
        let mut state = self.state();
        if state.job.is_some() {
            return Err(StoreError::Sequence(super::entry_table::TOO_LATE));
        }
        let entry = |key| state.entries.get(key).cloned().ok_or_else(|| super::entry_table::no_value(key));
        let entries = keys.iter().map(entry).collect::<Result<Vec<_>, _>>()?;
        let optimizer =
            state.optimizer.as_mut().ok_or(StoreError::Sequence(super::entry_table::NO_OPTIMIZER))?;
        let group = super::entry_table::next_group(1 + optimizer.groups.len())?;
        optimizer.groups.push(hyperparameters);
        entries.iter().for_each(|entry| entry.set_group(group));
        Ok(group)
    }

    fn set_hyperparameters(&self, group: u16, hyperparameters: Hyperparameters) -> Result<(), StoreError> {
        let mut state = self.state();
        let optimizer =
            state.optimizer.as_mut().ok_or(StoreError::Sequence(super::entry_table::NO_OPTIMIZER))?;
        let groups = 1 + optimizer.groups.len();
        match group.checked_sub(1) {
            None => optimizer.hyperparameters = Some(hyperparameters),
            Some(further) => {
                let changed = optimizer.groups.get_mut(usize::from(further));
                *changed.ok_or_else(|| super::entry_table::no_group(group, groups))? = hyperparameters;
            }
        }
        if let Some(job) = &state.job {
            // A step counts from the moment its push begins, so every push must have left the engine's queue.
            self.engine.wait_for_all()?;
            if job.rank() == 0 || job.loses_workers() {
                // Keys may be pushed unequally often. A change from a step that a key has made already holds from its next
                // step on, so that the earliest next step is the right one for all keys of the group.
                let keys = state.order.iter().filter(|entry| entry.group() == group);
                let steps = keys.map(|entry| job.next_step(entry.number));
                let steps = steps.collect::<Result<Vec<_>, _>>()?;
                let first_step = steps.into_iter().min().unwrap_or_default();
                job.set_group_hyperparameters(group, first_step, &hyperparameters)?;
            }
        }
        Ok(())
    }

    fn optimizer_state(&self, key: &Key) -> Result<OptimizerState, StoreError> {
        let entry = self.entry_of(key)?;
        self.state().check_has_optimizer()?;
        self.engine.wait_for_all()?;
        let job = self.job()?;
        let mut state = OptimizerState::default();
        for slot in 0..job.state_slots() {
            let pulled = job.pull_state(entry.number, slot, vec![0.0_f32; entry.buffer.elements()])?.finish();
            pulled.outcome?;
            state.updates = pulled.updates;
            state.slots.push(pulled.parameters);
        }
        Ok(state)
    }

    fn set_optimizer_state(&self, key: &Key, restored: OptimizerState) -> Result<(), StoreError> {
        let entry = self.entry_of(key)?;
        let mut state = self.state();
        if state.job.is_some() {
            return Err(StoreError::Sequence(super::entry_table::STATE_TOO_LATE));
        }
        state.check_has_optimizer()?;
        // The number of slots is known to the hub alone.
        let slots = restored.slots.len();
        super::entry_table::check_state(key, &restored, slots, entry.buffer.elements())?;
        state.restored.push((entry, restored));
        Ok(())
    }

    fn barrier(&self) -> Result<(), StoreError> {
        self.engine.wait_for_all()?;
        Ok(self.ranks.barrier()?)
    }

    fn leave(&self) -> Result<(), StoreError> {
        self.engine.wait_for_all()?;
        let (member, job) = {
            let mut state = self.state();
            (state.member.take(), state.job.take())
        };
        // The state still has the member only if no push was made.
        member.map_or(Ok(()), Member::leave)?;
        // No operation is under way any more, so no other reference to the job exists.
        if let Some(job) = job.and_then(Arc::into_inner) {
            job.leave()?;
        }
        Ok(self.ranks.leave()?)
    }

    fn abort(&self, reason: &str) {
        self.ranks.abort(reason);
    }

    fn failure(&self) -> Option<StoreError> {
        // A call that opens the job holds the lock until all ranks have come, so this does not wait for the
        // lock.
        let job = self.state.try_lock().ok().and_then(|state| state.job.as_ref()?.failure());
        job.map(StoreError::from).or_else(|| self.ranks.failure().map(StoreError::from))
    }
}

/// Returns whether this rank sends what training starts from. The hubs of a job that goes on from a checkpoint have it.
fn sends_beginning(job: &Job) -> bool {
    job.rank() == 0 && job.resumed_step().is_none()
}

/// Sends the state of an earlier run to the hub, before the parameters: until these come no rank can push.
fn restore_state(job: &Job, restored: Vec<(Arc<HubEntry>, OptimizerState)>) -> Result<(), StoreError> {
    if !sends_beginning(job) {
        return Ok(());
    }
    for (entry, OptimizerState { slots, updates }) in restored {
        for (slot, values) in slots.into_iter().enumerate() {
            job.initialise_state(entry.number, slot as u8, values, updates)?.wait()?;
        }
    }
    Ok(())
}

fn key_error(key: &Key, reason: String) -> StoreError {
    StoreError::Key { key: key.clone(), reason }
}
