//! One job from CreateService to its end: a state machine without clock, sockets or store.
//!
//! What happens to a job comes in as a method call; what follows from it for the rest of the manager goes out as a
//! [`Transition`]. Callers that wait for the job subscribe to its [`Stage`].

mod book;
pub(crate) mod cause;
mod convene;
mod ending;
mod meeting;
pub(crate) mod members;
mod seats;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::sync::Arc;

use paramhub_core::auth::{Incarnation, Namespace, Nonce};
use paramhub_core::checkpoint::CheckpointStatus;
use paramhub_core::composition::{Composition, Place};
use paramhub_core::placement::Imbalance;
use paramhub_core::scheme::Book;
use paramhub_core::service::{
    ConnectService, CreateService, ErrorCode, JobCounters, JobOptions, JobState, JobStatus, ServiceConnected,
    ServiceError, ServiceInitialised, StopWhen,
};
use paramhub_core::settings::Settings;
use tokio::sync::watch;

use crate::clock::Now;
use crate::error::refusal;
use crate::hubs::{OfferedHub, check_place};
use crate::store::Record;
use cause::Cause;
use ending::Concluding;
use members::Member;
use seats::{Seats, list_ranks, list_ranks_with_verb};

/// How long a rank whose InitService connection broke may take to come back before the job fails without it.
pub(crate) const COME_BACK_S: f64 = 2.0;

/// How far a job is, for those who wait. Ordered: a job never goes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    Connecting,
    Initialising,
    Running,
    /// Over, but a hub has yet to say that it has freed its memory.
    Ended,
    /// Over, and no hub holds anything of it.
    Cleared,
}

/// What follows from an event for the rest of the manager.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Transition {
    /// Nothing, or nothing yet.
    None,
    /// The job's record has changed.
    Advanced,
    /// The job is over; these hubs must be told to stop.
    Ended { stop: Vec<u32> },
    /// These hubs are to say how the job ends.
    Asked { hubs: Vec<u32>, reason: String, when: StopWhen },
    /// The job failed for another reason than was recorded.
    Explained,
}

/// How an InitService call goes on.
#[derive(Debug)]
pub(crate) enum Submission {
    /// The job runs: a repeated call.
    Done,
    /// The call waits; it is the rank's `ticket`-th.
    Wait { ticket: u64 },
    /// The call waits once its settings have been compared with those of the first rank.
    Compare { ticket: u64, first: u32, settings: Arc<Settings> },
}

/// One job.
pub(crate) struct Job {
    /// Position among all jobs ever created.
    pub(crate) order: u64,
    pub(crate) name: String,
    pub(crate) namespace: Namespace,
    pub(crate) nonce: Nonce,
    pub(crate) workers: u32,
    pub(crate) options: JobOptions,
    state: JobState,
    message: String,
    created_at: u64,
    ended_at: Option<u64>,
    seats: Seats,
    /// Where each rank is.
    places: Vec<Place>,
    peer_addresses: Vec<Option<SocketAddr>>,
    /// The hubs that serve it; empty while it is connecting.
    members: Vec<Member>,
    /// Their sites; none while it is connecting.
    composition: Option<Arc<Composition>>,
    /// How these reduce and why, for people.
    reduction: String,
    /// What hubs counted for it under an earlier manager.
    recorded_counters: JobCounters,
    recorded_left_out: Vec<u64>,
    /// Its checkpoints, likewise.
    recorded_checkpoints: Option<CheckpointStatus>,
    /// The first rank's settings, until every rank has agreed.
    proposed: Option<(u32, Arc<Settings>)>,
    /// Every rank has agreed and the placement is made, or being made.
    agreed: bool,
    outline: Outline,
    /// Of every site; empty until the placement is made.
    placed: Vec<Placed>,
    /// The information book; none until the placement is made.
    book: Option<Arc<Book>>,
    /// What ranks are told that still wait or come late.
    failure: Option<ServiceError>,
    /// Why it has failed, for as long as that may turn out otherwise.
    cause: Option<Cause>,
    /// Why it will have failed, if it does not finish.
    announced: Option<Cause>,
    concluding: Option<Concluding>,
    /// Calls that wait for the other ranks.
    pub(crate) waiting: u32,
    /// When the last sign of a worker was seen.
    last_sign: Now,
    stage: watch::Sender<Stage>,
}

/// A site's placement, as its ranks and hubs compare it.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    pub(crate) hash: String,
    pub(crate) imbalance: Imbalance,
}

/// What listings show of a job's settings.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outline {
    pub(crate) keys: u64,
    pub(crate) bytes: u64,
    pub(crate) optimizer: String,
    pub(crate) consistency: String,
}

