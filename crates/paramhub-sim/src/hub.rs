//! A hub: the production state machines of its jobs and chunks, and what its threads do around them.

mod dialling;
mod further;
mod job;
mod link;
mod new_standby;
mod ranks;
mod rewind;
mod route;
mod sending;
mod standby;
mod streams;

use std::sync::Arc;
use std::time::Duration;

use paramhub_core::between_sites;
use paramhub_core::composition::Place;
use paramhub_core::job_control::{CoreEvent, Event, HubTerms, JobControl, JobLimits, Output};
use paramhub_core::liveness::{HEARTBEAT, LivenessRules, OwnPauses};
use paramhub_core::placement::RouteId;
use paramhub_core::service::{HubCommand, HubEvent, HubJobCounters, JobCounters, JobEnd, RegisterHub};
use paramhub_core::wire::{Failure, Header, Operation, VERSION};

use crate::job::{JobPlan, NAMESPACE, hub_shape};
use crate::message::Content;
use crate::network::{Arrival, Process, StreamId};
use crate::world::{Context, Plant, Wake};
use job::{Admitted, HubJob};
use link::ManagerLink;
use route::RouteState;

/// How long a core takes to allocate a route, and the acceptor to pass on a stream.
const PASSING: std::ops::Range<Duration> = Duration::from_micros(10)..Duration::from_millis(20);

/// A hub and its job.
pub(crate) struct Hub {
    process: Process,
    plan: Arc<JobPlan>,
    control: JobControl,
    link: ManagerLink,
    /// The job that it was asked to allocate last.
    job: Option<HubJob>,
    /// How often it was asked to allocate a job that it did not have.
    allocations: u32,
    /// Why no stream of the job is admitted any more.
    refused: Option<String>,
    /// The job goes on at other hubs, where callers are to try.
    is_elsewhere: bool,
    own_pauses: OwnPauses,
    /// How the job has ended, as the hub reports it to the manager.
    end: Option<JobEnd>,
}

impl Hub {
    /// A hub without jobs, which is about to join its manager.
    pub(crate) fn new(
        number: u16,
        routes: u16,
        place: Place,
        plan: &Arc<JobPlan>,
        context: &mut Context<'_>,
    ) -> Hub {
        let process = Process::Hub(number);
        let shape = hub_shape(number, routes);
        let terms = HubTerms {
            interfaces: shape.interfaces.len(),
            interface_names: (0..routes).map(|interface| format!("eth{interface}")).collect(),
            memory_bytes: 1 << 30,
            job_limits: JobLimits::default(),
            descriptors_max: 1 << 16,
        };
        let offer = RegisterHub {
            protocol: VERSION,
            shape,
            place,
            machine: String::new(),
            keeps_checkpoints: None,
            encrypt: false,
            labels: Vec::new(),
        };
        let hub = Hub {
            process,
            plan: plan.clone(),
            control: JobControl::new(terms),
            link: ManagerLink::new(process, offer, context),
            job: None,
            allocations: 0,
            refused: None,
            is_elsewhere: false,
            own_pauses: OwnPauses::new(context.instant(), HEARTBEAT),
            end: None,
        };
        hub.next_tick(context);
        hub
    }

    /// Whether it has no job, and its manager knows so.
    pub(crate) fn is_idle(&self) -> bool {
        self.job.as_ref().is_none_or(|job| job.is_forgotten) && self.link.has_reported()
    }

    /// Its position in the job, if it has had a part in it.
    pub(crate) fn position(&self) -> Option<u16> {
        self.job.as_ref().map(|job| job.hub)
    }

    /// Whether it has opened all streams to other hubs of which it knows.
    pub(crate) fn is_linked(&self) -> bool {
        self.job.as_ref().is_none_or(HubJob::is_linked)
    }

    /// How the job has ended, as the hub reports it.
    pub(crate) fn end(&self) -> Option<&JobEnd> {
        self.end.as_ref()
    }

    /// An end of a stream learns something.
    pub(crate) fn arrived(&mut self, stream: StreamId, arrival: Arrival, context: &mut Context<'_>) {
        for command in self.link.arrived(stream, &arrival, context) {
            self.command(command, context);
        }
        self.stream_arrived(stream, arrival, context);
    }

    /// A time has come.
    pub(crate) fn wake(&mut self, wake: Wake, context: &mut Context<'_>) {
        match wake {
            Wake::Tick => {
                self.tick(context);
                self.next_tick(context);
            }
            Wake::Call(line, awaited) => self.link.call_woken(line, awaited, context),
            Wake::Resume(line) => {
                let living = self.living();
                self.link.resume(line, living, context);
            }
            Wake::Opened { allocation, route } => {
                if allocation == self.allocations {
                    self.opened(route, context);
                }
            }
            Wake::Freed { allocation } => {
                if allocation == self.allocations {
                    self.given_up(context);
                }
            }
            Wake::GoBack { allocation, route } => {
                if allocation == self.allocations {
                    self.go_back(route, context);
                }
            }
            Wake::DialLink { allocation, link } => {
                if allocation == self.allocations {
                    self.link_paused(link, context);
                }
            }
            Wake::LinkTimeout { allocation, link, stream } => {
                if allocation == self.allocations {
                    self.link_timed_out(link, stream, context);
                }
            }
            Wake::Adopt { stream, place, standby } => self.adopt(stream, place, standby, context),
            Wake::CutOver { stream } => self.cut_over(stream, context),
            other => unreachable!("{other:?} is of others"),
        }
    }

