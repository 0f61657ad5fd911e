//! Building, apart from running the tests, so that the two times are listed separately.

use crate::command::Invocation;
use crate::stage::{Extent, Failure};
use crate::stages::features;

pub(crate) fn everything(extent: Extent) -> Result<(), Failure> {
    Invocation::parse("cargo build --all-targets").args(features::workspace(extent)?.iter().copied()).run()
}
