//! Jobs that go on over the remaining interfaces: real processes, an interface that goes down in mid-run, and
//! numbers as without any failure.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use paramhub::ManagerClient;
use paramhub::service::{CreateService, JobOptions, JobState, OnInterfaceDown};
use paramhub_transport::dialling::dial_from;
use rustix::process::Signal;

use crate::common::rails::{Rails, WORKERS};
use crate::common::{Finished, Process, example, paramhub, wait_until};

const TOKEN: &str = "let-me-in";
/// The time within which an interface that is down must be reported if there is no other: the project's own
/// promise, doubled for busy machines.
const SOON: Duration = Duration::from_secs(10);
/// Enough steps that the interface goes down before they are over: at least four seconds of simulated
/// computation.
const LONG: &[&str] = &["--steps", "2000", "--compute-ms", "2"];
const ENDLESS: &[&str] = &["--steps", "100000", "--compute-ms", "1"];

fn hub(rails: &Rails) -> Process {
    let arguments = ["hub", "--listen", "0.0.0.0:7771", "--cores", "4", "--manager", "10.77.8.100:7770"];
    let hub = paramhub(arguments.into_iter().chain(["--admin-token", TOKEN])).inside(rails.hub()).start();
    hub.wait_for("hub ready: ");
    hub
}

fn ask<T: Send>(rails: &Rails, ask: impl FnOnce(ManagerClient) -> T + Send) -> T {
    rails.hub().within(|| ask(ManagerClient::new("10.77.8.100:7770", Some(TOKEN.into())).unwrap()))
}

/// A job of one worker on each host that continues when an interface goes down.
fn job(rails: &Rails, name: &str, arguments: &[&str]) -> Vec<Process> {
    let options = JobOptions {
        // The silence alone would be noticed far later than any test waits.
        dead_after_s: 300.0,
        on_interface_down: OnInterfaceDown::Continue,
        ..Default::default()
    };
    let request = CreateService { name: name.into(), workers: WORKERS as u32, options };
    let created = ask(rails, |client| client.create_service(&request)).unwrap();
    let start = |rank: usize| {
        example("exchange", arguments.iter().copied())
            .env("PARAMHUB_URL", "http://10.77.8.100:7770")
            .env("PARAMHUB_JOB", &created.namespace.to_string())
            .env("PARAMHUB_SECRET", &String::from(created.secret()))
            .env("RANK", &rank.to_string())
            .inside(rails.worker(rank))
            .start()
    };
    let workers: Vec<Process> = (0..WORKERS).map(start).collect();
    workers.iter().for_each(|worker| drop(worker.wait_for(" keys")));
    workers
}

/// Waits for the workers' success. Returns their output.
fn finish(workers: Vec<Process>) -> Vec<Finished> {
    workers.into_iter().map(|worker| worker.finish().expect_code(0)).collect()
}

/// Waits until the hub logs for every rank that it continues over an interface.
fn wait_until_all_ranks_move(hub: &Process, job: &str, over: &str) {
    wait_until("streams move", || {
        let log = hub.stderr();
        (0..WORKERS).all(|rank| log.contains(&format!("rank {rank} of job `{job}` goes on over {over}")))
    });
}

/// Reconnects a worker's cable, and waits until packets that leave by it arrive: kernels take a second or
/// more to use it again.
fn mend(rails: &Rails, rank: usize, interface: &str) {
    rails.switch_port_of_worker(rank, interface, "up");
    let number = if interface == "eth0" { 0 } else { 1 };
    let source = IpAddr::from([10, 77, 2 * rank as u8 + number, 1]);
    let hub = SocketAddr::from(([10, 77, 8 + number, 100], 7771));
    wait_until("the cable works again", || {
        rails.worker(rank).within(|| dial_from(Some(source), hub, Duration::from_secs(1)).is_ok())
    });
}

