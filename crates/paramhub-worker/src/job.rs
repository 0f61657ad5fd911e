//! The job handle, which a trainer calls.

mod factors;
mod norms;
mod program_state;
mod tensors;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use bytemuck::Pod;
use paramhub_core::factors::FactorBlock;
use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_core::placement::Imbalance;
use paramhub_core::scheme::InformationBook;
use paramhub_core::settings::Settings;
use paramhub_core::wire::Failure;
use paramhub_transport::runtime::{on_io_thread, panic_message};
use paramhub_transport::{ReceiveRegion, SendRegion, StableBytes};

pub use self::factors::{FactorBuffers, FactorHandle, FactorRegions};
use crate::arena::WorkerArena;
use crate::command::{HyperparameterChange, JobCommand, JobInbox, RETUNE_TIMEOUT};
use crate::error::{WorkerError, WorkerId};
use crate::handle::{Handle, RequestBuffers};
use crate::norms::NormHistory;
use crate::notices::{HubNotice, Notices};
use crate::options::{Options, deadline};
use crate::program_state::ProgramStateClaims;
use crate::region_request::RegionRequest;
use crate::scope::Scope;
use crate::statistics::{Counters, Statistics};
use crate::steps::KeySteps;

/// A worker's part in a running job. Share it by reference between as many threads as you like.
///
/// Keys are numbered as in the table of the settings. A key has one request at a time; different keys have
/// theirs side by side. A caller hands buffers over with a request and gets them back from its [`Handle`].
/// The job checks the size of a buffer, elements times bytes of the key's dtype, but not the type of its
/// elements.
///
/// Dropping a job leaves it, and waits at most [`Options::DROP_TIMEOUT`].
pub struct Job {
    shared: Arc<Shared>,
    /// `None` after it was joined.
    thread: Option<JoinHandle<Result<(), WorkerError>>>,
    leave_timeout: Duration,
}

/// The state of a job that user threads and the I/O thread share.
pub(crate) struct Shared {
    pub(crate) who: WorkerId,
    pub(crate) workers: u32,
    pub(crate) settings: Settings,
    pub(crate) state_slots: u8,
    pub(crate) resumed_step: Option<u32>,
    pub(crate) joined_running: bool,
    pub(crate) has_checkpoints: bool,
    pub(crate) rewind_every: Option<u32>,
    pub(crate) loses_workers: bool,
    /// The largest number of bytes of a program state; 0 if none can be saved.
    pub(crate) program_state_bytes: u32,
    pub(crate) imbalance: Imbalance,
    pub(crate) book: InformationBook,
    /// The layers whose factors go to a hub.
    pub(crate) blocks: Vec<FactorBlock>,
    pub(crate) index: HashMap<String, u32>,
    pub(crate) arena: Option<WorkerArena>,
    pub(crate) steps: KeySteps,
    pub(crate) inbox: JobInbox,
    pub(crate) counters: Counters,
    pub(crate) notices: Notices,
    pub(crate) norms: NormHistory,
    pub(crate) program_states: ProgramStateClaims,
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

    /// The settings that the ranks agreed on.
    pub fn settings(&self) -> &Settings {
        &self.shared.settings
    }

    /// How uneven the placement is at each level.
    pub fn imbalance(&self) -> Imbalance {
        self.shared.imbalance
    }

    /// The information book: the members of the job, the model's layers, and the scheme of each layer. Every
    /// node of the job has the same book.
    pub fn information_book(&self) -> &InformationBook {
        &self.shared.book
    }

    /// The layers whose factors go to a hub, in the plan's order: see
    /// [`push_pull_factors`](Self::push_pull_factors).
    pub fn factor_blocks(&self) -> &[FactorBlock] {
        &self.shared.blocks
    }

    /// The step of the checkpoint that the hubs have begun with, if they have. Then all ranks, rank 0 too,
    /// [`pull`](Self::pull) its parameters; there is nothing to initialise.
    pub fn resumed_step(&self) -> Option<u32> {
        self.shared.resumed_step
    }

    /// Whether the hubs are to write checkpoints.
    pub fn has_checkpoints(&self) -> bool {
        self.shared.has_checkpoints
    }

    /// Whether the job was running already when this worker joined it, in the place of one that was lost.
    pub fn joined_running(&self) -> bool {
        self.shared.joined_running
    }

    /// The number of steps from one to which the job can go back to the next, if all its workers go back when one is lost.
    /// They can go back to the step at which this worker has begun.
    pub fn rewind_every(&self) -> Option<u32> {
        self.shared.rewind_every
    }

