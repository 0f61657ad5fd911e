//! All jobs and hubs, and what an event at one means for the others. No clock, no sockets, no store: time is handed in,
//! commands and records are handed out.

mod convene;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use axum::body::Bytes;
use paramhub_core::auth::{Incarnation, Namespace, Nonce};
use paramhub_core::composition::Reduction;
use paramhub_core::cost::Rate;
use paramhub_core::limits::{CORES_MAX, MESSAGE_BYTES_MAX};
use paramhub_core::scheme::{Book, Roster};
use paramhub_core::service::{
    AwaitedRanks, CauseKind, CoreCounters, CreateService, ErrorCode, HubCommand, HubEvent, HubReport,
    HubStatus, JobEnd, JobOptions, JobState, JobStatus, LeaveService, OnInterfaceDown, Presence, RegisterHub,
    STOP_REASON_CHARS_MAX, ServiceError, StopWhen,
};
use paramhub_core::settings::Settings;
use paramhub_core::stragglers::Stragglers;
use tokio::sync::watch;

use crate::clock::Now;
use crate::error::refusal;
use crate::hubs::Hubs;
use crate::job::cause::Cause;
use crate::job::members::describe_hub;
use crate::job::{Job, Outline, Placed, Stage, Transition};
use crate::probes::Probes;
use crate::store::Record;

/// All jobs and hubs.
pub(crate) struct World {
    jobs: HashMap<Namespace, Job>,
    /// By name, the jobs that have not ended; one that is still being written to the store is here alone.
    living: HashMap<String, Namespace>,
    /// The jobs that have ended, oldest first.
    ended: VecDeque<Namespace>,
    pub(crate) hubs: Hubs,
    /// What a rack's link to the others carries, where that is known.
    core_rate: Option<Rate>,
    pub(crate) probes: Probes,
    next_order: u64,
    living_jobs_max: usize,
    ended_jobs_max: usize,
    /// Jobs whose record has changed since it was saved.
    unsaved: HashSet<Namespace>,
    /// Jobs whose record is to be removed.
    removed: Vec<Namespace>,
}

impl World {
    /// The world as an earlier manager left it.
    pub(crate) fn new(
        mut records: Vec<Record>,
        core_rate: Option<Rate>,
        probe_secret: Nonce,
        living_jobs_max: usize,
        ended_jobs_max: usize,
        now: Now,
    ) -> Self {
        let mut world = World {
            jobs: HashMap::new(),
            living: HashMap::new(),
            ended: VecDeque::new(),
            hubs: Hubs::default(),
            core_rate,
            probes: Probes::new(probe_secret),
            next_order: 0,
            living_jobs_max,
            ended_jobs_max,
            unsaved: HashSet::new(),
            removed: Vec::new(),
        };
        records.sort_by_key(|record| record.order);
        for record in records {
            let (job, transition) = Job::restore(record, now);
            let namespace = job.namespace;
            world.next_order = job.order + 1;
            world.jobs.insert(namespace, job);
            match transition {
                Transition::None => world.ended.push_back(namespace),
                transition => world.follow(namespace, transition),
            }
        }
        world.prune();
        world
    }

    /// Refuses a job with checkpoints where no hub that could serve it keeps any. Its hubs would refuse it as well, but only when all
    /// of its workers are there.
    pub(crate) fn check_checkpoints(&self, request: &CreateService) -> Result<(), ServiceError> {
        let CreateService { name, options, .. } = request;
        let what = match (options.checkpoint_every, options.resume) {
            (Some(_), _) => "is to have checkpoints",
            (None, Some(_)) => "is to go on from a checkpoint",
            (None, None) => return Ok(()),
        };
        if !self.hubs.keep_no_checkpoints(options.hubs.unwrap_or(1)) {
            return Ok(());
        }
        let message = format!(
            "job `{name}` {what}, but no hub that has joined keeps any: start it with --checkpoints DIR"
        );
        Err(refusal(ErrorCode::BadRequest, message))
    }

    /// Keeps a name for a job that is about to be written to the store; its place in the order comes back.
    pub(crate) fn reserve(&mut self, name: &str, namespace: Namespace) -> Result<u64, ServiceError> {
        if self.living.contains_key(name) {
            let message = format!(
                "the name `{name}` belongs to a job that has not ended: choose another, or end that one with \
                 `paramhub jobs stop {name}`"
            );
            return Err(refusal(ErrorCode::NameTaken, message));
        }
        if self.living.len() >= self.living_jobs_max {
            let message = format!(
                "{} jobs live already, the most this connection manager serves: end one with `paramhub jobs stop`",
                self.living_jobs_max
            );
            return Err(refusal(ErrorCode::DoesNotFit, message));
        }
        self.living.insert(name.to_string(), namespace);
        self.next_order += 1;
        Ok(self.next_order - 1)
    }

