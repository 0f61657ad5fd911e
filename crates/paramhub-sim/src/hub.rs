//! A hub: the production state machines of its jobs and chunks, and what the acceptor and the cores do around them.

mod route;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use paramhub_core::auth::{Epoch, EpochSecret, Incarnation, Namespace, Nonce};
use paramhub_core::composition::Neighbour;
use paramhub_core::job_control::{
    AdmittedStreams, CoreEvent, Event, FaultCause, HubTerms, JobControl, JobLimits, JobTerms, Output,
    RouteTerms,
};
use paramhub_core::liveness::{HEARTBEAT, LivenessChange, LivenessRules, OwnPauses, PeerLiveness};
use paramhub_core::placement::RouteId;
use paramhub_core::ports::Ports;
use paramhub_core::service::{CauseKind, JobCounters, JobEnd, TeamAllowance};
use paramhub_core::stragglers::Stragglers;
use paramhub_core::stream_admission::{JobStreams, StreamOrigin, StreamPlace, StreamSecrets, StreamTerms};
use paramhub_core::wire::{Attempt, Failure, Header, Hello, Operation, Refusal};

use crate::job::{EPOCH, JobPlan, NAMESPACE};
use crate::message::{Content, Frame, Message};
use crate::network::{Arrival, Process, StreamId};
use crate::world::{Context, Plant, Wake};
use route::{Port, Route};

/// How long a core takes to allocate a route, and the acceptor to pass on a stream.
const PASSING: std::ops::Range<Duration> = Duration::from_micros(10)..Duration::from_millis(20);

/// A hub and its job.
pub(crate) struct Hub {
    process: Process,
    plan: Arc<JobPlan>,
    control: JobControl,
    /// The routes that lead here.
    routes: BTreeMap<RouteId, Route>,
    directory: Directory,
    /// What has come on streams that were admitted and not passed on yet: it waits in their sockets.
    admitted: BTreeMap<StreamId, Vec<Arrival>>,
    own_pauses: OwnPauses,
    /// Streams that came to a hub with a planted fault.
    planted: u32,
    /// How the job has ended, as the hub reports it to the manager.
    end: Option<JobEnd>,
    /// Nothing of the job is left here.
    has_forgotten: bool,
}

/// Which streams the acceptor admits, as the hub's directory keeps it.
struct Directory {
    is_open: bool,
    /// Why no stream is admitted any more.
    ended: Option<String>,
    streams: JobStreams,
}

impl AdmittedStreams for Directory {
    fn missing(&self, _: Namespace) -> Vec<Neighbour> {
        self.streams.missing()
    }

    fn through(&self, _: Namespace, interface: u16) -> Vec<(RouteId, u32, Neighbour)> {
        self.streams.through(interface)
    }
}

