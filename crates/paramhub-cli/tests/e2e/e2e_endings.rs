//! These tests show how the ends of jobs are recorded: finished ones as finished, however quick their
//! launcher is, and failed ones with the first cause, whichever process reports first.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use paramhub::service::{CreateService, JobOptions, JobState, ServiceCreated};
use paramhub::{HubConfig, Manager, ManagerClient, ManagerConfig, RunningHub};
use paramhub_hub::list_checkpoints;
use rustix::process::{Pid, Signal};

use crate::common::{Process, example, hub, paramhub, wait_until, workers_of};

/// More steps than any test allows.
const ENDLESS: [&str; 4] = ["--steps", "1000000", "--compute-ms", "1"];
/// More epochs than `train` reaches in any test.
const EPOCHS: [&str; 4] = ["--epochs", "1000000", "--workers", "2"];

fn workers(url: &str, created: &ServiceCreated, count: u32, arguments: &[&str]) -> Vec<Process> {
    let worker = |rank: u32| {
        example("exchange", arguments.iter().copied())
            .env("PARAMHUB_URL", url)
            .env("PARAMHUB_JOB", &created.namespace.to_string())
            .env("PARAMHUB_SECRET", &String::from(created.secret()))
            .env("RANK", &rank.to_string())
            .start()
    };
    (0..count).map(worker).collect()
}

/// A manager, and hubs in processes of their own that have joined it.
fn room(hubs: usize) -> (paramhub::RunningManager, ManagerClient, Vec<Process>) {
    let listen = "127.0.0.1:0".parse().unwrap();
    let manager = Manager::start(ManagerConfig { listen, ..ManagerConfig::default() }).unwrap();
    let client = ManagerClient::new(&manager.url(), None).unwrap();
    let hubs = (0..hubs).map(|_| {
        let hub = paramhub(["hub", "--listen", "127.0.0.1:0", "--join", &manager.url()]).start();
        hub.wait_for("hub ready: ");
        hub
    });
    let hubs = hubs.collect();
    (manager, client, hubs)
}

/// A proxy between a hub and its manager that holds back every report of a job's end until the test releases
/// them.
struct ReportDelay {
    url: String,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    lets_go: Mutex<bool>,
    changed: Condvar,
    /// `true` if the hub has been asked how a job ended whose workers have ended.
    has_asked: AtomicBool,
}

impl ReportDelay {
    fn before(manager: &str) -> ReportDelay {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let to = manager.strip_prefix("http://").unwrap().to_owned();
        let shared = Arc::new(Shared::default());
        let held = shared.clone();
        // The thread ends with the test's process.
        thread::spawn(move || {
            for connection in listener.incoming() {
                let (to, shared) = (to.clone(), held.clone());
                thread::spawn(move || shared.pass(connection.unwrap(), &to));
            }
        });
        ReportDelay { url, shared }
    }

    fn let_go(&self) {
        *self.shared.lets_go.lock().unwrap() = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    /// A connection carries one request.
    fn pass(&self, mut from: TcpStream, to: &str) {
        let request = read_request(&mut from);
        let first = request.lines().next().unwrap_or_default().to_owned();
        if first.contains("/events") && request.contains(r#""ended":"#) {
            let lets_go = self.lets_go.lock().unwrap();
            drop(self.changed.wait_while(lets_go, |lets_go| !*lets_go).unwrap());
        }
        let Ok(mut manager) = TcpStream::connect(to) else { return };
        let (mut more, mut onward) = (from.try_clone().unwrap(), manager.try_clone().unwrap());
        thread::spawn(move || {
            let _ = onward.write_all(request.as_bytes());
            let _ = std::io::copy(&mut more, &mut onward);
        });
        let mut answer = Vec::new();
        let _ = manager.read_to_end(&mut answer);
        if first.contains("/poll") && String::from_utf8_lossy(&answer).contains("workers_ended") {
            self.has_asked.store(true, Ordering::Release);
        }
        let _ = from.write_all(&answer);
        let _ = from.shutdown(std::net::Shutdown::Both);
    }
}

/// A request's head and body, as far as they arrive.
fn read_request(from: &mut TcpStream) -> String {
    let (mut request, mut part) = (Vec::new(), [0; 4096]);
    loop {
        let text = String::from_utf8_lossy(&request);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let mut lines = head.lines().filter_map(|line| line.split_once(": "));
            let length = lines.rfind(|(name, _)| name.eq_ignore_ascii_case("content-length"));
            if length.is_none_or(|(_, length)| length.parse().is_ok_and(|bytes: usize| body.len() >= bytes)) {
                return text.into_owned();
            }
        }
        match from.read(&mut part) {
            Ok(read @ 1..) => request.extend_from_slice(&part[..read]),
            _ => return String::from_utf8_lossy(&request).into_owned(),
        }
    }
}

