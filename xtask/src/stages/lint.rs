//! Format and lints.

use crate::command::Invocation;
use crate::stage::Failure;
use crate::tools::ensure_component;

pub(crate) fn format() -> Result<(), Failure> {
    ensure_component("rustfmt", "fmt")?;
    Invocation::parse("cargo fmt --all --check").run()?;
    // The fuzz project is a workspace of its own.
    Invocation::parse("cargo fmt --manifest-path fuzz/Cargo.toml --check").run()?;
    Ok(())
}

pub(crate) fn clippy() -> Result<(), Failure> {
    ensure_component("clippy", "clippy")?;
    Invocation::parse("cargo clippy --workspace --all-targets -- -D warnings").run()?;
    Ok(())
}
