//! The `paramhub` command.
#![forbid(unsafe_code)]

mod cli;
mod config;
mod launch;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
