mod admission;
mod ending;
mod further_shares;
mod notices;
mod opening;
mod ranks;
mod reports;
mod rewind;
mod shutdown;
mod standbys;
mod streams;

use std::collections::BTreeSet;
use std::sync::Arc;

use super::job::Phase;
use super::*;
use crate::auth::{Epoch, EpochSecret, Nonce};
use crate::chunk::ChunkMap;
use crate::composition::{Composed, Composition, Neighbour};
use crate::key::{Key, KeyTable};
use crate::placement::{HubShape, InterfaceShape, RouteId};
use crate::scheme::Cluster;
use crate::service::{
    Allowance, CauseKind, JobCounters, JobEnd, JobOptions, JobPlan, StopWhen, TeamAllowance,
};
use crate::settings::Settings;
use crate::stragglers::Stragglers;
use crate::wire::Failure;

const RENDEZVOUS: Duration = Duration::from_secs(30);

/// The two workers of a job, and its two routes, each on an interface and a core of its own.
const RANKS: [Neighbour; 2] = [Neighbour::Worker(0), Neighbour::Worker(1)];
const ROUTES: [RouteId; 2] = [0, 1];

/// The job of this number.
fn job(number: u8) -> Namespace {
    Namespace([number; 16])
}

fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

fn keys() -> KeyTable {
    KeyTable::new(vec![Key::new("w", [100_000])]).unwrap()
}

fn terms(number: u8) -> JobTerms {
    let interface =
        |core| InterfaceShape { address: format!("10.0.0.{core}:1"), cores: vec![core], weight: 1 };
    let hub = HubShape { interfaces: vec![interface(0), interface(1)], local: None, between_hubs: None };
    let keys = keys();
    let map = ChunkMap::new(&keys, 4096).unwrap();
    let route = |id| RouteTerms { id, core: id, interface: id, share: 0, streams: 2, memory_bytes: 5 << 20 };
    JobTerms {
        namespace: job(number),
        name: format!("job-{number}"),
        composed: Arc::new(Composed::new(&keys, &map, Composition::flat(vec![hub], 2)).unwrap()),
        site: 0,
        routes: ROUTES.map(route).to_vec(),
        min_workers: None,
        first_workers: 2,
        shares: Vec::new(),
        hub: 0,
        rewinds: false,
        begins_again: false,
        epoch: 1,
        rendezvous: RENDEZVOUS,
        dead_after: seconds(15.0),
        progress_timeout: None,
        continues: false,
        stragglers: Stragglers::Wait,
        weight: 1,
        team: TeamAllowance::default(),
        resumes: false,
        writes_checkpoints: false,
        checkpoint_folder: "/data/job-1".into(),
    }
}

/// The manager wants a job allocated of which this hub has a part, in which it is to have this position.
fn again(number: u8, hub: u32) -> Event {
    let composed = terms(number).composed;
    Event::AllocateAgain(Box::new(JobPlan {
        name: format!("job-{number}"),
        namespace: job(number),
        nonce: Nonce([0; 32]),
        epoch: Epoch { number: 1, secret: EpochSecret([0; 32]) },
        version_1_ranks: Vec::new(),
        options: JobOptions::default(),
        composition: composed.composition.clone(),
        site: 0,
        hub,
        shares: Vec::new(),
        later_hubs: Vec::new(),
        further: None,
        cluster: Cluster::beside_workers(2),
        settings: Settings::new(keys()),
        team: TeamAllowance::default(),
    }))
}

fn hub_terms() -> HubTerms {
    HubTerms {
        interfaces: 2,
        interface_names: vec!["eth0".into(), "eth1".into()],
        memory_bytes: 100 << 20,
        job_limits: JobLimits::default(),
        descriptors_max: 1024,
    }
}

/// The streams that a hub has admitted.
#[derive(Default)]
struct Streams {
    missing: BTreeSet<Neighbour>,
    /// By interface.
    through: BTreeMap<u16, Vec<(RouteId, u32, Neighbour)>>,
}

impl AdmittedStreams for Streams {
    fn missing(&self, _: Namespace) -> Vec<Neighbour> {
        self.missing.iter().copied().collect()
    }

    fn through(&self, _: Namespace, interface: u16) -> Vec<(RouteId, u32, Neighbour)> {
        self.through.get(&interface).cloned().unwrap_or_default()
    }
}

/// A hub with its time and its streams.
struct Hub {
    control: JobControl,
    streams: Streams,
    now: Duration,
}

impl Hub {
    fn new() -> Hub {
        Hub::with(hub_terms())
    }

