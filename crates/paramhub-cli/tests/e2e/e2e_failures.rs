//! Worker and hub processes that are killed, frozen or cut off in the middle of an exchange: the others are
//! notified in time which process is at fault, and nothing stays behind.

use std::time::{Duration, Instant};

use paramhub::ManagerClient;
use paramhub::service::{CreateService, JobOptions, JobState};
use rustix::process::Signal;

use crate::common::{Process, example, hub, wait_until};

/// The time within which a death must be reported: the project's own promise, doubled for busy machines.
const SOON: Duration = Duration::from_secs(10);

struct Job {
    client: ManagerClient,
    name: String,
    workers: Vec<Process>,
}

/// A loss is noticed and reported alike over each transport.
const TRANSPORTS: [&str; 2] = ["tcp", "shm"];

/// A job of the example's workers, one process each, all of which exchange over this transport. The job's
/// name ends with the transport's.
fn job(url: &str, name: &str, transport: &str, workers: u32, dead_after_s: f64, arguments: &[&str]) -> Job {
    let name = format!("{name}-{transport}");
    let client = ManagerClient::new(url, None).unwrap();
    let options = JobOptions { dead_after_s, ..Default::default() };
    let created = client.create_service(&CreateService { name: name.clone(), workers, options }).unwrap();
    let workers: Vec<Process> = (0..workers)
        .map(|rank| {
            example("exchange", arguments.iter().copied())
                .env("PARAMHUB_URL", url)
                .env("PARAMHUB_JOB", &created.namespace.to_string())
                .env("PARAMHUB_SECRET", &String::from(created.secret()))
                .env("PARAMHUB_TRANSPORT", transport)
                .env("RANK", &rank.to_string())
                .start()
        })
        .collect();
    for worker in &workers {
        worker.wait_for("exchanges 3 keys");
    }
    Job { client, name, workers }
}

/// More steps than any test allows, with the exchange nearly always under way.
const ENDLESS: &[&str] = &["--steps", "100000", "--compute-ms", "1"];

impl Job {
    fn await_failure(&self, part: &str) {
        wait_until("the manager shows it", || {
            let status = self.client.job(&self.name).unwrap();
            status.state == JobState::Failed && status.message.contains(part)
        });
    }
}

#[test]
fn real_processes_exchange_under_each_consistency() {
    let (hub, url) = hub(["--cores", "2"]);
    for transport in TRANSPORTS {
        for consistency in ["sync", "async", "staleness:2"] {
            let name = consistency.split(':').next().unwrap();
            let arguments = ["--steps", "40", "--consistency", consistency];
            for worker in job(&url, name, transport, 3, 30.0, &arguments).workers {
                let ended = worker.finish().expect_code(0);
                assert!(ended.stdout.contains("all numbers right"), "{transport}, {consistency}: {ended:?}");
            }
        }
    }
    drop(hub);
}

