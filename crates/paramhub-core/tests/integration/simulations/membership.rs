//! The connection manager's state machine under random interleavings of ranks that come and go, hubs that join,
//! die and report, timeouts and restarts. One thread, virtual time: a failure prints its seed and the shortest
//! sequence of actions that leads to it.

mod action;
mod checks;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use paramhub_core::auth::{Epoch, EpochSecret, Incarnation, Namespace, Nonce, Proof, RankClaim};
use paramhub_core::composition::Place;
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::membership::{
    CallId, HubRecord, Job, JobRecord, Membership, MembershipLimits, Now, Output, REPORTED_BACK_MAX,
    SettingsSummary, SitePlacement, Submission, WaitingCall,
};
use paramhub_core::placement::{HubShape, Imbalance, InterfaceShape};
use paramhub_core::scheme::{InformationBook, Plan};
use paramhub_core::service::{
    CauseKind, ConnectService, CreateService, HubCommand, HubEvent, HubReport, JobEnd, JobOptions, JobState,
    LeaveService, Presence, ProbeOutcome, ProbeReport, RegisterHub, StopWhen, TeamQuotas,
};
use paramhub_core::settings::Settings;
use paramhub_core::teams::TeamRecord;
use paramhub_core::wire::VERSION;
use proptest::prelude::*;

use action::{Action, action};

const HUB_TIMEOUT: Duration = Duration::from_secs(2);
const UNHEARD_MAX: Duration = Duration::from_secs(6);
const RENDEZVOUS_S: f64 = 3.0;
const LEASE_S: f64 = 5.0;
/// A team that has every second job. Each job takes one byte of each hub.
const TEAM: &str = "t";
const MEMORY_BYTES: u64 = 3;
/// Longer than any call may wait.
const LONG: Duration = Duration::from_secs(30);

/// A call that waits, as its caller knows it.
#[derive(Clone, Copy, Debug)]
struct Caller {
    deadline: Duration,
    namespace: Option<Namespace>,
    /// The rank and the process of a worker.
    rank: Option<(u32, Incarnation)>,
    /// `true` if the worker has left meanwhile.
    left: bool,
}

/// A hub as its own process knows it.
struct SimulatedHub {
    number: u32,
    token: String,
    address: String,
    frozen: bool,
    /// The time at which the manager last heard it.
    heard: Duration,
    leaving: bool,
    commands: VecDeque<Order>,
    /// What it has had to report while it was not heard.
    undelivered: Vec<HubEvent>,
    /// Its jobs, each with the hash of its placement.
    jobs: BTreeMap<Namespace, String>,
    /// How others have ended.
    ends: Vec<JobEnd>,
}

enum Order {
    Allocate { namespace: Namespace, hash: String },
    Command(HubCommand),
}

/// The state of a job outside the manager.
#[derive(Default)]
struct ObservedJob {
    workers: u32,
    in_racks: bool,
    /// The last sign of life of a worker.
    renewed: Duration,
    state: Option<JobState>,
    /// For each rank the process that knows that all ranks have joined.
    joined: BTreeMap<u32, Incarnation>,
    /// The newest call to ConnectService of each rank, whose process has the rank while the call waits.
    newest_calls: BTreeMap<u32, CallId>,
    /// The answers to ConnectService and InitService, by the rack of the rank.
    connected: BTreeMap<u32, String>,
    initialised: BTreeMap<u32, String>,
    hubs_finished: BTreeSet<u32>,
    /// The ranks that have finished without a hub.
    ranks_finished: BTreeSet<u32>,
    /// `true` if its launcher has said that its workers have ended.
    workers_ended: bool,
    /// The hubs that ranks have lost, and when they said so last.
    hubs_lost: BTreeMap<u32, Duration>,
}

struct Simulation {
    membership: Membership,
    now: Duration,
    restarts: u32,
    created: u8,
    jobs: BTreeMap<Namespace, ObservedJob>,
    callers: BTreeMap<CallId, Caller>,
    /// Calls to InitService whose settings are being compared.
    comparing: Vec<CallId>,
    placing: VecDeque<(Namespace, Arc<Settings>)>,
    hubs: BTreeMap<u32, SimulatedHub>,
    store: BTreeMap<Namespace, JobRecord>,
    hub_store: BTreeMap<u32, HubRecord>,
}

fn limits() -> MembershipLimits {
    MembershipLimits {
        hub_timeout: HUB_TIMEOUT,
        unheard_max: UNHEARD_MAX,
        living_jobs_max: 3,
        ended_jobs_max: 1,
        core_rate: None,
    }
}

