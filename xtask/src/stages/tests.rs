//! The workspace's tests, under cargo-nextest: a process per test, a limit on each, groups (`.config/nextest.toml`).

use crate::command::Invocation;
use crate::stage::Failure;
use crate::tools::CargoTool;

static NEXTEST: CargoTool = CargoTool { name: "cargo-nextest", version: "0.9.151" };

pub(crate) fn run() -> Result<(), Failure> {
    match NEXTEST.find().map_or_else(|| NEXTEST.install(), Ok) {
        Ok(nextest) => nextest.args(["nextest", "run", "--workspace"]).run()?,
        Err(_) => {
            println!(
                "cargo-nextest cannot be installed here: `cargo test` runs the tests, without time limits"
            );
            Invocation::parse("cargo test --workspace --lib --bins --tests --no-fail-fast").run()?;
        }
    }
    Ok(())
}
