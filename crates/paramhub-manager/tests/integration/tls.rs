//! Calls over TLS: who is recognised as the manager, and what a replaced authority changes.

use std::io::{Read, Write};
use std::net::TcpStream;

use crate::common::*;
use paramhub_control::{ControlError, ManagerClient};
use paramhub_core::auth::Fingerprint;
use paramhub_core::service::{CreateToken, ErrorCode, JobState, ReplaceAuthority, TokenRole};
use paramhub_core::tokens::CONFIGURED;
use paramhub_manager::{Manager, ManagerConfig, RunningManager};

const TOKEN: &str = "the-first-token";

fn with_token(config: ManagerConfig) -> ManagerConfig {
    ManagerConfig { admin_token: Some(TOKEN.into()), ..config }
}

fn encrypted(manager: &RunningManager) -> String {
    format!("https://{}", manager.address())
}

fn by_token(manager: &RunningManager, token: &str) -> ManagerClient {
    ManagerClient::new(&encrypted(manager), Some(token.to_owned())).unwrap()
}

/// A client that has no token: the manager refuses its calls, but only if it has recognised the manager before.
fn by_fingerprint(manager: &RunningManager, authority: Fingerprint) -> ManagerClient {
    ManagerClient::of_worker(&encrypted(manager), Some(authority)).unwrap()
}

#[track_caller]
fn assert_unrecognised<T: std::fmt::Debug>(result: Result<T, ControlError>, part: &str) {
    let refused = result.unwrap_err();
    assert!(matches!(refused, ControlError::Unrecognised { .. }), "{refused:?}");
    assert!(refused.to_string().contains(part), "{refused}");
}

#[test]
fn a_whole_job_goes_over_tls() {
    let manager = Manager::start(with_token(config())).unwrap();
    let client = by_token(&manager, TOKEN);
    let hub = Hub::join(&client, HubBehaviour::Serve);
    let authority = client.authority().unwrap().fingerprint;
    let mut job = Job::create(&client, "encrypted", 2);
    job.client = by_fingerprint(&manager, authority);
    for connected in job.all_ranks(0..2, Job::connect) {
        connected.unwrap();
    }
    // More than one record, and than the buffers of an unauthenticated caller.
    for initialised in job.all_ranks(0..2, |job, rank| job.init(rank, many_keys(2000))) {
        initialised.unwrap();
    }
    hub.finish(&job);
    assert_eq!(client.job("encrypted").unwrap().state, JobState::Finished);
}

#[test]
fn a_manager_is_recognised_by_a_token_of_its_own_alone() {
    let manager = Manager::start(with_token(config())).unwrap();
    let admin = by_token(&manager, TOKEN);
    let made = admin
        .create_token(&CreateToken { name: "second".into(), role: TokenRole::Admin, team: None })
        .unwrap();
    assert!(by_token(&manager, &made.token).jobs().unwrap().is_empty());
    let wrong = by_token(&manager, "another-token").jobs();
    assert_eq!(code(&wrong), ErrorCode::Unauthorized);
    assert!(message(&wrong).contains("does not know the token"), "{}", message(&wrong));
    // A revoked one is as good as none, for callers that have yet to recognise the manager, and for others.
    let second = by_token(&manager, &made.token);
    second.revoke_token(CONFIGURED).unwrap();
    assert_eq!(code(&by_token(&manager, TOKEN).jobs()), ErrorCode::Unauthorized);
    assert_eq!(code(&admin.jobs()), ErrorCode::Unauthorized);
    assert!(second.jobs().unwrap().is_empty());
}

#[test]
fn a_worker_recognises_the_manager_by_the_fingerprint_alone() {
    let manager = Manager::start(with_token(config())).unwrap();
    let authority = by_token(&manager, TOKEN).authority().unwrap().fingerprint;
    assert_eq!(code(&by_fingerprint(&manager, authority).jobs()), ErrorCode::Unauthorized);
    let other = Fingerprint([7; 32]);
    assert_unrecognised(by_fingerprint(&manager, other).jobs(), "another program answers there");
    let nothing = ManagerClient::of_worker(&encrypted(&manager), None).unwrap();
    assert_unrecognised(nothing.jobs(), "nothing tells by what to recognise it");
}

/// A manager that kept nothing has another authority after a restart. A hub, which has a token, goes on.
#[test]
fn the_bearer_of_a_token_learns_a_new_authority_and_a_worker_does_not() {
    let before = Manager::start(with_token(config())).unwrap();
    let address = before.address();
    let operator = by_token(&before, TOKEN);
    let authority = operator.authority().unwrap().fingerprint;
    let worker = by_fingerprint(&before, authority);
    before.stop();
    let after = Manager::start(with_token(ManagerConfig { listen: address, ..config() })).unwrap();
    assert_ne!(operator.authority().unwrap().fingerprint, authority);
    assert_unrecognised(worker.jobs(), "not of the authority that is known");
    after.stop();
}

