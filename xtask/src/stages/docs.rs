//! The API documentation and the examples inside it.

use crate::command::Invocation;
use crate::stage::Failure;

pub(crate) fn build() -> Result<(), Failure> {
    Invocation::parse("cargo doc --workspace --no-deps").env("RUSTDOCFLAGS", "-D warnings").run()?;
    Ok(())
}

/// Apart from the other tests because nextest runs no doc-tests.
pub(crate) fn examples() -> Result<(), Failure> {
    Invocation::parse("cargo test --doc --workspace").run()?;
    Ok(())
}
