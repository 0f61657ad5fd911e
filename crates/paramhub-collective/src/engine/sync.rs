//! Locks and atomics from one place: `tests/integration/loom.rs` compiles the files that use them once more, with loom's.

pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(super) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
