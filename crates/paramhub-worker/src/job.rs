//! The job handle: what a trainer calls.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use bytemuck::Pod;
use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_core::key::Key;
use paramhub_core::limits::STATE_UPDATES_MAX;
use paramhub_core::placement::Imbalance;
use paramhub_core::requests::Request;
use paramhub_core::settings::Settings;
use paramhub_transport::shm::{SharedTensor, Tensor};
use paramhub_transport::{ReceiveRegion, SendRegion, StableBytes};

use crate::arena::{Apart, WorkerArena};
use crate::error::{Who, WorkerError, panic_message};
use crate::handle::{Buffers, Handle, Ticket, on_io_thread};
use crate::inbox::{Change, Command, Inbox};
use crate::norms::NormBook;
use crate::notices::{HubNotice, Notices};
use crate::options::{Options, deadline};
use crate::scope::Scope;
use crate::statistics::{Counters, Statistics};
use crate::steps::Steps;

/// A worker's part in a running job. Share it by reference between as many threads as you like.
///
/// Keys are numbered as in the table of the settings. A key has one request at a time; different keys have theirs side by
/// side. Buffers are handed over with a request and come back from its [`Handle`]; their bytes, elements times bytes of the
/// key's dtype, are checked, their element type is the caller's word.
///
/// Dropping a job leaves it, as well as it can within [`Options::DROP_TIMEOUT`].
pub struct Job {
    shared: Arc<Shared>,
    /// None once it was joined.
    thread: Option<JoinHandle<Result<(), WorkerError>>>,
    leave_timeout: Duration,
}

/// What user threads and the I/O thread share of a job.
pub(crate) struct Shared {
    pub(crate) who: Who,
    pub(crate) workers: u32,
    pub(crate) settings: Settings,
    pub(crate) state_slots: u8,
    pub(crate) imbalance: Imbalance,
    pub(crate) index: HashMap<String, u32>,
    pub(crate) arena: Option<WorkerArena>,
    pub(crate) steps: Steps,
    pub(crate) inbox: Inbox,
    pub(crate) counters: Counters,
    pub(crate) notices: Notices,
    pub(crate) norms: NormBook,
}

/// A request over regions of memory, for bindings whose buffers are neither owned nor borrowed Rust slices.
#[derive(Debug)]
pub enum Errand {
    /// Contribute a gradient.
    Push(SendRegion),
    /// [`Errand::PushPull`] into the parameters that the workers of this host share.
    PushPullShared(SendRegion),
    /// [`Errand::Pull`] into the parameters that the workers of this host share.
    PullShared,
    /// Receive parameters.
    Pull(ReceiveRegion),
    /// Contribute a gradient and receive the parameters that follow from it.
    PushPull(SendRegion, ReceiveRegion),
    /// Contribute the gradient that lies in the region, and receive the parameters that follow from it in its place.
    PushPullInPlace(ReceiveRegion),
    /// Rank 0: send the parameters to start from, and the version they have.
    Initialise(SendRegion, u32),
    /// Receive a slot of the optimizer's state.
    PullState(ReceiveRegion, u8),
    /// Rank 0: send a slot of the optimizer's state to start from, and the updates it has had.
    InitialiseState(SendRegion, u8, u64),
}

impl Job {
    pub(crate) fn new(
        shared: Arc<Shared>,
        thread: JoinHandle<Result<(), WorkerError>>,
        leave_timeout: Duration,
    ) -> Self {
        Job { shared, thread: Some(thread), leave_timeout }
    }

    /// The job's name.
    pub fn name(&self) -> &str {
        &self.shared.who.job
    }

    /// This worker's rank.
    pub fn rank(&self) -> u32 {
        self.shared.who.rank
    }

    /// Ranks in the job.
    pub fn workers(&self) -> u32 {
        self.shared.workers
    }

    /// What the ranks agreed on.
    pub fn settings(&self) -> &Settings {
        &self.shared.settings
    }

    /// How uneven the placement is at each level.
    pub fn imbalance(&self) -> Imbalance {
        self.shared.imbalance
    }

    /// The number of the key with this name.
    pub fn key(&self, name: &str) -> Option<u32> {
        self.shared.index.get(name).copied()
    }

    /// The step that the next push of a key contributes to; it counts pushes from the version the parameters began with.
    pub fn next_step(&self, key: u32) -> Result<u32, WorkerError> {
        self.shared.find(key).map(|_| self.shared.steps.next(key))
    }

