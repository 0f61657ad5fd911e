//! The job handle: what a trainer calls.

mod factors;
mod norms;
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
use paramhub_core::scheme::Book;
use paramhub_core::settings::Settings;
use paramhub_core::wire::Failure;
use paramhub_transport::{ReceiveRegion, SendRegion, StableBytes};

pub use self::factors::{FactorBuffers, FactorHandle, FactorRegions};
use crate::arena::WorkerArena;
use crate::errand::Errand;
use crate::error::{Who, WorkerError, panic_message};
use crate::handle::{Buffers, Handle, on_io_thread};
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
    pub(crate) resumed_step: Option<u32>,
    pub(crate) has_checkpoints: bool,
    pub(crate) imbalance: Imbalance,
    pub(crate) book: Book,
    /// Of layers whose factors go to a hub.
    pub(crate) blocks: Vec<FactorBlock>,
    pub(crate) index: HashMap<String, u32>,
    pub(crate) arena: Option<WorkerArena>,
    pub(crate) steps: Steps,
    pub(crate) inbox: Inbox,
    pub(crate) counters: Counters,
    pub(crate) notices: Notices,
    pub(crate) norms: NormBook,
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

    /// The information book: who takes part, the model's layers, and the scheme of each. Every node of the job has the same.
    pub fn book(&self) -> &Book {
        &self.shared.book
    }

    /// The layers whose factors go to a hub, in the plan's order: see [`push_pull_factors`](Self::push_pull_factors).
    pub fn factor_blocks(&self) -> &[FactorBlock] {
        &self.shared.blocks
    }

    /// The step of the checkpoint that the hubs have begun with, if they have. All ranks, rank 0 too, [`pull`](Self::pull) its
    /// parameters then; there is nothing to initialise.
    pub fn resumed_step(&self) -> Option<u32> {
        self.shared.resumed_step
    }

    /// Whether the hubs are to write checkpoints.
    pub fn has_checkpoints(&self) -> bool {
        self.shared.has_checkpoints
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
    /// receive them in place, and with them the version. One slice a key, in table order. Where the job goes on from a
    /// [checkpoint](Self::resumed_step), everybody receives its parameters, and rank 0's are left.
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
                .map(|(parameters, key)| match (self.rank(), self.resumed_step()) {
                    (0, None) => scope.initialise(key, &*parameters.as_mut(), version),
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

    /// What has been exchanged so far.
    pub fn statistics(&self) -> Statistics {
        self.shared.counters.read()
    }

    /// The newest notices of the hubs, oldest first; a bounded number is kept. Rank 0 gets them, and all ranks those that say for
    /// whom they wait.
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

    /// What lets code beside this job end it for all of its ranks, from any thread.
    pub fn resignation(&self) -> Resignation {
        Resignation(Arc::downgrade(&self.shared))
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

/// From [`Job::resignation`]. It keeps nothing of the job alive.
#[derive(Clone)]
pub struct Resignation(Weak<Shared>);

impl Resignation {
    /// Says at every hub that this worker cannot go on, and why, which ends the job: the other ranks are told that this one
    /// `gave up: REASON`. Does not wait. It does nothing where the job is over.
    pub fn give_up(&self, reason: &str) {
        let Some(shared) = self.0.upgrade() else { return };
        let who = shared.who.clone();
        let told = Failure { rank: Some(who.rank), message: reason.to_owned() };
        let error = WorkerError::GaveUp { who, reason: reason.into() };
        // Refused only by a job that is over.
        let _ = shared.inbox.put(Command::GiveUp { error, told });
    }
}

impl fmt::Debug for Resignation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resignation").finish_non_exhaustive()
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
