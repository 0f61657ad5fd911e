//! Keys that tensors of any size pass through.
//!
//! A job's key table is fixed when it begins, but collectives come with tensors of any size. So a job gets a table of slots: many
//! large ones and a few of every smaller power of two. A tensor is cut into pieces that fit slots exactly, but for the
//! tail, which is padded. The cut, and the slot of each piece, follow from the sizes alone, so that ranks that call the same
//! collectives in the same order agree without a word. A piece waits until the one before it in its slot has been
//! answered; memory stays that of the table, whatever the model.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use paramhub_transport::{ReceiveRegion, StableBytes};
use paramhub_worker::Errand;
use pyo3::prelude::*;

use crate::errors::{self, Failure};
use crate::handle::{Counter, Handle};
use crate::job::Job;
use crate::memory::Borrowed;

/// Pieces that may wait for their slots at a time.
const WAITING_MAX: usize = 1 << 20;

/// A job's keys as slots. Tensors may come before the job is there: opening it takes all ranks, and whoever comes first is not
/// to wait.
#[pyclass(frozen, module = "paramhub._native")]
pub(crate) struct Slots {
    /// Largest first.
    classes: Mutex<Vec<Class>>,
    waiting: Arc<AtomicUsize>,
}

/// Slots of one size.
struct Class {
    bytes: usize,
    slots: Vec<Arc<Slot>>,
    /// The slot that the next piece of this size takes.
    next: usize,
}

impl Class {
    fn take(&mut self) -> Arc<Slot> {
        let slot = Arc::clone(&self.slots[self.next]);
        self.next = (self.next + 1) % self.slots.len();
        slot
    }
}

struct Slot {
    key: u32,
    line: Mutex<Line>,
    /// Pieces in all lines.
    waiting: Arc<AtomicUsize>,
}

/// What a slot has to do.
struct Line {
    state: State,
    /// Each with whom to tell of its end.
    pieces: VecDeque<(ReceiveRegion, Counter)>,
}

enum State {
    /// The job is not there yet.
    Closed,
    Idle(Weak<paramhub::Job>),
    /// A piece is under way.
    Busy,
    Failed(Failure),
}

impl Slot {
    fn lock(&self) -> std::sync::MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Exchanges a piece now or after those before it.
    fn put(self: &Arc<Self>, piece: ReceiveRegion, counter: Counter) {
        let mut line = self.lock();
        match &line.state {
            State::Closed | State::Busy => {
                line.pieces.push_back((piece, counter));
                self.waiting.fetch_add(1, Ordering::Relaxed);
            }
            State::Idle(job) => {
                let job = Weak::clone(job);
                line.state = State::Busy;
                drop(line);
                self.submit(job, piece, counter);
            }
            State::Failed(failure) => {
                let failure = failure.clone();
                drop((line, piece));
                counter.count(Some(failure));
            }
        }
    }

    /// Hands in the piece whose turn it is.
    fn submit(self: &Arc<Self>, job: Weak<paramhub::Job>, piece: ReceiveRegion, counter: Counter) {
        // Weak, so that the job can be left while this still lives.
        let failure = match job.upgrade().map(|job| job.submit(self.key, Errand::PushPullInPlace(piece))) {
            Some(Ok(request)) => {
                let slot = Arc::clone(self);
                request.on_complete(move |outcome| {
                    counter.count(outcome.as_ref().err().map(Failure::from));
                    slot.advance(job);
                });
                return;
            }
            Some(Err(error)) => Failure::Worker(error),
            None => Failure::given_up("the job was left"),
        };
        counter.count(Some(failure.clone()));
        // A job that refuses one piece refuses all.
        self.fail(&failure);
    }

    /// The slot is free for the next piece. Runs on the job's I/O thread, but for the first time.
    fn advance(self: &Arc<Self>, job: Weak<paramhub::Job>) {
        let mut line = self.lock();
        if matches!(line.state, State::Failed(_)) {
            return;
        }
        let Some((piece, counter)) = line.pieces.pop_front() else {
            line.state = State::Idle(job);
            return;
        };
        line.state = State::Busy;
        drop(line);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        self.submit(job, piece, counter);
    }

    /// Takes nothing any more, and ends what waits.
    fn fail(&self, failure: &Failure) {
        let mut line = self.lock();
        if matches!(line.state, State::Failed(_)) {
            return;
        }
        line.state = State::Failed(failure.clone());
        let pieces = std::mem::take(&mut line.pieces);
        drop(line);
        self.waiting.fetch_sub(pieces.len(), Ordering::Relaxed);
        for (piece, counter) in pieces {
            drop(piece);
            counter.count(Some(failure.clone()));
        }
    }
}

/// The end of a tensor that fills no slot. What comes back is copied to where it belongs when the region is dropped, which is
/// before anyone hears of the end.
struct Tail {
    padded: Vec<u8>,
    own: Borrowed,
}