    /// Rank 0: sends the parameters to start from at `version`, 0 unless a run is resumed. Other ranks [`pull`](Self::pull)
    /// them. Ends when the hub has them.
    pub fn initialise<G: StableBytes>(
        &self,
        key: u32,
        parameters: G,
        version: u32,
    ) -> Result<Handle<G, ()>, WorkerError> {
        let send = SendRegion::owned(parameters);
        self.shared.submit(key, Errand::Initialise(send, version), true, |buffers| (sent(buffers), ()))
    }

    /// Contributes a gradient to the key's next step. Ends when it has taken effect.
    pub fn push<G: StableBytes>(&self, key: u32, gradient: G) -> Result<Handle<G, ()>, WorkerError> {
        let errand = Errand::Push(SendRegion::owned(gradient));
        self.shared.submit(key, errand, true, |buffers| (sent(buffers), ()))
    }

    /// Receives the key's parameters after the last step this worker has pushed; at first, those to start from.
    pub fn pull<P: StableBytes>(&self, key: u32, out: P) -> Result<Handle<(), P>, WorkerError> {
        let errand = Errand::Pull(ReceiveRegion::owned(out));
        self.shared.submit(key, errand, true, |buffers| ((), received(buffers)))
    }

    /// Contributes a gradient to the key's next step and receives the parameters that follow from it, or the mean or
    /// sum of the gradients where the job has no optimizer.
    pub fn push_pull<G: StableBytes, P: StableBytes>(
        &self,
        key: u32,
        gradient: G,
        out: P,
    ) -> Result<Handle<G, P>, WorkerError> {
        let errand = Errand::PushPull(SendRegion::owned(gradient), ReceiveRegion::owned(out));
        self.shared.submit(key, errand, true, |mut buffers| {
            let gradient = sent(Buffers { send: buffers.send.take(), ..Default::default() });
            (gradient, received(buffers))
        })
    }

    /// [`push_pull`](Self::push_pull) into the very memory that the gradient was sent from. Chunks of it are replaced one by
    /// one: after an error some are new and the rest is still the gradient.
    pub fn push_pull_in_place<B: StableBytes>(
        &self,
        key: u32,
        buffer: B,
    ) -> Result<Handle<(), B>, WorkerError> {
        let errand = Errand::PushPullInPlace(ReceiveRegion::owned(buffer));
        self.shared.submit(key, errand, true, |buffers| ((), received(buffers)))
    }

    /// Values of state that the job's optimizer keeps a parameter, as the hubs say: 0 for plain SGD, 1 with momentum, 2 for
    /// Adam. Its slots are counted from 0.
    pub fn state_slots(&self) -> u8 {
        self.shared.state_slots
    }

    /// Receives a slot of the optimizer's state: an f32 value for each of the key's elements, whatever its dtype. The updates
    /// it has had are in [`Finished::updates`](crate::Finished::updates).
    ///
    /// Each chunk of it is as the chunk's last complete update left it. To have all of one step, wait for this worker's
    /// pushes first: a synchronous step needs everybody's, and so none is under way then. Where chunks have had different
    /// numbers of updates, as in an asynchronous job, the smallest is told. Like [`pull`](Self::pull) it waits for rank 0's
    /// parameters, at rank 0 too.
    pub fn pull_state<P: StableBytes>(
        &self,
        key: u32,
        slot: u8,
        out: P,
    ) -> Result<Handle<(), P>, WorkerError> {
        let errand = Errand::PullState(ReceiveRegion::owned(out), slot);
        self.shared.submit(key, errand, true, |buffers| ((), received(buffers)))
    }

    /// Rank 0: sends a slot of the optimizer's state to start from, as [`pull_state`](Self::pull_state) gave it, with the
    /// updates it has had, 2^48 at most; those of a key's last slot hold. Ends when the hub has it.
    ///
    /// Send and wait for all state before the parameters are [initialised](Self::initialise): until then nobody else can
    /// contribute or is given anything, so nobody meets parameters whose state is not restored yet.
    pub fn initialise_state<G: StableBytes>(
        &self,
        key: u32,
        slot: u8,
        values: G,
        updates: u64,
    ) -> Result<Handle<G, ()>, WorkerError> {
        let errand = Errand::InitialiseState(SendRegion::owned(values), slot, updates);
        self.shared.submit(key, errand, true, |buffers| (sent(buffers), ()))
    }

