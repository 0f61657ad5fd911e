//! The state machine of a hub's jobs under random interleavings of jobs that open, connect, lose ranks and
//! interfaces, leave and are stopped, with a manager that comes and goes and a hub that shuts down. One thread,
//! virtual time: a failure prints its seed and the shortest sequence of actions that leads to it.

mod action;
mod checks;
mod job;

use std::collections::BTreeMap;
use std::time::Duration;

use paramhub_core::auth::Namespace;
use paramhub_core::composition::Neighbour;
use paramhub_core::exchange::Awaited;
use paramhub_core::job_control::{
    AdmittedStreams, Beginning, CUT_OFF, CoreEvent, Event, FaultCause, HubTerms, JobControl, JobLimits,
    LAST_CHECKPOINT, LAST_CHECKPOINT_TIMEOUT, LateNeighbour, OverdueEvent, OverdueNeighbours, SHUTDOWN,
};
use paramhub_core::placement::RouteId;
use paramhub_core::service::{CauseKind, JobCounters, StopWhen};
use proptest::prelude::*;

use action::{Action, action};
use job::{Route, SimulatedJob, Writer};

const INTERFACES: u16 = 2;
const RENDEZVOUS: Duration = Duration::from_secs(20);
/// Longer than any wait of a job that has a bound.
const LONG: Duration = Duration::from_secs(60).saturating_add(LAST_CHECKPOINT_TIMEOUT);
/// Longer than a hub takes to shut down, whatever its parts do.
const STOPPED: Duration = Duration::from_secs(1).saturating_add(LAST_CHECKPOINT).saturating_add(SHUTDOWN);

struct Simulation {
    control: JobControl,
    now: Duration,
    jobs: BTreeMap<Namespace, SimulatedJob>,
    /// The interfaces that are down, and since when.
    interfaces_down: BTreeMap<u16, Duration>,
    manager_lost: Option<Duration>,
    /// Since when the hub shuts down.
    stopping: Option<Duration>,
    cores_stopped: bool,
    /// Makes every reason different.
    reasons: u32,
}

/// The streams of all jobs.
struct Streams<'a>(&'a BTreeMap<Namespace, SimulatedJob>);

impl AdmittedStreams for Streams<'_> {
    fn missing(&self, namespace: Namespace) -> Vec<Neighbour> {
        self.0[&namespace].missing()
    }

    fn through(&self, namespace: Namespace, interface: u16) -> Vec<(RouteId, u32, Neighbour)> {
        let job = &self.0[&namespace];
        let through = job.streams.iter().filter(|(_, by)| **by == interface && !job.is_refusing);
        through.map(|(&(route, port), _)| (route, port, Neighbour::Worker(port))).collect()
    }
}

impl Simulation {
    fn new() -> Simulation {
        let hub = HubTerms {
            interfaces: usize::from(INTERFACES),
            interface_names: vec!["eth0".into(), "eth1".into()],
            memory_bytes: 3,
            job_limits: JobLimits::default(),
            descriptors_max: 1024,
        };
        Simulation {
            control: JobControl::new(hub),
            now: Duration::from_secs(100),
            jobs: BTreeMap::new(),
            interfaces_down: BTreeMap::new(),
            manager_lost: None,
            stopping: None,
            cores_stopped: false,
            reasons: 0,
        }
    }

