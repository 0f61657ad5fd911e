//! What the job controller does when the rules want something.

use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::auth::Namespace;
use paramhub_core::job_control::{EndReport, Event, Output, RoleChange};
use paramhub_core::placement::RouteId;
use paramhub_core::service::HubCommand;
use paramhub_core::standbys::Role;
use paramhub_core::stream_admission::{JobStreams, StreamTerms};
use tracing::{info, warn};

use super::JobController;
use super::job::HubJob;
use crate::checkpoint::CheckpointCommand;
use crate::core::CoreCommand;
use crate::directory::JobEntry;
use crate::events::{ControllerEvent, ReportEvent};
use crate::local::JobMemory;
use crate::parent_dialler::{ParentDialler, ParentStream};

impl JobController {
    /// Carries out what the rules want, until they want nothing more.
    pub(super) fn carry_out_all(&mut self) {
        loop {
            let outputs = self.control.take_outputs();
            if outputs.is_empty() {
                return;
            }
            outputs.into_iter().for_each(|output| self.carry_out(output));
        }
    }

    fn carry_out(&mut self, output: Output) {
        match output {
            Output::Load(namespace) => self.load(namespace),
            Output::Open(namespace) => self.open(namespace),
            Output::OpenFurther { namespace, routes } => self.open_further(namespace, &routes),
            Output::AdmitStreams(namespace) => self.admit_streams(namespace),
            Output::RefuseStreams { namespace, message } => self.directory.remove(namespace, message),
            Output::Link { namespace, until } => self.link(namespace, until),
            Output::StartCheckpoints(namespace) => self.start_checkpoint_writer(namespace),
            Output::TakeLastCheckpoint { namespace, before } => {
                self.take_last_checkpoint(namespace, before);
            }
            Output::StopCheckpoints(namespace) => self.stop_checkpoint_writer(namespace),
            Output::Notify { namespace, core, to, notice } => {
                self.send_to_core(core, CoreCommand::Notify { namespace, to, notice })
            }
            Output::RefuseRank { namespace, rank, epoch } => {
                self.directory.refuse_rank(namespace, rank, epoch);
            }
            Output::AdmitRank { namespace, rank, epoch } => {
                self.directory.admit_rank(namespace, rank, epoch);
            }
            Output::ChangeRank { namespace, core, rank, epoch, change } => {
                self.send_to_core(core, CoreCommand::ChangeRank { namespace, rank, epoch, change });
            }
            Output::Rewind { namespace, core, epoch, notice } => {
                self.send_to_core(core, CoreCommand::Rewind { namespace, epoch, notice });
            }
            Output::ChangeRole { namespace, core, route, role } => {
                self.change_role(namespace, core, route, role);
            }
            Output::NoteShares { namespace, shares, later_hubs } => {
                if let Some(job) = self.jobs.get_mut(&namespace) {
                    let before = job.served_routes();
                    (job.shares, job.later_hubs) = (shares, later_hubs);
                    let served = job.served_routes();
                    // The writer's channel has room for one such change of each route.
                    if served != before {
                        self.pass_to_writer(namespace, CheckpointCommand::Serve(served));
                    }
                }
            }
            Output::LinkStandbys { namespace, routes, until } => {
                self.link_standbys(namespace, &routes, until);
            }
            Output::SendElsewhere { namespace, message } => self.directory.send_elsewhere(namespace, message),
            Output::End { namespace, core, failure } => {
                self.send_to_core(core, CoreCommand::End { namespace, failure });
            }
            Output::Forget(namespace) => drop(self.jobs.remove(&namespace)),
            Output::Plan(plan) => {
                if let Some(event) = self.command(HubCommand::Allocate(plan)) {
                    self.handle(event);
                }
            }
            Output::Probe { order, refused } => {
                self.prober.begin(order, refused, &self.directory, &self.own_sender);
            }
            Output::Report(event) => self.send_report(ReportEvent::Event(event)),
            Output::ReportEnd(EndReport { end, since, counters }) => {
                self.send_report(ReportEvent::Ended(end, self.instant(since), counters));
            }
            Output::ReportLeaving => self.send_report(ReportEvent::Leaving),
            Output::StopCores => self.cores.iter().for_each(|core| core.send(CoreCommand::Stop)),
            Output::Info(message) => info!("{message}"),
            Output::Warning(message) => warn!("{message}"),
        }
    }

