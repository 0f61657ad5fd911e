//! One run: processes, their network, and what fails.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::placement::RouteId;
use paramhub_core::stream_admission::StreamPlace;

use crate::agenda::Agenda;
use crate::hub::Hub;
use crate::job::JobPlan;
use crate::ledger::Ledger;
use crate::message::Message;
use crate::network::{Arrival, Network, Process, StreamId};
use crate::random::Random;
use crate::scenario::{Fault, Scenario};
use crate::worker::{self, Worker};

/// The time by which every run must be over, after its last fault and all its computing.
const BOUND: Duration = Duration::from_secs(120);

/// Something that happens at a time.
#[derive(Debug)]
pub(crate) enum Event {
    /// Something arrives at an end of a stream, unless it is stopped on the way.
    Arrive { stream: StreamId, side: usize },
    /// An end of a stream learns of its path.
    Learn { stream: StreamId, side: usize, arrival: Arrival },
    /// A time comes for which a process has waited.
    Wake(Process, Wake),
    /// The fault of this number happens.
    Fault(usize),
    /// The fault of this number is over.
    Heal(usize),
}

/// What a process has waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wake {
    /// The work of a few times a second.
    Tick,
    /// A worker's program goes on.
    Program,
    /// A worker dials again for this lane.
    Redial(usize),
    /// A worker has dialled long enough.
    DialTimeout { lane: usize, stream: StreamId },
    /// A hub's core has allocated a route.
    Opened(RouteId),
    /// A hub's acceptor passes a stream on to its core.
    Adopt { stream: StreamId, place: StreamPlace },
}

/// A fault of the program itself, to show that the simulator finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plant {
    /// A contribution that came before is added again.
    RepeatCounted,
    /// An older stream displaces a newer one.
    StaleStream,
    /// A second stream of a rank is admitted beside the first.
    RankTwice,
    /// A hub does not know that a stream was replaced.
    NoResume,
}

/// What a process may use while it handles an event.
pub(crate) struct Context<'a> {
    pub(crate) network: &'a mut Network,
    pub(crate) agenda: &'a mut Agenda<Event>,
    pub(crate) ledger: &'a mut Ledger,
    pub(crate) random: &'a mut Random,
    pub(crate) compute: Range<Duration>,
    pub(crate) plant: Option<Plant>,
    /// The moment from which times count.
    pub(crate) begun: Instant,
    pub(crate) is_traced: bool,
}

impl Context<'_> {
    pub(crate) fn instant(&self) -> Instant {
        self.begun + self.agenda.now()
    }

    /// Prints something that happens, if the run is traced.
    pub(crate) fn trace(&self, what: impl FnOnce() -> String) {
        if self.is_traced {
            println!("{:?} {}", self.agenda.now(), what());
        }
    }

    pub(crate) fn wake_in(&mut self, process: Process, wait: Duration, wake: Wake) {
        self.agenda.add(self.agenda.now() + wait, Event::Wake(process, wake));
    }

    pub(crate) fn send(&mut self, stream: StreamId, from: Process, message: Message) {
        self.network.send(stream, from, message, self.agenda);
    }

    pub(crate) fn close(&mut self, stream: StreamId, by: Process) {
        self.trace(|| format!("{by:?} closes {stream:?}"));
        self.network.close(stream, by, self.agenda);
    }
}

/// How a run has gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Whether every worker has done all steps.
    pub has_finished: bool,
    /// Steps that all workers together have done.
    pub steps: u64,
    /// Streams that were broken by faults.
    pub broken: usize,
    /// The virtual time that it took.
    pub took: Duration,
}

struct World<'a> {
    scenario: &'a Scenario,
    plan: Arc<JobPlan>,
    network: Network,
    agenda: Agenda<Event>,
    ledger: Ledger,
    random: Random,
    begun: Instant,
    workers: BTreeMap<u32, Worker>,
    hubs: BTreeMap<u16, Hub>,
    killed: BTreeSet<Process>,
    /// The events that wait for processes which stand still.
    paused: BTreeMap<Process, (usize, Vec<Event>)>,
    broken: usize,
    /// When the last worker had opened all its streams.
    connected: Option<Duration>,
}

/// Runs a scenario.
///
/// # Errors
/// What has happened that must not happen.
pub fn run(scenario: &Scenario) -> Result<Summary, String> {
    let mut random = Random::new(scenario.seed ^ 0x5eed);
    let mut world = World {
        scenario,
        plan: Arc::new(JobPlan::new(scenario)),
        network: Network::new(scenario.delay.clone(), scenario.late_hellos, Random::new(random.number())),
        agenda: Agenda::default(),
        ledger: Ledger::new(scenario.workers),
        random,
        begun: Instant::now(),
        workers: BTreeMap::new(),
        hubs: BTreeMap::new(),
        killed: BTreeSet::new(),
        paused: BTreeMap::new(),
        broken: 0,
        connected: None,
    };
    world.run()
}

