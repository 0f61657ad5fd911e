//! The command line. Parsed by hand: clap would take longer to compile than the rest of xtask.

use std::fmt::Write;

use crate::release;
use crate::stage::{Extent, Stage};
use crate::stages;
use crate::testbed;

/// The task that the caller asked for.
#[derive(Debug)]
pub(crate) enum Request {
    Help,
    ListStages,
    Test(TestOptions),
    Release(Vec<release::options::Part>),
    ReleaseHelp,
    Testbed(testbed::Task),
    /// A testbed's own process: takes the testbed down when the process that builds it is gone.
    TestbedGuard {
        name: String,
    },
    /// A testbed's own process: one end of a flow of the probe.
    TestbedEnd(Vec<String>),
    /// A testbed's own process: passes packets on with a delay.
    TestbedRelay(Vec<String>),
}

/// The options of `cargo xtask test`.
#[derive(Debug)]
pub(crate) struct TestOptions {
    /// The stages, in the order in which they run, whatever their order on the command line.
    pub(crate) stages: Vec<&'static Stage>,
    pub(crate) extent: Extent,
    pub(crate) keep_going: bool,
    /// The version of torch with which the Python package is tested, such as 2.7; by default the newest.
    pub(crate) torch: Option<String>,
}

pub(crate) fn parse(arguments: impl Iterator<Item = String>) -> Result<Request, String> {
    let mut arguments = arguments;
    match arguments.next().as_deref() {
        Some("test") => parse_test(arguments),
        Some("release") => {
            let parts = release::options::parse(arguments)?;
            Ok(parts.map_or(Request::ReleaseHelp, Request::Release))
        }
        Some("testbed") => testbed::options::parse(arguments).map(Request::Testbed),
        Some("testbed-guard") => Ok(Request::TestbedGuard { name: arguments.next().unwrap_or_default() }),
        Some("testbed-end") => Ok(Request::TestbedEnd(arguments.collect())),
        Some("testbed-relay") => Ok(Request::TestbedRelay(arguments.collect())),
        Some("help" | "--help" | "-h") => Ok(Request::Help),
        Some(other) => Err(format!("no task is named `{other}`")),
        None => Err("a task is missing".to_owned()),
    }
}

pub(crate) fn usage() -> String {
    let mut text = "\
Usage: cargo xtask test [--quick | --full] [--only STAGE[,STAGE...]] [--keep-going] [--torch VERSION]
       cargo xtask test --list
       cargo xtask release --help      wheel, archive and Debian package
       cargo xtask testbed --help      hosts and links on one machine, to measure on

  --quick         only the stages marked `quick`, with unit tests and an end-to-end test of each transport
  --full          all stages, with the tests that need other frameworks or minutes
  --only STAGES   run these stages alone
  --keep-going    run the remaining stages after one fails
  --torch VERSION test the Python package with this torch (2.7 is the oldest) instead of the newest
  --list          name the stages
  -h, --help      print this

Stages, in the order they run:
"
    .to_owned();
    for stage in stages::ALL {
        let extent = match stage.extent {
            Extent::Quick => "quick",
            Extent::Standard => "",
            Extent::Full => "full",
        };
        writeln!(text, "  {:<8} {extent:<6} {}", stage.name, stage.about).expect("a String takes any text");
    }
    text
}

fn parse_test(mut arguments: impl Iterator<Item = String>) -> Result<Request, String> {
    let mut only: Option<Vec<String>> = None;
    let mut extent = Extent::Standard;
    let mut keep_going = false;
    let mut torch = None;
    while let Some(argument) = arguments.next() {
        let (flag, attached) = match argument.split_once('=') {
            Some((flag, value)) if flag.starts_with("--") => (flag, Some(value.to_owned())),
            _ => (argument.as_str(), None),
        };
        match (flag, attached) {
            ("--only", attached) => {
                let names = attached.or_else(|| arguments.next()).ok_or("--only needs a stage")?;
                only.get_or_insert_default().extend(names.split(',').map(str::to_owned));
            }
            ("--torch", attached) => {
                let version = attached.or_else(|| arguments.next()).ok_or("--torch needs a version")?;
                torch = Some(checked_version(version)?);
            }
            ("--quick" | "--full", None) if extent != Extent::Standard => {
                return Err("give one of --quick and --full, once".to_owned());
            }
            ("--quick", None) => extent = Extent::Quick,
            ("--full", None) => extent = Extent::Full,
            ("--keep-going", None) => keep_going = true,
            ("--list", None) => return Ok(Request::ListStages),
            ("--help" | "-h", None) => return Ok(Request::Help),
            _ => return Err(format!("unknown argument `{argument}`")),
        }
    }
    let stages = select(only.as_deref(), extent)?;
    Ok(Request::Test(TestOptions { stages, extent, keep_going, torch }))
}

