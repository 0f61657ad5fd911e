//! These tests are not beside the code that they test, for `tests/integration/loom.rs` of the crate compiles those files
//! once more.

mod queue;
mod ready;
