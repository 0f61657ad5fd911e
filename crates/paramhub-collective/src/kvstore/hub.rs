//! A store whose sums, and parameters, are made by a hub.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use paramhub_core::codec::{Codec, Dtype};
use paramhub_core::key::{Key as TableKey, KeyTable};
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_kernels::Hyperparameters;
use paramhub_syncer::{Meeting, Peers, Ports};
use paramhub_transport::{Home, ReceiveRegion, SendRegion};
use paramhub_worker::{Errand, Job, Member, Membership, Options, WorkerError};

use super::{Array, Key, KvStore, StoreError, StoreKind};
use crate::communicator::{Communicator, Native};
use crate::engine::{Completion, Engine, Kind};

/// A rank's place in a job, and how the job is to be.
#[derive(Clone, Debug)]
pub struct HubSeat {
    /// The job, which nobody has joined as this rank.
    pub membership: Membership,
    /// The worker's own.
    pub options: Options,
    /// How gradients travel; as they lie in memory if nothing is said.
    pub codec: Option<Codec>,
    /// Whether sums are made in rank order, bit-equal from run to run.
    pub reproducible: bool,
}

pub(super) struct AtHub {
    engine: Arc<Engine>,
    /// Between the ranks, for first values and barriers.
    ranks: Native,
    seat: HubSeat,
    state: Mutex<State>,
}

struct State {
    /// Before the first push, with which all keys are known.
    member: Option<Member>,
    job: Option<Arc<Job>>,
    entries: HashMap<Key, Arc<Entry>>,
    /// In the order of the job's table.
    order: Vec<Arc<Entry>>,
    optimizer: Option<OptimizerChoice>,
}

/// What the store has of a key: memory that goes to the hub and comes back with the key's value.
struct Entry {
    key: Key,
    number: u32,
    buffer: Array,
    memory: Memory,
}

/// The buffer's, which is lent to the worker's thread.
#[derive(Clone)]
enum Memory {
    Single(Arc<Home<Vec<f32>>>),
    /// As it lies.
    Half(Arc<Home<Vec<u16>>>),
}

impl HubSeat {
    /// With everything as a job has it by default.
    pub fn new(membership: Membership) -> HubSeat {
        HubSeat { membership, options: Options::default(), codec: None, reproducible: false }
    }
}

impl AtHub {
    /// Waits until every rank of the job is here.
    pub(super) fn new(engine: Arc<Engine>, seat: HubSeat) -> Result<AtHub, StoreError> {
        let ranks = |error| StoreError::Ranks(Arc::new(error));
        let meeting = Meeting::listen(&seat.membership, Ports::ANY).map_err(ranks)?;
        let options = Options { peer_address: Some(meeting.address()), ..seat.options.clone() };
        let member = Member::connect_with(seat.membership.clone(), options)?;
        let mesh = meeting.join(&Peers::of(&member), "key-value store").map_err(ranks)?;
        let state = State {
            member: Some(member),
            job: None,
            entries: HashMap::new(),
            order: Vec::new(),
            optimizer: None,
        };
        Ok(AtHub { engine, ranks: Native::over(mesh), seat, state: Mutex::new(state) })
    }

    /// The entry of a key, which arrays of this type and length fit.
    fn entry(&self, key: &Key, arrays: &[Array]) -> Result<Arc<Entry>, StoreError> {
        let entry = self.state().entries.get(key).cloned();
        let entry = entry.ok_or_else(|| wrong(key, super::shelf::NO_VALUE.into()))?;
        super::shelf::check(key, &entry.buffer, arrays)?;
        Ok(entry)
    }

    /// The job, which is opened when it is first needed: with all keys that have a value by then, at every rank.
    fn job(&self) -> Result<Arc<Job>, StoreError> {
        let mut state = self.state();
        if let Some(job) = &state.job {
            return Ok(Arc::clone(job));
        }
        let member = state.member.take().ok_or(StoreError::Sequence("its job could not be opened"))?;
        let keys = state.order.iter().map(|entry| TableKey {
            // What comes first is needed first, as in a network's forward pass.
            priority: -(entry.number as i32),
            dtype: entry.buffer.dtype(),
            ..TableKey::new(entry.key.to_string(), [entry.buffer.elements() as u64])
        });
        let table = KeyTable::new(keys.collect()).map_err(|error| StoreError::Options(error.to_string()))?;
        let optimizer = state.optimizer.clone().unwrap_or_else(|| OptimizerChoice::named("sum"));
        let (codec, reproducible) = (self.seat.codec, self.seat.reproducible);
        let job =
            Arc::new(member.init(Settings { optimizer, codec, reproducible, ..Settings::new(table) })?);
        if job.settings().has_parameters() {
            self.start(&job, &state.order)?;
        }
        state.job = Some(Arc::clone(&job));
        Ok(job)
    }

