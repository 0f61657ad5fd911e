//! A short run of every fuzz target in `fuzz/`.
//!
//! libFuzzer needs the compiler's coverage instrumentation, which stable rustc has
//! (`fuzz/.cargo/config.toml`), so neither cargo-fuzz nor a nightly toolchain is needed. The address
//! sanitizer, which they would add, finds nothing in crates without `unsafe`; of those that `hub_core` runs,
//! kernels and transport have some. `cargo fuzz run TARGET` works on the same folder.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::command::Invocation;
use crate::packages::SystemProgram;
use crate::stage::Failure;

const SECONDS_PER_TARGET: u32 = 15;

/// libFuzzer itself is C++, compiled by the libfuzzer-sys crate.
static CXX: SystemProgram =
    SystemProgram { name: "c++", probe: &["c++", "--version"], debian_package: "g++" };

pub(crate) fn short_run() -> Result<(), Failure> {
    CXX.ensure()?;
    let seed = seed_from_clock();
    for target in targets()? {
        let found = format!("fuzz/corpus/{target}");
        let crashes = format!("fuzz/artifacts/{target}/");
        for folder in [&found, &crashes] {
            std::fs::create_dir_all(folder).map_err(|error| Failure {
                reason: format!("cannot create {folder}: {error}"),
                rerun: None,
            })?;
        }
        Invocation::parse(
            "cargo run --config fuzz/.cargo/config.toml --manifest-path fuzz/Cargo.toml --release",
        )
        .args(["--bin", target.as_str(), "--"])
        .args([
            format!("-seed={seed}"),
            format!("-max_total_time={SECONDS_PER_TARGET}"),
            format!("-artifact_prefix={crashes}"),
        ])
        .args(["-verbosity=0", "-print_funcs=0", "-print_final_stats=1", "-timeout=5", "-rss_limit_mb=1024"])
        .args([found])
        .run()?;
    }
    Ok(())
}

/// Every file in `fuzz/fuzz_targets` is a target; cargo finds them through `fuzz/Cargo.toml`.
fn targets() -> Result<Vec<String>, Failure> {
    let unlisted = |error: std::io::Error| Failure {
        reason: format!("cannot list fuzz/fuzz_targets: {error}"),
        rerun: None,
    };
    let mut targets = Vec::new();
    for entry in std::fs::read_dir("fuzz/fuzz_targets").map_err(unlisted)? {
        let path = entry.map_err(unlisted)?.path();
        if path.extension().is_some_and(|ending| ending == "rs")
            && let Some(name) = path.file_stem().and_then(|stem| stem.to_str())
        {
            targets.push(name.to_owned());
        }
    }
    if targets.is_empty() {
        return Err(Failure { reason: "fuzz/fuzz_targets holds no target".to_owned(), rerun: None });
    }
    targets.sort();
    Ok(targets)
}

/// The seed is printed with the command line, so that a finding can be searched for again.
fn seed_from_clock() -> u32 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // libFuzzer reads 0 as "choose one yourself".
    since_epoch.subsec_nanos().max(1)
}
