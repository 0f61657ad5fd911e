//! The Python package as its users get it: built once as a wheel, installed where nothing else is, and tested beside torch.
//!
//! All files are in `target/python`. The caller's settings of pip and uv decide where packages come from.

use std::process::Command;

use crate::args::TestOptions;
use crate::command::Invocation;
use crate::environment::Environment;
use crate::packages::SystemProgram;
use crate::stage::{Extent, Failure};

/// Pinned, so that a release made tomorrow cannot break a build of today. `pyproject.toml` requires maturin.
/// The wheel is built without an isolated environment, whose changing path would make cargo build everything
/// again.
const TOOLS: [&str; 4] = ["uv==0.13.8", MATURIN, "ruff==0.17.5", "mypy==2.4.1"];
pub(crate) const MATURIN: &str = "maturin==1.16.0";
pub(crate) const PYTEST: &str = "pytest==9.2.0";
pub(crate) const RUN_PYTEST: [&str; 5] = ["-m", "pytest", "--durations=15", "-p", "no:cacheprovider"];
const GPU_TESTS: &str = "python/tests/gpu";
/// Those of the order of copies, which run on a simulated device, too.
const ORDER_TESTS: [&str; 4] = [
    "python/tests/gpu/test_stage_on_gpu.py",
    "python/tests/gpu/test_collectives_on_gpu.py",
    "python/tests/gpu/test_horovod_on_gpu.py",
    "python/tests/gpu/test_training_on_gpu.py",
];
const OUR_PYTHON: [&str; 7] =
    ["python", "examples/pytorch", "bench/pytorch", "bench/gpu", "bench/models", "bench/soak", "xtask"];
/// Frameworks for which docs/pytorch.md has recipes and an example, and those of docs/jax.md, which the tests of a full run
/// use.
const FRAMEWORKS: [&str; 7] = [
    "accelerate==1.15.0",
    "transformers==5.24.0; python_version >= '3.11'",
    "lightning==2.6.6",
    "ray[train]==2.60.0; python_version >= '3.11'",
    "jax==0.10.2; python_version >= '3.11'",
    "optax==0.2.8; python_version >= '3.11'",
    "flax==0.12.8; python_version >= '3.11'",
];
/// MXNet's last release and the last NumPy with which it works, for which no newer Python has packages.
const MXNET: [&str; 2] = ["mxnet==1.9.1", "numpy==1.23.5"];
const MXNET_PYTHON: &str = "python3.11";
const MXNET_TESTS: &str = "python/tests/frameworks/test_mxnet.py";

/// Rooms that a program which links the API, and so the wheel, has nothing of.
const NOT_IN_THE_WHEEL: [&str; 3] = ["paramhub-bench", "paramhub-train", "plotters"];

static CXX: SystemProgram =
    SystemProgram { name: "a C++ compiler", probe: &["g++", "--version"], debian_package: "g++" };

const WHEELS: &str = "target/python/wheels";
/// A user who installs the wheel waits for so many bytes.
pub(crate) const WHEEL_BYTES_MAX: u64 = 15_000_000;

pub(crate) static VENV: SystemProgram = SystemProgram {
    name: "Python 3 with its module venv",
    probe: &["python3", "-c", "import ensurepip, venv"],
    debian_package: "python3-venv",
};

pub(crate) fn check(options: &TestOptions) -> Result<(), Failure> {
    let tools = install_tools()?;
    lint(&tools)?;
    check_dependencies()?;
    let wheel = build_wheel(&tools)?;
    install_alone(&wheel)?;
    run_tests(&tools, &wheel, options)?;
    match options.extent {
        Extent::Full => run_mxnet_tests(&tools, &wheel),
        _ => Ok(()),
    }
}

/// Runs the tests that need a GPU, with the same wheel and the same packages as the others.
pub(crate) fn check_on_gpu(options: &TestOptions) -> Result<(), Failure> {
    if !Invocation::parse("nvidia-smi -L").succeeds() {
        println!("nvidia-smi does not answer, so there is no GPU to test on");
        return Ok(());
    }
    let tools = install_tools()?;
    let wheel = build_wheel(&tools)?;
    let tests = tests_environment(&tools, &wheel, options)?;
    let finds_one = "import sys, torch; sys.exit(not torch.cuda.is_available())";
    if !tests.python().args(["-c", finds_one]).succeeds() {
        println!("nvidia-smi answers, but this torch finds no GPU: its build or the driver does not fit");
        return Ok(());
    }
    tests.python().args(RUN_PYTEST).args([GPU_TESTS]).run()
}

fn install_tools() -> Result<Environment, Failure> {
    VENV.ensure()?;
    if !Invocation::new("python3").args(["-c", "import sys; sys.exit(sys.version_info < (3, 10))"]).succeeds()
    {
        return Err(failure("install Python 3.10 or newer as python3, then rerun"));
    }
    let tools = Environment::new("target/python/tools");
    tools.create_unless_there()?;
    tools.python().args(["-m", "pip", "install", "--quiet"]).args(TOOLS).run()?;
    Ok(tools)
}

fn lint(tools: &Environment) -> Result<(), Failure> {
    tools.program("ruff").args(["check"]).args(OUR_PYTHON).run()?;
    tools.program("ruff").args(["format", "--check"]).args(OUR_PYTHON).run()?;
    tools.program("mypy").run()
}

