//! Every deployment and every reduction among hubs, with real processes on hosts of their own: the numbers
//! are those of one flat hub, and a lost hub is named everywhere.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::common::cluster::{Cluster, HUB_PORT, HostRole};
use crate::common::{Process, wait_until};

/// The time within which all workers must be notified which hub was killed: the project's own promise.
const SOON: Duration = Duration::from_secs(5);
/// More steps than any test allows, with the exchange nearly always under way.
const ENDLESS: &[&str] = &["--steps", "100000", "--compute-ms", "1"];

/// The parameters of every rank of a job at its end: f32 as bytes.
type Outcomes = Vec<Vec<u8>>;

/// The gradients are fractions that differ from rank to rank, so that the order of a sum shows in its last
/// bits.
fn train(cluster: &Cluster, name: &str, hubs: usize, reduction: &str) -> Outcomes {
    let hubs = hubs.to_string();
    let create = [name, "--hubs", &hubs, "--reduction", reduction];
    let exchange = ["--steps", "5", "--elements", "3,8193,60011", "--optimizer", "adam"];
    let fractions = ["--reproducible", "--seed", "7", "--save", "parameters"];
    let workers = cluster.start_job(&create, &[&exchange[..], &fractions].concat());
    workers.into_iter().map(|worker| worker.finish().expect_code(0).read("parameters")).collect()
}

/// One hub for all and as many workers, all on one host.
fn one_flat_hub(workers: usize) -> Option<Vec<u8>> {
    let cluster = Cluster::start(&[HostRole::HUB, HostRole::workers("", workers)])?;
    let mut outcomes = train(&cluster, "flat", 1, "flat");
    assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "workers of one hub differ");
    Some(outcomes.swap_remove(0))
}

fn hubs_of(roles: &[HostRole]) -> usize {
    roles.iter().filter(|role| role.is_waited_for()).count()
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.chunks_exact(4).map(|value| f32::from_ne_bytes(value.try_into().expect("four bytes")))
}

#[test]
fn every_deployment_has_the_numbers_of_one_hub_to_the_bit() {
    let Some(expected) = one_flat_hub(4) else { return };
    let worker = HostRole::workers("", 1);
    let beside = HostRole::HUB.with_workers(1);
    let deployments: [(&str, &[HostRole]); 4] = [
        ("ncc", &[HostRole::HUB, worker, worker, worker, worker]),
        ("ncs", &[HostRole::HUB, HostRole::HUB, worker, worker, worker, worker]),
        ("cc", &[beside, worker, worker, worker]),
        ("cs", &[beside, beside, beside, beside]),
    ];
    for (deployment, roles) in deployments {
        let Some(cluster) = Cluster::start(roles) else { return };
        for (rank, outcome) in train(&cluster, deployment, hubs_of(roles), "auto").iter().enumerate() {
            assert!(*outcome == expected, "{deployment}: rank {rank} has other parameters than with one hub");
        }
    }
}

const TWO_FLAT_HUBS: &[HostRole] =
    &[HostRole::HUB, HostRole::HUB, HostRole::workers("", 2), HostRole::workers("", 1)];
const TWO_RACKS: &[HostRole] = &[
    HostRole::rack_hub("a"),
    HostRole::workers("a", 1),
    HostRole::workers("a", 1),
    HostRole::rack_hub("b"),
    HostRole::workers("b", 1),
    HostRole::workers("b", 1),
];
/// Rank 0 is in the second rack, on the host of its hub.
const THREE_UNEVEN_RACKS: &[HostRole] = &[
    HostRole::rack_hub("a"),
    HostRole::rack_hub("b").with_workers(1),
    HostRole::workers("a", 2),
    HostRole::workers("a", 1),
    HostRole::rack_hub("c"),
    HostRole::workers("c", 2),
];
/// A hub for all, one for each rack below it, one for a host below one of these, and a host whose workers use
/// their rack's hub.
const THREE_LEVELS: &[HostRole] = &[
    HostRole::HUB,
    HostRole::rack_hub("a"),
    HostRole::host_hub("a", 2),
    HostRole::workers("a", 1),
    HostRole::rack_hub("b"),
    HostRole::workers("b", 1),
];

#[test]
fn hubs_that_reduce_among_themselves_have_the_numbers_of_one() {
    for (shape, roles, workers, reductions) in [
        ("two racks", TWO_RACKS, 4, &["tree", "ring", "sharded", "line"][..]),
        ("three uneven racks", THREE_UNEVEN_RACKS, 6, &["tree", "ring", "sharded", "line"]),
        ("host, rack and cluster", THREE_LEVELS, 4, &["tree", "line"]),
    ] {
        let Some(expected) = one_flat_hub(workers) else { return };
        let Some(cluster) = Cluster::start(roles) else { return };
        for reduction in reductions {
            let runs = ["first", "second"]
                .map(|run| train(&cluster, &format!("{reduction}-{run}"), hubs_of(roles), reduction));
            for (rank, outcome) in runs.iter().flatten().enumerate() {
                assert!(
                    *outcome == runs[0][0],
                    "{shape}, {reduction}: a rank differs from rank 0, or the second run from the first (at {rank})"
                );
            }
            assert_eq!(runs[0][0].len(), expected.len());
            if *reduction == "line" {
                assert!(runs[0][0] == expected, "{shape}: sites in a line have other bits than one hub");
                continue;
            }
            // A sum of sums is rounded at other places than one sum.
            for (element, (found, expected)) in floats(&runs[0][0]).zip(floats(&expected)).enumerate() {
                assert!(
                    (found - expected).abs() <= 2e-6 * expected.abs().max(1.0),
                    "{shape}, {reduction}: element {element} is {found}, with one hub {expected}"
                );
            }
        }
    }
}

