//! Hubs that join a manager in a process of its own, which starts later, is killed, comes back, forgets the
//! hubs or refuses them.

use paramhub_core::wire::VERSION;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use paramhub::ManagerClient;
use paramhub::service::{CreateService, JobState, RegisterHub};
use rustix::process::Signal;

use crate::common::{Process, WAIT_TIMEOUT, example, free_address, paramhub, wait_until};

const LOOPBACK: [&str; 2] = ["--listen", "127.0.0.1:0"];

fn manager(address: &str) -> Process {
    let manager = paramhub(["manager", "--listen", address]).start();
    manager.wait_for("manager ready: ");
    manager
}

fn client(address: &str) -> ManagerClient {
    ManagerClient::new(address, None).unwrap().with_retry_timeout(WAIT_TIMEOUT)
}

/// Two workers of the example, each of which exchanges until it is notified that the job is over.
fn endless_job(client: &ManagerClient, name: &str) -> Vec<Process> {
    let workers = start_job(client, name, &["--steps", "100000", "--compute-ms", "1"]);
    workers.iter().for_each(|worker| drop(worker.wait_for("exchanges 3 keys")));
    workers
}

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

#[test]
fn a_hub_joins_again_when_its_manager_was_killed_and_restarted() {
    let address = free_address();
    let url = format!("http://{address}");
    let first = manager(&address);
    let hub = paramhub(["hub", "--manager", &url].into_iter().chain(LOOPBACK)).start();
    hub.wait_for(&url);
    let client = client(&address);
    let workers = endless_job(&client, "before");

    first.signal(Signal::KILL);
    first.finish();
    wait_until("the hub has noticed", || hub.stderr().contains("no connection manager answers"));
    // An exchange needs no manager. The pause is long enough for the hub to poll several times.
    std::thread::sleep(Duration::from_secs(3));
    let second = manager(&address);
    wait_until("the hub has joined again", || client.hubs().unwrap().len() == 1);
    wait_until("the hub says that it is over", || hub.stderr().contains("answers again, after "));
    let log = hub.stderr();
    assert_eq!(
        log.matches("no connection manager answers").count(),
        1,
        "it is said once, however long it lasts: {log}"
    );
    assert_eq!(log.matches("answers again, after ").count(), 1, "{log}");
    assert!(hub.stderr().contains(&format!("joined {url} again, as hub 0")), "{}", hub.stderr());

    for worker in workers {
        let ended = worker.finish().expect_code(1);
        assert!(ended.stderr.contains("does not know this job any more: it restarted"), "{}", ended.stderr);
    }
    for worker in start_job(&client, "after", &["--steps", "20"]) {
        worker.finish().expect_code(0);
    }
    wait_until("the new job has finished", || client.job("after").unwrap().state == JobState::Finished);
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
    second.signal(Signal::TERM);
    second.finish().expect_code(0);
}

