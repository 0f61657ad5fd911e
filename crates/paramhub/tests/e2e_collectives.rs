//! `paramhub train --exchange funnel|concom|depcha`: training without a hub, in processes of its own and of another launcher.

mod common;

use common::{Finished, is_alive, paramhub, rank_of, wait_until, workers_of};
use paramhub::service::JobState;
use paramhub::{Manager, ManagerClient, ManagerConfig, RunningManager};
use rustix::process::{Pid, Signal, kill_process};

const DESIGNS: [&str; 3] = ["funnel", "concom", "depcha"];

/// Where these files are written in the program's folder.
const SAVED: [&str; 4] = ["--save", "p.safetensors", "--json", "out.json"];

fn parameters(file: &[u8]) -> Vec<f32> {
    let tensors = safetensors::SafeTensors::deserialize(file).unwrap();
    let mut names = tensors.names();
    names.sort();
    let values = names.iter().flat_map(|name| tensors.tensor(name).unwrap().data().to_vec());
    values.collect::<Vec<u8>>().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

fn furthest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// What every rank has reached.
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

#[test]
fn every_design_reaches_the_parameters_of_hub_and_one_process() {
    for net in ["mlp", "inception"] {
        let trained = |exchange: &str, more: &[&str]| {
            let common = [
                "train",
                "--net",
                net,
                "--workers",
                "3",
                "--epochs",
                "1",
                "--lr",
                "0.005",
                "--exchange",
                exchange,
            ];
            let arguments = common.into_iter().chain(SAVED).chain(more.iter().copied());
            let ended = paramhub(arguments).finish().expect_code(0);
            if exchange != "local" {
                results(&ended, 3);
            }
            parameters(&ended.read("p.safetensors"))
        };
        let local = trained("local", &[]);
        let hub = trained("hub", &[]);
        let [funnel, concom, depcha] = DESIGNS.map(|design| trained(design, &[]));
        assert!(depcha == funnel, "{net}: depcha ended at other bits than funnel");
        assert!(trained("depcha", &["--compute-threads", "2", "--check-collectives"]) == depcha, "{net}");
        for (other, name) in [(&hub, "hub"), (&funnel, "funnel"), (&concom, "concom")] {
            let furthest = furthest(other, &local);
            assert!(furthest < 1e-5, "{net}, {name}: {furthest}");
        }
        assert!(
            trained("depcha", &["--seed", "2"]) != depcha,
            "any run gives the same bits: this shows nothing"
        );
    }
}

#[test]
fn the_transport_between_workers_is_chosen_and_told() {
    for (transport, told) in [("auto", "shared memory"), ("tcp", "tcp")] {
        let common =
            ["train", "--net", "mlp", "--epochs", "2", "--exchange", "depcha", "--transport", transport];
        let ended = paramhub(common.into_iter().chain(SAVED)).finish().expect_code(0);
        let workers = &results(&ended, 4)["workers"];
        assert!(workers.as_array().unwrap().iter().all(|worker| worker["transport"] == told), "{workers}");
        let row = ended.stdout.lines().find(|line| line.contains("transport")).unwrap();
        assert!(row.contains(told), "{row}");
        assert!(!ended.stdout.contains("hub core"), "{}", ended.stdout);
    }
}

#[test]
fn ranks_of_another_launcher_train_together_by_one_word() {
    let program = env!("CARGO_BIN_EXE_paramhub");
    let mut reached = Vec::new();
    for exchange in ["hub", "depcha"] {
        let launcher = ["run", "-n", "3", "--", program, "train", "--net", "mlp", "--epochs", "2"];
        let arguments = launcher.into_iter().chain(["--exchange", exchange]).chain(SAVED);
        let ended = paramhub(arguments).finish().expect_code(0);
        let named = match exchange {
            "hub" => "[0] training mlp on digits with 3 workers and a hub",
            _ => "[0] training mlp on digits with 3 workers by depcha",
        };
        assert!(ended.stderr.contains(named), "{}", ended.stderr);
        assert!(ended.stdout.lines().all(|line| line.starts_with("[0] ")), "rank 0 speaks: {}", ended.stdout);
        assert!(ended.stdout.contains("test accuracy"), "{}", ended.stdout);
        reached.push(parameters(&ended.read("p.safetensors")));
    }
    assert!(furthest(&reached[0], &reached[1]) < 1e-5);
    for (more, part) in [
        (&["--workers", "2"][..], "--workers is for `paramhub run`"),
        (&["--exchange", "local"], "start it without `paramhub run`"),
        (&["--cores", "2"], "--cores is the job's"),
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
        assert!(lost >= 1, "{design}: the others say whom they lost: {}", ended.stderr);
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
    assert!(refused.stderr.contains("--trace is for collectives"), "{}", refused.stderr);
}

#[test]
fn a_run_without_hubs_starts_none() {
    let program = env!("CARGO_BIN_EXE_paramhub");
    let launcher = ["run", "-n", "2", "--hubs", "0", "--", program, "train", "--net", "mlp", "--epochs", "1"];
    paramhub(launcher.into_iter().chain(["--exchange", "funnel"])).finish().expect_code(0);
    let ended = paramhub(launcher).finish().expect_code(1);
    assert!(ended.stderr.contains("was created for 0 hubs"), "{}", ended.stderr);
}