    fn open(&mut self, namespace: Namespace) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        let mut restored = std::mem::take(&mut job.restored).into_iter();
        for (core, plan) in std::mem::take(&mut job.shards) {
            let (plan, restored) = (Box::new(plan), restored.next().map(Box::new));
            self.cores[usize::from(core)].send(CoreCommand::Open { plan, restored });
        }
    }

    /// Lets cores allocate further routes, for which this hub is a standby, and admits the streams of the hubs that serve them.
    fn open_further(&mut self, namespace: Namespace, routes: &[RouteId]) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        for (id, route, plan) in job.take_further() {
            debug_assert!(routes.contains(&id), "the rules have accepted what was planned");
            let ports = plan.ports.clone();
            self.cores[usize::from(route.core)]
                .send(CoreCommand::Open { plan: Box::new(plan), restored: None });
            self.directory.add_standby_route(namespace, id, (route.interface, route.core), ports);
        }
    }

    fn admit_streams(&self, namespace: Namespace) {
        let Some(job) = self.jobs.get(&namespace) else { return };
        let terms = StreamTerms {
            name: job.name.clone(),
            secrets: job.secrets.clone(),
            composed: job.composed.clone(),
            first_workers: job.first_workers,
            site: job.site,
            position: job.position,
            ports: job.ports.clone(),
            routes: job.own_routes().map(|(id, route)| ((route.interface, route.core), id)).collect(),
            standby_routes: job
                .standby_routes()
                .map(|(id, route)| (id, (route.interface, route.core)))
                .collect(),
            roles: job.roles.clone(),
            resumes: job.resuming.resumes(),
            encrypts: job.encrypts,
        };
        let streams = JobStreams::new(terms);
        let (state_slots, memory) = (job.state_slots, JobMemory::new(&job.settings, job.features));
        let entry = JobEntry { streams, state_slots, memory };
        self.directory.insert(namespace, entry);
    }

    /// Has a core change what this hub is for a route, and admits the streams of the route accordingly. A core serves a route
    /// before streams of workers come to it, and refuses those that have been admitted before it ceased to.
    fn change_role(&mut self, namespace: Namespace, core: u16, route: RouteId, change: RoleChange) {
        let (role, standby) = match change {
            RoleChange::TakeOver | RoleChange::GoOnAlone => (Role::Serves { has_standby: false }, None),
            RoleChange::TakeStandby { standby } => (Role::Serves { has_standby: true }, Some(standby)),
            RoleChange::Doubt | RoleChange::Stop => (Role::None, None),
        };
        if change == RoleChange::Stop {
            if let Some(job) = self.jobs.get_mut(&namespace) {
                job.give_up(route);
            }
            self.pass_to_writer(namespace, CheckpointCommand::GiveUp(route));
        }
        let mut counterpart = String::new();
        if let (Some(job), Some(standby)) = (self.jobs.get_mut(&namespace), standby) {
            counterpart = job.name_of_hub(standby);
            let ports = job.ports.get_mut(&route);
            ports.into_iter().for_each(|ports| *ports = Arc::new(ports.as_ref().clone().with_standby()));
        }
        self.send_to_core(core, CoreCommand::ChangeRole { namespace, route, change, counterpart });
        self.directory.change_role(namespace, route, role);
    }

    /// Opens the streams to the sites above, on a thread of its own.
    fn link(&mut self, namespace: Namespace, until: Duration) {
        let Some(job) = self.jobs.get(&namespace) else { return };
        let above = streams_above(job);
        if above.is_empty() {
            return;
        }
        let dialler = self.parent_dialler(namespace, job, self.instant(until));
        let controller = self.own_sender.clone();
        let dials = move || {
            if let Err((_, reason)) = dialler.dial_all(&above) {
                // If the job controller is gone, no jobs are left.
                let _ = controller.send(ControllerEvent::SitesUnreachable { namespace, reason });
            }
        };
        if let Err(error) = std::thread::Builder::new().name("hub-dialler".into()).spawn(dials) {
            let reason = format!("the hub cannot start a thread: {error}");
            self.handle(Event::CannotLink { namespace, reason });
        }
    }

    /// Opens the streams of routes to their new standbys, on a thread of its own.
    fn link_standbys(&mut self, namespace: Namespace, routes: &[RouteId], until: Duration) {
        let Some(job) = self.jobs.get(&namespace) else { return };
        let standby = |stream: ParentStream| stream.standby().map(|standby| (stream, standby));
        let streams = streams_above(job).into_iter().filter(|stream| routes.contains(&stream.route()));
        let streams: Vec<(ParentStream, u16)> = streams.filter_map(standby).collect();
        let Some(first) = streams.first().map(|(stream, standby)| (stream.route(), *standby)) else { return };
        let dialler = self.parent_dialler(namespace, job, self.instant(until));
        let controller = self.own_sender.clone();
        let dials = move || {
            for (stream, standby) in streams {
                if let Err((route, reason)) = dialler.dial_all(std::slice::from_ref(&stream)) {
                    let event = ControllerEvent::StandbyUnreachable { namespace, route, standby, reason };
                    // If the job controller is gone, no jobs are left.
                    let _ = controller.send(event);
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("hub-dialler".into()).spawn(dials) {
            let (route, standby) = first;
            let reason = format!("the hub cannot start a thread: {error}");
            self.handle(Event::StandbyUnreachable { namespace, route, standby, reason });
        }
    }

    /// Opens the stream of a port to a site above again, on a thread of its own. If that fails, the core loses the site.
    pub(super) fn dial_again(
        &mut self,
        namespace: Namespace,
        route: RouteId,
        port: u32,
        attempt: u32,
        until: Option<Instant>,
    ) {
        let (now, Some(job)) = (Instant::now(), self.jobs.get_mut(&namespace)) else { return };
        let Some(until) = until else { return };
        let cuts = job.cuts.entry((route, port)).or_default();
        if !cuts.may_retry(now, job.resuming.redial_grace) {
            return;
        }
        cuts.reopened(now);
        let job = &self.jobs[&namespace];
        let Some(above) = streams_above(job).into_iter().find(|above| above.is_at(route, port)) else {
            return;
        };
        let dialler = self.parent_dialler(namespace, job, until);
        let dials = move || dialler.dial_again(&above, attempt);
        // The core waits for the stream until then, and for no longer without this thread.
        let _ = std::thread::Builder::new().name("hub-dialler".into()).spawn(dials);
    }

    fn parent_dialler(&self, namespace: Namespace, job: &HubJob, deadline: Instant) -> ParentDialler {
        let cores = job.routes.iter().map(|&(id, route)| (id, self.cores[usize::from(route.core)].clone()));
        let sources = job.routes.iter().filter_map(|&(id, route)| {
            let source = self.sources.get(usize::from(route.interface))?.clone()?;
            Some((id, source))
        });
        ParentDialler {
            namespace,
            secrets: job.secrets.clone(),
            site: job.site,
            composed: job.composed.clone(),
            state_slots: job.state_slots,
            encrypts: job.encrypts,
            deadline,
            cores: cores.collect(),
            sources: sources.collect(),
            between_hubs: self.between_hubs.clone(),
        }
    }

    /// Queues a report without ever waiting: a manager that does not listen must not block the hub.
    fn send_report(&self, event: ReportEvent) {
        if let Err(error) = self.reports.try_send(event) {
            warn!("the connection manager will not hear of an event: {error}");
        }
    }

    fn send_to_core(&self, core: u16, command: CoreCommand) {
        self.cores[usize::from(core)].send(command);
    }

    /// The moment that the rules call so.
    fn instant(&self, time: Duration) -> Instant {
        self.started + time
    }
}

/// The streams of a job's routes here to sites above and to standbys.
fn streams_above(job: &HubJob) -> Vec<ParentStream> {
    let ports = job.ports.iter().map(|(&route, ports)| (route, &**ports));
    ParentStream::of(ports, &job.composed, (&job.shares, &job.later_hubs))
}