impl Hub {
    /// A hub that has been asked to allocate the job.
    pub(crate) fn new(number: u16, plan: &Arc<JobPlan>, context: &mut Context<'_>) -> Hub {
        let process = Process::Hub(number);
        let placement = &plan.composed.placements[0];
        let own = (0..).zip(placement.routes());
        let own = own.filter(|&(id, route)| route.hub == number && !placement.chunks(id).is_empty());
        let own: Vec<(RouteId, u16)> = own.map(|(id, route)| (id, route.interface)).collect();
        let routes = own.iter().map(|&(id, _)| (id, Route::new(plan, placement.chunks(id)))).collect();
        let hub = HubTerms {
            interfaces: own.len(),
            interface_names: own.iter().map(|(_, interface)| format!("eth{interface}")).collect(),
            memory_bytes: 1 << 30,
            job_limits: JobLimits::default(),
            descriptors_max: 1 << 16,
        };
        let streams = StreamTerms {
            name: "job".into(),
            secrets: StreamSecrets {
                nonce: Nonce([0; 32]),
                epoch: Epoch { number: EPOCH, secret: EpochSecret([0; 32]) },
                version_1_ranks: Vec::new(),
            },
            composed: plan.composed.clone(),
            site: 0,
            ports: own.iter().map(|&(id, _)| (id, Arc::new(Ports::new(&plan.composed, 0, id)))).collect(),
            routes: own.iter().map(|&(id, interface)| ((interface, interface), id)).collect(),
            continues: plan.continues,
            encrypts: false,
        };
        let mut hub = Hub {
            process,
            plan: plan.clone(),
            control: JobControl::new(hub),
            routes,
            directory: Directory { is_open: false, ended: None, streams: JobStreams::new(streams) },
            admitted: BTreeMap::new(),
            own_pauses: OwnPauses::new(context.instant(), HEARTBEAT),
            planted: 0,
            end: None,
            has_forgotten: false,
        };
        let terms = JobTerms {
            namespace: NAMESPACE,
            name: "job".into(),
            composed: plan.composed.clone(),
            site: 0,
            routes: own
                .iter()
                .map(|&(id, interface)| RouteTerms { id, core: interface, interface, streams: plan.workers })
                .collect(),
            rendezvous: plan.rendezvous,
            dead_after: plan.dead_after,
            progress_timeout: None,
            continues: plan.continues,
            min_workers: None,
            epoch: 1,
            stragglers: Stragglers::Wait,
            weight: 1,
            memory_bytes: 1 << 20,
            team: TeamAllowance::default(),
            resumes: false,
            writes_checkpoints: false,
            checkpoint_folder: String::new(),
        };
        hub.handle(Event::Planned(Box::new(terms)), context);
        hub.next_tick(context);
        hub
    }

    /// Whether it admits streams of the job.
    pub(crate) fn is_ready(&self) -> bool {
        self.directory.is_open
    }

    /// Whether nothing of the job is left here.
    pub(crate) fn is_over(&self) -> bool {
        self.has_forgotten
    }

    /// How the job has ended, as the hub has reported it.
    pub(crate) fn end(&self) -> Option<&JobEnd> {
        self.end.as_ref()
    }

    /// An end of a stream learns something.
    pub(crate) fn arrived(&mut self, stream: StreamId, arrival: Arrival, context: &mut Context<'_>) {
        if let Some(waiting) = self.admitted.get_mut(&stream) {
            return waiting.push(arrival);
        }
        match (arrival, self.port_of(stream)) {
            (Arrival::Message(Message::Hello(hello)), None) => self.greet(stream, &hello, context),
            (Arrival::Message(Message::Frame(frame)), Some((route, rank))) => {
                self.take_frame(route, rank, frame, context);
            }
            (Arrival::Closed, Some((route, rank))) => self.closed(route, rank, context),
            (Arrival::Broken, Some((route, rank))) => {
                let continues = self.plan.continues;
                let port = self.port(route, rank);
                if continues && !port.is_muted {
                    port.is_cut = true;
                } else if !port.has_left && !port.is_muted {
                    self.lose(route, rank, "its stream broke", context);
                }
            }
            _ => {}
        }
    }

    /// A time has come.
    pub(crate) fn wake(&mut self, wake: Wake, context: &mut Context<'_>) {
        match wake {
            Wake::Tick => {
                self.tick(context);
                self.next_tick(context);
            }
            Wake::Opened(route) => {
                self.routes.get_mut(&route).expect("an own route").is_open = true;
                let event = CoreEvent::Opened { missing_bytes: None, has_snapshot: false };
                self.handle(Event::Core { namespace: NAMESPACE, event }, context);
            }
            Wake::Adopt { stream, place } => self.adopt(stream, place, context),
            Wake::Program | Wake::Redial(_) | Wake::DialTimeout { .. } => {
                unreachable!("these are of workers")
            }
        }
    }

    fn next_tick(&self, context: &mut Context<'_>) {
        let rules = LivenessRules::of_stream(HEARTBEAT, self.plan.dead_after);
        context.wake_in(self.process, rules.check_every(), Wake::Tick);
    }

