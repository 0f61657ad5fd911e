//! The rules by which a hub takes contributions to chunks, updates parameters and answers requests.
//!
//! An [`Exchange`] sees no data. It tells its caller what to do with each payload and when to run the optimizer.

use std::collections::HashSet;
use std::ops::Range;

use super::rewind::KeptVersion;
use super::violation::{Awaited, LeftWhileAwaited, ProtocolViolation};
use crate::consistency::Consistency;
use crate::limits::STATE_UPDATES_MAX;
use crate::stragglers::Quorum;

/// The rules that hold for all chunks of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Ranks in the job, at whichever site they exchange.
    pub workers: u32,
    /// The number of members here: workers by rank, then [sites](crate::composition). A flat job has workers
    /// only.
    pub members: u32,
    /// The first member that is a site; equal to `members` if none is.
    pub first_site: u32,
    /// The member that is rank 0, if rank 0 exchanges here.
    pub rank_0: Option<u32>,
    /// The rule for the time at which contributions take effect and answers may leave.
    pub consistency: Consistency,
    /// `true` if contributions are summed in the order of members.
    pub reproducible: bool,
    /// `true` if rank 0 must send the initial parameters, to this site or to another one that passes them on.
    pub has_parameters: bool,
    /// `true` if a complete chunk is held until rank 0 releases the step. Such a job is synchronous and has
    /// parameters.
    pub two_phase: bool,
    /// In a job whose steps may end without some members: the condition that ends a chunk's step. Such a job is
    /// synchronous, has one phase and one site, and is not reproducible.
    pub quorum: Option<Quorum>,
    /// The number of members that are there from the beginning, counted from member 0. Others may take the places of the
    /// rest while the job runs, in a job with the quorum [`Quorum::NotLost`], or when all [begin
    /// again](super::Exchange::rewind).
    pub first_members: u32,
    /// In a job that goes [back](super::Exchange::rewind) when a member is lost: the number of updates from one copy of
    /// a chunk to the next. Such a job is synchronous, has one site, and has no quorum.
    pub rewind_every: Option<u32>,
}

/// The state of one route's chunks. Slots number the chunks as in [`crate::placement::Placement::chunks`].
#[derive(Clone, Debug)]
pub struct Exchange {
    pub(super) rules: Rules,
    pub(super) chunks: Vec<ChunkState>,
    /// The state of member `m` at slot `s`, at `s * members + m`.
    members: Vec<MemberState>,
    /// For each member, whether it has left of its own accord or is lost.
    pub(super) departed: Vec<bool>,
    pub(super) departures: u32,
    /// In a job without a quorum: the number of members, counted from the last one, whose places nobody has. Steps end
    /// without them.
    pub(super) absent: u32,
    /// For each member, whether a process has its place.
    pub(super) presence: Vec<Presence>,
    /// For each member, the first step to which it contributes: another process contributed to earlier ones.
    pub(super) joined_at: Vec<u32>,
    /// The slots and members for which the sum of the step under way has a contribution of a process that was
    /// lost and whose place another process has taken.
    pub(super) former_contributions: HashSet<(u32, u32)>,
    /// The number of chunks that are held and not released yet.
    held: u32,
    /// The next slot that the release under way updates; the number of chunks if there is no release.
    release_at: u32,
    /// The version that the first parameters came with.
    pub(super) start_version: Option<u32>,
    /// For each slot, the copy that the caller keeps; empty if the job never goes back.
    pub(super) kept: Vec<Option<KeptVersion>>,
    /// For each member, how many updates of chunks were made without it; empty if the job waits for all members.
    pub(super) left_out: Vec<u64>,
}

/// The members and sites that a chunk's sum involves. It may differ from chunk to chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkReach {
    /// The number of members that contribute to the chunk, counted from member 0.
    pub members: u32,
    /// `true` if the sum goes on to a site above.
    pub has_above: bool,
}

