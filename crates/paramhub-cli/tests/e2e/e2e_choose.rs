//! Hubs of two racks measure the network between them, and the reduction `auto` uses the result: over
//! loopback, and in network namespaces behind a slow core and a fast one.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use rustix::process::Signal;
use serde_json::Value;

use crate::common::testbed::Testbed;
use crate::common::{Process, Program, example, paramhub, wait_until};

const TOKEN: &str = "of-these-racks-only";

/// Two racks, each with a hub. The first hub runs the connection manager.
struct Racks {
    /// `None` on loopback.
    testbed: Option<Testbed>,
    url: String,
    hubs: Vec<Process>,
}

/// The network in which the racks run.
enum Where<'a> {
    Loopback { rate: &'a str },
    Testbed(Testbed),
}

impl Racks {
    fn start(place: Where, more: &[&str]) -> Racks {
        let (testbed, addresses, rate) = match place {
            Where::Loopback { rate } => {
                (None, ["127.0.0.1", "127.0.0.1"].map(str::to_owned), format!("lo={rate}"))
            }
            Where::Testbed(testbed) => {
                let address = |host: &str| {
                    let host = testbed.hosts(&[host]);
                    host.split_once('=').expect("HOST=IP").1.to_owned()
                };
                let addresses = ["r0hub", "r1hub"].map(address);
                (Some(testbed), addresses, "eth0=100mbit".to_owned())
            }
        };
        let mut racks = Racks { testbed, url: String::new(), hubs: Vec::new() };
        for (number, address) in addresses.iter().enumerate() {
            let (listen, rack) = (format!("{address}:0"), format!("r{number}"));
            let manager = if number == 0 { listen.clone() } else { racks.url.clone() };
            let flags = ["hub", "--listen", &listen, "--manager", &manager, "--rack", &rack];
            let flags = flags.into_iter().chain(["--interface-rate", &rate, "--cores", "1", "--pin", "no"]);
            // The test itself reads the metrics, in clear.
            let own_manager = [&["--plain-http"][..], more].concat();
            let flags = flags.chain(if number == 0 { own_manager } else { Vec::new() });
            let hub = racks.on(&format!("{rack}hub"), paramhub(flags)).start();
            let ready = hub.wait_for("hub ready: ");
            if number == 0 {
                let url = ready.split_whitespace().find(|word| word.starts_with("http://"));
                racks.url = url.expect("a URL").to_owned();
            }
            racks.hubs.push(hub);
        }
        racks
    }

    fn on(&self, host: &str, program: Program) -> Program {
        let program = program.env("PARAMHUB_ADMIN_TOKEN", TOKEN);
        match &self.testbed {
            Some(testbed) => {
                let words: Vec<String> =
                    testbed.enter().replace("{host}", host).split(' ').map(str::to_owned).collect();
                program.within(&words)
            }
            None => program,
        }
    }

    fn operator(&self, arguments: &[&str]) -> Program {
        let program = paramhub(arguments.iter().copied()).env("PARAMHUB_URL", &self.url);
        self.on("r0hub", program)
    }

    fn operate(&self, arguments: &[&str]) -> String {
        self.operator(arguments).finish().expect_code(0).stdout
    }

    /// Starts a job with two workers in each rack.
    fn start_job(&self, name: &str, create: &[&str], arguments: &[&str]) -> Vec<Process> {
        let printed = self.operate(&[&["jobs", "create", name, "-n", "4"], create].concat());
        let worker = |rank: usize| {
            let host = format!("r{}w{}", rank / 2, rank % 2);
            let program = self.on(&host, example("exchange", arguments.iter().copied()));
            let program = printed
                .lines()
                .filter_map(|line| line.split_once('='))
                .fold(program, |program, (name, value)| program.env(name, value));
            program
                .env("RANK", &rank.to_string())
                .env("PARAMHUB_RACK", &format!("r{}", rank / 2))
                .env("PARAMHUB_TRANSPORT", "tcp")
                .start()
        };
        (0..4).map(worker).collect()
    }

    /// The explanation of the reduction of a job that runs to its end.
    fn reduction_of(&self, name: &str) -> String {
        self.reduction_with(name, &[])
    }

    fn reduction_with(&self, name: &str, create: &[&str]) -> String {
        for worker in self.start_job(name, create, &["--steps", "5"]) {
            let ended = worker.finish().expect_code(0);
            assert!(ended.stdout.contains("all numbers right"), "{}", ended.stdout);
        }
        let shown = self.operate(&["jobs", "show", name, "--json"]);
        let job: Value = serde_json::from_str(&shown).expect("JSON");
        job["reduction"].as_str().expect("text").to_owned()
    }

    /// Returns the number of probes of the hubs, by the log of the first.
    fn probes(&self) -> usize {
        self.hubs[0].stderr().matches("from rack r0 to rack r1 go").count()
    }

    fn links(&self) -> Value {
        let shown: Value = serde_json::from_str(&self.operate(&["hubs", "--json"])).expect("JSON");
        shown["links"].clone()
    }
}