fn membership(jobs: Vec<JobRecord>, hubs: Vec<HubRecord>, secret: Nonce, now: Duration) -> Membership {
    let mut membership = Membership::new(jobs, hubs, limits(), secret, moment(now));
    let quotas = TeamQuotas { memory_bytes: Some(MEMORY_BYTES), ..TeamQuotas::default() };
    membership.set_team(TeamRecord { name: TEAM.into(), quotas });
    membership
}

fn settings() -> Arc<Settings> {
    Arc::new(Settings::new(KeyTable::new(vec![Key::new("w", [4])]).unwrap()))
}

fn process(number: u8) -> Incarnation {
    Incarnation([number; 16])
}

/// The rack of a rank, where a job's ranks are in racks.
fn rack_of(job: &ObservedJob, rank: u32) -> u32 {
    if job.in_racks { rank % 2 } else { 0 }
}

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap()
}

/// A record as the store returns it.
fn stored<T: serde::Serialize + serde::de::DeserializeOwned>(record: &T) -> T {
    serde_json::from_str(&json(record)).unwrap()
}

/// A hub's report that it has a job.
fn allocated(namespace: Namespace, hash: &str) -> HubEvent {
    HubEvent::Allocated {
        namespace,
        placement_hash: hash.to_owned(),
        resumed_step: None,
        memory_bytes: 1,
        streams: 0,
        further: None,
    }
}

impl Simulation {
    fn new() -> Simulation {
        let now = Duration::ZERO;
        Simulation {
            membership: membership(Vec::new(), Vec::new(), Nonce([9; 32]), now),
            now,
            restarts: 0,
            created: 0,
            jobs: BTreeMap::new(),
            callers: BTreeMap::new(),
            comparing: Vec::new(),
            placing: VecDeque::new(),
            hubs: BTreeMap::new(),
            store: BTreeMap::new(),
            hub_store: BTreeMap::new(),
        }
    }

    fn act(&mut self, action: &Action) {
        let now = moment(self.now);
        match *action {
            Action::Create { workers, hubs, in_racks } => self.create(workers, hubs, in_racks),
            Action::Connect { job, rank, process } => self.connect(job, rank, process),
            Action::Init { job, rank, process } => self.init(job, rank, process),
            Action::Compared { call, agree } => {
                if self.comparing.is_empty() {
                    return;
                }
                let call = self.comparing.remove(call % self.comparing.len());
                self.compared(call, agree);
            }
            Action::Placed { fits } => self.placed(fits),
            Action::HangUp { call } => {
                let Some(call) = self.callers.keys().copied().nth(call % self.callers.len().max(1)) else {
                    return;
                };
                self.end_call(call);
                self.membership.hang_up(call, now);
            }
            Action::Leave { job, rank, process: number, finished } => {
                let Some(namespace) = self.pick(job) else { return };
                let (incarnation, proof) = (process(number), Proof([0; 32]));
                let call = LeaveService {
                    rank,
                    incarnation,
                    proof,
                    reason: String::new(),
                    finished,
                    lost_hub: None,
                };
                if self.membership.leave(namespace, &call, now).is_ok() {
                    self.renew(namespace);
                    let is_its = |caller: &Caller| {
                        caller.namespace == Some(namespace) && caller.rank == Some((rank, incarnation))
                    };
                    self.callers
                        .values_mut()
                        .filter(|caller| is_its(caller))
                        .for_each(|call| call.left = true);
                    let job = self.jobs.get_mut(&namespace).unwrap();
                    job.ranks_finished.extend(Some(rank).filter(|_| finished));
                }
            }
            Action::LoseHub { job, rank, process, hub } => self.lose_hub(job, rank, process, hub),
            Action::Stop { job, when } => {
                let Some(namespace) = self.pick(job) else { return };
                self.jobs.get_mut(&namespace).unwrap().workers_ended |= when == StopWhen::WorkersEnded;
                let stopped = self.membership.stop(namespace, "enough".into(), when, now);
                if let Ok(waiting) = stopped {
                    self.waits(waiting, Some(namespace), None);
                }
            }
            Action::Probe => {
                if let Ok(call) = self.membership.probe_afresh(now) {
                    // Seven rounds of 2 s at most.
                    self.waits(WaitingCall { call, deadline: now.monotonic + LONG }, None, None);
                }
            }
            Action::Join { address, rack } => self.join(address, rack),
            Action::Obey { hub, well } => self.obey(hub, well),
            Action::End { hub, finished } => self.hub_ends(hub, finished),
            Action::Depart { hub, gone } => {
                let Some(number) = self.pick_hub(hub) else { return };
                let hub = self.hubs.get_mut(&number).unwrap();
                // A hub whose calls do not arrive cannot leave.
                hub.leaving |= !hub.frozen;
                let presence = if gone { Presence::Gone } else { Presence::Leaving };
                self.report(number, HubReport { presence, ..HubReport::default() });
            }
            Action::Freeze { hub } => {
                let Some(number) = self.pick_hub(hub) else { return };
                let hub = self.hubs.get_mut(&number).unwrap();
                hub.frozen = !hub.frozen;
            }
            Action::Wait { ms } => self.wait(Duration::from_millis(ms)),
            Action::Restart => self.restart(),
        }
        self.carry_out();
    }

