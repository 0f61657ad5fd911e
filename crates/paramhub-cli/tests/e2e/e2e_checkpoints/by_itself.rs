//! Everything dies at once, and the same command goes on.

use super::cluster::{all, complete, scratch};
use crate::common::{
    Finished, Process, Program, free_address, hub, paramhub, program, wait_until, workers_of,
};
use paramhub::ManagerClient;
use paramhub::service::{CreateService, JobOptions, JobState, OnWorkerLoss};
use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;

const STEPS: &str = "step 1/220";
const TRAIN: &[&str] =
    &["train", "--net", "lenet", "--epochs", "5", "--reproducible", "--save=p.safetensors"];

/// Ends a launcher, the hub and manager in its process, and its workers, all by SIGKILL, as soon as the job has a
/// checkpoint. Returns the step of its newest one.
fn kill_with_a_checkpoint(launcher: Process, folder: &Path, job: &str, also: Option<Process>) -> u32 {
    wait_until("a checkpoint", || !complete(folder, job).is_empty());
    let workers = workers_of(launcher.pid());
    let others = workers.into_iter().chain(also.as_ref().map(|process| process.pid().as_raw_nonzero().get()));
    launcher.signal(Signal::KILL);
    for pid in others {
        // It may have ended with the launcher already.
        let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
    }
    let killed = launcher.finish();
    assert!(!killed.stderr.contains("step 220/220"), "it was over before it was killed: {}", killed.stderr);
    drop(also);
    complete(folder, job)[0]
}

/// The parameters at the end, which are those of an undisturbed run.
fn parameters(ended: Finished) -> Vec<u8> {
    ended.expect_code(0).read("p.safetensors")
}

fn contains(ended: &Finished, part: &str) {
    assert!(ended.stderr.contains(part), "no `{part}` in {}", ended.stderr);
}