    fn act(&mut self, action: &Action) {
        match *action {
            Action::Plan { routes, continues, writes, resumes } => {
                self.plan(routes, continues, writes, resumes);
            }
            Action::Loaded { job, well } => self.with(job, |all, job| all.loaded(job, well)),
            Action::Opened { job, fits } => self.with(job, |all, job| all.opened(job, fits)),
            Action::Connect { job, all: at_once } => self.with(job, |all, job| all.connect(job, at_once)),
            Action::Leave { job, all: at_once } => self.with(job, |all, job| all.leave(job, at_once)),
            Action::Fault { job, cause } => self.with(job, |all, job| all.fault(job, cause)),
            Action::Panic { job } => self.with(job, |all, job| {
                let reason = all.reason("panic");
                all.expect_end(job, &reason, CauseKind::Known);
                all.core(job, CoreEvent::CannotGoOn { reason });
            }),
            Action::Expire { job } => self.with(job, |all, job| {
                all.expect_end(job, "made no progress", CauseKind::Known);
                all.core(job, waits(Duration::from_secs(90), true));
            }),
            Action::Notice { job } => self.with(job, Simulation::notice),
            Action::Link { job } => self.with(job, |all, job| all.handle(Event::Link { namespace: job })),
            Action::CannotLink { job } => self.with(job, |all, namespace| {
                let reason = all.command_reason(namespace, "cannot link", CauseKind::Known);
                all.handle(Event::CannotLink { namespace, reason });
            }),
            Action::LoseSites { job } => self.with(job, |all, namespace| {
                let reason = all.command_reason(namespace, "sites lost", CauseKind::PeerLost);
                all.handle(Event::SitesUnreachable { namespace, reason });
            }),
            Action::Stop { job, when } => self.with(job, |all, job| all.stop(job, when)),
            Action::Answer { job } => self.with(job, Simulation::answer),
            Action::Close { job } => self.with(job, Simulation::close),
            Action::Interface { number, down } => self.interface(number, down),
            Action::Resume { job } => self.with(job, Simulation::resume),
            Action::Manager { is_lost } => {
                self.manager_lost = is_lost.then(|| self.manager_lost.unwrap_or(self.now));
            }
            Action::Wait { ms } => self.wait(Duration::from_millis(ms)),
            Action::ShutDown => {
                self.stopping.get_or_insert(self.now);
                self.handle(Event::ShutDown);
            }
        }
    }

    /// Does something with one of the jobs that there have been.
    fn with(&mut self, job: usize, act: impl FnOnce(&mut Simulation, Namespace)) {
        if let Some(&namespace) = self.jobs.keys().nth(job % self.jobs.len().max(1)) {
            act(self, namespace);
        }
    }

    fn plan(&mut self, routes: u16, continues: bool, writes: bool, resumes: bool) {
        let namespace = Namespace([self.jobs.len() as u8 + 1; 16]);
        assert_eq!(self.control.wants(namespace, 1, 0), self.stopping.is_none());
        let job = SimulatedJob::new(namespace, routes, continues, writes, resumes);
        let terms = Box::new(job.terms.clone());
        if self.stopping.is_none() {
            self.jobs.insert(namespace, job);
        }
        self.handle(Event::Planned(terms));
    }

    fn loaded(&mut self, namespace: Namespace, well: bool) {
        if !std::mem::take(&mut self.job(namespace).is_loading) {
            return;
        }
        let result = if well { Ok(Beginning::Checkpoint(7)) } else { Err("no such file".to_string()) };
        self.handle(Event::Loaded { namespace, result });
    }

    fn opened(&mut self, namespace: Namespace, fits: bool) {
        let job = self.job(namespace);
        let Some(route) = job.routes.iter_mut().find(|route| **route == Route::Opening) else { return };
        *route = if fits { Route::Open } else { Route::Gone };
        let has_snapshot = job.terms.writes_checkpoints;
        self.core(namespace, CoreEvent::Opened { missing_bytes: (!fits).then_some(1), has_snapshot });
    }

    fn connect(&mut self, namespace: Namespace, all: bool) {
        let down = &self.interfaces_down;
        let working: Vec<u16> = (0..INTERFACES).filter(|number| !down.contains_key(number)).collect();
        let job = self.jobs.get_mut(&namespace).unwrap();
        if job.admitted.is_some() && !job.is_refusing && !working.is_empty() {
            let ports: Vec<_> = job.ports().filter(|port| !job.streams.contains_key(port)).collect();
            for port in ports.into_iter().take(if all { usize::MAX } else { 1 }) {
                job.streams.insert(port, working[usize::from(port.0) % working.len()]);
            }
        }
        self.check_time();
    }

