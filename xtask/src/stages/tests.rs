//! The tests, under cargo-nextest: a process per test, a limit on each, groups (`.config/nextest.toml`).

use crate::command::Invocation;
use crate::stage::Failure;
use crate::tools::CargoTool;

static NEXTEST: CargoTool = CargoTool { name: "cargo-nextest", version: "0.9.151" };

pub(crate) fn run() -> Result<(), Failure> {
    run_of(&["--workspace"])
}

/// The tests of what `selection` selects, in cargo's words.
pub(crate) fn run_of(selection: &[&str]) -> Result<(), Failure> {
    match NEXTEST.find().map_or_else(|| NEXTEST.install(), Ok) {
        Ok(nextest) => nextest.args(["nextest", "run"]).args(selection.iter().copied()).run(),
        Err(_) => {
            println!(
                "cargo-nextest cannot be installed here: `cargo test` runs the tests, without time limits"
            );
            Invocation::parse("cargo test --lib --bins --tests --no-fail-fast")
                .args(selection.iter().copied())
                .run()
        }
    }
}
