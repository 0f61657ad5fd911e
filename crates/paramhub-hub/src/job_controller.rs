//! The thread that opens jobs on the cores and ends them on all cores at once.

mod awaited;
mod checkpoints;
#[cfg(test)]
mod combinations_tests;
mod job;
mod limits;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paramhub_core::auth::Namespace;
use paramhub_core::limits::RESUME_S;
use paramhub_core::placement::HubShape;
use paramhub_core::service::{
    CauseKind, HubCommand, HubEvent, HubJobCounters, JobEnd, JobPlan, ProbeReport, StopWhen, add_by_rank,
};
use paramhub_core::wire::{Failure, Notice};
use paramhub_kernels::Registry;
use tracing::{info, warn};

use crate::checkpoint::{CheckpointConfig, CheckpointStatuses};
use crate::config::JobLimits;
use crate::core::{
    CoreCommand, CoreEvent, CoreHandle, FaultCause, LateRank, Neighbour, Restored, ShardPlan, panic_text,
};
use crate::directory::{Directory, JobEntry};
use crate::local::JobMemory;
use crate::manager_link::ManagerOutage;
use crate::parent_dialler::{ParentDialler, ParentStream};
use crate::probe::Prober;
use checkpoints::CheckpointPlan;
use job::{HubJob, JobPhase};

/// How often the job controller looks at its jobs' deadlines.
const TICK: Duration = Duration::from_millis(200);
/// How long the workers of a job that continues may take to connect over another interface.
const RESUME: Duration = Duration::from_secs(RESUME_S);
/// How long the frames that workers have sent may take to arrive, once the workers' processes have ended.
const CONCLUDED: Duration = Duration::from_secs(10);
/// If the manager has been out of reach for this long and a rank is silent, too, the hub assumes that it is
/// cut off itself.
const CUT_OFF: Duration = Duration::from_secs(2);
/// How long ending jobs may take when the hub stops.
const STOP: Duration = Duration::from_millis(600);

/// An event for the job controller.
#[derive(Debug)]
pub(crate) enum ControllerEvent {
    /// A command of the manager.
    Command(HubCommand),
    /// A report of a core.
    Core(CoreEvent),
    /// The hubs of the sites above cannot be reached.
    SitesUnreachable { namespace: Namespace, reason: String },
    /// Interfaces, numbered as in the hub's shape, have gone down for this reason, or are up again.
    Interfaces { numbers: Range<u16>, down: Option<String> },
    /// A probe has ended.
    Probed(ProbeReport),
    /// A job's checkpoint has been read for its shards, or cannot be.
    Loaded {
        namespace: Namespace,
        shards: Vec<(u16, ShardPlan)>,
        result: Result<(u32, Vec<Arc<Restored>>), String>,
    },
    /// The last checkpoint of a job is in memory, or will not be taken.
    LastCheckpointTaken { namespace: Namespace },
    /// The last checkpoint of a job that goes on, and whose workers are about to be ended, is in memory or
    /// will not be taken.
    CheckpointKept { namespace: Namespace },
    /// The hub shuts down.
    Stop,
}

/// A report for the manager.
#[derive(Debug)]
pub(crate) enum ReportEvent {
    Event(HubEvent),
    /// A job has ended at this time. The counters are included because its core has forgotten them.
    Ended(JobEnd, Instant, HubJobCounters),
    /// The hub is about to stop.
    Leaving,
}

/// The state of the job controller: the hub's jobs, its cores and its interfaces.
pub(crate) struct JobController {
    pub(crate) events: Receiver<ControllerEvent>,
    /// Its own channel, for threads that answer later.
    pub(crate) own_sender: SyncSender<ControllerEvent>,
    pub(crate) cores: Vec<CoreHandle>,
    pub(crate) directory: Arc<Directory>,
    pub(crate) reports: SyncSender<ReportEvent>,
    /// Since when the manager has been out of reach.
    pub(crate) outage: Arc<ManagerOutage>,
    pub(crate) registry: Registry,
    pub(crate) shape: HubShape,
    pub(crate) memory_bytes: u64,
    pub(crate) job_limits: JobLimits,
    /// How many files and sockets the process may have open.
    pub(crate) descriptors_max: u64,
    pub(crate) jobs: HashMap<Namespace, HubJob>,
    /// The interfaces that do not work, with the reason.
    pub(crate) interfaces_down: BTreeMap<u16, Down>,
    /// The names of the interfaces for people, in the order of the shape.
    pub(crate) interface_names: Vec<String>,
    pub(crate) prober: Prober,
    pub(crate) checkpoints: Option<CheckpointConfig>,
    pub(crate) checkpoint_statuses: CheckpointStatuses,
    /// The threads that still write checkpoints of jobs that are over.
    pub(crate) writing: Vec<JoinHandle<()>>,
}

