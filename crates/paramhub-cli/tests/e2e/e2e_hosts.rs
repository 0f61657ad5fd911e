//! A manager, hubs and workers on hosts of their own, which are network namespaces behind one switch: which
//! ports are open, which hosts dial which, and that no other connection is needed.

use rustix::process::Signal;

use crate::common::cluster::{Cluster, HUB_PORT, HostRole, MANAGER_PORT};
use crate::common::hosts::Host;
use crate::common::wait_until;

/// Two hubs, and two hosts with two workers each.
const HOST_ROLES: [HostRole; 4] =
    [HostRole::HUB, HostRole::HUB, HostRole::workers("", 2), HostRole::workers("", 2)];
const HUBS: [usize; 2] = [0, 1];
const WORKERS: [usize; 2] = [2, 3];

#[test]
fn a_job_across_hosts_uses_the_given_ports_and_its_workers_only_dial_out() {
    let Some(cluster) = Cluster::of_hosts(&HOST_ROLES) else { return };
    // The start-up order is the reverse of the usual one: the workers' job exists before any hub, and one hub
    // starts before the manager.
    let early = cluster.start_hub(HUBS[0]);
    wait_until("the hub waits", || early.stderr().contains("tries again"));
    let manager = cluster.start_manager();
    early.wait_for("hub ready: ");
    let workers = cluster.start_job(&["across", "--hubs", "2"], &["--steps", "100000", "--compute-ms", "1"]);
    wait_until("all ranks have come", || cluster.operate(&["jobs", "show", "across"]).contains("0 1 2 3"));
    assert!(
        cluster.operate(&["jobs", "show", "across"]).contains("connecting"),
        "it waits for the second hub"
    );
    let late = cluster.start_hub(HUBS[1]);
    late.wait_for("hub ready: ");
    workers.iter().for_each(|worker| drop(worker.wait_for("exchanges 3 keys")));

    // This is checked while the job runs.
    assert_eq!(
        cluster.manager_host.listening(),
        [format!("{}:{MANAGER_PORT}", cluster.manager_host.address)]
    );
    let hubs = HUBS.map(|role| cluster.host(role));
    let hosts = WORKERS.map(|role| cluster.host(role));
    for hub in hubs {
        assert_eq!(hub.listening(), [format!("{}:{HUB_PORT}", hub.address)]);
        wait_until("both hosts' workers have streams here", || {
            let peers = hub.peers(HUB_PORT);
            hosts.iter().all(|host| peers.contains(&host.address))
        });
        assert!(
            hub.dialled().iter().all(|to| *to == format!("{}:{MANAGER_PORT}", cluster.manager_host.address))
        );
    }
    for host in hosts {
        assert_eq!(host.listening(), [] as [String; 0]);
        for to in host.dialled() {
            let hub = |hub: &Host| to == format!("{}:{HUB_PORT}", hub.address);
            assert!(hubs.into_iter().any(hub), "a worker has a connection to {to}");
        }
    }

    // Errors reach other hosts, too: one worker is killed, and the others report which.
    let mut workers = workers;
    let killed = workers.remove(3);
    killed.signal(Signal::KILL);
    for worker in workers {
        let ended = worker.finish().expect_code(1);
        assert!(ended.stderr.contains("rank 3"), "{}", ended.stderr);
    }
    killed.finish();

    for worker in cluster.start_job(&["to-the-end", "--hubs", "2"], &["--steps", "20"]) {
        let ended = worker.finish().expect_code(0);
        assert!(ended.stdout.contains("all numbers right"), "{}", ended.stdout);
    }
    for server in [early, late, manager] {
        server.signal(Signal::TERM);
        server.finish().expect_code(0);
    }
}

#[test]
fn a_missing_hub_is_named_across_hosts() {
    let Some(cluster) = Cluster::of_hosts(&HOST_ROLES) else { return };
    let _manager = cluster.start_manager();
    let alone = cluster.start_hub(HUBS[0]);
    alone.wait_for("hub ready: ");
    let address = cluster.address(HUBS[0]);
    let options = ["pair", "--hubs", "2", "--rendezvous-timeout", "1"];
    let messages: Vec<String> = cluster
        .start_job(&options, &["--steps", "1"])
        .into_iter()
        .map(|worker| worker.finish().expect_code(1).stderr)
        .collect();
    let named = format!("of the 2 hubs that it waits for only 1, hub 0 ({address})");
    assert!(messages.iter().any(|message| message.contains(&named)), "{messages:?}");

    cluster.operate(&["jobs", "create", "unjoined", "-n", "2", "--lease", "0.5"]);
    wait_until("its lease has run out", || {
        cluster.operate(&["jobs", "show", "unjoined"]).contains("lease of 0.5 s ran out")
    });

    // The cable is pulled: the workers, on other hosts, name the hub.
    let workers =
        cluster.start_job(&["cut", "--dead-after", "1"], &["--steps", "100000", "--compute-ms", "1"]);
    workers.iter().for_each(|worker| drop(worker.wait_for("exchanges 3 keys")));
    cluster.host(HUBS[0]).pull_the_cable();
    for worker in workers {
        let ended = worker.finish().expect_code(1);
        assert!(ended.stderr.contains(&address), "{}", ended.stderr);
    }
}