    /// Memory for a key's gradient from which it is exchanged without a copy of this process: in the arena that a hub on this
    /// host shares, or on the heap. Use it wherever a buffer is asked for; dropping it gives it back.
    ///
    /// # Errors
    /// [`WorkerError::Misplaced`] where an earlier one still lives.
    pub fn gradient_tensor(&self, key: u32) -> Result<Tensor, WorkerError> {
        // A gradient that travels in another encoding is converted into the arena, and so is not exchanged from there.
        let dtype = self.shared.find(key)?.dtype;
        let is_as_sent = self.settings().gradient_codec(dtype) == dtype.codec();
        self.tensor(key, "gradient", |arena| arena.gradient(key), is_as_sent)
    }

    /// Memory for a key's parameters that they are received into without a copy of this process; otherwise as
    /// [`gradient_tensor`](Self::gradient_tensor).
    pub fn parameter_tensor(&self, key: u32) -> Result<Tensor, WorkerError> {
        self.tensor(key, "parameters", |arena| arena.parameters(key), true)
    }

    /// [`gradient_tensor`](Self::gradient_tensor) of several neighbouring keys as one, in table order: over shared memory that
    /// takes [`Settings::packed`].
    ///
    /// # Errors
    /// [`WorkerError::Misplaced`] where there is no key, an earlier tensor of one still lives, or they do not lie back to back.
    pub fn gradient_tensors(&self, keys: Range<u32>) -> Result<Tensor, WorkerError> {
        let bytes = self.shared.run_bytes(&keys)?;
        let is_as_sent = keys.clone().all(|key| {
            let dtype = self.settings().keys.keys()[key as usize].dtype;
            self.settings().gradient_codec(dtype) == dtype.codec()
        });
        match self.shared.arena.as_ref().filter(|_| is_as_sent) {
            None => Ok(Tensor::on_heap(bytes)),
            Some(arena) => self.shared.taken(&keys, arena.gradients(keys.clone())),
        }
    }

    /// [`parameter_tensor`](Self::parameter_tensor) of several neighbouring keys as one.
    ///
    /// # Errors
    /// As [`gradient_tensors`](Self::gradient_tensors).
    pub fn parameter_tensors(&self, keys: Range<u32>) -> Result<Tensor, WorkerError> {
        let bytes = self.shared.run_bytes(&keys)?;
        match &self.shared.arena {
            None => Ok(Tensor::on_heap(bytes)),
            Some(arena) => self.shared.taken(&keys, arena.parameters_of(keys.clone())),
        }
    }

    /// [`shared_parameters`](Self::shared_parameters) of several neighbouring keys as one.
    ///
    /// # Errors
    /// As [`gradient_tensors`](Self::gradient_tensors), and where this worker shares no parameters.
    pub fn shared_parameters_of(&self, keys: Range<u32>) -> Result<SharedTensor, WorkerError> {
        self.shared.run_bytes(&keys)?;
        self.shared.check_shares_parameters()?;
        let arena = self.shared.arena.as_ref().expect("shared parameters lie in shared memory");
        self.shared.taken(&keys, arena.shared_parameters_of(keys.clone()))
    }

    fn tensor(
        &self,
        key: u32,
        what: &str,
        take: impl Fn(&WorkerArena) -> Option<Tensor>,
        is_in_arena: bool,
    ) -> Result<Tensor, WorkerError> {
        let named = self.shared.find(key)?;
        let bytes = named.elements().unwrap_or(0) as usize * named.dtype.bytes();
        match self.shared.arena.as_ref().filter(|_| is_in_arena) {
            None => Ok(Tensor::on_heap(bytes)),
            Some(arena) => take(arena).ok_or_else(|| {
                self.shared.misplaced(format!("key {named}: the memory for its {what} is given out already"))
            }),
        }
    }

    /// Whether this worker reads the one copy of the parameters that its host's workers share.
    pub fn shares_parameters(&self) -> bool {
        self.shared.check_shares_parameters().is_ok()
    }

    /// Whether any of this job's streams is over shared memory.
    pub fn shares_memory(&self) -> bool {
        self.shared.arena.is_some()
    }