/// An interface that does not work.
#[derive(Debug)]
pub(crate) struct Down {
    reason: String,
    since: Instant,
}

impl JobController {
    /// Handles events until the hub stops.
    pub(crate) fn run(mut self) {
        loop {
            match self.events.recv_timeout(TICK) {
                Ok(ControllerEvent::Command(command)) => self.handle_command(command),
                Ok(ControllerEvent::Core(event)) => self.handle_core_event(event),
                Ok(ControllerEvent::SitesUnreachable { namespace, reason }) => {
                    self.fail(namespace, CauseKind::PeerLost, None, reason);
                }
                Ok(ControllerEvent::Interfaces { numbers, down }) => self.note_interfaces(numbers, down),
                Ok(ControllerEvent::Probed(report)) => self.report(HubEvent::Probed(report)),
                Ok(ControllerEvent::Loaded { namespace, shards, result }) => {
                    self.loaded(namespace, shards, result)
                }
                Ok(ControllerEvent::LastCheckpointTaken { namespace }) => self.taken(namespace),
                Ok(ControllerEvent::CheckpointKept { namespace }) => {
                    self.report(HubEvent::Kept { namespace })
                }
                Ok(ControllerEvent::Stop) | Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.look_at_deadlines();
            self.fail_cut_off();
        }
        self.stop();
    }

    fn handle_command(&mut self, command: HubCommand) {
        match command {
            HubCommand::Allocate(plan) => {
                let namespace = plan.namespace;
                // A command can come twice, since the answer to the first may have been lost.
                if !self.jobs.contains_key(&namespace)
                    && let Err(reason) = self.allocate(*plan)
                {
                    warn!("a job was refused: {reason}");
                    self.report(HubEvent::Refused { namespace, reason });
                }
            }
            HubCommand::Link { namespace } => self.link(namespace),
            HubCommand::Tell { namespace, rank, message } => self.notify_all(namespace, rank, &message),
            HubCommand::Probe(order) => {
                // A probe would take from a job the bandwidth that it measures. The manager asks only if it
                // knows of no job.
                let job = self.jobs.values().next();
                let refused = job.map(|job| format!("job `{}` runs there", job.name));
                self.prober.begin(order, refused, &self.directory, &self.own_sender);
            }
            HubCommand::Stop { namespace, reason, when } => self.handle_stop(namespace, reason, when),
        }
    }

    fn handle_stop(&mut self, namespace: Namespace, reason: String, when: StopWhen) {
        let job = self.jobs.get_mut(&namespace);
        match (job, when) {
            (_, StopWhen::WorkersEnding) => self.announce_end(namespace, reason),
            (None, _) => {
                self.report(HubEvent::Ended(JobEnd::failed(namespace, reason, CauseKind::Hearsay)));
            }
            // Every worker has left: only the last checkpoint is missing, which will be there soon.
            (Some(job), _) if job.is_finishing => {}
            (Some(_), StopWhen::Now) => self.fail(namespace, CauseKind::Hearsay, None, reason),
            (Some(job), StopWhen::WorkersEnded) => {
                // Each stream brings a Leave or an end without one, and both decide the job's outcome.
                job.concluding.get_or_insert_with(|| (Instant::now() + CONCLUDED, reason));
            }
        }
    }

    fn allocate(&mut self, plan: JobPlan) -> Result<(), String> {
        let checkpoints = CheckpointPlan::of(&plan, self.checkpoints.as_ref())?;
        let resume =
            checkpoints.as_ref().and_then(|checkpoints| Some((checkpoints.clone(), checkpoints.resume?)));
        // The plan calls optimizers that were registered with the hub, whose own code may panic.
        let planned = AssertUnwindSafe(|| HubJob::plan(&plan, &self.shape, &self.registry, checkpoints));
        let (job, shards) = catch_unwind(planned).unwrap_or_else(|panic| {
            Err(format!(
                "job `{}` made its hub panic ({}): this is a fault of the hub, or of an optimizer or aggregator registered with \
                 it; report it with the hub's log",
                plan.name,
                panic_text(&*panic)
            ))
        })?;
        self.job_limits.admit(&job, self.jobs.values())?;
        limits::check_descriptors(&job, self.jobs.values(), self.descriptors_max)?;
        let taken: u64 = self.jobs.values().map(|job| job.memory_bytes).sum();
        let free = self.memory_bytes.saturating_sub(taken);
        if job.memory_bytes > free {
            let [needed, free, all] = [job.memory_bytes, free, self.memory_bytes].map(mebibytes);
            return Err(format!(
                "job `{}` needs {needed} MiB at this hub, which has {free} of {all} MiB free: use more hubs, end other \
                 jobs, or give the hub more with --memory",
                job.name
            ));
        }
        let down = job.routes.iter().find_map(|(_, route)| self.interfaces_down.get(&route.interface));
        if let Some(Down { reason: down, .. }) = down {
            return Err(format!(
                "job `{}` would have chunks at an interface of this hub that does not work: {down}. Mend it, or start the \
                 hub without it",
                job.name
            ));
        }
        let needed = mebibytes(job.memory_bytes);
        let uneven = job.placement().imbalance();
        info!(
            "job `{}`: {} workers, {} routes, {needed} MiB; largest over mean load {:.3} between hubs, {:.3} between \
             interfaces, {:.3} between cores",
            job.name,
            job.composed.composition.workers(),
            shards.len(),
            uneven.hubs,
            uneven.interfaces,
            uneven.cores
        );
        let (namespace, none) = (job.namespace, shards.is_empty());
        self.jobs.insert(namespace, job);
        match resume {
            Some((from, which)) if !none => self.load(namespace, &from, which, shards),
            _ => shards.into_iter().for_each(|(core, shard)| self.open(core, shard)),
        }
        if none {
            // The job is so small that this hub has none of its chunks.
            self.opened(namespace);
            self.finished(namespace);
        }
        Ok(())
    }

    /// Opens the streams to the sites above, on a thread of its own: every hub of the job has allocated.
    fn link(&mut self, namespace: Namespace) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        let above =
            ParentStream::of(job.ports.iter().map(|(&route, ports)| (route, &**ports)), &job.composed);
        // A command can come twice, since the answer to the first may have been lost.
        if above.is_empty() || std::mem::replace(&mut job.is_linked, true) {
            return;
        }
        let cores = job.routes.iter().map(|&(id, route)| (id, self.cores[usize::from(route.core)].clone()));
        let dialler = ParentDialler {
            namespace,
            nonce: job.nonce,
            site: job.site,
            composed: job.composed.clone(),
            state_slots: job.state_slots,
            deadline: Instant::now() + job.rendezvous,
            cores: cores.collect(),
        };
        let controller = self.own_sender.clone();
        let dials = move || {
            if let Err(reason) = dialler.dial_all(&above) {
                // If the job controller is gone, no jobs are left.
                let _ = controller.send(ControllerEvent::SitesUnreachable { namespace, reason });
            }
        };
        if let Err(error) = std::thread::Builder::new().name("hub-dialler".into()).spawn(dials) {
            let reason = format!("the hub cannot start a thread: {error}");
            self.fail(namespace, CauseKind::Known, None, reason);
        }
    }

