//! The programs of the release before, beside those of this one.

use crate::command::Invocation;
use crate::stage::{Extent, Failure};
use crate::stages::features;

/// The last commit whose workers speak the protocol version before the newest
/// (`paramhub_core::wire::VERSION`).
const COMMIT: &str = "0078b9b6574e";
/// Its sources, and its programs.
const SOURCES: &str = "target/neighbour/sources";
const BUILD: &str = "target/neighbour/build";

pub(crate) fn check(extent: Extent) -> Result<(), Failure> {
    if !std::path::Path::new(SOURCES).join("Cargo.toml").exists() {
        // The commit must be in the clone, so a shallow clone does not do.
        Invocation::parse("git worktree add --force --detach").args([SOURCES, COMMIT]).run()?;
    }
    let manifest = format!("{SOURCES}/Cargo.toml");
    Invocation::parse("cargo build --locked -p paramhub-cli --bin paramhub --example exchange")
        .args(["--manifest-path", &manifest, "--target-dir", BUILD])
        .run()?;
    let folder = std::path::absolute(format!("{BUILD}/debug"))
        .map_err(|error| Failure { reason: format!("where is this folder? {error}"), rerun: None })?;
    Invocation::parse("cargo test -p paramhub-cli --test e2e")
        .args(features::workspace(extent)?.iter().copied().filter(|&argument| argument != "--workspace"))
        .args(["e2e_neighbour", "--", "--ignored"])
        .env("PARAMHUB_NEIGHBOUR", folder.to_string_lossy())
        .run()
}
