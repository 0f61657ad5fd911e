//! Tokens that are made and revoked while the manager runs.

use crate::common::*;
use paramhub_control::ManagerClient;
use paramhub_core::service::{
    CreateService, CreateToken, ErrorCode, HubReport, JobOptions, JobState, RegisterHub, TokenRole,
};
use paramhub_core::tokens::CONFIGURED;
use paramhub_core::wire::VERSION;
use paramhub_manager::ManagerConfig;

const FIRST: &str = "the-first-token";

fn with_token(config: ManagerConfig) -> ManagerConfig {
    ManagerConfig { admin_token: Some(FIRST.into()), ..config }
}

fn client(url: &str, token: &str) -> ManagerClient {
    ManagerClient::new(url, Some(token.to_owned())).unwrap()
}

fn make(admin: &ManagerClient, name: &str, role: TokenRole) -> ManagerClient {
    let created = admin.create_token(&CreateToken { name: name.into(), role, team: None }).unwrap();
    assert!(!format!("{created:?}").contains(&created.token));
    client(admin.url(), &created.token)
}

fn create(name: &str) -> CreateService {
    CreateService { name: name.into(), workers: 1, options: JobOptions::default() }
}

fn offer() -> RegisterHub {
    RegisterHub {
        protocol: VERSION,
        shape: shape(),
        place: Default::default(),
        machine: String::new(),
        keeps_checkpoints: None,
        encrypt: false,
        labels: Vec::new(),
    }
}

#[test]
fn a_token_is_good_for_its_role_alone() {
    let (manager, anonymous) = start(with_token(config()));
    let admin = client(&manager.url(), FIRST);
    let second = make(&admin, "second", TokenRole::Admin);
    let hub = make(&second, "rack-a", TokenRole::Hub);
    let reader = make(&second, "grafana", TokenRole::Reader);
    second.create_service(&create("guarded")).unwrap();
    hub.register_hub(&offer()).unwrap();

    assert_eq!(reader.jobs().unwrap().len(), 1);
    assert_eq!(reader.job("guarded").unwrap().name, "guarded");
    assert_eq!(reader.hubs().unwrap().len(), 1);
    let scraped = |client: &str| {
        let head = format!("GET /metrics HTTP/1.1\r\nhost: x\r\n{client}\r\n");
        raw(manager.address(), head.as_bytes())
    };
    let token =
        reader.create_token(&CreateToken { name: "more".into(), role: TokenRole::Reader, team: None });
    assert_eq!(code(&token), ErrorCode::Forbidden);
    assert!(message(&token).contains("the token `grafana` has the role reader"), "{token:?}");
    for refused in [
        code(&reader.create_service(&create("x"))),
        code(&reader.stop_job("guarded")),
        code(&reader.membership("guarded")),
        code(&reader.register_hub(&offer())),
        code(&reader.tokens()),
        code(&reader.revoke_token("rack-a")),
        code(&hub.jobs()),
        code(&hub.create_service(&create("x"))),
        code(&hub.tokens()),
    ] {
        assert_eq!(refused, ErrorCode::Forbidden);
    }
    assert_eq!(code(&anonymous.tokens()), ErrorCode::Unauthorized);
    assert!(!scraped("").contains("guarded"));

    let listed = admin.tokens().unwrap();
    let shown: Vec<(&str, TokenRole, &str)> =
        listed.iter().map(|token| (token.name.as_str(), token.role, token.created_by.as_str())).collect();
    assert_eq!(shown[0], (CONFIGURED, TokenRole::Admin, ""));
    for expected in [
        ("second", TokenRole::Admin, CONFIGURED),
        ("rack-a", TokenRole::Hub, "second"),
        ("grafana", TokenRole::Reader, "second"),
    ] {
        assert!(shown.contains(&expected), "{shown:?}");
    }
}

#[test]
fn a_revoked_token_opens_nothing_while_jobs_and_hubs_go_on() {
    let (manager, _) = start(with_token(config()));
    let admin = client(&manager.url(), FIRST);
    let leaver = make(&admin, "leaver", TokenRole::Admin);
    let hub = Hub::join(&leaver, HubBehaviour::Serve);
    let job = Job::create(&leaver, "goes-on", 1);
    job.connect(0).unwrap();
    admin.revoke_token("leaver").unwrap();
    for refused in [code(&leaver.jobs()), code(&leaver.create_service(&create("x")))] {
        assert_eq!(refused, ErrorCode::Unauthorized);
    }
    assert!(message(&leaver.jobs()).contains("the token `leaver` was revoked"));
    job.init(0, settings(8)).unwrap();
    assert_eq!(admin.job("goes-on").unwrap().state, JobState::Running);
    hub.client.report(&hub.registered, &HubReport::default()).unwrap();
    assert_eq!(code(&admin.revoke_token("leaver")), ErrorCode::NotFound);
    assert_eq!(code(&admin.revoke_token(CONFIGURED)), ErrorCode::Busy);
}

#[test]
fn tokens_and_their_ends_outlive_the_manager() {
    let directory = tempfile::tempdir().unwrap();
    let kept = || with_token(ManagerConfig { state: Some(directory.path().into()), ..config() });
    let (manager, _) = start(kept());
    let admin = client(&manager.url(), FIRST);
    let created =
        admin.create_token(&CreateToken { name: "next".into(), role: TokenRole::Admin, team: None }).unwrap();
    let next = client(&manager.url(), &created.token);
    next.revoke_token(CONFIGURED).unwrap();
    manager.stop();
    let file = std::fs::read(directory.path().join("jobs.redb")).unwrap();
    let holds = |text: &str| file.windows(text.len()).any(|part| part == text.as_bytes());
    assert!(holds("next") && !holds(&created.token) && !holds(FIRST), "only hashes are kept");

    let (manager, _) = start(kept());
    assert_eq!(code(&client(&manager.url(), FIRST).jobs()), ErrorCode::Unauthorized);
    assert!(client(&manager.url(), &created.token).jobs().unwrap().is_empty());
}

#[test]
fn a_manager_that_admits_every_caller_makes_no_tokens() {
    let (_manager, client) = start(config());
    let refused = client.create_token(&CreateToken { name: "x".into(), role: TokenRole::Reader, team: None });
    assert_eq!(code(&refused), ErrorCode::BadRequest);
    assert!(message(&refused).contains("start it with --admin-token-file first"), "{refused:?}");
    assert!(client.tokens().unwrap().is_empty());
}