#[test]
fn a_launcher_that_outruns_the_hubs_reports_finds_its_job_finished() {
    let (manager, client, _) = room(0);
    let delay = ReportDelay::before(&manager.url());
    let config = HubConfig::default();
    let hub = RunningHub::start(ManagerClient::new(&delay.url, None).unwrap(), config).unwrap();
    let request = CreateService { name: "outrun".into(), workers: 2, options: Default::default() };
    let created = client.create_service(&request).unwrap();
    let ranks = workers(client.url(), &created, 2, &["--steps", "20"]);
    ranks.into_iter().for_each(|rank| drop(rank.finish().expect_code(0)));
    let ended = {
        let client = client.clone();
        thread::spawn(move || client.workers_have_ended("outrun", "its workers ended without leaving"))
    };
    // The stop arrives before the report. If it were no question, the job would be over by now.
    wait_until("the hub is asked", || delay.shared.has_asked.load(Ordering::Acquire));
    assert_eq!(client.job("outrun").unwrap().state, JobState::Running);
    delay.let_go();
    let status = ended.join().unwrap().unwrap();
    assert_eq!((status.state, &*status.message), (JobState::Finished, ""));
    hub.stop();
    manager.stop();
}

#[test]
fn workers_that_end_without_leaving_fail_their_job_at_once() {
    let (_hub, url) = hub([]);
    let client = ManagerClient::new(&url, None).unwrap();
    let request = CreateService { name: "rude".into(), workers: 2, options: Default::default() };
    let created = client.create_service(&request).unwrap();
    let ranks = workers(&url, &created, 2, &ENDLESS);
    ranks.iter().for_each(|rank| drop(rank.wait_for("exchanges 3 keys")));
    ranks.iter().for_each(|rank| rank.signal(Signal::KILL));
    ranks.into_iter().for_each(|rank| drop(rank.finish().expect_code(137)));
    let status = client.workers_have_ended("rude", "its workers ended without leaving").unwrap();
    assert_eq!(status.state, JobState::Failed);
    // The hub reports that the connection has ended, inside a frame, or was reset: that depends on what the
    // worker was sending.
    assert!(
        status.message.starts_with("rank ") && status.message.contains(" was lost: "),
        "{}",
        status.message
    );
}

/// The newest complete checkpoint of a job.
fn newest(folder: &Path, job: &str) -> Option<u32> {
    let found = list_checkpoints(folder).ok()?.remove(job)?;
    found.into_iter().filter(|found| found.flaw.is_none()).map(|found| found.step).max()
}

#[test]
fn a_launcher_that_is_interrupted_at_a_running_hub_leaves_a_checkpoint_and_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let (_hub, url) = hub(["--checkpoints", path]);
    let client = ManagerClient::new(&url, None).unwrap();
    let every = ["--hub", &url, "--checkpoint-every", "1000000"];
    let train = |name| {
        let arguments = ["train", "--name", name].into_iter().chain(every).chain(EPOCHS);
        paramhub(arguments).start()
    };
    let run = |name| {
        let program = env!("CARGO_BIN_EXE_paramhub");
        let command = ["-n", "2", "--", program, "train", "--epochs", "1000000"];
        paramhub(["run", "--name", name].into_iter().chain(every).chain(command)).start()
    };
    let launched = [
        ("trained", train("trained"), Signal::INT, 130, "SIGINT"),
        ("run", run("run"), Signal::TERM, 143, "SIGTERM"),
    ];
    for (name, launcher, signal, code, called) in launched {
        wait_until("some steps", || client.job(name).is_ok_and(|job| job.counters.updates > 100));
        assert_eq!(newest(folder.path(), name), None);
        launcher.signal(signal);
        let ended = launcher.finish().expect_code(code);
        let job = client.job(name).unwrap();
        let reason = format!("stopped: its launcher was interrupted by {called}");
        assert_eq!((job.state, job.message), (JobState::Failed, reason), "{}", ended.stderr);
        wait_until("the last checkpoint is written", || newest(folder.path(), name) > Some(1));
    }
}

#[test]
fn a_killed_launcher_is_named_and_not_one_of_its_workers() {
    let (_hub, url) = hub([]);
    let client = ManagerClient::new(&url, None).unwrap();
    for round in 0..3 {
        let name = format!("orphaned-{round}");
        let arguments = ["train", "--hub", &url, "--name", &name].into_iter().chain(EPOCHS);
        let launcher = paramhub(arguments).start();
        wait_until("some steps", || client.job(&name).is_ok_and(|job| job.counters.updates > 10));
        let left = workers_of(launcher.pid());
        assert_eq!(left.len(), 2);
        launcher.signal(Signal::KILL);
        let is_named = || {
            let job = client.job(&name).unwrap();
            job.state == JobState::Failed && job.message == "stopped: its launcher was killed"
        };
        wait_until("the launcher is named", is_named);
        wait_until("its workers are gone", || !left.iter().any(|&pid| crate::common::is_alive(pid)));
        assert!(is_named());
    }
}

