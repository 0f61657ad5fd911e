//! ConnectService and InitService: these rules decide which process gets a rank, what a call waits for, and
//! when the settings of all ranks are there.

use std::sync::Arc;

use super::calls::{AnswersBySite, JobCall};
use super::job_hubs::JobHub;
use super::rank_assignments::{RankHolder, Standing};
use super::rank_texts::{describe_process, list_ranks, list_ranks_with_verb};
use super::{Job, SettingsSummary, SitePlacement, Transition, join_words};
use crate::auth::{Epoch, Incarnation, Purpose, StreamSecret};
use crate::membership::hubs::{OfferedHub, check_place};
use crate::membership::{Connected, Now};
use crate::placement::HubShape;
use crate::scheme::InformationBook;
use crate::service::{
    ConnectService, ErrorCode, JobState, ServiceConnected, ServiceError, ServiceInitialised, refusal,
};
use crate::settings::Settings;

/// What the manager does next with a call to InitService.
#[derive(Debug)]
pub(crate) enum InitNext {
    /// The call waits. `ticket` distinguishes it from the rank's other calls. Its settings need no
    /// comparison, because they are the first, or because all ranks have agreed before. The manager calls
    /// [`agree`](Job::agree) all the same.
    Wait { ticket: u64 },
    /// The call waits. The manager compares its settings with those of rank `first`, and calls
    /// [`agree`](Job::agree) if they agree.
    Compare { ticket: u64, first: u32, settings: Arc<Settings> },
    /// The call waits, of a process that takes a lost rank. The manager compares the digest of its settings with that
    /// of the job, and calls [`join`](Job::join) if they agree.
    Join { ticket: u64, digest: String },
}

impl Job {
    /// Takes a rank's call to ConnectService. Returns the call's ticket, which distinguishes it from the
    /// rank's other calls.
    pub(crate) fn connect(&mut self, call: &ConnectService, now: Now) -> Result<u64, ServiceError> {
        if self.state.has_ended() {
            return Err(self.ended_refusal());
        }
        self.check_rank(call.rank)?;
        check_place(&call.place)?;
        // A process that calls again and again for a rank that another has is no sign of life of the job.
        if self.assignments.holder(call.rank).is_none_or(|holder| holder.has_called(call)) {
            self.lease.renew(now.monotonic);
        }
        self.take_number_of_workers(call)?;
        self.note_rival(call, now);
        match self.assignments.holder(call.rank) {
            Some(_) if self.state == JobState::Running && !self.takes_part(call.rank) => Err(refusal(
                ErrorCode::Busy,
                format!(
                    "job `{}` has {} ranks now, and rank {} can join when all ranks go back",
                    self.name, self.current_workers, call.rank
                ),
            )),
            Some(holder) if !holder.has_called(call) && self.may_replace(holder, now) => {
                self.replace_rank(call, now)
            }
            Some(holder) if holder.is_nobody() => Err(refusal(
                ErrorCode::Busy,
                format!(
                    "job `{}` begins with {} of its {} workers, and rank {} can join when it runs",
                    self.name,
                    self.first_workers(),
                    self.workers,
                    call.rank
                ),
            )),
            Some(holder) if !holder.has_called(call) => Err(refusal(
                // Its process may have died, and no hub have noticed yet.
                if self.may_lose_ranks() || self.has_begun_again() {
                    ErrorCode::Busy
                } else {
                    ErrorCode::RankTaken
                },
                format!(
                    "rank {} of job `{}` belongs to {holder}, so {} cannot have it: start every rank once",
                    call.rank,
                    self.name,
                    describe_process(&call.host, call.process)
                ),
            )),
            _ => {
                self.places[call.rank as usize] = call.place.clone();
                self.peer_addresses[call.rank as usize] = call.peer_address;
                Ok(self.assignments.assign(call, now))
            }
        }
    }

