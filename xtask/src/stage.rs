//! A stage, and how stages run one after the other.

use std::process::ExitCode;
use std::time::Instant;

use crate::args::TestOptions;

/// The extent of a run. Each value includes what stands before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Extent {
    /// A few minutes: format, lints, unit tests, and an end-to-end test of each transport.
    Quick,
    /// The stages that every change must pass.
    #[default]
    Standard,
    /// Also what needs other frameworks, or a long time.
    Full,
}

/// A named group of checks. Its code is in `stages/`.
#[derive(Debug)]
pub(crate) struct Stage {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// The smallest extent of which the stage is a part.
    pub(crate) extent: Extent,
    pub(crate) run: fn(&TestOptions) -> Result<(), Failure>,
}

/// The reason why a stage failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) reason: String,
    /// The command that failed, if running it again shows the failure.
    pub(crate) rerun: Option<String>,
}

/// Runs the stages one after the other and ends with one line for each.
pub(crate) fn run_all(options: &TestOptions) -> ExitCode {
    let begin = Instant::now();
    let mut lines = Vec::new();
    let mut failures = Vec::new();
    for (index, stage) in options.stages.iter().enumerate() {
        println!("\n== {} ({}/{}): {}", stage.name, index + 1, options.stages.len(), stage.about);
        let stage_begin = Instant::now();
        let result = (stage.run)(options);
        let verdict = if result.is_ok() { "ok" } else { "FAILED" };
        let line = format!("{:<8} {verdict:<7} {:>7.1} s", stage.name, stage_begin.elapsed().as_secs_f64());
        println!("== {line}");
        lines.push(line);
        if let Err(failure) = result {
            failures.push((stage, failure));
            if !options.keep_going {
                break;
            }
        }
    }

    println!("\n== stages, {:.1} s in all", begin.elapsed().as_secs_f64());
    for line in &lines {
        println!("{line}");
    }
    for stage in &options.stages[lines.len()..] {
        println!("{:<8} not run", stage.name);
    }
    for (stage, failure) in &failures {
        println!("\n{} failed: {}", stage.name, failure.reason);
        if let Some(command) = &failure.rerun {
            println!("  the command again:  {command}");
        }
        let torch = options.torch.as_ref().map(|version| format!(" --torch {version}"));
        let extent = match options.extent {
            Extent::Quick => " --quick",
            Extent::Standard => "",
            Extent::Full => " --full",
        };
        println!(
            "  the stage again:    cargo xtask test{extent} --only {}{}",
            stage.name,
            torch.unwrap_or_default()
        );
    }
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_failure_stops_the_row_without_keep_going() {
        static RUNS_AFTER_FAILURE: AtomicUsize = AtomicUsize::new(0);
        static FAILING: Stage = Stage {
            name: "failing",
            about: "",
            extent: Extent::Quick,
            run: |_| Err(Failure { reason: "on purpose".to_owned(), rerun: None }),
        };
        static LATER: Stage = Stage {
            name: "later",
            about: "",
            extent: Extent::Quick,
            run: |_| {
                RUNS_AFTER_FAILURE.fetch_add(1, Ordering::Relaxed);
                Ok(())
            },
        };
        let mut options = TestOptions {
            stages: vec![&FAILING, &LATER],
            extent: Extent::Standard,
            keep_going: false,
            torch: None,
        };
        assert_eq!(run_all(&options), ExitCode::FAILURE);
        assert_eq!(RUNS_AFTER_FAILURE.load(Ordering::Relaxed), 0);

        options.keep_going = true;
        assert_eq!(run_all(&options), ExitCode::FAILURE);
        assert_eq!(RUNS_AFTER_FAILURE.load(Ordering::Relaxed), 1);
    }
}
