//! Building apart from running, so that the two times are told apart.

use crate::command::Invocation;
use crate::stage::Failure;

pub(crate) fn everything() -> Result<(), Failure> {
    Invocation::parse("cargo build --workspace --all-targets").run()?;
    Ok(())
}