/// Whether a process has the place of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    /// One has it, or has left of its own accord.
    Present,
    /// The same, and none had it before.
    Newcomer,
    /// None has had it yet.
    NotYet,
    /// The one that had it is lost.
    Lost,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ChunkState {
    reach: ChunkReach,
    /// The number of updates; its low 32 bits travel.
    pub(super) version: u64,
    /// Updates since the optimizer's state was zero, which need not have been at version 0.
    updates: u64,
    /// Contributions to the step under way.
    pub(super) arrived: u32,
    /// The number of them that are in the sum; fewer than `arrived` only while some are parked.
    pub(super) folded: u32,
    /// In a job with a quorum: the number of members that may contribute to the step under way and have not.
    /// They have the parameters that it starts from, or are about to receive them.
    pub(super) awaited: u32,
    /// The number of those members that were counted in the step before.
    pub(super) prompt: u32,
    pub(super) initialised: bool,
    /// `true` if members contribute factors.
    takes_factors: bool,
    pub(super) stage: StepStage,
}

/// The progress of the step under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum StepStage {
    /// Some contributions are missing.
    #[default]
    Open,
    /// The sum is complete here and goes to the site above.
    SentUp,
    /// All factors are here, and the sum is being made of them.
    SummingFactors,
    /// The sum is complete, and the chunk waits for its release.
    Held,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MemberState {
    /// The step that the member pushes next. In a job that leaves out late members: the version of the
    /// parameters that it has or waits for.
    pub(super) next_step: u32,
    pub(super) request: MemberRequest,
    /// `true` if the member was counted in the step before, or there was no step before.
    pub(super) is_prompt: bool,
}

impl ChunkState {
    fn new(reach: ChunkReach, initialised: bool) -> Self {
        ChunkState {
            reach,
            version: 0,
            updates: 0,
            arrived: 0,
            folded: 0,
            awaited: 0,
            prompt: 0,
            initialised,
            takes_factors: false,
            stage: StepStage::Open,
        }
    }

    /// Goes back to an earlier version, which had had this many updates; `None` if the chunk is at it.
    pub(super) fn go_back(&mut self, version: u32, updates: Option<u64>) {
        self.version = u64::from(version);
        self.updates = updates.unwrap_or(self.updates);
    }

    /// Ends the step under way.
    pub(super) fn update(&mut self, step: u32, contributions: u32) -> Update {
        self.version += 1;
        self.updates += 1;
        self.arrived = 0;
        self.folded = 0;
        self.stage = StepStage::Open;
        Update { step, number: self.updates, contributions }
    }
}

/// The request of a member for a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum MemberRequest {
    #[default]
    None,
    /// The member's stream was cut. Whether it waits for an answer is known when it repeats its request or
    /// goes on.
    Cut,
    Waiting(Answer),
    /// The answer may leave but has not begun to.
    Sendable(Answer),
}

/// The way in which the hub answers a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The newest parameters, to Pull and PushPull.
    Parameters,
    /// A bare acknowledgement, to Push, Initialise and InitialiseState.
    Applied,
    /// This slot of the optimizer's state, to PullState.
    State(u8),
}

/// It is held for each chunk and member, so its size is fixed at 8 bytes.
const _: () = assert!(size_of::<MemberState>() == 8);

/// The handling of a contribution that has arrived whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The destination of the payload.
    pub fold: Fold,
    /// The action for the sum after the fold.
    pub then: SumAction,
}

/// The action for a chunk's sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumAction {
    /// Wait: the sum lacks contributions.
    Wait,
    /// Send the sum to the site above, whose answer [`Exchange::lower`] takes: it is complete here.
    Raise,
    /// Make the sum of the factors, which are all here, and then call [`Exchange::made`].
    Make,
    /// Hold the chunk until its step is released: the sum is complete.
    Hold,
    /// Run the optimizer on the sum.
    Update(Update),
    /// Nothing: the contribution was here before. Its answer may be due, or due again.
    Repeated,
    /// Nothing: the step is over and the contribution does not count. Its answer may be due.
    Late,
}

