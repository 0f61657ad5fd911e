//! Late workers are left out of a step: real processes, one of which sleeps ten times as long as the others.

use std::path::Path;

use paramhub::service::{CreateService, JobOptions, JobState};
use paramhub::{ManagerClient, Stragglers};
use rustix::process::Signal;

use crate::common::{Finished, Process, example, hub, paramhub, wait_until};

/// Worker processes that sleep 10 ms a step, under `paramhub run`.
fn run(workers: &str, more: &[&str], worker: &[&str]) -> Finished {
    let exchange = Path::new(env!("CARGO_BIN_EXE_paramhub")).with_file_name("examples").join("exchange");
    let program = exchange.to_str().expect("a path in UTF-8");
    let before = ["run", "-n", workers];
    let after = ["--", program, "--by-job-steps", "--compute-ms", "10"];
    paramhub(before.into_iter().chain(more.iter().copied()).chain(after).chain(worker.iter().copied()))
        .finish()
        .expect_code(0)
}

/// The steps and seconds that a rank prints at its end.
fn finished(ended: &Finished, rank: u32) -> (u32, f64) {
    let line = ended.stdout.lines().find(|line| line.contains(&format!("rank {rank} finished"))).unwrap();
    let words: Vec<&str> = line.split(' ').collect();
    let after = |word: &str| words[words.iter().position(|&other| other == word).unwrap() + 1];
    (after("finished").parse().unwrap(), after("in").parse().unwrap())
}

fn expect_error_parts(ended: Finished, parts: &[&str]) {
    parts.iter().for_each(|part| assert!(ended.stderr.contains(part), "no `{part}` in: {}", ended.stderr));
}

#[test]
fn the_others_go_on_at_their_own_pace_and_the_late_rank_is_named() {
    for how in ["backup:1", "drop:0.5"] {
        let alone = run("3", &[], &["--steps", "150"]);
        let late = run("4", &["--stragglers", how], &["--steps", "150", "--slow", "3:10"]);
        let ((_, alone_s), (steps, late_s)) = (finished(&alone, 0), finished(&late, 0));
        // If they had waited, it would be ten times as long. Other load on the machine may slow either run.
        assert!(
            late_s < 5.0 * alone_s,
            "{how}: {late_s} s for {steps} steps, {alone_s} s without the late one"
        );
        let (of_late, _) = finished(&late, 3);
        assert!(of_late < 60, "{how}: {of_late} steps of 150 by the one that takes ten times as long");
        for rank in [0, 3] {
            let notice = format!("[{rank}] notice: rank 3 of job `");
            assert!(late.stdout.contains(&notice), "{how}: {}", late.stdout);
        }
        assert!(late.stderr.contains("left out because it was late: rank 3, of "), "{how}: {}", late.stderr);
        // Hub and manager are one process here, with one log.
        let warned = late.stderr.lines().filter(|line| line.contains(" WARN "));
        let mut warned: Vec<&str> =
            warned.filter_map(|line| line.find("rank 3 of job `").map(|at| &line[at..])).collect();
        let all = warned.len();
        warned.sort();
        warned.dedup();
        assert!(all > 0 && warned.len() == all, "{how}: a warning comes twice: {}", late.stderr);
    }
}

#[test]
fn a_late_worker_that_dies_ends_the_job_as_any_other() {
    let (hub, url) = hub([]);
    let client = ManagerClient::new(&url, None).unwrap();
    let options = JobOptions { stragglers: Stragglers::Backup(1), ..Default::default() };
    let request = CreateService { name: "mortal".into(), workers: 3, options };
    let created = client.create_service(&request).unwrap();
    let workers: Vec<Process> = (0..3)
        .map(|rank: u32| {
            let arguments = ["--by-job-steps", "--steps", "1000000", "--compute-ms", "1", "--slow", "2:1000"];
            example("exchange", arguments)
                .env("PARAMHUB_URL", &url)
                .env("PARAMHUB_JOB", &created.namespace.to_string())
                .env("PARAMHUB_SECRET", &String::from(created.secret()))
                .env("RANK", &rank.to_string())
                .start()
        })
        .collect();
    wait_until("rank 2 is left out", || {
        client.job("mortal").is_ok_and(|status| status.left_out.get(2).is_some_and(|&missed| missed > 100))
    });
    let status = client.job("mortal").unwrap();
    assert_eq!((status.state, &status.left_out[..2]), (JobState::Running, &[0, 0][..]), "{status:?}");
    let shown = paramhub(["jobs", "show", "mortal", "--hub", &url]).finish().expect_code(0);
    assert!(
        shown.stdout.contains("rank 2, of ") && shown.stdout.contains("updates of chunks ("),
        "{}",
        shown.stdout
    );
    workers[2].signal(Signal::KILL);
    for (rank, worker) in workers.into_iter().enumerate() {
        match rank {
            2 => drop(worker.finish()),
            _ => expect_error_parts(worker.finish().expect_code(1), &["rank 2 was lost"]),
        }
    }
    let status = client.job("mortal").unwrap();
    assert_eq!(status.state, JobState::Failed);
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
}

#[test]
fn training_goes_on_without_the_last_and_ends_at_the_job_s_last_step() {
    let trained = paramhub(["train", "--workers", "3", "--epochs", "4", "--stragglers", "backup:1"]).finish();
    let trained = trained.expect_code(0);
    assert!(trained.stdout.contains("accuracy"), "{}", trained.stdout);
    let refused = paramhub(["train", "--workers", "2", "--stragglers", "backup:2"]).finish().expect_code(2);
    expect_error_parts(refused, &["cannot have stragglers = backup:2", "use backup:1 or less"]);
    let odd = paramhub(["run", "-n", "2", "--stragglers", "drop:0", "--", "true"]).finish().expect_code(2);
    expect_error_parts(odd, &["the fraction must be a number above 0"]);
}