    fn open(&self, core: u16, shard: ShardPlan) {
        self.cores[usize::from(core)].send(CoreCommand::Open(Box::new(shard)));
    }

    fn handle_core_event(&mut self, event: CoreEvent) {
        match event {
            CoreEvent::Opened { namespace, missing_bytes, snapshot } => {
                let Some(job) = self.jobs.get_mut(&namespace) else { return };
                job.snapshots.extend(snapshot.map(|snapshot| *snapshot));
                match &mut job.state {
                    JobPhase::Opening { routes } => {
                        *routes -= 1;
                        match missing_bytes {
                            // The other routes need not open, since the job is refused.
                            Some(missing) => self.refuse_opened(namespace, missing),
                            None if *routes == 0 => self.opened(namespace),
                            None => {}
                        }
                    }
                    // The job was stopped before it was open, and this route has nothing to close.
                    JobPhase::Ending { .. } if missing_bytes.is_some() => self.route_closed(namespace),
                    _ => {}
                }
            }
            CoreEvent::Faulted { namespace, culprit, message, cause } => {
                let out_of_reach = self.outage.since().map(|since| since.elapsed());
                let (cause, message) = match (cause, out_of_reach.filter(|time| *time >= CUT_OFF)) {
                    (FaultCause::Kind(kind), _) => (kind, message),
                    (FaultCause::Silence, None) => (CauseKind::PeerLost, message),
                    (FaultCause::Silence, Some(time)) => {
                        let seconds = time.as_secs_f64();
                        let reason = format!(
                            "the hub is cut off: it has not reached its connection manager for {seconds:.0} s, and {message}"
                        );
                        (CauseKind::Known, reason)
                    }
                };
                self.fail(namespace, cause, rank_of(culprit), message);
            }
            CoreEvent::Panicked { namespace, reason } => self.fail(namespace, CauseKind::Known, None, reason),
            CoreEvent::Left { namespace, route, port } => {
                let Some(job) = self.jobs.get_mut(&namespace) else { return };
                job.left.insert((route, port));
                if job.everybody_left() {
                    self.finish(namespace);
                }
            }
            CoreEvent::Snapshot { namespace, snapshot } => self.pass_snapshot(namespace, snapshot),
            CoreEvent::Silence { namespace, neighbour, seconds } => {
                self.silence(namespace, neighbour, seconds)
            }
            CoreEvent::Moved { namespace, neighbour, by } => self.moved(namespace, neighbour, by),
            CoreEvent::Late { namespace, late } => self.late(namespace, late),
            CoreEvent::Awaited { namespace, route, event } => self.awaited(namespace, route, event),
            CoreEvent::Closed { namespace, counters, left_out } => {
                let Some(job) = self.jobs.get_mut(&namespace) else { return };
                job.counters += counters;
                add_by_rank(&mut job.left_out, &left_out);
                self.route_closed(namespace);
            }
        }
    }

