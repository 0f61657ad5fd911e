//! Jobs whose hubs have standbys, of which hubs are killed, frozen and shut down, and whose manager may be away meanwhile. The
//! numbers stay those of an undisturbed job, to the bit.

use std::path::PathBuf;
use std::time::Instant;

use paramhub::ManagerClient;
use paramhub::checkpoint::Resume;
use paramhub::service::{CreateService, JobOptions, JobState, JobStatus, OnWorkerLoss};
use paramhub_hub::{FoundCheckpoint, list_checkpoints};
use rustix::process::Signal;

use crate::common::{Process, example, free_address, paramhub, wait_until};

const WORKERS: u32 = 4;
/// Gradients that differ from rank to rank, so that sums depend on their order.
const FRACTIONS: &[&str] =
    &["--steps", "300", "--compute-ms", "5", "--reproducible", "--seed", "7", "--save", "parameters"];

/// A job at several hubs with standbys, and a manager of its own.
struct Job {
    manager: Option<Process>,
    address: String,
    state: tempfile::TempDir,
    hubs: Vec<Option<Process>>,
    client: ManagerClient,
    workers: Vec<Process>,
    last_updates: u64,
}

fn manager(address: &str, state: &tempfile::TempDir) -> Process {
    let state = state.path().join("state").to_string_lossy().into_owned();
    let manager = paramhub(["manager", "--listen", address, "--state", &state]).start();
    manager.wait_for("manager ready");
    manager
}

/// A hub with an address of its own, or one to come back at. All hubs have the same folder of checkpoints.
fn hub(url: &str, address: &str, state: &tempfile::TempDir) -> Process {
    let (url, folder) = (["--manager", url], checkpoints_in(state));
    let own = ["--listen", address, "--cores", "2", "--checkpoints", folder.to_str().unwrap()];
    let hub = paramhub(["hub"].into_iter().chain(url).chain(own)).start();
    hub.wait_for("hub ready: ");
    hub
}

fn checkpoints_in(state: &tempfile::TempDir) -> PathBuf {
    state.path().join("checkpoints")
}

impl Job {
    fn start(hubs: usize, options: JobOptions) -> Job {
        Job::start_with(hubs, options, FRACTIONS)
    }

    fn start_with(hubs: usize, options: JobOptions, flags: &[&str]) -> Job {
        Job::start_in(tempfile::tempdir().unwrap(), hubs, options, flags)
    }

    fn start_in(state: tempfile::TempDir, hubs: usize, options: JobOptions, flags: &[&str]) -> Job {
        let address = free_address();
        let manager = manager(&address, &state);
        let url = format!("http://{address}");
        // They join one after the other, so that their numbers are their positions.
        let hubs: Vec<Option<Process>> = (0..hubs).map(|_| Some(hub(&url, "127.0.0.1:0", &state))).collect();
        let client = ManagerClient::new(&url, None).unwrap();
        let options = JobOptions { hubs: Some(hubs.len() as u32), replicas: 1, ..options };
        let created =
            client.create_service(&CreateService { name: "kept".into(), workers: WORKERS, options }).unwrap();
        let start = |rank: u32| {
            example("exchange", flags.iter().copied())
                .env("PARAMHUB_URL", &url)
                .env("PARAMHUB_JOB", &created.namespace.to_string())
                .env("PARAMHUB_SECRET", &String::from(created.secret()))
                .env("RANK", &rank.to_string())
                .start()
        };
        let workers: Vec<Process> = (0..WORKERS).map(start).collect();
        workers.iter().for_each(|worker| drop(worker.wait_for(" keys")));
        let mut job = Job { manager: Some(manager), address, state, hubs, client, workers, last_updates: 0 };
        job.await_steps();
        job
    }

    fn status(&self) -> JobStatus {
        self.client.job("kept").unwrap()
    }

    /// Waits until further steps are made.
    fn await_steps(&mut self) {
        let mut updates = 0;
        let before = self.last_updates;
        wait_until("the job goes on", || {
            let status = self.status();
            let said = || self.workers.iter().map(Process::stderr).collect::<Vec<_>>().join("\n");
            assert_ne!(status.state, JobState::Failed, "{}\n{}", status.message, said());
            updates = status.counters.updates;
            updates > before + 20
        });
        self.last_updates = updates;
    }

    fn hub(&self, number: usize) -> &Process {
        self.hubs[number].as_ref().expect("it is not killed")
    }

