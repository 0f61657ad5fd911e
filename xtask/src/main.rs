//! The project's own tasks. `cargo xtask test` runs everything paramhub tests, `cargo xtask release` makes what users install,
//! `cargo xtask testbed` builds racks of hosts to measure on.

mod args;
mod command;
mod environment;
mod packages;
mod release;
mod stage;
mod stages;
mod testbed;
mod tools;

use std::path::Path;
use std::process::ExitCode;

use args::Request;

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
        Ok(Request::Test(options)) => in_workspace_root(|| stage::run_all(&options)),
        Ok(Request::Release(parts)) => in_workspace_root(|| release::run(&parts)),
        Ok(Request::ReleaseHelp) => {
            print!("{}", release::options::USAGE);
            ExitCode::SUCCESS
        }
        Ok(Request::Testbed(task @ testbed::Task::Run { .. })) => {
            in_workspace_root(|| testbed::perform(task))
        }
        Ok(Request::Testbed(task)) => testbed::perform(task),
        Ok(Request::TestbedGuard { name }) => testbed::stand_guard(&name),
        Ok(Request::TestbedEnd(arguments)) => testbed::play_end(&arguments),
        Ok(Request::TestbedRelay(arguments)) => testbed::play_relay(&arguments),
        Err(problem) => {
            let usage = match std::env::args().nth(1).as_deref() {
                Some("testbed") => testbed::options::USAGE.to_owned(),
                Some("release") => release::options::USAGE.to_owned(),
                _ => args::usage(),
            };
            eprint!("xtask: {problem}\n\n{usage}");
            ExitCode::from(2)
        }
    }
}

fn in_workspace_root(work: impl FnOnce() -> ExitCode) -> ExitCode {
    // Cargo also names the package at run time, which is right even if the checkout has moved since the
    // build.
    let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let root = Path::new(&package).parent().expect("xtask lies in the workspace root");
    if let Err(error) = std::env::set_current_dir(root) {
        eprintln!("xtask: cannot enter {}: {error}", root.display());
        return ExitCode::FAILURE;
    }
    work()
}