/// The destination of a contribution's payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fold {
    /// Add the payload to the sum now, then the contributions that the members of `parked` have parked, in
    /// that order.
    Sum {
        /// `true` if the sum starts with this payload instead of adding to it.
        starts_sum: bool,
        /// Members whose parked contributions are due.
        parked: Range<u32>,
    },
    /// Park the payload at the member's place until the contributions of all lower members are in the sum.
    Park,
    /// Discard the payload: it is in the sum already, or its step is over.
    Drop,
}

/// A run of the optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Update {
    /// The step it completes: hyperparameters are those that hold at it.
    pub step: u32,
    /// Updates since the optimizer's state was zero, this one included: Adam's t.
    pub number: u64,
    /// Contributions in the sum; the mean divides by this number.
    pub contributions: u32,
}

impl Exchange {
    /// The state of `chunks` chunks. It allocates all the memory it will ever need.
    pub fn new(rules: Rules, chunks: u32) -> Self {
        let reach = ChunkReach { members: rules.members, has_above: false };
        Self::among_sites(rules, std::iter::repeat_n(reach, chunks as usize))
    }

    /// Does the same as [`Exchange::new`], for a site among others. `reach` states for each chunk which
    /// members contribute to it and whether its sum goes to a site above.
    pub fn among_sites(rules: Rules, reach: impl IntoIterator<Item = ChunkReach>) -> Self {
        let chunks: Vec<ChunkState> =
            reach.into_iter().map(|reach| ChunkState::new(reach, !rules.has_parameters)).collect();
        let mut exchange = Exchange {
            rules,
            members: vec![MemberState::default(); chunks.len() * rules.members as usize],
            departed: vec![false; rules.members as usize],
            departures: 0,
            absent: 0,
            presence: vec![Presence::Present; rules.members as usize],
            joined_at: vec![0; rules.members as usize],
            former_contributions: HashSet::new(),
            held: 0,
            release_at: chunks.len() as u32,
            start_version: None,
            kept: vec![None; if rules.rewind_every.is_some() { chunks.len() } else { 0 }],
            left_out: vec![0; if rules.quorum.is_some() { rules.members as usize } else { 0 }],
            chunks,
        };
        exchange.begin_with(rules.first_members);
        exchange.await_all();
        exchange
    }

    /// Gives the places of this many members, counted from member 0, to processes, and those of the others to nobody.
    pub(super) fn begin_with(&mut self, members: u32) {
        for (member, departed) in (0..).zip(&mut self.departed) {
            *departed = member >= members;
            self.presence[member as usize] = if *departed { Presence::NotYet } else { Presence::Present };
        }
        self.departures = self.rules.members.saturating_sub(members);
        self.absent = if self.rules.quorum.is_none() { self.departures } else { 0 };
    }

    /// In a synchronous job without a quorum: the number of workers that contribute to each step.
    pub fn contributors(&self) -> u32 {
        self.rules.workers - self.absent
    }

    /// Bytes that this state takes.
    pub fn memory_bytes(rules: Rules, chunks: u32) -> u64 {
        let kept = if rules.rewind_every.is_some() { size_of::<Option<KeptVersion>>() } else { 0 };
        let per_chunk = size_of::<ChunkState>() + kept + size_of::<MemberState>() * rules.members as usize;
        u64::from(chunks) * per_chunk as u64
    }

    /// Makes these chunks take [factors](super::Gathering) instead of gradients. The caller does so before
    /// anything else.
    pub fn take_factors(&mut self, slots: impl IntoIterator<Item = u32>) {
        for slot in slots {
            self.chunks[slot as usize].takes_factors = true;
        }
    }

    /// Returns whether members contribute factors to the chunk.
    pub fn takes_factors(&self, slot: u32) -> bool {
        self.chunks[slot as usize].takes_factors
    }