    /// Frees a name whose job could not be written.
    pub(crate) fn give_back(&mut self, name: &str) {
        self.living.remove(name);
    }

    /// Admits a job whose name was reserved and whose record is in the store.
    pub(crate) fn admit(&mut self, job: Job) {
        tracing::info!(job = job.name, namespace = %job.namespace, workers = job.workers, "job created");
        self.jobs.insert(job.namespace, job);
    }

    pub(crate) fn nonce(&self, namespace: Namespace) -> Option<Nonce> {
        self.jobs.get(&namespace).map(|job| job.nonce)
    }

    pub(crate) fn job(&self, namespace: Namespace) -> Result<&Job, ServiceError> {
        self.jobs.get(&namespace).ok_or_else(forgotten)
    }

    /// A job by namespace or by name: of several with one name the living one, else the newest.
    pub(crate) fn find(&self, text: &str) -> Result<&Job, ServiceError> {
        let by_namespace = text.parse().ok().and_then(|namespace: Namespace| self.jobs.get(&namespace));
        let by_name = || self.living.get(text).and_then(|namespace| self.jobs.get(namespace));
        let ended = || self.ended.iter().rev().filter_map(|namespace| self.jobs.get(namespace));
        by_namespace.or_else(by_name).or_else(|| ended().find(|job| job.name == text)).ok_or_else(|| {
            let message = format!(
                "there is no job with the name or namespace `{text}`: `paramhub jobs list` lists all"
            );
            refusal(ErrorCode::NotFound, message)
        })
    }

    /// Lets a change happen to a job and draws the consequences. A job that was forgotten answers as one that ended.
    pub(crate) fn change<T>(
        &mut self,
        namespace: Namespace,
        change: impl FnOnce(&mut Job) -> (T, Transition),
    ) -> Result<T, ServiceError> {
        let job = self.jobs.get_mut(&namespace).ok_or_else(forgotten)?;
        let (value, transition) = change(job);
        self.follow(namespace, transition);
        Ok(value)
    }

    /// A rank's settings agree; the last one to say so gets them, to make the placement.
    pub(crate) fn agree(
        &mut self,
        namespace: Namespace,
        rank: u32,
        now: Now,
    ) -> Result<Option<Arc<Settings>>, ServiceError> {
        self.change(namespace, |job| (job.agree(rank), job.check_settings_can_come(now)))
    }

    /// Who takes part in a job whose ranks have all connected.
    pub(crate) fn roster(&self, namespace: Namespace) -> Result<Roster, ServiceError> {
        let job = self.job(namespace)?;
        let on_machine = |hub| (hub, self.hubs.machine(hub));
        Ok(job.roster(job.hubs().map(on_machine)))
    }

