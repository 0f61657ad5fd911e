//! `paramhub train --exchange funnel|concom|depcha`: training without a hub, in processes that it starts and
//! in those of another launcher.

use paramhub::service::JobState;
use paramhub::{Manager, ManagerClient, ManagerConfig, RunningManager};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::parameters::{assert_differ_by_rounding, parameters};
use crate::common::{Finished, is_alive, paramhub, rank_of, wait_until, workers_of};

const DESIGNS: [&str; 3] = ["funnel", "concom", "depcha"];

/// The flags that write these files into the program's folder.
const SAVED: [&str; 4] = ["--save", "p.safetensors", "--json", "out.json"];

/// The results of every rank.
fn results(ended: &Finished, workers: usize) -> serde_json::Value {
    let results: serde_json::Value = serde_json::from_slice(&ended.read("out.json")).unwrap();
    assert_eq!(results["max_parameter_difference"], 0.0, "{results}");
    assert_eq!(results["workers"].as_array().unwrap().len(), workers, "{results}");
    results
}

/// A connection manager that no hub has joined.
fn manager() -> (RunningManager, ManagerClient) {
    let listen = "127.0.0.1:0".parse().unwrap();
    let manager = Manager::start(ManagerConfig { listen, ..ManagerConfig::default() }).unwrap();
    let client = ManagerClient::new(&manager.url(), None).unwrap();
    (manager, client)
}

/// Parameters after one epoch with so many workers.
fn trained(net: &str, workers: &str, exchange: &str, more: &[&str], isa: &str) -> Vec<f32> {
    let common = ["train", "--net", net, "--workers", workers, "--lr", "0.005", "--exchange", exchange];
    let arguments = common.into_iter().chain(["--epochs", "1"]).chain(SAVED).chain(more.iter().copied());
    let ended = paramhub(arguments).env("PARAMHUB_ISA", isa).finish().expect_code(0);
    if exchange != "local" {
        results(&ended, workers.parse().unwrap());
    }
    parameters(&ended.read("p.safetensors"))
}

#[test]
fn every_design_of_two_ranks_reaches_the_bits_of_one_process() {
    for net in ["mlp", "inception"] {
        // A sum of two is the same in any order.
        let local = trained(net, "2", "local", &[], "");
        for exchange in ["hub"].into_iter().chain(DESIGNS) {
            assert!(trained(net, "2", exchange, &[], "") == local, "{net}: {exchange} ended at other bits");
        }
        let other = trained(net, "2", "depcha", &["--seed", "2"], "");
        assert!(other != local, "any run gives the same bits: this shows nothing");
    }
}

#[test]
fn every_design_of_three_ranks_differs_from_one_process_by_rounding_alone() {
    for net in ["mlp", "inception"] {
        let initial = trained(net, "3", "local", &["--lr", "1e-20"], "");
        let local = trained(net, "3", "local", &[], "");
        let [funnel, concom, depcha] = DESIGNS.map(|design| trained(net, "3", design, &[], ""));
        assert!(depcha == funnel, "{net}: depcha ended at other bits than funnel");
        let threads = trained(net, "3", "depcha", &["--compute-threads", "2", "--check-collectives"], "");
        assert!(threads == depcha, "{net}: the number of compute threads changed bits");
        let hub = trained(net, "3", "hub", &[], "");
        for (name, other) in [("hub", &hub), ("funnel", &funnel), ("concom", &concom)] {
            assert_differ_by_rounding(other, &local, &initial, &format!("{net}, {name}"));
        }
    }
}

#[test]
fn every_instruction_set_of_the_kernels_ends_at_the_same_bits() {
    let expected = trained("lenet", "2", "local", &[], "");
    for isa in ["baseline", "avx2", "avx512"] {
        for exchange in ["local", "hub", "depcha"] {
            assert!(trained("lenet", "2", exchange, &[], isa) == expected, "{exchange} with {isa}");
        }
    }
    let refused = paramhub(["train"]).env("PARAMHUB_ISA", "sse9").finish().expect_code(2);
    refused.expect_error(&["PARAMHUB_ISA is `sse9`", "baseline, avx2 or avx512"]);
}

#[test]
fn the_transport_between_workers_is_chosen_and_shown() {
    for (transport, shown) in [("auto", "shared memory"), ("tcp", "tcp")] {
        let common =
            ["train", "--net", "mlp", "--epochs", "2", "--exchange", "depcha", "--transport", transport];
        let ended = paramhub(common.into_iter().chain(SAVED)).finish().expect_code(0);
        let workers = &results(&ended, 4)["workers"];
        assert!(workers.as_array().unwrap().iter().all(|worker| worker["transport"] == shown), "{workers}");
        let row = ended.stdout.lines().find(|line| line.contains("transport")).unwrap();
        assert!(row.contains(shown), "{row}");
        assert!(!ended.stdout.contains("hub core"), "{}", ended.stdout);
    }
}

