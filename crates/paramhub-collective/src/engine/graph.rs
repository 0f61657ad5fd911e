//! Operations in the queues of their variables.
//!
//! **Why no cycle can form.** A pusher enters all queues of its operation before the next operation enters
//! any: the caller of [`enter`] holds one lock for all pushes. So any two operations have the same order, the
//! order of push, in every queue that both are in, and an operation only ever waits for operations that were
//! pushed before it. If queues were entered one by one, two threads could push A into x and y and B into y
//! and x; A would wait for B and B for A, even if both entered their queues in the same order.

use super::failure::Failure;
use super::queue::{Access, Queue};
use super::small_list::SmallList;
use super::sync::{Arc, AtomicU32, Mutex, Ordering};

/// A flag in [`Dependencies::unmet`], above every count.
const POISONED: u32 = 1 << 31;
/// The number of variables up to which every pair is compared, which is quicker than sorting.
const PAIRS: usize = 16;

/// std's `Arc` under loom, too: nothing depends on how it counts.
type KnownFailure = std::sync::Arc<Failure>;
type Poison = Option<KnownFailure>;

/// A handle of an operation, as queues hold it.
pub(super) trait QueuedOperation: Clone + Sized {
    fn dependencies(&self) -> &Dependencies<Self>;
}

/// A variable's queue of operations.
pub(super) struct VariableQueue<M> {
    state: Mutex<QueueState<M>>,
}

struct QueueState<M> {
    queue: Queue<M>,
    /// The failure of the last mutation, or of an earlier one that no wait has reported.
    poison: Poison,
}

impl<M: QueuedOperation> VariableQueue<M> {
    pub(super) fn new() -> VariableQueue<M> {
        VariableQueue { state: Mutex::new(QueueState { queue: Queue::new(), poison: None }) }
    }

    /// The outcome of a wait with this access, if the wait would end at once. It clears the variable's
    /// poison.
    pub(super) fn take_outcome_if_idle(&self, access: Access) -> Option<Poison> {
        let mut state = self.state.lock().expect("nothing panics under this lock");
        let free = state.queue.is_empty() && state.queue.admits(access);
        free.then(|| state.poison.take())
    }

    pub(super) fn take_poison(&self) -> Poison {
        self.state.lock().expect("nothing panics under this lock").poison.take()
    }

    pub(super) fn is_poisoned(&self) -> bool {
        self.state.lock().expect("nothing panics under this lock").poison.is_some()
    }
}

/// An operation's places in queues, and the number of those that have not given it their variable yet.
pub(super) struct Dependencies<M> {
    /// The number of queues that have not given it their variable, plus one while it is being pushed. An
    /// operation without variables has only that one.
    unmet: AtomicU32,
    poison: Mutex<Poison>,
    /// `true` if it takes the poison from its variable instead of sharing it, as a wait does.
    takes_poison: bool,
    accesses: SmallList<QueueAccess<M>>,
}

pub(super) struct QueueAccess<M> {
    pub(super) queue: Arc<VariableQueue<M>>,
    pub(super) access: Access,
}

impl<M: QueuedOperation> Dependencies<M> {
    /// A variable that is named twice counts once: as mutated, if it is mutated anywhere.
    pub(super) fn new(accesses: SmallList<QueueAccess<M>>, takes_poison: bool) -> Dependencies<M> {
        let accesses = merged(accesses);
        let unmet = u32::try_from(accesses.len()).ok().filter(|&unmet| unmet < POISONED - 1);
        let unmet = unmet.expect("an operation has fewer than two thousand million variables") + 1;
        Dependencies { unmet: AtomicU32::new(unmet), poison: Mutex::new(None), takes_poison, accesses }
    }

    /// The failure that an operation depends on; it no longer changes once the operation is ready.
    pub(super) fn poison(&self) -> Poison {
        match self.unmet.load(Ordering::Acquire) & POISONED {
            0 => None,
            _ => self.poison.lock().expect("nothing panics under this lock").clone(),
        }
    }

    pub(super) fn is_poisoned(&self) -> bool {
        self.unmet.load(Ordering::Relaxed) & POISONED != 0
    }

    /// Subtracts `count`; true if nothing is left, which only one caller gets.
    fn meet(&self, count: u32) -> bool {
        let before = self.unmet.fetch_sub(count, Ordering::AcqRel);
        before & !POISONED == count
    }

    /// Copies the variable's poison, under its lock, to the operation.
    fn inherit(&self, poison: &mut Poison) {
        let Some(failure) = poison else { return };
        Failure::meet(&mut self.poison.lock().expect("nothing panics under this lock"), failure);
        self.unmet.fetch_or(POISONED, Ordering::Release);
        if self.takes_poison {
            *poison = None;
        }
    }
}

/// Enters all queues; true if the operation is ready. One caller at a time: see the module.
pub(super) fn enter<M: QueuedOperation>(member: &M) -> bool {
    let dependencies = member.dependencies();
    let mut met = 1;
    for queue_access in dependencies.accesses.iter() {
        let mut state = queue_access.queue.state.lock().expect("nothing panics under this lock");
        if state.queue.enter(queue_access.access, || member.clone()) {
            dependencies.inherit(&mut state.poison);
            met += 1;
        }
    }
    dependencies.meet(met)
}

/// Leaves all queues, and poisons the mutated variables if there is a failure. Passes the operations that
/// became ready to `ready`, and the variables that were clean to `poisoned`.
pub(super) fn leave<M: QueuedOperation>(
    member: &M,
    failure: Option<&KnownFailure>,
    mut ready: impl FnMut(M),
    mut poisoned: impl FnMut(&Arc<VariableQueue<M>>),
) {
    for queue_access in member.dependencies().accesses.iter() {
        let mut newly = false;
        {
            let mut state = queue_access.queue.state.lock().expect("nothing panics under this lock");
            let QueueState { queue, poison } = &mut *state;
            if let (Some(failure), Access::Mutate) = (failure, queue_access.access) {
                newly = Failure::meet(poison, failure);
            }
            queue.leave(queue_access.access, |next: M| {
                next.dependencies().inherit(poison);
                if next.dependencies().meet(1) {
                    ready(next);
                }
            });
        }
        if newly {
            poisoned(&queue_access.queue);
        }
    }
}

fn merged<M>(mut accesses: SmallList<QueueAccess<M>>) -> SmallList<QueueAccess<M>> {
    let count = accesses.len();
    let address = |queue_access: &QueueAccess<M>| Arc::as_ptr(&queue_access.queue).addr();
    if count <= PAIRS {
        let again = |at: usize, queue_access: &QueueAccess<M>| {
            accesses.iter().take(at).any(|one| address(one) == address(queue_access))
        };
        if !accesses.iter().enumerate().any(|(at, queue_access)| again(at, queue_access)) {
            return accesses;
        }
    }
    let mut sorted = std::mem::replace(&mut accesses, SmallList::new()).into_vec();
    sorted
        .sort_unstable_by_key(|queue_access| (address(queue_access), std::cmp::Reverse(queue_access.access)));
    sorted.dedup_by_key(|queue_access| address(queue_access));
    sorted.into_iter().collect()
}