impl Job {
    /// A job that nobody has joined yet.
    pub(crate) fn new(
        order: u64,
        request: CreateService,
        namespace: Namespace,
        nonce: Nonce,
        now: Now,
    ) -> Self {
        Job {
            order,
            namespace,
            nonce,
            seats: Seats::new(request.workers),
            name: request.name,
            workers: request.workers,
            options: request.options,
            state: JobState::Connecting,
            message: String::new(),
            created_at: now.unix_s,
            ended_at: None,
            places: vec![Place::default(); request.workers as usize],
            peer_addresses: vec![None; request.workers as usize],
            members: Vec::new(),
            composition: None,
            reduction: String::new(),
            recorded_counters: JobCounters::default(),
            recorded_left_out: Vec::new(),
            recorded_checkpoints: None,
            proposed: None,
            agreed: false,
            outline: Outline::default(),
            placed: Vec::new(),
            book: None,
            failure: None,
            cause: None,
            announced: None,
            concluding: None,
            waiting: 0,
            last_sign: now,
            stage: watch::channel(Stage::Connecting).0,
        }
    }

    /// A job of an earlier manager. One that had not ended has lost its manager's memory, so it ends now.
    pub(crate) fn restore(record: Record, now: Now) -> (Self, Transition) {
        let Record { order, nonce, options, status } = record;
        let request = CreateService { name: status.name, workers: status.workers, options };
        let mut job = Job::new(order, request, status.namespace, nonce, now);
        job.seats.restore(&status.connected);
        job.created_at = status.created_at;
        job.outline = Outline {
            keys: status.keys,
            bytes: status.bytes,
            optimizer: status.optimizer,
            consistency: status.consistency,
        };
        job.recorded_counters = status.counters;
        job.reduction = status.reduction;
        job.recorded_left_out = status.left_out;
        job.recorded_checkpoints = status.checkpoints;
        if status.state.has_ended() {
            job.state = status.state;
            job.message = status.message;
            job.ended_at = status.ended_at;
            job.stage.send_replace(Stage::Cleared);
            return (job, Transition::None);
        }
        let transition = job.fail(ErrorCode::JobEnded, "the manager restarted while it ran".into(), now);
        (job, transition)
    }

    /// Its sites, once every rank has connected.
    pub(crate) fn composition(&self) -> Option<Arc<Composition>> {
        self.composition.clone()
    }

    /// Whether its hubs have streams among one another.
    pub(crate) fn has_several_sites(&self) -> bool {
        self.composition.as_ref().is_some_and(|composition| !composition.is_flat())
    }

    /// Where each rank is.
    pub(crate) fn places(&self) -> &[Place] {
        &self.places
    }

    pub(crate) fn state(&self) -> JobState {
        self.state
    }

