//! Memory that an I/O thread reads from or writes to while the user's code goes on.
//!
//! A region owns its memory, exclusively if it receives. Whoever holds the region may touch the bytes and nobody else can,
//! so handing a region to an I/O thread and back is an ordinary move. Three ways lead to one: give a buffer away
//! ([`SendRegion::owned`]), which may come [`Home`] by itself, lend a slice inside a scope that outwaits the region ([`lend`]), or promise by hand
//! ([`SendRegion::from_raw`]).

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use bytemuck::Pod;

/// A buffer that can become a region: it owns bytes whose address stays put while the value itself is moved around.
///
/// # Safety
/// Until the value is dropped, wherever it is moved, and whatever safe code does with the slices handed out:
/// - [`as_bytes`](Self::as_bytes) and [`as_bytes_mut`](Self::as_bytes_mut) return the same address and length every time;
/// - the bytes are initialised, belong to the value alone, and may be read and written from any one thread at a time;
/// - every bit pattern written through `as_bytes_mut` leaves the value valid.
pub unsafe trait StableBytes: Send + 'static {
    /// The bytes, to read.
    fn as_bytes(&self) -> &[u8];
    /// The same bytes, to write.
    fn as_bytes_mut(&mut self) -> &mut [u8];
}

// SAFETY: elements lie on the heap, which a move of the Vec leaves alone, and only `&`/`&mut` slices of them are handed
// out, so that nothing can grow it. `Pod`: no padding, every bit pattern valid.
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

/// A buffer that comes back when the region made of it is dropped, for operations that keep their regions to themselves:
/// [`Home::lend`] gives it away, [`Home::take`] has it back.
pub struct Home<B>(Arc<Mutex<Option<B>>>);

impl<B: StableBytes> Home<B> {
    /// With a buffer in it.
    pub fn new(buffer: B) -> Self {
        Home(Arc::new(Mutex::new(Some(buffer))))
    }

    /// The buffer, unless it is away.
    pub fn take(&self) -> Option<B> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Puts a buffer in; one that was there is dropped.
    pub fn put(&self, buffer: B) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(buffer);
    }

    /// The buffer as one that a region may own. None if it is away.
    pub fn lend(&self) -> Option<Returning<B>> {
        Some(Returning { buffer: Some(self.take()?), home: Home(Arc::clone(&self.0)) })
    }
}

impl<B> fmt::Debug for Home<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Home").finish_non_exhaustive()
    }
}

/// A buffer away from its [`Home`], until it is dropped.
pub struct Returning<B: StableBytes> {
    /// None only while it is dropped.
    buffer: Option<B>,
    home: Home<B>,
}

impl<B: StableBytes> Drop for Returning<B> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.home.put(buffer);
        }
    }
}

// SAFETY: all of it is the buffer's own promise: nothing but the two methods below reaches the buffer before this value is
// dropped, and a move of this value moves the buffer, as its promise allows.
unsafe impl<B: StableBytes> StableBytes for Returning<B> {
    fn as_bytes(&self) -> &[u8] {
        self.buffer.as_ref().expect("it goes home when it is dropped").as_bytes()
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.buffer.as_mut().expect("it goes home when it is dropped").as_bytes_mut()
    }
}

/// Bytes a worker sends from (a gradient). They do not change while the region lives.
pub struct SendRegion {
    source: Source,
}

impl SendRegion {
    /// Takes `buffer`; [`into_owned`](Self::into_owned) gives it back.
    pub fn owned(buffer: impl StableBytes) -> Self {
        SendRegion { source: Source::Owned(Box::new(buffer)) }
    }

    /// A region over memory that the caller looks after. `pointer` may be null if `length` is 0.
    ///
    /// # Safety
    /// Until the region is dropped, `pointer` is valid for reads of `length` initialised bytes (at most `isize::MAX`)
    /// from any thread, and nobody writes them.
    pub unsafe fn from_raw(pointer: *const u8, length: usize) -> Self {
        SendRegion { source: Source::Raw { bytes: RawBytes::new(pointer.cast_mut(), length), _lease: None } }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        self.source.bytes()
    }

    /// The buffer given to [`owned`](Self::owned). `None`, and the buffer dropped, if it was of another type than `B`;
    /// `None` as well if the memory was never given away.
    pub fn into_owned<B: StableBytes>(self) -> Option<B> {
        self.source.into_owned()
    }
}

impl fmt::Debug for SendRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendRegion").field("bytes", &self.bytes().len()).finish()
    }
}

/// Bytes a worker receives into (parameters), and may send from before. They belong to the region alone while it lives.
pub struct ReceiveRegion {
    source: Source,
}

impl ReceiveRegion {
    /// Takes `buffer`; [`into_owned`](Self::into_owned) gives it back.
    pub fn owned(buffer: impl StableBytes) -> Self {
        ReceiveRegion { source: Source::Owned(Box::new(buffer)) }
    }

    /// A region over memory that the caller looks after. `pointer` may be null if `length` is 0.
    ///
    /// # Safety
    /// Until the region is dropped, `pointer` is valid for reads and writes of `length` initialised bytes (at most
    /// `isize::MAX`) from any thread, every bit pattern may be written, and nobody else reads or writes them.
    pub unsafe fn from_raw(pointer: *mut u8, length: usize) -> Self {
        ReceiveRegion { source: Source::Raw { bytes: RawBytes::new(pointer, length), _lease: None } }
    }

