//! The project's own tasks. `cargo xtask test` runs everything paramhub tests.

mod args;
mod command;
mod packages;
mod stage;
mod stages;
mod tools;

use std::path::Path;
use std::process::ExitCode;

use args::{Request, TestOptions};

fn main() -> ExitCode {
    match args::parse(std::env::args().skip(1)) {
        Ok(Request::Help) => {
            print!("{}", args::usage());
            ExitCode::SUCCESS
        }
        Ok(Request::ListStages) => {
            for stage in stages::ALL {
                println!("{:<8} {}", stage.name, stage.about);
            }
            ExitCode::SUCCESS
        }
        Ok(Request::Test(options)) => run_in_workspace_root(&options),
        Err(problem) => {
            eprint!("xtask: {problem}\n\n{}", args::usage());
            ExitCode::from(2)
        }
    }
}

fn run_in_workspace_root(options: &TestOptions) -> ExitCode {
    // Cargo names the package at run time too, should the checkout have moved since it was built.
    let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let root = Path::new(&package).parent().expect("xtask lies in the workspace root");
    if let Err(error) = std::env::set_current_dir(root) {
        eprintln!("xtask: cannot enter {}: {error}", root.display());
        return ExitCode::FAILURE;
    }
    stage::run_all(options)
}