/// Checks the version, which becomes part of a folder's name and of `torch==VERSION.*`.
fn checked_version(version: String) -> Result<String, String> {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    match version.split('.').count() {
        2 | 3 if version.split('.').all(is_number) => Ok(version),
        _ => Err(format!("`{version}` is no version of torch: give one such as 2.7")),
    }
}

/// The named stages, whatever their extent; else those of `extent`.
fn select(only: Option<&[String]>, extent: Extent) -> Result<Vec<&'static Stage>, String> {
    let Some(names) = only else {
        return Ok(stages::ALL.iter().filter(|stage| stage.extent <= extent).collect());
    };
    if let Some(unknown) = names.iter().find(|name| stages::ALL.iter().all(|stage| stage.name != *name)) {
        return Err(format!("no stage is named `{unknown}`"));
    }
    Ok(stages::ALL.iter().filter(|stage| names.iter().any(|name| name == stage.name)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_standard_stages_run_without_flags_and_the_first_failure_stops() {
        let options = test_options("test");
        let standard = stages::ALL.iter().filter(|stage| stage.extent <= Extent::Standard);
        assert_eq!(names(&options), standard.map(|stage| stage.name).collect::<Vec<_>>());
        assert!(!options.keep_going);
    }

    #[test]
    fn each_extent_has_the_stages_of_the_smaller_ones_and_more() {
        let [quick, standard, full] =
            ["test --quick", "test", "test --full"].map(|line| names(&test_options(line)));
        assert!(quick.iter().all(|name| standard.contains(name)) && quick.len() < standard.len());
        assert!(standard.iter().all(|name| full.contains(name)));
        assert_eq!(full.len(), stages::ALL.len());
        assert_eq!(names(&test_options("test --quick --only python")), ["python"], "the name decides");
    }

    #[test]
    fn selected_stages_run_in_the_fixed_order_and_once() {
        for line in ["test --only tests,fmt,tests", "test --only=tests --only fmt"] {
            assert_eq!(names(&test_options(line)), ["fmt", "tests"], "{line}");
        }
    }

    #[test]
    fn keep_going_combines_with_a_selection() {
        assert!(test_options("test --keep-going --only fmt").keep_going);
    }

    #[test]
    fn torch_is_the_newest_unless_a_version_is_given() {
        assert_eq!(test_options("test").torch, None);
        for line in ["test --torch 2.7", "test --torch=2.7 --only python"] {
            assert_eq!(test_options(line).torch.as_deref(), Some("2.7"), "{line}");
        }
        assert_eq!(test_options("test --torch 2.7.1").torch.as_deref(), Some("2.7.1"));
    }

    #[test]
    fn wrong_arguments_are_refused_and_named() {
        for (line, named) in [
            ("", "task is missing"),
            ("tests", "`tests`"),
            ("test --fast", "`--fast`"),
            ("test --quick --full", "one of"),
            ("test --full --full", "one of"),
            ("test --quick=yes", "`--quick=yes`"),
            ("test fmt", "`fmt`"),
            ("test --keep-going=yes", "`--keep-going=yes`"),
            ("test --only", "needs a stage"),
            ("test --only fmt,lint", "`lint`"),
            ("test --only=", "``"),
            ("test --torch", "needs a version"),
            ("test --torch newest", "`newest`"),
            ("test --torch 2", "`2`"),
            ("test --torch 2..7", "`2..7`"),
            ("test --torch=2.7/../../x", "`2.7/../../x`"),
        ] {
            let problem = parse_line(line).expect_err(line);
            assert!(problem.contains(named), "`{line}` was refused with: {problem}");
        }
    }

    #[test]
    fn help_and_list_win_over_running() {
        assert!(matches!(parse_line("test --only fmt --help"), Ok(Request::Help)));
        assert!(matches!(parse_line("--help"), Ok(Request::Help)));
        assert!(matches!(parse_line("test --list"), Ok(Request::ListStages)));
    }

    #[test]
    fn usage_names_every_stage() {
        let usage = usage();
        assert!(stages::ALL.iter().all(|stage| usage.contains(&format!("\n  {}", stage.name))), "{usage}");
    }

    fn parse_line(line: &str) -> Result<Request, String> {
        parse(line.split_whitespace().map(str::to_owned))
    }

    fn test_options(line: &str) -> TestOptions {
        match parse_line(line) {
            Ok(Request::Test(options)) => options,
            other => panic!("`{line}` parsed to {other:?}"),
        }
    }

    fn names(options: &TestOptions) -> Vec<&'static str> {
        options.stages.iter().map(|stage| stage.name).collect()
    }
}
