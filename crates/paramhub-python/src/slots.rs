//! The slots: keys that tensors of any size pass through.
//!
//! A job's key table is fixed when it begins, but collectives come with tensors of any size. So a job gets a
//! table of slots: many large ones and a few of every smaller power of two. A tensor is cut into pieces that
//! fit slots exactly, except for its tail, which is padded. The cut, and the slot of each piece, follow from
//! the sizes alone, so ranks that call the same collectives in the same order agree without communication. A
//! piece waits until the one before it in its slot has been answered, so the memory is that of the table,
//! whatever the model.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use paramhub_transport::{ReceiveRegion, StableBytes};
use paramhub_worker::RegionRequest;
use pyo3::prelude::*;

use crate::errors::{self, Failure};
use crate::handle::{CompletionCounter, Handle};
use crate::job::Job;
use crate::memory::Borrowed;

/// The maximum of pieces that wait for their slots.
const WAITING_MAX: usize = 1 << 20;

/// A job's keys as slots. Tensors may come before the job is open: opening it waits for all ranks, and a rank
/// that comes early is not to wait.
#[pyclass(frozen, module = "paramhub._native")]
pub(crate) struct Slots {
    /// The classes, largest first.
    classes: Mutex<Vec<SizeClass>>,
    waiting: Arc<AtomicUsize>,
}

/// Slots of one size.
struct SizeClass {
    bytes: usize,
    slots: Vec<Arc<Slot>>,
    /// The slot of the next piece of this size.
    next: usize,
}

impl SizeClass {
    fn take(&mut self) -> Arc<Slot> {
        let slot = Arc::clone(&self.slots[self.next]);
        self.next = (self.next + 1) % self.slots.len();
        slot
    }
}

struct Slot {
    key: u32,
    queue: Mutex<SlotQueue>,
    /// The number of pieces that wait at all slots.
    waiting: Arc<AtomicUsize>,
}

/// The pieces that wait for a slot, and its state.
struct SlotQueue {
    state: SlotState,
    /// The waiting pieces, each with the counter of its handle.
    pieces: VecDeque<(ReceiveRegion, CompletionCounter)>,
}

enum SlotState {
    /// The job is not open yet.
    Closed,
    Idle(Weak<paramhub::Job>),
    /// A piece is under way.
    Busy,
    Failed(Failure),
}

impl Slot {
    fn lock(&self) -> std::sync::MutexGuard<'_, SlotQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Exchanges a piece now or after those before it.
    fn put(self: &Arc<Self>, piece: ReceiveRegion, counter: CompletionCounter) {
        let mut queue = self.lock();
        match &queue.state {
            SlotState::Closed | SlotState::Busy => {
                queue.pieces.push_back((piece, counter));
                self.waiting.fetch_add(1, Ordering::Relaxed);
            }
            SlotState::Idle(job) => {
                let job = Weak::clone(job);
                queue.state = SlotState::Busy;
                drop(queue);
                self.submit(job, piece, counter);
            }
            SlotState::Failed(failure) => {
                let failure = failure.clone();
                drop((queue, piece));
                counter.count(Some(failure));
            }
        }
    }

