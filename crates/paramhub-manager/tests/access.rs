//! Who may do what, and what a manager refuses to start with.

mod common;

use common::*;
use paramhub_control::ManagerClient;
use paramhub_core::service::{CreateService, ErrorCode, JobOptions, RegisterHub};
use paramhub_manager::{Manager, ManagerConfig};

fn create(name: &str) -> CreateService {
    CreateService { name: name.into(), workers: 1, options: JobOptions::default() }
}

#[test]
fn every_call_of_operators_and_hubs_needs_the_token_where_there_is_one() {
    let (manager, stranger) = start(ManagerConfig { admin_token: Some("s3cret".into()), ..config() });
    let with = |token: &str| ManagerClient::new(&manager.url(), Some(token.to_string())).unwrap();
    let operator = with("s3cret");
    operator.create_service(&create("guarded")).unwrap();
    for client in [stranger.clone(), with("s3cre"), with("S3CRET")] {
        assert_eq!(code(&client.create_service(&create("x"))), ErrorCode::Unauthorized);
        assert_eq!(code(&client.jobs()), ErrorCode::Unauthorized);
        assert_eq!(code(&client.job("guarded")), ErrorCode::Unauthorized);
        assert_eq!(code(&client.stop_job("guarded")), ErrorCode::Unauthorized);
        assert_eq!(code(&client.hubs()), ErrorCode::Unauthorized);
        assert_eq!(code(&client.register_hub(&RegisterHub { shape: shape() })), ErrorCode::Unauthorized);
    }
    assert!(message(&stranger.jobs()).contains("--admin-token"));
    assert_eq!(operator.jobs().unwrap().len(), 1);
    // Workers prove the nonce and hubs have tokens of their own; neither needs the operator's.
    let _hub = Hub::join(&operator, Manner::Serve);
    let job = Job { client: stranger, ..Job::create(&operator, "open", 1) };
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
