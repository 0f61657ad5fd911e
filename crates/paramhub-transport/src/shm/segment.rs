//! Memory that two processes map.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use paramhub_kernels::shared;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

/// `statfs` of anonymous memory files whose pages cannot be missing when they are touched; huge pages can.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// A mapped memory file of fixed size. Both processes may read and write it at any time, so its bytes are
/// copied in and out and never borrowed.
///
/// An offset beyond its end is a bug of the caller, and panics.
pub struct Segment {
    start: NonNull<u8>,
    length: usize,
    writable: bool,
    memory: OwnedFd,
    identity: (u64, u64),
}

// SAFETY: the mapping belongs to this value until it is dropped, and may be used from any thread: every
// access uses raw copies or atomics, which allow other writers, in this process or another.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// A new segment of `length` bytes of zeros, whose pages are allocated now and whose size is sealed.
    pub fn create(name: &str, length: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Some systems require that it is not executable; older ones do not know the flag.
        let memory = match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
            Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags)?,
            memory => memory?,
        };
        // This allocates where it can fail in order, and charges this process instead of the first one to
        // write. A signal undoes the allocation.
        rustix::io::retry_on_intr(|| {
            rustix::fs::fallocate(&memory, FallocateFlags::empty(), 0, length as u64)
        })?;
        rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW)?;
        Self::map(memory, length, true)
    }

    /// Prevents new writable mappings from now on, so that the other side can only read.
    pub fn seal_writing(&self) -> io::Result<()> {
        Ok(rustix::fs::fcntl_add_seals(&self.memory, SealFlags::FUTURE_WRITE | SealFlags::SEAL)?)
    }

    /// Maps a segment that another process made and that must be `length` bytes long.
    ///
    /// # Errors
    /// If it has another size, if its size is not sealed, or if it is not an ordinary memory file.
    pub fn adopt(memory: OwnedFd, length: usize) -> io::Result<Self> {
        check(&memory, length)?;
        Self::map(memory, length, true)
    }

    /// As [`adopt`](Self::adopt), but read-only.
    pub fn adopt_to_read(memory: OwnedFd, length: usize) -> io::Result<Self> {
        check(&memory, length)?;
        Self::map(memory, length, false)
    }

    fn map(memory: OwnedFd, length: usize, writable: bool) -> io::Result<Self> {
        let stat = rustix::fs::fstat(&memory)?;
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at an address that the kernel chooses, which touches no other.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, &memory, 0)?
        };
        let start = NonNull::new(start.cast()).expect("the kernel maps nothing at null");
        Ok(Segment { start, length, writable, memory, identity: (stat.st_dev, stat.st_ino) })
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it has no bytes; no segment is empty.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Distinguishes memory files on this host.
    pub fn identity(&self) -> (u64, u64) {
        self.identity
    }

    /// The address of a byte, to compare or to lend as [`from_raw`](crate::SendRegion::from_raw) allows.
    pub fn pointer(&self, offset: usize) -> *mut u8 {
        self.at(offset, 0)
    }

    /// Copies bytes out of the segment.
    #[inline]
    pub fn read(&self, offset: usize, target: &mut [u8]) {
        let source = self.at(offset, target.len());
        // SAFETY: `at` checked that the bytes are mapped, and they stay so while `self` lives; `target` is
        // borrowed exclusively and does not overlap them, since no reference to a segment's bytes is made
        // here.
        unsafe { shared::copy_in(source, target) };
    }

    /// f32 elements of the segment, to be added up without a copy.
    #[inline]
    pub fn floats(&self, offset: usize, len: usize) -> shared::Floats<'_> {
        let start = self.at(offset, len * size_of::<f32>());
        // SAFETY: `at` checked that the elements are mapped, and they stay so while `self` is borrowed.
        unsafe { shared::Floats::new(start, len) }
    }

    /// Copies bytes into the segment.
    #[inline]
    pub fn write(&self, offset: usize, source: &[u8]) {
        assert!(self.writable, "a segment mapped to read is written to");
        // SAFETY: as in `read`, and the mapping is writable.
        unsafe { shared::copy_out(source, self.at(offset, source.len())) };
    }

    /// Copies bytes into the segment past the caches; see [`shared::stream_out`]. A stream's
    /// [`send`](crate::Stream::send) orders them before its frames.
    #[inline]
    pub fn stream(&self, offset: usize, source: &[u8]) {
        assert!(self.writable, "a segment mapped to read is written to");
        // SAFETY: as in `write`.
        unsafe { shared::stream_out(source, self.at(offset, source.len())) };
    }

    /// A counter in the segment, at a multiple of 8.
    ///
    /// If it is not at a multiple of 8, or the segment was mapped read-only.
    /// If it is not, or the segment was mapped to read.
    #[inline]
    pub fn counter(&self, offset: usize) -> &AtomicU64 {
        let pointer = self.at(offset, size_of::<AtomicU64>()).cast::<AtomicU64>();
        assert!(pointer.is_aligned() && self.writable);
        // SAFETY: mapped, writable and aligned while `self` lives; any bits are a number, and the other
        // process's writes are atomic.
        unsafe { &*pointer }
    }

    /// A flag in the segment.
    pub(super) fn flag(&self, offset: usize) -> &AtomicU32 {
        let pointer = self.at(offset, size_of::<AtomicU32>()).cast::<AtomicU32>();
        assert!(pointer.is_aligned() && self.writable);
        // SAFETY: as in `counter`.
        unsafe { &*pointer }
    }

    #[inline]
    fn at(&self, offset: usize, length: usize) -> *mut u8 {
        let fits = offset <= self.length && length <= self.length - offset;
        assert!(fits, "{length} bytes at {offset} are beyond a segment of {}", self.length);
        self.start.as_ptr().wrapping_add(offset)
    }
}

impl AsFd for Segment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: `map` mapped exactly this range, and nothing borrows from it beyond `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
        debug_assert!(unmapped.is_ok());
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segment").field("bytes", &self.length).finish_non_exhaustive()
    }
}

fn check(memory: &OwnedFd, length: usize) -> io::Result<()> {
    let refused = |why: String| Err(io::Error::new(io::ErrorKind::InvalidData, why));
    // Seals come first: a query of a file in some other file system may wait for that system, and only memory
    // files have seals.
    let seals = rustix::fs::fcntl_get_seals(memory);
    if seals.is_err() || rustix::fs::fstatfs(memory)?.f_type as u64 != TMPFS_MAGIC {
        return refused("the descriptor is no ordinary memory file".into());
    }
    if !seals?.contains(SealFlags::SHRINK) {
        return refused("the memory file's size is not sealed".into());
    }
    let size = rustix::fs::fstat(memory)?.st_size as u64;
    if size != length as u64 {
        return refused(format!("the memory file has {size} bytes instead of {length}"));
    }
    Ok(())
}
