//! Checkpoints of jobs: which jobs may have them, and the threads that read and write them.

use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::{Duration, Instant};

use paramhub_core::auth::Namespace;
use paramhub_core::checkpoint::Every;
use paramhub_core::combinations::{Feature, conflict_of};
use paramhub_core::job_control::{Beginning, LastCheckpoint};
use paramhub_core::service::JobPlan;
use tracing::warn;

use super::{Event, JobController};
use crate::checkpoint::{
    CheckpointCommand, CheckpointConfig, CheckpointTask, CheckpointWriter, JobFolder, Loaded, NotifyOnDrop,
    Start, load,
};
use crate::core::{ShardPlan, Snapshot};
use crate::events::ControllerEvent;

/// How long a stopping hub waits for the checkpoints that are being written.
const WRITE: Duration = Duration::from_secs(60);

/// When a job's checkpoints are written, and where they are stored.
#[derive(Clone, Debug)]
pub(super) struct CheckpointPlan {
    every: Option<Every>,
    start: Option<Start>,
    folder: JobFolder,
    keep: usize,
    /// The hub's number among all hubs of the job.
    hub: u32,
    /// Whether the hub is there from the job's beginning. Another one becomes a standby later, and gets its chunks from the hub
    /// that serves them.
    is_first: bool,
}

impl CheckpointPlan {
    /// The checkpoints that a job asks for, or why this hub cannot provide them.
    pub(super) fn of(
        plan: &JobPlan,
        config: Option<&CheckpointConfig>,
    ) -> Result<Option<CheckpointPlan>, String> {
        let (every, resume) = (plan.options.checkpoint_every, plan.options.resume);
        let sites = &plan.composition.sites;
        let is_first = (plan.hub as usize) < sites[usize::from(plan.site)].hubs.len();
        let start = match plan.epoch.begins_again() {
            _ if !is_first => None,
            true => Some(Start::Again { run: plan.namespace, from: resume }),
            false => resume.map(Start::From),
        };
        if every.is_none() && start.is_none() {
            return Ok(None);
        }
        let name = &plan.name;
        let Some(config) = config else {
            let conflict = conflict_of(Feature::NoCheckpointFolder, plan.options.features());
            return conflict.map_or(Ok(None), |conflict| {
                Err(format!("job `{name}`: this hub keeps no checkpoints: {conflict}"))
            });
        };
        let before: usize = sites[..usize::from(plan.site)].iter().map(|site| site.hubs.len()).sum();
        Ok(Some(CheckpointPlan {
            every,
            start,
            folder: JobFolder::new(&config.folder, name).in_epoch(plan.epoch.number),
            keep: config.keep,
            hub: before as u32 + plan.hub,
            is_first,
        }))
    }

    /// Whether the job writes checkpoints.
    pub(super) fn are_written(&self) -> bool {
        self.every.is_some()
    }

    /// The folder where they are, for people.
    pub(super) fn folder(&self) -> String {
        self.folder.path().display().to_string()
    }

    /// Whether the job begins with one.
    pub(super) fn is_read(&self) -> bool {
        self.start.is_some()
    }
}

impl JobController {
    /// Reads the checkpoint with which a job begins, on a thread of its own; [`ControllerEvent::Loaded`]
    /// follows.
    pub(super) fn load(&mut self, namespace: Namespace) {
        let Some(job) = self.jobs.get(&namespace) else { return };
        let Some(CheckpointPlan { start: Some(start), folder, .. }) = job.checkpoints.clone() else {
            return;
        };
        let plans: Vec<ShardPlan> = job.shards.iter().map(|(_, plan)| plan.clone()).collect();
        let controller = self.own_sender.clone();
        let reads = move || {
            let result = load(&folder, start, &plans);
            // If the job controller is gone, no jobs are left.
            let _ = controller.send(ControllerEvent::Loaded { namespace, result });
        };
        if let Err(error) = std::thread::Builder::new().name("hub-resume".into()).spawn(reads) {
            let result = Err(format!("the hub cannot start a thread: {error}"));
            self.handle(Event::Loaded { namespace, result });
        }
    }

    /// Keeps what was read of a checkpoint for the shards of its job.
    pub(super) fn keep_restored(&mut self, namespace: Namespace, loaded: Loaded) -> Beginning {
        let (step, name, shards) = match loaded {
            Loaded::Checkpoint { step, name, shards } => (step, name, shards),
            Loaded::Anew(why) => return Beginning::Anew(why),
        };
        if let Some(job) = self.jobs.get_mut(&namespace) {
            (job.resumed_step, job.resumed_from) = (Some(step), Some(name));
            job.restored = shards;
        }
        Beginning::Checkpoint(step)
    }

    /// Starts the checkpoint writer of a job that is open on all cores.
    pub(super) fn start_checkpoint_writer(&mut self, namespace: Namespace) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        let snapshots = std::mem::take(&mut job.snapshots);
        let Some(CheckpointPlan { every: Some(every), folder, keep, hub, is_first, .. }) =
            job.checkpoints.clone()
        else {
            return;
        };
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
            resumed_from: job.resumed_from.clone(),
            cores: cores.collect(),
            standby_routes: job.standby_routes().map(|(id, _)| id).collect(),
            records_begin: is_first,
            routes_max: job.composed.placements[usize::from(job.site)].routes().len(),
            snapshots,
        };
        match CheckpointWriter::start(task, self.checkpoint_statuses.clone()) {
            Ok(checkpoint_writer) => job.checkpoint_writer = Some(checkpoint_writer),
            Err(error) => {
                warn!("job `{}` has no checkpoints: the hub cannot start a thread: {error}", job.name)
            }
        }
    }

    /// Keeps the memory for snapshots of a route until the checkpoint writer starts, or passes it on if that runs: the route is a
    /// further one, for which this hub is a standby.
    pub(super) fn keep_snapshot(&mut self, namespace: Namespace, snapshot: Snapshot) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        if job.checkpoint_writer.is_none() {
            return job.snapshots.push(snapshot);
        }
        let route = job.routes.iter().find(|(id, _)| *id == snapshot.route);
        let Some(core) = route.map(|(_, route)| self.cores[usize::from(route.core)].clone()) else { return };
        self.pass_to_writer(namespace, CheckpointCommand::StandBy { snapshot: Box::new(snapshot), core });
    }

    /// Sends a command to a job's checkpoint writer. If there is none any more, the command is dropped: a copy
    /// is of no use, and the drop of a last checkpoint answers that it will not be taken.
    pub(super) fn pass_to_writer(&self, namespace: Namespace, command: CheckpointCommand) {
        let job = self.jobs.get(&namespace);
        if let Some(checkpoint_writer) = job.and_then(|job| job.checkpoint_writer.as_ref()) {
            checkpoint_writer.send(command);
        }
    }

    /// Lets a job's checkpoint writer take a last checkpoint.
    pub(super) fn take_last_checkpoint(&self, namespace: Namespace, before: LastCheckpoint) {
        let answer = match before.goes_on() {
            true => ControllerEvent::CheckpointKept { namespace },
            false => ControllerEvent::LastCheckpointTaken { namespace },
        };
        let taken = notify_on_drop(self.own_sender.clone(), answer);
        self.pass_to_writer(namespace, CheckpointCommand::Finish { taken, before });
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
