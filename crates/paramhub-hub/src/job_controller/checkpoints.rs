//! Checkpoints of jobs: which jobs may have them, with which one a job begins, and the last one before a job
//! ends.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::{Duration, Instant};

use paramhub_core::auth::Namespace;
use paramhub_core::checkpoint::{Every, Resume};
use paramhub_core::combinations::{Feature, conflict_of};
use paramhub_core::service::JobPlan;
use tracing::{info, warn};

use super::job::JobPhase;
use super::{ControllerEvent, JobController};
use crate::checkpoint::{
    CheckpointCommand, CheckpointConfig, CheckpointTask, CheckpointWriter, JobFolder, LAST, NotifyOnDrop,
    load,
};
use crate::core::{Restored, ShardPlan, Snapshot};

/// How long a stopping hub waits for the checkpoints that are being written.
const WRITE: Duration = Duration::from_secs(60);

/// When a job's checkpoints are written, and where they are stored.
#[derive(Clone, Debug)]
pub(super) struct CheckpointPlan {
    every: Option<Every>,
    pub(super) resume: Option<Resume>,
    folder: JobFolder,
    keep: usize,
    /// The hub's number among all hubs of the job.
    hub: u32,
}

impl CheckpointPlan {
    /// The checkpoints that a job asks for, or why this hub cannot provide them.
    pub(super) fn of(
        plan: &JobPlan,
        config: Option<&CheckpointConfig>,
    ) -> Result<Option<CheckpointPlan>, String> {
        let (every, resume) = (plan.options.checkpoint_every, plan.options.resume);
        if every.is_none() && resume.is_none() {
            return Ok(None);
        }
        let name = &plan.name;
        let Some(config) = config else {
            let conflict = conflict_of(Feature::NoCheckpointFolder, plan.options.features());
            return conflict.map_or(Ok(None), |conflict| {
                Err(format!("job `{name}`: this hub keeps no checkpoints: {conflict}"))
            });
        };
        let sites = &plan.composition.sites;
        let before: usize = sites[..usize::from(plan.site)].iter().map(|site| site.hubs.len()).sum();
        Ok(Some(CheckpointPlan {
            every,
            resume,
            folder: JobFolder::new(&config.folder, name),
            keep: config.keep,
            hub: before as u32 + plan.hub,
        }))
    }

    pub(super) fn are_written(&self) -> bool {
        self.every.is_some()
    }
}

impl JobController {
    /// Reads the checkpoint with which a job begins, on a thread of its own; [`ControllerEvent::Loaded`]
    /// follows.
    pub(super) fn load(
        &mut self,
        namespace: Namespace,
        from: &CheckpointPlan,
        which: Resume,
        shards: Vec<(u16, ShardPlan)>,
    ) {
        let (folder, controller) = (from.folder.clone(), self.own_sender.clone());
        let reads = move || {
            let plans: Vec<ShardPlan> = shards.iter().map(|(_, plan)| plan.clone()).collect();
            let result = load(&folder, which, &plans);
            // If the job controller is gone, no jobs are left.
            let _ = controller.send(ControllerEvent::Loaded { namespace, shards, result });
        };
        if let Err(error) = std::thread::Builder::new().name("hub-resume".into()).spawn(reads) {
            self.refuse_loading(namespace, format!("the hub cannot start a thread: {error}"));
        }
    }

