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

/// Probes a testbed, and returns the milliseconds of the shortest round trip over links of this kind. No link may carry more
/// than its rate anywhere, and each must carry something. On a busy machine the probe may refuse.
fn check_probe(name: &str, kind: &str, mbit: f64) -> f64 {
    let probed = output(&format!("probe --name {name}"));
    let probe_output = text(&probed.stdout) + &text(&probed.stderr);
    let line =
        probe_output.lines().find(|line| line.contains(kind)).unwrap_or_else(|| panic!("{probe_output}"));
    let words: Vec<&str> = line.split(' ').collect();
    let position = |word: &str| words.iter().position(|found| *found == word).expect(word);
    let number = |at: usize| words[at].parse::<f64>().unwrap_or_else(|_| panic!("{line}"));
    let (lowest, highest) = (number(position("to") - 1), number(position("to") + 1));
    assert!(lowest > 0.1 * mbit && highest < 1.06 * mbit * 1448.0 / 1514.0, "{line}");
    assert!(probed.status.success() || probe_output.contains("do not carry their rate"), "{probe_output}");
    number(position("ms") - 1)
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

    check_probe(name, "links of hosts of 200mbit", 200.0);

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

/// The relay's process of a testbed with a delay.
fn relay(name: &str) -> String {
    let listed =
        Command::new("ip").args(["netns", "pids", &format!("{name}-relay")]).output().expect("ip starts");
    let processes = text(&listed.stdout);
    let [process] = processes.split_whitespace().collect::<Vec<_>>()[..] else {
        panic!("the processes of the relay: {processes:?}")
    };
    process.to_owned()
}

/// Whether a process is gone, or has only its exit code left.
fn is_gone(process: &str) -> bool {
    std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default().is_empty()
}

#[test]
fn links_with_a_delay_hold_every_packet_so_long_and_still_limit_the_rate() {
    let arguments = "--racks 1 --workers 2 --rate 50mbit --hub-interfaces 2 --delay 10ms";
    let Some(bed) = Testbed::up("slow", arguments) else { return };
    // There and back is four times over a link.
    let round_trip = check_probe(&bed.0, "links of hosts of 50mbit", 50.0);
    assert!(round_trip >= 40.0, "{round_trip} ms");

    // Nothing passes without the relay, and commands say why.
    let relay = relay(&bed.0);
    assert!(Command::new("kill").args(["-KILL", &relay]).status().expect("kill starts").success());
    wait_until("the relay is gone", || is_gone(&relay));
    let probed = output(&format!("probe --name {}", bed.0));
    assert!(!probed.status.success() && text(&probed.stderr).contains("is gone"), "{}", text(&probed.stderr));
}

#[test]
fn every_link_between_racks_has_the_delay_too() {
    let arguments = "--racks 2 --workers 1 --rate 50mbit --core-rate 20mbit --hub-interfaces 1 --delay 5ms";
    let Some(bed) = Testbed::up("far", arguments) else { return };
    let end = |host: &str, arguments: &[&str]| {
        let mut command = testbed(&format!("exec {host} --name {} --", bed.0));
        command.args([env!("CARGO_BIN_EXE_xtask"), "testbed-end"]).args(arguments).stdout(Stdio::piped());
        let mut process = Started(command.spawn().expect("it starts"));
        let mut line = String::new();
        BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        (process, line.trim().to_owned())
    };
    let (_listener, port) = end("r1w0", &["listen", "10.64.1.1"]);
    let (_dialler, microseconds) = end("r0w0", &["dial", "10.64.0.1", &format!("10.64.1.1:{port}")]);
    // There and back is eight times over a link.
    assert!(microseconds.parse::<f64>().unwrap() >= 40e3, "{microseconds} us");
}

#[test]
fn the_relay_of_delayed_packets_ends_with_a_testbed_whose_holder_is_killed() {
    let Some(bed) = Testbed::up("cut", "--racks 1 --workers 1 --rate 20mbit --delay 1ms") else { return };
    let name = bed.0.clone();
    let first = relay(&name);
    drop(bed);
    assert!(is_gone(&first), "`down` leaves the relay");
    let _bed = Testbed(name.clone());
    let mut held =
        testbed(&format!("up --hold --name {name} --racks 1 --workers 1 --rate 20mbit --delay 1ms"));
    let mut held = Started(held.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts"));
    let mut line = String::new();
    BufReader::new(held.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("each link delays by 1ms"), "{line}");
    let relay = relay(&name);
    held.0.kill().unwrap();
    held.0.wait().unwrap();
    wait_until("nothing is left", || namespaces(&name).is_empty());
    assert!(is_gone(&relay), "the relay is left");
}