impl World<'_> {
    fn run(&mut self) -> Result<Summary, String> {
        let last = self.scenario.faults.iter().map(|&(at, fault)| at + fault.length()).max();
        let computing = self.scenario.compute.end * self.scenario.steps;
        let bound =
            last.unwrap_or_default() + computing + BOUND + self.scenario.delay.end * 4 * self.scenario.steps;
        for (number, &(at, _)) in self.scenario.faults.iter().enumerate() {
            self.agenda.add(at, Event::Fault(number));
        }
        for number in 0..self.scenario.hubs {
            let plan = self.plan.clone();
            let hub = Hub::new(number, &plan, &mut self.context());
            self.hubs.insert(number, hub);
        }
        while let Some(event) = self.agenda.take() {
            if self.workers.is_empty() && self.hubs.values().all(Hub::is_ready) {
                // The connection manager lets the workers begin when every hub is ready.
                for rank in 0..self.scenario.workers {
                    let plan = self.plan.clone();
                    let worker = Worker::new(rank, 0, &plan, &mut self.context());
                    self.workers.insert(rank, worker);
                }
            }
            self.happen(event);
            if self.connected.is_none()
                && self.workers.len() == self.scenario.workers as usize
                && self.workers.values().all(Worker::is_connected)
            {
                self.connected = Some(self.agenda.now());
            }
            if let Some(violation) = self.ledger.violation() {
                return Err(format!("at {:?}: {violation}", self.agenda.now()));
            }
            if self.is_over() {
                return self.summary();
            }
            if self.agenda.now() > bound {
                return Err(self.describe_stuck());
            }
        }
        Err("nothing is left to happen".into())
    }

    fn context(&mut self) -> Context<'_> {
        Context {
            network: &mut self.network,
            agenda: &mut self.agenda,
            ledger: &mut self.ledger,
            random: &mut self.random,
            compute: self.scenario.compute.clone(),
            plant: self.scenario.plant,
            begun: self.begun,
            is_traced: self.scenario.is_traced,
        }
    }

    fn happen(&mut self, event: Event) {
        let process = match &event {
            &Event::Arrive { stream, side, .. } | &Event::Learn { stream, side, .. } => {
                self.network.listener(stream, side)
            }
            Event::Wake(process, _) => Some(*process),
            Event::Fault(_) | Event::Heal(_) => None,
        };
        if let Some(process) = process {
            if self.killed.contains(&process) {
                return;
            }
            if let Some((_, waiting)) = self.paused.get_mut(&process) {
                return waiting.push(event);
            }
        }
        match event {
            Event::Arrive { stream, side } => {
                if let Some((process, arrival)) = self.network.arrive(stream, side) {
                    self.arrived(process, stream, arrival);
                }
            }
            Event::Learn { stream, arrival, .. } => {
                if let Some(process) = process {
                    self.arrived(process, stream, arrival);
                }
            }
            Event::Wake(process, wake) => self.with(process, |process, context| match process {
                Either::Worker(worker) => worker.wake(wake, context),
                Either::Hub(hub) => hub.wake(wake, context),
            }),
            Event::Fault(number) => self.fail(number),
            Event::Heal(number) => self.heal(number),
        }
    }

    fn arrived(&mut self, process: Process, stream: StreamId, arrival: Arrival) {
        if self.scenario.is_traced {
            println!("{:?} {process:?} {stream:?} {arrival:?}", self.agenda.now());
        }
        self.with(process, |process, context| match process {
            Either::Worker(worker) => worker.arrived(stream, arrival, context),
            Either::Hub(hub) => hub.arrived(stream, arrival, context),
        });
    }

    fn with(&mut self, process: Process, act: impl FnOnce(Either<'_>, &mut Context<'_>)) {
        match process {
            Process::Worker(rank) => {
                let Some(mut worker) = self.workers.remove(&rank) else { return };
                act(Either::Worker(&mut worker), &mut self.context());
                self.workers.insert(rank, worker);
            }
            // It only waits.
            Process::Twin(_) => {}
            Process::Hub(number) => {
                let Some(mut hub) = self.hubs.remove(&number) else { return };
                act(Either::Hub(&mut hub), &mut self.context());
                self.hubs.insert(number, hub);
            }
        }
    }

    fn fail(&mut self, number: usize) {
        let fault = self.scenario.faults[number].1;
        if self.scenario.is_traced {
            println!("{:?} {fault:?}", self.agenda.now());
        }
        match fault {
            Fault::Break(a, b) => self.broken += self.network.break_streams([a, b], false, &mut self.agenda),
            Fault::Silence(a, b) => self.broken += self.network.break_streams([a, b], true, &mut self.agenda),
            Fault::Block(from, to, _) => self.network.block(from, to, true, &mut self.agenda),
            Fault::Pause(process, _) => {
                self.paused.entry(process).or_default().0 += 1;
            }
            Fault::Kill(process) => {
                if self.killed.insert(process) {
                    self.network.kill(process, &mut self.agenda);
                }
            }
            Fault::Twin(rank) => {
                let plan = self.plan.clone();
                worker::dial_as_twin(rank, &plan, &mut self.context());
            }
        }
        let length = fault.length();
        if !length.is_zero() {
            self.agenda.add(self.agenda.now() + length, Event::Heal(number));
        }
    }

    fn heal(&mut self, number: usize) {
        match self.scenario.faults[number].1 {
            Fault::Block(from, to, _) => {
                // Another fault may block the same direction for longer.
                let is_other = |(other, &(at, fault)): (usize, &(Duration, Fault))| {
                    other != number
                        && matches!(fault, Fault::Block(a, b, length) if (a, b) == (from, to)
                            && at <= self.agenda.now() && at + length > self.agenda.now())
                };
                if !self.scenario.faults.iter().enumerate().any(is_other) {
                    self.network.block(from, to, false, &mut self.agenda);
                }
            }
            Fault::Pause(process, _) => {
                let Some((pauses, _)) = self.paused.get_mut(&process) else { return };
                *pauses -= 1;
                if *pauses == 0 {
                    let (_, waiting) = self.paused.remove(&process).expect("it was just here");
                    waiting.into_iter().for_each(|event| self.happen(event));
                }
            }
            Fault::Break(..) | Fault::Silence(..) | Fault::Kill(_) | Fault::Twin(_) => {}
        }
    }

    fn is_over(&self) -> bool {
        let is_dead = |process| self.killed.contains(&process);
        let are_workers_over = self.workers.len() == self.scenario.workers as usize
            && (self.workers.iter())
                .all(|(&rank, worker)| worker.outcome().is_some() || is_dead(Process::Worker(rank)));
        are_workers_over
            && self.hubs.iter().all(|(&number, hub)| hub.is_over() || is_dead(Process::Hub(number)))
            || self.workers.is_empty() && self.hubs.keys().any(|&number| is_dead(Process::Hub(number)))
    }

    fn summary(&self) -> Result<Summary, String> {
        let living =
            || self.workers.iter().filter(|(rank, _)| !self.killed.contains(&Process::Worker(**rank)));
        let has_finished =
            self.killed.is_empty() && self.workers.values().all(|worker| worker.outcome() == Some(&Ok(())));
        for (rank, worker) in living() {
            match worker.outcome() {
                Some(Ok(())) if worker.step() < self.scenario.steps => {
                    return Err(format!("rank {rank} has ended well after {} steps", worker.step()));
                }
                Some(Err(error)) if self.scenario.must_finish(self.connected) => {
                    return Err(format!("rank {rank} has failed although nobody died: {error}"));
                }
                Some(Err(error)) if !names_somebody(error) => {
                    return Err(format!("rank {rank} has failed, and this names nobody: {error}"));
                }
                _ => {}
            }
        }
        for (number, hub) in
            self.hubs.iter().filter(|(number, _)| !self.killed.contains(&Process::Hub(**number)))
        {
            match hub.end() {
                Some(end) if !end.finished && self.scenario.must_finish(self.connected) => {
                    return Err(format!(
                        "hub {number} reports a failure although nobody died: {}",
                        end.reason
                    ));
                }
                Some(end) if !end.finished && !names_somebody(&end.reason) => {
                    return Err(format!("hub {number} reports a failure that names nobody: {}", end.reason));
                }
                _ => {}
            }
        }
        let steps = self.workers.values().map(|worker| u64::from(worker.step())).sum();
        Ok(Summary { has_finished, steps, broken: self.broken, took: self.agenda.now() })
    }

    fn describe_stuck(&self) -> String {
        let workers: Vec<String> = self
            .workers
            .iter()
            .map(|(rank, worker)| format!("rank {rank}: step {}, {:?}", worker.step(), worker.outcome()))
            .collect();
        let hubs: Vec<String> =
            self.hubs.iter().map(|(number, hub)| format!("hub {number}: over {}", hub.is_over())).collect();
        format!("the run is stuck: {}; {}", workers.join(", "), hubs.join(", "))
    }
}

enum Either<'a> {
    Worker(&'a mut Worker),
    Hub(&'a mut Hub),
}

/// Whether a failure names the rank or the hub at fault.
fn names_somebody(failure: &str) -> bool {
    failure.contains("rank ") || failure.contains("hub ") || failure.contains("Hub(")
}
