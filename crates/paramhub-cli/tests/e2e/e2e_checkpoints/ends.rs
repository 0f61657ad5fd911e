//! Hubs that end while checkpoints are under way, in order or killed.

use std::time::Duration;

use super::cluster::{all, complete, scratch};
use crate::common::{hub, paramhub, wait_until};
use paramhub::checkpoint::Resume;
use paramhub::service::{CreateService, JobOptions};
use paramhub::settings::{OptimizerChoice, Settings};
use paramhub::{Hyperparameters, Key, KeyTable, ManagerClient, Member, Membership, Options};
use paramhub_hub::{CheckpointFlaw, FoundCheckpoint};
use rustix::process::Signal;

/// Runs a job of one worker at a hub in another process, until it is ended. Returns the step at which it
/// began.
fn push_until_the_end(url: &str, name: &str, every: &str, resume: Option<Resume>) -> Result<u32, String> {
    let options = JobOptions { checkpoint_every: Some(every.parse().unwrap()), resume, ..Default::default() };
    let client = ManagerClient::new(url, None).unwrap();
    let request = CreateService { name: name.into(), workers: 1, options };
    let created = client.create_service(&request).map_err(|error| error.to_string())?;
    let membership = Membership::of_job(url, &created, 0);
    let hyperparameters = Hyperparameters { momentum: 0.9, ..Default::default() };
    let settings = Settings {
        optimizer: OptimizerChoice {
            hyperparameters: Some(hyperparameters),
            ..OptimizerChoice::named("sgd")
        },
        ..Settings::new(KeyTable::new(vec![Key::new("w", [1 << 19])]).unwrap())
    };
    let member = Member::connect_with(membership, Options::default()).map_err(|error| error.to_string())?;
    let job = member.init(settings).map_err(|error| error.to_string())?;
    let begin = job.resumed_step().unwrap_or(0);
    let mut model = vec![vec![0.0_f32; 1 << 19]];
    job.broadcast(&mut model, 0).map_err(|error| error.to_string())?;
    let (mut gradient, mut out) = (vec![1e-3_f32; 1 << 19], model.remove(0));
    loop {
        let exchanged = job.push_pull(0, gradient, out).and_then(|handle| handle.wait());
        let Ok(back) = exchanged else { return Ok(begin) };
        (gradient, out) = back;
        // Some computing: a job that only exchanged would leave no time for writing.
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_hub_killed_in_mid_write_at_fifty_random_points_loses_nothing_that_was_complete() {
    let folder = scratch();
    let path = folder.path().to_str().unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let seed = now.as_nanos() as u64;
    println!("seed {seed}");
    let mut random = seed | 1;
    let (mut unfinished, mut newest) = (0, None);
    for round in 0..50 {
        let (hub, url) = hub(["--checkpoints", path, "--checkpoint-keep", "2"]);
        let resume = newest.map(|_| Resume::Latest);
        let worker = std::thread::spawn(move || push_until_the_end(&url, "killed", "1", resume));
        wait_until("a newer checkpoint", || {
            assert!(!worker.is_finished(), "round {round}: the worker has ended");
            complete(folder.path(), "killed").first() > newest.as_ref()
        });
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        std::thread::sleep(Duration::from_micros((random >> 33) % 40_000));
        let before = complete(folder.path(), "killed").remove(0);
        hub.signal(Signal::KILL);
        drop(hub);
        let begin = worker.join().unwrap().unwrap();
        assert_eq!(begin, newest.unwrap_or(0), "round {round} of seed {seed}: it went on from the newest");
        let left = all(folder.path(), "killed");
        let whole: Vec<&FoundCheckpoint> = left.iter().filter(|found| found.flaw.is_none()).collect();
        for found in &left {
            assert!(
                !matches!(found.flaw, Some(CheckpointFlaw::Damaged(_))),
                "round {round} of seed {seed}: {found:?}"
            );
        }
        whole.iter().for_each(|found| found.verify().unwrap());
        assert!(whole[0].step >= before, "round {round} of seed {seed}: {} was complete", before);
        unfinished += usize::from(left.iter().any(|found| found.flaw == Some(CheckpointFlaw::Incomplete)));
        newest = Some(whole[0].step);
    }
    assert!(unfinished > 10, "{unfinished} of 50 were killed in mid-write: the pauses are no good");
    assert!(all(folder.path(), "killed").len() <= 2 + 4, "what is unfinished does not pile up");
    let verified = paramhub(["checkpoints", "verify", path]).finish().expect_code(0);
    assert!(verified.stdout.contains("verified"), "{}", verified.stdout);
}

#[test]
fn a_hub_that_is_asked_to_end_writes_the_newest_step() {
    let folder = scratch();
    let path = folder.path().to_str().unwrap();
    let (hub, url) = hub(["--checkpoints", path]);
    let (at, name) = (url.clone(), "ended");
    let worker = std::thread::spawn(move || push_until_the_end(&at, name, "1000000", None));
    let client = ManagerClient::new(&url, None).unwrap();
    wait_until("some steps", || client.job(name).is_ok_and(|job| job.counters.updates > 1000));
    assert!(complete(folder.path(), name).is_empty());
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
    worker.join().unwrap().unwrap();
    let steps = complete(folder.path(), name);
    assert!(steps.len() == 1 && steps[0] >= 10, "{steps:?}");
    all(folder.path(), name)[0].verify().unwrap();
}