    /// Lets a caller wait for the job to get on.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Stage> {
        self.stage.subscribe()
    }

    /// Takes a rank's call to ConnectService; the ticket tells its calls apart.
    pub(crate) fn connect(&mut self, call: &ConnectService, now: Now) -> Result<u64, ServiceError> {
        self.last_sign = now;
        if self.state.has_ended() {
            return Err(self.ended_refusal());
        }
        self.check_rank(call.rank)?;
        check_place(&call.place)?;
        match self.seats.holder(call.rank) {
            Some(holder) if holder.incarnation != call.incarnation => Err(refusal(
                ErrorCode::RankTaken,
                format!(
                    "rank {} of job `{}` belongs to {holder}, so {} cannot have it: start every rank once",
                    call.rank,
                    self.name,
                    seats::describe_process(&call.host, call.process)
                ),
            )),
            _ => {
                self.places[call.rank as usize] = call.place.clone();
                self.peer_addresses[call.rank as usize] = call.peer_address;
                Ok(self.seats.take(call))
            }
        }
    }

    /// The answer to a rank whose ConnectService has waited long enough for the others.
    pub(crate) fn connected(
        &self,
        rank: u32,
        incarnation: Incarnation,
    ) -> Result<ServiceConnected, ServiceError> {
        if self.state.has_ended() {
            return Err(self.failure_refusal());
        }
        self.check_holder(rank, incarnation)?;
        let hubs = if self.only_meets() {
            Vec::new()
        } else {
            let composition =
                self.composition.as_ref().expect("a job has sites once every rank has connected");
            let site = composition.site_of(rank).expect("every rank is at a site");
            composition.sites[usize::from(site)].hubs.clone()
        };
        Ok(ServiceConnected {
            name: self.name.clone(),
            workers: self.workers,
            hubs,
            options: self.options,
            peer_addresses: self.peer_addresses.clone(),
        })
    }

    /// A rank has waited in ConnectService for as long as it may: it gives up its seat and learns who is missing, ranks
    /// or hubs.
    pub(crate) fn connect_timed_out(&mut self, rank: u32, ticket: u64, hubs: &[OfferedHub]) -> ServiceError {
        let absent = self.seats.absent();
        let gave_up = self.seats.gave_up();
        let (name, timeout_s) = (&self.name, self.options.rendezvous_timeout_s);
        let mut message = match (absent.is_empty(), gave_up.is_empty()) {
            (true, true) => {
                let missing =
                    self.hubs_missing(hubs).unwrap_or_else(|| "its hubs have only just joined".into());
                format!("every rank of job `{name}` is there, but {missing}")
            }
            (true, false) => {
                format!(
                    "job `{name}` was never complete within {timeout_s} s: {} up waiting",
                    list_ranks_with_verb(&gave_up, "gave", "gave")
                )
            }
            (false, _) => format!(
                "{} not connected to job `{name}` within {timeout_s} s",
                list_ranks_with_verb(&absent, "has", "have")
            ),
        };
        if !absent.is_empty() && !gave_up.is_empty() {
            message += &format!(", and {} up waiting before", list_ranks_with_verb(&gave_up, "gave", "gave"));
        }
        // Whoever waited less long than the first to give up should not look for the fault there.
        if absent.is_empty()
            && !gave_up.is_empty()
            && let Some(missing) = self.hubs_missing(hubs)
        {
            message += &format!("; {missing}");
        }
        self.seats.give_up(rank, ticket);
        refusal(ErrorCode::Missing, message)
    }

    /// The connection on which a rank waited in ConnectService is gone: its seat is free, unless a newer call has it.
    pub(crate) fn connect_dropped(&mut self, rank: u32, ticket: u64) {
        if self.state == JobState::Connecting {
            self.seats.release(rank, ticket);
        }
    }

    /// Takes a rank's call to InitService.
    pub(crate) fn submit(
        &mut self,
        rank: u32,
        incarnation: Incarnation,
        settings: &Arc<Settings>,
        now: Now,
    ) -> Result<Submission, ServiceError> {
        self.last_sign = now;
        if self.state.has_ended() {
            return Err(self.failure_refusal());
        }
        self.check_rank(rank)?;
        if self.state == JobState::Connecting {
            let message = format!(
                "job `{}` is not complete yet: rank {rank} must wait for ConnectService's answer before it calls \
                 InitService",
                self.name
            );
            return Err(refusal(ErrorCode::BadRequest, message));
        }
        self.check_holder(rank, incarnation)?;
        if self.only_meets() {
            let message = format!(
                "job `{}` was created for 0 hubs: rank {rank} has none to initialise; create it for one or more",
                self.name
            );
            return Err(refusal(ErrorCode::BadRequest, message));
        }
        if self.state == JobState::Running {
            return Ok(Submission::Done);
        }
        let ticket = self.seats.call_again(rank);
        if self.agreed {
            return Ok(Submission::Wait { ticket });
        }
        match &self.proposed {
            None => {
                self.proposed = Some((rank, settings.clone()));
                Ok(Submission::Wait { ticket })
            }
            Some((first, settings)) => {
                Ok(Submission::Compare { ticket, first: *first, settings: settings.clone() })
            }
        }
    }

    /// A rank's settings agree with the first rank's. When it is the last to hand them in, hands them out, once, for
    /// the placement to be made.
    pub(crate) fn agree(&mut self, rank: u32) -> Option<Arc<Settings>> {
        if self.state != JobState::Initialising || self.agreed {
            return None;
        }
        self.seats.hand_in(rank);
        if !self.seats.have_all_handed_in() {
            return None;
        }
        self.agreed = true;
        self.proposed.take().map(|(_, settings)| settings)
    }

    /// The connection on which a rank waited in InitService is gone; it may come back for a little while.
    pub(crate) fn init_dropped(&mut self, rank: u32, ticket: u64, now: Now) {
        if self.state == JobState::Initialising {
            self.seats.lose(rank, ticket, now);
        }
    }

    /// A rank has waited in InitService for as long as it may: the job cannot go on without the others.
    pub(crate) fn init_timed_out(&mut self, now: Now) -> Transition {
        let (name, timeout_s) = (&self.name, self.options.rendezvous_timeout_s);
        let message = if self.agreed {
            let slow: Vec<String> =
                self.members.iter().filter(|member| !member.allocated).map(Member::describe).collect();
            match slow.is_empty() {
                true => format!("the placement of job `{name}` was not ready within {timeout_s} s"),
                false => {
                    format!("{} did not allocate job `{name}` within {timeout_s} s", join_words(&slow))
                }
            }
        } else {
            let late = self.seats.not_handed_in();
            format!(
                "{} not called InitService for job `{name}` within {timeout_s} s",
                list_ranks_with_verb(&late, "has", "have")
            )
        };
        self.fail(ErrorCode::Missing, message, now)
    }

    /// The manager's own placement stands, and the hubs are being asked to allocate. False where the job ended meanwhile.
    pub(crate) fn place(&mut self, outline: Outline, placed: Vec<Placed>, book: Arc<Book>) -> bool {
        if self.state != JobState::Initialising {
            return false;
        }
        self.outline = outline;
        self.placed = placed;
        self.book = Some(book);
        self.members.iter_mut().for_each(|member| member.asked = true);
        true
    }

    /// The answer to a rank whose InitService has waited long enough.
    pub(crate) fn initialised(&self, rank: u32) -> Result<ServiceInitialised, ServiceError> {
        let site = self.composition.as_ref().and_then(|composition| composition.site_of(rank));
        let placed = site.and_then(|site| self.placed.get(usize::from(site)));
        match (placed, &self.book, self.state) {
            (Some(placed), Some(book), JobState::Running) => Ok(ServiceInitialised {
                resumed_step: self.members.iter().find_map(|member| member.resumed_step),
                placement_hash: placed.hash.clone(),
                imbalance: placed.imbalance,
                roster: book.roster.clone(),
            }),
            _ => Err(self.failure_refusal()),
        }
    }

    /// Fails a job that waits for ranks that will not come: its lease ran out, or a rank did not come back.
    pub(crate) fn check_time(&mut self, now: Now) -> Transition {
        let is_served = self.state == JobState::Running && !self.only_meets();
        if is_served || self.state.has_ended() {
            return self.check_conclusion(now);
        }
        if let Some((rank, holder)) = self.seats.gone(now) {
            let message = format!("rank {rank} ({holder}) was lost before the job ran");
            return self.fail(ErrorCode::JobEnded, message, now);
        }
        if self.waiting == 0 && now.seconds_since(self.last_sign) >= self.options.lease_s {
            let lease_s = self.options.lease_s;
            let message = format!("its lease of {lease_s} s ran out: no worker has been heard for that long");
            return self.fail(ErrorCode::JobEnded, message, now);
        }
        Transition::None
    }

    /// A call that waited has ended.
    pub(crate) fn waited(&mut self, now: Now) {
        self.waiting -= 1;
        self.last_sign = now;
    }

    /// The refusal of any call to a job that is over.
    pub(crate) fn ended_refusal(&self) -> ServiceError {
        let message = match (self.state, self.message.is_empty()) {
            (JobState::Finished, _) => format!("job `{}` has finished", self.name),
            (_, true) => format!("job `{}` has ended", self.name),
            (_, false) => format!("job `{}` has ended: {}", self.name, self.message),
        };
        refusal(ErrorCode::JobEnded, message)
    }

    /// What a rank is told that waited when the job failed, or hands in its settings after that.
    fn failure_refusal(&self) -> ServiceError {
        match &self.failure {
            Some(failure) if failure.code != ErrorCode::JobEnded => failure.clone(),
            _ => self.ended_refusal(),
        }
    }

    /// What listings show.
    pub(crate) fn status(&self) -> JobStatus {
        JobStatus {
            name: self.name.clone(),
            namespace: self.namespace,
            state: self.state,
            message: self.message.clone(),
            workers: self.workers,
            connected: self.seats.taken(),
            keys: self.outline.keys,
            bytes: self.outline.bytes,
            optimizer: self.outline.optimizer.clone(),
            consistency: self.outline.consistency.clone(),
            reduction: self.reduction.clone(),
            counters: self.counters(),
            left_out: self.left_out(),
            awaited: self.awaited(Now::read()),
            checkpoints: self.checkpoints(),
            created_at: self.created_at,
            ended_at: self.ended_at,
        }
    }

    /// What the store keeps.
    pub(crate) fn record(&self) -> Record {
        Record { order: self.order, nonce: self.nonce, options: self.options, status: self.status() }
    }

    fn check_rank(&self, rank: u32) -> Result<(), ServiceError> {
        if rank < self.workers {
            return Ok(());
        }
        let ranks = list_ranks(&(0..self.workers).collect::<Vec<_>>());
        let message = format!("job `{}` has {ranks} only, not rank {rank}", self.name);
        Err(refusal(ErrorCode::BadRequest, message))
    }

    fn check_holder(&self, rank: u32, incarnation: Incarnation) -> Result<(), ServiceError> {
        match self.seats.holder(rank) {
            Some(holder) if holder.incarnation == incarnation => Ok(()),
            Some(holder) => Err(refusal(
                ErrorCode::RankTaken,
                format!(
                    "rank {rank} of job `{}` belongs to {holder}, not to the caller: start every rank once",
                    self.name
                ),
            )),
            None => Err(refusal(
                ErrorCode::BadRequest,
                format!("rank {rank} has not connected to job `{}`: call ConnectService first", self.name),
            )),
        }
    }
}

fn join_words(words: &[String]) -> String {
    match words {
        [] => String::new(),
        [only] => only.clone(),
        [most @ .., last] => format!("{} and {last}", most.join(", ")),
    }
}