#[test]
fn a_hub_that_is_asked_to_end_is_named_by_jobs_of_several_hubs_and_signs_off() {
    for round in 0..4 {
        let (manager, client, mut hubs) = room(2);
        let name = format!("bereft-{round}");
        let options = JobOptions { hubs: Some(2), ..Default::default() };
        let created =
            client.create_service(&CreateService { name: name.clone(), workers: 2, options }).unwrap();
        let ranks = workers(client.url(), &created, 2, &ENDLESS);
        ranks.iter().for_each(|rank| drop(rank.wait_for("exchanges 3 keys")));
        let leaving = hubs.remove(round % 2);
        leaving.signal(Signal::TERM);
        leaving.finish().expect_code(0);
        // The hub gets no job any more, and none waits for it.
        assert_eq!(client.hubs().unwrap().len(), 1, "the hub that has ended is not counted any more");
        ranks.into_iter().for_each(|rank| drop(rank.finish().expect_code(1)));
        let is_named = || {
            let job = client.job(&name).unwrap();
            job.state == JobState::Failed && job.message == "the hub is shutting down"
        };
        wait_until("the hub is named", is_named);
        let later = CreateService { name: format!("{name}-later"), workers: 1, options: Default::default() };
        let created = client.create_service(&later).unwrap();
        for rank in workers(client.url(), &created, 1, &["--steps", "5"]) {
            rank.finish().expect_code(0);
        }
        drop(hubs);
        manager.stop();
    }
}

#[test]
fn a_killed_hub_is_named_although_a_rank_that_gave_up_was_quicker() {
    let (manager, client, mut hubs) = room(2);
    let options = JobOptions { hubs: Some(2), ..Default::default() };
    let request = CreateService { name: "bereft".into(), workers: 2, options };
    let created = client.create_service(&request).unwrap();
    let ranks = workers(client.url(), &created, 2, &ENDLESS);
    ranks.iter().for_each(|rank| drop(rank.wait_for("exchanges 3 keys")));
    hubs.remove(1).signal(Signal::KILL);
    ranks.into_iter().for_each(|rank| drop(rank.finish().expect_code(1)));
    wait_until("the hub is named", || {
        let job = client.job("bereft").unwrap();
        job.state == JobState::Failed
            && job.message.contains("hub 1 (")
            && (job.message.contains(") has not been heard for ")
                || job.message.contains("does not hear either"))
    });
    drop(hubs);
    manager.stop();
}

#[test]
fn a_stopped_rank_ends_its_job_after_the_progress_timeout_of_either_launcher() {
    let (_hub, url) = hub([]);
    let client = ManagerClient::new(&url, None).unwrap();
    let program = env!("CARGO_BIN_EXE_paramhub");
    let waits = ["--hub", &url, "--progress-timeout", "4"];
    let command = ["-n", "2", "--", program, "train", "--epochs", "1000000"];
    let train = paramhub(["train", "--name", "trained"].into_iter().chain(waits).chain(EPOCHS));
    let run = paramhub(["run", "--name", "run"].into_iter().chain(waits).chain(command));
    for (name, launcher) in [("trained", train.start()), ("run", run.start())] {
        wait_until("some steps", || client.job(name).is_ok_and(|job| job.counters.updates > 100));
        let workers = workers_of(launcher.pid());
        let stopped = workers.iter().copied().find(|&worker| crate::common::rank_of(worker) == 1).unwrap();
        let stopped = Pid::from_raw(stopped).unwrap();
        rustix::process::kill_process(stopped, Signal::STOP).unwrap();
        wait_until("its job fails", || client.job(name).unwrap().state == JobState::Failed);
        // The launcher would also end it, after its time to end by itself.
        rustix::process::kill_process(stopped, Signal::CONT).unwrap();
        let ended = launcher.finish().expect_code(1);
        let reason = "because of rank 1: job `".to_owned() + name + "` failed: rank 1 made no progress";
        assert!(ended.stderr.contains(&reason), "{}", ended.stderr);
        let job = client.job(name).unwrap();
        assert!(job.message.starts_with("rank 1 made no progress: others have waited "), "{}", job.message);
        wait_until("its workers are gone", || !workers.iter().any(|&pid| crate::common::is_alive(pid)));
    }
}
