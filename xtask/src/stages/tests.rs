//! The tests, under cargo-nextest: a process per test, a limit on each, groups (`.config/nextest.toml`).

use crate::command::Invocation;
use crate::stage::{Extent, Failure};
use crate::stages::mpi;
use crate::tools::CargoTool;

static NEXTEST: CargoTool = CargoTool { name: "cargo-nextest", version: "0.9.151" };

/// The end-to-end tests of a quick run: an exchange over each transport.
const QUICK: &str = "kind(lib) | kind(bin) | test(/^exchange::(tcp|shm)::parameters_are_exchanged/)";

pub(crate) fn run(extent: Extent) -> Result<(), Failure> {
    let mut selection = mpi::workspace(extent)?.to_vec();
    if extent == Extent::Quick {
        selection.extend(["--lib", "--bins", "--test", "exchange", "-E", QUICK]);
    }
    match NEXTEST.find().map_or_else(|| NEXTEST.install(), Ok) {
        Ok(nextest) => nextest.args(["nextest", "run"]).args(selection).run(),
        Err(_) => {
            println!(
                "cargo-nextest cannot be installed here: `cargo test` runs the tests, without time limits"
            );
            Invocation::parse("cargo test --lib --bins --tests --no-fail-fast")
                .args(mpi::workspace(extent)?.iter().copied())
                .run()
        }
    }
}
