//! Memory that an I/O thread reads or writes while the user's code continues.
//!
//! While a region lives, nobody writes the bytes of a [`SendRegion`], and only the region reads or writes those of
//! a [`ReceiveRegion`]. So a move passes a region to an I/O thread and back. There are three ways to make one:
//! give a buffer away ([`SendRegion::owned`]), which may return to its [`BufferSlot`] by itself; lend a slice
//! inside a scope that ends after the region ([`lend`]); or pass a pointer and keep the safety rules yourself
//! ([`SendRegion::from_raw`]).

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use bytemuck::Pod;

/// A buffer that can become a region: it owns bytes whose address does not change when the value itself is
/// moved.
///
/// # Safety
/// Until the value is dropped, wherever it is moved, and whatever safe code does with the returned slices:
/// - [`as_bytes`](Self::as_bytes) and [`as_bytes_mut`](Self::as_bytes_mut) return the same address and length every time;
/// - the bytes are initialised, belong to the value alone, and may be read and written from any one thread at a time;
/// - every bit pattern written through `as_bytes_mut` leaves the value valid.
pub unsafe trait StableBytes: Send + 'static {
    /// The bytes, to read.
    fn as_bytes(&self) -> &[u8];
    /// The same bytes, to write.
    fn as_bytes_mut(&mut self) -> &mut [u8];
}

// SAFETY: elements are on the heap, which a move of the Vec does not change, and only `&`/`&mut` slices of
// them are returned, so nothing can grow it. `Pod`: no padding, every bit pattern valid.
unsafe impl<T: Pod + Send> StableBytes for Vec<T> {
    fn as_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self)
    }
}

// SAFETY: as for Vec; a boxed slice cannot even grow.
unsafe impl<T: Pod + Send> StableBytes for Box<[T]> {
    fn as_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self)
    }
}

/// A buffer that returns when the region made of it is dropped, for operations that keep their regions to
/// themselves: [`BufferSlot::lend`] gives it away, [`BufferSlot::take`] takes it back.
pub struct BufferSlot<B>(Arc<Mutex<Option<B>>>);

impl<B: StableBytes> BufferSlot<B> {
    /// A slot that holds `buffer`.
    pub fn new(buffer: B) -> Self {
        BufferSlot(Arc::new(Mutex::new(Some(buffer))))
    }

    /// Takes the buffer; `None` if it is lent or was taken.
    pub fn take(&self) -> Option<B> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Puts a buffer in; one that was there is dropped.
    pub fn put(&self, buffer: B) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(buffer);
    }

    /// Takes the buffer in a form that a region may own; `None` if it is lent or was taken.
    pub fn lend(&self) -> Option<LoanedBuffer<B>> {
        Some(LoanedBuffer { buffer: Some(self.take()?), slot: BufferSlot(Arc::clone(&self.0)) })
    }
}

impl<B> fmt::Debug for BufferSlot<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferSlot").finish_non_exhaustive()
    }
}

/// A buffer on loan from its [`BufferSlot`], until it is dropped.
pub struct LoanedBuffer<B: StableBytes> {
    /// `None` only during the drop.
    buffer: Option<B>,
    slot: BufferSlot<B>,
}

impl<B: StableBytes> Drop for LoanedBuffer<B> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.slot.put(buffer);
        }
    }
}

// SAFETY: the buffer's own promise covers everything: only the two methods below reach the buffer before this
// value is dropped, and a move of this value moves the buffer, as its promise allows.
unsafe impl<B: StableBytes> StableBytes for LoanedBuffer<B> {
    fn as_bytes(&self) -> &[u8] {
        self.buffer.as_ref().expect("it goes back when it is dropped").as_bytes()
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.buffer.as_mut().expect("it goes back when it is dropped").as_bytes_mut()
    }
}

/// Bytes that a worker sends (a gradient). They do not change while the region lives.
pub struct SendRegion {
    memory: RegionMemory,
}

impl SendRegion {
    /// Takes `buffer`; [`into_owned`](Self::into_owned) returns it.
    pub fn owned(buffer: impl StableBytes) -> Self {
        SendRegion { memory: RegionMemory::Owned(Box::new(buffer)) }
    }

    /// A region over memory that the caller manages. `pointer` may be null if `length` is 0.
    ///
    /// # Safety
    /// Until the region is dropped, `pointer` is valid for reads of `length` initialised bytes (at most
    /// `isize::MAX`) from any thread, and nothing writes them.
    pub unsafe fn from_raw(pointer: *const u8, length: usize) -> Self {
        SendRegion {
            memory: RegionMemory::Raw { bytes: RawBytes::new(pointer.cast_mut(), length), _lease: None },
        }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        self.memory.bytes()
    }