#[test]
fn jobs_outlive_a_manager_that_keeps_its_state() {
    let (address, scratch) = (free_address(), tempfile::tempdir().unwrap());
    let state = scratch.path().to_str().unwrap();
    let start = || {
        let manager = paramhub(["manager", "--listen", &address, "--state", state]).start();
        manager.wait_for("manager ready: ");
        manager
    };
    let kill = |manager: Process| {
        manager.signal(Signal::KILL);
        manager.finish();
    };
    let first = start();
    let hub = paramhub(["hub", "--join", &address].into_iter().chain(LOOPBACK)).start();
    hub.wait_for("hub ready: ");
    let client = client(&address);
    let state_of = |name: &str| client.job(name).unwrap().state;
    let running = endless_job(&client, "running");
    let mut ranks = start_job(&client, "gathering", &["--steps", "20"]).into_iter();
    // One rank waits for the other, which starts late.
    let (waiting, late) = (ranks.next().unwrap(), ranks.next().unwrap());
    late.signal(Signal::STOP);
    kill(first);
    wait_until("the hub has noticed", || hub.stderr().contains("no connection manager answers"));
    let second = start();
    wait_until("the hub has reported", || hub.stderr().contains("answers again, after "));
    // Jobs can begin, and others are still there.
    for worker in start_job(&client, "after", &["--steps", "20"]) {
        worker.finish().expect_code(0);
    }
    kill(second);
    let third = start();
    late.signal(Signal::CONT);
    for worker in [waiting, late] {
        worker.finish().expect_code(0);
    }
    for name in ["gathering", "after"] {
        wait_until("it is recorded", || state_of(name) == JobState::Finished);
    }
    assert_eq!(state_of("running"), JobState::Running);
    assert_eq!(client.hubs().unwrap()[0].hub, 0);
    // The manager that is there now ends a job that began under another.
    client.stop_job_because("running", "enough").unwrap();
    for worker in running {
        let ended = worker.finish().expect_code(1);
        assert!(ended.stderr.contains("stopped: enough"), "{}", ended.stderr);
    }
    let log = hub.stderr();
    assert!(!log.contains("has forgotten this hub"), "{log}");
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
    third.signal(Signal::TERM);
    third.finish().expect_code(0);
}

#[test]
fn a_hub_may_start_before_its_manager() {
    let address = free_address();
    let early = |_| paramhub(["hub", "--join", &address].into_iter().chain(LOOPBACK)).start();
    let [hub, impatient] = [0, 1].map(early);
    for hub in [&hub, &impatient] {
        wait_until("it says what it waits for", || hub.stderr().contains("The hub tries again for 60 s"));
    }
    impatient.signal(Signal::TERM);
    impatient.finish().expect_code(0);
    let _manager = manager(&address);
    hub.wait_for("hub ready: ");
    hub.signal(Signal::TERM);
    assert_eq!(hub.finish().expect_code(0).stderr.matches("tries again").count(), 1);
}

/// Passes calls of a hub on to its manager, until the way between them is cut.
struct Relay {
    address: String,
    is_cut: Arc<AtomicBool>,
}

impl Relay {
    fn to(manager: &str) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, is_cut) =
            (listener.local_addr().unwrap().to_string(), Arc::new(AtomicBool::new(false)));
        let (manager, cut) = (manager.to_owned(), Arc::clone(&is_cut));
        // The thread ends with the test's process.
        std::thread::spawn(move || {
            for caller in listener.incoming().map_while(Result::ok) {
                // A hub makes a connection for each call, and none lasts longer than a poll.
                if cut.load(Ordering::Relaxed) {
                    continue;
                }
                let Ok(called) = TcpStream::connect(&manager) else { continue };
                for (mut from, mut to) in [(&caller, &called), (&called, &caller)]
                    .map(|(from, to)| (from.try_clone().unwrap(), to.try_clone().unwrap()))
                {
                    std::thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
            }
        });
        Relay { address, is_cut }
    }

    fn cut(&self, is_cut: bool) {
        self.is_cut.store(is_cut, Ordering::Relaxed);
    }
}

