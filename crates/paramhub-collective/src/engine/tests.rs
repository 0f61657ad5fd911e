//! Not beside what they test: `tests/loom.rs` of the crate compiles those files once more.

mod queue;
mod ready;
