//! Two tenants on one hub, on hosts of their own: whatever happens to one, the other's numbers and its end are unharmed.

use std::io::{Read, Write};
use std::net::TcpStream;

use rustix::process::Signal;

use crate::common::cluster::{Cluster, HostRole};
use crate::common::{Process, wait_until};

/// A hub, two hosts of one tenant, and two of the other.
const HOST_ROLES: [HostRole; 5] = [
    HostRole::HUB,
    HostRole::workers("", 2),
    HostRole::workers("", 2),
    HostRole::workers("", 1),
    HostRole::workers("", 1),
];
const HUB: usize = 0;
/// The roles of the steady tenant's workers, which must not be affected.
const STEADY: [usize; 4] = [1, 1, 2, 2];
/// The roles of the troubled tenant's workers.
const TROUBLED: [usize; 2] = [3, 4];

/// Starts the troubled tenant's next job and waits until it exchanges.
fn troubled(cluster: &Cluster, name: &str, more: &[&str]) -> Vec<Process> {
    let arguments = ["--steps", "100000"];
    let workers =
        cluster.start_job_at(&TROUBLED.map(|role| (role, &arguments[..])), &[&[name], more].concat());
    workers.iter().for_each(|worker| drop(worker.wait_for("exchanges 3 keys")));
    workers
}

fn is_running(cluster: &Cluster, job: &str) -> bool {
    cluster.operate(&["jobs", "show", job, "--json"]).contains("\"running\"")
}

/// Sends bytes that are not of the protocol, and returns when the hub has closed the connection.
fn send_garbage(address: &str) {
    let mut stream = TcpStream::connect(address).expect("the hub accepts all connections");
    // The write fails if the hub closes the connection before it has read all.
    let _ = stream.write_all(&[0xA5; 100_000]);
    let _ = stream.read_to_end(&mut Vec::new());
}

#[test]
fn the_failures_of_one_tenant_do_not_affect_the_other() {
    let Some(cluster) = Cluster::start(&HOST_ROLES) else { return };
    // Each worker checks every number of every step.
    let steady_arguments = ["--steps", "1000", "--compute-ms", "4"];
    let steady = cluster.start_job_at(&STEADY.map(|role| (role, &steady_arguments[..])), &["steady"]);
    steady.iter().for_each(|worker| drop(worker.wait_for("exchanges 3 keys")));

    // A worker is killed.
    let mut workers = troubled(&cluster, "killed", &[]);
    workers[1].signal(Signal::KILL);
    let message = workers.remove(0).finish().expect_code(1).stderr;
    assert!(message.contains("rank 1 was lost"), "{message}");

    // One leaves while the other needs it.
    let [first, second] = TROUBLED;
    let ranks = [(first, &["--steps", "100000"][..]), (second, &["--steps", "3"])];
    let mut workers = cluster.start_job_at(&ranks, &["unlike-steps"]);
    let message = workers.remove(0).finish().expect_code(1).stderr;
    assert!(message.contains("rank 1 left the job, but other ranks wait"), "{message}");

    // The workers do not agree on what to exchange.
    let ranks = [(first, &["--elements", "1000,10"][..]), (second, &["--elements", "1000,11"])];
    for worker in cluster.start_job_at(&ranks, &["unlike-keys"]) {
        let message = worker.finish().expect_code(1).stderr;
        assert!(message.contains("do not want the same"), "{message}");
    }

    // One is frozen with its host's cable pulled, while bytes that are not of the protocol come from the
    // other's host.
    let mut workers = troubled(&cluster, "frozen", &["--dead-after", "1"]);
    workers[1].signal(Signal::STOP);
    cluster.host(second).pull_the_cable();
    let hub = cluster.address(HUB);
    cluster.host(first).namespace().within(|| (0..20).for_each(|_| send_garbage(&hub)));
    let message = workers.remove(0).finish().expect_code(1).stderr;
    assert!(message.contains("rank 1 was lost: it has not been heard for 1 s"), "{message}");
    drop(workers);

    assert!(is_running(&cluster, "steady"), "it was to be there all the time: give it more steps");
    for worker in steady {
        let ended = worker.finish().expect_code(0);
        assert!(ended.stdout.contains("all numbers right") && !ended.stdout.contains("notice"), "{ended:?}");
    }
    wait_until("the manager shows its end", || {
        cluster.operate(&["jobs", "show", "steady", "--json"]).contains("\"finished\"")
    });
    let log = cluster.hub(HUB).stderr();
    assert!(log.contains("the first bytes are not paramhub's"), "{log}");
}
