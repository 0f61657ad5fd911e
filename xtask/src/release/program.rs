//! The program `paramhub`, as cargo builds it by default, for an old C library.

use crate::command::Invocation;
use crate::environment::Environment;
use crate::stage::Failure;

use super::toolchain::{self, GLIBC, TARGET};
use super::{failure, print_size};

/// Returns the program's path.
pub(super) fn build(tools: &Environment) -> Result<String, Failure> {
    // `rustc`, since its arguments after `--` are those of the last step alone. It builds all crates again that the wheel has
    // been built of: maturin names another file as the linker.
    toolchain::with_zig(tools, "cargo-zigbuild")?
        .args(["rustc", "--release", "--locked", "--package", "paramhub-cli", "--bin", "paramhub"])
        .args(["--target", &format!("{TARGET}.{GLIBC}"), "--", "-C", "strip=symbols"])
        .run()?;
    let program = format!("{}/{TARGET}/release/paramhub", target_folder()?);
    toolchain::audit(tools, &program)?;
    print_size(&program)?;
    Ok(program)
}

/// Where cargo builds, which its settings and `CARGO_TARGET_DIR` may change.
fn target_folder() -> Result<String, Failure> {
    let described = Invocation::parse("cargo metadata --format-version 1 --no-deps").output();
    let described = described.ok_or_else(|| failure("cargo metadata failed"))?;
    let after = described.split_once(r#""target_directory":""#).map(|(_, after)| after);
    let folder = after.and_then(|after| after.split_once('"')).map(|(folder, _)| folder);
    folder.map(str::to_owned).ok_or_else(|| failure("cargo metadata names no target_directory"))
}