    /// The placement is made: asks each hub of the job, in placement order, to allocate.
    pub(crate) fn place(
        &mut self,
        namespace: Namespace,
        outline: Outline,
        placed: Vec<Placed>,
        book: Arc<Book>,
        commands: Vec<Bytes>,
    ) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        if job.place(outline, placed, book) {
            for (hub, command) in job.hubs().zip(commands) {
                self.hubs.command(hub, command);
            }
            self.unsaved.insert(namespace);
        }
    }

    /// A worker leaves before it reached a hub.
    pub(crate) fn leave(
        &mut self,
        namespace: Namespace,
        call: &LeaveService,
        now: Now,
    ) -> Result<(), ServiceError> {
        let reason = bounded(&call.reason);
        self.change(namespace, |job| match job.leave(call, reason, now) {
            Ok(transition) => (Ok(()), transition),
            Err(refused) => (Err(refused), Transition::None),
        })?
    }

    /// Lets a hub join, in place of any that had one of its addresses, and the jobs that waited for it get on.
    pub(crate) fn register_hub(
        &mut self,
        offer: RegisterHub,
        token: String,
        now: Now,
    ) -> Result<u32, ServiceError> {
        let replaced = self.hubs.at_addresses_of(&offer.shape);
        let hub = self.hubs.register(offer, token, now)?;
        for lost in replaced {
            self.lose_hub(lost, "was lost: another hub has joined at its address", now);
        }
        tracing::info!(hub, "hub joined");
        self.convene_all(now);
        Ok(hub)
    }

    /// Takes what a hub tells.
    pub(crate) fn report(
        &mut self,
        hub: u32,
        token: Option<&str>,
        report: HubReport,
        now: Now,
    ) -> Result<(), ServiceError> {
        let joined = self.hubs.admit(hub, token, now)?;
        let leaves = report.presence != Presence::Here && !std::mem::replace(&mut joined.is_leaving, true);
        if report.cores.len() > CORES_MAX {
            let message = format!("hub {hub} reports {} cores: {CORES_MAX} are possible", report.cores.len());
            return Err(refusal(ErrorCode::BadRequest, message));
        }
        if !report.cores.is_empty() {
            joined.cores = report.cores;
        }
        // Counts first, so that a job that ends is recorded with its last ones.
        for counted in &report.jobs {
            match self.jobs.get_mut(&counted.namespace) {
                Some(job) if job.is_served_by(hub) => {
                    job.hub_counted(hub, counted.counters, &counted.left_out);
                }
                _ => self.disown(hub, counted.namespace),
            }
        }
        for kept in report.checkpoints {
            if let Some(job) = self.jobs.get_mut(&kept.namespace) {
                job.hub_kept(hub, kept.status);
            }
        }
        for event in report.events {
            self.apply(hub, event, now);
        }
        match report.presence {
            Presence::Here => {}
            Presence::Leaving if leaves => self.spare_leaving_hub(hub, now),
            Presence::Leaving => {}
            Presence::Gone => self.dismiss_hub(hub, now),
        }
        self.go_on_probing(now);
        Ok(())
    }

    /// Ends what has been silent for too long: hubs, and jobs that wait for ranks that will not come.
    pub(crate) fn check_time(&mut self, hub_timeout_s: f64, now: Now) {
        for hub in self.hubs.silent(hub_timeout_s, now) {
            let what = format!(
                "was lost: it has not been heard for {hub_timeout_s} s. Look at its machine, its log and the network between; \
                 where such pauses are normal, start the connection manager with a longer --hub-dead-after"
            );
            self.lose_hub(hub, &what, now);
        }
        self.go_on_probing(now);
        let living: Vec<Namespace> = self.living.values().copied().collect();
        for namespace in living {
            if let Some(job) = self.jobs.get_mut(&namespace) {
                let transition = job.check_time(now);
                self.follow(namespace, transition);
            }
        }
    }

    /// Records to write and to remove since the last call.
    pub(crate) fn take_unsaved(&mut self) -> (Vec<Record>, Vec<Namespace>) {
        let unsaved = std::mem::take(&mut self.unsaved);
        let changed =
            unsaved.iter().filter_map(|namespace| self.jobs.get(namespace)).map(Job::record).collect();
        (changed, std::mem::take(&mut self.removed))
    }

    pub(crate) fn has_unsaved(&self) -> bool {
        !self.unsaved.is_empty() || !self.removed.is_empty()
    }

    /// Remembers to save again what could not be saved.
    pub(crate) fn keep_unsaved(&mut self, changed: &[Record], removed: Vec<Namespace>) {
        let still_here = changed.iter().map(|record| record.status.namespace);
        self.unsaved.extend(still_here.filter(|namespace| self.jobs.contains_key(namespace)));
        self.removed.extend(removed);
    }

    /// All jobs, oldest first.
    pub(crate) fn statuses(&self) -> Vec<JobStatus> {
        let mut jobs: Vec<&Job> = self.jobs.values().collect();
        jobs.sort_by_key(|job| job.order);
        jobs.into_iter().map(Job::status).collect()
    }

    /// All hubs.
    pub(crate) fn hub_statuses(&self, now: Now) -> Vec<HubStatus> {
        self.hubs.statuses(now)
    }

    /// The jobs, for counting.
    pub(crate) fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.jobs.values()
    }

    /// Each hub's cores, for counting.
    pub(crate) fn cores(&self, now: Now) -> Vec<(u32, Vec<CoreCounters>)> {
        self.hubs.statuses(now).into_iter().map(|hub| (hub.hub, hub.cores)).collect()
    }

    fn apply(&mut self, hub: u32, event: HubEvent, now: Now) {
        // The hub has warned of these itself, in a process with an embedded manager in the very same log.
        let was_logged =
            matches!(event, HubEvent::Refused { .. } | HubEvent::Ended(JobEnd { finished: false, .. }));
        let (namespace, transition) = match event {
            HubEvent::Probed(report) => return self.probes.hear(hub, report),
            HubEvent::Allocated { namespace, placement_hash, resumed_step } => {
                let Some(job) = self.jobs.get_mut(&namespace).filter(|job| job.is_served_by(hub)) else {
                    return self.disown(hub, namespace);
                };
                (namespace, job.hub_allocated(hub, bounded(&placement_hash), resumed_step, now))
            }
            HubEvent::Refused { namespace, reason } => {
                let Some(job) = self.jobs.get_mut(&namespace) else { return };
                (namespace, job.hub_refused(hub, bounded(&reason), now))
            }
            HubEvent::Noticed { namespace, message } => {
                let Some(job) = self.jobs.get_mut(&namespace) else { return };
                // The hub has warned of it, too.
                tracing::info!(job = job.name, hub, "{}", bounded(&message));
                (namespace, job.hub_noticed(hub, bounded(&message).to_string()))
            }
            HubEvent::Awaited { namespace, message, awaited } => {
                let message = bounded(&message).to_string();
                self.pass_on(hub, namespace, &message, awaited.as_ref());
                let Some(job) = self.jobs.get_mut(&namespace) else { return };
                tracing::warn!(job = job.name, hub, "{message}");
                job.hub_awaits(hub, awaited, now);
                (namespace, job.hub_noticed(hub, message))
            }
            HubEvent::Kept { namespace } => {
                let Some(job) = self.jobs.get_mut(&namespace) else { return };
                return job.hub_kept_last(hub);
            }
            HubEvent::Ended(end) => {
                let Some(job) = self.jobs.get_mut(&end.namespace) else { return };
                let transition = match (job.is_served_by(hub), self.hubs.shape(hub)) {
                    (false, Some(shape)) => job.former_hub_ended(shape, &end, now),
                    _ => job.hub_ended(hub, &end, now),
                };
                (end.namespace, transition)
            }
        };
        self.follow_with(namespace, transition, !was_logged);
    }

    /// Has the hubs of a job's other sites tell their ranks what this one has told its own: who keeps them waiting.
    fn pass_on(&mut self, from: u32, namespace: Namespace, message: &str, awaited: Option<&AwaitedRanks>) {
        let Some(job) = self.jobs.get(&namespace) else { return };
        if !job.has_several_sites() || !job.is_served_by(from) || job.state().has_ended() {
            return;
        }
        let rank = awaited.and_then(|awaited| match awaited.ranks[..] {
            [rank] => Some(rank),
            _ => None,
        });
        let tell = HubCommand::Tell { namespace, rank, message: message.to_owned() };
        let tell = Bytes::from(serde_json::to_vec(&tell).expect("commands are plain data"));
        for hub in job.hubs().filter(|&hub| hub != from) {
            self.hubs.command_once(hub, tell.clone());
        }
    }

    /// A hub serves a job that is none of its business, since this manager lost it or the job: it should stop.
    fn disown(&mut self, hub: u32, namespace: Namespace) {
        let reason =
            "the connection manager does not know this job any more: it restarted, or had lost this hub"
                .to_string();
        self.hubs.command_once(hub, stop_command(namespace, reason, StopWhen::Now));
    }

    fn lose_hub(&mut self, hub: u32, what: &str, now: Now) {
        let Some((name, heard)) = self.hubs.remove(hub) else { return };
        let message = format!("{name} {what}");
        tracing::warn!("{message}");
        self.forget_hub(hub, &Cause { kind: CauseKind::HubLost, rank: None, began: heard, message }, now);
    }

    /// A hub shuts down: jobs that it was given and that wait for it to allocate wait in vain.
    fn spare_leaving_hub(&mut self, hub: u32, now: Now) {
        let Some(name) = self.hubs.shape(hub).map(|shape| describe_hub(hub, shape)) else { return };
        let waiting = |job: &&Job| job.state() == JobState::Initialising && job.is_served_by(hub);
        let waiting: Vec<Namespace> = self.jobs.values().filter(waiting).map(|job| job.namespace).collect();
        for namespace in waiting {
            if let Some(job) = self.jobs.get_mut(&namespace) {
                let transition = job.fail(ErrorCode::JobEnded, format!("{name} is shutting down"), now);
                self.follow(namespace, transition);
            }
        }
    }

    /// A hub has shut down, and has said so.
    fn dismiss_hub(&mut self, hub: u32, now: Now) {
        let Some((name, _)) = self.hubs.remove(hub) else { return };
        tracing::info!(hub, "hub left");
        // Its own jobs it has ended itself; this is for those that it was given on the way out.
        self.forget_hub(hub, &Cause::known(format!("{name} has shut down"), now), now);
    }

    fn forget_hub(&mut self, hub: u32, cause: &Cause, now: Now) {
        self.probes.forget(hub);
        let served: Vec<Namespace> =
            self.jobs.values().filter(|job| job.is_served_by(hub)).map(|job| job.namespace).collect();
        for namespace in served {
            if let Some(job) = self.jobs.get_mut(&namespace) {
                let transition = job.hub_lost(hub, cause.clone(), now);
                self.follow(namespace, transition);
            }
        }
    }

    /// Draws the consequences of what happened to a job.
    fn follow(&mut self, namespace: Namespace, transition: Transition) {
        self.follow_with(namespace, transition, true);
    }

    /// [`follow`](Self::follow), where a failure is news to the logs or, having been told by a hub that logged it, is not.
    fn follow_with(&mut self, namespace: Namespace, transition: Transition, is_news: bool) {
        let Some(job) = self.jobs.get(&namespace) else { return };
        match transition {
            Transition::None => {}
            Transition::Advanced => {
                tracing::info!(job = job.name, namespace = %namespace, state = ?job.state(), "job advanced");
                if job.state() == JobState::Running && job.has_several_sites() {
                    let link = HubCommand::Link { namespace };
                    let link = Bytes::from(serde_json::to_vec(&link).expect("commands are plain data"));
                    job.hubs().for_each(|hub| self.hubs.command(hub, link.clone()));
                }
                self.unsaved.insert(namespace);
            }
            Transition::Asked { hubs, reason, when } => {
                for hub in hubs {
                    self.hubs.command(hub, stop_command(namespace, reason.clone(), when));
                }
            }
            Transition::Explained => {
                let reason = job.status().message;
                tracing::info!(job = job.name, namespace = %namespace, "job had failed because: {reason}");
                self.unsaved.insert(namespace);
            }
            Transition::Ended { stop } => {
                let status = job.status();
                match status.state {
                    JobState::Failed if is_news => {
                        tracing::warn!(job = job.name, namespace = %namespace, "job failed: {}", status.message);
                    }
                    JobState::Failed => {
                        tracing::info!(job = job.name, namespace = %namespace, "job failed: {}", status.message);
                    }
                    _ => tracing::info!(job = job.name, namespace = %namespace, "job finished"),
                }
                for hub in stop {
                    self.hubs.command(hub, stop_command(namespace, status.message.clone(), StopWhen::Now));
                }
                if self.living.get(&status.name) == Some(&namespace) {
                    self.living.remove(&status.name);
                }
                self.unsaved.insert(namespace);
                self.ended.push_back(namespace);
                self.prune();
            }
        }
    }

    fn prune(&mut self) {
        while self.ended.len() > self.ended_jobs_max {
            let Some(oldest) = self.ended.pop_front() else { return };
            self.jobs.remove(&oldest);
            self.unsaved.remove(&oldest);
            self.removed.push(oldest);
        }
    }
}