    /// The buffer given to [`owned`](Self::owned). `None` if the buffer is of another type than `B`, which
    /// drops it, or if the region was made of a slice or a pointer.
    pub fn into_owned<B: StableBytes>(self) -> Option<B> {
        self.memory.into_owned()
    }
}

impl fmt::Debug for SendRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendRegion").field("bytes", &self.bytes().len()).finish()
    }
}

/// Bytes into which a worker receives (parameters). In an in-place exchange it first sends their old content. They
/// belong to the region alone while it lives.
pub struct ReceiveRegion {
    memory: RegionMemory,
}

impl ReceiveRegion {
    /// Takes `buffer`; [`into_owned`](Self::into_owned) returns it.
    pub fn owned(buffer: impl StableBytes) -> Self {
        ReceiveRegion { memory: RegionMemory::Owned(Box::new(buffer)) }
    }

    /// A region over memory that the caller manages. `pointer` may be null if `length` is 0.
    ///
    /// # Safety
    /// Until the region is dropped, `pointer` is valid for reads and writes of `length` initialised bytes (at
    /// most `isize::MAX`) from any thread, every bit pattern may be written, and nothing else reads or writes
    /// them.
    pub unsafe fn from_raw(pointer: *mut u8, length: usize) -> Self {
        ReceiveRegion { memory: RegionMemory::Raw { bytes: RawBytes::new(pointer, length), _lease: None } }
    }

    /// The bytes, to read.
    pub fn bytes(&self) -> &[u8] {
        self.memory.bytes()
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            RegionMemory::Owned(owner) => owner.as_bytes_mut(),
            // SAFETY: valid for writes and the region's alone while it lives: `from_raw`'s caller promised
            // it, or the region was lent an `&'env mut` slice and `lend` waits until it is dropped. `&mut
            // self` makes this the only slice.
            RegionMemory::Raw { bytes, .. } => unsafe { bytes.as_slice_mut() },
        }
    }

    /// The buffer given to [`owned`](Self::owned). `None` if the buffer is of another type than `B`, which
    /// drops it, or if the region was made of a slice or a pointer.
    pub fn into_owned<B: StableBytes>(self) -> Option<B> {
        self.memory.into_owned()
    }
}

impl fmt::Debug for ReceiveRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveRegion").field("bytes", &self.bytes().len()).finish()
    }
}

/// Calls `f` with a [`LendScope`] that lends borrowed slices to I/O threads, like [`std::thread::scope`].
///
/// A region has no lifetime, so `lend` waits: it neither returns nor unwinds before every region lent inside
/// has been dropped, wherever it went. So no region outlives the slice that it points to. But if a region is never dropped,
/// because it was leaked, returned from `f` or kept somewhere for ever, `lend` waits for ever.
///
/// ```
/// let (gradient, mut parameters) = ([1.0_f32; 4], [0.0_f32; 4]);
/// paramhub_transport::lend(|lending| {
///     let from = lending.send(&gradient);
///     let mut into = lending.receive(&mut parameters);
///     std::thread::spawn(move || into.bytes_mut().copy_from_slice(from.bytes()));
/// });
/// assert_eq!(parameters, gradient);
/// ```
///
/// The lent memory must outlive the scope:
/// ```compile_fail,E0597
/// paramhub_transport::lend(|lending| {
///     let gradient = [1.0_f32; 4];
///     lending.send(&gradient);
/// });
/// ```
/// and is inaccessible while a region receives into it:
/// ```compile_fail,E0502
/// let mut parameters = [0.0_f32; 4];
/// paramhub_transport::lend(|lending| {
///     let into = lending.receive(&mut parameters);
///     println!("{}", parameters[0]);
/// });
/// ```
pub fn lend<'env, F, R>(f: F) -> R
where
    F: for<'scope> FnOnce(&'scope LendScope<'scope, 'env>) -> R,
{
    let lending =
        LendScope { outstanding: Arc::new(Outstanding::default()), scope: PhantomData, env: PhantomData };
    let result = catch_unwind(AssertUnwindSafe(|| f(&lending)));
    lending.outstanding.wait_for_none();
    result.unwrap_or_else(|panic| resume_unwind(panic))
}

/// Lends slices to I/O threads until the end of its [`lend`].
#[derive(Debug)]
pub struct LendScope<'scope, 'env: 'scope> {
    outstanding: Arc<Outstanding>,
    // Invariant, as in std: if the lifetime could shrink, slices could be lent that die before `lend`
    // returns.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

