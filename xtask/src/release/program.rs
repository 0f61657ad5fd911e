//! The program `paramhub`, as cargo builds it by default, for an old C library.

use crate::environment::Environment;
use crate::stage::Failure;

use super::toolchain::{self, GLIBC, TARGET};
use super::{WORK, print_size};

/// Returns the program's path.
pub(super) fn build(tools: &Environment) -> Result<String, Failure> {
    // A folder of its own: maturin names another file as the linker, so that in one folder each would build all crates again.
    let folder = format!("{WORK}/program");
    // `rustc`, since its arguments after `--` are those of the last step alone.
    toolchain::with_zig(tools, "cargo-zigbuild")?
        .args(["rustc", "--release", "--locked", "--package", "paramhub-cli", "--bin", "paramhub"])
        .args([
            "--target-dir",
            &folder,
            "--target",
            &format!("{TARGET}.{GLIBC}"),
            "--",
            "-C",
            "strip=symbols",
        ])
        .run()?;
    let program = format!("{folder}/{TARGET}/release/paramhub");
    toolchain::audit(tools, &program)?;
    print_size(&program)?;
    Ok(program)
}
