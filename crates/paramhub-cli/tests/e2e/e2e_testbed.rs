//! Exchanges between hosts: real processes in network namespaces, over links whose rates are limited.

use serde_json::Value;

use crate::common::paramhub;
use crate::common::testbed::{self, Testbed};

const KEYS: &str = r#"[{"name": "front", "shape": [64, 3, 7]}, {"name": "bias", "shape": [5]},
    {"name": "back", "shape": [150000]}]"#;

/// The JSON that `bench exchange` on hosts wrote. Every number of the last exchange was compared.
fn exchange(testbed: &Testbed, more: &[&str]) -> Value {
    let enter = testbed.enter();
    let hosts = testbed.hosts(&["r0w0", "r0w1"]);
    let arguments =
        ["bench", "exchange", "--keys", "keys.json", "--workers", "2", "--iters", "3", "--warmup", "1"];
    let on_hosts = ["--hosts", &hosts, "--enter", &enter, "--json", "out.json"];
    let program = paramhub(arguments.into_iter().chain(on_hosts).chain(more.iter().copied()));
    let ended = program.file("keys.json", KEYS).finish().expect_code(0);
    assert!(ended.stdout.contains("all exact"), "{}", ended.stdout);
    serde_json::from_slice(&ended.read("out.json")).expect("valid JSON")
}

/// Bytes that an interface of a host has received so far.
fn received(testbed: &Testbed, host: &str, interface: &str) -> u64 {
    let path = format!("/sys/class/net/{interface}/statistics/rx_bytes");
    let output = testbed.command(host, "cat").arg(path).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().parse().expect("a number")
}

#[test]
fn every_deployment_exchanges_exactly_between_hosts() {
    let Some(testbed) = Testbed::up("--racks 2 --workers 2 --rate 1gbit --core-rate 500mbit") else { return };
    let (one, two) = (testbed.hosts(&["r0hub"]), testbed.hosts(&["r0hub", "r1hub"]));
    for (deployment, more, hubs, interfaces) in [
        ("ncc", &["--hub-hosts", &one, "--cores", "2", "--optimizer", "nesterov"][..], 1, 2),
        ("ncs", &["--hub-hosts", &two], 2, 2),
        ("cc", &["--transport", "auto", "--optimizer", "adam"], 1, 1),
        ("cs", &["--transport", "auto"], 2, 1),
    ] {
        let results = exchange(&testbed, &[&["--deployment", deployment], more].concat());
        let settings = &results["settings"];
        assert_eq!(settings["deployment"], deployment);
        assert_eq!((&settings["hubs"], &settings["interfaces"]), (&hubs.into(), &interfaces.into()));
        assert_eq!(results["max_abs_error"].as_f64(), Some(0.0), "{deployment}");
    }
}

#[test]
fn the_share_of_a_hub_beside_a_worker_does_not_cross_the_network() {
    let Some(testbed) = Testbed::up("--racks 1 --workers 2 --rate 1gbit") else { return };
    let bytes = |transport: &str| {
        let before = received(&testbed, "r0w0", "eth0");
        let results = exchange(&testbed, &["--deployment", "cc", "--transport", transport]);
        // Warm-up, the exchanges that count, and the check.
        let exchanges = 1 + 3 + 1;
        let carried = (received(&testbed, "r0w0", "eth0") - before) as f64 / f64::from(exchanges);
        carried / results["bytes_per_worker"].as_f64().unwrap()
    };
    // The hub's host receives the gradients of the other worker and not those of its own, with few other
    // bytes; loopback is another interface.
    for transport in ["auto", "tcp"] {
        let share = bytes(transport);
        assert!(
            (1.0..1.15).contains(&share),
            "{transport}: {share} of a worker's gradients came over the network"
        );
    }
}

