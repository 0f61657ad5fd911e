//! Secrets that are replaced while jobs live, and a state that moves to another manager.

use crate::common::*;
use paramhub_control::ManagerClient;
use paramhub_core::service::{CreateToken, ErrorCode, JobState, TeamQuotas, TokenRole};
use paramhub_manager::{Manager, ManagerConfig, restore};

const TOKEN: &str = "the-first-token";

fn with_token(config: ManagerConfig) -> ManagerConfig {
    ManagerConfig { admin_token: Some(TOKEN.into()), ..config }
}

#[test]
fn a_replaced_secret_keeps_out_late_callers_and_no_rank_that_has_joined() {
    let (_manager, client) = start(config());
    let hub = Hub::join(&client, HubBehaviour::Serve);
    let job = Job::create(&client, "rotated", 2);
    let replaced = client.replace_secret("rotated").unwrap();
    assert_eq!(replaced.namespace, job.namespace);
    assert_ne!(replaced.nonce, job.nonce);
    assert_eq!(code(&job.connect(0)), ErrorCode::WrongNonce, "the former secret");
    let renewed = Job { nonce: replaced.nonce, ..job.clone() };
    for connected in renewed.all_ranks(0..2, Job::connect) {
        connected.unwrap();
    }
    let again = client.replace_secret("rotated").unwrap();
    assert_ne!(again.nonce, replaced.nonce);
    for initialised in renewed.all_ranks(0..2, |job, rank| job.init(rank, settings(8))) {
        initialised.unwrap();
    }
    assert_eq!(client.job("rotated").unwrap().state, JobState::Running);
    assert_eq!(code(&renewed.connect(1)), ErrorCode::WrongNonce);
    hub.finish(&renewed);
    assert_eq!(code(&client.replace_secret("rotated")), ErrorCode::JobEnded);
    assert_eq!(code(&client.replace_secret("unknown")), ErrorCode::NotFound);
}

#[test]
fn a_saved_state_starts_another_manager() {
    let folders = tempfile::tempdir().unwrap();
    let manager = Manager::start(with_token(config())).unwrap();
    let of = |manager: &paramhub_manager::RunningManager, token: &str| {
        ManagerClient::new(&format!("https://{}", manager.address()), Some(token.to_owned())).unwrap()
    };
    let admin = of(&manager, TOKEN);
    admin.set_team("vision", &TeamQuotas::default()).unwrap();
    let create = |name: &str, role| CreateToken { name: name.into(), role, team: None };
    let second = admin.create_token(&create("second", TokenRole::Admin)).unwrap();
    let reader = admin.create_token(&create("reader", TokenRole::Reader)).unwrap();
    admin.revoke_token("reader").unwrap();
    Job::create(&admin, "waits", 2);
    let authority = admin.authority().unwrap();
    assert_eq!(code(&of(&manager, &reader.token).state()), ErrorCode::Unauthorized);
    let saved = admin.state().unwrap();
    manager.stop();

    let state = folders.path().join("restored");
    restore(&saved, &state).unwrap();
    let refused = restore(&saved, &state).unwrap_err().to_string();
    assert!(refused.contains("is there already") && refused.contains("name another"), "{refused}");
    let names: Vec<_> = std::fs::read_dir(&state).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["jobs.redb"]);
    let restored = Manager::start(with_token(ManagerConfig { state: Some(state), ..config() })).unwrap();
    let admin = of(&restored, &second.token);
    assert_eq!(admin.authority().unwrap(), authority);
    assert_eq!(admin.jobs().unwrap().iter().map(|job| job.name.as_str()).collect::<Vec<_>>(), ["waits"]);
    assert_eq!(admin.teams().unwrap().len(), 1);
    assert_eq!(code(&of(&restored, &reader.token).jobs()), ErrorCode::Unauthorized, "it stays revoked");
}

/// Without a token every process of the machine is admitted, and the state has every secret.
#[test]
fn a_manager_without_a_token_shows_its_state_to_nobody() {
    let (_manager, client) = start(config());
    assert_eq!(code(&client.state()), ErrorCode::Forbidden);
}

#[test]
fn an_interrupted_restore_is_named() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("restoring")).unwrap();
    let empty = br#"{"paramhub_state": 1, "jobs": [], "tokens": [], "teams": [], "authorities": []}"#;
    let refused = restore(empty, folder.path()).unwrap_err().to_string();
    assert!(refused.contains("Remove the directory `restoring`"), "{refused}");
    std::fs::remove_dir(folder.path().join("restoring")).unwrap();
    restore(empty, folder.path()).unwrap();
}

#[test]
fn what_is_no_backup_is_refused_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let version = r#"{"paramhub_state": 9, "jobs": [], "tokens": [], "teams": [], "authorities": []}"#;
    for (bytes, why) in [
        (&b""[..], "EOF"),
        (b"{}", "missing field"),
        (version.as_bytes(), "version 9"),
        (b"SQLite format 3", "expected value"),
    ] {
        let state = folder.path().join("state");
        let refused = restore(bytes, &state).unwrap_err().to_string();
        assert!(refused.contains("no backup") && refused.contains(why), "{refused}");
        assert!(!state.exists());
    }
}