#[test]
fn a_worker_killed_in_mid_step_is_named_to_the_others() {
    for transport in TRANSPORTS {
        let (_hub, url) = hub(["--cores", "2"]);
        let bystanders =
            job(&url, "bystanders", transport, 2, 30.0, &["--steps", "60", "--compute-ms", "20"]);
        let mut victims = job(&url, "victims", transport, 3, 30.0, ENDLESS);
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
}

/// The number of a process's descriptors, and the bytes of shared memory in it.
fn holdings(process: &Process) -> (usize, u64) {
    let pid = process.pid().as_raw_nonzero();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let shared = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
    let kib: u64 = shared.trim().strip_suffix(" kB").unwrap().parse().unwrap();
    (std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count(), kib << 10)
}

#[test]
fn memory_that_killed_workers_shared_with_their_hub_is_given_back() {
    let (hub, url) = hub(["--cores", "2"]);
    // Memory that remains after a first job is the hub's own.
    for worker in job(&url, "first", "shm", 2, 30.0, &["--steps", "2"]).workers {
        worker.finish().expect_code(0);
    }
    let bystanders = job(&url, "bystanders", "shm", 2, 30.0, ENDLESS);
    // Waits until all memory that the bystanders share has been touched.
    let settled = |process: &Process| {
        let mut last = (0, 0);
        wait_until("the hub's holdings come to rest", || {
            std::thread::sleep(Duration::from_millis(300));
            std::mem::replace(&mut last, holdings(process)) == holdings(process)
        });
        last
    };
    let before = settled(&hub);
    let elements = 1_000_000;
    let sizes = format!("{elements},10,10");
    let arguments = ["--elements", &sizes, "--steps", "100000"];
    for (round, killed) in [&[1][..], &[0], &[0, 1, 2]].into_iter().enumerate() {
        let mut victims = job(&url, &format!("victims{round}"), "shm", 3, 30.0, &arguments);
        // For each victim, the gradient and the parameters, and two rings and a socket to each core.
        wait_until("the victims share their memory", || {
            let (descriptors, bytes) = holdings(&hub);
            descriptors >= before.0 + 3 * 5 && bytes >= before.1 + 3 * 2 * 4 * elements
        });
        for &rank in killed {
            victims.workers[rank].signal(Signal::KILL);
        }
        for (rank, worker) in victims.workers.drain(..).enumerate() {
            let ended = worker.finish();
            if !killed.contains(&rank) {
                let lost = format!("rank {} was lost", killed[0]);
                assert!(ended.code == 1 && ended.stderr.contains(&lost), "{ended:?}");
            }
        }
        victims.await_failure("was lost");
        wait_until("the hub has given everything back", || holdings(&hub) == before);
    }
    for worker in &bystanders.workers {
        assert!(crate::common::is_alive(worker.pid().as_raw_nonzero().get()));
    }
    assert!(!bystanders.client.job(&bystanders.name).unwrap().state.has_ended());
}

#[test]
fn a_frozen_worker_is_named_and_then_given_up() {
    for transport in TRANSPORTS {
        let (hub, url) = hub([]);
        let mut job = job(&url, "frozen", transport, 2, 6.0, ENDLESS);
        let frozen = job.workers.remove(1);
        frozen.signal(Signal::STOP);
        // The silent rank is named first, at rank 0 and in the hub's log, while the job still waits.
        let silent = format!("rank 1 of job `frozen-{transport}` has not been heard");
        let notice = job.workers[0].wait_for("notice: ");
        assert!(notice.contains(&format!("{silent} for 3 s")), "{notice}");
        wait_until("the hub's log names it", || hub.stderr().contains(&silent));
        let ended = job.workers.remove(0).finish().expect_code(1);
        assert!(ended.stderr.contains("rank 1 was lost: it has not been heard for 6 s"), "{ended:?}");
        job.await_failure("rank 1 was lost");
        // Once it is resumed, the frozen worker finds out as well.
        frozen.signal(Signal::CONT);
        frozen.finish().expect_code(1);
    }
}

#[test]
fn a_worker_that_only_pauses_is_waited_for() {
    for transport in TRANSPORTS {
        let (_hub, url) = hub([]);
        let mut job = job(&url, "nap", transport, 2, 30.0, &["--steps", "400", "--compute-ms", "2"]);
        job.workers[1].signal(Signal::STOP);
        job.workers[0].wait_for(&format!("rank 1 of job `nap-{transport}` has not been heard"));
        job.workers[1].signal(Signal::CONT);
        for worker in job.workers.drain(..) {
            worker.finish().expect_code(0);
        }
    }
}

#[test]
fn a_long_computation_is_no_death() {
    let (hub, url) = hub([]);
    // The computing thread sleeps longer than the permitted silence; the I/O thread's heartbeats go on. Without
    // them the hub would give the workers up.
    let arguments = ["--steps", "1", "--compute-ms", "8000"];
    let jobs = TRANSPORTS.map(|transport| job(&url, "thinker", transport, 2, 3.0, &arguments));
    for worker in jobs.into_iter().flat_map(|job| job.workers) {
        worker.finish().expect_code(0);
    }
    assert!(!hub.stderr().contains("was lost"), "{}", hub.stderr());
}

#[test]
fn a_killed_hub_is_named_by_every_worker() {
    for transport in TRANSPORTS {
        let (hub, url) = hub(["--cores", "2"]);
        let mut job = job(&url, "hubless", transport, 2, 30.0, ENDLESS);
        let killed = Instant::now();
        hub.signal(Signal::KILL);
        for worker in job.workers.drain(..) {
            let ended = worker.finish().expect_code(1);
            assert!(ended.stderr.contains("lost the hub at 127.0.0.1:"), "{ended:?}");
        }
        assert!(killed.elapsed() < SOON, "it took {:?}", killed.elapsed());
    }
}

#[test]
fn a_hub_that_is_asked_to_stop_notifies_its_workers_and_exits_cleanly() {
    for (signal, transport) in [Signal::TERM, Signal::INT].into_iter().zip(TRANSPORTS) {
        let (hub, url) = hub([]);
        let mut job = job(&url, "hubless", transport, 2, 30.0, ENDLESS);
        hub.signal(signal);
        for worker in job.workers.drain(..) {
            let ended = worker.finish().expect_code(1);
            assert!(ended.stderr.contains("the hub is shutting down"), "{ended:?}");
        }
        hub.finish().expect_code(0);
    }
}