impl<'scope, 'env> LendScope<'scope, 'env> {
    /// Lends `slice` as the source of a send.
    pub fn send<T: Pod>(&'scope self, slice: &'env [T]) -> SendRegion {
        let bytes: &'env [u8] = bytemuck::cast_slice(slice);
        let bytes = RawBytes::new(bytes.as_ptr().cast_mut(), bytes.len());
        SendRegion { memory: RegionMemory::Raw { bytes, _lease: Some(Lease::new(&self.outstanding)) } }
    }

    /// Lends `slice` as the target of a receive.
    pub fn receive<T: Pod>(&'scope self, slice: &'env mut [T]) -> ReceiveRegion {
        let bytes: &'env mut [u8] = bytemuck::cast_slice_mut(slice);
        let bytes = RawBytes::new(bytes.as_mut_ptr(), bytes.len());
        ReceiveRegion { memory: RegionMemory::Raw { bytes, _lease: Some(Lease::new(&self.outstanding)) } }
    }
}

/// The memory of a region. It asks an owned buffer for its bytes at each access and keeps no pointer, so the
/// compiler checks aliasing.
enum RegionMemory {
    Owned(Box<dyn Owner>),
    Raw { bytes: RawBytes, _lease: Option<Lease> },
}

impl RegionMemory {
    fn bytes(&self) -> &[u8] {
        match self {
            RegionMemory::Owned(owner) => owner.as_bytes(),
            // SAFETY: valid for reads while the region lives: `from_raw`'s caller promised it, or `lend`
            // waits until the region is dropped. Nothing writes meanwhile: the region returns `&mut` only for
            // `&mut self`.
            RegionMemory::Raw { bytes, .. } => unsafe { bytes.as_slice() },
        }
    }

    fn into_owned<B: StableBytes>(self) -> Option<B> {
        match self {
            RegionMemory::Owned(owner) => {
                let owner: Box<dyn Any> = owner;
                owner.downcast().ok().map(|owner| *owner)
            }
            RegionMemory::Raw { .. } => None,
        }
    }
}

/// [`StableBytes`] whose type can be recovered.
trait Owner: StableBytes + Any {}

impl<B: StableBytes> Owner for B {}

/// An address and a length; the region that has them decides what may be done with them.
struct RawBytes {
    pointer: NonNull<u8>,
    length: usize,
}

// SAFETY: an address alone is harmless in any thread. The duties of `from_raw`'s caller and the wait of
// `lend` allow its use from any thread, one at a time, which `&`/`&mut self` of the region's methods enforce.
unsafe impl Send for RawBytes {}

impl RawBytes {
    fn new(pointer: *mut u8, length: usize) -> Self {
        let pointer = NonNull::new(pointer).unwrap_or_else(|| {
            assert_eq!(length, 0, "a region of {length} bytes at the null pointer");
            NonNull::dangling()
        });
        RawBytes { pointer, length }
    }

    /// # Safety
    /// The memory is valid for reads and not written for as long as the slice lives.
    unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: by this function's contract; `new` made the pointer non-null, and a byte has no alignment.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.length) }
    }

    /// # Safety
    /// The memory is valid for writes and not otherwise accessed for as long as the slice lives.
    unsafe fn as_slice_mut(&mut self) -> &mut [u8] {
        // SAFETY: by this function's contract; `new` made the pointer non-null, and a byte has no alignment.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr(), self.length) }
    }
}

/// The regions of one [`lend`] that are still alive. They share it by `Arc`, so that the last one to be
/// dropped never signals a scope whose stack is gone.
#[derive(Debug, Default)]
struct Outstanding {
    regions: AtomicUsize,
    /// Held while the scope looks at the count and begins to wait, and to tell it that none is left.
    waiting: Mutex<()>,
    none: Condvar,
}

impl Outstanding {
    fn wait_for_none(&self) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        // Acquire: what the threads did with the memory happened before they dropped their regions.
        while self.regions.load(Ordering::Acquire) > 0 {
            waiting = self.none.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Counts a region for as long as it lives.
struct Lease(Arc<Outstanding>);

impl Lease {
    fn new(outstanding: &Arc<Outstanding>) -> Self {
        outstanding.regions.fetch_add(1, Ordering::Relaxed);
        Lease(Arc::clone(outstanding))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.0.regions.fetch_sub(1, Ordering::Release) == 1 {
            let _waiting = self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            self.0.none.notify_all();
        }
    }
}