    /// Notes that one route of an ending job holds nothing any more.
    fn route_closed(&mut self, namespace: Namespace) {
        let job = self.jobs.get_mut(&namespace).expect("a closing job is here");
        if let JobPhase::Ending { routes, .. } = &mut job.state {
            *routes -= 1;
            if *routes == 0 {
                self.closed(namespace);
            }
        }
    }

    /// Admits streams: every core has allocated.
    fn opened(&mut self, namespace: Namespace) {
        let job = self.jobs.get_mut(&namespace).expect("an opened job is here");
        job.state = JobPhase::Connecting { until: Instant::now() + job.rendezvous };
        let entry = JobEntry {
            name: job.name.clone(),
            nonce: job.nonce,
            composed: job.composed.clone(),
            site: job.site,
            ports: job.ports.clone(),
            state_slots: job.state_slots,
            routes: job.routes.iter().map(|&(id, route)| ((route.interface, route.core), id)).collect(),
            incarnations: HashMap::new(),
            taken: HashMap::new(),
            continues: job.continues,
            memory: JobMemory::new(&job.settings, job.features),
        };
        let placement_hash = job.placement().hash().to_hex().to_string();
        let resumed_step = job.resumed_step;
        self.directory.insert(namespace, entry);
        self.start_checkpoint_writer(namespace);
        self.report(HubEvent::Allocated { namespace, placement_hash, resumed_step });
    }

    /// Frees what was allocated, because some core could not allocate.
    fn refuse_opened(&mut self, namespace: Namespace, missing_bytes: u64) {
        let job = self.jobs.remove(&namespace).expect("an opening job is here");
        for core in job.cores() {
            self.cores[usize::from(core)].send(CoreCommand::End { namespace, failure: None });
        }
        let (missing, needed) = (mebibytes(missing_bytes), mebibytes(job.memory_bytes));
        let reason = format!(
            "job `{}` needs {needed} MiB at this hub, but the operating system had no {missing} MiB left for one part",
            job.name
        );
        warn!("{reason}");
        self.report(HubEvent::Refused { namespace, reason });
    }

