//! The API documentation and the examples inside it.

use crate::command::Invocation;
use crate::stage::{Extent, Failure};
use crate::stages::features;

pub(crate) fn build() -> Result<(), Failure> {
    Invocation::parse("cargo doc --workspace --no-deps").env("RUSTDOCFLAGS", "-D warnings").run()
}

/// Apart from the other tests because nextest runs no doc-tests.
pub(crate) fn examples(extent: Extent) -> Result<(), Failure> {
    Invocation::parse("cargo test --doc").args(features::workspace(extent)?.iter().copied()).run()
}
