//! These tests show what survives a restart, and how a manager reports a state directory that it cannot
//! use.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::common::*;
use paramhub_core::service::{ErrorCode, JobState};
use paramhub_manager::{Manager, ManagerConfig};

fn config_in(directory: &Path) -> ManagerConfig {
    ManagerConfig { state: Some(directory.to_path_buf()), ..config() }
}

fn refusal_of(directory: &Path) -> String {
    Manager::start(config_in(directory)).unwrap_err().to_string()
}

#[test]
fn jobs_survive_a_restart_and_what_ran_has_failed() {
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
    let running = run("running");
    Job::create(&client, "connecting", 2);
    let before = client.jobs().unwrap();
    manager.stop();

    assert_eq!(fs::metadata(&state).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(fs::metadata(state.join("jobs.redb")).unwrap().permissions().mode() & 0o777, 0o600);

    let (manager, client) = start(config_in(&state));
    let after = client.jobs().unwrap();
    let names: Vec<&str> = after.iter().map(|job| job.name.as_str()).collect();
    assert_eq!(names, ["done", "running", "connecting"]);
    assert_eq!(after[0].ended_at, before[0].ended_at);
    assert_eq!((after[0].state, after[0].keys), (JobState::Finished, 2));
    for job in &after[1..] {
        assert_eq!(
            (job.state, job.message.as_str()),
            (JobState::Failed, "the manager restarted while it ran")
        );
    }
    // A worker that knows the nonce gets the reason; one without the nonce gets none.
    let running = Job { client: client.clone(), ..running };
    let late = running.connect(0);
    assert_eq!(code(&late), ErrorCode::JobEnded);
    assert!(message(&late).contains("the manager restarted"), "{late:?}");
    // The names are free, and new jobs come after the old ones.
    Job::create(&client, "running", 1);
    assert_eq!(client.jobs().unwrap().last().unwrap().state, JobState::Connecting);
    manager.stop();
    let (_manager, client) = start(config_in(&state));
    assert_eq!(client.jobs().unwrap().len(), 4);
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