impl Tail {
    fn new(own: Borrowed, slot: usize) -> Self {
        let mut padded = Vec::with_capacity(slot);
        padded.extend_from_slice(own.as_bytes());
        padded.resize(slot, 0);
        Tail { padded, own }
    }
}

impl Drop for Tail {
    fn drop(&mut self) {
        let own = self.own.as_bytes_mut();
        let bytes = own.len();
        own.copy_from_slice(&self.padded[..bytes]);
    }
}

// SAFETY: the bytes are the vector's, which nothing resizes after `new`: they lie on the heap, belong to this value alone, and
// any bits are valid. What `own` stands for is touched in `new` and `drop` only.
unsafe impl StableBytes for Tail {
    fn as_bytes(&self) -> &[u8] {
        &self.padded
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        &mut self.padded
    }
}

#[pymethods]
impl Slots {
    /// `slots` are the job's keys by number, each with its bytes, which are powers of two.
    #[new]
    fn new(py: Python<'_>, slots: Vec<(u32, usize)>) -> PyResult<Self> {
        let waiting = Arc::new(AtomicUsize::new(0));
        let mut classes: Vec<Class> = Vec::new();
        for (key, bytes) in slots {
            if !bytes.is_power_of_two() {
                return Err(errors::misuse(py, &format!("a slot has a power of two of bytes, not {bytes}")));
            }
            let line = Mutex::new(Line { state: State::Closed, pieces: VecDeque::new() });
            let slot = Arc::new(Slot { key, line, waiting: Arc::clone(&waiting) });
            match classes.iter_mut().find(|class| class.bytes == bytes) {
                Some(class) => class.slots.push(slot),
                None => classes.push(Class { bytes, slots: vec![slot], next: 0 }),
            }
        }
        if classes.is_empty() {
            return Err(errors::misuse(py, "there is no slot to pass tensors through"));
        }
        classes.sort_by_key(|class| std::cmp::Reverse(class.bytes));
        Ok(Slots { classes: Mutex::new(classes), waiting })
    }

    /// The job is there, whose keys are the slots: what has come meanwhile is exchanged.
    fn open(&self, py: Python<'_>, job: &Job) -> PyResult<()> {
        let job = Arc::downgrade(&job.job(py)?);
        for slot in self.all() {
            let is_closed = matches!(slot.lock().state, State::Closed);
            if is_closed {
                slot.advance(Weak::clone(&job));
            }
        }
        Ok(())
    }

    /// Fails what waits and whatever comes later; the job, if there is one, goes on.
    #[pyo3(signature = (message, culprit = None))]
    fn fail(&self, message: &str, culprit: Option<u32>) {
        let failure = Failure::GivenUp { message: message.into(), culprit };
        self.all().iter().for_each(|slot| slot.fail(&failure));
    }

    /// Contributes the elements at `range` and receives what comes of them into the same memory; `owner` keeps it. Every rank
    /// calls it with the same sizes in the same order.
    fn exchange(&self, py: Python<'_>, range: (usize, usize), owner: Py<PyAny>) -> PyResult<Handle> {
        crate::fork::refuse_in_child(py)?;
        let (address, bytes) = range;
        let mut classes = self.classes.lock().unwrap_or_else(PoisonError::into_inner);
        let sizes: Vec<usize> = classes.iter().map(|class| class.bytes).collect();
        let pieces = cut(bytes, &sizes);
        if self.waiting.load(Ordering::Relaxed) + pieces.len() > WAITING_MAX {
            // Another thread may get the GIL while the exception is made, and come here.
            drop(classes);
            return Err(errors::misuse(
                py,
                &format!(
                    "{WAITING_MAX} pieces of tensors wait for the hub, which is the limit: wait for some before more"
                ),
            ));
        }
        let (counter, handle) = Counter::new(pieces.len());
        let mut start = 0;
        for (class, length) in pieces {
            // SAFETY: the package keeps `owner`, and with it the range, and nobody looks at it until the handle has ended;
            // pieces do not overlap.
            let own = unsafe { Borrowed::new(owner.clone_ref(py), address + start, length) };
            let slot = sizes[class];
            let piece =
                if length == slot { own.into_receive() } else { ReceiveRegion::owned(Tail::new(own, slot)) };
            classes[class].take().put(piece, counter.clone());
            start += length;
        }
        Ok(handle)
    }
}

impl Slots {
    fn all(&self) -> Vec<Arc<Slot>> {
        let classes = self.classes.lock().unwrap_or_else(PoisonError::into_inner);
        classes.iter().flat_map(|class| class.slots.iter().map(Arc::clone)).collect()
    }
}

/// The pieces of `bytes` bytes in order, each as its class and its length. `sizes` are the classes' slots, largest first.
fn cut(bytes: usize, sizes: &[usize]) -> Vec<(usize, usize)> {
    let mut pieces = Vec::new();
    let mut left = bytes;
    for (class, &size) in sizes.iter().enumerate() {
        pieces.extend(std::iter::repeat_n((class, size), left / size));
        left %= size;
    }
    if left > 0 {
        pieces.push((sizes.len() - 1, left));
    }
    pieces
}
