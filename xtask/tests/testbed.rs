//! `cargo xtask testbed` with real namespaces, where they are permitted.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The time that killed processes may take to end: far above what they take.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

fn testbed(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.arg("testbed").args(arguments.split(' ')).stdin(Stdio::null());
    command
}

fn output(arguments: &str) -> Output {
    testbed(arguments).output().expect("xtask starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// All namespaces of a testbed.
fn namespaces(name: &str) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir("/run/netns") else { return Vec::new() };
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|namespace| namespace.starts_with(&format!("{name}-"))).collect()
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}: it did not come to that");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Takes the testbed down however the test ends.
struct Testbed(String);

impl Testbed {
    /// `None` if this machine permits no testbeds.
    fn up(name: &str, arguments: &str) -> Option<Testbed> {
        let name = format!("{name}{}", std::process::id());
        let testbed = Testbed(name.clone());
        let raised = output(&format!("up --name {name} {arguments}"));
        match raised.status.code() {
            Some(0) => Some(testbed),
            Some(3) => {
                println!("skipped: {}", text(&raised.stderr).trim());
                None
            }
            code => panic!("up ended with {code:?}: {}", text(&raised.stderr)),
        }
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        let _ = output(&format!("down --name {}", self.0));
    }
}

/// A process that ends with the test that started it, unless the test ends it before.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_testbed_is_built_entered_probed_and_taken_down_with_what_runs_inside() {
    let Some(bed) =
        Testbed::up("whole", "--racks 2 --workers 1 --rate 200mbit --hub-interfaces 2 --core-rate 100mbit")
    else {
        return;
    };
    let name = &bed.0;
    assert_eq!(namespaces(name).len(), 2 * (1 + 1 + 1) + 1);
    let hosts = text(&output(&format!("hosts --name {name}")).stdout);
    assert!(hosts.contains("r1hub 10.64.1.101+10.64.1.102"), "{hosts}");

    // The names and addresses are the testbed's alone.
    let seen = output(&format!("exec r1hub --name {name} -- ip -brief address"));
    let seen = text(&seen.stdout);
    assert!(seen.contains("eth1") && seen.contains("10.64.1.102"), "{seen}");
    let outside = Command::new("ip").args(["-brief", "address"]).output().expect("ip starts");
    assert!(!text(&outside.stdout).contains("10.64."), "an address is outside of the testbed");
    let unknown_host = output(&format!("exec r2w0 --name {name} -- true"));
    assert!(!unknown_host.status.success() && text(&unknown_host.stderr).contains("no host r2w0"));

    // On a busy machine the probe may refuse. No link may carry more than its rate anywhere, and each must
    // carry something.
    let probed = output(&format!("probe --name {name}"));
    let probe_output = text(&probed.stdout) + &text(&probed.stderr);
    let line = probe_output
        .lines()
        .find(|line| line.contains("links of hosts of 200mbit"))
        .unwrap_or_else(|| panic!("{probe_output}"));
    let words: Vec<&str> = line.split(' ').collect();
    let range = words.iter().position(|word| *word == "to").expect("a range of speeds");
    let speed = |at: usize| words[at].parse::<f64>().unwrap_or_else(|_| panic!("{line}"));
    let (lowest, highest) = (speed(range - 1), speed(range + 1));
    assert!(lowest > 20.0 && highest < 1.06 * 200.0 * 1448.0 / 1514.0, "{line}");
    assert!(probed.status.success() || probe_output.contains("do not carry their rate"), "{probe_output}");

    let again = output(&format!("up --name {name} --racks 1 --workers 1 --rate 20mbit"));
    assert!(
        text(&again.stderr).contains(&format!("testbed {name} is up already")),
        "{}",
        text(&again.stderr)
    );
    assert_eq!(again.status.code(), Some(1));
    assert!(!namespaces(name).is_empty(), "a refused second `up` must not take the first one's down");

    let mut inside = testbed(&format!("exec r0w0 --name {name} -- sh -c"));
    let mut inside =
        Started(inside.arg("echo here; exec sleep 1000").stdout(Stdio::piped()).spawn().expect("it starts"));
    let mut line = String::new();
    BufReader::new(inside.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "here\n");
    let status = text(&output(&format!("status --name {name}")).stdout);
    assert!(status.contains("1 processes"), "{status}");

    let down = output(&format!("down --name {name}"));
    assert!(down.status.success(), "{}", text(&down.stderr));
    assert!(!inside.0.wait().unwrap().success(), "what ran inside was ended");
    assert!(namespaces(name).is_empty());
    assert!(text(&output(&format!("status --name {name}")).stdout).contains("is not up"));
}

#[test]
fn a_testbed_whose_process_is_killed_while_it_builds_leaves_nothing() {
    let Some(bed) = Testbed::up("half", "--racks 1 --workers 1 --rate 20mbit") else { return };
    let name = bed.0.clone();
    drop(bed);
    let arguments = format!("up --name {name} --racks 8 --workers 16 --rate 20mbit");
    let mut up = Started(testbed(&arguments).stdout(Stdio::null()).spawn().expect("it starts"));
    wait_until("the first hosts are there", || namespaces(&name).len() > 16);
    up.0.kill().unwrap();
    up.0.wait().unwrap();
    wait_until("nothing is left", || namespaces(&name).is_empty());
    // The name is free again.
    let bed = Testbed(name.clone());
    let again = output(&format!("up --name {name} --racks 1 --workers 1 --rate 20mbit"));
    assert!(again.status.success(), "{}", text(&again.stderr));
    drop(bed);
    assert!(namespaces(&name).is_empty());
}

#[test]
fn a_held_testbed_ends_with_the_pipe_of_its_holder() {
    let Some(bed) = Testbed::up("held", "--racks 1 --workers 1 --rate 20mbit") else { return };
    let name = bed.0.clone();
    drop(bed);
    let _bed = Testbed(name.clone());
    let arguments = format!("up --hold --name {name} --racks 1 --workers 2 --rate 20mbit");
    let mut held = testbed(&arguments);
    let mut held = Started(held.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts"));
    let mut line = String::new();
    BufReader::new(held.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("is up: 1 x 2 workers"), "{line}");
    assert_eq!(namespaces(&name).len(), 2 + 1 + 1);
    drop(held.0.stdin.take());
    assert!(held.0.wait().unwrap().success());
    assert!(namespaces(&name).is_empty());
}