#[test]
fn ranks_of_another_launcher_train_together_by_one_word() {
    let program = env!("CARGO_BIN_EXE_paramhub");
    let mut reached = Vec::new();
    for exchange in ["hub", "depcha"] {
        let launcher = ["run", "-n", "2", "--", program, "train", "--net", "mlp", "--epochs", "2"];
        let arguments = launcher.into_iter().chain(["--exchange", exchange]).chain(SAVED);
        let ended = paramhub(arguments).finish().expect_code(0);
        let named = match exchange {
            "hub" => "[0] training mlp on digits with 2 workers and a hub",
            _ => "[0] training mlp on digits with 2 workers by depcha",
        };
        assert!(ended.stderr.contains(named), "{}", ended.stderr);
        assert!(ended.stdout.lines().all(|line| line.starts_with("[0] ")), "rank 0 speaks: {}", ended.stdout);
        assert!(ended.stdout.contains("test accuracy"), "{}", ended.stdout);
        reached.push(parameters(&ended.read("p.safetensors")));
    }
    // A sum of two is the same in any order.
    assert!(reached[0] == reached[1], "hub and depcha ended at other bits");
    for (more, part) in [
        (&["--workers", "2"][..], "`--workers` would have no effect with ranks that `paramhub run` starts"),
        (&["--exchange", "local"], "start it without a launcher"),
        (&["--cores", "2"], "give it to `paramhub run`"),
    ] {
        let launcher = ["run", "-n", "2", "--", program, "train"].into_iter();
        let refused = paramhub(launcher.chain(more.iter().copied())).finish().expect_code(2);
        assert!(refused.stderr.contains(part), "{more:?}: {}", refused.stderr);
    }
    let mpi = paramhub(["train"]).env("OMPI_COMM_WORLD_SIZE", "4");
    if !cfg!(feature = "mpi") {
        mpi.finish().expect_code(2).expect_error(&["4 ranks", "--features mpi", "paramhub run -n 4"]);
    }
}

#[test]
fn a_job_without_hubs_is_listed_and_finishes() {
    let (manager, client) = manager();
    let url = manager.url();
    let common = [
        "train",
        "--net",
        "mlp",
        "--epochs",
        "1",
        "--exchange",
        "concom",
        "--name",
        "hubless",
        "--hub",
        &url,
    ];
    paramhub(common).finish().expect_code(0);
    let job = client.job("hubless").unwrap();
    assert_eq!((job.state, job.connected), (JobState::Finished, vec![0, 1, 2, 3]));
}

#[test]
fn a_killed_worker_ends_the_training_with_its_name() {
    for design in DESIGNS {
        let common = ["train", "--net", "mlp", "--epochs", "100000", "--exchange", design];
        let training = paramhub(common).start();
        wait_until("training has begun", || training.stderr().contains("step 1/"));
        let workers = workers_of(training.pid());
        let worker = workers.iter().copied().find(|&worker| rank_of(worker) == 2).expect("rank 2");
        kill_process(Pid::from_raw(worker).unwrap(), Signal::KILL).unwrap();
        let ended = training.finish().expect_code(1);
        let last = ended.stderr.lines().last().unwrap();
        assert!(last.contains("worker 2 was killed by SIGKILL"), "{design}: {last}");
        let lost =
            ended.stderr.lines().filter(|line| line.starts_with('[') && line.contains("rank 2")).count();
        assert!(lost >= 1, "{design}: the others name the rank that they lost: {}", ended.stderr);
        assert!(!workers.into_iter().any(is_alive));
    }
}

#[test]
fn a_stopped_job_ends_at_every_worker_with_the_reason() {
    let (manager, client) = manager();
    let url = manager.url();
    let common = [
        "train",
        "--net",
        "mlp",
        "--epochs",
        "100000",
        "--exchange",
        "depcha",
        "--name",
        "long",
        "--hub",
        &url,
    ];
    let training = paramhub(common).start();
    wait_until("training has begun", || training.stderr().contains("step 1/"));
    client.stop_job_because("long", "the machine is needed").unwrap();
    let ended = training.finish().expect_code(1);
    assert!(ended.stderr.contains("the machine is needed"), "{}", ended.stderr);
}

#[test]
fn a_timeline_shows_what_rank_0_ran() {
    let common = ["train", "--net", "mlp", "--epochs", "1", "--exchange", "depcha", "--trace", "trace.json"];
    let ended = paramhub(common).finish().expect_code(0);
    let timeline: serde_json::Value = serde_json::from_slice(&ended.read("trace.json")).unwrap();
    let events = timeline["traceEvents"].as_array().unwrap();
    for part in ["forward fc1", "gradient fc3", "allreduce fc2.weight", "update fc1.bias"] {
        let named =
            |event: &serde_json::Value| event["name"].as_str().is_some_and(|name| name.contains(part));
        assert!(events.iter().any(named), "no {part} in {}", timeline);
    }
    let refused = paramhub(["train", "--trace", "trace.json"]).finish().expect_code(2);
    assert!(
        refused.stderr.contains("`--trace` would have no effect with the exchange hub"),
        "{}",
        refused.stderr
    );
}

#[test]
fn a_run_without_hubs_starts_none() {
    let program = env!("CARGO_BIN_EXE_paramhub");
    let launcher = ["run", "-n", "2", "--hubs", "0", "--", program, "train", "--net", "mlp", "--epochs", "1"];
    paramhub(launcher.into_iter().chain(["--exchange", "funnel"])).finish().expect_code(0);
    let ended = paramhub(launcher).finish().expect_code(1);
    assert!(ended.stderr.contains("was created for 0 hubs"), "{}", ended.stderr);
}