    /// A key's parameters in the one copy that all workers of this host read, where
    /// [`Options::shared_parameters`] asked for it. They are right from the end of
    /// [`push_pull_shared`](Self::push_pull_shared) until this worker pushes the key's next gradient: the hub overwrites them
    /// when the last worker has, whoever still reads.
    pub fn shared_parameters(&self, key: u32) -> Result<SharedTensor, WorkerError> {
        self.shared.find(key)?;
        self.shared.check_shares_parameters()?;
        let arena = self.shared.arena.as_ref().expect("shared parameters lie in shared memory");
        Ok(arena.shared_parameters(key).expect("it was just looked for"))
    }

    /// [`push_pull`](Self::push_pull) into the parameters that the workers of this host share.
    pub fn push_pull_shared<G: StableBytes>(
        &self,
        key: u32,
        gradient: G,
    ) -> Result<Handle<G, ()>, WorkerError> {
        let errand = Errand::PushPullShared(SendRegion::owned(gradient));
        self.shared.submit(key, errand, true, |buffers| (sent(buffers), ()))
    }

    /// [`pull`](Self::pull) into the parameters that the workers of this host share: from its end on they are those to start
    /// from, or those after the last step this worker has pushed.
    pub fn pull_shared(&self, key: u32) -> Result<Handle<(), ()>, WorkerError> {
        self.shared.submit(key, Errand::PullShared, true, |_| ((), ()))
    }

    /// Any request over regions. They are dropped when the request ends, before its handle or a callback says so.
    pub fn submit(&self, key: u32, errand: Errand) -> Result<Handle<(), ()>, WorkerError> {
        self.shared.submit(key, errand, false, |_| ((), ()))
    }

    /// Calls `f` with a [`Scope`] through which slices can be borrowed instead of given away. Returns when every request
    /// made in it has ended, however `f` ends.
    pub fn scope<'env, F, R>(&self, f: F) -> R
    where
        F: for<'scope> FnOnce(&Scope<'scope, 'env>) -> R,
    {
        paramhub_transport::lend(|lending| f(&Scope::new(Arc::clone(&self.shared), lending)))
    }

    /// Rank 0's parameters become everybody's: rank 0 sends its own at `version`, 0 unless a run is resumed; the others
    /// receive them in place, and with them the version. One slice a key, in table order.
    ///
    /// # Errors
    /// [`WorkerError::Misplaced`] where the job has no optimizer: its hubs keep no parameters. After an error some slices
    /// may be new.
    pub fn broadcast<T: Pod>(
        &self,
        parameters: &mut [impl AsMut<[T]>],
        version: u32,
    ) -> Result<(), WorkerError> {
        let keys = self.settings().keys.len();
        if parameters.len() != keys {
            return Err(self.shared.misplaced(format!(
                "broadcast takes one slice a key, but {} came for {keys} keys",
                parameters.len()
            )));
        }
        self.shared.check_has_parameters()?;
        self.scope(|scope| {
            let handles: Vec<_> = parameters
                .iter_mut()
                .zip(0..)
                .map(|(parameters, key)| match self.rank() {
                    0 => scope.initialise(key, &*parameters.as_mut(), version),
                    _ => scope.pull(key, parameters.as_mut()),
                })
                .collect::<Result<_, _>>()?;
            handles.into_iter().try_for_each(|handle| handle.wait().map(drop))
        })
    }

    /// Lets `hyperparameters` hold from `first_step` on, on every chunk of the keys of group 0, which are all where the job
    /// has no other groups. It leaves before every push made after it: called by any one rank before that rank's push of
    /// `first_step`, it holds for that step of a synchronous job.
    pub fn set_hyperparameters(
        &self,
        first_step: u32,
        hyperparameters: &Hyperparameters,
    ) -> Result<(), WorkerError> {
        self.set_group_hyperparameters(0, first_step, hyperparameters)
    }

    /// [`set_hyperparameters`](Self::set_hyperparameters) for the keys of one group; those of the others stay.
    pub fn set_group_hyperparameters(
        &self,
        group: u16,
        first_step: u32,
        hyperparameters: &Hyperparameters,
    ) -> Result<(), WorkerError> {
        let groups = self.settings().groups();
        if usize::from(group) >= groups {
            return Err(self.shared.misplaced(format!(
                "hyperparameters were set for group {group}, but the job has {groups}, counted from 0"
            )));
        }
        if !hyperparameters.is_finite() {
            return Err(self.shared.misplaced(format!(
                "hyperparameters must be finite numbers, but step {first_step} was to use {hyperparameters:?}"
            )));
        }
        let change = Change { group, first_step, hyperparameters: *hyperparameters };
        self.shared.inbox.put_retune(&self.shared.who, change)
    }