/// What a rank needs to wait in ConnectService or InitService.
pub(crate) struct Ticket {
    pub(crate) number: u64,
    pub(crate) stage: watch::Receiver<Stage>,
}

impl Job {
    /// Counts a call that begins to wait.
    pub(crate) fn wait(&mut self, number: u64) -> Ticket {
        self.waiting += 1;
        Ticket { number, stage: self.subscribe() }
    }
}

/// A rank that calls, as its proof says.
#[derive(Clone, Copy)]
pub(crate) struct Rank {
    pub(crate) namespace: Namespace,
    pub(crate) rank: u32,
    pub(crate) incarnation: Incarnation,
}

/// Checks the arguments of CreateService.
pub(crate) fn check_request(request: &CreateService) -> Result<(), ServiceError> {
    use paramhub_core::limits::{
        HUBS_MAX, JOB_NAME_BYTES_MAX, RESUME_DEAD_AFTER_S_MIN, RESUME_S, WEIGHT_MAX, WORKERS_MAX,
    };

    let refuse = |message: String| Err(refusal(ErrorCode::BadRequest, message));
    let name = &request.name;
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/".contains(&byte);
    if name.is_empty() || name.len() > JOB_NAME_BYTES_MAX || !name.bytes().all(allowed) {
        let shown: String = name.chars().take(JOB_NAME_BYTES_MAX).collect();
        return refuse(format!(
            "{shown:?} is no job name: it must have 1 to {JOB_NAME_BYTES_MAX} letters, digits, `.`, `_`, `-` or `/`"
        ));
    }
    if !(1..=WORKERS_MAX).contains(&request.workers) {
        return refuse(format!(
            "job `{name}` asks for {} workers: 1 to {WORKERS_MAX} are possible",
            request.workers
        ));
    }
    let options = &request.options;
    if let Some(hubs) = options.hubs
        && hubs > HUBS_MAX as u32
    {
        return refuse(format!("job `{name}` waits for {hubs} hubs: at most {HUBS_MAX} are possible"));
    }
    if options.hubs == Some(0)
        && let Some(option) = needs_hub(options)
    {
        return refuse(format!(
            "job `{name}` is for 0 hubs, and {option} is a hub's: leave it out, or ask for hubs"
        ));
    }
    if !(1..=WEIGHT_MAX).contains(&options.weight) {
        return refuse(format!("job `{name}` has weight {}: 1 to {WEIGHT_MAX} are possible", options.weight));
    }
    if options.continues() && options.dead_after_s < RESUME_DEAD_AFTER_S_MIN {
        return refuse(format!(
            "job `{name}` is to go on when an interface goes down, which takes up to {RESUME_S} s, but gives workers up after \
             {} s: set dead_after_s to {RESUME_DEAD_AFTER_S_MIN} or more",
            options.dead_after_s
        ));
    }
    options.stragglers.check(request.workers).map_err(|why| {
        refusal(
            ErrorCode::BadRequest,
            format!("job `{name}` cannot have stragglers = {}: {why}", options.stragglers),
        )
    })?;
    if options.stragglers.leaves_out() && options.continues() {
        return refuse(format!(
            "job `{name}` is to go on when an interface goes down, for which all must have had the same answers, and to leave \
             late workers out: use on_interface_down = fail, or stragglers = wait"
        ));
    }
    let bounds = [
        ("rendezvous_timeout_s", options.rendezvous_timeout_s, 0.1, 86_400.0),
        ("lease_s", options.lease_s, 0.1, 604_800.0),
        ("dead_after_s", options.dead_after_s, 1.0, 86_400.0),
    ];
    let progress_timeout = options.progress_timeout_s.map(|s| ("progress_timeout_s", s, 1.0, 604_800.0));
    for (option, value, least, most) in bounds.into_iter().chain(progress_timeout) {
        // A NaN is in no range.
        if !(least..=most).contains(&value) {
            return refuse(format!(
                "{option} of job `{name}` is {value}: {least} to {most} seconds are possible"
            ));
        }
    }
    Ok(())
}