    fn leave(&mut self, namespace: Namespace, all: bool) {
        let job = self.job(namespace);
        let present: Vec<_> = job.streams.keys().copied().filter(|port| !job.left.contains(port)).collect();
        for (route, port) in present.into_iter().take(if all { usize::MAX } else { 1 }) {
            self.job(namespace).left.insert((route, port));
            self.core(namespace, CoreEvent::Left { route, port });
        }
    }

    fn fault(&mut self, namespace: Namespace, cause: Option<CauseKind>) {
        let message = self.reason("fault");
        let is_cut_off = self.manager_lost.is_some_and(|since| self.now - since >= CUT_OFF);
        let (cause, expected) = match cause {
            Some(kind) => (FaultCause::Kind(kind), kind),
            None if is_cut_off => (FaultCause::Silence, CauseKind::Known),
            None => (FaultCause::Silence, CauseKind::PeerLost),
        };
        self.expect_end(namespace, &message, expected);
        self.core(namespace, CoreEvent::Faulted { route: 0, culprit: Neighbour::Worker(1), message, cause });
    }

    fn notice(&mut self, namespace: Namespace) {
        let neighbour = Neighbour::Worker(1);
        self.core(namespace, CoreEvent::Silence { neighbour, seconds: Some(3.0) });
        self.core(namespace, CoreEvent::Silence { neighbour, seconds: None });
        self.core(namespace, CoreEvent::Moved { route: 0, neighbour, by: 1 });
        self.core(
            namespace,
            CoreEvent::Late(LateNeighbour { neighbour: Neighbour::Worker(1), steps: 3, of: 9 }),
        );
        self.core(namespace, waits(Duration::from_secs(3), false));
        let event = OverdueEvent::Over { waited: Duration::from_secs(4) };
        self.core(namespace, CoreEvent::Awaited { route: 0, event });
    }

    fn stop(&mut self, namespace: Namespace, when: StopWhen) {
        let reason = self.reason("stop");
        let (now, serves) = (self.now, self.stopping.is_none());
        let job = self.job(namespace);
        let is_finishing = job.have_all_left();
        if serves && job.is_living() {
            match when {
                StopWhen::WorkersEnding => drop(job.announced.get_or_insert(reason.clone())),
                StopWhen::WorkersEnded if !is_finishing => {
                    job.concluding.get_or_insert((now, reason.clone()));
                }
                StopWhen::Now if !is_finishing => self.expect_end(namespace, &reason, CauseKind::Hearsay),
                StopWhen::WorkersEnded | StopWhen::Now => {}
            }
        }
        self.handle(Event::Stop { namespace, reason, when });
    }

    /// A checkpoint writer answers the oldest request for a last checkpoint.
    fn answer(&mut self, namespace: Namespace) {
        let job = self.job(namespace);
        let Some(goes_on) = job.last_asked.pop_front() else { return };
        job.last_taken |= !goes_on;
        self.handle(match goes_on {
            true => Event::CheckpointKept { namespace },
            false => Event::LastCheckpointTaken { namespace },
        });
    }

    fn close(&mut self, namespace: Namespace) {
        let job = self.job(namespace);
        let holds = |route: &&mut Route| matches!(**route, Route::Open | Route::Opening);
        let Some(route) = job.routes.iter_mut().find(holds).filter(|_| job.is_freeing) else { return };
        *route = Route::Gone;
        let counters = JobCounters { updates: 1, ..JobCounters::default() };
        self.core(namespace, CoreEvent::Closed { counters, left_out: Vec::new() });
    }

    fn interface(&mut self, number: u16, down: bool) {
        // A hub that shuts down looks at its interfaces no longer.
        if self.stopping.is_none() {
            match down {
                true => drop(self.interfaces_down.insert(number, self.now)),
                false => drop(self.interfaces_down.remove(&number)),
            }
        }
        let down = down.then(|| format!("interface {number} is down"));
        self.handle(Event::Interfaces { numbers: number..number + 1, down });
    }

