//! Checkpoints of jobs: who may have them, what a job begins with, and the last one before an end.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::{Duration, Instant};

use paramhub_core::auth::Namespace;
use paramhub_core::checkpoint::{Every, Resume};
use paramhub_core::consistency::Consistency;
use paramhub_core::service::JobPlan;
use tracing::{info, warn};

use super::job::State;
use super::{Letter, Steward};
use crate::checkpoint::{CheckpointConfig, JobFolder, Keeper, LAST, Taken, Terms, Word, load};
use crate::core::{Restored, ShardPlan, Snapshot};

/// How long a hub that stops waits for what is being written.
const WRITE: Duration = Duration::from_secs(60);

/// Where a job's checkpoints go and come from.
#[derive(Clone, Debug)]
pub(super) struct Checkpoints {
    every: Option<Every>,
    pub(super) resume: Option<Resume>,
    folder: JobFolder,
    keep: usize,
    /// The hub's number among all of the job.
    hub: u32,
}

impl Checkpoints {
    /// What a job asks for, or why this hub cannot give it.
    pub(super) fn of(
        plan: &JobPlan,
        config: Option<&CheckpointConfig>,
    ) -> Result<Option<Checkpoints>, String> {
        let (every, resume) = (plan.options.checkpoint_every, plan.options.resume);
        if every.is_none() && resume.is_none() {
            return Ok(None);
        }
        let (name, settings) = (&plan.name, &plan.settings);
        let refuse = |why: String| Err(format!("job `{name}` {why}"));
        let Some(config) = config else {
            let what =
                if every.is_some() { "is to have checkpoints" } else { "is to go on from a checkpoint" };
            return refuse(format!("{what}, but this hub keeps none: start it with --checkpoints DIR"));
        };
        if !settings.has_parameters() {
            return refuse(format!(
                "is to have checkpoints, but with the optimizer `{}` its hubs keep no parameters: leave them to the workers, or \
                 let the hubs run an optimizer",
                settings.optimizer.name
            ));
        }
        let sites = &plan.composition.sites;
        let hubs: usize = sites.iter().map(|site| site.hubs.len()).sum();
        let is_synchronous = settings.consistency == Consistency::Synchronous;
        match every {
            Some(Every::Seconds(_)) if hubs > 1 => {
                return refuse(format!(
                    "is to have checkpoints every so many seconds, but {hubs} hubs would not take them at one step: give a number \
                     of steps"
                ));
            }
            Some(Every::Steps(_)) if !is_synchronous => {
                return refuse(format!(
                    "is to have checkpoints every so many steps, but with consistency {} its workers take none together: give \
                     seconds, as in 30s",
                    settings.consistency
                ));
            }
            _ => {}
        }
        let before: usize = sites[..usize::from(plan.site)].iter().map(|site| site.hubs.len()).sum();
        Ok(Some(Checkpoints {
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

impl Steward {
    /// Reads what a job begins with, on a thread of its own; [`Letter::Loaded`] follows.
    pub(super) fn load(
        &mut self,
        namespace: Namespace,
        from: &Checkpoints,
        which: Resume,
        shards: Vec<(u16, ShardPlan)>,
    ) {
        let (folder, letters) = (from.folder.clone(), self.own_letters.clone());
        let reads = move || {
            let plans: Vec<ShardPlan> = shards.iter().map(|(_, plan)| plan.clone()).collect();
            let result = load(&folder, which, &plans);
            // A steward that is gone has no jobs left.
            let _ = letters.send(Letter::Loaded { namespace, shards, result });
        };
        if let Err(error) = std::thread::Builder::new().name("hub-resume".into()).spawn(reads) {
            self.refuse_loading(namespace, format!("the hub cannot start a thread: {error}"));
        }
    }

    /// A job's checkpoint has been read, or cannot be.
    pub(super) fn loaded(
        &mut self,
        namespace: Namespace,
        shards: Vec<(u16, ShardPlan)>,
        result: Result<(u32, Vec<Arc<Restored>>), String>,
    ) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        if let State::Ending { .. } = job.state {
            // It was stopped meanwhile. There is nothing to free, route by route.
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

    /// All of a job stands: its checkpoints can be taken.
    pub(super) fn start_keeper(&mut self, namespace: Namespace) {
        let job = self.jobs.get_mut(&namespace).expect("an opened job is here");
        let snapshots = std::mem::take(&mut job.snapshots);
        let Some(Checkpoints { every: Some(every), folder, keep, hub, .. }) = job.checkpoints.clone() else {
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
        let terms = Terms {
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
        match Keeper::start(terms, self.board.clone()) {
            Ok(keeper) => job.keeper = Some(keeper),
            Err(error) => {
                warn!("job `{}` has no checkpoints: the hub cannot start a thread: {error}", job.name)
            }
        }
    }

    pub(super) fn pass_snapshot(&self, namespace: Namespace, snapshot: Box<Snapshot>) {
        // Of a job that has ended meanwhile nobody waits for it.
        if let Some(keeper) = self.jobs.get(&namespace).and_then(|job| job.keeper.as_ref()) {
            keeper.tell(Word::Snapshot(snapshot));
        }
    }

    /// Every worker has left: the job ends, with a last checkpoint where it has any.
    pub(super) fn finish(&mut self, namespace: Namespace) {
        let job = self.jobs.get_mut(&namespace).expect("a finished job is here");
        if matches!(job.state, State::Ending { .. }) || std::mem::replace(&mut job.is_finishing, true) {
            return;
        }
        let taken = tells(self.own_letters.clone(), Letter::Taken { namespace });
        if !job.keeper.as_ref().is_some_and(|keeper| keeper.tell(Word::Finish { taken })) {
            self.finished(namespace);
        }
    }

    /// The last checkpoint of a job is in memory, or will not be.
    pub(super) fn taken(&mut self, namespace: Namespace) {
        let Some(job) = self.jobs.get(&namespace) else { return };
        if job.is_finishing && !matches!(job.state, State::Ending { .. }) {
            self.finished(namespace);
        }
    }

    /// The workers of a job are about to be ended, for a reason that is to be the job's: takes a last checkpoint while it goes on, if
    /// they get to a step together soon.
    pub(super) fn announce_end(&mut self, namespace: Namespace, reason: String) {
        let kept = tells(self.own_letters.clone(), Letter::Kept { namespace });
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        job.announced.get_or_insert(reason);
        if let Some(keeper) = &job.keeper
            && !job.is_finishing
            && !matches!(job.state, State::Ending { .. })
        {
            job.has_left_last = true;
            keeper.tell(Word::Finish { taken: kept });
        }
    }

    /// Before the hub stops: takes the last checkpoints while the jobs go on.
    pub(super) fn leave_checkpoints(&mut self) {
        let mut waiting: HashSet<Namespace> = HashSet::new();
        for (&namespace, job) in self.jobs.iter().filter(|(_, job)| !job.has_left_last) {
            let Some(keeper) = &job.keeper else { continue };
            let taken = tells(self.own_letters.clone(), Letter::Taken { namespace });
            if job.is_finishing || keeper.tell(Word::Finish { taken }) {
                waiting.insert(namespace);
            }
        }
        let deadline = Instant::now() + LAST + Duration::from_millis(500);
        while !waiting.is_empty() {
            match self.letters.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Letter::Core(event)) => self.hear(event),
                Ok(Letter::Taken { namespace }) => {
                    waiting.remove(&namespace);
                    self.taken(namespace);
                }
                Ok(_) => {}
                Err(_) => break,
            }
            waiting.retain(|namespace| self.jobs.get(namespace).is_some_and(|job| job.keeper.is_some()));
        }
    }

    /// The job's cores are about to free what could be copied.
    pub(super) fn dismiss_keeper(&mut self, namespace: Namespace) {
        self.writing.retain(|thread| !thread.is_finished());
        if let Some(keeper) = self.jobs.get_mut(&namespace).and_then(|job| job.keeper.take()) {
            keeper.tell(Word::End);
            self.writing.push(keeper.into_thread());
        }
    }

    /// Waits for what is being written.
    pub(super) fn end_keepers(&mut self) {
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

/// Sends the steward a letter when it is dropped.
fn tells(letters: SyncSender<Letter>, letter: Letter) -> Taken {
    Taken::new(move || {
        // A steward that is gone has no jobs left. One whose letterbox is full would wait for itself here.
        if let Err(TrySendError::Full(letter)) = letters.try_send(letter) {
            std::thread::spawn(move || letters.send(letter));
        }
    })
}