/// The first option that nobody but a hub can follow.
fn needs_hub(options: &JobOptions) -> Option<&'static str> {
    let asked = [
        ("checkpoint_every", options.checkpoint_every.is_some()),
        ("resume", options.resume.is_some()),
        ("stragglers", options.stragglers != Stragglers::default()),
        ("progress_timeout_s", options.progress_timeout_s.is_some()),
        ("reduction", options.reduction != Reduction::default()),
        ("on_interface_down", options.on_interface_down != OnInterfaceDown::default()),
    ];
    asked.into_iter().find_map(|(option, is_asked)| is_asked.then_some(option))
}

/// Checks the reason of a stop, which appears in listings, in logs and on workers' terminals.
pub(crate) fn check_reason(reason: String) -> Result<String, ServiceError> {
    let printable = |byte: u8| byte == b' ' || byte.is_ascii_graphic();
    if (1..=STOP_REASON_CHARS_MAX).contains(&reason.len()) && reason.bytes().all(printable) {
        return Ok(reason);
    }
    let message = format!(
        "the reason of a stop must have 1 to {STOP_REASON_CHARS_MAX} printable ASCII characters: shorten it, or leave \
         it out"
    );
    Err(refusal(ErrorCode::BadRequest, message))
}

fn stop_command(namespace: Namespace, reason: String, when: StopWhen) -> Bytes {
    let command = HubCommand::Stop { namespace, reason, when };
    Bytes::from(serde_json::to_vec(&command).expect("commands are plain data"))
}

fn forgotten() -> ServiceError {
    refusal(ErrorCode::JobEnded, "the job ended so long ago that the connection manager has forgotten it")
}

/// As much of a message from outside as is worth keeping.
fn bounded(message: &str) -> &str {
    &message[..message.floor_char_boundary(MESSAGE_BYTES_MAX)]
}
