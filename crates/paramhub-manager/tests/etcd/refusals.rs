//! What a manager says of an etcd that it cannot use.

use std::net::TcpListener;

use etcd_client::{Client, ConnectOptions, Permission};
use paramhub_manager::{Manager, ManagerConfig};

use crate::common::*;
use crate::server::EtcdServer;
use crate::{PREFIX, leader, start_at};

fn refusal_of(address: &str) -> String {
    let config = ManagerConfig { etcd: Some(address.parse().unwrap()), ..config() };
    let refused = Manager::start(config).unwrap_err().to_string();
    assert!(refused.contains("cannot keep its state in etcd") && refused.contains("--state"), "{refused}");
    assert!(!refused.contains("wrong-password"), "{refused}");
    refused
}

/// Calls etcd with its own client.
fn with_client<T>(etcd: &EtcdServer, work: impl AsyncFnOnce(&mut Client) -> T) -> T {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async { work(&mut Client::connect([etcd.endpoint()], None).await.unwrap()).await })
}

#[test]
fn an_etcd_that_does_not_answer_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // It accepts connections and does not answer.
    let silent = refusal_of(&format!("etcd://127.0.0.1:{port}/p"));
    assert!(silent.contains("etcd does not answer: http://127.0.0.1:"), "{silent}");
    drop(listener);
    let refused = refusal_of(&format!("etcd://127.0.0.1:{port},127.0.0.1:{port}/p"));
    assert!(refused.contains("etcd does not answer") && refused.contains("refused"), "{refused}");
    let unknown = refusal_of("etcd://host.invalid/p");
    assert!(unknown.contains("etcd does not answer: http://host.invalid:2379"), "{unknown}");
}

#[test]
fn a_prefix_with_the_keys_of_others_is_refused() {
    let etcd = EtcdServer::start();
    with_client(&etcd, async |client| {
        client.put("theirs/config/x", "1", None).await.unwrap();
        client.put("later/format", "7", None).await.unwrap();
        client.put("tests/paramhub2/x", "beside it", None).await.unwrap();
    });
    let theirs = refusal_of(&etcd.address("theirs"));
    assert!(theirs.contains("not of connection managers") && theirs.contains("Name a prefix"), "{theirs}");
    let later = refusal_of(&etcd.address("later"));
    assert!(later.contains("has the format 7, and this release reads 1"), "{later}");
    // A prefix that begins like another one is not the same.
    leader(&[start_at(&etcd)]);
}

#[test]
fn users_and_passwords_are_checked_and_explained() {
    let etcd = EtcdServer::start();
    with_client(&etcd, async |client| {
        client.user_add("root", "r%o@t", None).await.unwrap();
        client.role_add("root").await.unwrap();
        client.user_grant_role("root", "root").await.unwrap();
        client.role_add("managers").await.unwrap();
        let own = Permission::read_write(format!("{PREFIX}/")).with_prefix();
        client.role_grant_permission("managers", own).await.unwrap();
        client.user_add("paramhub", "secret", None).await.unwrap();
        client.user_grant_role("paramhub", "managers").await.unwrap();
        client.auth_enable().await.unwrap();
    });
    let at = |user: &str, prefix: &str| format!("etcd://{user}{}/{prefix}", etcd.endpoint());
    let wrong = refusal_of(&at("paramhub:wrong-password@", PREFIX));
    assert!(wrong.contains("etcd refuses this") && wrong.contains("authentication failed"), "{wrong}");
    let nobody = refusal_of(&at("", PREFIX));
    assert!(nobody.contains("it asks for a user, as in etcd://USER:PASSWORD@"), "{nobody}");
    let elsewhere = refusal_of(&at("paramhub:secret@", "elsewhere"));
    assert!(elsewhere.contains("permission denied"), "{elsewhere}");
    for user in ["paramhub:secret@", "root:r%25o%40t@"] {
        let config = ManagerConfig { etcd: Some(at(user, PREFIX).parse().unwrap()), ..config() };
        let managers = [Manager::start(config).unwrap()];
        leader(&managers);
        Job::create(&crate::client_of(&managers), &user.replace([':', '@', '%'], "-"), 1);
    }
    let root = ConnectOptions::new().with_user("root", "r%o@t");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let jobs = runtime.block_on(async {
        let mut client = Client::connect([etcd.endpoint()], Some(root)).await.unwrap();
        let jobs = etcd_client::GetOptions::new().with_prefix().with_count_only();
        client.get(format!("{PREFIX}/jobs/"), Some(jobs)).await.unwrap().count()
    });
    assert_eq!(jobs, 2);
}

#[test]
fn a_damaged_record_keeps_managers_from_leading_and_is_named() {
    let etcd = EtcdServer::start();
    let manager = start_at(&etcd);
    leader(std::slice::from_ref(&manager));
    manager.stop();
    with_client(&etcd, async |client| {
        client.put(format!("{PREFIX}/jobs/0"), "no JSON", None).await.unwrap();
    });
    let manager = start_at(&etcd);
    eventually("it says why it does not lead", || {
        crate::health(manager.address()).contains("a record of jobs cannot be read")
    });
    with_client(&etcd, async |client| {
        client.delete(format!("{PREFIX}/jobs/0"), None).await.unwrap();
    });
    leader(&[manager]);
}

#[test]
fn a_directory_and_an_etcd_exclude_one_another() {
    let both = ManagerConfig {
        state: Some("/nowhere".into()),
        etcd: Some("etcd://127.0.0.1/p".parse().unwrap()),
        ..config()
    };
    let refused = Manager::start(both).unwrap_err().to_string();
    assert!(refused.contains("a directory or an etcd, not both"), "{refused}");
    // Certificates that are not there are named before etcd is called.
    let refused = refusal_of("etcds://127.0.0.1/p?ca=/nowhere/ca.pem");
    assert!(refused.contains("/nowhere/ca.pem"), "{refused}");
}