/// The metrics with the token, since only operators get the names of racks.
fn metrics(url: &str) -> String {
    let address = url.strip_prefix("http://").expect("a URL");
    let mut stream = TcpStream::connect(address).unwrap();
    let request =
        format!("GET /metrics HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {TOKEN}\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn auto_goes_by_what_the_hubs_have_probed() {
    // Loopback carries some gigabits: much for interfaces of 10 Mbit/s, little for those of a petabit.
    for (rate, taken, known) in
        [("10mbit", "flat", "(core at least "), ("100000gbit", "sharded", ", probed ")]
    {
        let racks = Racks::start(Where::Loopback { rate }, &[]);
        assert_eq!(racks.links(), Value::Array(Vec::new()), "no job has asked yet");
        let reduction = racks.reduction_of("first");
        let choice = format!("between racks: {taken} (core ");
        assert!(reduction.contains(&choice) && reduction.contains(known), "{reduction}");
        assert!(reduction.contains("by their interfaces' rates"), "{choice}");
        assert!(racks.hubs[0].stderr().contains(&choice), "the manager's log has it, too");
        assert_eq!(racks.probes(), 1);
        let links = racks.links();
        for (link, ends) in [(&links[0], ["r0", "r1"]), (&links[1], ["r1", "r0"])] {
            assert_eq!([&link["from"], &link["to"]], ends);
            assert_eq!(link["is_at_least"], taken == "flat", "{links}");
        }
        let metrics = metrics(&racks.url);
        let measured = r#"paramhub_rack_link_bits_per_second{from="r0",to="r1"} "#;
        let value = metrics.lines().find_map(|line| line.strip_prefix(measured)).expect("it is counted");
        assert!(value.parse::<f64>().unwrap() > 1e6, "{metrics}");
        // The result is kept until an operator asks for another probe.
        assert!(racks.reduction_of("second").contains(&choice));
        assert_eq!(racks.probes(), 1);
        let shown = racks.operate(&["hubs", "probe"]);
        assert!(shown.contains("r0") && shown.contains("bit/s"), "{shown}");
        assert_eq!(racks.probes(), 2);
        let forced = racks.reduction_with("forced", &["--reduction", "ring"]);
        assert_eq!(forced, "ring, as the job asks");
        let at_owner = racks.reduction_with("owner", &["--optimize-at", "owner"]);
        assert_eq!(
            at_owner.contains("has no effect, since there is one site"),
            taken == "flat",
            "{at_owner}"
        );
    }
}

#[test]
fn a_rate_that_the_operator_gives_is_not_probed() {
    let racks = Racks::start(Where::Loopback { rate: "1gbit" }, &["--core-rate", "10mbit"]);
    let choice = racks.reduction_of("given");
    assert!(choice.contains("between racks: sharded (core 10 Mbit/s as --core-rate says"), "{choice}");
    assert_eq!(racks.probes(), 0);
}

#[test]
fn no_hub_probes_where_a_job_runs() {
    let racks = Racks::start(Where::Loopback { rate: "1gbit" }, &[]);
    let steps = ["--steps", "100000", "--compute-ms", "1"];
    // The reduction is given, so that nothing is probed for it.
    let running = racks.start_job("busy", &["--reduction", "sharded"], &steps);
    running.iter().for_each(|worker| drop(worker.wait_for("exchanges 3 keys")));
    let refused = racks.operator(&["hubs", "probe"]).finish().expect_code(1);
    refused.expect_error(&["job `busy` runs at hubs", "--core-rate"]);
    let choice = racks.reduction_of("beside");
    assert!(choice.starts_with("auto, by the hubs' places: ") && choice.contains("job `busy`"), "{choice}");
    assert_eq!(racks.probes(), 0);
}

#[test]
fn a_hub_that_does_not_answer_is_named_and_delays_no_job_for_long() {
    let racks = Racks::start(Where::Loopback { rate: "1gbit" }, &[]);
    racks.hubs[1].signal(Signal::STOP);
    let begun = Instant::now();
    let shown = racks.operate(&["hubs", "probe"]);
    let waited = begun.elapsed();
    racks.hubs[1].signal(Signal::CONT);
    // This takes far less time than until a silent hub is lost.
    assert!(shown.contains("hub 1 (127.0.0.1:") && shown.contains("has not answered"), "{shown} {waited:?}");
    assert_eq!(racks.links()[0]["rate"], Value::Null);
    // The job goes on without a rate, and the explanation says why.
    let choice = racks.reduction_of("next");
    assert!(choice.contains("by the hubs' places") && choice.contains("hub 1 (127.0.0.1:"), "{choice}");
    wait_until("the hub is asked again", || {
        racks.operate(&["hubs", "probe"]);
        racks.probes() > 0
    });
}

#[test]
fn a_thin_core_is_distinguished_from_a_wide_one() {
    for (core, taken) in [("10mbit", "sharded"), ("400mbit", "flat")] {
        let flags = format!("--racks 2 --workers 2 --rate 100mbit --hub-interfaces 1 --core-rate {core}");
        let Some(testbed) = Testbed::up(&flags) else { return };
        let racks = Racks::start(Where::Testbed(testbed), &[]);
        let choice = racks.reduction_of("job");
        assert!(choice.contains(&format!("between racks: {taken} (core ")), "{core}: {choice}");
        for link in racks.links().as_array().expect("a list") {
            let rate = link["rate"].as_str().expect("a rate").strip_suffix("bit").expect("bits");
            let mbit = rate.parse::<f64>().unwrap() / 1e6;
            // A busy machine may stay far below the rate, but nothing gets much above it.
            let carried = if taken == "flat" { 100.0 } else { 10.0 };
            assert!(mbit > 0.1 * carried && mbit < 1.1 * carried, "{core}: {mbit} Mbit/s in {link}");
        }
    }
}
