//! Programs of the release before beside those of this one. `cargo xtask test --full --only neighbour` builds
//! them and says in `PARAMHUB_NEIGHBOUR` in which folder they are.

use std::path::PathBuf;

use paramhub::ManagerClient;
use paramhub::service::{CreateService, JobState};

use crate::common::{Process, Program, example, hub, program, wait_until};

/// Each rank sends fractions of its own, so that a contribution that is lost or counted twice shows.
const EXCHANGE: [&str; 5] = ["--steps", "50", "--seed", "7", "--reproducible"];

fn older(name: &str) -> PathBuf {
    let folder = std::env::var_os("PARAMHUB_NEIGHBOUR").expect("PARAMHUB_NEIGHBOUR is not set");
    PathBuf::from(folder).join(name)
}

fn older_worker() -> Program {
    let arguments = EXCHANGE.into_iter().chain(["--save", "parameters"]);
    program(&older("examples/exchange"), arguments)
}

fn worker() -> Program {
    example("exchange", EXCHANGE.into_iter().chain(["--save", "parameters"]))
}

/// Runs a job of these workers and returns the parameters at the end, which all ranks must have alike.
fn train(client: &ManagerClient, name: &str, workers: [Program; 3]) -> Vec<u8> {
    let request = CreateService { name: name.into(), workers: 3, options: Default::default() };
    let created = client.create_service(&request).unwrap();
    let workers: Vec<Process> = (0..)
        .zip(workers)
        .map(|(rank, worker): (u32, Program)| {
            worker
                .env("PARAMHUB_URL", client.url())
                .env("PARAMHUB_JOB", &created.namespace.to_string())
                .env("PARAMHUB_SECRET", &String::from(created.secret()))
                .env("RANK", &rank.to_string())
                .start()
        })
        .collect();
    let saved: Vec<Vec<u8>> =
        workers.into_iter().map(|worker| worker.finish().expect_code(0).read("parameters")).collect();
    wait_until("the job has ended", || client.job(name).unwrap().state.has_ended());
    assert_eq!(client.job(name).unwrap().state, JobState::Finished);
    assert!(saved.iter().all(|parameters| *parameters == saved[0]), "the ranks end with other parameters");
    saved.into_iter().next().unwrap()
}

#[test]
#[ignore = "needs the programs of the release before: cargo xtask test --full --only neighbour"]
fn a_hub_serves_workers_of_the_release_before_beside_its_own() {
    let (_hub, url) = hub([]);
    let client = ManagerClient::new(&url, None).unwrap();
    let expected = train(&client, "new", [worker(), worker(), worker()]);
    assert!(expected.iter().any(|&byte| byte != 0));
    let mixed = train(&client, "mixed", [older_worker(), worker(), older_worker()]);
    assert!(mixed == expected, "workers of two releases end with other parameters");
    let old = train(&client, "old", [older_worker(), older_worker(), older_worker()]);
    assert!(old == expected, "workers of the release before end with other parameters");
}

#[test]
#[ignore = "needs the programs of the release before: cargo xtask test --full --only neighbour"]
fn a_hub_of_the_release_before_is_told_to_be_upgraded() {
    let (_hub, url) = hub([]);
    let older_hub = program(&older("paramhub"), ["hub", "--listen", "127.0.0.1:0", "--manager", &url]);
    let finished = older_hub.finish();
    assert_ne!(finished.code, 0);
    assert!(finished.stderr.contains("the hub speaks protocol version 1"), "{}", finished.stderr);
}
