//! Checks whether the links carry what they should, both ways at once, before anything is measured on them.

pub(super) mod end;
mod flows;

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use flows::{Flow, FlowBatch, flow_batches};

use super::Problem;
use super::rate::Rate;
use super::shape::Shape;

/// The share of a frame's bytes, as the queues count them, that is TCP payload: 1500 bytes less two headers
/// of 20 and 12 of timestamps, by 1500 and a header of 14.
const PAYLOAD_SHARE: f64 = 1448.0 / 1514.0;
const TOLERANCE: f64 = 0.05;
/// The most attempts of a measurement. On a busy machine an attempt may fail.
const ATTEMPTS: usize = 3;

/// The rates of one kind of link.
pub(super) struct LinkMeasurement {
    what: &'static str,
    rate: Rate,
    /// The number of links that were used at once, both ways.
    links: usize,
    /// The payload of each link and way, in bytes a second, in order.
    ways: Vec<f64>,
    /// The payload that the rate should give.
    expected: f64,
    /// The shortest round trip of a byte between two hosts.
    round_trip: Duration,
    /// The busy share of all processors meanwhile.
    busy: f64,
}

impl LinkMeasurement {
    pub(super) fn median(&self) -> f64 {
        self.ways[self.ways.len() / 2]
    }

    fn is_right(&self) -> bool {
        let error = |speed: &f64| (speed / self.expected - 1.0).abs();
        self.ways.first().is_some_and(|lowest| error(lowest) <= TOLERANCE)
            && self.ways.last().is_some_and(|highest| error(highest) <= TOLERANCE)
    }

    /// The measurement in words.
    pub(super) fn line(&self) -> String {
        let mbit = |speed: f64| speed * 8e-6;
        let (lowest, highest) = (self.ways.first().copied(), self.ways.last().copied());
        format!(
            "{} of {}, {} at once: {:.1} to {:.1} Mbit/s of payload each way, median {:.1}, {:.1} expected; {:.2} ms \
             there and back; processors {:.0} % busy",
            self.what,
            self.rate,
            self.links,
            mbit(lowest.unwrap_or(0.0)),
            mbit(highest.unwrap_or(0.0)),
            mbit(self.median()),
            mbit(self.expected),
            1e3 * self.round_trip.as_secs_f64(),
            100.0 * self.busy,
        )
    }

    /// The measurement as an object of JSON, in bytes a second and seconds.
    pub(super) fn json(&self) -> String {
        format!(
            r#"{{"what": "{}", "rate": "{}", "links": {}, "payload": {:.0}, "lowest": {:.0}, "highest": {:.0}, "expected": {:.0}, "round_trip": {:.6}, "busy": {:.3}}}"#,
            self.what,
            self.rate,
            self.links,
            self.median(),
            self.ways[0],
            self.ways[self.ways.len() - 1],
            self.expected,
            self.round_trip.as_secs_f64(),
            self.busy,
        )
    }
}

/// Measures each kind of link.
pub(super) fn probe(shape: &Shape) -> Result<Vec<LinkMeasurement>, Problem> {
    flow_batches(shape).iter().map(|flow_batch| probe_kind(shape, flow_batch)).collect()
}

fn probe_kind(shape: &Shape, kind: &[FlowBatch]) -> Result<LinkMeasurement, Problem> {
    let mut last = None;
    for _ in 0..ATTEMPTS {
        let measured = measure(shape, kind)?;
        if measured.is_right() {
            return Ok(measured);
        }
        last = Some(measured);
    }
    let line = last.expect("there was an attempt").line();
    Err(Problem::Failed(format!(
        "the links do not carry their rate within {:.0} %: {line}. Where the processors are busy, lower --rate or wait \
         until nothing else runs",
        100.0 * TOLERANCE
    )))
}

/// Measures the batches of one kind one after the other.
fn measure(shape: &Shape, kind: &[FlowBatch]) -> Result<LinkMeasurement, Problem> {
    let processors = Processors::read();
    let (mut ways, mut round_trip) = (Vec::new(), Duration::MAX);
    for flow_batch in kind {
        let measured = exchange(shape, &flow_batch.flows)?;
        // Flows that share a link are added up.
        for shared in measured.chunks(flow_batch.flows_a_link) {
            ways.push(shared.iter().map(|flow| flow.there).sum());
            ways.push(shared.iter().map(|flow| flow.back).sum());
        }
        round_trip = measured.iter().map(|flow| flow.round_trip).fold(round_trip, Duration::min);
    }
    ways.sort_by(f64::total_cmp);
    let first = &kind[0];
    let links = first.flows.len() / first.flows_a_link;
    let (what, rate, expected) = (first.what, first.rate, first.carries.bytes_per_second() * PAYLOAD_SHARE);
    Ok(LinkMeasurement { what, rate, links, ways, expected, round_trip, busy: processors.busy_since() })
}

