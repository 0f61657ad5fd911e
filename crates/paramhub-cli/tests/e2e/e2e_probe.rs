//! `paramhub probe` at all workers of a job: over loopback, and over a link of known rates between two network namespaces.

use serde_json::Value;

use crate::common::hosts::Network;
use crate::common::{Program, paramhub};

const PROBE: &str = env!("CARGO_BIN_EXE_paramhub");

fn probe<'a>(workers: &'a str, more: impl IntoIterator<Item = &'a str>) -> Program {
    paramhub(["run", "-n", workers, "--", PROBE, "probe"].into_iter().chain(more))
}

/// The output of rank 0, without the launcher's prefix.
fn json(program: Program) -> Value {
    let ended = program.finish().expect_code(0);
    let line = ended.stdout.strip_prefix("[0] ").expect("rank 0 prints");
    assert_eq!(line.lines().count(), 1, "{line}");
    serde_json::from_str(line).unwrap()
}

#[test]
fn every_pair_is_measured_both_ways() {
    for more in [&["--json", "--seconds", "1"][..], &["--json", "--seconds", "1", "--together"]] {
        let report = json(probe("3", more.iter().copied()));
        assert_eq!(report["together"], more.len() == 4);
        assert_eq!(report["members"].as_array().unwrap().len(), 3);
        assert_eq!(report["members"][2]["address"], "127.0.0.1");
        for matrix in [&report["alone_mbit_per_s"], &report["both_mbit_per_s"]] {
            for (from, to) in (0..9).map(|cell| (cell / 3, cell % 3)) {
                let rate = matrix[from][to].as_f64();
                assert!(if from == to { rate.is_none() } else { rate > Some(1.0) }, "{report}");
            }
        }
    }
    let shown = probe("2", ["--seconds", "0.5"]).finish().expect_code(0).stdout;
    for part in ["Mbit/s of payload", "alone", "both ways", "to 1", "(127.0.0.1)", "slowest"] {
        assert!(shown.contains(part), "no `{part}` in\n{shown}");
    }
    assert!(!shown.contains("[1]"), "rank 1 prints, too:\n{shown}");
}

#[test]
fn a_probe_that_cannot_be_is_refused() {
    paramhub(["probe"]).finish().expect_code(2).expect_error(&["PARAMHUB_URL is not set", "paramhub run"]);
    // The address is reserved for documentation; no machine has it.
    for (workers, more, code, reasons) in [
        ("1", &[][..], 2, ["one worker", "no network to measure"]),
        ("2", &["--seconds", "0"], 2, ["--seconds 0", "above zero"]),
        ("2", &["--seconds", "-1"], 2, ["--seconds", "-1"]),
        ("4", &["--seconds", "0.1"], 1, ["6 rounds", "allow 1 s"]),
        ("2", &["--port", "7800-"], 2, ["no port and no range", "7800-7815"]),
        ("2", &["--address", "192.0.2.1"], 2, ["cannot listen on 192.0.2.1", "--address"]),
    ] {
        let refused = probe(workers, more.iter().copied()).finish().expect_code(code);
        for reason in reasons {
            assert!(refused.stderr.contains(reason), "no `{reason}` in\n{}", refused.stderr);
        }
    }
}

#[test]
fn ranks_of_one_machine_share_a_range_of_ports() {
    // These ports are below those that systems assign; three of them may be taken by others.
    let shown = json(probe("3", ["--json", "--seconds", "1", "--port", "21810-21815"]));
    assert_eq!(shown["members"].as_array().unwrap().len(), 3);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let refused = probe("2", ["--port", &port]).finish().expect_code(2);
    assert!(refused.stderr.contains(&format!("no port from {port} to {port}")), "{}", refused.stderr);
}

#[test]
fn the_two_directions_of_a_link_are_measured_separately() {
    let Some(mut network) = Network::new() else { return };
    let [here, there] = [(); 2].map(|()| network.host());
    if !(here.shape("80mbit") && there.shape("5mbit")) {
        return;
    }
    let here_with_token = |arguments: &[&str]| {
        here.paramhub(arguments.iter().copied()).env("PARAMHUB_ADMIN_TOKEN", "a-token-for-this-test")
    };
    let anywhere = format!("{}:0", here.address);
    let hub = here_with_token(&["hub", "--listen", &anywhere, "--manager", &anywhere]).start();
    let ready = hub.wait_for("hub ready: ");
    let url = ready.split_whitespace().find(|word| word.starts_with("https://")).expect("a URL");
    // Rank 1 runs in the other namespace.
    let worker = format!(
        "probe='{PROBE} probe --seconds 3 --json'; [ $RANK = 0 ] && exec $probe; exec {} $probe",
        there.namespace().door().join(" ")
    );
    let report = json(here_with_token(&["run", "-n", "2", "--hub", url, "--", "sh", "-c", &worker]));
    assert_eq!(report["members"][1]["address"], there.address, "{report}");
    for matrix in [&report["alone_mbit_per_s"], &report["both_mbit_per_s"]] {
        // Nothing gets much above the rate of its link. A busy machine may stay far below it; what it reaches in the fast
        // direction is still more than the slow one allows, unless one direction was taken for the other.
        let [fast, slow] =
            [(0, 1), (1, 0)].map(|(from, to): (usize, usize)| matrix[from][to].as_f64().unwrap());
        assert!(fast < 1.1 * 80.0 && fast > 1.2 * 5.0, "from 0 to 1 at 80: {report}");
        assert!(slow < 1.1 * 5.0 && slow > 0.0, "from 1 to 0 at 5: {report}");
    }
}
