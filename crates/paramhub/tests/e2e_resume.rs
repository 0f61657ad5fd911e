//! Jobs that go on over the interfaces that are left: real processes, an interface that goes down in mid-run, and every number
//! as if nothing had happened.

mod common;
mod network;

use std::time::{Duration, Instant};

use common::{Process, example, paramhub, wait_until};
use network::{Network, WORKERS};
use paramhub::ManagerClient;
use paramhub::service::{CreateService, JobOptions, JobState, OnInterfaceDown};
use rustix::process::Signal;

const TOKEN: &str = "let-me-in";
/// How soon an interface that is down must be told of where there is no other, by the project's own promise, doubled for busy
/// machines.
const SOON: Duration = Duration::from_secs(10);
/// Steps that are not over before the interface is down: four seconds' worth of pretended computation at least.
const LONG: &[&str] = &["--steps", "2000", "--compute-ms", "2"];
const ENDLESS: &[&str] = &["--steps", "100000", "--compute-ms", "1"];

fn hub(network: &Network) -> Process {
    let arguments = ["hub", "--listen", "0.0.0.0:7771", "--cores", "4", "--manager", "10.77.8.100:7770"];
    let hub = paramhub(arguments.into_iter().chain(["--admin-token", TOKEN])).inside(network.hub()).start();
    hub.wait_for("hub ready: ");
    hub
}

fn ask<T: Send>(network: &Network, ask: impl FnOnce(ManagerClient) -> T + Send) -> T {
    network.within_hub(|| ask(ManagerClient::new("10.77.8.100:7770", Some(TOKEN.into())).unwrap()))
}

/// A job that goes on, of one worker on each host.
fn job(network: &Network, name: &str, arguments: &[&str]) -> Vec<Process> {
    let options = JobOptions {
        // Silence alone would take far longer than any test waits.
        dead_after_s: 300.0,
        on_interface_down: OnInterfaceDown::Continue,
        ..Default::default()
    };
    let request = CreateService { name: name.into(), workers: WORKERS as u32, options };
    let created = ask(network, |client| client.create_service(&request)).unwrap();
    let start = |rank: usize| {
        example("exchange", arguments.iter().copied())
            .env("PARAMHUB_URL", "http://10.77.8.100:7770")
            .env("PARAMHUB_JOB", &created.namespace.to_string())
            .env("PARAMHUB_SECRET", &String::from(created.nonce))
            .env("RANK", &rank.to_string())
            .inside(network.worker(rank))
            .start()
    };
    let workers: Vec<Process> = (0..WORKERS).map(start).collect();
    workers.iter().for_each(|worker| drop(worker.wait_for("exchanges 3 keys")));
    workers
}

/// What each worker said at its good end.
fn finish(workers: Vec<Process>) -> Vec<String> {
    workers.into_iter().map(|worker| worker.finish().expect_code(0).stdout).collect()
}

/// Waits until the hub says of every rank that it goes on over an interface.
fn everybody_moves(hub: &Process, job: &str, over: &str) {
    wait_until("streams move", || {
        let said = hub.stderr();
        (0..WORKERS).all(|rank| said.contains(&format!("rank {rank} of job `{job}` goes on over {over}")))
    });
}