    fn next_tick(&self, context: &mut Context<'_>) {
        let JobPlan { resuming, dead_after, .. } = &*self.plan;
        let routes = self.job.iter().flat_map(|job| job.routes.values());
        let rules =
            routes.map(|route| between_sites::shortest_liveness(resuming, &route.neighbours, *dead_after));
        let of_others = LivenessRules::of_stream(HEARTBEAT, *dead_after);
        let wait = rules.chain([of_others]).map(|rules| rules.check_every()).min();
        context.wake_in(self.process, wait.unwrap_or(HEARTBEAT), Wake::Tick);
    }

    /// The jobs of which cores have something.
    fn living(&self) -> Vec<HubJobCounters> {
        let has_any = |job: &HubJob| job.routes.values().any(|route| route.state == RouteState::Open);
        let living =
            HubJobCounters { namespace: NAMESPACE, counters: JobCounters::default(), left_out: Vec::new() };
        self.job.as_ref().filter(|job| has_any(job)).map(|_| living).into_iter().collect()
    }

    /// Passes a command of the manager to the job control.
    fn command(&mut self, command: HubCommand, context: &mut Context<'_>) {
        let event = match command {
            HubCommand::Allocate(ordered) if ordered.further.is_some() => self.plan_further(ordered),
            HubCommand::Allocate(ordered)
                if self.control.wants(ordered.namespace, ordered.epoch.number, ordered.hub as u16) =>
            {
                let (job, terms) = HubJob::plan(&self.plan, &ordered);
                context.ledger.arranged(&job.composed.composition, &ordered.shares);
                self.job = Some(job);
                self.end = None;
                self.allocations += 1;
                Event::Planned(Box::new(terms))
            }
            HubCommand::Allocate(ordered) => Event::AllocateAgain(ordered),
            HubCommand::ReportJobs { question } => Event::ReportJobs { question },
            HubCommand::Link { namespace } => Event::Link { namespace },
            HubCommand::Tell { namespace, rank, message } => Event::Tell { namespace, rank, message },
            HubCommand::Stop { namespace, reason, when } => Event::Stop { namespace, reason, when },
            HubCommand::LoseRank { namespace, rank, epoch, reason } => {
                Event::LoseRank { namespace, rank, epoch, reason }
            }
            HubCommand::Rewind { namespace, rank, epoch, reason } => {
                Event::Rewind { namespace, rank, epoch, reason }
            }
            HubCommand::ExpectRank { namespace, rank, epoch } => Event::ExpectRank { namespace, rank, epoch },
            HubCommand::Finish { namespace } => Event::Finish { namespace },
            HubCommand::ChangeShares { namespace, number, shares, later_hubs, reason } => {
                Event::ChangeShares { namespace, number, shares, later_hubs, reason }
            }
            HubCommand::JoinRank { namespace, rank, epoch, step } => {
                Event::JoinRank { namespace, rank, epoch, step }
            }
            other => {
                return context.ledger.violate(|| format!("{:?} cannot follow {other:?}", self.process));
            }
        };
        self.handle(event, context);
    }

    fn handle(&mut self, event: Event, context: &mut Context<'_>) {
        self.control.note_manager(self.link.lost_since());
        self.control.handle(event, context.agenda.now());
        self.carry_out(context);
    }

    fn handle_core(&mut self, event: CoreEvent, context: &mut Context<'_>) {
        self.handle(Event::Core { namespace: NAMESPACE, event }, context);
    }

    /// Passes an event of a core to the job control while what that wants is being done.
    fn handle_core_later(&mut self, event: CoreEvent, context: &mut Context<'_>) {
        self.control.handle(Event::Core { namespace: NAMESPACE, event }, context.agenda.now());
    }