    /// A rank says that it has lost one of its hubs, which may be wrong.
    fn lose_hub(&mut self, job: usize, rank: u32, number: u8, hub: usize) {
        let Some(namespace) = self.pick(job) else { return };
        let hubs: Vec<u32> = self.membership.job(namespace).unwrap().hubs().collect();
        let Some(&lost) = hubs.get(hub % hubs.len().max(1)) else { return };
        let Some(address) = self.hubs.get(&lost).map(|hub| hub.address.clone()) else { return };
        let call = LeaveService {
            rank,
            incarnation: process(number),
            proof: Proof([0; 32]),
            reason: "its connection ended".into(),
            finished: false,
            lost_hub: Some(address),
        };
        let is_running = self.membership.job(namespace).unwrap().state() == JobState::Running;
        if self.membership.leave(namespace, &call, moment(self.now)).is_ok() {
            self.renew(namespace);
            if is_running {
                self.jobs.get_mut(&namespace).unwrap().hubs_lost.insert(lost, self.now);
            }
        }
    }

    fn create(&mut self, workers: u32, hubs: Option<u32>, in_racks: bool) {
        let name = match self.created % 4 {
            number @ (0 | 2) => format!("job-{number}"),
            number => format!("{TEAM}/job-{number}"),
        };
        let namespace = Namespace([self.created + 1; 16]);
        let Ok(order) = self.membership.reserve(&name, 1, namespace) else { return };
        self.created += 1;
        let options = JobOptions {
            hubs,
            rendezvous_timeout_s: RENDEZVOUS_S,
            lease_s: LEASE_S,
            ..JobOptions::default()
        };
        let request = CreateService { name, workers, options };
        let job = Job::new(
            order,
            request,
            namespace,
            Nonce([1; 32]),
            Some(Epoch { number: 1, secret: EpochSecret([2; 32]) }),
            moment(self.now),
        );
        self.store.insert(namespace, job.record(moment(self.now)));
        self.membership.admit(job);
        let observed = ObservedJob { workers, in_racks, renewed: self.now, ..ObservedJob::default() };
        self.jobs.insert(namespace, observed);
    }

    fn connect(&mut self, job: usize, rank: u32, number: u8) {
        let Some(namespace) = self.pick(job) else { return };
        let rack = ["a", "b"][rack_of(&self.jobs[&namespace], rank) as usize].to_string();
        let rack = if self.jobs[&namespace].in_racks { rack } else { String::new() };
        let call = ConnectService {
            rank,
            incarnation: process(number),
            proof: Proof([0; 32]),
            claim: Some(RankClaim([number; 32])),
            host: "host".into(),
            process: u32::from(number),
            place: Place { rack, host: String::new() },
            peer_address: Some(([127, 0, 0, 1], 1000 + rank as u16).into()),
            workers: None,
        };
        let newest = self.jobs[&namespace].newest_calls.get(&rank);
        let is_other = |caller: &&Caller| caller.rank != Some((rank, call.incarnation)) && !caller.left;
        let holder = newest.and_then(|newest| self.callers.get(newest)).filter(is_other).copied();
        if let Ok(waiting) = self.membership.connect(namespace, &call, moment(self.now)) {
            assert!(holder.is_none(), "rank {rank} of {namespace} is taken from {holder:?}");
            self.jobs.get_mut(&namespace).unwrap().newest_calls.insert(rank, waiting.call);
            self.waits(waiting, Some(namespace), Some((rank, call.incarnation)));
        }
    }