    fn port(&mut self, route: RouteId, rank: u32) -> &mut Port {
        &mut self.routes.get_mut(&route).expect("an own route").ports[rank as usize]
    }

    fn port_of(&self, stream: StreamId) -> Option<(RouteId, u32)> {
        self.routes.iter().find_map(|(&id, route)| {
            let rank = route.ports.iter().position(|port| port.stream == Some(stream))?;
            Some((id, rank as u32))
        })
    }

    /// The Hello that is admitted in place of the one that came, if the hub is to have a fault: every stream is then
    /// newer than those that came before it.
    fn planted(&mut self, plant: Option<Plant>, hello: &Hello) -> Hello {
        self.planted += 1;
        let newest = Attempt::Numbered { epoch: EPOCH, number: (1 << 20) + self.planted };
        match plant {
            Some(Plant::StaleStream) if hello.attempt.resumes() => Hello { attempt: newest, ..*hello },
            Some(Plant::RankTwice) => Hello { attempt: newest, incarnation: Incarnation([0; 16]), ..*hello },
            _ => *hello,
        }
    }

    /// The acceptor: admits a stream or refuses it.
    fn greet(&mut self, stream: StreamId, hello: &Hello, context: &mut Context<'_>) {
        let interfaces = 0..hello.interface + 1;
        let origin = StreamOrigin::Interfaces { interfaces, is_encrypted: false };
        let hello = &self.planted(context.plant, hello);
        let placed = match &self.directory.ended {
            Some(why) => Err((Refusal::JobEnded, why.clone())),
            None if !self.directory.is_open => Err((Refusal::Busy, "the job is not open here".into())),
            None => self.directory.streams.place(hello, &origin),
        };
        match placed {
            Ok(place) => {
                self.directory.streams.take(&place, hello, &origin);
                self.admitted.insert(stream, Vec::new());
                context.send(stream, self.process, Message::Welcome);
                let passing = context.random.time(&PASSING);
                context.wake_in(self.process, passing, Wake::Adopt { stream, place });
            }
            Err((refusal, why)) => {
                context.send(stream, self.process, Message::Refused(refusal, why));
                context.close(stream, self.process);
            }
        }
    }

    /// The core takes a stream, and in place of another drops that.
    fn adopt(&mut self, stream: StreamId, place: StreamPlace, context: &mut Context<'_>) {
        // All members are workers, whose ports are their ranks.
        let StreamPlace { route, port: rank, attempt, resumed_by, .. } = place;
        let arrivals = self.admitted.remove(&stream).unwrap_or_default();
        let is_planted = context.plant == Some(Plant::StaleStream);
        let port = self.port(route, rank);
        if port.newest.is_some_and(|newest| attempt < newest) && !is_planted || self.has_forgotten {
            return context.close(stream, self.process);
        }
        context.trace(|| format!("{:?} adopts {stream:?}, attempt {attempt} of rank {rank}", self.process));
        let port = self.port(route, rank);
        port.newest = Some(attempt);
        let before = port.stream.replace(stream);
        let had_stream = before.is_some();
        if let Some(before) = before {
            context.close(before, self.process);
        }
        let port = self.port(route, rank);
        (port.is_cut, port.is_muted) = (false, false);
        port.liveness = Some(PeerLiveness::new(context.instant()));
        if resumed_by.is_some() || had_stream {
            port.owed.clear();
            if context.plant != Some(Plant::NoResume) {
                self.routes.get_mut(&route).expect("an own route").exchange.resume(rank);
            }
            // The worker keeps the old stream until a frame arrives on the new one.
            self.send(route, rank, Header::bare(Operation::Heartbeat), Content::Nothing, context);
            let event = CoreEvent::Moved { neighbour: Neighbour::Worker(rank), by: 0 };
            self.handle(Event::Core { namespace: NAMESPACE, event }, context);
        }
        arrivals.into_iter().for_each(|arrival| self.arrived(stream, arrival, context));
    }