    /// Lets another hub join, and waits until every share has a standby.
    fn add_hub(&mut self, address: &str) {
        let url = format!("http://{}", self.address);
        self.hubs.push(Some(hub(&url, address, &self.state)));
        self.await_standbys();
    }

    fn await_standbys(&self) {
        let begun = Instant::now();
        wait_until("every share has a standby", || {
            let status = self.status();
            assert_ne!(status.state, JobState::Failed, "{}", status.message);
            let standbys = status.standbys.expect("it is to have standbys");
            standbys.ready == standbys.shares
        });
        eprintln!("all standbys after {:.2} s", begun.elapsed().as_secs_f64());
    }

    /// The newest checkpoint of which all parts are there.
    fn newest_checkpoint(&self) -> Option<FoundCheckpoint> {
        let found = list_checkpoints(&checkpoints_in(&self.state)).ok()?.remove("kept")?;
        found.into_iter().find(|found| found.flaw.is_none())
    }

    /// Waits until there is a later checkpoint, written by these hubs.
    fn await_checkpoint_by(&self, positions: &[u32]) {
        let newest = |job: &Job| job.newest_checkpoint().map_or(0, |found| found.step);
        let before = newest(self);
        wait_until("a later checkpoint", || {
            assert_ne!(self.status().state, JobState::Failed, "{}", self.status().message);
            let found = self.newest_checkpoint().filter(|found| found.step > before);
            found.is_some_and(|found| found.parts.iter().map(|part| part.hub).eq(positions.iter().copied()))
        });
    }

    /// Kills a hub, and waits until its standby has taken over.
    fn kill(&mut self, number: usize) {
        let begun = Instant::now();
        self.hub(number).signal(Signal::KILL);
        drop(self.hubs[number].take());
        wait_until("another hub takes over", || self.status().message.contains("takes over"));
        eprintln!("taken over after {:.2} s", begun.elapsed().as_secs_f64());
    }

    /// The parameters with which all ranks end.
    fn parameters(self) -> Vec<u8> {
        let Job { manager, hubs, client, workers, state, .. } = self;
        let mut parameters =
            workers.into_iter().map(|worker| worker.finish().expect_code(0).read("parameters"));
        let of_rank_0 = parameters.next().expect("there is a rank 0");
        assert!(parameters.all(|other| other == of_rank_0), "the ranks differ");
        wait_until("the job's end", || client.job("kept").unwrap().state.has_ended());
        let status = client.job("kept").unwrap();
        assert_eq!(status.state, JobState::Finished, "{}", status.message);
        drop((manager, hubs, state));
        of_rank_0
    }
}

#[test]
fn a_hub_that_is_killed_costs_no_step_and_no_bit() {
    let expected = Job::start(2, JobOptions::default()).parameters();
    for killed in [0, 1] {
        let mut job = Job::start(2, JobOptions::default());
        job.kill(killed);
        job.await_steps();
        assert!(job.parameters() == expected, "other bits than undisturbed without hub {killed}");
    }
    let undisturbed = Job::start(3, JobOptions::default()).parameters();
    let mut job = Job::start(3, JobOptions::default());
    job.kill(1);
    job.await_steps();
    assert!(job.parameters() == undisturbed, "other bits than undisturbed with three hubs");
}

#[test]
fn a_hub_that_is_frozen_is_replaced_and_ends_its_part_when_it_wakes() {
    let options = JobOptions { dead_after_s: 2.0, ..Default::default() };
    let expected = Job::start(2, options).parameters();
    let mut job = Job::start(2, options);
    job.hub(0).signal(Signal::STOP);
    wait_until("the other hub takes over", || job.status().message.contains("takes over"));
    job.await_steps();
    job.hub(0).signal(Signal::CONT);
    wait_until("it hears of that", || job.hub(0).stderr().contains("goes on at other hubs"));
    job.await_steps();
    assert!(job.parameters() == expected, "other bits than undisturbed");
}

#[test]
fn a_hub_that_shuts_down_hands_its_part_over() {
    let expected = Job::start(2, JobOptions::default()).parameters();
    let mut job = Job::start(2, JobOptions::default());
    job.hub(1).signal(Signal::TERM);
    job.hubs[1].take().expect("it was not killed").finish().expect_code(0);
    wait_until("the other hub takes over", || job.status().message.contains("takes over"));
    job.await_steps();
    assert!(job.parameters() == expected, "other bits than undisturbed");
}

/// The flags of a job that lasts longer.
fn lasting(steps: &str) -> Vec<&str> {
    FRACTIONS.iter().map(|&flag| if flag == "300" { steps } else { flag }).collect()
}

