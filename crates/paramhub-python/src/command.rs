use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command line `arguments`, which begin with the program's own name, and returns its exit code.
/// `started_as` is the command that starts it again, for the processes it needs. It takes over signals and
/// standard streams, so the caller should do nothing else afterwards.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, arguments: Vec<OsString>, started_as: Vec<OsString>) -> u8 {
    py.detach(|| paramhub_cli::main(arguments, Some(started_as)).0)
}

/// A line for each variable of the environment that looks like paramhub's and that no code reads.
#[pyfunction]
pub(crate) fn unread_variables() -> Vec<String> {
    paramhub_cli::unread_variables()
}