    fn take_frame(&mut self, route: RouteId, rank: u32, frame: Frame, context: &mut Context<'_>) {
        let now = context.instant();
        let port = self.port(route, rank);
        if port.is_muted || port.is_cut {
            return;
        }
        if let Some(liveness) = &mut port.liveness {
            liveness.heard(now);
        }
        let header = frame.header;
        let taken = match header.operation {
            Operation::Heartbeat => Ok(()),
            Operation::Leave => return self.left(route, rank, context),
            Operation::Failure => {
                let Content::Failure(failure) = frame.content else { unreachable!("a failure has a reason") };
                let message = format!("rank {rank} gave up: {}", failure.message);
                return self.fault(route, rank, rank, message, FaultCause::Kind(CauseKind::GaveUp), context);
            }
            _ => {
                let route = self.routes.get_mut(&route).expect("an own route");
                route.take_request(&self.plan, rank, &header, &frame.content, context)
            }
        };
        if let Err(violation) = taken {
            context.ledger.violate(|| format!("rank {rank} broke the rules at {header:?}: {violation}"));
        }
        self.answer(route, context);
    }

    /// Sends every answer that is owed by a stream that works.
    fn answer(&mut self, id: RouteId, context: &mut Context<'_>) {
        let answers = self.routes.get_mut(&id).expect("an own route").take_due_answers();
        for (rank, header, content) in answers {
            self.send(id, rank, header, content, context);
        }
    }

    fn send(
        &mut self,
        route: RouteId,
        rank: u32,
        header: Header,
        content: Content,
        context: &mut Context<'_>,
    ) {
        let process = self.process;
        let port = self.port(route, rank);
        let Some(stream) = port.stream else { return };
        if let Some(liveness) = &mut port.liveness {
            liveness.sent(context.instant());
        }
        context.send(stream, process, Message::Frame(Frame { header, content }));
    }

    /// A rank has left by a stream.
    fn left(&mut self, id: RouteId, rank: u32, context: &mut Context<'_>) {
        let route = self.routes.get_mut(&id).expect("an own route");
        if std::mem::replace(&mut route.ports[rank as usize].has_left, true) {
            return;
        }
        let ports = &mut route.ports;
        let left = route.exchange.leave(rank, |slot, member, answer| {
            ports[member as usize].owed.insert(slot, answer);
        });
        if let Err(left) = left {
            let message = format!("rank {} left the job, but others wait for {}", left.member, left.awaited);
            return self.fault(id, rank, left.member, message, FaultCause::Kind(CauseKind::Known), context);
        }
        let event = CoreEvent::Left { route: id, port: rank };
        self.handle(Event::Core { namespace: NAMESPACE, event }, context);
    }

    /// The other end has closed a stream.
    fn closed(&mut self, route: RouteId, rank: u32, context: &mut Context<'_>) {
        let port = self.port(route, rank);
        if !port.has_left && !port.is_muted {
            return self.lose(route, rank, "it closed its stream", context);
        }
        if let Some(stream) = self.port(route, rank).stream.take() {
            context.close(stream, self.process);
        }
    }

    fn lose(&mut self, route: RouteId, rank: u32, why: &str, context: &mut Context<'_>) {
        let message = format!("rank {rank} was lost: {why}");
        self.fault(route, rank, rank, message, FaultCause::Kind(CauseKind::PeerLost), context);
        if let Some(stream) = self.port(route, rank).stream.take() {
            context.close(stream, self.process);
        }
    }

    /// The job cannot go on because of `culprit`, as the stream of `rank` shows.
    fn fault(
        &mut self,
        route: RouteId,
        rank: u32,
        culprit: u32,
        message: String,
        cause: FaultCause,
        context: &mut Context<'_>,
    ) {
        self.port(route, rank).is_muted = true;
        let event = CoreEvent::Faulted { culprit: Neighbour::Worker(culprit), message, cause };
        self.handle(Event::Core { namespace: NAMESPACE, event }, context);
    }