#[test]
fn jobs_go_on_while_their_hub_cannot_reach_the_manager() {
    let address = free_address();
    let manager = paramhub(["manager", "--listen", &address, "--hub-dead-after", "2"]).start();
    manager.wait_for("manager ready: ");
    let relay = Relay::to(&address);
    let hub = paramhub(["hub", "--join", &relay.address].into_iter().chain(LOOPBACK)).start();
    hub.wait_for("hub ready: ");
    let client = client(&address);
    let is_unheard = || client.hubs().unwrap()[0].unheard;
    let endless = endless_job(&client, "endless");
    let ends = start_job(&client, "ends", &["--steps", "600", "--compute-ms", "10"]);
    ends.iter().for_each(|worker| drop(worker.wait_for("exchanges 3 keys")));

    relay.cut(true);
    wait_until("the manager does not hear the hub", is_unheard);
    let listed = paramhub(["hubs", "--hub", client.url()]).finish().expect_code(0).stdout;
    assert!(listed.contains("it gets no new jobs"), "{listed}");
    for worker in ends {
        worker.finish().expect_code(0);
    }
    let job = client.job("ends").unwrap();
    assert!(is_unheard() && job.state == JobState::Running, "{job:?}");
    assert!(job.message.contains("has not been heard for 2 s; the job goes on"), "{}", job.message);

    relay.cut(false);
    wait_until("the hub says how it ended", || client.job("ends").unwrap().state == JobState::Finished);
    assert!(!is_unheard() && client.hubs().unwrap()[0].hub == 0);
    for worker in start_job(&client, "after", &["--steps", "20"]) {
        worker.finish().expect_code(0);
    }
    let job = client.job("endless").unwrap();
    assert_eq!(job.state, JobState::Running);
    assert!(job.message.contains("is heard again, after "), "{}", job.message);
    client.stop_job_because("endless", "enough").unwrap();
    for worker in endless {
        let ended = worker.finish().expect_code(1);
        assert!(ended.stderr.contains("stopped: enough"), "{}", ended.stderr);
    }
    let log = manager.stderr();
    for said in [
        "has not been heard for 2 s: it gets no new jobs, and running ones go on (2)",
        "is heard again, after ",
    ] {
        assert_eq!(log.matches(said).count(), 1, "{log}");
    }
    assert!(!hub.stderr().contains("has forgotten this hub"), "{}", hub.stderr());
}

#[test]
fn workers_report_a_hub_that_is_killed_where_no_launcher_does() {
    let address = free_address();
    let _manager = manager(&address);
    let hub = paramhub(["hub", "--join", &address].into_iter().chain(LOOPBACK)).start();
    hub.wait_for("hub ready: ");
    let client = client(&address);
    let workers = endless_job(&client, "bereft");
    let shape = client.hubs().unwrap()[0].shape.clone();
    hub.signal(Signal::KILL);
    for worker in workers {
        let ended = worker.finish().expect_code(1);
        assert!(ended.stderr.contains("lost the hub at"), "{}", ended.stderr);
    }
    wait_until("it is recorded", || client.job("bereft").unwrap().state == JobState::Failed);
    let message = client.job("bereft").unwrap().message;
    let lost =
        format!("lost hub 0 ({}), which the connection manager does not hear", shape.interfaces[0].address);
    assert!(message.starts_with("rank ") && message.contains(&lost), "{message}");
}

#[test]
fn two_hubs_at_one_address_do_not_drive_each_other_out_for_ever() {
    let address = free_address();
    let _manager = manager(&address);
    let hub = paramhub(["hub", "--join", &address].into_iter().chain(LOOPBACK)).start();
    hub.wait_for("hub ready: ");
    let client = client(&address);
    let shape = client.hubs().unwrap()[0].shape.clone();
    let mut newest = 0;
    wait_until("the hub has given up", || {
        let hubs = client.hubs().unwrap();
        // The other hub takes the address whenever this one has it.
        if hubs.iter().any(|hub| hub.hub >= newest) {
            newest = client
                .register_hub(&RegisterHub {
                    protocol: VERSION,
                    shape: shape.clone(),
                    place: Default::default(),
                    machine: String::new(),
                    keeps_checkpoints: None,
                    encrypt: false,
                    labels: Vec::new(),
                })
                .unwrap()
                .hub
                + 1;
        }
        hub.stderr().contains("the hub has failed")
    });
    let ended = hub.finish().expect_code(1);
    assert!(ended.stderr.contains("does another hub join it with the same address?"), "{}", ended.stderr);
}