    /// Takes the initial parameters, at `version`, from a member or, if `None`, from the site above.
    ///
    /// Returns whether the caller must copy them into the model and call [`Exchange::mark_due_answers`]; `false`: they
    /// were here already when the member's stream was cut.
    pub fn initialise(
        &mut self,
        slot: u32,
        member: Option<u32>,
        version: u32,
    ) -> Result<bool, ProtocolViolation> {
        let chunk = self.chunks[slot as usize];
        if let Some(rank_0) = member.filter(|_| member == self.rules.rank_0)
            && chunk.initialised
            && self.rules.has_parameters
            && chunk.version == u64::from(version)
            && self.member(slot, rank_0).request == MemberRequest::Cut
        {
            self.member_mut(slot, rank_0).request = MemberRequest::Waiting(Answer::Applied);
            return Ok(false);
        }
        if chunk.initialised || !self.speaks_for_rank_0(member) {
            return Err(ProtocolViolation::Initialised);
        }
        if member.is_some_and(|member| self.is_unanswered(slot, member)) {
            return Err(ProtocolViolation::Unanswered);
        }
        let expected = self.start_version.unwrap_or(version);
        if self.rules.two_phase && version != expected {
            return Err(ProtocolViolation::Versions { expected, got: version });
        }
        self.start_version = Some(expected);
        self.chunks[slot as usize] = ChunkState {
            version: u64::from(version),
            updates: chunk.updates,
            takes_factors: chunk.takes_factors,
            ..ChunkState::new(chunk.reach, true)
        };
        for member in 0..self.rules.members {
            let member_state = self.member_mut(slot, member);
            (member_state.next_step, member_state.is_prompt) = (version, true);
        }
        self.count_awaited(slot);
        if let Some(rank_0) = member.filter(|_| member == self.rules.rank_0) {
            self.member_mut(slot, rank_0).request = MemberRequest::Waiting(Answer::Applied);
        }
        Ok(true)
    }

    /// Returns whether `member` may send what only rank 0 may send: it is rank 0, or a site that passes it
    /// on.
    fn speaks_for_rank_0(&self, member: Option<u32>) -> bool {
        member.is_none_or(|member| self.rules.rank_0 == Some(member) || member >= self.rules.first_site)
    }

    /// Takes a slot of the optimizer's initial state, which has had `updates` updates; the count that
    /// comes with the last slot is kept. On `Ok` the caller copies the state and owes rank 0 an acknowledgement
    /// at once.
    ///
    /// The state comes before the parameters. No other member may contribute or is answered before the
    /// parameters are here, so none sees a chunk with restored parameters and without its restored state.
    pub fn initialise_state(
        &mut self,
        slot: u32,
        member: Option<u32>,
        updates: u64,
    ) -> Result<(), ProtocolViolation> {
        if self.chunks[slot as usize].initialised || !self.speaks_for_rank_0(member) {
            return Err(ProtocolViolation::StateInitialised);
        }
        if member.is_some_and(|member| self.is_unanswered(slot, member)) {
            return Err(ProtocolViolation::Unanswered);
        }
        if updates > STATE_UPDATES_MAX {
            return Err(ProtocolViolation::StateUpdates(updates));
        }
        self.chunks[slot as usize].updates = updates;
        if let Some(rank_0) = member.filter(|_| member == self.rules.rank_0) {
            self.member_mut(slot, rank_0).request = MemberRequest::Sendable(Answer::Applied);
        }
        Ok(())
    }

    /// Takes a request for a slot of the optimizer's state. The answer is due as soon as there are
    /// parameters, and is the state after the chunk's last update: see [`Exchange::mark_due_answers`].
    pub fn pull_state(&mut self, slot: u32, member: u32, state_slot: u8) -> Result<(), ProtocolViolation> {
        if self.is_unanswered(slot, member) {
            return Err(ProtocolViolation::Unanswered);
        }
        self.member_mut(slot, member).request = MemberRequest::Waiting(Answer::State(state_slot));
        Ok(())
    }

    /// The chunk's step under way.
    pub fn step(&self, slot: u32) -> u32 {
        self.chunks[slot as usize].version as u32
    }