    /// Waits for the Euclidean norm of the whole mean gradient of `step`, of all keys, in a job whose steps are in two phases
    /// ([`Settings::two_phase`], [`Settings::clip_norm`]). Every rank may ask; the handle gives the norm.
    ///
    /// A step has a norm when every rank has pushed every key to it: one that is left out keeps everybody waiting.
    ///
    /// # Errors
    /// [`WorkerError::Misplaced`] in any other job, and where 1,024 such waits are under way. The handle fails likewise for a
    /// step more than 16 steps back.
    pub fn gradient_norm(&self, step: u32) -> Result<Handle<(), f64>, WorkerError> {
        self.shared.check_two_phase()?;
        if let Some(error) = self.failure() {
            return Err(error);
        }
        if !self.shared.norms.begin_wait() {
            let reason = format!("{} waits for norms are under way already", NormBook::WAITS_MAX);
            return Err(self.shared.misplaced(reason));
        }
        let if_lost = WorkerError::Left { who: self.shared.who.clone() };
        let (ticket, completion) = Ticket::new(Buffers::default(), true, if_lost);
        match self.shared.inbox.put(Command::AwaitNorm { step, ticket }) {
            Ok(()) => Ok(Handle::new(completion, |buffers| ((), buffers.norm))),
            Err(error) => {
                self.shared.norms.end_wait();
                Err(error)
            }
        }
    }

    /// The newest step whose [norm](Self::gradient_norm) is known, and the norm.
    pub fn last_gradient_norm(&self) -> Option<(u32, f64)> {
        self.shared.norms.last().map(|last| (last.step, last.norm))
    }

    /// Rank 0, in a job with [`Settings::two_phase`] and no [`Settings::clip_norm`]: lets the hubs update `step`, with its mean
    /// gradient times `factor`; 1 changes nothing. Pushes of the step end after it. Once a step, when its
    /// [norm](Self::gradient_norm) is known.
    ///
    /// # Errors
    /// [`WorkerError::Misplaced`] says which of these does not hold.
    pub fn release(&self, step: u32, factor: f32) -> Result<(), WorkerError> {
        self.shared.check_two_phase()?;
        if self.rank() != 0 {
            return Err(self.shared.misplaced("steps are released by rank 0".into()));
        }
        if let Some(norm) = self.settings().clip_norm {
            let reason = format!("steps are released by themselves in a job that clips gradients to {norm}");
            return Err(self.shared.misplaced(reason));
        }
        if !self.shared.norms.release(step) {
            let reason = format!("step {step} cannot be released: wait for its norm, and release it once");
            return Err(self.shared.misplaced(reason));
        }
        self.shared.inbox.put(Command::Release { step, factor })
    }

    /// What has been exchanged so far.
    pub fn statistics(&self) -> Statistics {
        self.shared.counters.read()
    }

    /// The newest notices of the hubs, oldest first; a bounded number is kept. Rank 0 gets them.
    pub fn notices(&self) -> Vec<HubNotice> {
        self.shared.notices.kept()
    }

    /// Calls `listener`, on the I/O thread, with every notice from now on, in place of an earlier listener. It must be
    /// quick. A panic in it ends the job.
    pub fn on_notice(&self, listener: impl Fn(&HubNotice) + Send + Sync + 'static) {
        self.shared.notices.listen(Arc::new(listener));
    }

    /// Why the job takes no more requests, if it does not.
    pub fn failure(&self) -> Option<WorkerError> {
        self.shared.inbox.closed()
    }

    /// Waits for the requests under way, at most [`Options::leave_timeout`], and leaves the job: the hubs count on this
    /// worker no more.
    ///
    /// # Errors
    /// If the job failed before, or requests stay unanswered; the job is left all the same.
    pub fn leave(mut self) -> Result<(), WorkerError> {
        self.end(self.leave_timeout)
    }