#[test]
fn a_hub_s_interfaces_share_what_comes_and_goes() {
    let Some(testbed) = Testbed::up("--racks 1 --workers 2 --rate 1gbit --hub-interfaces 3") else { return };
    let interfaces = ["eth0", "eth1", "eth2"];
    let count = || interfaces.map(|interface| received(&testbed, "r0hub", interface));
    let before = count();
    let hub = testbed.hosts(&["r0hub"]);
    let results = exchange(&testbed, &["--deployment", "ncc", "--hub-hosts", &hub, "--chunk", "4K"]);
    let all = 2.0 * 5.0 * results["bytes_per_worker"].as_f64().unwrap();
    let shares: Vec<f64> =
        count().iter().zip(before).map(|(after, before)| (after - before) as f64 / all).collect();
    assert!(
        shares.iter().all(|share| (0.30..0.40).contains(share)),
        "of what came in, each received {shares:?}"
    );
}

/// These hosts in their racks, as `bench exchange` takes them.
fn in_racks(hosts: &str) -> String {
    let place = |host: &str| host.replacen('=', &format!("@{}=", &host[..2]), 1);
    hosts.split(',').map(place).collect::<Vec<_>>().join(",")
}

/// The JSON that `bench exchange` between two racks of two workers wrote. Every number of the last exchange
/// was compared.
fn exchange_between_racks(testbed: &Testbed, racks: bool, more: &[&str]) -> Value {
    let hosts = testbed.hosts(&["r0w0", "r0w1", "r1w0", "r1w1"]);
    let hubs = testbed.hosts(&["r0hub", "r1hub"]);
    let (hosts, hubs) = if racks { (in_racks(&hosts), in_racks(&hubs)) } else { (hosts, hubs) };
    let enter = testbed.enter();
    let arguments =
        ["bench", "exchange", "--keys", "keys.json", "--workers", "4", "--iters", "3", "--warmup", "1"];
    let on_hosts = ["--hosts", &hosts, "--hub-hosts", &hubs, "--deployment", "ncs", "--enter", &enter];
    let words =
        arguments.into_iter().chain(on_hosts).chain(["--json", "out.json"]).chain(more.iter().copied());
    let ended = paramhub(words).file("keys.json", KEYS).finish().expect_code(0);
    assert!(ended.stdout.contains("all exact"), "{}", ended.stdout);
    serde_json::from_slice(&ended.read("out.json")).expect("valid JSON")
}

#[test]
fn racks_reduce_exactly_and_cross_the_core_with_one_worker_s_bytes() {
    let Some(testbed) = Testbed::up("--racks 2 --workers 2 --rate 1gbit --core-rate 500mbit") else { return };
    // The unit is models per exchange, out of a rack and into it. With the flat reduction half of the four
    // gradients go to the other rack's hub.
    let crossing = |racks: bool, more: &[&str]| {
        let count = || received(&testbed, "core", "r0");
        let before = count();
        let results = exchange_between_racks(&testbed, racks, more);
        let exchanges = 1 + 3 + 1;
        (count() - before) as f64 / f64::from(exchanges) / results["bytes_per_worker"].as_f64().unwrap()
    };
    let flat = crossing(false, &[]);
    for (reduction, optimizer) in [("ring", "mean"), ("sharded", "nesterov"), ("tree", "adam")] {
        let crossed = crossing(true, &["--reduction", reduction, "--optimizer", optimizer]);
        // Half as much crosses. Headers, acknowledgements, handshakes and repeated segments weigh more with a
        // model as small as this.
        let share = crossed / flat;
        assert!((0.40..0.75).contains(&share), "{reduction}: {crossed} models out of a rack, flat {flat}");
    }
    // Before this one the hubs probe the core, which takes more bytes than all of these exchanges.
    exchange_between_racks(&testbed, true, &["--reduction", "auto"]);
    let owner = crossing(true, &["--reduction", "ring", "--optimizer", "nesterov", "--optimize-at", "owner"]);
    assert!((0.40..0.75).contains(&(owner / flat)), "{owner}");
}

/// Two deployments to compare, at so low a rate that links are slower than any machine.
const SCENARIO: &str = r#"
title = "small"
model = "resnet18"
scale = 500
hosts = ["r0w0", "r0w1"]
rounds = 2
iterations = 1

[testbed]
racks = 1
workers = 2
rate = "20mbit"

[[ours]]
name = "ncc"
label = "apart"
hub-hosts = ["r0hub"]
interfaces = 1
least = 2