/// The bytes a second that each end of a flow received, and its shortest round trip.
struct FlowMeasurement {
    there: f64,
    back: f64,
    round_trip: Duration,
}

/// Runs all flows at once.
fn exchange(shape: &Shape, flows: &[Flow]) -> Result<Vec<FlowMeasurement>, Problem> {
    let listeners: Vec<ProbeProcess> = flows
        .iter()
        .map(|flow| ProbeProcess::start(shape, &flow.to, &["listen", &flow.to.1.to_string()]))
        .collect::<Result<_, _>>()?;
    let mut dialled = Vec::new();
    for (flow, mut listener) in flows.iter().zip(listeners) {
        let port = listener.read_line()?;
        let port =
            port.parse().map_err(|_| Problem::Failed(format!("a process of the probe printed `{port}`")))?;
        let to = SocketAddr::new(flow.to.1.into(), port).to_string();
        let dialler = ProbeProcess::start(shape, &flow.from, &["dial", &flow.from.1.to_string(), &to])?;
        dialled.push((dialler, listener));
    }
    let measured = dialled.iter_mut().map(|(dialler, listener)| {
        let round_trip = Duration::from_secs_f64(1e-6 * dialler.number()?);
        Ok(FlowMeasurement { there: listener.number()?, back: dialler.number()?, round_trip })
    });
    measured.collect()
}

/// A process of the probe in a namespace. It is ended when this is dropped.
struct ProbeProcess {
    process: Child,
    words: BufReader<std::process::ChildStdout>,
}

impl ProbeProcess {
    fn start(shape: &Shape, at: &flows::HostAddress, arguments: &[&str]) -> Result<ProbeProcess, Problem> {
        let unable = |error| Problem::Failed(format!("cannot start the probe in {}: {error}", at.0));
        let program = std::env::current_exe().map_err(unable)?;
        let mut process = Command::new("ip")
            .args(["netns", "exec", &shape.namespace(&at.0)])
            .arg(program)
            .arg("testbed-end")
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(unable)?;
        let words = BufReader::new(process.stdout.take().expect("it is piped"));
        Ok(ProbeProcess { process, words })
    }

    fn read_line(&mut self) -> Result<String, Problem> {
        let mut line = String::new();
        match self.words.read_line(&mut line) {
            Ok(1..) => Ok(line.trim().to_owned()),
            // The process has printed the reason on stderr.
            _ => Err(Problem::Failed("a process of the probe ended too early".into())),
        }
    }

    fn number(&mut self) -> Result<f64, Problem> {
        let line = self.read_line()?;
        line.parse().map_err(|_| Problem::Failed(format!("a process of the probe printed `{line}`")))
    }
}

impl Drop for ProbeProcess {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The time of all processors since the machine's start, in ticks.
struct Processors {
    all: u64,
    idle: u64,
}

impl Processors {
    fn read() -> Processors {
        let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let line = text.lines().next().unwrap_or_default();
        // user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already.
        let ticks: Vec<u64> = line.split_whitespace().skip(1).take(8).flat_map(str::parse).collect();
        Processors { all: ticks.iter().sum(), idle: ticks.iter().skip(3).take(2).sum() }
    }

    fn busy_since(&self) -> f64 {
        let now = Processors::read();
        let all = (now.all - self.all).max(1);
        1.0 - (now.idle - self.idle) as f64 / all as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(ways: &[f64]) -> LinkMeasurement {
        let rate = Rate(8_000_000);
        let round_trip = Duration::from_millis(1);
        LinkMeasurement {
            what: "links",
            rate,
            links: 1,
            ways: ways.into(),
            expected: 1e6,
            round_trip,
            busy: 0.5,
        }
    }

    #[test]
    fn every_link_must_carry_its_rate_each_way_no_less_and_no_more() {
        assert!(measured(&[0.96e6, 1e6, 1.04e6]).is_right());
        assert!(!measured(&[0.94e6, 1e6]).is_right());
        assert!(!measured(&[1e6, 1.06e6]).is_right());
        assert!(!measured(&[]).is_right());
    }
}