    /// Another process than the one that has a rank calls for it while the job begins again. If the one that has the rank does
    /// not wait in InitService, it may have died after the answer to ConnectService, when no connection showed that: it has to
    /// call within [`COME_BACK_S`](super::COME_BACK_S), or the job begins again without it.
    fn note_rival(&mut self, call: &ConnectService, now: Now) {
        let is_rival = self.assignments.holder(call.rank).is_some_and(|holder| !holder.has_called(call));
        let is_waiting =
            self.calls.values().any(|it| matches!(it, JobCall::Init { rank, .. } if *rank == call.rank));
        if is_rival && !is_waiting && self.state == JobState::Initialising && self.has_begun_again() {
            self.assignments.miss(call.rank, now);
        }
    }

    /// The answer to a rank that waits in ConnectService, once every rank and the hubs are there, or the job
    /// has ended.
    pub(super) fn connect_answer(
        &self,
        rank: u32,
        incarnation: Incarnation,
        answers: &mut AnswersBySite<ServiceConnected>,
    ) -> Result<Connected, ServiceError> {
        if self.state.has_ended() {
            return Err(self.failure_refusal());
        }
        self.check_holder(rank, incarnation)?;
        let holder = self.assignments.holder(rank).filter(|holder| holder.has_claim());
        let secret = self.epoch.zip(holder).map(|(epoch, holder)| (epoch, holder.since));
        if self.is_rendezvous_only() {
            let shared = answers.of(0, || self.connected_to(Vec::new()));
            return Ok(Connected { shared, rank, secret });
        }
        let composition = self.composition.as_ref().expect("a job has sites once every rank has connected");
        let site = composition.site_of(rank).expect("every rank is at a site");
        let hubs = || composition.sites[usize::from(site)].hubs.clone();
        let shared = answers.of(site, || self.connected_to(hubs()));
        Ok(Connected { shared, rank, secret })
    }

    fn connected_to(&self, hubs: Vec<HubShape>) -> ServiceConnected {
        ServiceConnected {
            name: self.name.clone(),
            workers: self.workers,
            hubs,
            options: self.options_told(),
            peer_addresses: self.peer_addresses.clone(),
            epoch: self.epoch.map_or(0, |epoch| epoch.number),
            shares: self.shares.clone(),
            later_hubs: if self.shares.is_empty() { Vec::new() } else { self.later_hubs() },
            secrets: None,
        }
    }

    /// The secrets with one of which a rank proves a call: the nonce for its first ConnectService, then its own. The
    /// nonce may be replaced meanwhile. A rank of protocol version 1 has no secret of its own. Once the job has ended it is forgotten which rank had, and
    /// all that a call gets is the reason of the end.
    pub(crate) fn call_secrets(&self, rank: u32, purpose: Purpose) -> [Option<StreamSecret>; 2] {
        let since = self.assignments.holder(rank).map(|holder| holder.since);
        let held_since = self.assignments.holder(rank).and_then(RankHolder::lost_what_it_held_since);
        let own = |epoch: Epoch| epoch.of_rank(rank, since.unwrap_or(epoch.number));
        let of_former_member = || self.former_members.as_ref().and_then(|former| former.secret(rank));
        let (nonce, own) = (self.nonce.into(), self.epoch.map(own));
        match (purpose, self.assignments.holder(rank)) {
            // A process that had the rank before the job began again is told so.
            (Purpose::Init, None) if self.has_begun_again() => [of_former_member(), own],
            (Purpose::Connect, _) | (_, None) => [Some(nonce), own],
            // A process that is lost while it waits in InitService is told so when it repeats the call.
            (Purpose::Init, Some(holder)) if holder.has_claim() => {
                let former = self.epoch.zip(held_since).map(|(epoch, since)| epoch.of_rank(rank, since));
                [own, former.or_else(of_former_member)]
            }
            // What a process that has lost its rank has seen of the hubs counts.
            (Purpose::Leave, Some(holder)) if holder.has_claim() => {
                let former = self.epoch.zip(holder.former());
                [own, former.map(|(epoch, (_, since))| epoch.of_rank(rank, since))]
            }
            (_, Some(holder)) if holder.has_claim() => [own, None],
            (_, Some(_)) => [Some(nonce), None],
        }
    }

