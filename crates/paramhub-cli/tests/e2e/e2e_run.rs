//! `paramhub run` with plain commands as workers.

use paramhub::ManagerClient;
use paramhub::service::JobState;
use rustix::process::Signal;

use crate::common::{Process, hub, is_alive, paramhub, wait_until};

/// `run` with a shell script as every worker.
fn run(workers: &str, script: &str) -> crate::common::Program {
    paramhub(["run", "-n", workers, "--", "sh", "-c", script])
}

/// The ids that workers print as `pid N`, once there are this many.
fn pids(process: &Process, count: usize) -> Vec<i32> {
    let read = || -> Vec<i32> {
        let text = process.stdout();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole).to_owned();
        whole.lines().filter_map(|line| line.split_once("pid ")?.1.parse().ok()).collect()
    };
    wait_until("the workers have started", || read().len() == count);
    read()
}

#[test]
fn each_worker_finds_its_place_in_the_environment() {
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $PARAMHUB_URL \
                  ${#PARAMHUB_JOB} ${#PARAMHUB_SECRET} [$PARAMHUB_ADMIN_TOKEN] $1; echo trouble >&2";
    let ended = paramhub(["run", "-n", "3", "--", "sh", "-c", script, "sh", "two words"])
        .env("PARAMHUB_ADMIN_TOKEN", "operators-only")
        .finish()
        .expect_code(0);
    let mut lines: Vec<&str> = ended.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines.len(), 3, "{}", ended.stdout);
    for (rank, line) in lines.iter().enumerate() {
        assert!(line.starts_with(&format!("[{rank}] {rank}/3 {rank}/3 127.0.0.1 ")), "{line}");
        assert!(line.contains("http://127.0.0.1:") && line.ends_with(" 32 64 [] two words"), "{line}");
        assert!(ended.stderr.contains(&format!("[{rank}] trouble\n")), "{}", ended.stderr);
    }
    let port = |line: &str| line.split(' ').nth(4).unwrap().to_owned();
    assert!(lines.iter().all(|line| port(line) == port(lines[0])));
}

#[test]
fn the_worst_exit_code_is_the_launchers() {
    run("3", "exit 0").finish().expect_code(0);
    let failed = run("3", "exit $((RANK * 3))").finish().expect_code(6);
    assert!(failed.stderr.contains("worker 2 exited with 6"), "{}", failed.stderr);
    let killed = run("1", "kill -9 $$").finish().expect_code(137);
    killed.expect_error(&["worker 0 was killed by SIGKILL"]);
    let missing = paramhub(["run", "-n", "2", "--", "no-such-program"]).finish().expect_code(1);
    missing.expect_error(&["worker 0", "no-such-program"]);
}

#[test]
fn lines_without_an_end_and_long_lines_arrive() {
    let ended = run("1", "printf '%0200000d' 7; printf '\\nlast'").finish().expect_code(0);
    assert_eq!(ended.stdout.matches('0').count(), 199_999 + ended.stdout.matches("[0]").count());
    assert!(ended.stdout.ends_with("[0] last\n"));
}

#[test]
fn signals_are_passed_on() {
    for (signal, name) in [(Signal::TERM, "TERM"), (Signal::INT, "INT")] {
        let script =
            format!("trap 'echo got {name}; exit 5' {name}; echo pid $$; while :; do sleep 0.05; done");
        let launcher = run("2", &script).start();
        pids(&launcher, 2);
        launcher.signal(signal);
        let ended = launcher.finish().expect_code(5);
        for rank in 0..2 {
            assert!(ended.stdout.contains(&format!("[{rank}] got {name}")), "{}", ended.stdout);
        }
    }
    let launcher = run("2", "echo pid $$; exec sleep 300").start();
    let workers = pids(&launcher, 2);
    launcher.signal(Signal::INT);
    launcher.finish().expect_code(130);
    assert!(!workers.into_iter().any(is_alive));
}