fn streams_moved(said: &str) -> u32 {
    let (before, _) = said.split_once(" streams moved").expect("it is said");
    before.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn a_job_goes_on_when_a_hubs_interface_goes_down_and_ends_at_the_same_bits() {
    let Some(network) = Network::raise("resume-hub") else { return };
    let hub = hub(&network);
    let digest = [LONG, &["--digest"]].concat();
    let line = |said: &String| said.lines().find(|line| line.starts_with("digest ")).unwrap().to_owned();

    let undisturbed = finish(job(&network, "undisturbed", &digest));
    assert!(undisturbed.iter().all(|said| streams_moved(said) == 0), "{undisturbed:?}");

    let workers = job(&network, "cut", &digest);
    network.switch_hub("eth1", "down");
    everybody_moves(&hub, "cut", "eth0 (10.77.8.100:7771)");
    let cut = finish(workers);
    assert!(cut.iter().all(|said| streams_moved(said) >= 2), "both cores of it: {cut:?}");
    for said in &cut {
        assert_eq!(line(said), line(&undisturbed[0]));
    }
    let said = hub.stderr();
    assert!(said.contains("the hub's interface eth1 (10.77.9.100) is down: it was switched off"), "{said}");
    let status = ask(&network, |client| client.job("cut")).unwrap();
    assert_eq!(status.state, JobState::Finished);
    assert_eq!(status.counters.streams_moved, 4, "two workers at two cores");
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
}

#[test]
fn a_job_goes_on_as_often_as_an_interface_is_left() {
    let Some(network) = Network::raise("resume-twice") else { return };
    let hub = hub(&network);
    let workers = job(&network, "twice", ENDLESS);
    network.switch_hub("eth1", "down");
    everybody_moves(&hub, "twice", "eth0");
    network.switch_hub("eth1", "up");
    wait_until("the hub sees it again", || hub.stderr().contains("eth1 (10.77.9.100:7771) is back"));
    network.switch_hub("eth0", "down");
    everybody_moves(&hub, "twice", "eth1");
    network.switch_hub("eth0", "up");
    let counters = || ask(&network, |client| client.job("twice")).unwrap().counters;
    let before = counters();
    wait_until("it goes on", || counters().updates > before.updates + 1000);
    let moved = counters().streams_moved;
    assert!(moved >= 12, "half of the streams, then all of them: {moved}");
    ask(&network, |client| client.stop_job("twice")).unwrap();
    for worker in workers {
        // They check every number of every step, and would have said so.
        let error = worker.finish().expect_code(1).stderr;
        assert!(error.contains("stopped"), "{error}");
    }
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
}

#[test]
fn a_job_goes_on_when_a_workers_interface_goes_down() {
    let Some(network) = Network::raise("resume-worker") else { return };
    let hub = hub(&network);
    let workers = job(&network, "cut", LONG);
    network.unplug_worker(1, "eth1");
    wait_until("streams move", || hub.stderr().contains("rank 1 of job `cut` goes on over "));
    let said = finish(workers);
    assert!(said.iter().all(|said| said.contains("all numbers right")), "{said:?}");
    assert_eq!(streams_moved(&said[0]), 0, "the other rank is not concerned");
    assert!(streams_moved(&said[1]) >= 2, "{said:?}");
    let told = "its interface eth1 (10.77.3.1) is down: it has lost its carrier";
    assert!(said[1].contains("notice: rank 1 goes on over ") && said[1].contains(told), "{said:?}");

    // Those that leave by the first interface, with the second mended.
    network.switch_port_of_worker(1, "eth1", "up");
    let workers = job(&network, "again", LONG);
    network.unplug_worker(1, "eth0");
    let said = finish(workers);
    assert!(said[1].contains("all numbers right") && streams_moved(&said[1]) >= 2, "{said:?}");
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
}

#[test]
fn a_job_without_another_interface_fails_with_the_name_of_the_last() {
    let Some(network) = Network::raise("resume-none") else { return };
    let hub = hub(&network);
    let mut workers = job(&network, "worker-gone", ENDLESS);
    let began = Instant::now();
    network.unplug_worker(1, "eth0");
    network.unplug_worker(1, "eth1");
    let error = workers.remove(1).finish().expect_code(1).stderr;
    assert!(error.contains("job `worker-gone`, rank 1: this worker's interface eth"), "{error}");
    assert!(
        error.contains("is down: it has lost its carrier; no other that leads to a hub is left"),
        "{error}"
    );
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    println!("the worker said so after {:?}", began.elapsed());
    drop(workers);
    ask(&network, |client| client.stop_job("worker-gone")).unwrap();
    network.switch_port_of_worker(1, "eth0", "up");
    network.switch_port_of_worker(1, "eth1", "up");

    let workers = job(&network, "hub-gone", ENDLESS);
    let began = Instant::now();
    network.switch_hub("eth1", "down");
    network.switch_hub("eth0", "down");
    wait_until("the manager hears of it", || {
        let status = ask(&network, |client| client.job("hub-gone")).unwrap();
        status.state == JobState::Failed
            && status.message.contains("the hub's interface eth")
            && status.message.contains("no other of its interfaces is left")
    });
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    println!("the hub said so after {:?}", began.elapsed());
    for worker in workers {
        let error = worker.finish().expect_code(1).stderr;
        assert!(error.contains("lost the hub at") && error.contains("nothing was heard of it"), "{error}");
    }
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
}

#[test]
fn what_cannot_be_resumed_exactly_is_refused() {
    let Some(network) = Network::raise("resume-not") else { return };
    let hub = hub(&network);
    let options = JobOptions { on_interface_down: OnInterfaceDown::Continue, ..Default::default() };
    let hasty = JobOptions { dead_after_s: 5.0, ..options };
    let request = CreateService { name: "hasty".into(), workers: 1, options: hasty };
    let refused = ask(&network, |client| client.create_service(&request)).unwrap_err().to_string();
    assert!(refused.contains("set dead_after_s to 15 or more"), "{refused}");

    let request = CreateService { name: "stale".into(), workers: 1, options };
    let created = ask(&network, |client| client.create_service(&request)).unwrap();
    let ended = example("exchange", ["--consistency", "async"])
        .env("PARAMHUB_URL", "http://10.77.8.100:7770")
        .env("PARAMHUB_JOB", &created.namespace.to_string())
        .env("PARAMHUB_SECRET", &String::from(created.nonce))
        .env("RANK", "0")
        .inside(network.worker(0))
        .finish()
        .expect_code(1);
    assert!(ended.stderr.contains("only if it is synchronous and its steps have one phase"), "{ended:?}");
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
}