    fn init(&mut self, job: usize, rank: u32, number: u8) {
        let Some(namespace) = self.pick(job) else { return };
        let (now, caller) = (moment(self.now), Some((rank, process(number))));
        match self.membership.submit(namespace, rank, process(number), &settings(), now, now) {
            Ok(Submission::Wait(waiting)) => {
                self.waits(waiting, Some(namespace), caller);
                self.compared(waiting.call, true);
            }
            Ok(Submission::Compare { waiting, .. }) => {
                self.waits(waiting, Some(namespace), caller);
                self.comparing.push(waiting.call);
            }
            Ok(Submission::Join { .. }) => panic!("no rank of these jobs is replaced"),
            Err(_) => {}
        }
    }

    fn compared(&mut self, call: CallId, agree: bool) {
        let now = moment(self.now);
        if agree {
            self.placing.extend(self.membership.agree(call, now));
        } else {
            self.membership.disagree(call, "the keys differ", now);
        }
    }

    fn placed(&mut self, fits: bool) {
        let Some((namespace, settings)) = self.placing.pop_front() else { return };
        let now = moment(self.now);
        let Ok(roster) = self.membership.roster(namespace) else { return };
        if !fits {
            let refused =
                paramhub_core::service::refusal(paramhub_core::service::ErrorCode::DoesNotFit, "no");
            return self.membership.cannot_place(namespace, refused, now);
        }
        let job = self.membership.job(namespace).unwrap();
        let sites: Vec<usize> = job.composition().unwrap().sites.iter().map(|site| site.hubs.len()).collect();
        let imbalance = Imbalance { hubs: 1.0, interfaces: 1.0, cores: 1.0 };
        let hash = |site: usize| format!("site {site}");
        let placements = (0..sites.len())
            .map(|site| SitePlacement { hash: hash(site), imbalance, empty_hubs: Vec::new() })
            .collect();
        let plan = Plan::new(&settings, &roster.cluster());
        let information_book = Arc::new(InformationBook { job: job.name.clone(), roster, plan });
        let hubs = self.membership.place(namespace, SettingsSummary::default(), placements, information_book);
        let of_sites = sites.iter().enumerate().flat_map(|(site, &hubs)| vec![site; hubs]);
        for (number, site) in hubs.into_iter().zip(of_sites) {
            let hub = self.hubs.get_mut(&number).expect("only hubs that are here are asked to allocate");
            hub.commands.push_back(Order::Allocate { namespace, hash: hash(site) });
        }
    }

    fn join(&mut self, address: u32, rack: usize) {
        let address = format!("10.0.0.{address}:1");
        let interface = InterfaceShape { address: address.clone(), cores: vec![0], weight: 1 };
        let shape = HubShape { interfaces: vec![interface], local: None, between_hubs: None };
        let place = Place { rack: ["", "a", "b"][rack].into(), host: String::new() };
        let offer = RegisterHub {
            protocol: VERSION,
            shape,
            place,
            machine: String::new(),
            keeps_checkpoints: None,
            encrypt: false,
            labels: Vec::new(),
        };
        let token = format!("token {}", self.hubs.len());
        let number = self.membership.register_hub(offer, &token, moment(self.now)).unwrap();
        let hub = SimulatedHub {
            number,
            token,
            address,
            frozen: false,
            undelivered: Vec::new(),
            heard: self.now,
            leaving: false,
            commands: VecDeque::new(),
            jobs: BTreeMap::new(),
            ends: Vec::new(),
        };
        assert!(self.hubs.insert(number, hub).is_none(), "a hub's number is never given again");
    }