    /// All ranks begin with the first values, which they have.
    fn start(&self, job: &Job, entries: &[Arc<Entry>]) -> Result<(), StoreError> {
        let mut handles = Vec::with_capacity(entries.len());
        for entry in entries {
            self.engine.wait_to_mutate(entry.buffer.variable())?;
            entry.withdraw();
            let errand = match job.rank() {
                0 => Errand::Initialise(entry.memory.lend_to_send(), 0),
                _ => Errand::Pull(entry.memory.lend()),
            };
            handles.push(job.submit(entry.number, errand)?);
        }
        for (handle, entry) in handles.into_iter().zip(entries) {
            handle.wait()?;
            entry.restore();
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn new(engine: &Engine, key: Key, number: u32, dtype: Dtype, elements: usize) -> Entry {
        let memory = match dtype {
            Dtype::F32 => Memory::Single(Arc::new(Home::new(vec![0.0; elements]))),
            Dtype::F16 | Dtype::BF16 => Memory::Half(Arc::new(Home::new(vec![0; elements]))),
        };
        let buffer = Array::over(engine, memory.lend(), dtype);
        Entry { key, number, buffer, memory }
    }

    /// Takes the buffer's memory home.
    fn withdraw(&self) {
        drop(self.buffer.swap(ReceiveRegion::owned(Vec::<u8>::new())));
    }

    /// Gives it to the buffer again.
    fn restore(&self) {
        drop(self.buffer.swap(self.memory.lend()));
    }

    /// In an operation that mutates the buffer: sends what is in it, and ends the operation when the answer is there instead.
    fn exchange(self: Arc<Self>, job: &Job, completion: Completion) {
        self.withdraw();
        match job.submit(self.number, Errand::PushPullInPlace(self.memory.lend())) {
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

impl Memory {
    fn lend(&self) -> ReceiveRegion {
        match self {
            Memory::Single(home) => ReceiveRegion::owned(home.lend().expect("it is at home")),
            Memory::Half(home) => ReceiveRegion::owned(home.lend().expect("it is at home")),
        }
    }

    fn lend_to_send(&self) -> SendRegion {
        match self {
            Memory::Single(home) => SendRegion::owned(home.lend().expect("it is at home")),
            Memory::Half(home) => SendRegion::owned(home.lend().expect("it is at home")),
        }
    }
}

impl KvStore for AtHub {
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
                return Err(wrong(
                    key,
                    "a job's keys are known when it begins: init all of them before the first push".into(),
                ));
            }
            if state.entries.contains_key(key) {
                return Err(wrong(key, super::shelf::HAS_VALUE.into()));
            }
            let number = state.order.len() as u32;
            let entry = Entry::new(&self.engine, key.clone(), number, value.dtype(), value.elements());
            let entry = Arc::new(entry);
            state.entries.insert(key.clone(), Arc::clone(&entry));
            state.order.push(Arc::clone(&entry));
            entry
        };
        super::shelf::copy_in(&self.engine, key, &entry.buffer, std::slice::from_ref(value), 0)?;
        self.engine.wait_to_mutate(entry.buffer.variable())?;
        entry.buffer.write(|bytes| self.ranks.broadcast(&key.to_string(), bytes, 0))?;
        Ok(())
    }

    fn push(&self, key: &Key, values: &[Array], priority: i32) -> Result<(), StoreError> {
        let entry = self.entry(key, values)?;
        let job = self.job()?;
        super::shelf::copy_in(&self.engine, key, &entry.buffer, values, priority)?;
        let here = Arc::clone(&entry);
        self.engine
            .operation(format!("push and pull {key}"), Kind::Communicate)
            .mutates([entry.buffer.variable()])
            .priority(priority)
            .push_deferred(move |completion| here.exchange(&job, completion))?;
        Ok(())
    }

    fn pull(&self, key: &Key, outs: &[Array], priority: i32) -> Result<(), StoreError> {
        let entry = self.entry(key, outs)?;
        super::shelf::copy_back(&self.engine, key, &entry.buffer, outs, priority)
    }

    fn set_optimizer(&self, name: &str, hyperparameters: Hyperparameters) -> Result<(), StoreError> {
        let mut state = self.state();
        if state.job.is_some() {
            return Err(StoreError::Sequence(super::shelf::TOO_LATE));
        }
        let named = OptimizerChoice::named(name);
        state.optimizer = Some(OptimizerChoice { hyperparameters: Some(hyperparameters), ..named });
        Ok(())
    }

    fn set_hyperparameters(&self, hyperparameters: Hyperparameters) -> Result<(), StoreError> {
        let mut state = self.state();
        let optimizer = state.optimizer.as_mut().ok_or(StoreError::Sequence(super::shelf::NO_OPTIMIZER))?;
        optimizer.hyperparameters = Some(hyperparameters);
        if let Some(job) = &state.job {
            // Which step is next is known when all before it have begun.
            self.engine.wait_for_all()?;
            if job.rank() == 0 {
                job.set_hyperparameters(job.next_step(0)?, &hyperparameters)?;
            }
        }
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
        // Nobody has pushed anything.
        member.map_or(Ok(()), Member::leave)?;
        // Nothing is under way, so nobody else has it.
        if let Some(job) = job.and_then(Arc::into_inner) {
            job.leave()?;
        }
        Ok(self.ranks.leave()?)
    }

    fn abort(&self, reason: &str) {
        self.ranks.abort(reason);
    }

    fn failure(&self) -> Option<StoreError> {
        // A call that opens the job holds the lock for as long as other ranks take.
        let job = self.state.try_lock().ok().and_then(|state| state.job.as_ref()?.failure());
        job.map(StoreError::from).or_else(|| self.ranks.failure().map(StoreError::from))
    }
}

fn wrong(key: &Key, reason: String) -> StoreError {
    StoreError::Key { key: key.clone(), reason }
}