    /// Continues a job whose checkpoint has been read, or refuses it if the checkpoint cannot be read.
    pub(super) fn loaded(
        &mut self,
        namespace: Namespace,
        shards: Vec<(u16, ShardPlan)>,
        result: Result<(u32, Vec<Arc<Restored>>), String>,
    ) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        if let JobPhase::Ending { .. } = job.state {
            // The job was stopped meanwhile. Its routes have nothing to free.
            shards.iter().for_each(|_| self.route_closed(namespace));
            return;
        }
        match result {
            Ok((step, restored)) => {
                info!("job `{}` goes on from its checkpoint of step {step}", job.name);
                job.resumed_step = Some(step);
                for ((core, shard), restored) in shards.into_iter().zip(restored) {
                    self.open(core, ShardPlan { restored: Some(restored), ..shard });
                }
            }
            Err(why) => self.refuse_loading(namespace, why),
        }
    }

    fn refuse_loading(&mut self, namespace: Namespace, why: String) {
        let Some(job) = self.jobs.remove(&namespace) else { return };
        let reason = format!("job `{}` cannot go on: {why}", job.name);
        warn!("{reason}");
        self.report(paramhub_core::service::HubEvent::Refused { namespace, reason });
    }

    /// Starts the checkpoint writer of a job that is open on all cores.
    pub(super) fn start_checkpoint_writer(&mut self, namespace: Namespace) {
        let job = self.jobs.get_mut(&namespace).expect("an opened job is here");
        let snapshots = std::mem::take(&mut job.snapshots);
        let Some(CheckpointPlan { every: Some(every), folder, keep, hub, .. }) = job.checkpoints.clone()
        else {
            return;
        };
        if snapshots.is_empty() {
            return;
        }
        let core_of =
            |route: u16| job.routes.iter().find(|(id, _)| *id == route).map(|(_, route)| route.core);
        let cores = snapshots.iter().filter_map(|snapshot| {
            Some((snapshot.route, self.cores[usize::from(core_of(snapshot.route)?)].clone()))
        });
        let task = CheckpointTask {
            name: job.name.clone(),
            namespace,
            settings: job.settings.clone(),
            workers: job.composed.composition.workers(),
            hub,
            every,
            keep,
            folder,
            resumed_step: job.resumed_step,
            cores: cores.collect(),
            snapshots,
        };
        match CheckpointWriter::start(task, self.checkpoint_statuses.clone()) {
            Ok(checkpoint_writer) => job.checkpoint_writer = Some(checkpoint_writer),
            Err(error) => {
                warn!("job `{}` has no checkpoints: the hub cannot start a thread: {error}", job.name)
            }
        }
    }

    pub(super) fn pass_snapshot(&self, namespace: Namespace, snapshot: Box<Snapshot>) {
        // If the job has ended meanwhile, the copy is dropped.
        if let Some(checkpoint_writer) =
            self.jobs.get(&namespace).and_then(|job| job.checkpoint_writer.as_ref())
        {
            checkpoint_writer.send(CheckpointCommand::Snapshot(snapshot));
        }
    }

    /// Ends a job whose workers have all left, with a last checkpoint if it has any.
    pub(super) fn finish(&mut self, namespace: Namespace) {
        let job = self.jobs.get_mut(&namespace).expect("a finished job is here");
        if matches!(job.state, JobPhase::Ending { .. }) || std::mem::replace(&mut job.is_finishing, true) {
            return;
        }
        let taken =
            notify_on_drop(self.own_sender.clone(), ControllerEvent::LastCheckpointTaken { namespace });
        if !job
            .checkpoint_writer
            .as_ref()
            .is_some_and(|checkpoint_writer| checkpoint_writer.send(CheckpointCommand::Finish { taken }))
        {
            self.finished(namespace);
        }
    }

    /// Ends a job whose last checkpoint is in memory, or will not be taken.
    pub(super) fn taken(&mut self, namespace: Namespace) {
        let Some(job) = self.jobs.get(&namespace) else { return };
        if job.is_finishing && !matches!(job.state, JobPhase::Ending { .. }) {
            self.finished(namespace);
        }
    }

    /// Notes that the workers of a job are about to be ended, and why. Takes a last checkpoint while the job
    /// goes on, if the workers reach a step together soon.
    pub(super) fn announce_end(&mut self, namespace: Namespace, reason: String) {
        let kept = notify_on_drop(self.own_sender.clone(), ControllerEvent::CheckpointKept { namespace });
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        job.announced_end.get_or_insert(reason);
        if let Some(checkpoint_writer) = &job.checkpoint_writer
            && !job.is_finishing
            && !matches!(job.state, JobPhase::Ending { .. })
        {
            job.has_left_last = true;
            checkpoint_writer.send(CheckpointCommand::Finish { taken: kept });
        }
    }

    /// Takes the last checkpoints while the jobs go on, before the hub stops.
    pub(super) fn leave_checkpoints(&mut self) {
        let mut waiting: HashSet<Namespace> = HashSet::new();
        for (&namespace, job) in self.jobs.iter().filter(|(_, job)| !job.has_left_last) {
            let Some(checkpoint_writer) = &job.checkpoint_writer else { continue };
            let taken =
                notify_on_drop(self.own_sender.clone(), ControllerEvent::LastCheckpointTaken { namespace });
            if job.is_finishing || checkpoint_writer.send(CheckpointCommand::Finish { taken }) {
                waiting.insert(namespace);
            }
        }
        let deadline = Instant::now() + LAST + Duration::from_millis(500);
        while !waiting.is_empty() {
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(ControllerEvent::Core(event)) => self.handle_core_event(event),
                Ok(ControllerEvent::LastCheckpointTaken { namespace }) => {
                    waiting.remove(&namespace);
                    self.taken(namespace);
                }
                Ok(_) => {}
                Err(_) => break,
            }
            waiting.retain(|namespace| {
                self.jobs.get(namespace).is_some_and(|job| job.checkpoint_writer.is_some())
            });
        }
    }

    /// Ends a job's checkpoint writer, since its cores are about to free what could be copied.
    pub(super) fn stop_checkpoint_writer(&mut self, namespace: Namespace) {
        self.writing.retain(|thread| !thread.is_finished());
        if let Some(checkpoint_writer) =
            self.jobs.get_mut(&namespace).and_then(|job| job.checkpoint_writer.take())
        {
            checkpoint_writer.send(CheckpointCommand::End);
            self.writing.push(checkpoint_writer.into_thread());
        }
    }

    /// Waits for the checkpoints that are being written.
    pub(super) fn await_checkpoint_writers(&mut self) {
        let deadline = Instant::now() + WRITE;
        while self.writing.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        for thread in self.writing.drain(..).filter(|thread| !thread.is_finished()) {
            warn!(
                "a checkpoint is not written after {} s; what is there of it does not count",
                WRITE.as_secs()
            );
            drop(thread);
        }
    }
}

/// Sends the job controller an event when the value is dropped.
fn notify_on_drop(controller: SyncSender<ControllerEvent>, event: ControllerEvent) -> NotifyOnDrop {
    NotifyOnDrop::new(move || {
        // If the job controller is gone, no jobs are left. If its channel is full, a wait here could be a
        // wait for itself.
        if let Err(TrySendError::Full(event)) = controller.try_send(event) {
            std::thread::spawn(move || controller.send(event));
        }
    })
}