    fn end(&mut self, patience: Duration) -> Result<(), WorkerError> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        let deadline = deadline(patience);
        // Refused by a job that has failed, whose thread tells the same.
        let _ = self.shared.inbox.put(Command::Leave { deadline });
        if on_io_thread() {
            // The last owner was a callback: the thread cannot wait for itself, and ends by itself.
            return Ok(());
        }
        thread.join().unwrap_or_else(|panic| {
            Err(WorkerError::Internal { who: self.shared.who.clone(), message: panic_message(&*panic) })
        })
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let patience = if std::thread::panicking() { Duration::ZERO } else { Options::DROP_TIMEOUT };
        // Whoever wants to know calls `leave`.
        let _ = self.end(patience);
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("name", &self.name())
            .field("rank", &self.rank())
            .field("workers", &self.workers())
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// Checks a request, claims its key and hands it to the I/O thread.
    pub(crate) fn submit<G, P>(
        &self,
        key: u32,
        errand: Errand,
        keep: bool,
        unpack: fn(Buffers) -> (G, P),
    ) -> Result<Handle<G, P>, WorkerError> {
        let named = self.find(key)?;
        if matches!(errand, Errand::PushPullShared(_) | Errand::PullShared) {
            self.check_shares_parameters()?;
        }
        let (request, number, mut buffers) = errand.open();
        if matches!(request, Request::Initialise | Request::InitialiseState) {
            self.check_has_parameters()?;
            if self.who.rank != 0 {
                return Err(self.misplaced(format!(
                    "key {named}: what training starts from comes from rank 0; other ranks pull it"
                )));
            }
        }
        if request == Request::Initialise
            && self.settings.is_two_phase()
            && let Err(start) = self.norms.start(number)
        {
            return Err(self.misplaced(format!(
                "key {named}: in two phases all parameters start from one version, but {number} came after {start}"
            )));
        }
        if request.is_of_state() {
            self.check_state(named, number, buffers.updates)?;
        }
        if request == Request::PullState {
            // The smallest of those that will come.
            buffers.updates = u64::MAX;
        }
        let gradient = buffers.send.as_ref().map(|region| region.bytes().len());
        let parameters = buffers.receive.as_ref().map(|region| region.bytes().len());
        let receive = if buffers.is_in_place { "gradient in place" } else { "parameters" };
        let (element_bytes, names) = match request.is_of_state() {
            true => (size_of::<f32>(), ["state", "state"]),
            false => (named.dtype.bytes(), ["gradient", receive]),
        };
        for (buffer, bytes) in names.into_iter().zip([gradient, parameters]) {
            let expected_bytes = named.elements().unwrap_or(0) * element_bytes as u64;
            if let Some(got_bytes) = bytes.filter(|&bytes| bytes as u64 != expected_bytes) {
                let (who, key) = (self.who.clone(), named.to_string().into());
                return Err(WorkerError::Length { who, key, buffer, expected_bytes, got_bytes });
            }
        }
        let claim = self.steps.claim(key, request, number).map_err(|request| WorkerError::Unfinished {
            who: self.who.clone(),
            key: named.to_string().into(),
            request,
        })?;
        if let Some(arena) = self.arena.as_ref().filter(|_| !request.is_of_state()) {
            let (send, receive) = (buffers.sent_from(), buffers.receive.as_ref().map(ReceiveRegion::bytes));
            let claims = arena.claim(key, request, send, receive);
            buffers.claims = claims.ok_or_else(|| {
                self.steps.undo(key, claim);
                self.misplaced(format!(
                    "key {named}: a tensor was given out for memory this request would pass through: exchange that \
                     tensor, or drop it"
                ))
            })?;
        }
        let (ticket, completion) = Ticket::new(buffers, keep, WorkerError::Left { who: self.who.clone() });
        match self.inbox.put(Command::Request { key, request, step: claim.step, ticket }) {
            Ok(()) => Ok(Handle::new(completion, unpack)),
            Err(error) => {
                self.steps.undo(key, claim);
                Err(error)
            }
        }
    }

    /// Bytes of neighbouring keys in this process's memory.
    fn run_bytes(&self, keys: &Range<u32>) -> Result<usize, WorkerError> {
        if keys.is_empty() {
            return Err(self.misplaced(format!("keys {keys:?} are none: ask for the memory of at least one")));
        }
        let mut bytes = 0;
        for key in keys.clone() {
            let key = self.find(key)?;
            bytes += key.elements().unwrap_or(0) as usize * key.dtype.bytes();
        }
        Ok(bytes)
    }

