//! `paramhub run` whose workers are killed while the job goes on.

use paramhub::ManagerClient;
use paramhub::service::JobState;
use rustix::process::{Pid, Signal, kill_process};

use crate::common::{Process, hub, paramhub, wait_until};

/// Trains with three workers, each of which first prints its process id.
fn train(options: &[&str], epochs: &str) -> Process {
    let script = format!("echo pid $$; exec {} train --epochs {epochs}", env!("CARGO_BIN_EXE_paramhub"));
    let run = ["run", "-n", "3", "--on-worker-loss", "continue"];
    paramhub(run.iter().chain(options).copied().chain(["--", "sh", "-c", &script])).start()
}

/// The process ids that a rank has printed, one for each time that it was started.
fn pids(process: &Process, rank: u32) -> Vec<i32> {
    let (text, prefix) = (process.stdout(), format!("[{rank}] pid "));
    text.lines().filter_map(|line| line.strip_prefix(&prefix)?.parse().ok()).collect()
}

/// Waits until all ranks have the parameters to start from, and have made a step.
fn await_first_step(process: &Process) {
    wait_until("the first step is made", || process.stderr().contains("[0] step 1/"));
}

/// Kills the present process of a rank, and waits until it has been lost.
fn kill(process: &Process, rank: u32) {
    let pid = *pids(process, rank).last().unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    wait_until("the hub has lost the rank", || process.stderr().contains(&format!("rank {rank} was lost")));
}

#[test]
fn a_killed_worker_is_started_again_and_joins_the_others() {
    let training = train(&["--max-restarts", "2"], "60");
    await_first_step(&training);
    for (rank, restart) in [(2, 1), (2, 2), (1, 1)] {
        kill(&training, rank);
        let again = format!("worker {rank} was killed by SIGKILL; it is started again ({restart} of 2)");
        wait_until("the worker is started again", || training.stderr().contains(&again));
        let back = format!("rank {rank} is back: 3 of 3 workers");
        wait_until("the rank is back", || training.stderr().matches(&back).count() == restart);
    }
    let ended = training.finish().expect_code(0);
    assert!(ended.stdout.contains("test accuracy"), "{}", ended.stdout);
    assert!(ended.stderr.contains("it goes on with 2 of its 3 workers"), "{}", ended.stderr);
}

#[test]
fn the_job_tells_what_it_has_lost_and_who_has_come_back() {
    let (hub, url) = hub([]);
    let client = ManagerClient::new(&url, None).unwrap();
    let training = train(&["--max-restarts", "1", "--hub", &url, "--name", "counted"], "60");
    await_first_step(&training);
    let shown = || paramhub(["jobs", "show", "counted", "--hub", &url]).finish().expect_code(0).stdout;
    let none = "0 workers lost, 0 ranks taken by other processes; 0.0 s with fewer than 3 workers";
    assert!(shown().contains(none), "{}", shown());
    let pid = pids(&training, 2)[0];
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    wait_until("another process has the rank", || {
        let losses = client.job("counted").unwrap().losses.unwrap();
        losses.workers_lost == 1 && losses.workers_joined == 1
    });
    let one = "1 worker lost, 1 rank taken by other processes; ";
    assert!(shown().contains(one), "{}", shown());
    training.finish().expect_code(0);
    assert!(shown().contains(one), "it is told when the job is over, too: {}", shown());
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
}

#[test]
fn all_workers_may_be_killed_one_after_the_other_and_the_training_goes_on_from_the_hubs_memory() {
    let training = train(&["--max-restarts", "1", "--min-workers", "3"], "60");
    // The step under way is made, and perhaps told, again.
    wait_until("it has come further", || training.stderr().contains("[0] step 232/1740"));
    for rank in [0, 1, 2] {
        let pid = pids(&training, rank)[0];
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    }
    wait_until("all ranks are back", || training.stderr().contains("is back: 3 of 3 workers"));
    let ended = training.finish().expect_code(0);
    assert!(ended.stdout.contains("test accuracy"), "{}", ended.stdout);
    let from_anew = ended.stderr.matches("[0] step 1/").count();
    assert_eq!(from_anew, 1, "it goes on where it was: {}", ended.stderr);
}

#[test]
fn the_others_end_the_training_without_a_worker_that_is_not_started_again() {
    let training = train(&["--min-workers", "2"], "20");
    await_first_step(&training);
    kill(&training, 1);
    let ended = training.finish().expect_code(0);
    for line in [
        "paramhub: worker 1 was killed by SIGKILL; the others go on without it",
        "it goes on with 2 of its 3 workers",
    ] {
        assert!(ended.stderr.contains(line), "no `{line}` in {}", ended.stderr);
    }
    assert!(ended.stdout.contains("test accuracy"), "{}", ended.stdout);
}

#[test]
fn a_job_that_waits_for_workers_in_vain_ends_with_the_reason() {
    let training = train(&["--min-workers", "3", "--linger", "1"], "60");
    await_first_step(&training);
    kill(&training, 1);
    // The worst exit code is that of the killed one.
    let ended = training.finish().expect_code(137);
    let reason = "rank 1 was lost, and no other process has come for 1 s (linger_s)";
    assert!(ended.stderr.contains(reason), "{}", ended.stderr);
}

#[test]
fn restarts_need_a_job_that_goes_on() {
    let refused = paramhub(["run", "-n", "2", "--max-restarts", "1", "--", "true"]).finish().expect_code(2);
    refused.expect_error(&["`--max-restarts`", "the job fails when a worker is lost"]);
}

#[test]
fn workers_join_a_job_that_has_begun_with_some_and_it_goes_on_without_their_launcher() {
    let (hub, url) = hub([]);
    let client = ManagerClient::new(&url, None).unwrap();
    let connected = || client.job("elastic").unwrap().connected;
    let train = [env!("CARGO_BIN_EXE_paramhub"), "train", "--epochs", "80"];
    let run = ["run", "-n", "2", "--hub", &url, "--name", "elastic"];
    let elastic = ["--on-worker-loss", "continue", "--max-workers", "4", "--"];
    let first = paramhub(run.into_iter().chain(elastic).chain(train)).start();
    await_first_step(&first);
    assert_eq!(connected(), [0, 1]);
    let join = |workers| {
        paramhub(["run", "-n", workers, "--hub", &url, "--join", "elastic", "--"].into_iter().chain(train))
    };
    let none = join("3").finish().expect_code(1);
    assert!(none.stderr.contains("no 3 ranks in a row are free: only [2, 3]"), "{}", none.stderr);
    let second = join("1").start();
    wait_until("rank 2 has joined", || connected() == [0, 1, 2]);
    let third = join("1").start();
    wait_until("rank 3 has joined", || connected() == [0, 1, 2, 3]);
    let full = join("1").finish().expect_code(1);
    assert!(full.stderr.contains("job `elastic` has 4 of its at most 4 workers"), "{}", full.stderr);
    // A launcher that ends takes its workers with it, and the others go on.
    second.signal(Signal::TERM);
    second.finish();
    wait_until("rank 2 is lost", || connected() == [0, 1, 3]);
    first.finish().expect_code(0);
    third.finish().expect_code(0);
    let job = client.job("elastic").unwrap();
    assert_eq!((job.state, job.losses.unwrap().workers_joined), (JobState::Finished, 2), "{}", job.message);
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
}
