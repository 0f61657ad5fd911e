//! One run: processes, their network, and what fails.

mod faults;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::placement::RouteId;
use paramhub_core::service::{JobState, JobStatus};
use paramhub_core::standbys::Share;
use paramhub_core::stream_admission::StreamPlace;

use crate::agenda::Agenda;
use crate::call::Line;
use crate::hub::Hub;
use crate::job::JobPlan;
use crate::ledger::Ledger;
use crate::manager::{Manager, ManagerWake};
use crate::message::Message;
use crate::network::{Arrival, Network, Process, StreamId};
pub use crate::plant::Plant;
use crate::random::Random;
use crate::scenario::Scenario;
use crate::verdict::{Ends, WorkerEnd};
use crate::worker::Worker;

/// The time by which every run must be over, after its last fault and all its computing.
const BOUND: Duration = Duration::from_secs(300);
/// The number of steps before the end of the job at which a hub is killed so that it becomes a standby when workers leave.
const LAST_STEPS: u32 = 2;

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
    /// A worker begins.
    Begin,
    /// A call to the manager has waited long enough; the number tells for what.
    Call(Line, u64),
    /// A hub calls its manager after a pause.
    Resume(Line),
    /// Something of the manager, since it was started for the time of this number.
    Manager { start: u32, wake: ManagerWake },
    /// A worker's program goes on.
    Program,
    /// A worker dials again for this lane.
    Redial(usize),
    /// A worker has dialled long enough.
    DialTimeout { lane: usize, stream: StreamId },
    /// A hub's core has allocated a route, after the hub was asked to allocate for the time of this number.
    Opened { allocation: u32, route: RouteId },
    /// A core has freed a route with which its hub has nothing more to do.
    Freed { allocation: u32 },
    /// A hub's core takes the next chunk of a route back to an earlier step.
    GoBack { allocation: u32, route: RouteId },
    /// A hub has waited long enough for another stream in place of one that was cut.
    CutOver { stream: StreamId },
    /// A hub dials again for this link.
    DialLink { allocation: u32, link: usize },
    /// A hub has dialled long enough.
    LinkTimeout { allocation: u32, link: usize, stream: StreamId },
    /// A hub's acceptor passes a stream on to its core, or one that the hub has opened is passed on, which may lead to the
    /// standby at a position of the job.
    Adopt { stream: StreamId, place: StreamPlace, standby: Option<u16> },
}

