//! A disk that fills up while a manager runs. The test has a file of its own, because the limit holds for the
//! process.

#[path = "integration/common/mod.rs"]
mod common;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use common::*;
use paramhub_core::service::{CreateService, ErrorCode, JobOptions, JobState};
use paramhub_manager::ManagerConfig;
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};

#[test]
fn a_full_disk_costs_the_new_job_only() {
    // The kernel refuses writes beyond this limit as it does on a full disk, even to root.
    signal_hook::flag::register(Signal::XFSZ.as_raw(), Arc::new(AtomicBool::new(false))).unwrap();
    let before = getrlimit(Resource::Fsize);

    let scratch = tempfile::tempdir().unwrap();
    let (manager, client) = start(ManagerConfig { state: Some(scratch.path().to_path_buf()), ..config() });
    let hub = Hub::join(&client, HubBehaviour::Serve);
    let job = Job::create(&client, "older", 2);
    job.all_ranks(0..2, Job::connect).into_iter().for_each(|answer| drop(answer.unwrap()));

    let newer = CreateService { name: "newer".into(), workers: 1, options: JobOptions::default() };
    setrlimit(Resource::Fsize, Rlimit { current: Some(4096), maximum: before.maximum }).unwrap();
    let refused = client.create_service(&newer);
    let again = client.create_service(&newer);
    let initialised = job.all_ranks(0..2, |job, rank| job.init(rank, settings(8)));
    let state = client.job("older").unwrap().state;
    let count = client.jobs().unwrap().len();
    setrlimit(Resource::Fsize, before).unwrap();

    for refused in [refused, again] {
        assert_eq!(code(&refused), ErrorCode::Internal);
        let text = message(&refused);
        assert!(text.contains("job `newer` was not created") && text.contains("jobs.redb"), "{text}");
    }
    assert_eq!((count, state), (1, JobState::Running));
    assert!(initialised.iter().all(Result::is_ok), "{initialised:?}");

    // There is room again: the name is free, and what could not be saved before is saved now.
    client.create_service(&newer).unwrap();
    hub.finish(&job);
    eventually("the older job's end is on disk", || {
        let copy = tempfile::tempdir().unwrap();
        std::fs::copy(scratch.path().join("jobs.redb"), copy.path().join("jobs.redb")).unwrap();
        let (_manager, client) = start(ManagerConfig { state: Some(copy.path().to_path_buf()), ..config() });
        client.job("older").unwrap().state == JobState::Finished
    });
    manager.stop();
}