#[test]
fn hubs_that_join_become_standbys_while_the_job_runs() {
    let expected = Job::start_with(2, JobOptions::default(), &lasting("900")).parameters();
    let mut job = Job::start_with(2, JobOptions::default(), &lasting("900"));
    for lost in 0..4 {
        job.kill(lost);
        if lost == 2 {
            // The next manager knows what a hub needs that joins then.
            drop(job.manager.take());
            job.manager = Some(manager(&job.address, &job.state));
        }
        job.add_hub("127.0.0.1:0");
        job.await_steps();
    }
    assert!(job.parameters() == expected, "other bits than undisturbed");
}

#[test]
fn the_hubs_that_are_left_become_standbys_of_each_other_when_no_other_comes() {
    let quick: Vec<&str> =
        lasting("3600").into_iter().map(|flag| if flag == "5" { "0" } else { flag }).collect();
    let expected = Job::start_with(3, JobOptions::default(), &quick).parameters();
    let options = JobOptions { checkpoint_every: Some("50".parse().unwrap()), ..Default::default() };
    let mut job = Job::start_with(3, options, &lasting("3600"));
    job.kill(0);
    job.await_standbys();
    for number in [1, 2] {
        let said = job.hub(number).stderr();
        assert!(said.contains("further routes"), "hub {number} has taken no further share:\n{said}");
    }
    job.await_steps();
    // Whatever hub 1 has served is now at hub 2, which also writes checkpoints of it.
    job.kill(1);
    job.await_checkpoint_by(&[2]);
    assert!(job.parameters() == expected, "other bits than undisturbed");
}

#[test]
fn all_hubs_are_replaced_one_after_the_other_without_a_lost_step() {
    let expected = Job::start_with(3, JobOptions::default(), &lasting("900")).parameters();
    let mut job = Job::start_with(3, JobOptions::default(), &lasting("900"));
    for number in 0..3 {
        let hubs = job.client.hubs().unwrap();
        // It has been replaced, and the hubs that are left are in the order in which they joined.
        let address = hubs[0].shape.interfaces[0].address.clone();
        job.hub(number).signal(Signal::TERM);
        job.hubs[number].take().expect("it was not replaced").finish().expect_code(0);
        job.add_hub(&address);
        job.await_steps();
    }
    assert!(job.parameters() == expected, "other bits than undisturbed");
}

#[test]
fn a_drained_hub_is_left_without_a_lost_step() {
    let expected = Job::start_with(2, JobOptions::default(), &lasting("900")).parameters();
    let mut job = Job::start_with(2, JobOptions::default(), &lasting("900"));
    let url = format!("http://{}", job.address);
    let drain = |arguments: &[&str]| {
        paramhub(["hubs", "drain", "--hub", &url].into_iter().chain(arguments.iter().copied())).finish()
    };
    // The other hub takes over, and has no standby. So it cannot be left before a third hub has all chunks.
    let drained = drain(&["0"]).expect_code(0).stdout;
    for part in
        ["hub 0 (127.0.0.1:", "takes no new jobs", "job kept: ", "job kept has left", "it can be stopped"]
    {
        assert!(drained.contains(part), "no `{part}` in\n{drained}");
    }
    job.await_steps();
    let late = drain(&["1", "--timeout", "1"]).expect_code(1);
    assert!(late.stdout.contains("start one that has no part in it"), "{late:?}");
    assert!(late.stderr.contains("still has jobs (kept), and stays drained"), "{late:?}");
    // The manager that is started again goes on with it.
    drop(job.manager.take());
    job.manager = Some(manager(&job.address, &job.state));
    job.hubs.push(Some(hub(&url, "127.0.0.1:0", &job.state)));
    let drained = drain(&["1"]).expect_code(0).stdout;
    assert!(drained.contains("job kept has left"), "{drained}");
    for number in [0, 1] {
        let left = job.hubs[number].take().expect("it was not killed");
        left.signal(Signal::TERM);
        left.finish().expect_code(0);
    }
    job.await_steps();
    let listed = paramhub(["hubs", "--hub", &url]).finish().expect_code(0).stdout;
    assert!(!listed.contains("is drained"), "both have shut down:\n{listed}");
    assert!(job.parameters() == expected, "other bits than undisturbed");
}