    /// Does what the job control wants, as the job controller does.
    fn carry_out(&mut self, context: &mut Context<'_>) {
        loop {
            let mut outputs = self.control.take_outputs();
            if outputs.is_empty() {
                // Deadlines are looked at when everything else is done, as the job controller does.
                self.control.note_manager(self.link.lost_since());
                self.control.check_time(context.agenda.now(), &Admitted(self.job.as_ref()));
                outputs = self.control.take_outputs();
            }
            if outputs.is_empty() {
                return;
            }
            for output in outputs {
                match output {
                    Output::Open(_) => self.open(context),
                    Output::OpenFurther { .. } => self.open_further(context),
                    Output::AdmitStreams(_) => {
                        if let Some(job) = &mut self.job {
                            job.is_open = true;
                            // A former part of the job may have ended here.
                            (self.is_elsewhere, self.refused) = (false, None);
                        }
                    }
                    Output::NoteShares { shares, later_hubs, .. } => {
                        if let Some(job) = &mut self.job {
                            (job.shares, job.later_hubs) = (shares, later_hubs);
                        }
                    }
                    Output::LinkStandbys { routes, until, .. } => self.link_standbys(&routes, until, context),
                    Output::Link { until, .. } => self.link(until, context),
                    Output::RefuseStreams { message, .. } => self.refuse_streams(message),
                    Output::RefuseRank { rank, epoch, .. } => {
                        if let Some(job) = &mut self.job {
                            job.streams.lose_rank(rank, epoch);
                        }
                    }
                    Output::AdmitRank { rank, epoch, .. } => {
                        if let Some(job) = &mut self.job {
                            job.streams.admit_rank(rank, epoch);
                        }
                    }
                    Output::ChangeRank { core, rank, epoch, change, .. } => {
                        self.change_rank(core, rank, epoch, change, context);
                    }
                    Output::ChangeRole { route, role, .. } => self.change_role(route, role, context),
                    Output::SendElsewhere { .. } => self.send_elsewhere(),
                    Output::Rewind { core, epoch, notice, .. } => self.rewind(core, epoch, &notice, context),
                    Output::End { core, failure, .. } => self.free(core, failure.as_ref(), context),
                    Output::Report(event) => self.report(event, context),
                    Output::ReportEnd(report) => {
                        self.end = Some(report.end.clone());
                        context.trace(|| format!("{:?} has ended the job: {:?}", self.process, report.end));
                        self.link.report_end(report, context);
                    }
                    Output::Forget(_) => {
                        self.stop_dialling(context);
                        if let Some(job) = &mut self.job {
                            job.is_forgotten = true;
                        }
                    }
                    Output::Plan(ordered) => self.command(HubCommand::Allocate(ordered), context),
                    _ => {}
                }
            }
        }
    }

    /// No stream of the job is admitted any more, if any was.
    fn refuse_streams(&mut self, message: String) {
        if self.job.as_mut().is_some_and(|job| std::mem::take(&mut job.is_open)) {
            self.refused = Some(message);
        }
    }

    fn report(&mut self, event: HubEvent, context: &mut Context<'_>) {
        if context.plant == Some(Plant::TakesOverAlone) && matches!(event, HubEvent::HubLost { .. }) {
            self.take_over_alone(context);
        }
        self.link.report(event, context);
    }

    /// The cores allocate.
    fn open(&mut self, context: &mut Context<'_>) {
        let Some(job) = &self.job else { return };
        for &route in job.routes.keys() {
            let passing = context.random.time(&PASSING);
            let opened = Wake::Opened { allocation: self.allocations, route };
            context.wake_in(self.process, passing, opened);
        }
    }

    /// A core has allocated a route.
    fn opened(&mut self, id: RouteId, context: &mut Context<'_>) {
        let Some(job) = &mut self.job else { return };
        let route = job.route(id);
        if route.state == RouteState::Opening {
            route.state = RouteState::Open;
            self.handle_core(CoreEvent::Opened { missing_bytes: None, has_snapshot: false }, context);
        }
    }

    /// A core frees its routes of the job and closes their streams, with the reason if it failed.
    fn free(&mut self, core: u16, failure: Option<&Failure>, context: &mut Context<'_>) {
        let Some(job) = &self.job else { return };
        let of_core = job.routes.iter().filter(|(_, route)| route.core == core);
        let ended: Vec<RouteId> = of_core.map(|(&id, _)| id).collect();
        let now = context.agenda.now();
        for id in ended {
            // A core that has yet to allocate does that first.
            self.opened_and_freed(id, now);
            let Some(job) = &mut self.job else { return };
            for port in 0..job.route(id).neighbours.len() {
                if let Some(failure) = failure {
                    let content = Content::Failure(failure.clone());
                    self.send(id, port, Header::bare(Operation::Failure), content, context);
                }
                let Some(job) = &mut self.job else { return };
                let port = job.port(id, port);
                port.is_muted = true;
                if let Some(stream) = port.stream.take() {
                    context.close(stream, self.process);
                }
            }
        }
    }

    fn opened_and_freed(&mut self, id: RouteId, now: Duration) {
        let Some(job) = &mut self.job else { return };
        let before = std::mem::replace(&mut job.route(id).state, RouteState::Freed);
        let events = match before {
            RouteState::Opening => &[true, false][..],
            RouteState::Open => &[false],
            RouteState::Freed => &[],
        };
        for &has_opened in events {
            let event = match has_opened {
                true => CoreEvent::Opened { missing_bytes: None, has_snapshot: false },
                false => CoreEvent::Closed { counters: JobCounters::default(), left_out: Vec::new() },
            };
            self.control.handle(Event::Core { namespace: NAMESPACE, event }, now);
        }
    }
}
