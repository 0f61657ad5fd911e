//! Operations in the queues of their variables.
//!
//! **Why no cycle can form.** A pusher enters all queues of its operation before the next operation enters any: the caller
//! of [`enter`] holds one lock for all pushes. Any two operations then stand in the same order in every queue that both
//! are in, the order of push, and an operation only ever waits for some that were pushed before it. Were queues entered
//! one by one, two threads could push A into x and y and B into y and x; A would wait for B and B for A, also if all
//! entered their queues in the same order.

use super::failure::Failure;
use super::few::Few;
use super::queue::{Access, Queue};
use super::sync::{Arc, AtomicU32, Mutex, Ordering};

/// In [`Links::unmet`], above every count.
const POISONED: u32 = 1 << 31;
/// Up to here every pair of variables is compared, which is quicker than sorting.
const PAIRS: usize = 16;

/// Counted by std everywhere: nothing depends on how.
type Known = std::sync::Arc<Failure>;
type Poison = Option<Known>;

/// What stands in queues: a handle of an operation.
pub(super) trait Member: Clone + Sized {
    fn links(&self) -> &Links<Self>;
}

/// A variable.
pub(super) struct Place<M> {
    state: Mutex<State<M>>,
}

struct State<M> {
    queue: Queue<M>,
    /// Of the mutation that had it last, or of one before it that nobody has been told of.
    poison: Poison,
}

impl<M: Member> Place<M> {
    pub(super) fn new() -> Place<M> {
        Place { state: Mutex::new(State { queue: Queue::new(), poison: None }) }
    }

    /// If a wait with this access would not wait: what it has to tell. The variable is clean then.
    pub(super) fn tell(&self, access: Access) -> Option<Poison> {
        let mut state = self.state.lock().expect("nothing panics under this lock");
        let free = state.queue.nobody_waits() && state.queue.admits(access);
        free.then(|| state.poison.take())
    }

    pub(super) fn take_poison(&self) -> Poison {
        self.state.lock().expect("nothing panics under this lock").poison.take()
    }

    pub(super) fn is_poisoned(&self) -> bool {
        self.state.lock().expect("nothing panics under this lock").poison.is_some()
    }
}

/// An operation's places in queues, and how many of them it does not have yet.
pub(super) struct Links<M> {
    /// One more while it is being pushed. An operation without variables meets only that one.
    unmet: AtomicU32,
    poison: Mutex<Poison>,
    /// A wait takes the poison from its variable instead of sharing it.
    takes_poison: bool,
    places: Few<Link<M>>,
}

pub(super) struct Link<M> {
    pub(super) place: Arc<Place<M>>,
    pub(super) access: Access,
}

impl<M: Member> Links<M> {
    /// A variable that is named twice counts once: as mutated, if it is mutated anywhere.
    pub(super) fn new(places: Few<Link<M>>, takes_poison: bool) -> Links<M> {
        let places = merged(places);
        let unmet = u32::try_from(places.len()).ok().filter(|&unmet| unmet < POISONED - 1);
        let unmet = unmet.expect("nobody has two thousand million variables") + 1;
        Links { unmet: AtomicU32::new(unmet), poison: Mutex::new(None), takes_poison, places }
    }

    /// The failure that an operation depends on; settled once it is ready.
    pub(super) fn poison(&self) -> Poison {
        match self.unmet.load(Ordering::Acquire) & POISONED {
            0 => None,
            _ => self.poison.lock().expect("nothing panics under this lock").clone(),
        }
    }

    pub(super) fn is_poisoned(&self) -> bool {
        self.unmet.load(Ordering::Relaxed) & POISONED != 0
    }

    /// True if nothing is unmet any more: to one caller only.
    fn meet(&self, count: u32) -> bool {
        let before = self.unmet.fetch_sub(count, Ordering::AcqRel);
        before & !POISONED == count
    }

    /// The variable's poison, under its lock, becomes the operation's.
    fn inherit(&self, poison: &mut Poison) {
        let Some(failure) = poison else { return };
        Failure::meet(&mut self.poison.lock().expect("nothing panics under this lock"), failure);
        self.unmet.fetch_or(POISONED, Ordering::Release);
        if self.takes_poison {
            *poison = None;
        }
    }
}

/// Enters all queues; true if the operation is ready. One caller at a time: see above.
pub(super) fn enter<M: Member>(member: &M) -> bool {
    let links = member.links();
    let mut met = 1;
    for link in links.places.iter() {
        let mut state = link.place.state.lock().expect("nothing panics under this lock");
        if state.queue.enter(link.access, || member.clone()) {
            links.inherit(&mut state.poison);
            met += 1;
        }
    }
    links.meet(met)
}

/// Leaves all queues, and poisons what was mutated if there is a failure. `ready` hears of operations that became ready,
/// `poisoned` of variables that were clean.
pub(super) fn leave<M: Member>(
    member: &M,
    failure: Option<&Known>,
    mut ready: impl FnMut(M),
    mut poisoned: impl FnMut(&Arc<Place<M>>),
) {
    for link in member.links().places.iter() {
        let mut newly = false;
        {
            let mut state = link.place.state.lock().expect("nothing panics under this lock");
            let State { queue, poison } = &mut *state;
            if let (Some(failure), Access::Mutate) = (failure, link.access) {
                newly = Failure::meet(poison, failure);
            }
            queue.leave(link.access, |next: M| {
                next.links().inherit(poison);
                if next.links().meet(1) {
                    ready(next);
                }
            });
        }
        if newly {
            poisoned(&link.place);
        }
    }
}

fn merged<M>(mut places: Few<Link<M>>) -> Few<Link<M>> {
    let count = places.len();
    let address = |link: &Link<M>| Arc::as_ptr(&link.place).addr();
    if count <= PAIRS {
        let again =
            |at: usize, link: &Link<M>| places.iter().take(at).any(|one| address(one) == address(link));
        if !places.iter().enumerate().any(|(at, link)| again(at, link)) {
            return places;
        }
    }
    let mut sorted = std::mem::replace(&mut places, Few::new()).into_vec();
    sorted.sort_unstable_by_key(|link| (address(link), std::cmp::Reverse(link.access)));
    sorted.dedup_by_key(|link| address(link));
    sorted.into_iter().collect()
}
