//! Runs the scenario in a file of bench/rack/. Its rows are measured by the driver of bench/peers, which is
//! Python.

use std::process::Command;

use super::Problem;
use super::options;
use super::shape::Shape;
use super::system::call;

const DRIVER: &str = "bench/rack/run";

/// The files to be written.
#[derive(Clone, Copy)]
pub(super) struct Files<'a> {
    pub(super) json: Option<&'a str>,
    pub(super) svg: Option<&'a str>,
}

/// The testbed that a scenario asks for.
pub(super) fn shape(name: &str, scenario: &str) -> Result<Shape, Problem> {
    let flags = call("python3", &[DRIVER, "--print-testbed", scenario], "").map_err(Problem::Failed)?;
    let flags = flags.split_whitespace().map(str::to_owned);
    let named = ["--name".to_owned(), name.to_owned()];
    options::shape(flags.chain(named)).map_err(|why| Problem::Failed(format!("{scenario}: {why}")))
}

/// Measures every row, in rounds.
pub(super) fn run(shape: &Shape, scenario: &str, files: Files<'_>, more: &[String]) -> Result<(), Problem> {
    let unable = |error| Problem::Failed(format!("cannot start {DRIVER}: {error}"));
    let mut command = Command::new("python3");
    command.arg(DRIVER).arg(scenario).args(["--name", &shape.name]);
    // The driver calls xtask for hosts and for probes of links.
    command.arg("--xtask").arg(std::env::current_exe().map_err(unable)?);
    for (flag, file) in [("--json", files.json), ("--svg", files.svg)] {
        if let Some(path) = file {
            command.args([flag, path]);
        }
    }
    let status = command.args(more).status().map_err(unable)?;
    match status.code() {
        Some(0) => Ok(()),
        code => Err(Problem::Ended(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))),
    }
}
