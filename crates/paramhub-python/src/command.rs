use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command line `arguments`, the program's own name first, and returns its exit code. `started_as` starts it again,
/// for the processes it needs. It takes over signals and standard streams: call it where nothing else is to come.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, arguments: Vec<OsString>, started_as: Vec<OsString>) -> u8 {
    py.detach(|| paramhub::cli::main(arguments, Some(started_as)).0)
}

/// A line for each variable of the environment that looks like ours and that nothing reads.
#[pyfunction]
pub(crate) fn unread_variables() -> Vec<String> {
    paramhub::cli::unread_variables()
}
