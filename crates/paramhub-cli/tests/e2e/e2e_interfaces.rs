//! Hubs and workers with several interfaces, on an emulated network: which interfaces they use, and what
//! happens when one goes down.

use std::net::TcpStream;
use std::time::Duration;

use paramhub::ManagerClient;
use paramhub::service::{CreateService, JobOptions, JobState};
use rustix::process::Signal;

use crate::common::rails::{Rails, WORKERS};
use crate::common::{Process, example, paramhub, wait_until};

const TOKEN: &str = "let-me-in";
/// More steps than any test allows, with the exchange nearly always under way.
const ENDLESS: &[&str] = &["--steps", "100000", "--compute-ms", "1"];
/// The time within which an interface that is down must be reported: the project's own promise, doubled for
/// busy machines.
const SOON: Duration = Duration::from_secs(10);

/// A hub on all interfaces that workers reach, with its manager on the first of them.
fn hub(rails: &Rails) -> Process {
    let arguments = ["hub", "--listen", "0.0.0.0:7771", "--cores", "2", "--manager", "10.77.8.100:7770"];
    let hub = paramhub(arguments.into_iter().chain(["--admin-token", TOKEN])).inside(rails.hub()).start();
    hub.wait_for("hub ready: ");
    hub
}

/// Asks the manager from within the hub's namespace.
fn ask<T: Send>(rails: &Rails, ask: impl FnOnce(ManagerClient) -> T + Send) -> T {
    rails.hub().within(|| ask(ManagerClient::new("10.77.8.100:7770", Some(TOKEN.into())).unwrap()))
}

/// A job of one worker on each host.
fn job(rails: &Rails, name: &str, environment: &[(&str, &str)], arguments: &[&str]) -> Vec<Process> {
    // The silence alone would be noticed far later than any test waits for an interface.
    let options = JobOptions { dead_after_s: 300.0, ..Default::default() };
    job_on(rails, WORKERS, options, name, environment, arguments)
}

/// A job of one worker on each of the first hosts.
fn job_on(
    rails: &Rails,
    workers: usize,
    options: JobOptions,
    name: &str,
    environment: &[(&str, &str)],
    arguments: &[&str],
) -> Vec<Process> {
    let request = CreateService { name: name.into(), workers: workers as u32, options };
    let created = ask(rails, |client| client.create_service(&request)).unwrap();
    let start = |rank: usize| {
        let variables = environment.iter().copied();
        variables
            .fold(example("exchange", arguments.iter().copied()), |program, (name, value)| {
                program.env(name, value)
            })
            .env("PARAMHUB_URL", "http://10.77.8.100:7770")
            .env("PARAMHUB_JOB", &created.namespace.to_string())
            .env("PARAMHUB_SECRET", &String::from(created.secret()))
            .env("RANK", &rank.to_string())
            .inside(rails.worker(rank))
            .start()
    };
    (0..workers).map(start).collect()
}

#[test]
fn streams_are_spread_over_the_interfaces_of_both_ends() {
    let Some(rails) = Rails::lay() else { return };
    let hub = hub(&rails);
    let log = hub.stderr();
    for part in [
        "interface eth0 (10.77.8.100:7771)",
        "interface eth1 (10.77.9.100:7771)",
        "interface docker0 is left out: it is a bridge of this host's own containers",
    ] {
        assert!(log.contains(part), "no `{part}` in {log}");
    }
    let shape = ask(&rails, |client| client.hubs()).unwrap().remove(0).shape;
    let addresses: Vec<&str> = shape.interfaces.iter().map(|interface| interface.address.as_str()).collect();
    assert_eq!(addresses, ["10.77.8.100:7771", "10.77.9.100:7771"], "nothing else is advertised");
    let cores: Vec<&[u16]> = shape.interfaces.iter().map(|interface| interface.cores.as_slice()).collect();
    assert_eq!(cores, [[0], [1]]);

    // By default half of the bytes go through each interface; otherwise only through the chosen ones. The
    // calls to the manager are small.
    for (name, chosen, expected) in [
        ("both", None, 0.35..0.65),
        ("second", Some("eth1"), 0.9..1.01),
        ("first", Some("10.77.0.0/24,10.77.2.0/24"), 0.0..0.1),
        ("not-first", Some("^eth0"), 0.9..1.01),
    ] {
        let before: Vec<[u64; 2]> = (0..WORKERS).map(|rank| rails.sent_by(rank)).collect();
        let environment: Vec<(&str, &str)> =
            chosen.iter().map(|&chosen| ("PARAMHUB_INTERFACES", chosen)).collect();
        let more = ["--steps", "20"];
        for worker in job(&rails, name, &environment, &more) {
            let ended = worker.finish().expect_code(0);
            assert!(ended.stdout.contains("all numbers right"), "{name}: {ended:?}");
        }
        for (rank, before) in before.iter().enumerate() {
            let after = rails.sent_by(rank);
            let [first, second] = [after[0] - before[0], after[1] - before[1]];
            let share = second as f64 / (first + second) as f64;
            assert!(expected.contains(&share), "{name}: rank {rank} sent {first} and {second} bytes");
        }
    }

    let refused = job(&rails, "none", &[("PARAMHUB_INTERFACES", "eth0,eth7")], &[]).remove(0).finish();
    assert!(
        refused.expect_code(1).stderr.contains("`eth7` means no interface with an address here: there are")
    );
}