    fn tick(&mut self, context: &mut Context<'_>) {
        let now = context.instant();
        let rules = LivenessRules::of_stream(HEARTBEAT, self.plan.dead_after);
        let pause = self.own_pauses.turn(now);
        let (mut due, mut dead) = (Vec::new(), Vec::new());
        for (&id, route) in &mut self.routes {
            for (rank, port) in (0..).zip(&mut route.ports) {
                let Some(liveness) = port.liveness.as_mut().filter(|_| port.stream.is_some()) else {
                    continue;
                };
                liveness.forgive(pause, now);
                if port.is_muted {
                    continue;
                }
                if !port.is_cut && liveness.is_heartbeat_due(now, &rules) {
                    due.push((id, rank));
                }
                if !port.has_left
                    && let Some(LivenessChange::Dead(silence)) = liveness.check(now, &rules)
                {
                    dead.push((id, rank, silence));
                }
            }
        }
        for (route, rank) in due {
            self.send(route, rank, Header::bare(Operation::Heartbeat), Content::Nothing, context);
        }
        for (route, rank, silence) in dead {
            let message =
                format!("rank {rank} was lost: it has not been heard for {} s", silence.as_secs_f64());
            self.fault(route, rank, rank, message, FaultCause::Silence, context);
        }
        self.carry_out(context);
    }

    fn handle(&mut self, event: Event, context: &mut Context<'_>) {
        self.control.handle(event, context.agenda.now());
        self.carry_out(context);
    }

    /// Does what the job control wants, as the job controller does.
    fn carry_out(&mut self, context: &mut Context<'_>) {
        loop {
            let outputs = self.control.take_outputs();
            if outputs.is_empty() {
                break;
            }
            for output in outputs {
                match output {
                    Output::Open(_) => {
                        for &route in self.routes.keys() {
                            let passing = context.random.time(&PASSING);
                            context.wake_in(self.process, passing, Wake::Opened(route));
                        }
                    }
                    Output::AdmitStreams(_) => {
                        self.directory.is_open = true;
                    }
                    Output::RefuseStreams { message, .. } => self.directory.ended = Some(message),
                    Output::End { core, failure, .. } => self.free(core, failure.as_ref(), context),
                    Output::ReportEnd(report) => self.end = Some(report.end),
                    Output::Forget(_) => self.has_forgotten = true,
                    _ => {}
                }
            }
            self.control.check_time(context.agenda.now(), &self.directory);
        }
        self.control.check_time(context.agenda.now(), &self.directory);
    }

    /// A core frees its routes of the job and closes their streams, with the reason if it failed.
    fn free(&mut self, core: u16, failure: Option<&Failure>, context: &mut Context<'_>) {
        let placement = self.plan.composed.clone();
        let of_core = |id: &RouteId| placement.placements[0].routes()[usize::from(*id)].interface == core;
        let ended: Vec<RouteId> = self.routes.keys().copied().filter(of_core).collect();
        for id in ended {
            for rank in 0..self.plan.workers {
                if let Some(failure) = failure {
                    let content = Content::Failure(failure.clone());
                    self.send(id, rank, Header::bare(Operation::Failure), content, context);
                }
                let port = self.port(id, rank);
                port.is_muted = true;
                if let Some(stream) = port.stream.take() {
                    context.close(stream, self.process);
                }
            }
            let route = self.routes.get_mut(&id).expect("an own route");
            if std::mem::replace(&mut route.is_open, false) {
                let event = CoreEvent::Closed { counters: JobCounters::default(), left_out: Vec::new() };
                self.control.handle(Event::Core { namespace: NAMESPACE, event }, context.agenda.now());
            }
        }
    }
}