[[ours]]
name = "cs"
label = "beside"
deployment = "cs"
"#;

#[test]
fn a_scenario_measures_its_rows_on_a_testbed_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let [scenario, out, svg] = ["small.toml", "out.json", "out.svg"].map(|name| folder.path().join(name));
    std::fs::write(&scenario, SCENARIO).unwrap();
    let name = format!("s{}", std::process::id());
    let files = format!("{} --json {} --svg {}", scenario.display(), out.display(), svg.display());
    let mut run = testbed::xtask(&format!("run {files} --name {name}"));
    let ran = run.args(["--", "--paramhub", env!("CARGO_BIN_EXE_paramhub")]).output().unwrap();
    let (output, complaint) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    match ran.status.code() {
        Some(0) => {}
        // There are no namespaces here, or too much other load to measure.
        Some(3) => return println!("skipped: {}", complaint.trim()),
        Some(1) if complaint.contains("do not carry their rate") => {
            return println!("skipped: {}", complaint.trim());
        }
        _ => panic!("{output}{complaint}"),
    }
    let results: Value = serde_json::from_slice(&std::fs::read(out).unwrap()).expect("valid JSON");
    for (row, (name, hubs, interfaces)) in
        [("ours-ncc", 1_u32, 1_u32), ("ours-cs", 2, 1)].into_iter().enumerate()
    {
        let row = &results["rows"][row];
        assert_eq!((row["name"].as_str(), &row["verdict"]["wrong"]), (Some(name), &0.into()));
        let rounds = row["rounds"].as_array().expect("rounds");
        assert_eq!(rounds.len(), 2);
        let settings = &rounds[1]["report"]["settings"];
        assert_eq!((&settings["hubs"], &settings["interfaces"]), (&hubs.into(), &interfaces.into()));
        // Nothing is faster than the links. Beside the workers half of the traffic needs no link.
        let seconds = rounds[1]["seconds"].as_f64().unwrap();
        let bytes = results["bytes"].as_f64().unwrap() / f64::from(hubs);
        let payload = results["probes"][1][0]["expected"].as_f64().unwrap();
        let burst = 128e3;
        assert!(seconds > (bytes - burst) / payload, "{name}: {seconds} s for {bytes} bytes");
    }
    let drawn = std::fs::read_to_string(svg).expect("a drawing");
    for text in ["small", "apart", "beside", "the limit of a worker", "busiest link needs"] {
        assert!(drawn.contains(text), "no `{text}` in {drawn}");
    }
    let left = std::fs::read_dir("/run/netns").into_iter().flatten();
    let left = left.filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with(&name));
    assert_eq!(left.count(), 0, "the testbed was left behind");
}

#[test]
fn wrong_hosts_are_refused_and_named() {
    let bench = |more: &[&str]| {
        let arguments = ["bench", "exchange", "--keys", "keys.json", "--workers", "2"];
        let program = paramhub(arguments.into_iter().chain(more.iter().copied()));
        program.file("keys.json", KEYS).finish().expect_code(2)
    };
    let hosts = ["--hosts", "a=127.0.0.1,b=127.0.0.2"];
    for (more, part) in [
        (&["--hosts", "a"][..], "a has no address"),
        (&["--hosts", "a=127.0.0.1,b=127.0.0.2,c=127.0.0.3"], "3 of them for 2 workers"),
        (&["--deployment", "cs"], "--hosts"),
        (&[hosts[0], hosts[1], "--deployment", "ncs"], "--hub-hosts"),
        (&[hosts[0], hosts[1], "--deployment", "cs", "--hub-hosts", "x=127.0.0.3"], "beside workers"),
        (&[hosts[0], hosts[1], "--deployment", "cs", "--enter", "nsenter"], "{host}"),
        (&[hosts[0], hosts[1], "--deployment", "cs", "--raw"], "--raw"),
    ] {
        let refused = bench(more);
        assert!(refused.stderr.contains(part), "{more:?}: {}", refused.stderr);
    }
}