    /// Returns whether the chunk has its initial parameters.
    pub fn has_begun(&self, slot: u32) -> bool {
        self.chunks[slot as usize].initialised
    }

    /// The first step to which not every member has contributed. Lost members do not count.
    pub fn steps_of_all(&self, slot: u32) -> u32 {
        let members = self.chunks[slot as usize].reach.members;
        let not_lost = (0..members).filter(|&member| !self.is_lost(member));
        not_lost.map(|member| self.member(slot, member).next_step).min().unwrap_or(0)
    }

    /// Updates of the chunk since its optimizer's state was zero.
    pub fn updates(&self, slot: u32) -> u64 {
        self.chunks[slot as usize].updates
    }

    /// The answer that is owed to `member` and has not begun to leave.
    pub fn owed(&self, slot: u32, member: u32) -> Option<Answer> {
        match self.member(slot, member).request {
            MemberRequest::Sendable(answer) => Some(answer),
            MemberRequest::None | MemberRequest::Cut | MemberRequest::Waiting(_) => None,
        }
    }

    /// Takes a contribution that has arrived whole. The caller does what the [`Arrival`] states. After an
    /// update, a repeated push and a late one it calls [`Exchange::mark_due_answers`].
    pub fn push(
        &mut self,
        slot: u32,
        member: u32,
        step: u32,
        answer: Answer,
    ) -> Result<Arrival, ProtocolViolation> {
        if self.is_repeat(slot, member, step) {
            self.member_mut(slot, member).request = MemberRequest::Waiting(answer);
            return Ok(Arrival { fold: Fold::Drop, then: SumAction::Repeated });
        }
        self.check_push(slot, member, step)?;
        let chunk = self.chunks[slot as usize];
        if self.rules.quorum.is_some() {
            return self.push_in_time_or_late(slot, member, step, answer);
        }
        let state = self.member_mut(slot, member);
        (state.next_step, state.request) = (step + 1, MemberRequest::Waiting(answer));
        let (members_due, contributions_due) = match self.rules.consistency {
            Consistency::Synchronous => (chunk.reach.members - self.absent, self.contributors()),
            Consistency::Asynchronous | Consistency::BoundedStaleness(_) => (1, 1),
        };
        let fold = self.fold(slot, member);
        let chunk = &mut self.chunks[slot as usize];
        chunk.arrived += 1;
        let then = match chunk.arrived == members_due {
            false => SumAction::Wait,
            true if chunk.reach.has_above => {
                chunk.stage = StepStage::SentUp;
                SumAction::Raise
            }
            true if chunk.takes_factors => {
                chunk.stage = StepStage::SummingFactors;
                SumAction::Make
            }
            true => self.complete(slot, step, contributions_due),
        };
        Ok(Arrival { fold, then })
    }

    /// Fails if a contribution of this member to `step` cannot be taken now. It changes nothing. A
    /// [repetition](Self::is_repeat) is taken without this check.
    pub fn check_push(&self, slot: u32, member: u32, step: u32) -> Result<(), ProtocolViolation> {
        let (chunk, member_state) = (self.chunks[slot as usize], self.member(slot, member));
        if !chunk.initialised {
            return Err(ProtocolViolation::NotInitialised);
        }
        if !matches!(member_state.request, MemberRequest::None | MemberRequest::Cut) {
            return Err(ProtocolViolation::Unanswered);
        }
        let expected = member_state.next_step;
        match step {
            got if got < expected => return Err(ProtocolViolation::StepBehind { expected, got }),
            got if got > expected => return Err(ProtocolViolation::StepAhead { expected, got }),
            u32::MAX => return Err(ProtocolViolation::StepsExhausted),
            _ => {}
        }
        if self.rules.consistency == Consistency::Synchronous && u64::from(step) > chunk.version {
            return Err(ProtocolViolation::StepAhead { expected: chunk.version as u32, got: step });
        }
        Ok(())
    }