fn streams_moved(output: &str) -> u32 {
    let (before, _) = output.split_once(" streams moved").expect("it is said");
    before.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn a_job_goes_on_when_a_hubs_interface_goes_down_and_ends_at_the_same_bits() {
    let Some(rails) = Rails::lay() else { return };
    let hub = hub(&rails);
    // The gradients differ from rank to rank, so that sums depend on their order.
    let fractions = [LONG, &["--reproducible", "--seed", "7", "--save", "parameters"]].concat();
    // A repeated frame must equal the first, though the gradient's loss is in the residual already.
    let quantised = [&fractions[..], &["--codec", "one-bit"]].concat();
    // A block of factors is sent again whole, and its layer is answered again.
    let factors = [&fractions[..], &["--factors"]].concat();

    let undisturbed =
        [("undisturbed", &fractions), ("undisturbed-one-bit", &quantised), ("undisturbed-factors", &factors)];
    let undisturbed = undisturbed.map(|(name, arguments)| finish(job(&rails, name, arguments)));
    assert!(undisturbed.iter().flatten().all(|worker| streams_moved(&worker.stdout) == 0));

    let jobs = [("cut", &fractions), ("cut-one-bit", &quantised), ("cut-factors", &factors)];
    let workers = jobs.map(|(name, arguments)| job(&rails, name, arguments));
    rails.switch_hub("eth1", "down");
    jobs.iter().for_each(|(name, _)| wait_until_all_ranks_move(&hub, name, "eth0 (10.77.8.100:7771)"));
    for (workers, undisturbed) in workers.into_iter().zip(&undisturbed) {
        for worker in finish(workers) {
            assert!(streams_moved(&worker.stdout) >= 2, "both cores of it: {}", worker.stdout);
            assert!(
                worker.read("parameters") == undisturbed[0].read("parameters"),
                "other bits than undisturbed"
            );
        }
    }
    let log = hub.stderr();
    assert!(log.contains("the hub's interface eth1 (10.77.9.100) is down: it was switched off"), "{log}");
    let status = ask(&rails, |client| client.job("cut")).unwrap();
    assert_eq!(status.state, JobState::Finished);
    assert_eq!(status.counters.streams_moved, 4, "two workers at two cores");
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
}

#[test]
fn a_job_goes_on_as_often_as_an_interface_is_left() {
    let Some(rails) = Rails::lay() else { return };
    let hub = hub(&rails);
    let workers = job(&rails, "twice", ENDLESS);
    let counters = || ask(&rails, |client| client.job("twice")).unwrap().counters;
    // Each move is awaited while an interface is down: streams that receive again in time stay where they
    // are.
    rails.switch_hub("eth1", "down");
    wait_until_all_ranks_move(&hub, "twice", "eth0");
    wait_until("half of the streams have moved", || counters().streams_moved >= 4);
    rails.switch_hub("eth1", "up");
    wait_until("the hub sees it again", || hub.stderr().contains("eth1 (10.77.9.100:7771) is back"));
    rails.switch_hub("eth0", "down");
    wait_until_all_ranks_move(&hub, "twice", "eth1");
    wait_until("then all of them", || counters().streams_moved >= 12);
    rails.switch_hub("eth0", "up");
    let before = counters();
    wait_until("it goes on", || counters().updates > before.updates + 1000);
    ask(&rails, |client| client.stop_job("twice")).unwrap();
    for worker in workers {
        // The workers check every number of every step, and would have reported a wrong one.
        let error = worker.finish().expect_code(1).stderr;
        assert!(error.contains("stopped"), "{error}");
    }
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
}

#[test]
fn a_job_goes_on_when_a_workers_interface_goes_down() {
    let Some(rails) = Rails::lay() else { return };
    let hub = hub(&rails);
    let workers = job(&rails, "cut", LONG);
    rails.unplug_worker(1, "eth1");
    wait_until("streams move", || hub.stderr().contains("rank 1 of job `cut` goes on over "));
    let outputs: Vec<String> = finish(workers).into_iter().map(|worker| worker.stdout).collect();
    assert!(outputs.iter().all(|outputs| outputs.contains("all numbers right")), "{outputs:?}");
    assert_eq!(streams_moved(&outputs[0]), 0, "the other rank is not concerned");
    assert!(streams_moved(&outputs[1]) >= 2, "{outputs:?}");
    let reason = "its interface eth1 (10.77.3.1) is down: it has lost its carrier";
    assert!(
        outputs[1].contains("notice: rank 1 goes on over ") && outputs[1].contains(reason),
        "{outputs:?}"
    );

    // Now the streams that leave by the first interface, with the second repaired.
    mend(&rails, 1, "eth1");
    let workers = job(&rails, "again", LONG);
    rails.unplug_worker(1, "eth0");
    let outputs: Vec<String> = finish(workers).into_iter().map(|worker| worker.stdout).collect();
    assert!(outputs[1].contains("all numbers right") && streams_moved(&outputs[1]) >= 2, "{outputs:?}");
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
}

#[test]
fn a_job_without_another_interface_fails_with_the_name_of_the_last() {
    let Some(rails) = Rails::lay() else { return };
    let hub = hub(&rails);
    let mut workers = job(&rails, "worker-gone", ENDLESS);
    let began = Instant::now();
    rails.unplug_worker(1, "eth0");
    rails.unplug_worker(1, "eth1");
    let error = workers.remove(1).finish().expect_code(1).stderr;
    assert!(error.contains("job `worker-gone`, rank 1: this worker's interface eth"), "{error}");
    assert!(
        error.contains("is down: it has lost its carrier; no other that leads to a hub is left"),
        "{error}"
    );
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    println!("the worker named it after {:?}", began.elapsed());
    drop(workers);
    ask(&rails, |client| client.stop_job("worker-gone")).unwrap();
    mend(&rails, 1, "eth0");
    mend(&rails, 1, "eth1");

    let workers = job(&rails, "hub-gone", ENDLESS);
    let began = Instant::now();
    rails.switch_hub("eth1", "down");
    rails.switch_hub("eth0", "down");
    wait_until("the manager shows it", || {
        let status = ask(&rails, |client| client.job("hub-gone")).unwrap();
        status.state == JobState::Failed
            && status.message.contains("the hub's interface eth")
            && status.message.contains("no other of its interfaces is left")
    });
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    println!("the hub named it after {:?}", began.elapsed());
    for worker in workers {
        let error = worker.finish().expect_code(1).stderr;
        assert!(error.contains("lost the hub at") && error.contains("nothing was heard of it"), "{error}");
    }
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
}

#[test]
fn a_job_that_cannot_be_resumed_exactly_is_refused() {
    let Some(rails) = Rails::lay() else { return };
    let hub = hub(&rails);
    let options = JobOptions { on_interface_down: OnInterfaceDown::Continue, ..Default::default() };
    let hasty = JobOptions { dead_after_s: 5.0, ..options };
    let request = CreateService { name: "hasty".into(), workers: 1, options: hasty };
    let refused = ask(&rails, |client| client.create_service(&request)).unwrap_err().to_string();
    assert!(refused.contains("set dead_after_s to 15 or more"), "{refused}");

    let request = CreateService { name: "stale".into(), workers: 1, options };
    let created = ask(&rails, |client| client.create_service(&request)).unwrap();
    let ended = example("exchange", ["--consistency", "async"])
        .env("PARAMHUB_URL", "http://10.77.8.100:7770")
        .env("PARAMHUB_JOB", &created.namespace.to_string())
        .env("PARAMHUB_SECRET", &String::from(created.secret()))
        .env("RANK", "0")
        .inside(rails.worker(0))
        .finish()
        .expect_code(1);
    assert!(ended.stderr.contains("cannot be combined with asynchronous consistency"), "{ended:?}");
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
}