/// A build of the whole workspace would show nothing: there the command line has all its features.
fn check_dependencies() -> Result<(), Failure> {
    let tree = ["tree", "--package", "paramhub-python", "--edges", "normal", "--prefix", "none"];
    let listed = Command::new("cargo").args(tree).output();
    let listed = listed.map_err(|error| failure(&format!("cargo cannot be run: {error}")))?;
    if !listed.status.success() {
        return Err(failure(&format!("cargo tree failed: {}", String::from_utf8_lossy(&listed.stderr))));
    }
    let listed = String::from_utf8_lossy(&listed.stdout);
    let mut names = listed.lines().filter_map(|line| line.split_whitespace().next());
    match names.find(|name| NOT_IN_THE_WHEEL.contains(name)) {
        Some(name) => Err(failure(&format!("the wheel contains {name}: which dependency brings it?"))),
        None => Ok(()),
    }
}

/// Builds what `pip install .` builds, but with the profile of the other tests: most of it has been built
/// already, while the release profile would build everything again. The wheel is in cargo's own target
/// folder.
fn build_wheel(tools: &Environment) -> Result<String, Failure> {
    // The wheel of an earlier version would remain beside the new one.
    let _ = std::fs::remove_dir_all(WHEELS);
    tools
        .program("uv")
        .args(["build", "--wheel", "--no-build-isolation", "--out-dir", WHEELS])
        .args(["--python", &tools.interpreter()])
        .env("MATURIN_PEP517_ARGS", "--profile dev")
        .run()?;
    let is_wheel = |file: &std::fs::DirEntry| file.path().extension().is_some_and(|name| name == "whl");
    let wheel = std::fs::read_dir(WHEELS)
        .ok()
        .and_then(|files| files.flatten().find(is_wheel))
        .ok_or_else(|| failure("no wheel was built"))?;
    let bytes = wheel.metadata().map_or(u64::MAX, |data| data.len());
    println!("{} has {:.1} MB", wheel.path().display(), bytes as f64 / 1e6);
    if bytes > WHEEL_BYTES_MAX {
        return Err(failure("the wheel is larger than 15 MB: what came into it?"));
    }
    Ok(wheel.path().display().to_string())
}

/// Installs the wheel into an empty environment: the package has no dependencies.
fn install_alone(wheel: &str) -> Result<(), Failure> {
    let alone = Environment::new("target/python/alone");
    alone.create_anew()?;
    alone.python().args(["-m", "pip", "install", "--quiet", "--no-index", wheel]).run()?;
    alone.python().args(["-I", "xtask/src/stages/python/alone.py"]).run()
}

fn run_tests(tools: &Environment, wheel: &str, options: &TestOptions) -> Result<(), Failure> {
    let tests = tests_environment(tools, wheel, options)?;
    let selection: &[&str] = if options.extent == Extent::Full {
        &[]
    } else {
        &["-m", "not full", "--ignore=python/tests/frameworks"]
    };
    // The stage `gpu` runs these.
    let others = format!("--ignore={GPU_TESTS}");
    tests.python().args(RUN_PYTEST).args([others]).args(selection.iter().copied()).run()?;
    // The device uses what the newest torch has.
    match options.torch {
        Some(_) => Ok(()),
        None => run_on_simulated_device(&tests),
    }
}

fn run_on_simulated_device(tests: &Environment) -> Result<(), Failure> {
    CXX.ensure()?;
    tests.python().args(RUN_PYTEST).args(ORDER_TESTS).env("TESTED_DEVICE", "simulated:0").run()
}

/// The environment in which the tests run, with the wheel and torch, and in a full run with the frameworks.
fn tests_environment(
    tools: &Environment,
    wheel: &str,
    options: &TestOptions,
) -> Result<Environment, Failure> {
    let (torch, is_full) = (options.torch.as_deref(), options.extent == Extent::Full);
    let tests = Environment::new(format!("target/python/tests-torch-{}", torch.unwrap_or("newest")));
    tests.create_unless_there()?;
    let torch = torch.map_or("torch".to_owned(), |version| format!("torch=={version}.*"));
    let frameworks = if is_full { &FRAMEWORKS[..] } else { &[] };
    tests.install(tools, &[&[torch.as_str(), "numpy", PYTEST][..], frameworks].concat())?;
    install_again(&tests, wheel)?;
    tests.python().args(["-c", "import torch; print('torch', torch.__version__)"]).run()?;
    Ok(tests)
}

/// Runs MXNet's tests in an environment of its own: it needs a NumPy that no newer framework works with.
fn run_mxnet_tests(tools: &Environment, wheel: &str) -> Result<(), Failure> {
    let skip = |reason: &str| {
        println!("MXNet's tests are left out: {reason}");
        Ok(())
    };
    if !Invocation::new(MXNET_PYTHON).args(["-c", "import ensurepip, venv"]).succeeds() {
        return skip(&format!("there is no {MXNET_PYTHON} with its module venv"));
    }
    let tests = Environment::of("target/python/tests-mxnet", MXNET_PYTHON);
    tests.create_unless_there()?;
    if tests.install(tools, &[&MXNET[..], &[PYTEST]].concat()).is_err() {
        return skip("its packages cannot be installed");
    }
    install_again(&tests, wheel)?;
    tests.python().args(RUN_PYTEST).args([MXNET_TESTS]).run()
}

/// Installs the wheel anew: its version is the same every time, but its content is not.
fn install_again(tests: &Environment, wheel: &str) -> Result<(), Failure> {
    let again = ["--quiet", "--no-index", "--no-deps", "--force-reinstall", wheel];
    tests.python().args(["-m", "pip", "install"]).args(again).run()
}

fn failure(reason: &str) -> Failure {
    Failure { reason: reason.to_owned(), rerun: None }
}