    /// The ranks whose workers speak protocol version 1, ascending.
    pub fn version_1_ranks(&self) -> Vec<u32> {
        self.assignments.of_version_1()
    }

    /// A rank has waited in ConnectService until its time was over. It gives up its assignment, and the
    /// answer names the ranks or hubs that are missing.
    pub(crate) fn connect_timed_out(&mut self, rank: u32, ticket: u64, hubs: &[OfferedHub]) -> ServiceError {
        let absent = self.assignments.absent();
        let gave_up = self.assignments.gave_up();
        let (name, timeout_s) = (&self.name, self.connect_timeout_s());
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
        // If hubs are missing, the message names them, too, so that a rank that gives up later does not blame
        // the ranks that gave up first.
        if absent.is_empty()
            && !gave_up.is_empty()
            && let Some(missing) = self.hubs_missing(hubs)
        {
            message += &format!("; {missing}");
        }
        self.assignments.give_up(rank, ticket);
        refusal(ErrorCode::Missing, message)
    }

    /// The connection on which a rank waited in ConnectService is gone. If the job is still connecting, this
    /// frees the rank, unless a newer call holds it.
    pub(crate) fn connect_dropped(&mut self, rank: u32, ticket: u64) {
        if self.state == JobState::Connecting {
            self.assignments.release(rank, ticket);
        }
    }

    /// Takes a rank's call to InitService.
    pub(crate) fn submit(
        &mut self,
        rank: u32,
        incarnation: Incarnation,
        settings: &Arc<Settings>,
        now: Now,
    ) -> Result<InitNext, ServiceError> {
        self.lease.renew(now.monotonic);
        if self.state.has_ended() {
            return Err(self.failure_refusal());
        }
        self.check_rank(rank)?;
        if self.state == JobState::Connecting && self.has_begun_again() {
            return Err(self.refuse_lost(rank));
        }
        if self.state == JobState::Connecting {
            let message = format!(
                "job `{}` is not complete yet: rank {rank} must wait for ConnectService's answer before it calls \
                 InitService",
                self.name
            );
            return Err(refusal(ErrorCode::BadRequest, message));
        }
        self.check_holder(rank, incarnation)?;
        if self.is_rendezvous_only() {
            let message = format!(
                "job `{}` was created for 0 hubs: rank {rank} has none to initialise; create it for one or more",
                self.name
            );
            return Err(refusal(ErrorCode::BadRequest, message));
        }
        let ticket = self.assignments.renew_ticket(rank);
        if self.is_joining(rank) {
            return Ok(InitNext::Join { ticket, digest: self.summary.digest.clone() });
        }
        if self.agreed {
            return Ok(InitNext::Wait { ticket });
        }
        match &self.proposed {
            None => {
                self.proposed = Some((rank, settings.clone()));
                Ok(InitNext::Wait { ticket })
            }
            Some((first, settings)) => {
                Ok(InitNext::Compare { ticket, first: *first, settings: settings.clone() })
            }
        }
    }

    /// A rank's settings agree with the first rank's. Returns the settings, once, when it is the last to hand
    /// them in, so that the placement can be made.
    pub(crate) fn agree(&mut self, rank: u32) -> Option<Arc<Settings>> {
        if self.state != JobState::Initialising || self.agreed {
            return None;
        }
        self.assignments.mark_submitted(rank);
        if !self.assignments.have_all_submitted() {
            return None;
        }
        self.agreed = true;
        let settings = self.proposed.take().map(|(_, settings)| settings);
        self.settings = settings.clone().filter(|_| !self.shares.is_empty());
        settings
    }

    /// The connection on which a rank waited in InitService is gone. The rank may call again within
    /// [`COME_BACK_S`](super::COME_BACK_S).
    pub(crate) fn init_dropped(&mut self, rank: u32, ticket: u64, now: Now) {
        if self.state == JobState::Initialising || self.is_joining(rank) {
            self.assignments.mark_lost(rank, ticket, now);
        }
    }