    fn with(terms: HubTerms) -> Hub {
        Hub { control: JobControl::new(terms), streams: Streams::default(), now: seconds(1000.0) }
    }

    /// A hub at which job 1, with these changes, runs.
    fn running(change: impl FnOnce(&mut JobTerms)) -> Hub {
        let mut hub = Hub::new();
        hub.run(1, change);
        hub
    }

    /// Lets a job open and connect.
    fn run(&mut self, number: u8, change: impl FnOnce(&mut JobTerms)) {
        let mut terms = terms(number);
        change(&mut terms);
        let has_snapshot = terms.writes_checkpoints;
        self.handle(Event::Planned(Box::new(terms)));
        for _ in ROUTES {
            self.core(number, CoreEvent::Opened { missing_bytes: None, has_snapshot });
        }
        assert!(matches!(self.phase(number), Phase::Running));
    }

    fn handle(&mut self, event: Event) -> Vec<Output> {
        self.control.handle(event, self.now);
        self.check()
    }

    fn core(&mut self, number: u8, event: CoreEvent) -> Vec<Output> {
        self.handle(Event::Core { namespace: job(number), event })
    }

    fn check(&mut self) -> Vec<Output> {
        self.control.check_time(self.now, &self.streams);
        self.control.take_outputs()
    }

    /// Lets time pass, to just before a moment that is this far away, when nothing happens, and to it.
    fn reach(&mut self, wait: Duration) -> Vec<Output> {
        let until = self.now + wait;
        self.now = until - Duration::from_millis(1);
        let early = self.check();
        assert!(early.is_empty(), "too early: {early:?}");
        self.now = until;
        self.check()
    }

    fn stop(&mut self, when: StopWhen) -> Vec<Output> {
        self.handle(Event::Stop { namespace: job(1), reason: "enough".into(), when })
    }

    fn fault(&mut self, cause: FaultCause) -> Vec<Output> {
        let message = "rank 1 was lost".into();
        self.core(1, CoreEvent::Faulted { route: ROUTES[0], culprit: RANKS[1], message, cause })
    }

    /// Every neighbour leaves by every port.
    fn leave(&mut self) -> Vec<Output> {
        let ports = ROUTES.into_iter().flat_map(|route| [(route, 0), (route, 1)]);
        ports.flat_map(|(route, port)| self.core(1, CoreEvent::Left { route, port })).collect()
    }

    fn close(&mut self, number: u8) -> Vec<Output> {
        let closed = || CoreEvent::Closed { counters: JobCounters::default(), left_out: Vec::new() };
        ROUTES.iter().flat_map(|_| self.core(number, closed())).collect()
    }

    fn phase(&self, number: u8) -> &Phase {
        &self.control.jobs[&job(number)].phase
    }

    fn is_here(&self, number: u8) -> bool {
        self.control.jobs.contains_key(&job(number))
    }
}

/// What the cores are to send as the reason why a job ends.
fn failures(outputs: &[Output]) -> Vec<&Failure> {
    let failures = outputs.iter().filter_map(|output| match output {
        Output::End { failure, .. } => failure.as_ref(),
        _ => None,
    });
    failures.collect()
}

/// The one reason with which all cores end a job.
fn failure(outputs: &[Output]) -> &str {
    let failures = failures(outputs);
    assert_eq!(failures.len(), ROUTES.len(), "every core of the job ends it: {outputs:?}");
    assert!(failures.windows(2).all(|pair| pair[0] == pair[1]));
    &failures[0].message
}

/// The one report of a job's end.
fn end(outputs: &[Output]) -> &JobEnd {
    let ends = outputs.iter().filter_map(|output| match output {
        Output::ReportEnd(report) => Some(&report.end),
        _ => None,
    });
    let ends: Vec<&JobEnd> = ends.collect();
    assert_eq!(ends.len(), 1, "{outputs:?}");
    ends[0]
}

/// The reports to the manager.
fn reports(outputs: &[Output]) -> Vec<&HubEvent> {
    let reports = outputs.iter().filter_map(|output| match output {
        Output::Report(event) => Some(event),
        _ => None,
    });
    reports.collect()
}

/// Whether there is an output like this.
macro_rules! has {
    ($outputs:expr, $pattern:pat $(if $guard:expr)?) => {
        $outputs.iter().any(|output| matches!(output, $pattern $(if $guard)?))
    };
}
use has;

#[test]
fn a_hub_that_serves_looks_at_its_deadlines_a_few_times_a_second() {
    let hub = Hub::new();
    assert_eq!(hub.control.until_next_check(hub.now), TICK);
    assert!(!hub.control.is_done());
}