    /// Whether the job goes on without workers that are lost.
    pub fn loses_workers(&self) -> bool {
        self.shared.loses_workers
    }

    /// The number of the key with this name.
    pub fn key(&self, name: &str) -> Option<u32> {
        self.shared.index.get(name).copied()
    }

    /// The step that the next push of a key contributes to; steps count from the version of the initial
    /// parameters.
    pub fn next_step(&self, key: u32) -> Result<u32, WorkerError> {
        self.shared.find(key).map(|_| self.shared.steps.next(key))
    }

    /// Rank 0: sends the initial parameters, as of `version`, which is 0 unless a run is resumed. The other
    /// ranks [`pull`](Self::pull) them. The request ends when the hub has them.
    pub fn initialise<G: StableBytes>(
        &self,
        key: u32,
        parameters: G,
        version: u32,
    ) -> Result<Handle<G, ()>, WorkerError> {
        let send = SendRegion::owned(parameters);
        self.shared.submit(key, RegionRequest::Initialise(send, version), true, |buffers| (sent(buffers), ()))
    }

    /// Contributes a gradient to the key's next step. The request ends when the gradient has taken effect.
    pub fn push<G: StableBytes>(&self, key: u32, gradient: G) -> Result<Handle<G, ()>, WorkerError> {
        let request = RegionRequest::Push(SendRegion::owned(gradient));
        self.shared.submit(key, request, true, |buffers| (sent(buffers), ()))
    }

    /// Receives the key's parameters after the last step that this worker has pushed; before the first push,
    /// the initial parameters.
    pub fn pull<P: StableBytes>(&self, key: u32, out: P) -> Result<Handle<(), P>, WorkerError> {
        let request = RegionRequest::Pull(ReceiveRegion::owned(out));
        self.shared.submit(key, request, true, |buffers| ((), received(buffers)))
    }

    /// Contributes a gradient to the key's next step and receives the updated parameters, or the mean or sum
    /// of the gradients where the job has no optimizer.
    pub fn push_pull<G: StableBytes, P: StableBytes>(
        &self,
        key: u32,
        gradient: G,
        out: P,
    ) -> Result<Handle<G, P>, WorkerError> {
        let request = RegionRequest::PushPull(SendRegion::owned(gradient), ReceiveRegion::owned(out));
        self.shared.submit(key, request, true, |mut buffers| {
            let gradient = sent(RequestBuffers { send: buffers.send.take(), ..Default::default() });
            (gradient, received(buffers))
        })
    }

    /// [`push_pull`](Self::push_pull) into the very memory that the gradient is sent from. The answers
    /// replace it chunk by chunk: after an error some chunks are new and the rest is still the gradient.
    pub fn push_pull_in_place<B: StableBytes>(
        &self,
        key: u32,
        buffer: B,
    ) -> Result<Handle<(), B>, WorkerError> {
        let request = RegionRequest::PushPullInPlace(ReceiveRegion::owned(buffer));
        self.shared.submit(key, request, true, |buffers| ((), received(buffers)))
    }

    /// The number of state values that the job's optimizer keeps for each parameter, as the hubs say: 0 for
    /// plain SGD, 1 with momentum, 2 for Adam. Its slots are counted from 0.
    pub fn state_slots(&self) -> u8 {
        self.shared.state_slots
    }

    /// Receives a slot of the optimizer's state: an f32 value for each of the key's elements, whatever its
    /// dtype. [`Finished::updates`](crate::Finished::updates) is the number of updates that the state has
    /// had.
    ///
    /// Each chunk of it is as the chunk's last complete update left it. To get the state of one step in all
    /// chunks, wait for this worker's pushes first: a synchronous step needs every worker's pushes, so then
    /// none is under way. Where chunks have had different numbers of updates, as in an asynchronous job,
    /// `updates` is the smallest. Like [`pull`](Self::pull) this request waits for rank 0's parameters, at
    /// rank 0 too.
    pub fn pull_state<P: StableBytes>(
        &self,
        key: u32,
        slot: u8,
        out: P,
    ) -> Result<Handle<(), P>, WorkerError> {
        let request = RegionRequest::PullState(ReceiveRegion::owned(out), slot);
        self.shared.submit(key, request, true, |buffers| ((), received(buffers)))
    }