    fn resume(&mut self, namespace: Namespace) {
        let down = &self.interfaces_down;
        let Some(working) = (0..INTERFACES).find(|number| !down.contains_key(number)) else { return };
        let job = self.jobs.get_mut(&namespace).unwrap();
        if job.terms.continues && !job.is_refusing {
            job.streams.values_mut().for_each(|by| *by = working);
            self.core(namespace, CoreEvent::Moved { route: 0, neighbour: Neighbour::Worker(1), by: working });
        }
    }

    fn core(&mut self, namespace: Namespace, event: CoreEvent) {
        self.handle(Event::Core { namespace, event });
    }

    fn handle(&mut self, event: Event) {
        self.control.note_manager(self.manager_lost);
        self.control.handle(event, self.now);
        self.carry_out();
        self.check_time();
    }

    fn check_time(&mut self) {
        self.control.check_time(self.now, &Streams(&self.jobs));
        self.carry_out();
        self.check_deadlines();
    }

    fn wait(&mut self, time: Duration) {
        let until = self.now + time;
        // The hub's thread has ended when all is done, and looks at no time.
        while self.now < until && !self.control.is_done() {
            let wait = self.control.until_next_check(self.now).max(Duration::from_millis(1));
            self.now += wait.min(until - self.now);
            self.check_time();
        }
        self.now = until;
    }

    /// Lets the threads and cores of the hub answer all that they were asked.
    fn answer_all(&mut self) {
        let jobs: Vec<Namespace> = self.jobs.keys().copied().collect();
        for namespace in jobs {
            self.loaded(namespace, true);
            for _ in 0..2 {
                self.opened(namespace, true);
                self.answer(namespace);
                self.close(namespace);
            }
        }
    }

    fn job(&mut self, namespace: Namespace) -> &mut SimulatedJob {
        self.jobs.get_mut(&namespace).unwrap()
    }

    fn reason(&mut self, what: &str) -> String {
        self.reasons += 1;
        format!("{what} number {}", self.reasons)
    }

    /// The reason of an event that ends a job, unless the hub shuts down: only what cores report counts then.
    fn command_reason(&mut self, namespace: Namespace, what: &str, cause: CauseKind) -> String {
        let reason = self.reason(what);
        if self.stopping.is_none() {
            self.expect_end(namespace, &reason, cause);
        }
        reason
    }
}

/// A rank keeps the others waiting.
fn waits(waited: Duration, has_expired: bool) -> CoreEvent {
    let neighbours = vec![Neighbour::Worker(1)];
    let awaited = Awaited::Contribution(7);
    let overdue = OverdueNeighbours { neighbours, awaited, key: "w".into(), waited, has_expired };
    CoreEvent::Awaited { route: 0, event: OverdueEvent::Late(overdue) }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn every_job_of_a_hub_ends_once_in_every_order_of_events(
        actions in prop::collection::vec(action(), 1..150),
        answers in any::<bool>(),
    ) {
        let mut simulation = Simulation::new();
        for action in &actions {
            simulation.act(action);
        }
        if answers {
            simulation.answer_all();
        }
        simulation.wait(LONG);
        simulation.answer_all();
        simulation.act(&Action::ShutDown);
        for _ in 0..4 {
            if answers {
                simulation.answer_all();
            }
        }
        simulation.wait(STOPPED);
        prop_assert!(simulation.control.is_done() && simulation.cores_stopped);
        for job in simulation.jobs.values().filter(|_| answers && actions.iter().all(is_no_shutdown)) {
            prop_assert!(job.is_over, "{} has no end", job.terms.name);
        }
    }
}

fn is_no_shutdown(action: &Action) -> bool {
    !matches!(action, Action::ShutDown)
}
