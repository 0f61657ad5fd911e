//! The Python package as its users get it: built once as a wheel, installed where nothing else is, and tested beside torch.
//!
//! Everything lies in `target/python`. Where packages come from is the caller's affair: pip's and uv's own settings hold.

mod environment;

use crate::args::TestOptions;
use crate::command::Invocation;
use crate::packages::SystemProgram;
use crate::stage::Failure;

use environment::Environment;

/// Pinned, so that a release made tomorrow cannot break a build of today. maturin is what `pyproject.toml` asks for: the
/// wheel is built without an environment of its own, whose changing path would make cargo build everything again.
const TOOLS: [&str; 4] = ["uv==0.13.8", "maturin==1.16.0", "ruff==0.17.5", "mypy==2.4.1"];
const PYTEST: &str = "pytest==9.2.0";
const OUR_PYTHON: [&str; 6] =
    ["python", "examples/pytorch", "bench/pytorch", "bench/models", "bench/soak", "xtask"];
/// What docs/pytorch.md has recipes for, and an example, which the tests run.
const FRAMEWORKS: [&str; 3] =
    ["accelerate==1.15.0", "transformers==5.23.0; python_version >= '3.11'", "lightning==2.6.6"];

const WHEELS: &str = "target/python/wheels";
/// What a user waits for when installing.
const WHEEL_BYTES_MAX: u64 = 15_000_000;

static VENV: SystemProgram = SystemProgram {
    name: "Python 3 with its module venv",
    probe: &["python3", "-c", "import ensurepip, venv"],
    debian_package: "python3-venv",
};

pub(crate) fn check(options: &TestOptions) -> Result<(), Failure> {
    VENV.ensure()?;
    if !Invocation::new("python3").args(["-c", "import sys; sys.exit(sys.version_info < (3, 10))"]).succeeds()
    {
        return Err(failure("install Python 3.10 or newer as python3, then rerun"));
    }
    let tools = Environment::new("tools");
    tools.create_unless_there()?;
    tools.python().args(["-m", "pip", "install", "--quiet"]).args(TOOLS).run()?;

    lint(&tools)?;
    let wheel = build_wheel(&tools)?;
    install_alone(&wheel)?;
    run_tests(&tools, &wheel, options.torch.as_deref())
}

fn lint(tools: &Environment) -> Result<(), Failure> {
    tools.program("ruff").args(["check"]).args(OUR_PYTHON).run()?;
    tools.program("ruff").args(["format", "--check"]).args(OUR_PYTHON).run()?;
    tools.program("mypy").run()
}

/// What `pip install .` builds, but with the profile of the other tests: most of it has been built already, while with that of
/// releases everything would be built again. It lies in cargo's own target folder.
fn build_wheel(tools: &Environment) -> Result<String, Failure> {
    // An earlier version's wheel would lie beside the new one.
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

/// Into an environment with nothing else: the package needs nothing.
fn install_alone(wheel: &str) -> Result<(), Failure> {
    let alone = Environment::new("alone");
    alone.create_anew()?;
    alone.python().args(["-m", "pip", "install", "--quiet", "--no-index", wheel]).run()?;
    alone.python().args(["-I", "xtask/src/stages/python/alone.py"]).run()
}

fn run_tests(tools: &Environment, wheel: &str, torch: Option<&str>) -> Result<(), Failure> {
    let tests = Environment::new(&format!("tests-torch-{}", torch.unwrap_or("newest")));
    tests.create_unless_there()?;
    let torch = torch.map_or("torch".to_owned(), |version| format!("torch=={version}.*"));
    tests.install(tools, &[&[torch.as_str(), "numpy", PYTEST][..], &FRAMEWORKS[..]].concat())?;
    // Its version is the same every time, and its content is not.
    let again = ["--quiet", "--no-index", "--no-deps", "--force-reinstall", wheel];
    tests.python().args(["-m", "pip", "install"]).args(again).run()?;
    tests.python().args(["-c", "import torch; print('torch', torch.__version__)"]).run()?;
    tests.python().args(["-m", "pytest", "--durations=15", "-p", "no:cacheprovider"]).run()
}

fn failure(reason: &str) -> Failure {
    Failure { reason: reason.to_owned(), rerun: None }
}