    fn obey(&mut self, hub: usize, well: bool) {
        let Some(number) = self.pick_hub(hub) else { return };
        let hub = self.hubs.get_mut(&number).unwrap();
        // Its calls do not arrive, so it has got no commands.
        let Some(order) = hub.commands.pop_front_if(|_| !hub.frozen) else { return };
        let event = match order {
            Order::Allocate { namespace, .. } if !well && !hub.jobs.contains_key(&namespace) => {
                HubEvent::Refused { namespace, reason: "full".into() }
            }
            Order::Allocate { namespace, hash } => {
                allocated(namespace, hub.jobs.entry(namespace).or_insert(hash))
            }
            Order::Command(HubCommand::ReportJobs { question }) => {
                let living = hub.jobs.iter().map(|(&namespace, hash)| allocated(namespace, hash));
                let ended = hub.ends.iter().cloned().map(HubEvent::Ended);
                let events = living.chain(ended).chain([HubEvent::AllReported { question }]).collect();
                return self.report(number, HubReport { events, ..HubReport::default() });
            }
            Order::Command(HubCommand::Stop { namespace, when: StopWhen::WorkersEnding, .. }) => {
                HubEvent::Kept { namespace }
            }
            Order::Command(HubCommand::Stop { namespace, reason, .. }) => {
                let finished = hub.jobs.remove(&namespace).is_some() && well;
                return self.ended(number, namespace, finished, &reason);
            }
            Order::Command(HubCommand::Probe(order)) => {
                let outcome = match well {
                    true => ProbeOutcome::BitsPerSecond(1e9),
                    false => ProbeOutcome::Failed("the link is down".into()),
                };
                HubEvent::Probed(ProbeReport { probe: order.probe, outcome, is_rated: true })
            }
            Order::Command(_) => return,
        };
        self.report(number, HubReport { events: vec![event], ..HubReport::default() });
    }

    fn hub_ends(&mut self, hub: usize, finished: bool) {
        let Some(number) = self.pick_hub(hub) else { return };
        let Some((namespace, _)) = self.hubs.get_mut(&number).unwrap().jobs.pop_first() else { return };
        self.ended(number, namespace, finished, "rank 0 was lost");
    }

    fn ended(&mut self, number: u32, namespace: Namespace, finished: bool, reason: &str) {
        let end = match finished {
            true => JobEnd::finished(namespace),
            false => JobEnd::failed(namespace, reason.into(), CauseKind::PeerLost),
        };
        if finished && let Some(job) = self.jobs.get_mut(&namespace) {
            job.hubs_finished.insert(number);
        }
        self.hubs.get_mut(&number).unwrap().ends.push(end.clone());
        self.report(number, HubReport { events: vec![HubEvent::Ended(end)], ..HubReport::default() });
    }

    /// A hub reports. Every report of a hub that the manager knows is taken. What a hub that is not heard has to report
    /// goes with its next report.
    fn report(&mut self, number: u32, report: HubReport) {
        let hub = self.hubs.get_mut(&number).unwrap();
        if hub.frozen {
            hub.undelivered.extend(report.events);
            return;
        }
        hub.heard = self.now;
        let events = std::mem::take(&mut hub.undelivered).into_iter().chain(report.events).collect();
        let report = HubReport { events, ..report };
        self.membership.report(number, Some(&hub.token), report, moment(self.now)).unwrap();
        self.carry_out();
    }