    /// The bytes, to read.
    pub fn bytes(&self) -> &[u8] {
        self.source.bytes()
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.source {
            Source::Owned(owner) => owner.as_bytes_mut(),
            // SAFETY: valid for writes and ours alone while the region lives: `from_raw`'s caller promised it, or the
            // region was lent a `&'env mut` slice and `lend` outwaits it. `&mut self` makes this the only slice.
            Source::Raw { bytes, .. } => unsafe { bytes.as_slice_mut() },
        }
    }

    /// The buffer given to [`owned`](Self::owned). `None`, and the buffer dropped, if it was of another type than `B`;
    /// `None` as well if the memory was never given away.
    pub fn into_owned<B: StableBytes>(self) -> Option<B> {
        self.source.into_owned()
    }
}

impl fmt::Debug for ReceiveRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveRegion").field("bytes", &self.bytes().len()).finish()
    }
}

/// Calls `f` with a [`Lending`] through which it may lend borrowed slices to I/O threads, like [`std::thread::scope`].
///
/// A region is not bound to a lifetime, so `lend` waits: it neither returns nor unwinds before every region lent inside
/// has been dropped, wherever it went. No borrow can therefore outlive its slice. The price is that a region that is never
/// dropped, because it was leaked, returned from `f`, or put where nobody empties, makes `lend` wait for ever.
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
/// What is lent must outlive the scope:
/// ```compile_fail,E0597
/// paramhub_transport::lend(|lending| {
///     let gradient = [1.0_f32; 4];
///     lending.send(&gradient);
/// });
/// ```
/// and is out of reach while it is received into:
/// ```compile_fail,E0502
/// let mut parameters = [0.0_f32; 4];
/// paramhub_transport::lend(|lending| {
///     let into = lending.receive(&mut parameters);
///     println!("{}", parameters[0]);
/// });
/// ```
pub fn lend<'env, F, R>(f: F) -> R
where
    F: for<'scope> FnOnce(&'scope Lending<'scope, 'env>) -> R,
{
    let lending =
        Lending { outstanding: Arc::new(Outstanding::default()), scope: PhantomData, env: PhantomData };
    let result = catch_unwind(AssertUnwindSafe(|| f(&lending)));
    lending.outstanding.wait_for_none();
    result.unwrap_or_else(|panic| resume_unwind(panic))
}

/// Lends slices to I/O threads until the end of its [`lend`].
#[derive(Debug)]
pub struct Lending<'scope, 'env: 'scope> {
    outstanding: Arc<Outstanding>,
    // Invariant, as in std: a lifetime that could shrink would let slices in that die before `lend` returns.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

impl<'scope, 'env> Lending<'scope, 'env> {
    /// Lends `slice` to send from.
    pub fn send<T: Pod>(&'scope self, slice: &'env [T]) -> SendRegion {
        let bytes: &'env [u8] = bytemuck::cast_slice(slice);
        let bytes = RawBytes::new(bytes.as_ptr().cast_mut(), bytes.len());
        SendRegion { source: Source::Raw { bytes, _lease: Some(Lease::new(&self.outstanding)) } }
    }

    /// Lends `slice` to receive into.
    pub fn receive<T: Pod>(&'scope self, slice: &'env mut [T]) -> ReceiveRegion {
        let bytes: &'env mut [u8] = bytemuck::cast_slice_mut(slice);
        let bytes = RawBytes::new(bytes.as_mut_ptr(), bytes.len());
        ReceiveRegion { source: Source::Raw { bytes, _lease: Some(Lease::new(&self.outstanding)) } }
    }
}

/// Where a region's bytes are. The owner is asked for them each time instead of keeping a pointer, so that the borrow
/// checker, not an argument about aliasing, covers owned memory.
enum Source {
    Owned(Box<dyn Owner>),
    Raw { bytes: RawBytes, _lease: Option<Lease> },
}

impl Source {
    fn bytes(&self) -> &[u8] {
        match self {
            Source::Owned(owner) => owner.as_bytes(),
            // SAFETY: valid for reads while the region lives: `from_raw`'s caller promised it, or `lend` outwaits the
            // region. Nobody writes meanwhile: the region hands out `&mut` only against `&mut self`.
            Source::Raw { bytes, .. } => unsafe { bytes.as_slice() },
        }
    }

    fn into_owned<B: StableBytes>(self) -> Option<B> {
        match self {
            Source::Owned(owner) => {
                let owner: Box<dyn Any> = owner;
                owner.downcast().ok().map(|owner| *owner)
            }
            Source::Raw { .. } => None,
        }
    }
}

/// [`StableBytes`] that remember their type.
trait Owner: StableBytes + Any {}

impl<B: StableBytes> Owner for B {}

/// An address and a length; what may be done with them is their region's business.
struct RawBytes {
    pointer: NonNull<u8>,
    length: usize,
}

// SAFETY: an address alone is harmless anywhere; the duties of `from_raw` and the wait of `lend` allow its use from any
// thread, one at a time, which `&`/`&mut self` of the region's methods enforce.
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

/// Regions of one [`lend`] that are still alive. Shared by `Arc`, so that the last region to go never signals a scope
/// whose stack is gone.
#[derive(Debug, Default)]
struct Outstanding {
    regions: Mutex<usize>,
    none: Condvar,
}

impl Outstanding {
    fn wait_for_none(&self) {
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        while *regions > 0 {
            regions = self.none.wait(regions).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Counts a region for as long as it lives.
struct Lease(Arc<Outstanding>);

impl Lease {
    fn new(outstanding: &Arc<Outstanding>) -> Self {
        *outstanding.regions.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Lease(Arc::clone(outstanding))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut regions = self.0.regions.lock().unwrap_or_else(PoisonError::into_inner);
        *regions -= 1;
        if *regions == 0 {
            self.0.none.notify_all();
        }
    }
}