    /// Rank 0: sends a slot of the initial optimizer state, as [`pull_state`](Self::pull_state) gave it, with
    /// the number of updates it has had, at most 2^48. Where the slots of a key differ in that number, the
    /// last one sent holds. The request ends when the hub has the state.
    ///
    /// Send and wait for all state before you [initialise](Self::initialise) the parameters: until then no
    /// other worker can contribute or receive anything, so none gets parameters whose state is not restored
    /// yet.
    pub fn initialise_state<G: StableBytes>(
        &self,
        key: u32,
        slot: u8,
        values: G,
        updates: u64,
    ) -> Result<Handle<G, ()>, WorkerError> {
        let request = RegionRequest::InitialiseState(SendRegion::owned(values), slot, updates);
        self.shared.submit(key, request, true, |buffers| (sent(buffers), ()))
    }

    /// [`push_pull`](Self::push_pull) into the parameters that the workers of this host share.
    pub fn push_pull_shared<G: StableBytes>(
        &self,
        key: u32,
        gradient: G,
    ) -> Result<Handle<G, ()>, WorkerError> {
        let request = RegionRequest::PushPullShared(SendRegion::owned(gradient));
        self.shared.submit(key, request, true, |buffers| (sent(buffers), ()))
    }

    /// [`pull`](Self::pull) into the parameters that the workers of this host share. When the request has
    /// ended, these are the initial parameters, or those after the last step that this worker has pushed.
    pub fn pull_shared(&self, key: u32) -> Result<Handle<(), ()>, WorkerError> {
        self.shared.submit(key, RegionRequest::PullShared, true, |_| ((), ()))
    }

    /// Any request over regions. The regions are dropped when the request ends, before its handle or a
    /// callback reports the end.
    pub fn submit(&self, key: u32, request: RegionRequest) -> Result<Handle<(), ()>, WorkerError> {
        self.shared.submit(key, request, false, |_| ((), ()))
    }

    /// [`submit`](Self::submit) for several keys, as one request: it is handed over at once, and its handle ends with the
    /// last key. The regions of a key are dropped when that key is answered.
    ///
    /// # Errors
    /// If one of the requests is refused; then none is made.
    pub fn submit_many(
        &self,
        requests: impl IntoIterator<Item = (u32, RegionRequest)>,
    ) -> Result<Handle<(), ()>, WorkerError> {
        self.shared.submit_many(requests)
    }

    /// Calls `f` with a [`Scope`], through which requests borrow slices instead of taking buffers. Returns
    /// when every request made in it has ended, however `f` ends.
    pub fn scope<'env, F, R>(&self, f: F) -> R
    where
        F: for<'scope> FnOnce(&Scope<'scope, 'env>) -> R,
    {
        paramhub_transport::lend(|lending| f(&Scope::new(Arc::clone(&self.shared), lending)))
    }

    /// Gives rank 0's parameters to all ranks: rank 0 sends its own at `version`, 0 unless a run is resumed;
    /// the others receive them in place, and with them the version. `slices` holds one slice a key, in table
    /// order. Where the job goes on from a [checkpoint](Self::resumed_step), all ranks receive the
    /// checkpoint's parameters, and rank 0's are not sent.
    ///
    /// # Errors
    /// [`WorkerError::Misused`] where the job has no optimizer: its hubs keep no parameters. After an error
    /// some slices may be new.
    pub fn broadcast<T: Pod>(
        &self,
        parameters: &mut [impl AsMut<[T]>],
        version: u32,
    ) -> Result<(), WorkerError> {
        let keys = self.settings().keys.len();
        if parameters.len() != keys {
            return Err(self.shared.misused(format!(
                "broadcast takes one slice a key, but {} came for {keys} keys",
                parameters.len()
            )));
        }
        self.shared.check_has_parameters()?;
        let sends = self.rank() == 0 && self.resumed_step().is_none();
        paramhub_transport::lend(|lending| {
            let requests = parameters.iter_mut().zip(0..).map(|(parameters, key)| match sends {
                true => (key, RegionRequest::Initialise(lending.send(parameters.as_mut()), version)),
                false => (key, RegionRequest::Pull(lending.receive(parameters.as_mut()))),
            });
            self.submit_many(requests)?.wait().map(drop)
        })
    }

    /// Changes the hyperparameters of group 0, which has all keys where the job has no other groups, from
    /// `first_step` on. The change leaves before every push made after this call: if any one rank makes it
    /// before its push of `first_step`, it holds for that step of a synchronous job.
    ///
    /// In a job that goes on without lost workers all ranks make it. The changes of the rank hold that has been in the job
    /// for longest, among several the lowest, so that the others' are there when it is lost.
    pub fn set_hyperparameters(
        &self,
        first_step: u32,
        hyperparameters: &Hyperparameters,
    ) -> Result<(), WorkerError> {
        self.set_group_hyperparameters(0, first_step, hyperparameters)
    }