/// A job of one worker with standbys, in which the host of worker 1, with a hub, sends as much by each of its interfaces.
fn expect_both_interfaces_to_send(rails: &Rails) {
    let options = JobOptions { replicas: 1, hubs: Some(2), ..Default::default() };
    let before = rails.sent_by(1);
    for worker in job_on(rails, 1, options, "kept", &[], &["--steps", "20"]) {
        worker.finish().expect_code(0);
    }
    let after = rails.sent_by(1);
    let [first, second] = [after[0] - before[0], after[1] - before[1]];
    let share = second as f64 / (first + second) as f64;
    assert!((0.35..0.65).contains(&share), "it sent {first} and {second} bytes");
}

#[test]
fn hubs_send_sums_to_their_standbys_over_all_interfaces() {
    let Some(rails) = Rails::lay() else { return };
    let _hub = hub(&rails);
    let arguments =
        ["hub", "--listen", "0.0.0.0:7771", "--cores", "2", "--manager", "http://10.77.8.100:7770"];
    let other =
        paramhub(arguments.into_iter().chain(["--admin-token", TOKEN])).inside(rails.worker(1)).start();
    other.wait_for("hub ready: ");
    // This host's hub answers the worker, and sends as many bytes of sums to the other hub.
    expect_both_interfaces_to_send(&rails);
}

/// Two hubs, on the hub's host and on that of worker 1, whose first interfaces carry workers and whose second ones hubs.
fn hubs_with_a_link(rails: &Rails) -> [Process; 2] {
    let start = |host, [listen, between, manager]: [&str; 3]| {
        let arguments = ["hub", "--listen", listen, "--between-hubs", between, "--manager", manager];
        let more = ["--admin-token", TOKEN, "--cores", "1"];
        let hub = paramhub(arguments.into_iter().chain(more)).inside(host).start();
        hub.wait_for("hub ready: ");
        hub
    };
    let first = start(rails.hub(), ["10.77.8.100:7771", "10.77.9.100:7772", "10.77.8.100:7770"]);
    let second = start(rails.worker(1), ["10.77.2.1:7771", "10.77.3.1:7772", "http://10.77.8.100:7770"]);
    [first, second]
}

#[test]
fn hubs_send_sums_over_a_link_of_their_own() {
    let Some(rails) = Rails::lay() else { return };
    let _hubs = hubs_with_a_link(&rails);
    // The answers to the worker leave by the first interface, and as many bytes of sums by the second.
    expect_both_interfaces_to_send(&rails);
}

#[test]
fn hubs_whose_link_is_down_take_the_interfaces() {
    let Some(rails) = Rails::lay() else { return };
    let hubs = hubs_with_a_link(&rails);
    let options = || JobOptions { replicas: 1, hubs: Some(2), dead_after_s: 5.0, ..Default::default() };
    let more = ["--steps", "300", "--compute-ms", "5"];
    let running = job_on(&rails, 1, options(), "running", &[], &more).remove(0);
    running.wait_for("exchanges 3 keys");
    rails.switch_port_of_worker(1, "eth1", "down");
    // A hub that is silent for so long is lost for the other one, which goes on without a standby, or takes over.
    let ended = running.finish().expect_code(0);
    assert!(ended.stdout.contains("all numbers right"), "{ended:?}");

    let before = rails.sent_by(1)[0];
    let ended =
        job_on(&rails, 1, options(), "begun", &[], &["--steps", "20"]).remove(0).finish().expect_code(0);
    assert!(ended.stdout.contains("all numbers right"), "{ended:?}");
    let sent = rails.sent_by(1)[0] - before;
    let answers = 20 * ask(&rails, |client| client.job("begun")).unwrap().bytes / 2;
    assert!(
        sent > answers * 3 / 2,
        "it sent {sent} bytes, and {answers} of answers and sums each are needed"
    );
    let log = hubs[0].stderr();
    assert!(log.contains("10.77.2.1:7771 cannot be reached over the link between hubs"), "{log}");
}

