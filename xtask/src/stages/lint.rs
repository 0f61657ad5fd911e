//! Format and lints.

use crate::command::Invocation;
use crate::stage::{Extent, Failure};
use crate::stages::features;
use crate::tools::ensure_component;

pub(crate) fn format() -> Result<(), Failure> {
    ensure_component("rustfmt", "fmt")?;
    Invocation::parse("cargo fmt --all --check").run()?;
    // The fuzz project is a workspace of its own.
    Invocation::parse("cargo fmt --manifest-path fuzz/Cargo.toml --check").run()?;
    Ok(())
}

pub(crate) fn clippy(extent: Extent) -> Result<(), Failure> {
    ensure_component("clippy", "clippy")?;
    let deny_warnings = ["--", "-D", "warnings"];
    if extent == Extent::Quick {
        // The extension module needs crates that nothing else in a quick run does.
        return Invocation::parse("cargo clippy --workspace --exclude paramhub-python")
            .args(deny_warnings)
            .run();
    }
    let workspace = features::workspace(extent)?.iter().copied();
    Invocation::parse("cargo clippy --all-targets").args(workspace).args(deny_warnings).run()?;
    // This builds without the features, as most people do.
    Invocation::parse("cargo clippy --workspace").args(deny_warnings).run()
}