    /// Takes the report that the caller has [made](SumAction::Make) a chunk's sum, and returns what to do
    /// with the sum.
    ///
    /// # Panics
    /// If the sum was not to be made.
    pub fn made(&mut self, slot: u32) -> SumAction {
        let chunk = self.chunks[slot as usize];
        assert_eq!(chunk.stage, StepStage::SummingFactors, "the sum waits for no factors");
        self.complete(slot, chunk.version as u32, self.contributors())
    }

    /// Notes that a member's stream was cut and another replaces it. Every answer that was owed to the member
    /// counts as lost, even if it has left: the member repeats each request that was not answered whole, and
    /// is answered again. In a synchronous job the chunk cannot have moved on since, so the answer is the
    /// same.
    pub fn resume(&mut self, member: u32) {
        debug_assert_eq!(
            self.rules.consistency,
            Consistency::Synchronous,
            "only a synchronous job resumes streams"
        );
        for slot in 0..self.chunks.len() as u32 {
            self.member_mut(slot, member).request = MemberRequest::Cut;
        }
    }

    /// Returns whether a contribution to `step` was taken before the member's stream was cut.
    pub fn is_repeat(&self, slot: u32, member: u32, step: u32) -> bool {
        let member_state = self.member(slot, member);
        member_state.request == MemberRequest::Cut && step.checked_add(1) == Some(member_state.next_step)
    }

    /// Takes the answer of the site above to a sum that went up at `step`: the sum of all workers' gradients.
    /// The step then continues as if the sum had become complete here.
    pub fn lower(&mut self, slot: u32, step: u32) -> Result<SumAction, ProtocolViolation> {
        let chunk = self.chunks[slot as usize];
        if chunk.stage != StepStage::SentUp || chunk.version != u64::from(step) {
            return Err(ProtocolViolation::NotAwaited(step));
        }
        Ok(self.complete(slot, step, self.contributors()))
    }

    /// Continues the step once the sum is complete.
    fn complete(&mut self, slot: u32, step: u32, contributions: u32) -> SumAction {
        let chunk = &mut self.chunks[slot as usize];
        if self.rules.two_phase {
            chunk.stage = StepStage::Held;
            self.held += 1;
            return SumAction::Hold;
        }
        SumAction::Update(chunk.update(step, contributions))
    }

    /// The step at which all chunks are held, if they are: its norm is due.
    pub fn held_step(&self) -> Option<u32> {
        let all = self.rules.two_phase && self.held as usize == self.chunks.len();
        all.then(|| self.chunks[0].version as u32)
    }

    /// Takes rank 0's release of the step at which all chunks are held. The caller then asks for the chunks'
    /// updates, a few at a time: see [`Exchange::release_next`].
    pub fn release(&mut self, member: u32, step: u32) -> Result<(), ProtocolViolation> {
        if self.rules.rank_0 != Some(member) || self.held_step() != Some(step) {
            return Err(ProtocolViolation::Released(step));
        }
        self.held = 0;
        self.release_at = 0;
        Ok(())
    }

    /// The next chunk of the release under way, most urgent first, and its update. The caller calls
    /// [`Exchange::mark_due_answers`] and runs the optimizer, in either order.
    pub fn release_next(&mut self) -> Option<(u32, Update)> {
        let (slot, contributors) = (self.release_at, self.contributors());
        let chunk = self.chunks.get_mut(slot as usize)?;
        self.release_at += 1;
        Some((slot, chunk.update(chunk.version as u32, contributors)))
    }

    /// Forgets which chunks are held or wait for their update.
    pub(super) fn forget_releases(&mut self) {
        self.held = 0;
        self.release_at = self.chunks.len() as u32;
    }

    /// Returns whether chunks of a released step wait for their update.
    pub fn is_releasing(&self) -> bool {
        (self.release_at as usize) < self.chunks.len()
    }

