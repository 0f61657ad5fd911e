//! `mpirun -n N paramhub train`: the ranks of a real MPI. This is a program of its own because it needs the
//! feature `mpi`. It has `bench designs` once more, which includes MPI only with that feature.

#[path = "../e2e/common/mod.rs"]
mod common;
#[path = "../e2e/e2e_bench_designs.rs"]
mod e2e_bench_designs;

use std::path::Path;
use std::process::Command;

use common::{Program, is_alive, program, wait_until};
use rustix::process::{Pid, Signal, kill_process};

fn mpirun<'a>(ranks: &'a str, more: impl IntoIterator<Item = &'a str>) -> Program {
    let launcher =
        ["--allow-run-as-root", "--oversubscribe", "-n", ranks, env!("CARGO_BIN_EXE_paramhub"), "train"];
    program(Path::new("mpirun"), launcher.into_iter().chain(more))
}

/// The trained parameters and the results.
fn trained(ranks: &str, exchange: &str, more: &[&str]) -> (Vec<u8>, serde_json::Value) {
    let common = [
        "--net",
        "mlp",
        "--epochs",
        "2",
        "--exchange",
        exchange,
        "--save",
        "p.safetensors",
        "--json",
        "out.json",
    ];
    let ended = mpirun(ranks, common.into_iter().chain(more.iter().copied())).finish().expect_code(0);
    assert_eq!(ended.stdout.matches("test accuracy").count(), 1, "one rank speaks: {}", ended.stdout);
    let results: serde_json::Value = serde_json::from_slice(&ended.read("out.json")).unwrap();
    assert_eq!(results["max_parameter_difference"], 0.0, "{results}");
    assert_eq!(results["workers"].as_array().unwrap().len().to_string(), ranks);
    (ended.read("p.safetensors"), results)
}

#[test]
fn ranks_of_mpi_train_by_every_design_and_through_a_hub_by_one_word() {
    let (funnel, results) = trained("3", "funnel", &[]);
    assert_eq!(results["workers"][0]["transport"], "MPI");
    assert!(trained("3", "depcha", &[]).0 == funnel, "depcha ended at other bits than funnel");
    assert!(trained("3", "depcha", &["--check-collectives", "--compute-threads", "2"]).0 == funnel);
    trained("3", "concom", &[]);
    let (_, results) = trained("3", "hub", &[]);
    assert_eq!(results["workers"][2]["transport"], "shared memory");
    let refused = mpirun("2", ["--exchange", "local"]).finish();
    assert_ne!(refused.code, 0);
    assert!(
        refused.stderr.contains("`mpirun` starts") && refused.stderr.contains("without a launcher"),
        "{}",
        refused.stderr
    );
}

/// The ranks that a launcher has started.
fn ranks_of(launcher: Pid) -> Vec<i32> {
    let launcher = launcher.as_raw_nonzero().to_string();
    let listed = Command::new("ps").args(["-o", "pid=,args=", "--ppid", &launcher]).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let ranks = listed.lines().filter(|line| line.contains(" train "));
    ranks.map(|line| line.split_whitespace().next().unwrap().parse().unwrap()).collect()
}

#[test]
fn a_killed_rank_ends_all_and_is_named() {
    for exchange in ["depcha", "concom"] {
        let training = mpirun("3", ["--net", "mlp", "--epochs", "100000", "--exchange", exchange]).start();
        wait_until("training has begun", || training.stderr().contains("step 1/"));
        let ranks = ranks_of(training.pid());
        assert_eq!(ranks.len(), 3);
        let environment = std::fs::read(format!("/proc/{}/environ", ranks[1])).unwrap();
        let environment = String::from_utf8_lossy(&environment);
        let variable = "OMPI_COMM_WORLD_RANK=";
        let rank = environment.split('\0').find_map(|entry| entry.strip_prefix(variable)).unwrap();
        kill_process(Pid::from_raw(ranks[1]).unwrap(), Signal::KILL).unwrap();
        let ended = training.finish();
        assert_ne!(ended.code, 0);
        assert!(ended.stderr.contains(&format!("rank {rank}")), "{exchange}: {}", ended.stderr);
        wait_until("no rank is left", || !ranks.iter().any(|&rank| is_alive(rank)));
    }
}
