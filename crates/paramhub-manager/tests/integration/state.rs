//! These tests show what survives a restart, and how a manager reports a state directory that it cannot
//! use.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use crate::common::*;
use paramhub_core::service::{ErrorCode, HubReport, JobState, JobStatus, Presence};
use paramhub_manager::{Manager, ManagerConfig};

fn config_in(directory: &Path) -> ManagerConfig {
    ManagerConfig { state: Some(directory.to_path_buf()), ..config() }
}

fn refusal_of(directory: &Path) -> String {
    Manager::start(config_in(directory)).unwrap_err().to_string()
}

#[test]
fn jobs_and_hubs_survive_a_restart() {
    let scratch = tempfile::tempdir().unwrap();
    let state = scratch.path().join("a/b");
    let (manager, client) = start(config_in(&state));
    let hub = Hub::join(&client, HubBehaviour::Serve);
    let run = |name: &str| {
        let job = Job::create(&client, name, 1);
        job.connect(0).unwrap();
        job.init(0, settings(8)).unwrap();
        job
    };
    hub.finish(&run("done"));
    let (running, lost) = (run("running"), run("lost"));
    let beginning = Job::create(&client, "beginning", 2);
    beginning.all_ranks(0..2, |job, rank| job.connect(rank).unwrap());
    Job::create(&client, "connecting", 2);
    let before = client.jobs().unwrap();
    manager.stop();

    assert_eq!(fs::metadata(&state).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(fs::metadata(state.join("jobs.redb")).unwrap().permissions().mode() & 0o777, 0o600);

    let (manager, client) = start(config_in(&state));
    let after = client.jobs().unwrap();
    let shown = |jobs: &[JobStatus]| serde_json::to_string(jobs).unwrap();
    assert_eq!(shown(&after), shown(&before));
    let of = |job: Job| Job { client: client.clone(), ..job };
    let (running, lost, beginning) = (of(running), of(lost), of(beginning));
    // A rank whose answer was lost repeats its call.
    running.init(0, settings(8)).unwrap();
    assert_eq!(code(&running.connect_as(0, process(7))), ErrorCode::RankTaken);
    // The hub goes on under its number and token, and says which jobs it has.
    let number = hub.registered.hub;
    let hub = hub.go_on(&client, Some(lost.namespace));
    let state_of = |name: &str| client.job(name).unwrap().state;
    eventually("the job that the hub has lost has failed", || state_of("lost") == JobState::Failed);
    let message = client.job("lost").unwrap().message;
    assert_eq!(
        message,
        format!("hub {number} ({}) does not have the job any more", hub.shape.interfaces[0].address)
    );
    assert_eq!(state_of("running"), JobState::Running);
    // Ranks that had all connected hand in their settings again.
    beginning.all_ranks(0..2, |job, rank| job.init(rank, settings(8)).unwrap());
    for job in [&running, &beginning] {
        hub.finish(job);
    }
    assert_eq!([state_of("running"), state_of("beginning")], [JobState::Finished; 2]);
    // The names are free, and new jobs come after the old ones.
    let again = Job::create(&client, "running", 1);
    again.connect(0).unwrap();
    again.init(0, settings(8)).unwrap();
    assert_eq!(client.jobs().unwrap().last().unwrap().state, JobState::Running);
    manager.stop();
    let (_manager, client) = start(config_in(&state));
    assert_eq!(client.jobs().unwrap().len(), 6);
}

#[test]
fn a_job_whose_hub_does_not_come_back_after_a_restart_ends_when_a_rank_has_lost_it_too() {
    let scratch = tempfile::tempdir().unwrap();
    let config = ManagerConfig { hub_timeout: Duration::from_secs(1), ..config_in(scratch.path()) };
    let (manager, client) = start(config.clone());
    let hub = Hub::join(&client, HubBehaviour::Serve);
    let job = Job::create(&client, "running", 1);
    job.connect(0).unwrap();
    job.init(0, settings(8)).unwrap();
    manager.stop();
    let (registered, address) = (hub.registered.clone(), hub.shape.interfaces[0].address.clone());
    hub.die();
    let (manager, client) = start(config.clone());
    let job = Job { client: client.clone(), ..job };
    eventually("it is not heard", || client.hubs().unwrap()[0].unheard);
    assert_eq!(client.job("running").unwrap().state, JobState::Running);
    job.lose(0, &address).unwrap();
    eventually("it has failed", || client.job("running").unwrap().state == JobState::Failed);
    let refused = job.connect(0);
    assert!(message(&refused).contains("which the connection manager does not hear either"), "{refused:?}");
    manager.stop();
    let (manager, client) = start(config.clone());
    assert_eq!(client.hubs().unwrap().len(), 1, "it may still come back");
    let leaves = HubReport { presence: Presence::Gone, ..HubReport::default() };
    client.report(&registered, &leaves).unwrap();
    manager.stop();
    let (_manager, client) = start(config);
    assert!(client.hubs().unwrap().is_empty(), "a hub that is gone is gone from the disk, too");
}

#[test]
fn a_job_is_on_disk_before_its_creation_is_answered() {
    let scratch = tempfile::tempdir().unwrap();
    let (_manager, client) = start(config_in(&scratch.path().join("live")));
    let job = Job::create(&client, "crashed", 1);
    // The files as a crash at this moment would leave them.
    let copy = scratch.path().join("copy");
    fs::create_dir(&copy).unwrap();
    fs::copy(scratch.path().join("live/jobs.redb"), copy.join("jobs.redb")).unwrap();
    let (_manager, client) = start(config_in(&copy));
    assert_eq!(client.job("crashed").unwrap().namespace, job.namespace);
}

#[test]
fn only_the_newest_ended_jobs_are_remembered() {
    let scratch = tempfile::tempdir().unwrap();
    let config = ManagerConfig { ended_jobs_max: 3, ..config_in(scratch.path()) };
    let (manager, client) = start(config.clone());
    for name in ["a", "b", "c", "d", "e"] {
        Job::create(&client, name, 1);
        client.stop_job(name).unwrap();
    }
    let names = |client: &paramhub_control::ManagerClient| -> Vec<String> {
        client.jobs().unwrap().into_iter().map(|job| job.name).collect()
    };
    assert_eq!(names(&client), ["c", "d", "e"]);
    manager.stop();
    let (_manager, client) = start(ManagerConfig { ended_jobs_max: 1000, ..config });
    assert_eq!(names(&client), ["c", "d", "e"], "the others are gone from the disk too");
}

#[test]
fn living_jobs_are_bounded() {
    let (_manager, client) = start(ManagerConfig { living_jobs_max: 1, ..config() });
    Job::create(&client, "only", 1);
    let another = paramhub_core::service::CreateService {
        name: "another".into(),
        workers: 1,
        options: Default::default(),
    };
    assert_eq!(code(&client.create_service(&another)), ErrorCode::DoesNotFit);
    client.stop_job("only").unwrap();
    client.create_service(&another).unwrap();
}

#[test]
fn a_directory_that_takes_no_files_is_refused_with_its_path_and_a_way_out() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("file");
    fs::write(&file, "not a directory").unwrap();
    // No directory here accepts files, even from root.
    let under_a_file = file.join("state");
    for directory in [file.as_path(), &under_a_file, Path::new("/proc/paramhub"), Path::new("/sys/kernel")] {
        let refused = refusal_of(directory);
        assert!(refused.contains(directory.to_str().unwrap()), "{refused}");
        assert!(refused.contains("os error") && refused.contains("--state"), "{refused}");
    }
    let blocked = scratch.path().join("blocked");
    fs::create_dir_all(blocked.join("jobs.redb")).unwrap();
    assert!(refusal_of(&blocked).contains("jobs.redb"));
}