    /// What an arena has answered to a request for several keys.
    fn taken<T>(&self, keys: &Range<u32>, answer: Result<Option<T>, Apart>) -> Result<T, WorkerError> {
        match answer {
            Ok(Some(tensor)) => Ok(tensor),
            Ok(None) => Err(self.misplaced(format!("keys {keys:?}: some of their memory is given out already"))),
            Err(Apart(key)) => Err(self.misplaced(format!(
                "keys {keys:?}: key {key} does not lie behind the one before it: ask for packed tensors in the settings, \
                 and for keys of one type"
            ))),
        }
    }

    fn find(&self, key: u32) -> Result<&Key, WorkerError> {
        let keys = self.settings.keys.keys();
        let who = || self.who.clone();
        keys.get(key as usize).ok_or_else(|| WorkerError::NoSuchKey { who: who(), key, keys: keys.len() })
    }

    fn check_has_parameters(&self) -> Result<(), WorkerError> {
        if self.settings.has_parameters() {
            return Ok(());
        }
        Err(self.misplaced(
            "the hubs of a job without an optimizer keep no parameters to start from: every rank starts from its own"
                .into(),
        ))
    }

    fn check_two_phase(&self) -> Result<(), WorkerError> {
        if self.settings.is_two_phase() {
            return Ok(());
        }
        Err(self.misplaced(
            "a step has a norm and a release only in two phases: ask for them in the settings, or for a norm to clip to"
                .into(),
        ))
    }

    fn check_state(&self, key: &Key, slot: u32, updates: u64) -> Result<(), WorkerError> {
        let slots = u32::from(self.state_slots);
        if slot >= slots {
            let optimizer = &self.settings.optimizer.name;
            return Err(self.misplaced(format!(
                "key {key}: optimizer `{optimizer}` keeps {slots} values of state a parameter, counted from 0: there is no slot {slot}"
            )));
        }
        if updates > STATE_UPDATES_MAX {
            return Err(self.misplaced(format!(
                "key {key}: state to start from may have had {STATE_UPDATES_MAX} updates at most, but {updates} were given"
            )));
        }
        Ok(())
    }

    fn check_shares_parameters(&self) -> Result<(), WorkerError> {
        if self.arena.as_ref().is_some_and(|arena| arena.common.is_some()) {
            return Ok(());
        }
        Err(self
            .misplaced("this worker shares no parameters: ask for them in the options it joins with".into()))
    }

    pub(crate) fn misplaced(&self, reason: String) -> WorkerError {
        WorkerError::Misplaced { who: self.who.clone(), reason: reason.into() }
    }
}

impl Errand {
    fn open(self) -> (Request, u32, Buffers) {
        let buffers = |send, receive| Buffers { send, receive, ..Default::default() };
        match self {
            Errand::Push(send) => (Request::Push, 0, buffers(Some(send), None)),
            Errand::PushPullShared(send) => (Request::PushPull, 0, buffers(Some(send), None)),
            Errand::PullShared => (Request::Pull, 0, buffers(None, None)),
            Errand::Pull(receive) => (Request::Pull, 0, buffers(None, Some(receive))),
            Errand::PushPull(send, receive) => (Request::PushPull, 0, buffers(Some(send), Some(receive))),
            Errand::PushPullInPlace(receive) => {
                (Request::PushPull, 0, Buffers { is_in_place: true, ..buffers(None, Some(receive)) })
            }
            Errand::Initialise(send, version) => (Request::Initialise, version, buffers(Some(send), None)),
            Errand::PullState(receive, slot) => {
                (Request::PullState, slot.into(), buffers(None, Some(receive)))
            }
            Errand::InitialiseState(send, slot, updates) => {
                let buffers = Buffers { updates, ..buffers(Some(send), None) };
                (Request::InitialiseState, slot.into(), buffers)
            }
        }
    }
}

fn sent<G: StableBytes>(buffers: Buffers) -> G {
    let region = buffers.send.expect("the request was made with a gradient, which came back");
    region.into_owned().expect("the gradient comes back as it went")
}

fn received<P: StableBytes>(buffers: Buffers) -> P {
    let region = buffers.receive.expect("the request was made with room for parameters, which came back");
    region.into_owned().expect("the room comes back as it went")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_may_share_jobs_and_handles() {
        fn shareable<T: Send + Sync>() {}
        shareable::<Job>();
        fn movable<T: Send>() {}
        movable::<Handle<Vec<f32>, Box<[u8]>>>();
        movable::<WorkerError>();
    }
}