#[test]
fn a_job_moves_from_one_hub_to_another_without_a_lost_step() {
    let expected = Job::start_with(2, JobOptions::default(), &lasting("900")).parameters();
    let mut job = Job::start_with(2, JobOptions::default(), &lasting("900"));
    let url = format!("http://{}", job.address);
    let move_job = |arguments: &str| {
        let flags = arguments.split(' ');
        paramhub(["jobs", "move", "--hub", &url, "kept"].into_iter().chain(flags)).finish()
    };
    let nowhere = move_job("--from 0 --to 2").expect_code(1).stderr;
    assert!(nowhere.contains("there is no hub 2"), "{nowhere}");
    job.hubs.push(Some(hub(&url, "127.0.0.1:0", &job.state)));
    let elsewhere = move_job("--from 2").expect_code(2).stderr;
    assert!(elsewhere.contains("it has nothing at hub 2, but at hub 0 ("), "{elsewhere}");

    let moved = move_job("--from 0 --to 2").expect_code(0).stdout;
    let done = "job kept: it has left hub 0, and hub 2 has what it had there; all its chunks have a standby";
    assert!(moved.contains(done), "{moved}");
    let again = move_job("--from 0 --to 2").expect_code(0).stdout;
    assert!(again.contains(done), "an order may be repeated: {again}");
    job.await_steps();
    let jobs: Vec<u32> = job.client.hubs().unwrap().iter().map(|hub| hub.jobs).collect();
    assert_eq!(jobs, [0, 1, 1]);
    // Hub 2 has all that hub 0 had.
    job.kill(1);
    job.await_steps();
    assert!(job.parameters() == expected, "other bits than undisturbed");
}

#[test]
fn a_drained_hub_gets_no_new_jobs_and_keeps_those_without_standbys() {
    let (hub, url) = crate::common::hub([]);
    let drain = |arguments: &[&str]| {
        paramhub(["hubs", "drain", "--hub", &url].into_iter().chain(arguments.iter().copied())).finish()
    };
    let client = ManagerClient::new(&url, None).unwrap();
    let start = |name: &str, steps: &str| {
        let options = JobOptions::default();
        let created =
            client.create_service(&CreateService { name: name.into(), workers: 1, options }).unwrap();
        example("exchange", ["--steps", steps, "--compute-ms", "5"])
            .env("PARAMHUB_URL", &url)
            .env("PARAMHUB_JOB", &created.namespace.to_string())
            .env("PARAMHUB_SECRET", &String::from(created.secret()))
            .env("RANK", "0")
            .start()
    };
    let worker = start("plain", "1000000");
    wait_until("it runs", || client.job("plain").unwrap().state == JobState::Running);
    let stays = drain(&["0", "--timeout", "0"]).expect_code(1);
    assert!(
        stays.stdout.contains("job plain: it stays until it ends, since it has no standbys"),
        "{stays:?}"
    );
    let listed = paramhub(["hubs", "--hub", &url]).finish().expect_code(0).stdout;
    assert!(listed.contains("it is drained, and gets no new jobs"), "{listed}");
    let json = drain(&["0", "--timeout", "0", "--json"]).expect_code(1).stdout;
    let status: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (status["drained"].as_bool(), status["jobs"][0]["name"].as_str()),
        (Some(true), Some("plain"))
    );
    // A job that comes now waits, and begins when the hub takes jobs again.
    let late = start("late", "2");
    wait_until("its rank waits for a hub", || client.job("late").unwrap().connected == [0]);
    assert_eq!(client.job("late").unwrap().state, JobState::Connecting);
    let cancelled = drain(&["0", "--cancel"]).expect_code(0).stdout;
    assert!(cancelled.contains("is not drained, and takes new jobs"), "{cancelled}");
    late.finish().expect_code(0);
    client.stop_job("plain").unwrap();
    worker.finish().expect_code(1);
    drain(&["0"]).expect_code(0);
    for (arguments, code, reason) in [
        (&["7"][..], 1, "there is no hub 7: `paramhub hubs` lists all"),
        (&["seven"], 2, "invalid value 'seven'"),
        (&[], 2, "<NUMBER>"),
        (&["0", "--timeout", "-1"], 2, "--timeout"),
    ] {
        let refused = drain(arguments).expect_code(code);
        assert!(refused.stderr.contains(reason), "no `{reason}` in\n{}", refused.stderr);
    }
    drop(hub);
}