    /// Lets time pass: calls expire at their deadlines, hubs that are not frozen call, and the time is checked
    /// every tick.
    fn wait(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now = end.min(self.now + self.membership.tick());
            let now = moment(self.now);
            for hub in self.hubs.values_mut().filter(|hub| !hub.frozen) {
                hub.heard = self.now;
                // However long it was silent, its number and its token hold until it is lost.
                self.membership.admit_hub(hub.number, Some(&hub.token), now).unwrap();
            }
            let behind = self.hubs.values().filter(|hub| !hub.frozen && !hub.undelivered.is_empty());
            let behind: Vec<u32> = behind.map(|hub| hub.number).collect();
            behind.into_iter().for_each(|number| self.report(number, HubReport::default()));
            let is_over = |caller: &Caller| caller.deadline <= now.monotonic;
            let over: Vec<CallId> =
                self.callers.iter().filter(|(_, caller)| is_over(caller)).map(|(&call, _)| call).collect();
            for call in over {
                self.membership.expire(call, now);
                self.carry_out();
                assert!(!self.callers.contains_key(&call), "{call:?} got no answer at its deadline");
            }
            self.membership.check_time(now);
            self.carry_out();
        }
    }

    /// All that the manager keeps is in its store; connections break. Jobs and hubs go on.
    fn restart(&mut self) {
        self.restarts += 1;
        let calls: Vec<CallId> = self.callers.keys().copied().collect();
        calls.into_iter().for_each(|call| self.end_call(call));
        self.comparing.clear();
        self.placing.clear();
        let states = |membership: &Membership| -> Vec<(Namespace, JobState)> {
            membership.jobs().map(|job| (job.namespace, job.state())).collect()
        };
        let before = states(&self.membership);
        let jobs: Vec<JobRecord> = self.store.values().map(stored).collect();
        let hubs: Vec<HubRecord> = self.hub_store.values().map(stored).collect();
        assert!(self.hubs.keys().eq(self.hub_store.keys()), "the store has other hubs");
        let secret = Nonce([self.restarts as u8; 32]);
        self.membership = membership(jobs, hubs, secret, self.now);
        assert_eq!(states(&self.membership), before, "the restart has changed the state of a job");
        for hub in self.hubs.values_mut() {
            hub.commands.clear();
            // A hub that is leaving says so again in its next report.
            hub.leaving = false;
        }
        for (namespace, job) in &mut self.jobs {
            if before.contains(&(*namespace, JobState::Connecting)) {
                job.joined.clear();
            }
            job.newest_calls.clear();
        }
    }

    fn waits(
        &mut self,
        waiting: WaitingCall,
        namespace: Option<Namespace>,
        rank: Option<(u32, Incarnation)>,
    ) {
        let caller = Caller { deadline: waiting.deadline, namespace, rank, left: false };
        assert!(waiting.deadline > moment(self.now).monotonic);
        assert!(self.callers.insert(waiting.call, caller).is_none(), "{:?} came twice", waiting.call);
        if let (Some(namespace), Some(_)) = (namespace, rank) {
            self.renew(namespace);
        }
    }

    /// A call waits no longer.
    fn end_call(&mut self, call: CallId) {
        let caller = self.callers.remove(&call);
        let Some(Caller { namespace, rank, .. }) = caller else { panic!("{call:?} was answered twice") };
        self.comparing.retain(|&comparing| comparing != call);
        if let (Some(namespace), Some(_)) = (namespace, rank) {
            self.renew(namespace);
        }
    }

    fn renew(&mut self, namespace: Namespace) {
        if let Some(job) = self.jobs.get_mut(&namespace) {
            job.renewed = self.now;
        }
    }

    /// Does what the manager's threads do with the outputs, and checks each.
    fn carry_out(&mut self) {
        for output in self.membership.take_outputs(moment(self.now)) {
            match output {
                Output::Answer { call, answer, .. } => self.answered(call, answer),
                Output::HubJoined { hub } => {
                    assert!(self.hubs.contains_key(&hub));
                    // A hub that is lost again by now is not recorded.
                    let record = self.membership.hub_record(hub).map(|record| (hub, record));
                    self.hub_store.extend(record);
                }
                Output::SaveHub { .. } => panic!("nobody drains a hub"),
                Output::HubRestored { hub } => assert!(self.hubs.contains_key(&hub)),
                Output::HubForgotten { hub } => {
                    self.hubs.remove(&hub);
                    self.hub_store.remove(&hub);
                }
                Output::Command { hub, command, .. } => {
                    let hub = self.hubs.get_mut(&hub).expect("only hubs that are here get commands");
                    hub.commands.push_back(Order::Command(command));
                }
                Output::ChangeMembership { .. } => panic!("no rank of these jobs is replaced"),
                Output::Save(namespace) => {
                    // The store saves the newest state, and a job that is forgotten by then not at all.
                    if let Ok(job) = self.membership.job(namespace) {
                        self.store.insert(namespace, job.record(moment(self.now)));
                    }
                }
                Output::Remove(namespace) => drop(self.store.remove(&namespace)),
                Output::Log(event) => self.check_log_event(event),
            }
        }
        self.check_jobs();
    }

    fn pick(&self, job: usize) -> Option<Namespace> {
        self.membership.jobs().map(|job| job.namespace).nth(job % self.membership.jobs().count().max(1))
    }

    fn pick_hub(&self, hub: usize) -> Option<u32> {
        self.hubs.keys().copied().nth(hub % self.hubs.len().max(1))
    }
}

fn moment(now: Duration) -> Now {
    Now { monotonic: REPORTED_BACK_MAX + now, unix_s: now.as_secs() }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn a_manager_keeps_its_invariants_in_every_order_of_events(
        actions in prop::collection::vec(action(), 1..120),
    ) {
        let mut simulation = Simulation::new();
        for action in &actions {
            simulation.act(action);
        }
        // All hubs that are not lost by now are heard again.
        simulation.hubs.values_mut().for_each(|hub| hub.frozen = false);
        simulation.wait(HUB_TIMEOUT);
        for hub in simulation.membership.hub_statuses(moment(simulation.now)) {
            prop_assert!(!hub.unheard, "hub {} calls and is not heard", hub.hub);
        }
        simulation.wait(LONG);
        prop_assert!(simulation.callers.is_empty(), "calls that got no answer: {:?}", simulation.callers);
    }
}