/// Who answers in the manager's place and does not know the token is no reason to give up: hubs go on, and recognise
/// the manager when it is back.
#[test]
fn an_impostor_is_not_believed_about_the_token() {
    let before = Manager::start(with_token(config())).unwrap();
    let address = before.address();
    let operator = by_token(&before, TOKEN);
    assert!(operator.jobs().unwrap().is_empty());
    before.stop();
    let other = ManagerConfig { admin_token: Some("another-token".into()), listen: address, ..config() };
    let impostor = Manager::start(other).unwrap();
    for _ in 0..2 {
        assert_unrecognised(operator.jobs(), "its certificate is of another authority than before");
    }
    impostor.stop();
    let _after = Manager::start(with_token(ManagerConfig { listen: address, ..config() })).unwrap();
    assert!(operator.jobs().unwrap().is_empty());
}

#[test]
fn the_authority_is_kept_with_the_state() {
    let folder = tempfile::tempdir().unwrap();
    let kept = || with_token(ManagerConfig { state: Some(folder.path().into()), ..config() });
    let before = Manager::start(kept()).unwrap();
    let authority = by_token(&before, TOKEN).authority().unwrap();
    before.stop();
    let after = Manager::start(kept()).unwrap();
    assert_eq!(by_token(&after, TOKEN).authority().unwrap(), authority);
    assert_eq!(code(&by_fingerprint(&after, authority.fingerprint).jobs()), ErrorCode::Unauthorized);
}

#[test]
fn a_replaced_authority_serves_older_jobs_until_it_is_revoked() {
    let folder = tempfile::tempdir().unwrap();
    let kept = || with_token(ManagerConfig { state: Some(folder.path().into()), ..config() });
    let manager = Manager::start(kept()).unwrap();
    let admin = by_token(&manager, TOKEN);
    let reader = admin
        .create_token(&CreateToken { name: "reads".into(), role: TokenRole::Reader, team: None })
        .unwrap();
    let first = admin.authority().unwrap();
    let replaces = |revoke_former| ReplaceAuthority { revoke_former };
    assert_eq!(
        code(&by_token(&manager, &reader.token).replace_authority(&replaces(false))),
        ErrorCode::Forbidden
    );
    let second = admin.replace_authority(&replaces(false)).unwrap();
    assert_ne!(first.fingerprint, second.fingerprint);
    assert_eq!(second.former, 1);
    let restarted = |manager: RunningManager| {
        manager.stop();
        Manager::start(kept()).unwrap()
    };
    let manager = restarted(manager);
    for known in [&first, &second] {
        assert_eq!(code(&by_fingerprint(&manager, known.fingerprint).jobs()), ErrorCode::Unauthorized);
    }
    let admin = by_token(&manager, TOKEN);
    let third = admin.replace_authority(&replaces(true)).unwrap();
    assert_eq!(third.former, 0);
    let manager = restarted(manager);
    for revoked in [&first, &second] {
        assert_unrecognised(by_fingerprint(&manager, revoked.fingerprint).jobs(), "another program");
    }
    assert_eq!(code(&by_fingerprint(&manager, third.fingerprint).jobs()), ErrorCode::Unauthorized);
}

/// A program that begins a handshake and then does not keep to it is closed, and nobody else notices.
#[test]
fn broken_handshakes_are_closed() {
    let manager = Manager::start(with_token(config())).unwrap();
    for bytes in [
        &[22, 3, 1, 0, 5, 9, 9, 9, 9, 9][..],
        &[22, 0xff, 0xff, 0xff, 0xff],
        &[22, 3, 1, 0, 4, 1, 0, 0, 0],
        &[22; 4096],
    ] {
        let mut connection = TcpStream::connect(manager.address()).unwrap();
        connection.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        connection.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        // The peer's reset is an end, too.
        let ended = connection.read_to_end(&mut answer);
        assert!(ended.is_ok() || ended.unwrap_err().kind() == std::io::ErrorKind::ConnectionReset);
        assert!(answer.is_empty() || answer[0] == 21, "an alert or nothing: {answer:?}");
    }
    assert!(by_token(&manager, TOKEN).jobs().unwrap().is_empty());
}

/// A manager of another program, or an old one, speaks HTTP alone.
#[test]
fn a_server_without_tls_is_named_as_such() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    let server = std::thread::spawn(move || {
        let mut connection = listener.accept().unwrap().0;
        assert!(connection.read(&mut [0; 4096]).unwrap() > 0);
        connection.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").unwrap();
    });
    let refused = ManagerClient::new(&url, Some("x".into())).unwrap().jobs();
    assert!(message(&refused).contains("does not speak TLS"), "{}", message(&refused));
    server.join().unwrap();
}