#[test]
fn a_hub_that_a_restarted_manager_refuses_says_so() {
    let address = free_address();
    let first = manager(&address);
    let hub = paramhub(["hub", "--join", &address].into_iter().chain(LOOPBACK)).start();
    hub.wait_for("hub ready: ");
    first.signal(Signal::KILL);
    first.finish();
    let second = paramhub(["manager", "--listen", &address, "--admin-token", "new"]).start();
    second.wait_for("manager ready: ");
    let ended = hub.finish().expect_code(1);
    assert!(
        ended.stderr.contains("does not let it join again") && ended.stderr.contains("token"),
        "{}",
        ended.stderr
    );
}

#[test]
fn the_manager_that_a_hub_joins_is_named_once() {
    let both = paramhub(["hub", "--join", "http://h", "--manager", "http://h"]).finish().expect_code(2);
    assert!(both.stderr.contains("--join"), "{}", both.stderr);
    let name = paramhub(["hub", "--manager", "head:7770"]).finish().expect_code(2);
    assert!(name.stderr.contains("as in http://head:7770"), "{}", name.stderr);
    let state = paramhub(["hub", "--manager", "http://h", "--state", "s"]).finish().expect_code(2);
    state.expect_error(&["--state"]);
    // A flag overrides the manager to join that is in the file.
    let shown = paramhub(["hub", "--manager", "127.0.0.1:1", "--print-config"])
        .file("paramhub.toml", "[hub]\njoin = 'http://h'\n")
        .finish()
        .expect_code(0);
    assert!(
        shown.stdout.contains("manager = \"127.0.0.1:1\"") && !shown.stdout.contains("join"),
        "{}",
        shown.stdout
    );
}

#[test]
fn a_hub_that_pauses_gets_jobs_where_the_manager_may_wait() {
    let address = free_address();
    let arguments = ["manager", "--listen", &address, "--hub-dead-after", "60"];
    let manager = paramhub(arguments).start();
    manager.wait_for("manager ready: ");
    let hub = paramhub(["hub", "--join", &address].into_iter().chain(LOOPBACK)).start();
    hub.wait_for("hub ready: ");
    let client = client(&address);
    hub.signal(Signal::STOP);
    // By default the hub would get no jobs after ten seconds.
    std::thread::sleep(Duration::from_secs(12));
    let is_unheard = client.hubs().unwrap()[0].unheard;
    hub.signal(Signal::CONT);
    assert!(!is_unheard);
    for worker in start_job(&client, "after", &["--steps", "20"]) {
        worker.finish().expect_code(0);
    }
    drop(hub);
    drop(manager);
}

#[test]
fn a_job_is_served_by_the_hubs_with_its_label() {
    let address = free_address();
    let manager = manager(&address);
    let start = |more: &[&str]| {
        let hub = ["hub", "--join", &address].into_iter().chain(LOOPBACK).chain(more.iter().copied());
        let hub = paramhub(hub).start();
        hub.wait_for("hub ready: ");
        hub
    };
    let (plain, labelled) = (start(&[]), start(&["--label", "vision,ssd"]));
    let url = format!("http://{address}");
    let train = |more: &[&str]| {
        let usual = ["train", "--name", "chosen", "--epochs", "1", "--workers", "1", "--hub-label"];
        paramhub(usual.into_iter().chain(more.iter().copied())).finish()
    };
    train(&["ssd", "--hub", &url, "--max-hubs", "1"]).expect_code(0);
    assert!(labelled.stderr().contains("job `chosen`"), "{}", labelled.stderr());
    assert!(!plain.stderr().contains("job `chosen`"), "{}", plain.stderr());
    let listed = paramhub(["hubs", "--hub", &url]).finish().expect_code(0);
    assert!(listed.stdout.contains("vision ssd"), "{}", listed.stdout);
    let wrong = train(&["two words", "--hub", &url]).expect_code(2);
    assert!(wrong.stderr.contains("1 to 32 of the characters"), "{}", wrong.stderr);
    let own = train(&["ssd"]).expect_code(2);
    assert!(own.stderr.contains("this command starts the hub itself then"), "{}", own.stderr);
    drop((plain, labelled, manager));
}
