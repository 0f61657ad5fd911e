//! Encrypted streams between hosts: what a listener at the switch sees, with and without.

use crate::common::cluster::{Cluster, HostRole};
use crate::common::paramhub;

/// Rank gradients of step 1 are twos, as far as they are not made of random numbers.
const GRADIENTS: [u8; 256] = {
    let mut bytes = [0; 256];
    let mut at = 3;
    while at < bytes.len() {
        bytes[at] = 0x40;
        at += 4;
    }
    bytes
};

fn has_gradients(heard: &[u8]) -> bool {
    heard.windows(GRADIENTS.len()).any(|bytes| bytes == GRADIENTS)
}

/// What is heard while a job of all workers runs.
fn heard(cluster: &Cluster, create: &[&str]) -> Vec<u8> {
    let listener = cluster.network().listen();
    for worker in cluster.start_job(create, &["--steps", "5", "--elements", "20000"]) {
        let ended = worker.finish().expect_code(0);
        assert!(ended.stdout.contains("all numbers right"), "{}", ended.stdout);
    }
    let heard = listener.stop();
    // Each worker sends 80,000 bytes in each step, and gets as many.
    assert!(heard.len() > 1_000_000, "only {} bytes were heard", heard.len());
    heard
}

#[test]
fn a_listener_at_the_switch_sees_gradients_unless_their_streams_are_encrypted() {
    let roles = [HostRole::HUB, HostRole::workers("", 1), HostRole::workers("", 1)];
    let Some(cluster) = Cluster::of_hosts(&roles) else { return };
    let _manager = cluster.start_manager();
    let hub = cluster.start_hub(0);
    hub.wait_for("hub ready: ");
    assert!(has_gradients(&heard(&cluster, &["clear"])), "the listener works");
    assert!(!has_gradients(&heard(&cluster, &["encrypted", "--encrypt"])));
    let options = ["continues", "--encrypt", "--on-interface-down", "continue"];
    assert!(!has_gradients(&heard(&cluster, &options)));
}

#[test]
fn the_streams_between_hubs_are_encrypted_with_those_of_workers() {
    let roles = [
        HostRole::HUB,
        HostRole::rack_hub("a"),
        HostRole::rack_hub("b"),
        HostRole::workers("a", 2),
        HostRole::workers("b", 2),
    ];
    let Some(cluster) = Cluster::of_hosts(&roles) else { return };
    let _manager = cluster.start_manager();
    let hubs = [0, 1, 2].map(|role| cluster.start_hub(role));
    hubs.iter().for_each(|hub| drop(hub.wait_for("hub ready: ")));
    assert!(has_gradients(&heard(&cluster, &["clear", "--hubs", "3"])), "the listener works");
    assert!(!has_gradients(&heard(&cluster, &["encrypted", "--hubs", "3", "--encrypt"])));
}

#[test]
fn a_hub_that_demands_encryption_gets_it_from_jobs_that_do_not_ask() {
    let roles = [HostRole::HUB, HostRole::workers("", 1), HostRole::workers("", 1)];
    let Some(cluster) = Cluster::of_hosts(&roles) else { return };
    let _manager = cluster.start_manager();
    let hub = cluster.start_hub_with(0, &["--encrypt"]);
    hub.wait_for("hub ready: ");
    assert!(!has_gradients(&heard(&cluster, &["demanded"])));
}

/// The factors of layers go from worker to worker.
#[test]
fn a_job_whose_workers_exchange_factors_may_be_encrypted() {
    let factors = ["train", "--workers", "2", "--encrypt", "--scheme", "factors", "--epochs", "1"];
    paramhub(factors).finish().expect_code(0);
    let funnel = ["train", "--workers", "2", "--encrypt", "--exchange", "funnel", "--epochs", "1"];
    paramhub(funnel).finish().expect_code(0);
}
