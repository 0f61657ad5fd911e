//! Managers that share a real etcd, which PATH must have. This is a program of its own because it needs the feature
//! `etcd`.

#[path = "../integration/common/mod.rs"]
mod common;
mod handing_over;
mod refusals;
mod server;

use std::net::SocketAddr;
use std::time::Duration;

use common::*;
use paramhub_control::ManagerClient;
use paramhub_manager::{Manager, ManagerConfig, RunningManager};
use server::EtcdServer;

const PREFIX: &str = "tests/paramhub";

/// A manager that keeps its state in this etcd.
pub(crate) fn config_at(etcd: &EtcdServer) -> ManagerConfig {
    ManagerConfig { etcd: Some(etcd.address(PREFIX).parse().unwrap()), ..config() }
}

pub(crate) fn start_at(etcd: &EtcdServer) -> RunningManager {
    Manager::start(config_at(etcd)).unwrap()
}

/// A client of all of them, and patient.
pub(crate) fn client_of<'a>(managers: impl IntoIterator<Item = &'a RunningManager>) -> ManagerClient {
    let urls: Vec<String> = managers.into_iter().map(RunningManager::url).collect();
    ManagerClient::new(&urls.join(","), None).unwrap().with_retry_timeout(WAIT_TIMEOUT)
}

/// What a manager says of its health.
pub(crate) fn health(address: SocketAddr) -> String {
    let answer = raw(address, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n");
    answer.rsplit("\r\n").next().unwrap_or_default().trim_end().to_owned()
}

pub(crate) fn leads(manager: &RunningManager) -> bool {
    health(manager.address()) == "ok, leads"
}

/// Waits until exactly one of the managers leads, and returns its place.
pub(crate) fn leader(managers: &[RunningManager]) -> usize {
    let mut found = None;
    eventually("one manager leads", || {
        let leaders: Vec<usize> = (0..managers.len()).filter(|&place| leads(&managers[place])).collect();
        assert!(leaders.len() <= 1, "{leaders:?} lead");
        found = leaders.first().copied();
        found.is_some()
    });
    found.expect("it was just found")
}

/// Longer than a lease.
pub(crate) const AFTER_THE_LEASE: Duration = Duration::from_secs(4);