    /// Submits the next piece.
    fn submit(self: &Arc<Self>, job: Weak<paramhub::Job>, piece: ReceiveRegion, counter: CompletionCounter) {
        // Weak, so that the job can be left while the slot still exists.
        let failure =
            match job.upgrade().map(|job| job.submit(self.key, RegionRequest::PushPullInPlace(piece))) {
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

    /// Takes up the next piece of a free slot. Runs on the job's I/O thread, except for the first time.
    fn advance(self: &Arc<Self>, job: Weak<paramhub::Job>) {
        let mut queue = self.lock();
        if matches!(queue.state, SlotState::Failed(_)) {
            return;
        }
        let Some((piece, counter)) = queue.pieces.pop_front() else {
            queue.state = SlotState::Idle(job);
            return;
        };
        queue.state = SlotState::Busy;
        drop(queue);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        self.submit(job, piece, counter);
    }

    /// Accepts no more pieces, and fails those that wait.
    fn fail(&self, failure: &Failure) {
        let mut queue = self.lock();
        if matches!(queue.state, SlotState::Failed(_)) {
            return;
        }
        queue.state = SlotState::Failed(failure.clone());
        let pieces = std::mem::take(&mut queue.pieces);
        drop(queue);
        self.waiting.fetch_sub(pieces.len(), Ordering::Relaxed);
        for (piece, counter) in pieces {
            drop(piece);
            counter.count(Some(failure.clone()));
        }
    }
}

/// The tail of a tensor, which does not fill its slot. The drop of the region copies the answer to the
/// tensor, which is before the handle ends.
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

// SAFETY: the bytes are the vector's, which nothing resizes after `new`: they lie on the heap, belong to this
// value alone, and any bits are valid. Only `new` and `drop` touch the memory of `own`.
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
    /// Takes the job's keys by number, each with its bytes, which are powers of two.
    #[new]
    fn new(py: Python<'_>, slots: Vec<(u32, usize)>) -> PyResult<Self> {
        let waiting = Arc::new(AtomicUsize::new(0));
        let mut classes: Vec<SizeClass> = Vec::new();
        for (key, bytes) in slots {
            if !bytes.is_power_of_two() {
                return Err(errors::misuse(py, &format!("a slot has a power of two of bytes, not {bytes}")));
            }
            let queue = Mutex::new(SlotQueue { state: SlotState::Closed, pieces: VecDeque::new() });
            let slot = Arc::new(Slot { key, queue, waiting: Arc::clone(&waiting) });
            match classes.iter_mut().find(|class| class.bytes == bytes) {
                Some(class) => class.slots.push(slot),
                None => classes.push(SizeClass { bytes, slots: vec![slot], next: 0 }),
            }
        }
        if classes.is_empty() {
            return Err(errors::misuse(py, "there is no slot to pass tensors through"));
        }
        classes.sort_by_key(|class| std::cmp::Reverse(class.bytes));
        Ok(Slots { classes: Mutex::new(classes), waiting })
    }

    /// Opens the slots on a job that has them as its keys: exchanges the pieces that came before.
    fn open(&self, py: Python<'_>, job: &Job) -> PyResult<()> {
        let job = Arc::downgrade(&job.job(py)?);
        for slot in self.all() {
            let is_closed = matches!(slot.lock().state, SlotState::Closed);
            if is_closed {
                slot.advance(Weak::clone(&job));
            }
        }
        Ok(())
    }

    /// Fails all waiting and later pieces; the job, if there is one, goes on.
    #[pyo3(signature = (message, culprit = None))]
    fn fail(&self, message: &str, culprit: Option<u32>) {
        let failure = Failure::GivenUp { message: message.into(), culprit };
        self.all().iter().for_each(|slot| slot.fail(&failure));
    }

    /// Contributes the elements at `range` and receives the result into the same memory, which `owner` keeps
    /// alive. Every rank calls it with the same sizes in the same order.
    fn exchange(&self, py: Python<'_>, range: (usize, usize), owner: Py<PyAny>) -> PyResult<Handle> {
        crate::fork::refuse_in_child(py)?;
        let (address, bytes) = range;
        let mut classes = self.classes.lock().unwrap_or_else(PoisonError::into_inner);
        let sizes: Vec<usize> = classes.iter().map(|class| class.bytes).collect();
        let pieces = cut(bytes, &sizes);
        if self.waiting.load(Ordering::Relaxed) + pieces.len() > WAITING_MAX {
            // While the exception is made another thread may get the GIL and call this function.
            drop(classes);
            return Err(errors::misuse(
                py,
                &format!(
                    "{WAITING_MAX} pieces of tensors wait for the hub, which is the limit: wait for some before more"
                ),
            ));
        }
        let (counter, handle) = CompletionCounter::new(pieces.len());
        let mut start = 0;
        for (class, length) in pieces {
            // SAFETY: the package keeps `owner`, and with it the range, and no code reads or writes it until
            // the handle has ended; pieces do not overlap.
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

/// Cuts `bytes` bytes into pieces, in order, each with its class and its length. `sizes` are the bytes of the
/// classes' slots, largest first.
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