#[test]
fn a_hubs_interface_that_goes_down_is_named_to_all_workers() {
    let Some(rails) = Rails::lay() else { return };
    let hub = hub(&rails);
    let workers = job(&rails, "cut", &[], ENDLESS);
    workers.iter().for_each(|worker| drop(worker.wait_for("exchanges 3 keys")));
    let began = std::time::Instant::now();
    rails.switch_hub("eth1", "down");
    for (rank, worker) in workers.into_iter().enumerate() {
        let error = worker.finish().expect_code(1).stderr;
        let reason = "the hub's interface eth1 (10.77.9.100) is down: it was switched off";
        assert!(error.contains(reason) && error.contains(&format!("job `cut`, rank {rank}")), "{error}");
    }
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    println!("named after {:?}", began.elapsed());
    wait_until("the manager shows it", || {
        let status = ask(&rails, |client| client.job("cut")).unwrap();
        status.state == JobState::Failed && status.message.contains("interface eth1 (10.77.9.100)")
    });

    let refused = job(&rails, "too-soon", &[], ENDLESS).remove(0).finish().expect_code(1).stderr;
    assert!(refused.contains("interface eth1 (10.77.9.100) is down"), "{refused}");
    rails.switch_hub("eth1", "up");
    wait_until("the hub sees it again", || hub.stderr().contains("eth1 (10.77.9.100:7771) is back"));
    // The kernel may take longer to find its neighbours again.
    for rank in 0..WORKERS {
        let is_reached = || rails.worker(rank).within(|| TcpStream::connect("10.77.9.100:7771").is_ok());
        wait_until("workers reach it again", is_reached);
    }
    for worker in job(&rails, "after", &[], &["--steps", "5"]) {
        worker.finish().expect_code(0);
    }
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
}

#[test]
fn a_workers_interface_that_goes_down_is_named_to_all_workers() {
    let Some(rails) = Rails::lay() else { return };
    let hub = hub(&rails);
    let mut workers = job(&rails, "cut", &[], ENDLESS);
    workers.iter().for_each(|worker| drop(worker.wait_for("exchanges 3 keys")));
    let began = std::time::Instant::now();
    rails.unplug_worker(1, "eth1");
    let mine = workers.remove(1).finish().expect_code(1).stderr;
    let reason = "interface eth1 (10.77.3.1) is down: it has lost its carrier";
    assert!(mine.contains(&format!("job `cut`, rank 1: this worker's {reason}")), "{mine}");
    let others = workers.remove(0).finish().expect_code(1).stderr;
    assert!(others.contains("because of rank 1") && others.contains(reason), "{others}");
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    println!("named after {:?}", began.elapsed());
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
}

#[test]
fn a_hub_on_chosen_interfaces_weighs_them_by_their_rates() {
    let Some(rails) = Rails::lay() else { return };
    let common = ["hub", "--manager", "127.0.0.1:0", "--log", "error"];
    let refused = |more: &[&str], parts: &[&str]| {
        let hub = paramhub(common.into_iter().chain(more.iter().copied())).inside(rails.hub());
        hub.finish().expect_code(2).expect_error(parts);
    };
    refused(&["--interfaces", "eth0,eth5"], &["`eth5` means no interface", "eth1 (10.77.9.100"]);
    refused(&["--interfaces", "^eth"], &["no interface leads to other hosts", "docker0: it is a bridge"]);
    refused(&["--interfaces", "eth0", "--listen", "127.0.0.1:0"], &["listen on one of these"]);
    refused(&["--interfaces", "eth0", "--interface-rate", "eth1=1gbit"], &["`eth1`", "it listens on eth0"]);

    let arguments =
        ["--interfaces", "10.77.8.0/23", "--interface-rate", "eth0=10gbit,eth1=2.5gbit", "--cores", "5"];
    let hub = paramhub(["hub", "--manager", "127.0.0.1:0"].into_iter().chain(arguments));
    let hub = hub.inside(rails.hub()).start();
    let ready = hub.wait_for("hub ready: ");
    assert!(ready.contains("data 10.77.8.100:7771,10.77.9.100:7771"), "{ready}");
    let log = hub.stderr();
    for part in [
        "(10.77.8.100:7771): 10gbit, weight 10000, no known node, cores 0, 2, 3, 4 on processors",
        "weight 2500, no known node, cores 1 on",
    ] {
        assert!(log.contains(part), "no `{part}` in {log}");
    }
}
