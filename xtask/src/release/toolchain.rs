//! The tools that build and check what is released, pinned, in an environment of their own.

use crate::command::Invocation;
use crate::environment::Environment;
use crate::stage::Failure;
use crate::stages::python::{MATURIN, VENV};

use super::{WORK, absolute, failure};

pub(super) const TARGET: &str = "x86_64-unknown-linux-gnu";
/// The oldest version of the C library that runs what is released, of 2012: also the oldest for which rustc makes code.
pub(super) const GLIBC: &str = "2.17";
/// What pip calls systems with that version.
pub(super) const PLATFORM: &str = "manylinux_2_17_x86_64";

/// zig is the linker and the C compiler. cargo-zigbuild, which maturin has inside in this version, has cargo use it.
const TOOLS: [&str; 4] = [MATURIN, "ziglang==0.15.2", "cargo-zigbuild==0.24.0", "auditwheel==6.8.2"];

/// Checks what a file needs of the system that loads it.
const AUDIT: &str = "xtask/src/release/audit.py";

pub(super) fn install() -> Result<Environment, Failure> {
    VENV.ensure()?;
    let tools = Environment::new(format!("{WORK}/tools"));
    tools.create_unless_there()?;
    tools.python().args(["-m", "pip", "install", "--quiet"]).args(TOOLS).run()?;
    Ok(tools)
}

/// A tool that runs zig. Cargo runs compilers in other folders, so that the place of zig's Python must be absolute.
pub(super) fn with_zig(tools: &Environment, name: &str) -> Result<Invocation, Failure> {
    Ok(tools
        .program(name)
        .env("CARGO_ZIGBUILD_PYTHON_PATH", absolute(&tools.interpreter())?)
        .env("CARGO_ENCODED_RUSTFLAGS", rustflags(&cargo_home()?, &absolute(".")?)))
}

/// The flags of all crates. Cargo reads no others where it has these: `RUSTFLAGS` and a configuration of the caller could name
/// a processor that users do not have. Messages of panics name source files, but not by the folders of who releases.
fn rustflags(cargo_home: &str, workspace: &str) -> String {
    let renamed = |from: &str, to: &str| format!("--remap-path-prefix={from}={to}");
    [renamed(cargo_home, "cargo"), renamed(workspace, "paramhub")].join("\x1f")
}

fn cargo_home() -> Result<String, Failure> {
    let given = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let home = given("CARGO_HOME").or_else(|| given("HOME").map(|home| format!("{home}/.cargo")));
    absolute(&home.ok_or_else(|| failure("neither CARGO_HOME nor HOME says where cargo keeps crates"))?)
}

/// Fails if the wheel or program needs a newer C library than [`GLIBC`], or a shared library that not every system has.
pub(super) fn audit(tools: &Environment, file: &str) -> Result<(), Failure> {
    tools.python().args([AUDIT, file, "--glibc", GLIBC, "--platform", PLATFORM]).run()
}
