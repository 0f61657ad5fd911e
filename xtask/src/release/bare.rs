//! Programs in an environment in which no compiler can be found.

use crate::command::Invocation;

/// The program with one folder on PATH, and with no variable of the caller's: one of them, as `CC` or `CARGO`, could name a
/// compiler.
pub(super) fn bare(path: &str, program: &str) -> Invocation {
    Invocation::new("env").args(["-i", &format!("PATH={path}"), "LANG=C.UTF-8", program])
}
