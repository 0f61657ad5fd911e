//! What threads share, from one place: `tests/loom.rs` compiles the files that use it once more, with loom's.

pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(super) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