#[test]
fn a_second_signal_kills_workers_that_ignore_the_first() {
    let launcher =
        run("1", "trap 'echo not yet' TERM INT; echo pid $$; while :; do sleep 0.05; done").start();
    let workers = pids(&launcher, 1);
    launcher.signal(Signal::TERM);
    launcher.wait_for("not yet");
    launcher.signal(Signal::TERM);
    launcher.finish().expect_code(137);
    assert!(!is_alive(workers[0]));
}

#[test]
fn a_worker_that_fails_ends_the_others_after_a_grace_period() {
    let script = "case $RANK in
        0) sleep 1; echo what the hub said; exit 9;;
        1) exit 7;;
        *) trap 'echo asked to end; exit 11' TERM; while :; do sleep 0.05; done;;
        esac";
    // 11 is not a worker's own failure: it only answers the launcher's signal.
    let ended = run("3", script).finish().expect_code(9);
    for line in ["[0] what the hub said", "[2] asked to end"] {
        assert!(ended.stdout.contains(line), "no `{line}` in {}", ended.stdout);
    }
    let errors: Vec<&str> = ended.stderr.lines().filter(|line| line.starts_with("paramhub: ")).collect();
    assert_eq!(errors, ["paramhub: worker 1 exited with 7", "paramhub: worker 0 exited with 9"]);
}

#[test]
fn workers_and_the_processes_that_they_started_leave_nothing() {
    let script = "echo pid $$; sleep 300 & echo pid $!; wait";
    // Ended by a worker's own end, by a signal, and by the launcher's sudden death.
    let ended = run("1", "sleep 300 & echo pid $!").start();
    let left = pids(&ended, 1);
    ended.finish().expect_code(0);
    wait_until("what the worker left is gone", || !left.iter().any(|&pid| is_alive(pid)));

    let interrupted = run("2", script).start();
    let left = pids(&interrupted, 4);
    interrupted.signal(Signal::TERM);
    interrupted.finish().expect_code(143);
    assert!(!left.into_iter().any(is_alive));

    let killed = run("2", script).start();
    let left = pids(&killed, 4);
    killed.signal(Signal::KILL);
    wait_until("the workers of a killed launcher are gone", || !left.iter().any(|&pid| is_alive(pid)));
}

#[test]
fn a_running_hub_is_used_and_left_clean() {
    let (_hub, url) = hub([]);
    let client = ManagerClient::new(&url, None).unwrap();
    let launcher = paramhub([
        "run",
        "-n",
        "2",
        "--name",
        "mine",
        "--hub",
        &url,
        "--",
        "sh",
        "-c",
        "echo pid $$ ; sleep 300",
    ])
    .start();
    pids(&launcher, 2);
    assert_eq!(client.job("mine").unwrap().workers, 2);
    let taken = paramhub(["run", "--name", "mine", "--", "true"]).env("PARAMHUB_URL", &url);
    taken.finish().expect_code(1).expect_error(&["mine"]);
    launcher.signal(Signal::TERM);
    launcher.finish().expect_code(143);
    let ended = client.job("mine").unwrap();
    assert_eq!(
        (ended.state, &*ended.message),
        (JobState::Failed, "stopped: its launcher was interrupted by SIGTERM")
    );
    for (name, command, reason) in [
        ("shy", "true", "its workers ended without joining"),
        ("sick", "exit 3", "its worker 0 exited with 3"),
    ] {
        let launched = paramhub(["run", "--name", name, "--hub", &url, "--", "sh", "-c", command]);
        launched.finish();
        assert_eq!(client.job(name).unwrap().message, format!("stopped: {reason}"));
    }
    paramhub(["run", "--name", "lame", "--hub", &url, "--", "./no-such-program"]).finish().expect_code(1);
    assert_eq!(client.job("lame").unwrap().message, "stopped: its launcher could not start its workers");
}
