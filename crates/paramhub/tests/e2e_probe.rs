//! `paramhub probe` at all workers of a job: over loopback, and over a link of known rates between two network namespaces.

mod common;

use std::process::Command;

use common::{Program, paramhub};
use serde_json::Value;

const PROBE: &str = env!("CARGO_BIN_EXE_paramhub");

fn probe<'a>(workers: &'a str, more: impl IntoIterator<Item = &'a str>) -> Program {
    paramhub(["run", "-n", workers, "--", PROBE, "probe"].into_iter().chain(more))
}

/// What rank 0 printed, without the launcher's prefix.
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
    // The address is one of documentation, which no machine has.
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
    // Below those that systems give out; three of them may be taken by others.
    let shown = json(probe("3", ["--json", "--seconds", "1", "--port", "21810-21815"]));
    assert_eq!(shown["members"].as_array().unwrap().len(), 3);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let refused = probe("2", ["--port", &port]).finish().expect_code(2);
    assert!(refused.stderr.contains(&format!("no port from {port} to {port}")), "{}", refused.stderr);
}

/// Two network namespaces, joined by a link that is shaped in both directions. Removed with everything in them.
struct Namespaces {
    names: [String; 2],
}

impl Namespaces {
    const HERE: &str = "10.219.7.1";

    /// `None` where this process may not make any, which it says.
    fn joined(rates: [&str; 2]) -> Option<Namespaces> {
        let names = [0, 1].map(|end| format!("phprobe-{}-{end}", std::process::id()));
        let made = Namespaces { names };
        let [here, there] = &made.names;
        if let Err(reason) = ip(&["netns", "add", here]) {
            println!("skipped: no network namespaces here: {reason}");
            return None;
        }
        ip(&["netns", "add", there]).unwrap();
        ip(&["-n", here, "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", there])
            .unwrap();
        for (name, address, rate) in [(here, "10.219.7.1/24", rates[0]), (there, "10.219.7.2/24", rates[1])] {
            ip(&["-n", name, "address", "add", address, "dev", "link0"]).unwrap();
            ip(&["-n", name, "link", "set", "lo", "up"]).unwrap();
            ip(&["-n", name, "link", "set", "link0", "up"]).unwrap();
            let shape = ["-n", name, "qdisc", "add", "dev", "link0", "root", "tbf", "rate", rate, "burst"];
            if let Err(reason) = tool("tc", &[&shape[..], &["64k", "latency", "100ms"]].concat()) {
                println!("skipped: links cannot be shaped here: {reason}");
                return None;
            }
        }
        Some(made)
    }

    /// `paramhub` with these arguments in the first namespace.
    fn paramhub<'a>(&'a self, arguments: impl IntoIterator<Item = &'a str>) -> Program {
        let within = ["netns", "exec", &self.names[0], PROBE];
        common::program("ip".as_ref(), within.into_iter().chain(arguments))
            .env("PARAMHUB_ADMIN_TOKEN", "a-token-for-this-test")
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    tool("ip", arguments)
}

fn tool(name: &str, arguments: &[&str]) -> Result<(), String> {
    let ended = Command::new(name).args(arguments).output().map_err(|error| format!("{name}: {error}"))?;
    match ended.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&ended.stderr).trim().to_owned()),
    }
}

#[test]
fn a_links_two_directions_are_told_apart() {
    let Some(namespaces) = Namespaces::joined(["80mbit", "20mbit"]) else { return };
    let anywhere = format!("{}:0", Namespaces::HERE);
    let hub = namespaces.paramhub(["hub", "--listen", &anywhere, "--manager", &anywhere]).start();
    let ready = hub.wait_for("hub ready: ");
    let url = ready.split_whitespace().find(|word| word.starts_with("http://")).expect("a URL");
    // Rank 1 crosses over.
    let worker = format!(
        "probe='{PROBE} probe --seconds 3 --json'; [ $RANK = 0 ] && exec $probe; exec ip netns exec {} $probe",
        namespaces.names[1]
    );
    let report = json(namespaces.paramhub(["run", "-n", "2", "--hub", url, "--", "sh", "-c", &worker]));
    assert_eq!(report["members"][1]["address"], "10.219.7.2", "{report}");
    for matrix in [&report["alone_mbit_per_s"], &report["both_mbit_per_s"]] {
        for (from, to, shaped) in [(0, 1, 80.0), (1, 0, 20.0)] {
            let rate = matrix[from][to].as_f64().unwrap();
            // A busy machine may stay below the rate, headers make it; nothing gets much above it.
            assert!(rate > 0.5 * shaped && rate < 1.1 * shaped, "{from} to {to} at {shaped}: {report}");
        }
    }
}