/// A job that exchanges until it is notified that a hub is lost.
fn endless(cluster: &Cluster, roles: &[HostRole], reduction: &str, more: &[&str]) -> Vec<Process> {
    let hubs = hubs_of(roles).to_string();
    let create = ["cut", "--hubs", &hubs, "--reduction", reduction];
    let workers = cluster.start_job(&[&create, more].concat(), ENDLESS);
    workers.iter().for_each(|worker| drop(worker.wait_for("exchanges 3 keys")));
    workers
}

/// Waits until every worker and the manager report a message that names the hub. Returns how long that took.
fn expect_named(cluster: &Cluster, mut workers: Vec<Process>, hub: &str, within: Duration, case: &str) {
    let began = Instant::now();
    loop {
        let open = workers.iter_mut().map(|worker| !worker.has_ended()).filter(|&open| open).count();
        let shown = cluster.operate(&["jobs", "show", "cut", "--json"]);
        let took = began.elapsed();
        if open == 0 && shown.contains("\"failed\"") {
            assert!(shown.contains(hub), "{case}: jobs show names another than {hub}: {shown}");
            println!("{case}: all ranks named {hub} within {took:?}");
            break;
        }
        assert!(took < within, "{case}: after {took:?} {open} workers have not ended, and jobs show {shown}");
    }
    for (rank, worker) in workers.into_iter().enumerate() {
        let message = worker.finish().expect_code(1).stderr;
        assert!(message.contains(hub), "{case}: rank {rank} named another hub than {hub}: {message}");
    }
}

#[test]
fn a_hub_that_is_killed_is_named_everywhere() {
    for (case, roles, reduction, lost) in [
        ("one of two, flat", TWO_FLAT_HUBS, "flat", 1),
        ("a rack's in a ring", THREE_UNEVEN_RACKS, "ring", 4),
        ("the first rack's in a line", THREE_UNEVEN_RACKS, "line", 1),
        ("the last rack's in a line", THREE_UNEVEN_RACKS, "line", 4),
        ("a rack's among sharded ones", TWO_RACKS, "sharded", 0),
        ("the parent in a tree of racks", THREE_UNEVEN_RACKS, "tree", 0),
        ("a child in a tree of racks", THREE_UNEVEN_RACKS, "tree", 1),
        ("the cluster's", THREE_LEVELS, "tree", 0),
        ("a rack's below the cluster's", THREE_LEVELS, "tree", 1),
        ("a host's", THREE_LEVELS, "tree", 2),
    ] {
        let Some(cluster) = Cluster::start(roles) else { return };
        let workers = endless(&cluster, roles, reduction, &["--dead-after", "300"]);
        cluster.hub(lost).signal(Signal::KILL);
        expect_named(&cluster, workers, &cluster.address(lost), SOON, case);
    }
}

#[test]
fn a_hub_whose_link_goes_down_is_named_once_it_has_been_silent() {
    for (case, roles, reduction, lost) in [
        ("one of two, flat", TWO_FLAT_HUBS, "flat", 1),
        ("in a ring", THREE_UNEVEN_RACKS, "ring", 4),
        ("below the cluster's", THREE_LEVELS, "tree", 4),
    ] {
        let Some(cluster) = Cluster::start(roles) else { return };
        let workers = endless(&cluster, roles, reduction, &["--dead-after", "2"]);
        cluster.host(lost).pull_the_cable();
        let within = Duration::from_secs(2) + SOON;
        expect_named(&cluster, workers, &cluster.address(lost), within, case);
    }
}

#[test]
fn workers_reach_the_hub_of_their_own_level_alone() {
    let Some(cluster) = Cluster::start(THREE_LEVELS) else { return };
    let workers = endless(&cluster, THREE_LEVELS, "tree", &[]);
    let [top, rack_a, host_a, worker_a, rack_b, worker_b] = [0, 1, 2, 3, 4, 5].map(|role| cluster.host(role));
    for (hub, members) in [
        (top, &[rack_a, rack_b][..]),
        (rack_a, &[host_a, worker_a]),
        (rack_b, &[worker_b]),
        // These use shared memory.
        (host_a, &[]),
    ] {
        let mut expected: Vec<&str> = members.iter().map(|host| host.address.as_str()).collect();
        expected.sort_unstable();
        wait_until("each hub's streams come from its members", || {
            let mut peers = hub.peers(HUB_PORT);
            peers.sort_unstable();
            peers.dedup();
            peers == expected
        });
    }
    drop(workers);
}
