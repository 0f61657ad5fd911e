//! Connection managers in processes of their own that share a real etcd, which PATH must have: their leader is killed,
//! frozen and stopped. This is a program of its own because it needs the feature `etcd`.

#[path = "../e2e/common/mod.rs"]
mod common;
#[path = "../../../paramhub-manager/tests/etcd/server.rs"]
mod server;

use std::time::{Duration, Instant};

use paramhub::ManagerClient;
use paramhub::service::{CreateService, JobState};
use rustix::process::Signal;

use common::{Process, WAIT_TIMEOUT, example, free_address, paramhub, wait_until};
use server::EtcdServer;

/// Some managers that share an etcd, and a hub that has joined them.
struct Group {
    etcd: EtcdServer,
    addresses: Vec<String>,
    managers: Vec<Option<Process>>,
}

impl Group {
    fn start(count: usize) -> Group {
        let addresses = (0..count).map(|_| free_address()).collect();
        let managers = (0..count).map(|_| None).collect();
        let mut group = Group { etcd: EtcdServer::start(), addresses, managers };
        (0..count).for_each(|place| group.start_manager(place));
        group
    }

    fn start_manager(&mut self, place: usize) {
        let address = &self.addresses[place];
        let state = self.etcd.address("paramhub");
        let manager = paramhub(["manager", "--listen", address, "--state", &state]).start();
        manager.wait_for("manager ready: ");
        self.managers[place] = Some(manager);
    }

    /// The URLs of all.
    fn url(&self) -> String {
        self.addresses.iter().map(|address| format!("http://{address}")).collect::<Vec<_>>().join(",")
    }

    fn client(&self) -> ManagerClient {
        ManagerClient::new(&self.url(), None).unwrap().with_retry_timeout(WAIT_TIMEOUT)
    }

    fn hub(&self) -> Process {
        let hub = paramhub(["hub", "--listen", "127.0.0.1:0", "--join", &self.url()]).start();
        hub.wait_for("hub ready: ");
        hub
    }

    fn manager(&self, place: usize) -> &Process {
        self.managers[place].as_ref().expect("it runs")
    }

    /// Waits until one of those that run and are asked leads.
    fn leader(&self, asked: impl Fn(usize) -> bool) -> usize {
        let mut found = None;
        wait_until("one manager leads", || {
            let running = (0..self.addresses.len()).filter(|&place| self.managers[place].is_some());
            let leaders: Vec<usize> = running
                .filter(|&place| asked(place) && health(&self.addresses[place]) == "ok, leads")
                .collect();
            assert!(leaders.len() <= 1, "{leaders:?} lead");
            found = leaders.first().copied();
            found.is_some()
        });
        found.expect("just found")
    }

    /// Kills a manager.
    fn kill(&mut self, place: usize) {
        let manager = self.managers[place].take().expect("it runs");
        manager.signal(Signal::KILL);
        manager.finish();
    }
}

