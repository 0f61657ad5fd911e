//! The `paramhub` command.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    paramhub_cli::main(std::env::args_os(), None).into()
}
