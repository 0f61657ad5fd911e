//! The tests, under cargo-nextest: a process per test, a limit on each, groups (`.config/nextest.toml`).

use crate::command::Invocation;
use crate::stage::{Extent, Failure};
use crate::stages::features;
use crate::tools::CargoTool;

static NEXTEST: CargoTool = CargoTool { name: "cargo-nextest", version: "0.9.151" };

/// The modules of the test program `exchange` that a quick run includes: one exchange over each transport,
/// which are TCP and shared memory to a hub, and the mesh between workers.
const QUICK_EXCHANGES: [&str; 3] = ["numerics::tcp", "numerics::shm", "syncers"];

pub(crate) fn run(extent: Extent) -> Result<(), Failure> {
    let mut selection = features::workspace(extent)?.to_vec();
    let quick = quick_filter();
    if extent == Extent::Quick {
        selection.extend(["--lib", "--bins", "--test", "exchange", "-E", &quick]);
    }
    match NEXTEST.find().map_or_else(|| NEXTEST.install(), Ok) {
        Ok(nextest) => nextest.args(["nextest", "run"]).args(selection).run(),
        Err(_) => {
            println!(
                "cargo-nextest cannot be installed here: `cargo test` runs the tests, without time limits"
            );
            Invocation::parse("cargo test --lib --bins --tests --no-fail-fast")
                .args(features::workspace(extent)?.iter().copied())
                .run()
        }
    }
}

/// The filter of a quick run, in nextest's language: unit tests, and one exchange over each transport.
fn quick_filter() -> String {
    let exchanges = QUICK_EXCHANGES.join("|");
    format!("kind(lib) | kind(bin) | test(/^({exchanges})::/)")
}

#[cfg(test)]
mod quick_run {
    use super::*;

    /// A filter that matches no test is no error to nextest, if another one matches.
    #[test]
    fn a_quick_run_has_exchanges_over_each_transport() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/paramhub/tests/exchange");
        for exchange in QUICK_EXCHANGES {
            let (file, transport) = exchange.split_once("::").unwrap_or((exchange, ""));
            let path = format!("{folder}/{file}.rs");
            let source = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
            assert!(source.contains(transport), "{path} has no tests over {transport}");
        }
    }
}
