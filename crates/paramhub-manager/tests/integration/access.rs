//! The calls that each caller may make, and the configurations that a manager refuses.

use crate::common::*;
use paramhub_control::ManagerClient;
use paramhub_core::service::{CreateService, ErrorCode, JobOptions, JobState, RegisterHub};
use paramhub_core::wire::VERSION;
use paramhub_manager::{Manager, ManagerConfig};

fn create(name: &str) -> CreateService {
    CreateService { name: name.into(), workers: 1, options: JobOptions::default() }
}

#[test]
fn every_call_of_operators_and_hubs_needs_the_token_where_there_is_one() {
    let (manager, anonymous) = start(ManagerConfig { admin_token: Some("s3cret".into()), ..config() });
    let with = |token: &str| ManagerClient::new(&manager.url(), Some(token.to_string())).unwrap();
    let operator = with("s3cret");
    operator.create_service(&create("guarded")).unwrap();
    for client in [anonymous.clone(), with("s3cre"), with("S3CRET")] {
        assert_eq!(code(&client.create_service(&create("x"))), ErrorCode::Unauthorized);
        assert_eq!(code(&client.jobs()), ErrorCode::Unauthorized);
        assert_eq!(code(&client.job("guarded")), ErrorCode::Unauthorized);
        assert_eq!(code(&client.stop_job("guarded")), ErrorCode::Unauthorized);
        assert_eq!(code(&client.hubs()), ErrorCode::Unauthorized);
        assert_eq!(
            code(&client.register_hub(&RegisterHub {
                protocol: VERSION,
                shape: shape(),
                place: Default::default(),
                machine: String::new(),
                keeps_checkpoints: None,
                encrypt: false,
                labels: Vec::new(),
            })),
            ErrorCode::Unauthorized
        );
    }
    assert!(message(&anonymous.jobs()).contains("--admin-token"));
    assert_eq!(operator.jobs().unwrap().len(), 1);
    // Workers prove the nonce and hubs have tokens of their own, so neither needs the operator's token.
    let _hub = Hub::join(&operator, HubBehaviour::Serve);
    let job = Job { client: anonymous, ..Job::create(&operator, "open", 1) };
    job.connect(0).unwrap();
    job.init(0, settings(8)).unwrap();
}

#[test]
fn a_manager_that_others_can_reach_needs_a_token() {
    let open = ManagerConfig { listen: "0.0.0.0:0".parse().unwrap(), ..ManagerConfig::default() };
    let refused = Manager::start(open.clone()).unwrap_err().to_string();
    assert!(refused.contains("--admin-token") && refused.contains("0.0.0.0:0"), "{refused}");
    for token in ["", "two words", "tab\t", "ümlaut"] {
        let refused = Manager::start(ManagerConfig { admin_token: Some(token.into()), ..open.clone() });
        assert!(refused.unwrap_err().to_string().contains("visible ASCII"), "{token:?}");
    }
    let manager = Manager::start(ManagerConfig { admin_token: Some("t".into()), ..open }).unwrap();
    let client = ManagerClient::new(&manager.url(), Some("t".into())).unwrap();
    assert!(manager.url().starts_with("http://127.0.0.1:"), "{}", manager.url());
    assert!(client.jobs().unwrap().is_empty());
}

#[test]
fn a_port_in_use_is_named() {
    let (manager, _client) = start(config());
    let refused =
        Manager::start(ManagerConfig { listen: manager.address(), ..config() }).unwrap_err().to_string();
    assert!(refused.contains(&manager.address().to_string()), "{refused}");
    assert!(refused.contains("choose another port"), "{refused}");
}

#[test]
fn secrets_stay_out_of_debug_output() {
    let config = ManagerConfig { admin_token: Some("s3cret".into()), ..config() };
    assert!(!format!("{config:?}").contains("s3cret"));
    let client = ManagerClient::new("127.0.0.1:1", Some("s3cret".into())).unwrap();
    assert!(!format!("{client:?}").contains("s3cret"));
}

