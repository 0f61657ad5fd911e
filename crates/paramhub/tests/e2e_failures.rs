//! Worker and hub processes that are killed, frozen or cut off in the middle of an exchange: the others are told who is at
//! fault, in time, and nothing stays behind.

mod common;

use std::time::{Duration, Instant};

use common::{Process, example, hub, wait_until};
use paramhub::ManagerClient;
use paramhub::service::{CreateService, JobOptions, JobState};
use rustix::process::Signal;

/// How soon a death must be told, by the project's own promise, doubled for busy machines.
const SOON: Duration = Duration::from_secs(10);

struct Job {
    client: ManagerClient,
    name: String,
    workers: Vec<Process>,
}

/// A job of the example's workers, one process each, all of them exchanging.
fn job(url: &str, name: &str, workers: u32, dead_after_s: f64, arguments: &[&str]) -> Job {
    let client = ManagerClient::new(url, None).unwrap();
    let options = JobOptions { dead_after_s, ..Default::default() };
    let created = client.create_service(&CreateService { name: name.into(), workers, options }).unwrap();
    let workers: Vec<Process> = (0..workers)
        .map(|rank| {
            example("exchange", arguments.iter().copied())
                .env("PARAMHUB_URL", url)
                .env("PARAMHUB_JOB", &created.namespace.to_string())
                .env("PARAMHUB_SECRET", &String::from(created.nonce))
                .env("RANK", &rank.to_string())
                .start()
        })
        .collect();
    for worker in &workers {
        worker.wait_for("exchanges 3 keys");
    }
    Job { client, name: name.to_owned(), workers }
}

/// More steps than any test lets happen, with the exchange nearly always under way.
const ENDLESS: &[&str] = &["--steps", "100000", "--compute-ms", "1"];

impl Job {
    fn await_failure(&self, part: &str) {
        wait_until("the manager hears of it", || {
            let status = self.client.job(&self.name).unwrap();
            status.state == JobState::Failed && status.message.contains(part)
        });
    }
}

#[test]
fn real_processes_exchange_under_each_consistency() {
    let (hub, url) = hub(["--cores", "2"]);
    for consistency in ["sync", "async", "staleness:2"] {
        let job = job(
            &url,
            consistency.split(':').next().unwrap(),
            3,
            30.0,
            &["--steps", "40", "--consistency", consistency],
        );
        for worker in job.workers {
            let ended = worker.finish().expect_code(0);
            assert!(ended.stdout.contains("all numbers right"), "{consistency}: {ended:?}");
        }
    }
    drop(hub);
}

#[test]
fn a_worker_killed_in_mid_step_is_named_to_the_others() {
    let (_hub, url) = hub(["--cores", "2"]);
    let bystanders = job(&url, "bystanders", 2, 30.0, &["--steps", "60", "--compute-ms", "20"]);
    let mut victims = job(&url, "victims", 3, 30.0, ENDLESS);
    let killed = Instant::now();
    victims.workers.remove(1).signal(Signal::KILL);
    for worker in victims.workers.drain(..) {
        let ended = worker.finish().expect_code(1);
        assert!(ended.stderr.contains("rank 1 was lost"), "{ended:?}");
    }
    assert!(killed.elapsed() < SOON, "it took {:?}", killed.elapsed());
    victims.await_failure("rank 1 was lost");
    for worker in bystanders.workers {
        worker.finish().expect_code(0);
    }
}

#[test]
fn a_frozen_worker_is_named_and_then_given_up() {
    let (hub, url) = hub([]);
    let mut job = job(&url, "frozen", 2, 6.0, ENDLESS);
    let frozen = job.workers.remove(1);
    frozen.signal(Signal::STOP);
    // Named first, at rank 0 and in the hub's log, while the job still waits.
    let notice = job.workers[0].wait_for("notice: ");
    assert!(notice.contains("rank 1 of job `frozen` has not been heard for 3 s"), "{notice}");
    wait_until("the hub's log names it", || {
        hub.stderr().contains("rank 1 of job `frozen` has not been heard")
    });
    let ended = job.workers.remove(0).finish().expect_code(1);
    assert!(ended.stderr.contains("rank 1 was lost: it has not been heard for 6 s"), "{ended:?}");
    job.await_failure("rank 1 was lost");
    // Thawed, it finds out as well.
    frozen.signal(Signal::CONT);
    frozen.finish().expect_code(1);
}

#[test]
fn a_worker_that_only_naps_is_waited_for() {
    let (_hub, url) = hub([]);
    let mut job = job(&url, "nap", 2, 30.0, &["--steps", "400", "--compute-ms", "2"]);
    job.workers[1].signal(Signal::STOP);
    job.workers[0].wait_for("rank 1 of job `nap` has not been heard");
    job.workers[1].signal(Signal::CONT);
    for worker in job.workers.drain(..) {
        worker.finish().expect_code(0);
    }
}

#[test]
fn a_long_computation_is_no_death() {
    let (hub, url) = hub([]);
    // The computing thread sleeps longer than the silence that kills; the I/O thread's heartbeats go on.
    let mut job = job(&url, "thinker", 2, 1.5, &["--steps", "2", "--compute-ms", "3500"]);
    for worker in job.workers.drain(..) {
        worker.finish().expect_code(0);
    }
    assert!(!hub.stderr().contains("not been heard"), "{}", hub.stderr());
}

#[test]
fn a_killed_hub_is_told_by_every_worker() {
    let (hub, url) = hub(["--cores", "2"]);
    let mut job = job(&url, "hubless", 2, 30.0, ENDLESS);
    let killed = Instant::now();
    hub.signal(Signal::KILL);
    for worker in job.workers.drain(..) {
        let ended = worker.finish().expect_code(1);
        assert!(ended.stderr.contains("lost the hub at 127.0.0.1:"), "{ended:?}");
    }
    assert!(killed.elapsed() < SOON, "it took {:?}", killed.elapsed());
}

#[test]
fn a_hub_that_is_asked_to_stop_tells_its_workers_and_exits_cleanly() {
    for signal in [Signal::TERM, Signal::INT] {
        let (hub, url) = hub([]);
        let mut job = job(&url, "told", 2, 30.0, ENDLESS);
        hub.signal(signal);
        for worker in job.workers.drain(..) {
            let ended = worker.finish().expect_code(1);
            assert!(ended.stderr.contains("the hub is shutting down"), "{ended:?}");
        }
        hub.finish().expect_code(0);
    }
}
