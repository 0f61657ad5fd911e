//! The wheel: built for an old C library, checked, and installed and tested where there is no compiler.

use std::path::Path;
use std::time::Instant;

use crate::command::Invocation;
use crate::environment::Environment;
use crate::stage::Failure;
use crate::stages::python::{PYTEST, RUN_PYTEST, WHEEL_BYTES_MAX};

use super::bare::bare;
use super::toolchain::{self, PLATFORM, TARGET};
use super::{ARTIFACTS, VERSION, WORK, absolute, failure, licenses, print_size, write};

/// Those that the package is for, oldest first. The wheel is one for all.
const PYTHONS: [&str; 5] = ["python3.10", "python3.11", "python3.12", "python3.13", "python3.14"];

pub(super) fn make(tools: &Environment) -> Result<(), Failure> {
    // maturin takes it into the wheel, since `license-files` in pyproject.toml matches its name. Git ignores it.
    let licenses = Path::new(licenses::FILE);
    write(licenses, &licenses::of_wheel(tools)?, 0o644)?;
    let built = build(tools);
    let _ = std::fs::remove_file(licenses);
    let wheel = built?;
    toolchain::audit(tools, &wheel)?;
    if print_size(&wheel)? > WHEEL_BYTES_MAX {
        return Err(failure(format!("the wheel has more than {WHEEL_BYTES_MAX} bytes: what came into it?")));
    }
    try_out(&absolute(&wheel)?)
}

fn build(tools: &Environment) -> Result<String, Failure> {
    toolchain::with_zig(tools, "maturin")?
        .args([
            "build",
            "--release",
            "--locked",
            "--zig",
            "--target",
            TARGET,
            "--compatibility",
            "manylinux2014",
        ])
        .args(["--interpreter", &absolute(&tools.interpreter())?, "--out", ARTIFACTS])
        .run()?;
    // One wheel for Python 3.10 and later. The older pip of some systems knows the platform by its former name alone.
    let wheel = format!("{ARTIFACTS}/paramhub-{VERSION}-cp310-abi3-manylinux2014_x86_64.{PLATFORM}.whl");
    if Path::new(&wheel).exists() { Ok(wheel) } else { Err(failure(format!("maturin has not made {wheel}"))) }
}

/// Installs the wheel for every Python that is here, alone, and runs the tests of an exchange with the oldest.
fn try_out(wheel: &str) -> Result<(), Failure> {
    let has_venv = |name: &&str| Invocation::new(*name).args(["-c", "import ensurepip, venv"]).succeeds();
    let (found, missing): (Vec<&str>, Vec<&str>) = PYTHONS.into_iter().partition(|name| has_venv(name));
    let &oldest = found.first().ok_or_else(|| failure(format!("there is none of {}", PYTHONS.join(", "))))?;
    for name in &found {
        try_alone(name, wheel)?;
    }
    println!("tried with {}; not on PATH: {}", found.join(", "), missing.join(", "));
    run_tests(&fresh(oldest))
}

fn fresh(python: &str) -> Environment {
    Environment::new(format!("{WORK}/fresh-{python}"))
}

fn try_alone(python: &str, wheel: &str) -> Result<(), Failure> {
    let fresh = fresh(python);
    fresh.create_of(python)?;
    let begin = Instant::now();
    without_compilers(&fresh, "python")?
        .args(["-m", "pip", "install", "--quiet", "--no-index", wheel])
        .run()?;
    println!("{python}: `pip install` took {:.1} s", begin.elapsed().as_secs_f64());
    let run = |script: &str| without_compilers(&fresh, "python")?.args(["-I", script]).run();
    run("xtask/src/release/fresh.py")?;
    run("xtask/src/stages/python/alone.py")?;
    let ranks = ["run", "-n", "2", "--", "python", "-I", "xtask/src/release/exchange.py"];
    without_compilers(&fresh, "paramhub")?.args(ranks).run()
}

/// These tests need numpy, which comes from where the caller's pip finds packages.
fn run_tests(fresh: &Environment) -> Result<(), Failure> {
    let install = ["-m", "pip", "install", "--quiet", "--only-binary", ":all:", "numpy", PYTEST];
    fresh.python().args(install).run()?;
    let path = absolute(&fresh.programs())?;
    let variables = ["-i", &format!("PATH={path}"), "LANG=C.UTF-8", "PARAMHUB_TEST_WITHOUT_TORCH=1"];
    Invocation::new("env")
        .args(variables)
        .args([format!("{path}/python")])
        .args(RUN_PYTEST)
        .args(["python/tests/test_exchange.py"])
        .run()
}

fn without_compilers(environment: &Environment, program: &str) -> Result<Invocation, Failure> {
    let path = absolute(&environment.programs())?;
    Ok(bare(&path, &format!("{path}/{program}")))
}
