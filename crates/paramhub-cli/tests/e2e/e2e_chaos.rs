//! `paramhub train --chaos`, which kills its own workers.

use std::path::Path;

use rustix::process::Signal;

use crate::common::{is_alive, paramhub, wait_until, workers_of};

/// Whose victims begin with rank 0, which reports the progress of a training where nobody is killed.
const RANK_0_FIRST: &str = "2";

fn accuracy(results: &Path) -> f64 {
    let results: serde_json::Value = serde_json::from_slice(&std::fs::read(results).unwrap()).unwrap();
    results["accuracy"].as_f64().unwrap()
}

#[test]
fn training_ends_as_well_as_ever_while_its_workers_are_killed() {
    let results = tempfile::tempdir().unwrap();
    let train = |name: &str, more: &[&str]| {
        let file = results.path().join(name);
        let usual = ["train", "--workers", "3", "--epochs", "60", "--json", file.to_str().unwrap()];
        (paramhub(usual.iter().chain(more).copied()).finish().expect_code(0), accuracy(&file))
    };
    let (ended, disturbed) = train("chaos.json", &["--chaos=0.2", "--chaos-seed", RANK_0_FIRST]);
    let told = |what: &str| ended.stderr.lines().filter(|line| line.contains(what)).count();
    let (kills, returns) = (told(" killed after step "), told(" is back at step "));
    assert!(kills > 1 && returns > 1 && kills - returns <= 1, "{}", ended.stderr);
    for line in ["--chaos-seed 2 repeats the choice", "rank 0 killed after step ", "rank 0 is back at step "]
    {
        assert!(told(line) > 0, "no `{line}` in {}", ended.stderr);
    }
    for row in [format!("{kills}; {returns} came back"), "longest gap between two steps".into()] {
        assert!(ended.stdout.contains(&row), "no `{row}` in {}", ended.stdout);
    }
    let file = std::fs::read(results.path().join("chaos.json")).unwrap();
    let written: serde_json::Value = serde_json::from_slice(&file).unwrap();
    assert_eq!(written["chaos"]["kills"], kills);
    assert_eq!(written["chaos"]["losses"]["workers_lost"], kills, "the manager has counted them, too");
    assert_eq!(written["steps"], 60 * (1437 / 48), "{written}");
    assert_eq!(written["max_parameter_difference"], 0.0, "all ranks end with the same parameters");
    let (_, undisturbed) = train("usual.json", &[]);
    assert!((disturbed - undisturbed).abs() < 0.03, "{disturbed} instead of {undisturbed}");
}

#[test]
fn an_interrupt_ends_those_who_were_started_in_the_place_of_others_too() {
    let training = paramhub(["train", "--workers", "3", "--epochs", "1000000", "--chaos=0.1"]).start();
    wait_until("some are back", || training.stderr().matches(" is back at step ").count() > 2);
    // All workers have the path of one file among their arguments.
    let arguments = |pid: i32| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut ours = Vec::new();
    wait_until("a worker runs", || {
        ours = workers_of(training.pid()).first().map(|&pid| arguments(pid)).unwrap_or_default();
        ours.windows(12).any(|part| part == b"train-worker")
    });
    training.signal(Signal::INT);
    let ended = training.finish().expect_code(130);
    assert!(ended.stderr.contains("interrupted by SIGINT"), "{}", ended.stderr);
    let processes = std::fs::read_dir("/proc").unwrap();
    let pids = processes.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse::<i32>().ok());
    let left: Vec<i32> = pids.filter(|&pid| arguments(pid) == ours && is_alive(pid)).collect();
    assert_eq!(left, [] as [i32; 0], "these outlive the launcher");
}

#[test]
fn what_does_not_go_together_with_kills_is_refused() {
    for (more, parts) in [
        (&["--chaos", "--reproducible"][..], &["`--chaos` cannot be combined with `reproducible`"][..]),
        (&["--chaos", "--exchange", "depcha"], &["`--chaos` cannot be combined with the exchange depcha"]),
        (&["--chaos=0"], &["--chaos=0: give the seconds from one kill to the next, 0.05 to 3600"]),
        (&["--chaos-seed", "7"], &["`--chaos-seed` would have no effect with a missing `--chaos`"]),
    ] {
        let refused = paramhub(["train"].iter().chain(more).copied()).finish().expect_code(2);
        refused.expect_error(parts);
    }
    let by_run = paramhub(["run", "-n", "1", "--", env!("CARGO_BIN_EXE_paramhub"), "train", "--chaos"]);
    let refused = by_run.finish().expect_code(2);
    let conflict = "`--chaos` cannot be combined with ranks that `paramhub run` starts";
    assert!(refused.stderr.contains(conflict), "{}", refused.stderr);
}