#[test]
fn several_hubs_of_one_host_need_no_namespaces() {
    let arguments =
        ["bench", "exchange", "--keys", "keys.json", "--workers", "4", "--iters", "3", "--chunk", "4K"];
    let hosts = ["--hosts", "a=127.0.0.1,b=127.0.0.2+127.0.0.3", "--deployment", "cs", "--json", "out.json"];
    for transport in ["tcp", "shm"] {
        let program = paramhub(arguments.into_iter().chain(hosts).chain(["--transport", transport]));
        let ended = program.file("keys.json", KEYS).finish().expect_code(0);
        assert!(ended.stdout.contains("all exact"), "{}", ended.stdout);
        let results: Value = serde_json::from_slice(&ended.read("out.json")).expect("valid JSON");
        assert_eq!(
            (&results["settings"]["hubs"], &results["settings"]["interfaces"]),
            (&2.into(), &2.into())
        );
    }
}

#[test]
fn factors_to_hubs_put_on_hosts_what_the_plan_says() {
    let Some(testbed) = Testbed::up("--racks 1 --workers 4 --rate 1gbit") else { return };
    let (enter, hosts) = (testbed.enter(), testbed.hosts(&["r0w0", "r0w1", "r0w2", "r0w3"]));
    let arguments =
        ["bench", "poseidon", "--model", "vgg19", "--scale", "64", "--workers", "4", "--stretch", "0"];
    let more = ["--steps", "2", "--rounds", "1", "--systems", "wfbp,adam", "--json", "out.json"];
    let on_hosts = ["--hosts", &hosts, "--deployment", "cs", "--enter", &enter];
    let arguments = arguments.into_iter().chain(more).chain(on_hosts);
    let ended = paramhub(arguments).finish().expect_code(0);
    let results: Value = serde_json::from_slice(&ended.read("out.json")).expect("valid JSON");
    let [wfbp, adam] = [0, 1].map(|system| {
        let (row, expected) = (&results["systems"][system], &results["setting"]["expected"][system]);
        let (received, planned) = (&row["bytes_received"], &expected["bytes_sent"]);
        let share = received.as_f64().unwrap() / planned.as_f64().unwrap();
        // On average a host receives what it sends. All of that has come when a worker's turn ends, while the
        // hub beside it may still send to others.
        assert!((0.97..1.03).contains(&share), "{share} of {planned} planned: {row}");
        row["busiest_by_mean"].as_f64().unwrap()
    });
    // One host has the layer with four fifths of the fully connected numbers, and sends all of them to three
    // others. What a hub still sends when a turn ends counts in the next one, on a busy machine a tenth of it.
    assert!(wfbp < 1.4 && adam > 1.8, "{wfbp} and {adam} times the mean");
}

#[test]
fn designs_of_collectives_exchange_between_hosts() {
    let Some(testbed) = Testbed::up("--racks 1 --workers 2 --rate 1gbit") else { return };
    let (enter, hosts) = (testbed.enter(), testbed.hosts(&["r0w0", "r0w1"]));
    let arguments = ["bench", "designs", "--scale", "64", "--ranks", "2", "--stretch", "0", "--steps", "2"];
    let more = ["--designs", "depcha,hub", "--rounds", "1", "--order", "last-first", "--json", "out.json"];
    let on_hosts = ["--hosts", &hosts, "--deployment", "cs", "--enter", &enter];
    let before = received(&testbed, "r0w1", "eth0");
    let ended = paramhub(arguments.into_iter().chain(more).chain(on_hosts)).finish().expect_code(0);
    let results: Value = serde_json::from_slice(&ended.read("out.json")).expect("valid JSON");
    let rows = results["ranks"][0]["rows"].as_array().unwrap();
    let carried = (received(&testbed, "r0w1", "eth0") - before) as f64;
    // There are two ranks. Each host receives half of all gradients and half of the sums from the other: once
    // for the initial values, in three steps of a turn, and alone.
    let once = results["setting"]["bytes"].as_f64().unwrap();
    assert!(carried > 4.0 * once * rows.len() as f64, "{carried} bytes for {} rows of {once}", rows.len());
    let over_mpi = rows.iter().filter(|row| row["over"] == "mpi").count();
    assert_eq!(rows.len(), 2 + over_mpi, "{rows:?}");
}
