//! Two tenants on one hub, on hosts of their own: whatever happens to one, the other's numbers and its end are unharmed.

use std::io::{Read, Write};
use std::net::TcpStream;

use rustix::process::Signal;

use crate::common::cluster::{Cluster, Station};
use crate::common::{Process, wait_until};

/// A hub, two hosts of one tenant, and two of the other.
const STATIONS: [Station; 5] = [
    Station::HUB,
    Station::workers("", 2),
    Station::workers("", 2),
    Station::workers("", 1),
    Station::workers("", 1),
];
const HUB: usize = 0;
/// The stations of the steady tenant's workers, which must not be affected.
const STEADY: [usize; 4] = [1, 1, 2, 2];
/// The stations of the troubled tenant's workers.
const TROUBLED: [usize; 2] = [3, 4];

/// Starts the troubled tenant's next job and waits until it exchanges.
fn troubled(cluster: &Cluster, name: &str, more: &[&str]) -> Vec<Process> {
    let arguments = ["--steps", "100000"];
    let workers =
        cluster.start_job_at(&TROUBLED.map(|station| (station, &arguments[..])), &[&[name], more].concat());
    workers.iter().for_each(|worker| drop(worker.wait_for("exchanges 3 keys")));
    workers
}

fn is_running(cluster: &Cluster, job: &str) -> bool {
    cluster.operate(&["jobs", "show", job, "--json"]).contains("\"running\"")
}

/// Sends bytes that are not of the protocol, and returns when the hub has closed the connection.
fn talk_nonsense(address: &str) {
    let mut stream = TcpStream::connect(address).expect("the hub listens to everybody");
    // The write fails if the hub closes the connection before it has read all.
    let _ = stream.write_all(&[0xA5; 100_000]);
    let _ = stream.read_to_end(&mut Vec::new());
}

#[test]
fn what_happens_to_one_tenant_is_nothing_to_the_other() {
    let Some(cluster) = Cluster::start(&STATIONS) else { return };
    // Each worker checks every number of every step.
    let steady_arguments = ["--steps", "1000", "--compute-ms", "4"];
    let steady = cluster.start_job_at(&STEADY.map(|station| (station, &steady_arguments[..])), &["steady"]);
    steady.iter().for_each(|worker| drop(worker.wait_for("exchanges 3 keys")));

    // A worker is killed.
    let mut workers = troubled(&cluster, "killed", &[]);
    workers[1].signal(Signal::KILL);
    let told = workers.remove(0).finish().expect_code(1).stderr;
    assert!(told.contains("rank 1 was lost"), "{told}");

    // One leaves while the other needs it.
    let [first, second] = TROUBLED;
    let seats = [(first, &["--steps", "100000"][..]), (second, &["--steps", "3"])];
    let mut workers = cluster.start_job_at(&seats, &["unlike-steps"]);
    let told = workers.remove(0).finish().expect_code(1).stderr;
    assert!(told.contains("rank 1 left the job, but other ranks wait"), "{told}");

    // The workers do not agree on what to exchange.
    let seats = [(first, &["--elements", "1000,10"][..]), (second, &["--elements", "1000,11"])];
    for worker in cluster.start_job_at(&seats, &["unlike-keys"]) {
        let told = worker.finish().expect_code(1).stderr;
        assert!(told.contains("do not want the same"), "{told}");
    }

    // One is frozen with its host's cable pulled, while bytes that are not of the protocol come from the
    // other's host.
    let mut workers = troubled(&cluster, "frozen", &["--dead-after", "1"]);
    workers[1].signal(Signal::STOP);
    cluster.host(second).pull_the_cable();
    let hub = cluster.address(HUB);
    cluster.host(first).namespace().within(|| (0..20).for_each(|_| talk_nonsense(&hub)));
    let told = workers.remove(0).finish().expect_code(1).stderr;
    assert!(told.contains("rank 1 was lost: it has not been heard for 1 s"), "{told}");
    drop(workers);

    assert!(is_running(&cluster, "steady"), "it was to be there all the time: give it more steps");
    for worker in steady {
        let ended = worker.finish().expect_code(0);
        assert!(ended.stdout.contains("all numbers right") && !ended.stdout.contains("notice"), "{ended:?}");
    }
    wait_until("the manager has heard of its end", || {
        cluster.operate(&["jobs", "show", "steady", "--json"]).contains("\"finished\"")
    });
    let said = cluster.hub(HUB).stderr();
    assert!(said.contains("the first bytes are not paramhub's"), "{said}");
}