#[test]
fn checkpoints_outlive_hubs_and_a_job_resumes_from_them_with_standbys() {
    let flags = [lasting("1200"), vec!["--optimizer", "adamw"]].concat();
    let expected = Job::start_with(2, JobOptions::default(), &flags).parameters();
    let options = JobOptions { checkpoint_every: Some("20".parse().unwrap()), ..Default::default() };
    let mut job = Job::start_with(2, options, &flags);
    job.await_checkpoint_by(&[0, 1]);
    job.kill(0);
    // The hub that has taken over writes all of it, and the new standby nothing.
    job.await_checkpoint_by(&[1]);
    job.add_hub("127.0.0.1:0");
    job.await_checkpoint_by(&[1]);
    // One that shuts down hands its part over, and waits for no last checkpoint.
    job.hub(1).signal(Signal::TERM);
    job.hubs[1].take().expect("it was not killed").finish().expect_code(0);
    job.await_checkpoint_by(&[2]);
    let newest = job.newest_checkpoint().expect("there are some");
    newest.verify().unwrap();
    wait_until("the manager hears of it", || {
        job.status().checkpoints.is_some_and(|status| status.step >= Some(newest.step) && status.failed == 0)
    });

    // A power cut: nothing is left but the disk.
    let Job { mut manager, mut hubs, mut workers, state, .. } = job;
    let all = manager.iter().chain(hubs.iter().flatten()).chain(&workers);
    all.for_each(|process| process.signal(Signal::KILL));
    manager.take();
    hubs.clear();
    workers.clear();
    std::fs::remove_dir_all(state.path().join("state")).unwrap();
    let options = JobOptions { resume: Some(Resume::Auto), ..options };
    let mut job = Job::start_in(state, 2, options, &flags);
    let hub_0 = job.hub(0).stderr();
    assert!(hub_0.contains("goes on from its checkpoint of step"), "{hub_0}");
    job.kill(1);
    job.await_checkpoint_by(&[0]);
    assert!(job.parameters() == expected, "other bits than undisturbed");
}

#[test]
fn a_job_whose_hub_and_manager_are_gone_waits_for_the_manager() {
    let expected = Job::start(2, JobOptions::default()).parameters();
    let mut job = Job::start(2, JobOptions::default());
    let manager_process = job.manager.take().expect("it runs");
    manager_process.signal(Signal::KILL);
    drop(manager_process);
    job.hub(0).signal(Signal::KILL);
    drop(job.hubs[0].take());
    wait_until("the other hub says what it waits for", || {
        job.hub(1).stderr().contains("the connection manager has not said yet how the job goes on")
    });
    job.manager = Some(manager(&job.address, &job.state));
    // The manager decides about one share and then about the other, so the job's message may be that of either.
    wait_until("the other hub serves both shares", || {
        job.status().standbys.is_some_and(|standbys| standbys.ready == 0)
    });
    assert!(job.parameters() == expected, "other bits than undisturbed");
}

#[test]
fn a_job_fails_with_the_last_hub_that_has_its_chunks() {
    let mut job = Job::start(2, JobOptions::default());
    job.kill(0);
    job.await_steps();
    job.hub(1).signal(Signal::KILL);
    drop(job.hubs[1].take());
    let Job { manager, client, workers, state, .. } = job;
    for worker in workers {
        let ended = worker.finish().expect_code(1);
        assert!(ended.stderr.contains("nobody listens there any more"), "{ended:?}");
    }
    wait_until("the job fails", || client.job("kept").unwrap().state == JobState::Failed);
    drop((manager, state));
}

#[test]
fn standbys_need_another_hub_and_a_job_that_a_standby_can_follow() {
    let create = |more: &[&str]| {
        let manager = ["jobs", "create", "kept", "--workers", "2", "--hub", "http://127.0.0.1:9"];
        paramhub(manager.into_iter().chain(more.iter().copied())).finish()
    };
    let two = create(&["--replicas", "2"]).expect_code(2);
    assert!(two.stderr.contains("--replicas") && two.stderr.contains("0..=1"), "{two:?}");
    let (hub, url) = crate::common::hub([]);
    let client = ManagerClient::new(&url, None).unwrap();
    let refused = |options: JobOptions| {
        let request = CreateService { name: "kept".into(), workers: 2, options };
        client.create_service(&request).unwrap_err().to_string()
    };
    let replicas = JobOptions { replicas: 1, ..Default::default() };
    let one = refused(JobOptions { hubs: Some(1), ..replicas });
    assert!(one.contains("ask for 2 hubs or more, or leave `replicas` out"), "{one}");
    let going_back = refused(JobOptions { on_worker_loss: OnWorkerLoss::Rewind, ..replicas });
    assert!(going_back.contains("give `checkpoint_every`, too"), "{going_back}");
    drop(hub);
}