/// What a process may use while it handles an event.
pub(crate) struct Context<'a> {
    pub(crate) network: &'a mut Network,
    pub(crate) agenda: &'a mut Agenda<Event>,
    pub(crate) ledger: &'a mut Ledger,
    pub(crate) random: &'a mut Random,
    pub(crate) compute: Range<Duration>,
    pub(crate) starting: Range<Duration>,
    pub(crate) saving: Range<Duration>,
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
    /// Whether the job has finished.
    pub has_finished: bool,
    /// Whether it had to.
    pub had_to_finish: bool,
    /// Whether it had to keep all its workers.
    pub had_to_keep_all: bool,
    /// Steps that all workers together have done.
    pub steps: u64,
    /// Streams that were broken by faults.
    pub broken: usize,
    /// How often the manager was started again.
    pub restarts: u32,
    /// How often all ranks have gone back to an earlier step.
    pub rewinds: usize,
    /// How often they have begun anew instead.
    pub begun_anew: usize,
    /// How often a hub that has joined the running job had all chunks of a share as its standby.
    pub new_standbys: usize,
    /// How often a hub that served a share became the standby of a further one.
    pub further_standbys: usize,
    /// How many such hubs have taken over.
    pub took_over_later: usize,
    /// How often a hub was killed.
    pub hub_losses: usize,
    /// How often the job has left a hub that was drained.
    pub left_drained: usize,
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
    workers: BTreeMap<Process, Worker>,
    hubs: BTreeMap<u16, Hub>,
    manager: Option<Manager>,
    /// How many crashes keep the manager away.
    crashes: usize,
    restarts: u32,
    /// How many faults keep all workers from being started again.
    restarting: usize,
    /// The number of workers that were started together last.
    current_workers: u32,
    killed: BTreeSet<Process>,
    /// How often a hub was killed.
    hub_losses: usize,
    /// How often an operator has drained a hub.
    drains: usize,
    /// How many hubs are drained at present.
    draining: usize,
    /// Whether a hub was killed, after another, while not all shares had two hubs.
    has_risked_chunks: bool,
    /// The events that wait for processes which stand still.
    paused: BTreeMap<Process, (usize, Vec<Event>)>,
    broken: usize,
    /// When the last worker and the last hub had opened all streams.
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
        network: Network::new(scenario, Random::new(random.number())),
        agenda: Agenda::default(),
        ledger: Ledger::new(scenario),
        random,
        begun: Instant::now(),
        workers: BTreeMap::new(),
        hubs: BTreeMap::new(),
        manager: None,
        crashes: 0,
        restarts: 0,
        restarting: 0,
        current_workers: match scenario.may_change_workers() {
            true => scenario.start_workers.unwrap_or(scenario.workers),
            false => scenario.workers,
        },
        killed: BTreeSet::new(),
        hub_losses: 0,
        drains: 0,
        draining: 0,
        has_risked_chunks: false,
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
        let mut at_end = self.scenario.fault_at_end();
        for (number, &(at, _)) in self.scenario.faults.iter().enumerate() {
            if at_end != Some(number) {
                self.agenda.add(at, Event::Fault(number));
            }
        }
        let plan = self.plan.clone();
        self.manager = Some(Manager::new(&plan, &mut self.context()));
        for number in 0..self.scenario.hubs + self.scenario.spare_hubs {
            self.start_hub(number);
        }
        for rank in 0..self.current_workers {
            self.start_worker(rank);
        }
        while let Some(event) = self.agenda.take() {
            self.happen(event);
            if self.connected.is_none()
                && self.workers.values().all(Worker::is_connected)
                && self.hubs.values().all(Hub::is_linked)
            {
                self.connected = Some(self.agenda.now());
            }
            self.start_again_those_who_left();
            let kills_hub = at_end.is_some_and(|number| self.scenario.faults[number].1.kills_hub());
            let (before, most) = match kills_hub {
                true => (LAST_STEPS, self.scenario.compute.end * LAST_STEPS),
                false => (0, self.scenario.delay.end * 4),
            };
            let has_done_all = |worker: &Worker| worker.step() + before >= self.scenario.steps;
            if let Some(number) = at_end.filter(|_| self.workers.values().any(has_done_all)) {
                at_end = None;
                let wait = self.random.time(&(Duration::ZERO..most));
                self.agenda.add(self.agenda.now() + wait, Event::Fault(number));
            }
            if let Some(violation) = self.ledger.violation() {
                return Err(format!("at {:?}: {violation}", self.agenda.now()));
            }
            if let Some(recorded) = self.over() {
                return self.summary(recorded);
            }
            if self.agenda.now() > bound {
                return Err(self.describe_stuck());
            }
        }
        Err("nothing is left to happen".into())
    }

    /// All ranks go back to an earlier step: a launcher starts those again that had done their part.
    fn start_again_those_who_left(&mut self) {
        let rewound_in = self.ledger.newest_rewind();
        if rewound_in == 0
            || self.restarting > 0
            || self.manager.as_ref().is_some_and(|manager| manager.settled().is_some())
        {
            return;
        }
        let has_left = |rank: &u32| {
            let newest = self.newest_of(*rank).map(|process| &self.workers[&process]);
            newest.is_some_and(|worker| {
                worker.outcome() == Some(&Ok(())) && worker.epoch().is_some_and(|epoch| epoch < rewound_in)
            })
        };
        let left: Vec<u32> = (0..self.current_workers).filter(has_left).collect();
        left.into_iter().for_each(|rank| self.start_worker(rank));
    }

    /// The newest process of a rank.
    fn newest_of(&self, rank: u32) -> Option<Process> {
        let mut all = self.workers.keys().copied();
        all.rfind(|process| matches!(process, Process::Worker(of, _) if *of == rank))
    }

    /// Starts the process of a hub.
    fn start_hub(&mut self, number: u16) {
        let (routes, place) = (self.scenario.routes_per_hub, self.scenario.place_of_hub(number));
        let plan = self.plan.clone();
        let hub = Hub::new(number, routes, place, &plan, &mut self.context());
        self.hubs.insert(number, hub);
    }

    /// Starts another process for a rank.
    fn start_worker(&mut self, rank: u32) {
        let plan = self.plan.clone();
        let number =
            self.workers.keys().filter(|process| matches!(process, Process::Worker(of, _) if *of == rank));
        let number = number.count() as u8;
        let workers = self.scenario.may_change_workers().then_some(self.current_workers);
        let worker = Worker::new(rank, number, workers, &plan, &mut self.context());
        self.workers.insert(Process::Worker(rank, number), worker);
    }

    fn context(&mut self) -> Context<'_> {
        Context {
            network: &mut self.network,
            agenda: &mut self.agenda,
            ledger: &mut self.ledger,
            random: &mut self.random,
            compute: self.scenario.compute.clone(),
            starting: self.scenario.starting.clone(),
            saving: self.scenario.saving.clone(),
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
                if let (Event::Arrive { stream, .. }, Process::Hub(_)) = (&event, process) {
                    // Its host still answers those who dial.
                    self.network.refuse(*stream, process, &mut self.agenda);
                }
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
                Either::Manager(manager) => {
                    if let Wake::Manager { start, wake } = wake {
                        manager.wake(start, wake, context);
                    }
                }
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
            Either::Manager(manager) => manager.arrived(stream, arrival, context),
        });
    }

    fn with(&mut self, process: Process, act: impl FnOnce(Either<'_>, &mut Context<'_>)) {
        match process {
            Process::Worker(..) => {
                let Some(mut worker) = self.workers.remove(&process) else { return };
                act(Either::Worker(&mut worker), &mut self.context());
                self.workers.insert(process, worker);
            }
            // It only waits.
            Process::Twin(_) => {}
            Process::Hub(number) => {
                let Some(mut hub) = self.hubs.remove(&number) else { return };
                act(Either::Hub(&mut hub), &mut self.context());
                self.hubs.insert(number, hub);
            }
            Process::Manager => {
                let Some(mut manager) = self.manager.take() else { return };
                act(Either::Manager(&mut manager), &mut self.context());
                self.manager = Some(manager);
            }
        }
    }

    /// The record of the job, once everybody agrees that it is over.
    fn over(&self) -> Option<JobStatus> {
        let is_dead = |process| self.killed.contains(&process);
        let is_over =
            |(&process, worker): (&Process, &Worker)| worker.outcome().is_some() || is_dead(process);
        let is_idle = |(&number, hub): (&u16, &Hub)| hub.is_idle() || is_dead(Process::Hub(number));
        let recorded = self.manager.as_ref()?.settled()?;
        (self.workers.iter().all(is_over) && self.hubs.iter().all(is_idle)).then(|| recorded.clone())
    }

    fn summary(&self, recorded: JobStatus) -> Result<Summary, String> {
        let worker_end = |(&process, worker)| self.worker_end(process, worker);
        let lives = |process: &Process| !self.killed.contains(process);
        let shares = self.manager.as_ref().map(Manager::shares).unwrap_or_default();
        let has_part = |hub: &Hub| {
            let serves = |share: &Share, at| share.served_by == at || share.ready_standby() == Some(at);
            hub.position().is_some_and(|at| shares.iter().any(|share| serves(share, at)))
        };
        let needs = |hub: &Hub| !self.scenario.replicas || has_part(hub);
        let hubs = self.hubs.iter().filter(|&(&number, hub)| lives(&Process::Hub(number)) && needs(hub));
        let hubs: Vec<_> = hubs.map(|(&number, hub)| (number, hub.end())).collect();
        let ends = Ends {
            scenario: self.scenario,
            connected: self.connected,
            workers: self.workers.iter().map(worker_end).collect(),
            has_all_hubs: self.hub_losses == 0
                && self.drains == 0
                && hubs.len() == usize::from(self.scenario.hubs),
            has_risked_chunks: self.has_risked_chunks,
            hubs,
            recorded: &recorded,
            always_there: (0..self.scenario.workers)
                .filter(|&rank| self.ledger.was_always_there(rank))
                .collect(),
            lost: (0..self.scenario.workers).filter(|&rank| self.ledger.was_lost(rank)).collect(),
            common_version: self.ledger.common_version(),
            has_lost_hubs: self.manager.as_ref().is_some_and(Manager::has_lost_hubs),
        };
        ends.check()?;
        Ok(Summary {
            had_to_finish: self.scenario.must_finish(self.connected, self.has_risked_chunks),
            had_to_keep_all: self.scenario.must_keep_workers(self.connected),
            has_finished: recorded.state == JobState::Finished,
            steps: self.workers.values().map(|worker| u64::from(worker.step())).sum(),
            broken: self.broken,
            restarts: self.restarts,
            rewinds: self.ledger.rewinds(),
            begun_anew: self.ledger.begun_anew(),
            new_standbys: self.ledger.new_standbys().0,
            further_standbys: self.ledger.new_standbys().1,
            took_over_later: self.ledger.new_standbys().2,
            hub_losses: self.hub_losses,
            left_drained: self.manager.as_ref().map_or(0, Manager::left_drained),
            took: self.agenda.now(),
        })
    }

    fn worker_end<'a>(&self, process: Process, worker: &'a Worker) -> WorkerEnd<'a> {
        WorkerEnd {
            process,
            rank: worker.rank(),
            was_killed: self.killed.contains(&process),
            steps: worker.step(),
            outcome: worker.outcome(),
        }
    }

    fn describe_stuck(&self) -> String {
        let workers: Vec<String> = self
            .workers
            .iter()
            .map(|(process, worker)| format!("{process:?}: step {}, {:?}", worker.step(), worker.outcome()))
            .collect();
        let hubs: Vec<String> =
            self.hubs.iter().map(|(number, hub)| format!("hub {number}: idle {}", hub.is_idle())).collect();
        let recorded = self.manager.as_ref().and_then(Manager::recorded);
        format!("the run is stuck: {}; {}; recorded {recorded:?}", workers.join(", "), hubs.join(", "))
    }
}

enum Either<'a> {
    Worker(&'a mut Worker),
    Hub(&'a mut Hub),
    Manager(&'a mut Manager),
}