    /// [`set_hyperparameters`](Self::set_hyperparameters) for the keys of one group; the hyperparameters of
    /// the other groups stay.
    pub fn set_group_hyperparameters(
        &self,
        group: u16,
        first_step: u32,
        hyperparameters: &Hyperparameters,
    ) -> Result<(), WorkerError> {
        let groups = self.settings().groups();
        if usize::from(group) >= groups {
            return Err(self.shared.misused(format!(
                "hyperparameters were set for group {group}, but the job has {groups}, counted from 0"
            )));
        }
        if !hyperparameters.is_finite() {
            return Err(self.shared.misused(format!(
                "hyperparameters must be finite numbers, but step {first_step} was to use {hyperparameters:?}"
            )));
        }
        let change = HyperparameterChange { group, first_step, hyperparameters: *hyperparameters };
        let full = || {
            let (who, seconds) = (self.shared.who.clone(), RETUNE_TIMEOUT.as_secs_f64());
            WorkerError::Congested { who, seconds }
        };
        self.shared.inbox.put_counted(JobCommand::Retune(change), RETUNE_TIMEOUT, full)
    }

    /// What has been exchanged so far.
    pub fn statistics(&self) -> Statistics {
        self.shared.counters.read()
    }

    /// The newest notices of the hubs, oldest first; a bounded number is kept. Rank 0 gets all notices; every
    /// rank gets those that name the rank for which the hubs wait.
    pub fn notices(&self) -> Vec<HubNotice> {
        self.shared.notices.kept()
    }

    /// Calls `listener`, on the I/O thread, with every notice from now on, in place of an earlier listener.
    /// The listener must be quick. A panic in it ends the job.
    pub fn on_notice(&self, listener: impl Fn(&HubNotice) + Send + Sync + 'static) {
        self.shared.notices.listen(Arc::new(listener));
    }

    /// Why the job takes no more requests, if it does not.
    pub fn failure(&self) -> Option<WorkerError> {
        self.shared.inbox.closed()
    }

    /// A handle with which code beside this job can end it for all ranks, from any thread.
    pub fn abort_handle(&self) -> AbortHandle {
        AbortHandle(Arc::downgrade(&self.shared))
    }

    /// Waits for the requests under way, at most [`Options::leave_timeout`], and leaves the job: from then on
    /// the hubs do not wait for this worker.
    ///
    /// # Errors
    /// If the job failed before, or requests stay unanswered; the job is left all the same.
    pub fn leave(mut self) -> Result<(), WorkerError> {
        self.end(self.leave_timeout)
    }

    fn end(&mut self, patience: Duration) -> Result<(), WorkerError> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        let deadline = deadline(patience);
        // The inbox of a failed job refuses this, and the thread returns the same error.
        let _ = self.shared.inbox.put(JobCommand::Leave { deadline });
        if on_io_thread() {
            // A callback dropped the last owner: the I/O thread cannot wait for itself, and ends by itself.
            return Ok(());
        }
        thread.join().unwrap_or_else(|panic| {
            Err(WorkerError::Internal { who: self.shared.who.clone(), message: panic_message(&*panic) })
        })
    }
}

/// Ends a job for all of its ranks; see [`Job::abort_handle`]. The handle keeps nothing of the job alive.
#[derive(Clone)]
pub struct AbortHandle(Weak<Shared>);

impl AbortHandle {
    /// Sends the reason to every hub and ends the job: the other ranks get the error that this one
    /// `gave up: REASON`. Does not wait. Does nothing where the job is over.
    pub fn abort(&self, reason: &str) {
        let Some(shared) = self.0.upgrade() else { return };
        let who = shared.who.clone();
        let announced = Failure { rank: Some(who.rank), message: reason.to_owned() };
        let error = WorkerError::GaveUp { who, reason: reason.into() };
        // The inbox refuses this only if the job is over.
        let _ = shared.inbox.put(JobCommand::GiveUp { error, announced });
    }
}

impl fmt::Debug for AbortHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AbortHandle").finish_non_exhaustive()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let patience = if std::thread::panicking() { Duration::ZERO } else { Options::DROP_TIMEOUT };
        // A caller that wants the outcome calls `leave`.
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

fn sent<G: StableBytes>(buffers: RequestBuffers) -> G {
    let region = buffers.send.expect("the request was made with a gradient, which came back");
    region.into_owned().expect("the gradient comes back as it went")
}

fn received<P: StableBytes>(buffers: RequestBuffers) -> P {
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