fn health(address: &str) -> String {
    use std::io::{Read, Write};
    let ask = || -> std::io::Result<String> {
        let mut stream = std::net::TcpStream::connect(address)?;
        stream.set_read_timeout(Some(WAIT_TIMEOUT))?;
        stream.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer = ask().unwrap_or_default();
    answer.rsplit("\r\n").next().unwrap_or_default().trim_end().to_owned()
}

/// Two workers of the example, which check every number that comes back.
fn start_job(client: &ManagerClient, name: &str, arguments: &[&str]) -> Vec<Process> {
    let request = CreateService { name: name.into(), workers: 2, options: Default::default() };
    let created = client.create_service(&request).unwrap();
    let worker = |rank: u32| {
        example("exchange", arguments.iter().copied())
            .env("PARAMHUB_URL", client.url())
            .env("PARAMHUB_JOB", &created.namespace.to_string())
            .env("PARAMHUB_SECRET", &String::from(created.secret()))
            .env("RANK", &rank.to_string())
            .start()
    };
    (0..2).map(worker).collect()
}

fn run_job(client: &ManagerClient, name: &str) {
    for worker in start_job(client, name, &["--steps", "20"]) {
        worker.finish().expect_code(0);
    }
    wait_until("the job has finished", || client.job(name).unwrap().state == JobState::Finished);
}

#[test]
fn a_running_job_ends_as_undisturbed_although_its_leader_is_killed() {
    let mut group = Group::start(2);
    let (client, hub) = (group.client(), group.hub());
    let workers = start_job(&client, "running", &["--steps", "4000", "--compute-ms", "1"]);
    workers.iter().for_each(|worker| drop(worker.wait_for("exchanges 3 keys")));
    let killed = group.leader(|_| true);
    group.kill(killed);
    for worker in workers {
        let ended = worker.finish().expect_code(0);
        assert!(!ended.stderr.contains("manager"), "a worker talks to its hubs alone: {}", ended.stderr);
    }
    assert_eq!(group.leader(|_| true), 1 - killed);
    wait_until("the job has finished", || client.job("running").unwrap().state == JobState::Finished);
    assert_eq!(client.hubs().unwrap().len(), 1);
    run_job(&client, "after");
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
}

#[test]
fn a_job_runs_on_while_ten_leaders_are_killed() {
    let mut group = Group::start(3);
    let (client, hub) = (group.client(), group.hub());
    let workers = start_job(&client, "running", &["--steps", "1000000", "--compute-ms", "1"]);
    workers.iter().for_each(|worker| drop(worker.wait_for("exchanges 3 keys")));
    for round in 0..10 {
        let killed = group.leader(|_| true);
        group.kill(killed);
        group.leader(|_| true);
        group.start_manager(killed);
        let job = client.job("running").unwrap();
        assert_eq!(job.state, JobState::Running, "round {round}: {}", job.message);
    }
    run_job(&client, "beside");
    let stopped = client.stop_job_because("running", "it has run long enough").unwrap();
    assert!(stopped.message.contains("it has run long enough"), "{}", stopped.message);
    for worker in workers {
        let ended = worker.finish().expect_code(1);
        assert!(ended.stderr.contains("it has run long enough"), "{}", ended.stderr);
    }
    assert!(!hub.stderr().contains("has forgotten this hub"), "{}", hub.stderr());
}

#[test]
fn a_leader_that_was_frozen_follows_when_it_wakes() {
    let group = Group::start(2);
    let (client, _hub) = (group.client(), group.hub());
    let frozen = group.leader(|_| true);
    let gathering = {
        let client = client.clone();
        let request = CreateService { name: "gathering".into(), workers: 2, options: Default::default() };
        client.create_service(&request).unwrap()
    };
    let worker = |rank: u32| {
        example("exchange", ["--steps", "20"])
            .env("PARAMHUB_URL", client.url())
            .env("PARAMHUB_JOB", &gathering.namespace.to_string())
            .env("PARAMHUB_SECRET", &String::from(gathering.secret()))
            .env("RANK", &rank.to_string())
            .start()
    };
    let early = worker(0);
    wait_until("rank 0 waits", || client.job("gathering").unwrap().connected == [0]);
    group.manager(frozen).signal(Signal::STOP);
    let next = group.leader(|place| place != frozen);
    assert_ne!(next, frozen);
    // The call that waits at the frozen manager is made again at the next one.
    worker(1).finish().expect_code(0);
    early.finish().expect_code(0);
    run_job(&client, "meanwhile");
    group.manager(frozen).signal(Signal::CONT);
    let follows = format!("ok, follows http://{}", group.addresses[next]);
    wait_until("it follows", || health(&group.addresses[frozen]) == follows);
    let log = group.manager(frozen).stderr();
    assert!(log.contains("does not lead any more"), "{log}");
    assert_eq!(group.leader(|_| true), next);
    for name in ["gathering", "meanwhile"] {
        assert_eq!(client.job(name).unwrap().state, JobState::Finished, "{name}");
    }
    run_job(&client, "after");
}

#[test]
fn jobs_start_while_their_leader_is_killed() {
    let mut group = Group::start(2);
    let (client, _hub) = (group.client(), group.hub());
    let exchange = std::path::Path::new(env!("CARGO_BIN_EXE_paramhub")).with_file_name("examples/exchange");
    let exchange = exchange.to_str().unwrap();
    // Once before the job is created, once while it gathers, and once while it begins, or thereabouts.
    for (round, pause_ms) in [0, 30, 90, 200, 400].into_iter().enumerate() {
        let killed = group.leader(|_| true);
        let name = format!("starting-{round}");
        let url = group.url();
        let arguments = ["run", "-n", "2", "--hub", &url, "--name", &name, "--", exchange, "--steps", "20"];
        let begun = Instant::now();
        let starting = paramhub(arguments).start();
        std::thread::sleep(Duration::from_millis(pause_ms));
        group.kill(killed);
        let ended = starting.finish();
        assert_eq!(ended.code, 0, "after {pause_ms} ms:\n{}\n{}", ended.stdout, ended.stderr);
        println!("the leader was killed after {pause_ms} ms, and the job took {:?}", begun.elapsed());
        group.start_manager(killed);
        wait_until("the job has finished", || client.job(&name).unwrap().state == JobState::Finished);
    }
}

#[test]
fn a_leader_that_is_stopped_hands_over_at_once() {
    let mut group = Group::start(2);
    let client = group.client();
    let first = group.leader(|_| true);
    client
        .create_service(&CreateService { name: "kept".into(), workers: 1, options: Default::default() })
        .unwrap();
    let stopping = group.managers[first].take().unwrap();
    stopping.signal(Signal::TERM);
    let ended = stopping.finish().expect_code(0);
    assert!(ended.stderr.contains("this connection manager leads"), "{}", ended.stderr);
    assert_eq!(group.leader(|_| true), 1 - first);
    assert_eq!(client.job("kept").unwrap().state, JobState::Connecting);
    let log = group.manager(1 - first).stderr();
    assert!(log.contains(&format!("follows the one at http://{}", group.addresses[first])), "{log}");
}

#[test]
fn what_is_wrong_with_the_address_of_etcd_is_said_without_its_password() {
    let refused = paramhub(["manager", "--state", "etcd://root:hunter2@127.0.0.1"]).finish().expect_code(2);
    assert!(
        refused.stderr.contains("no prefix") && refused.stderr.contains("etcd://HOST:PORT"),
        "{}",
        refused.stderr
    );
    assert!(!refused.stderr.contains("hunter2"), "{}", refused.stderr);
    let shown =
        paramhub(["manager", "--print-config", "--state", "etcd://root:hunter2@127.0.0.1/p"]).finish();
    assert!(shown.stdout.contains("state = \"etcd://root@127.0.0.1:2379/p\""), "{}", shown.stdout);
    let url = "etcd://root:hunter2@127.0.0.1/p";
    let hub = paramhub(["hub", "--state", url]).finish().expect_code(2);
    hub.expect_error(&["a hub's own connection manager keeps its state in a directory", "paramhub manager"]);
    let address = format!("etcd://root:hunter2@{}/p", free_address());
    let away = paramhub(["manager", "--listen", "127.0.0.1:0", "--state", &address]).finish().expect_code(1);
    let last = away.stderr.lines().last().unwrap_or_default();
    assert!(last.contains("cannot keep its state in etcd://root@127.0.0.1:"), "{last}");
    assert!(last.contains("etcd does not answer") && !away.stderr.contains("hunter2"), "{}", away.stderr);
}