    fn silence(&mut self, namespace: Namespace, who: Neighbour, seconds: Option<f64>) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        // Every stream reports the silence; one report is enough.
        let changed = match seconds {
            Some(_) => job.silent.insert(who),
            None => job.silent.remove(&who),
        };
        if !changed || matches!(job.state, JobPhase::Ending { .. }) {
            return;
        }
        let name = job.name_of(who);
        let message = match seconds {
            Some(seconds) => format!(
                "{name} of job `{}` has not been heard for {seconds:.0} s; the job fails after {:.0} s",
                job.name,
                job.dead_after.as_secs_f64()
            ),
            None => format!("{name} of job `{}` is heard again", job.name),
        };
        warn!("{message}");
        let notice = Notice { rank: rank_of(who), message: message.clone() };
        if let Some(core) = job.cores().next() {
            self.cores[usize::from(core)].send(CoreCommand::Notify { namespace, rank: 0, notice });
        }
        self.report(HubEvent::Noticed { namespace, message });
    }

    fn look_at_deadlines(&mut self) {
        let now = Instant::now();
        let mut late = Vec::new();
        for job in self.jobs.values_mut() {
            if let JobPhase::Connecting { until } = job.state {
                let missing = self.directory.missing(job.namespace);
                if missing.is_empty() {
                    job.state = JobPhase::Running;
                } else if now >= until {
                    let names: Vec<String> = missing.iter().take(8).map(|&who| job.name_of(who)).collect();
                    let dots = if missing.len() > names.len() { ", ..." } else { "" };
                    let message = format!(
                        "{}{dots} did not open all streams to the hub within {:.0} s",
                        names.join(", "),
                        job.rendezvous.as_secs_f64()
                    );
                    late.push((job.namespace, missing[0], message));
                }
            }
        }
        for (namespace, rank, message) in late {
            self.fail(namespace, CauseKind::PeerLost, rank_of(rank), message);
        }
        let is_over = |job: &&HubJob| job.concluding.as_ref().is_some_and(|(until, _)| now >= *until);
        let over: Vec<Namespace> = self.jobs.values().filter(is_over).map(|job| job.namespace).collect();
        for namespace in over {
            let concluding = self.jobs.get_mut(&namespace).and_then(|job| job.concluding.take());
            if let Some((_, reason)) = concluding.filter(|_| !self.jobs[&namespace].is_finishing) {
                self.fail(namespace, CauseKind::Hearsay, None, reason);
            }
        }
    }

    fn note_interfaces(&mut self, numbers: Range<u16>, down: Option<String>) {
        for number in numbers {
            match &down {
                Some(reason) => self
                    .interfaces_down
                    .insert(number, Down { reason: reason.clone(), since: Instant::now() }),
                None => self.interfaces_down.remove(&number),
            };
        }
    }

    /// Ends the jobs that have a stream over an interface that does not work: what is in flight there will
    /// not arrive. Streams over other interfaces carry the reason to the workers. A job that may continue
    /// gets some time for it, if there is another interface.
    fn fail_cut_off(&mut self) {
        let mut cut_off = Vec::new();
        let has_another = self.interfaces_down.len() < self.shape.interfaces.len();
        for (&number, Down { reason, since }) in &self.interfaces_down {
            for (&namespace, job) in &self.jobs {
                let mut through = self.directory.ports_through(namespace, number);
                if job.continues {
                    through.retain(|port| !job.left.contains(port));
                }
                let Some(&(route, port)) = through.iter().min() else { continue };
                let why = match job.continues {
                    false => format!("the hub's {reason}"),
                    true if !has_another => format!("the hub's {reason}; no other of its interfaces is left"),
                    true if since.elapsed() < RESUME => continue,
                    true => {
                        let name = job.name_of(job.ports[&route].neighbour(port));
                        format!(
                            "the hub's {reason}, and {name} did not come by another within {} s",
                            RESUME.as_secs()
                        )
                    }
                };
                cut_off.push((namespace, why));
            }
        }
        for (namespace, why) in cut_off {
            self.fail(namespace, CauseKind::Known, None, why);
        }
    }

    /// Reports once that all streams of a neighbour continue over another interface.
    fn moved(&mut self, namespace: Namespace, who: Neighbour, by: u16) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        // A resumed stream also shows that the neighbour is heard again.
        job.silent.remove(&who);
        let now = Instant::now();
        if job.moved.insert((who, by), now).is_some_and(|before| now - before < RESUME) {
            return;
        }
        let copies = (self.shape.interfaces.len() / self.interface_names.len().max(1)).max(1);
        let over = self.interface_names.get(usize::from(by) / copies).map_or("another way", String::as_str);
        let why = match self.interfaces_down.values().next() {
            Some(down) => format!("the hub's {}", down.reason),
            None => "the way it came by before is cut".to_string(),
        };
        let message = format!("{} of job `{}` goes on over {over}: {why}", job.name_of(who), job.name);
        info!("{message}");
        let notice = Notice { rank: rank_of(who), message: message.clone() };
        if let Some(core) = job.cores().next() {
            self.cores[usize::from(core)].send(CoreCommand::Notify { namespace, rank: 0, notice });
        }
        self.report(HubEvent::Noticed { namespace, message });
    }

    /// Reports to a late rank, and to rank 0, that steps end without it.
    fn late(&mut self, namespace: Namespace, LateRank { rank, steps, of }: LateRank) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        // Every core reports it; the first report of each magnitude is enough.
        let (magnitude, announced) = (steps.ilog10() + 1, job.announced_late.entry(rank).or_default());
        if magnitude <= *announced {
            return;
        }
        *announced = magnitude;
        let message = format!(
            "rank {rank} of job `{}` is late: {steps} of {of} steps so far have ended without it (stragglers = {})",
            job.name, job.stragglers
        );
        warn!("{message}");
        if let Some(core) = job.cores().next() {
            let others = [0, rank];
            for &to in if rank == 0 { &others[..1] } else { &others[..] } {
                let notice = Notice { rank: Some(rank), message: message.clone() };
                self.cores[usize::from(core)].send(CoreCommand::Notify { namespace, rank: to, notice });
            }
        }
        self.report(HubEvent::Noticed { namespace, message });
    }

    /// Ends a job that cannot go on; all its ranks receive the reason.
    fn fail(&mut self, namespace: Namespace, cause: CauseKind, rank: Option<u32>, reason: String) {
        let Some(job) = self.jobs.get(&namespace) else { return };
        if matches!(job.state, JobPhase::Ending { .. }) {
            return;
        }
        // The launcher has ended the rank that is now lost.
        let (cause, rank, reason) = match &job.announced_end {
            Some(announced) if cause != CauseKind::Known => (CauseKind::Known, None, announced.clone()),
            _ => (cause, rank, reason),
        };
        warn!("job `{}` failed: {reason}", job.name);
        let message = format!("job `{}` failed: {reason}", job.name);
        let end = JobEnd { rank, ..JobEnd::failed(namespace, reason, cause) };
        self.end(namespace, Some(Failure { rank, message }), end);
    }

    /// Ends a job whose workers have all left.
    fn finished(&mut self, namespace: Namespace) {
        self.end(namespace, None, JobEnd::finished(namespace));
    }

    fn end(&mut self, namespace: Namespace, failure: Option<Failure>, end: JobEnd) {
        self.stop_checkpoint_writer(namespace);
        let job = self.jobs.get_mut(&namespace).expect("an ending job is here");
        let message = failure.as_ref().map(|failure| failure.message.clone());
        self.directory
            .remove(namespace, message.unwrap_or_else(|| format!("job `{}` has finished", job.name)));
        job.state = JobPhase::Ending { routes: job.routes.len(), end, since: Instant::now() };
        let (cores, empty): (Vec<u16>, bool) = (job.cores().collect(), job.routes.is_empty());
        for core in cores {
            self.cores[usize::from(core)].send(CoreCommand::End { namespace, failure: failure.clone() });
        }
        if empty {
            self.closed(namespace);
        }
    }

    /// Removes a job of which nothing is left here.
    fn closed(&mut self, namespace: Namespace) {
        let job = self.jobs.remove(&namespace).expect("a closed job is here");
        if let JobPhase::Ending { end, since, .. } = job.state {
            if end.finished {
                info!("job `{}` finished", job.name);
            }
            let last = HubJobCounters { namespace, counters: job.counters, left_out: job.left_out };
            self.send_report(ReportEvent::Ended(end, since, last));
        }
    }

    fn report(&self, event: HubEvent) {
        self.send_report(ReportEvent::Event(event));
    }

    /// Queues a report without ever waiting: a manager that does not listen must not block the hub.
    fn send_report(&self, event: ReportEvent) {
        if let Err(error) = self.reports.try_send(event) {
            warn!("the connection manager will not hear of an event: {error}");
        }
    }

    fn stop(mut self) {
        self.send_report(ReportEvent::Leaving);
        self.leave_checkpoints();
        let living: Vec<Namespace> = self.jobs.keys().copied().collect();
        for namespace in living {
            self.fail(namespace, CauseKind::Known, None, "the hub is shutting down".to_string());
        }
        let deadline = Instant::now() + STOP;
        while !self.jobs.is_empty() {
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(ControllerEvent::Core(event)) => self.handle_core_event(event),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        for core in &self.cores {
            core.send(CoreCommand::Stop);
        }
        self.await_checkpoint_writers();
    }
}

/// The rank, if the neighbour is a worker.
fn rank_of(who: Neighbour) -> Option<u32> {
    match who {
        Neighbour::Worker(rank) => Some(rank),
        Neighbour::Site(_) => None,
    }
}

fn mebibytes(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}