    /// Takes a request for parameters of at least `version`. The answer may be due at once: see [`Exchange::mark_due_answers`].
    pub fn pull(&mut self, slot: u32, member: u32, version: u32) -> Result<(), ProtocolViolation> {
        let chunk = self.chunks[slot as usize];
        let member_state = self.member(slot, member);
        if self.is_unanswered(slot, member) {
            return Err(ProtocolViolation::Unanswered);
        }
        let newest = match self.rules.consistency {
            // A member that has joined waits for the version that its first step starts from.
            Consistency::Synchronous => member_state.next_step.max(chunk.version as u32),
            Consistency::Asynchronous | Consistency::BoundedStaleness(_) => member_state.next_step,
        };
        // Before rank 0 has sent parameters, the version that they start from is unknown.
        if chunk.initialised && version > newest {
            return Err(ProtocolViolation::StepAhead { expected: newest, got: version });
        }
        self.member_mut(slot, member).request = MemberRequest::Waiting(Answer::Parameters);
        Ok(())
    }

    /// Calls `on_due` for each member whose request for this chunk may now be answered and could not be
    /// before. In a job that leaves out late members, it also calls `on_due` for members whose parameters have
    /// not begun to leave. The caller calls it after every initialise, [`Update`], pull, pull_state, late push and
    /// repeated push of the chunk. After an update, the answers may leave once the optimizer has run.
    pub fn mark_due_answers(&mut self, slot: u32, mut on_due: impl FnMut(u32, Answer)) {
        let slowest = self.slowest(slot);
        for member in 0..self.rules.members {
            match self.member(slot, member).request {
                MemberRequest::Waiting(answer) if self.may_answer(slot, member, answer, slowest) => {
                    self.member_mut(slot, member).request = MemberRequest::Sendable(answer);
                    on_due(member, answer);
                }
                // The chunk may have had updates since. An answer that has not begun to leave carries the
                // newest values, even if older ones are already in an arena.
                MemberRequest::Sendable(Answer::Parameters)
                    if self.rules.quorum.is_some_and(Quorum::leaves_out) =>
                {
                    on_due(member, Answer::Parameters);
                }
                _ => {}
            }
        }
    }

    /// The version to send with the answer to `member`.
    pub fn answer_version(&self, slot: u32, member: u32) -> u32 {
        match self.rules.consistency {
            Consistency::Synchronous => self.chunks[slot as usize].version as u32,
            // Without common steps each worker counts its own.
            Consistency::Asynchronous | Consistency::BoundedStaleness(_) => {
                self.member(slot, member).next_step
            }
        }
    }

    /// Notes that the answer to `member` has begun to leave: from now on the member may request this chunk
    /// again.
    pub fn answer_begun(&mut self, slot: u32, member: u32) {
        let request = &mut self.member_mut(slot, member).request;
        debug_assert!(matches!(request, MemberRequest::Sendable(_)), "only what is owed is sent");
        let owed = std::mem::take(request);
        if self.rules.quorum.is_some() {
            self.catch_up(slot, member, owed);
        }
    }

    /// Notes that a member has left of its own accord, and calls `on_due` as [`Exchange::mark_due_answers`] does, for
    /// every slot whose answers may now leave.
    ///
    /// Fails if another member waits for something that only a member that has left could send.
    pub fn leave(
        &mut self,
        member: u32,
        mut on_due: impl FnMut(u32, u32, Answer),
    ) -> Result<(), LeftWhileAwaited> {
        self.departed[member as usize] = true;
        self.departures += 1;
        for slot in 0..self.chunks.len() as u32 {
            // An answer that may leave is still sent.
            if let MemberRequest::Waiting(_) = self.member(slot, member).request {
                self.member_mut(slot, member).request = MemberRequest::None;
            }
            self.count_awaited(slot);
            self.mark_due_answers(slot, |waiting, answer| on_due(slot, waiting, answer));
            self.check_waits(slot)?;
        }
        Ok(())
    }