#[test]
fn a_training_that_is_killed_with_its_hub_goes_on_by_the_same_command_to_the_same_bits() {
    let undisturbed = parameters(paramhub(TRAIN.iter().copied().chain(["--workers", "2"])).finish());
    let folder = scratch();
    let path = folder.path().to_str().unwrap();
    let kept = ["--workers", "2", "--name", "digits", "--checkpoints", path, "--checkpoint-every", "9"];
    let command = |more: &[&'static str]| paramhub(TRAIN.iter().copied().chain(kept).chain(more.to_vec()));
    let first = kill_with_a_checkpoint(command(&[]).start(), folder.path(), "digits", None);
    // Twice, since the run that goes on can be cut off, too.
    let again = command(&[]).start();
    wait_until("a newer checkpoint", || complete(folder.path(), "digits")[0] > first);
    let second = kill_with_a_checkpoint(again, folder.path(), "digits", None);
    let third = command(&[]).finish();
    contains(&third, "the last run of job `digits` has not finished, so this one goes on");
    contains(&third, &format!("from its checkpoint of step {second}. To begin anew, say --resume=never"));
    assert!(!third.stderr.contains(STEPS), "{}", third.stderr);
    assert!(parameters(third) == undisturbed, "other bits after two kills, from steps {first} and {second}");

    let after_the_end = command(&[]).finish();
    contains(&after_the_end, "job `digits` begins anew: its last run finished at step 220");
    contains(&after_the_end, STEPS);
    assert!(parameters(after_the_end) == undisturbed);

    kill_with_a_checkpoint(command(&[]).start(), folder.path(), "digits", None);
    let anew = command(&["--resume=never"]).finish();
    assert!(!anew.stderr.contains("goes on from"), "{}", anew.stderr);
    contains(&anew, STEPS);
    assert!(parameters(anew) == undisturbed);
}

#[test]
fn a_run_that_is_killed_with_its_hub_is_not_gone_on_with_under_another_name_or_with_another_model() {
    let folder = scratch();
    let path = folder.path().to_str().unwrap();
    let run = |name: &'static str, net: &'static str| -> Program {
        let run = ["run", "-n", "2", "--name", name, "--checkpoints", path, "--checkpoint-every", "9"];
        let policy = ["--on-worker-loss", "rewind", "--max-restarts", "1", "--"];
        let train =
            [env!("CARGO_BIN_EXE_paramhub"), "train", "--net", net, "--epochs", "5", "--reproducible"];
        let rest = run.into_iter().chain(policy).chain(train);
        paramhub(rest.chain(["--save=p.safetensors"]))
    };
    let undisturbed = parameters(run("undisturbed", "lenet").finish());
    let step = kill_with_a_checkpoint(run("mine", "lenet").start(), folder.path(), "mine", None);
    let other = run("theirs", "lenet").finish();
    assert!(other.stderr.contains(&format!("[0] {STEPS}")), "{}", other.stderr);
    assert!(parameters(other) == undisturbed);
    let refused = run("mine", "mlp").finish();
    assert_ne!(refused.code, 0);
    contains(&refused, "its last run has not finished, and its checkpoint of step");
    contains(&refused, "it is of another key table");
    contains(&refused, "begin anew with --resume=never");
    let mine = run("mine", "lenet").finish();
    contains(&mine, &format!("goes on from its checkpoint of step {step}."));
    assert!(parameters(mine) == undisturbed, "other bits, from step {step}");
}

#[test]
fn a_hub_and_a_manager_that_are_killed_with_everything_else_are_started_again_and_the_job_goes_on() {
    let (folder, state) = (scratch(), scratch());
    let [path, state] = [&folder, &state].map(|folder| folder.path().to_str().unwrap());
    // By its address a hub is known as the one that was killed.
    let [listen, manager] = [free_address(), free_address()];
    let addresses = ["--listen", &listen, "--manager", &manager];
    let start_hub = || hub(addresses.into_iter().chain(["--checkpoints", path, "--state", state]));
    let run = |url: &str| {
        let run =
            ["run", "-n", "2", "--hub", url, "--name", "far", "--checkpoint-every", "9", "--resume=auto"];
        let train = [env!("CARGO_BIN_EXE_paramhub"), "train", "--net", "lenet", "--epochs", "5"];
        let rest = ["--reproducible", "--save=p.safetensors"];
        program(
            Path::new(env!("CARGO_BIN_EXE_paramhub")),
            run.into_iter().chain(["--on-worker-loss", "rewind", "--"]).chain(train).chain(rest),
        )
    };
    let undisturbed = parameters(paramhub(TRAIN.iter().copied().chain(["--workers", "2"])).finish());
    let (before, url) = start_hub();
    let step = kill_with_a_checkpoint(run(&url).start(), folder.path(), "far", Some(before));
    let (after, url) = start_hub();
    let again = run(&url).finish();
    assert!(parameters(again) == undisturbed, "other bits, from step {step}");
    wait_until("the hub says so", || {
        after.stderr().contains(&format!("job `far` goes on from its checkpoint of step {step}"))
    });
    after.signal(Signal::TERM);
    after.finish().expect_code(0);
}

#[test]
fn a_job_for_whose_workers_nobody_comes_leaves_a_checkpoint_of_its_last_step() {
    let folder = scratch();
    let (hub, url) = hub(["--checkpoints", folder.path().to_str().unwrap()]);
    let client = ManagerClient::new(&url, None).unwrap();
    let undisturbed = parameters(paramhub(TRAIN.iter().copied().chain(["--workers", "2"])).finish());
    let start = |linger_s: f64| -> Vec<Process> {
        let options = JobOptions {
            on_worker_loss: OnWorkerLoss::Rewind,
            linger_s,
            checkpoint_every: Some("1000000".parse().unwrap()),
            resume: Some("auto".parse().unwrap()),
            ..JobOptions::default()
        };
        let request = CreateService { name: "left".into(), workers: 2, options };
        let created = client.create_service(&request).unwrap();
        let worker = |rank: &str| {
            paramhub(TRAIN.iter().copied())
                .env("PARAMHUB_URL", &url)
                .env("PARAMHUB_JOB", &created.namespace.to_string())
                .env("PARAMHUB_SECRET", &String::from(created.secret()))
                .env("RANK", rank)
                .env("WORLD_SIZE", "2")
                .env("LOCAL_RANK", rank)
                .env("LOCAL_WORLD_SIZE", "2")
                .start()
        };
        ["0", "1"].map(worker).into()
    };
    let workers = start(1.0);
    wait_until("some steps", || client.job("left").is_ok_and(|job| job.counters.steps > 20));
    workers.iter().for_each(|worker| worker.signal(Signal::KILL));
    wait_until("the job fails", || client.job("left").unwrap().state == JobState::Failed);
    let message = client.job("left").unwrap().message;
    let steps = complete(folder.path(), "left");
    assert_eq!(steps.len(), 1, "{message}");
    all(folder.path(), "left")[0].verify().unwrap();
    assert!(steps[0] >= 20, "{steps:?}");
    assert!(message.contains("no other process has come for 1 s"), "{message}");
    assert!(message.contains(&format!("checkpoint, of step {}, has been written", steps[0])), "{message}");
    drop(workers);
    let ended: Vec<Finished> = start(300.0).into_iter().map(Process::finish).collect();
    let [rank_0, rank_1] = <[Finished; 2]>::try_from(ended).unwrap();
    rank_1.expect_code(0);
    assert!(!rank_0.stderr.contains(STEPS), "{}", rank_0.stderr);
    assert!(parameters(rank_0) == undisturbed, "other bits, from step {}", steps[0]);
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
}