#[test]
fn a_corrupt_store_is_refused_and_left_as_it_is() {
    let scratch = tempfile::tempdir().unwrap();
    let (manager, client) = start(config_in(scratch.path()));
    Job::create(&client, "valuable", 1);
    manager.stop();
    let file = scratch.path().join("jobs.redb");
    let whole = fs::read(&file).unwrap();
    let noise: Vec<u8> = (0..whole.len()).map(|index| ((index * 2_654_435_761) >> 7) as u8).collect();
    let mut damaged = whole.clone();
    for byte in damaged.iter_mut().skip(64).step_by(3) {
        *byte ^= 0x5a;
    }
    for content in [&noise[..], b"short", &damaged] {
        fs::write(&file, content).unwrap();
        let refused = refusal_of(scratch.path());
        assert!(refused.contains("jobs.redb") && refused.contains("Move that file away"), "{refused}");
    }
    fs::write(&file, &whole).unwrap();
    let (_manager, client) = start(config_in(scratch.path()));
    assert_eq!(client.jobs().unwrap().len(), 1);
}

#[test]
fn two_managers_cannot_share_a_directory() {
    let scratch = tempfile::tempdir().unwrap();
    let (_manager, _client) = start(config_in(scratch.path()));
    let refused = refusal_of(scratch.path());
    assert!(refused.contains("Another connection manager uses it"), "{refused}");
}