    /// Fails if a member waits at this chunk for one that has left. The caller calls it after every pull, and
    /// after every push without an update.
    pub fn check_waits(&self, slot: u32) -> Result<(), LeftWhileAwaited> {
        if self.departures == self.absent {
            return Ok(());
        }
        let chunk = self.chunks[slot as usize];
        let gone_rank_0 = self.rules.rank_0.filter(|&rank_0| self.departed[rank_0 as usize]);
        let missing = if !chunk.initialised {
            gone_rank_0.map(|rank_0| (rank_0, Awaited::Parameters))
        } else if chunk.stage == StepStage::SummingFactors {
            // All contributions are here.
            None
        } else if chunk.stage == StepStage::Held {
            let is_released = self.is_releasing() && slot >= self.release_at;
            let gone = gone_rank_0.filter(|_| !is_released);
            gone.map(|rank_0| (rank_0, Awaited::Release(chunk.version as u32)))
        } else if self.rules.consistency == Consistency::Synchronous && self.rules.quorum.is_none() {
            self.missing(slot)
                .find(|&member| self.departed[member as usize])
                .map(|member| (member, Awaited::Contribution(chunk.version as u32)))
        } else {
            None
        };
        let waits = |member: u32| {
            matches!(self.member(slot, member).request, MemberRequest::Waiting(_))
                && !self.departed[member as usize]
        };
        match missing {
            Some((member, awaited)) if (0..self.rules.members).any(waits) => {
                Err(LeftWhileAwaited { member, awaited })
            }
            _ => Ok(()),
        }
    }

    /// The number of members that contribute to the chunk, counted from member 0.
    pub(super) fn member_count(&self, slot: u32) -> u32 {
        self.chunks[slot as usize].reach.members
    }

    /// Members whose contribution to the chunk's step under way is missing, ascending.
    pub fn missing(&self, slot: u32) -> impl Iterator<Item = u32> + '_ {
        let chunk = self.chunks[slot as usize];
        let version = chunk.version;
        (0..chunk.reach.members - self.absent)
            .filter(move |&member| u64::from(self.member(slot, member).next_step) <= version)
    }

    /// Returns the destination of the contribution and counts it. Contributions are summed in the order of
    /// members if the job is reproducible, else in the order of arrival.
    fn fold(&mut self, slot: u32, member: u32) -> Fold {
        let chunk = self.chunks[slot as usize];
        if !self.rules.reproducible {
            self.chunks[slot as usize].folded += 1;
            return Fold::Sum { starts_sum: chunk.folded == 0, parked: 0..0 };
        }
        if chunk.folded != member {
            return Fold::Park;
        }
        let next_step = self.member(slot, member).next_step;
        let mut end = member + 1;
        while end < chunk.reach.members && self.member(slot, end).next_step == next_step {
            end += 1;
        }
        self.chunks[slot as usize].folded = end;
        Fold::Sum { starts_sum: member == 0, parked: member + 1..end }
    }

    fn may_answer(&self, slot: u32, member: u32, answer: Answer, slowest: u32) -> bool {
        let chunk = self.chunks[slot as usize];
        let next_step = self.member(slot, member).next_step;
        chunk.initialised
            && match self.rules.consistency {
                _ if matches!(answer, Answer::State(_)) => true,
                Consistency::Synchronous => u64::from(next_step) <= chunk.version,
                Consistency::Asynchronous => true,
                Consistency::BoundedStaleness(bound) => next_step - slowest <= bound,
            }
    }

    /// The next step of the least advanced member; members that have left do not count.
    pub(super) fn slowest(&self, slot: u32) -> u32 {
        let present = (0..self.rules.members).filter(|&member| !self.departed[member as usize]);
        present.map(|member| self.member(slot, member).next_step).min().unwrap_or(u32::MAX)
    }

    fn is_unanswered(&self, slot: u32, member: u32) -> bool {
        matches!(self.member(slot, member).request, MemberRequest::Waiting(_) | MemberRequest::Sendable(_))
    }

    pub(super) fn member(&self, slot: u32, member: u32) -> MemberState {
        self.members[slot as usize * self.rules.members as usize + member as usize]
    }

    pub(super) fn member_mut(&mut self, slot: u32, member: u32) -> &mut MemberState {
        &mut self.members[slot as usize * self.rules.members as usize + member as usize]
    }
}