/// DNS rebinding: a page has its own name resolve to 127.0.0.1, and its browser takes the manager for the
/// page's site.
#[test]
fn a_web_page_that_rebinds_its_name_reaches_no_manager_without_a_token() {
    let (manager, client) = start(config());
    Job::create(&client, "mine", 1);
    let port = manager.address().port();
    let asked =
        |line: &str, host: &str| raw(manager.address(), format!("{line} HTTP/1.1\r\n{host}\r\n").as_bytes());
    let page = format!("host: evil.example:{port}\r\n");
    for line in [
        "GET /",
        "GET /v1/jobs",
        "DELETE /v1/jobs/mine",
        "POST /v1/jobs",
        "GET /metrics",
        "GET /openapi.json",
        "GET /no",
    ] {
        let answer = asked(line, &page);
        assert!(answer.starts_with("HTTP/1.1 421 "), "{line}: {answer}");
        assert!(answer.contains("evil.example") && answer.contains("--admin-token"), "{line}: {answer}");
    }
    let local = format!("host: localhost:{port}\r\n");
    assert!(asked("GET /v1/jobs", "").starts_with("HTTP/1.1 421 "));
    assert!(asked("GET /v1/jobs", &format!("{local}{page}")).starts_with("HTTP/1.1 421 "));
    assert!(asked("GET http://evil.example/v1/jobs", &local).starts_with("HTTP/1.1 421 "));
    assert!(asked("GET /health", &page).starts_with("HTTP/1.1 200 "));
    for host in [local, format!("host: 127.0.0.1:{port}\r\n"), "host: [::1]\r\n".into()] {
        let answer = asked("GET /v1/jobs", &host);
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("mine"), "{host}: {answer}");
    }
    assert_eq!(client.job("mine").unwrap().state, JobState::Connecting);
}

#[test]
fn a_manager_with_a_token_answers_under_any_name() {
    let (manager, _client) = start(ManagerConfig { admin_token: Some("s3cret".into()), ..config() });
    let asked = |token: &str| {
        let head =
            format!("GET /v1/jobs HTTP/1.1\r\nhost: node-7:7770\r\nauthorization: Bearer {token}\r\n\r\n");
        raw(manager.address(), head.as_bytes())
    };
    assert!(asked("s3cret").starts_with("HTTP/1.1 200 "));
    assert!(asked("guess").starts_with("HTTP/1.1 401 "));
}

#[test]
fn metrics_show_job_names_to_operators_alone() {
    let (manager, client) = start(ManagerConfig { admin_token: Some("s3cret".into()), ..config() });
    let client = ManagerClient::new(client.url(), Some("s3cret".into())).unwrap();
    let job = Job::create(&client, "team/unannounced", 1);
    let scraped = |authorization: &str| {
        let head = format!("GET /metrics HTTP/1.1\r\nhost: node-7:7770\r\n{authorization}\r\n");
        raw(manager.address(), head.as_bytes())
    };
    let anonymous = scraped("");
    assert!(anonymous.starts_with("HTTP/1.1 200 "), "{anonymous}");
    for part in ["team/unannounced", &job.namespace.to_string()] {
        assert!(!anonymous.contains(part), "an unauthenticated caller sees {part}: {anonymous}");
    }
    for total in
        ["paramhub_jobs{state=\"connecting\"} 1", "paramhub_hubs 0", "paramhub_jobs_memory_bytes 0", "# EOF"]
    {
        assert!(anonymous.lines().any(|line| line == total), "no `{total}` in {anonymous}");
    }
    let operators = scraped("authorization: Bearer s3cret\r\n");
    assert!(operators.contains("paramhub_job_memory_bytes{job=\"team/unannounced\""), "{operators}");
    assert!(scraped("authorization: Bearer guess\r\n").starts_with("HTTP/1.1 401 "));
}