    /// A rank has waited in InitService until its time was over. The job fails, or begins again once more, and its message
    /// names what is missing: settings of other ranks, the placement, or hubs that have not allocated.
    pub(crate) fn init_timed_out(&mut self, now: Now) -> Transition {
        let (name, timeout_s) = (&self.name, self.options.rendezvous_timeout_s);
        let message = if self.agreed {
            let slow: Vec<String> =
                self.job_hubs.iter().filter(|job_hub| !job_hub.allocated).map(JobHub::describe).collect();
            match slow.is_empty() {
                true => format!("the placement of job `{name}` was not ready within {timeout_s} s"),
                false => {
                    format!("{} did not allocate job `{name}` within {timeout_s} s", join_words(&slow))
                }
            }
        } else {
            let late = self.assignments.not_submitted();
            format!(
                "{} not called InitService for job `{name}` within {timeout_s} s",
                list_ranks_with_verb(&late, "has", "have")
            )
        };
        match self.has_begun_again() {
            true => self.fail_before_it_runs(message, now),
            false => self.fail(ErrorCode::Missing, message, now),
        }
    }

    /// Stores the placement that the manager has made; the hubs are being asked to allocate. Stores nothing
    /// and returns false unless the job is initialising: it may have ended meanwhile.
    pub(crate) fn place(
        &mut self,
        summary: SettingsSummary,
        placements: Vec<SitePlacement>,
        information_book: Arc<InformationBook>,
    ) -> bool {
        if self.state != JobState::Initialising {
            return false;
        }
        self.summary = summary;
        self.placements = placements;
        self.information_book = Some(information_book);
        self.job_hubs.iter_mut().for_each(|job_hub| job_hub.asked = true);
        true
    }

    /// The answer to a rank that waits in InitService, once the job runs or has ended.
    pub(super) fn init_answer(
        &self,
        rank: u32,
        answers: &mut AnswersBySite<ServiceInitialised>,
    ) -> Result<Arc<ServiceInitialised>, ServiceError> {
        let is_lost = self.assignments.holder(rank).is_some_and(|holder| holder.standing == Standing::Lost);
        if (is_lost || self.state == JobState::Connecting) && !self.state.has_ended() {
            return Err(self.refuse_lost(rank));
        }
        let site = self.composition.as_ref().and_then(|composition| composition.site_of(rank));
        let placed = site.and_then(|site| Some((site, self.placements.get(usize::from(site))?)));
        match (placed, &self.information_book, self.state) {
            (Some((site, placed)), Some(information_book), JobState::Running) => {
                let answer = |resumed_step, joined_running| ServiceInitialised {
                    resumed_step,
                    joined_running,
                    placement_hash: placed.hash.clone(),
                    imbalance: placed.imbalance,
                    roster: information_book.roster.clone(),
                };
                Ok(match self.joined_at(rank) {
                    Some(step) => Arc::new(answer(Some(step), true)),
                    // Some ranks of a job that has begun again have stayed, and do nothing of what a program does at its start.
                    None => answers.of(site, || answer(self.resumed_step(), self.has_begun_again())),
                })
            }
            _ => Err(self.failure_refusal()),
        }
    }

    pub(super) fn check_rank(&self, rank: u32) -> Result<(), ServiceError> {
        if rank < self.workers {
            return Ok(());
        }
        let ranks = list_ranks(&(0..self.workers).collect::<Vec<_>>());
        let message = format!("job `{}` has {ranks} only, not rank {rank}", self.name);
        Err(refusal(ErrorCode::BadRequest, message))
    }

    pub(super) fn check_holder(&self, rank: u32, incarnation: Incarnation) -> Result<(), ServiceError> {
        match self.assignments.holder(rank) {
            Some(holder) if holder.is(incarnation) => Ok(()),
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
