use std::ops::Range;

use super::offence::{Awaited, Offence, Stranded};
use crate::consistency::Consistency;
use crate::limits::STATE_UPDATES_MAX;
use crate::stragglers::Quorum;

/// What holds for all chunks of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Ranks in the job, wherever they exchange: the mean divides by it.
    pub workers: u32,
    /// Who contributes here: workers by rank, then [sites](crate::composition). A flat job has no others than its workers.
    pub members: u32,
    /// The first member that is a site; `members` where none is.
    pub sites_from: u32,
    /// The member that is rank 0, if it exchanges here.
    pub rank_0: Option<u32>,
    /// When contributions take effect and answers may leave.
    pub consistency: Consistency,
    /// Sum in the order of members.
    pub reproducible: bool,
    /// Whether rank 0 must send the parameters to start from, here or to another site that passes them on.
    pub has_parameters: bool,
    /// Whether a complete chunk is held until rank 0 releases the step; synchronous, with parameters.
    pub two_phase: bool,
    /// What ends a chunk's step, whoever is missing, where late ones are left out. Synchronous, with parameters, one phase, one
    /// site, and not reproducible.
    pub quorum: Option<Quorum>,
}

/// The books of one route's chunks. Slots number the chunks as in [`crate::placement::Placement::chunks`].
#[derive(Clone, Debug)]
pub struct Exchange {
    pub(super) rules: Rules,
    pub(super) chunks: Vec<ChunkBook>,
    /// Of slot `s` and member `m`, at `s * members + m`.
    books: Vec<MemberBook>,
    pub(super) left: Vec<bool>,
    departures: u32,
    /// Of the chunks held, those that no release has named.
    held: u32,
    /// Of a release under way: the next slot to be updated; the number of chunks where none is.
    release_at: u32,
    /// The version the first parameters came with.
    start: Option<u32>,
    /// Of every member, how many updates of chunks it was left out of; empty where all are waited for.
    pub(super) left_out: Vec<u64>,
}

/// How a chunk stands to the sites around, which may differ from chunk to chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// Members that contribute to it: the first so many.
    pub members: u32,
    /// Whether the sum goes on to a site above.
    pub has_above: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ChunkBook {
    reach: Reach,
    /// Grows by one an update; the low 32 bits travel.
    pub(super) version: u64,
    /// Updates since the optimizer's state was zero, which need not be at version 0.
    updates: u64,
    /// Contributions to the step under way.
    pub(super) arrived: u32,
    /// Of those, how many are in the sum; fewer than `arrived` only while some are parked.
    pub(super) folded: u32,
    /// Where late ones are left out: members that hold the parameters which the step under way starts from, or are about to, and
    /// have not contributed to it.
    pub(super) awaited: u32,
    /// Those of them that were counted in the step before.
    pub(super) prompt: u32,
    pub(super) initialised: bool,
    /// What is contributed are factors.
    by_factors: bool,
    pub(super) stage: Stage,
}

/// How far the step under way is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    /// Contributions are missing.
    #[default]
    Open,
    /// The sum is complete here and on its way up.
    Raised,
    /// All factors are here, and what they add up to is not made yet.
    Making,
    /// Complete, and not updated before its release.
    Held,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MemberBook {
    /// The step the member pushes next. Where late ones are left out, the version of the parameters it has or waits for.
    pub(super) next_step: u32,
    pub(super) request: Request,
    /// It was counted in the step before, or there was none.
    pub(super) is_prompt: bool,
}

impl ChunkBook {
    fn new(reach: Reach, initialised: bool) -> Self {
        ChunkBook {
            reach,
            version: 0,
            updates: 0,
            arrived: 0,
            folded: 0,
            awaited: 0,
            prompt: 0,
            initialised,
            by_factors: false,
            stage: Stage::Open,
        }
    }

    /// Ends the step under way.
    pub(super) fn update(&mut self, step: u32, contributions: u32) -> Update {
        self.version += 1;
        self.updates += 1;
        self.arrived = 0;
        self.folded = 0;
        self.stage = Stage::Open;
        Update { step, number: self.updates, contributions }
    }
}

/// What a member waits for on a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Request {
    #[default]
    None,
    /// Its stream was cut: whether it waits for an answer shows when it asks again or goes on.
    Cut,
    Waiting(Answer),
    /// The answer may leave but has not begun to.
    Owed(Answer),
}

/// How the hub answers a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// With the newest parameters, to Pull and PushPull.
    Parameters,
    /// With a bare acknowledgement, to Push, Initialise and InitialiseState.
    Applied,
    /// With this slot of the optimizer's state, to PullState.
    State(u8),
}

/// A job keeps one of these a chunk and member.
const _: () = assert!(size_of::<MemberBook>() == 8);

/// What to do with a contribution that is here whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Where the payload goes.
    pub fold: Fold,
    /// What becomes of the sum, after the fold.
    pub then: Then,
}

/// What becomes of a chunk's sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// It waits for further contributions.
    Wait,
    /// It is complete here and goes on to the site above, whose answer [`Exchange::lower`] takes.
    Raise,
    /// All factors are here: it is to be made of them, and then [`Exchange::made`] called.
    Make,
    /// It is complete, and the chunk waits for its step's release.
    Hold,
    /// The optimizer must run on it.
    Update(Update),
    /// It was here before: its answer may be due, or due again.
    Repeated,
    /// Its step is over: it does not count, and its answer may be due.
    Late,
}

/// Where a contribution's payload goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fold {
    /// Into the sum now, then the contributions parked by the ranks of `parked`, in that order.
    Sum {
        /// The sum starts with this payload instead of adding to it.
        first: bool,
        /// Members whose parked contributions are due.
        parked: Range<u32>,
    },
    /// Into the member's parking place, until every lower one's contribution is in the sum.
    Park,
    /// Nowhere: it is taken already, or comes too late.
    Drop,
}

/// A run of the optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Update {
    /// The step it completes: hyperparameters are those that hold at it.
    pub step: u32,
    /// Updates since the optimizer's state was zero, this one included: Adam's t.
    pub number: u64,
    /// Contributions in the sum; the mean divides by it.
    pub contributions: u32,
}

impl Exchange {
    /// Books for `chunks` chunks; allocates all they will ever need.
    pub fn new(rules: Rules, chunks: u32) -> Self {
        let reach = Reach { members: rules.members, has_above: false };
        Self::among_sites(rules, std::iter::repeat_n(reach, chunks as usize))
    }

    /// As [`Exchange::new`], for a site among others; `reach` says of every chunk who contributes to it and whether its sum
    /// goes on.
    pub fn among_sites(rules: Rules, reach: impl IntoIterator<Item = Reach>) -> Self {
        let chunks: Vec<ChunkBook> =
            reach.into_iter().map(|reach| ChunkBook::new(reach, !rules.has_parameters)).collect();
        let mut exchange = Exchange {
            rules,
            books: vec![MemberBook::default(); chunks.len() * rules.members as usize],
            left: vec![false; rules.members as usize],
            departures: 0,
            held: 0,
            release_at: chunks.len() as u32,
            start: None,
            left_out: vec![0; if rules.quorum.is_some() { rules.members as usize } else { 0 }],
            chunks,
        };
        exchange.await_all();
        exchange
    }

    /// Bytes these books take.
    pub fn memory_bytes(rules: Rules, chunks: u32) -> u64 {
        let per_chunk = size_of::<ChunkBook>() + size_of::<MemberBook>() * rules.members as usize;
        u64::from(chunks) * per_chunk as u64
    }

    /// Lets these chunks take [factors](super::Gathering) and no gradients. Before anything else.
    pub fn take_factors(&mut self, slots: impl IntoIterator<Item = u32>) {
        for slot in slots {
            self.chunks[slot as usize].by_factors = true;
        }
    }

    /// Whether factors are contributed to the chunk.
    pub fn takes_factors(&self, slot: u32) -> bool {
        self.chunks[slot as usize].by_factors
    }

    /// Takes the parameters to start from, at `version`, from a member or, `None`, from the site above. The caller copies
    /// them into the model if this is `true`, and calls [`Exchange::settle`]. `false` says that they were here before the
    /// member's stream was cut.
    pub fn initialise(&mut self, slot: u32, member: Option<u32>, version: u32) -> Result<bool, Offence> {
        let chunk = self.chunks[slot as usize];
        if let Some(rank_0) = member.filter(|_| member == self.rules.rank_0)
            && chunk.initialised
            && self.rules.has_parameters
            && chunk.version == u64::from(version)
            && self.book(slot, rank_0).request == Request::Cut
        {
            self.book_mut(slot, rank_0).request = Request::Waiting(Answer::Applied);
            return Ok(false);
        }
        if chunk.initialised || !self.speaks_for_rank_0(member) {
            return Err(Offence::Initialised);
        }
        if member.is_some_and(|member| self.is_unanswered(slot, member)) {
            return Err(Offence::Unanswered);
        }
        let expected = self.start.unwrap_or(version);
        if self.rules.two_phase && version != expected {
            return Err(Offence::Versions { expected, got: version });
        }
        self.start = Some(expected);
        self.chunks[slot as usize] = ChunkBook {
            version: u64::from(version),
            updates: chunk.updates,
            by_factors: chunk.by_factors,
            ..ChunkBook::new(chunk.reach, true)
        };
        for member in 0..self.rules.members {
            let book = self.book_mut(slot, member);
            (book.next_step, book.is_prompt) = (version, true);
        }
        self.count_awaited(slot);
        if let Some(rank_0) = member.filter(|_| member == self.rules.rank_0) {
            self.book_mut(slot, rank_0).request = Request::Waiting(Answer::Applied);
        }
        Ok(true)
    }

    /// Whether what rank 0 alone may say may come from there: from itself, or from a site that passes it on.
    fn speaks_for_rank_0(&self, member: Option<u32>) -> bool {
        member.is_none_or(|member| self.rules.rank_0 == Some(member) || member >= self.rules.sites_from)
    }

    /// Takes a slot of the optimizer's state to start from, which has had so many updates; the last slot's count holds. The
    /// caller copies it if this is `Ok`, and owes rank 0 an acknowledgement at once.
    ///
    /// It comes before the parameters: until these are here nobody else may contribute or is answered, so nobody meets a
    /// chunk whose parameters are restored and whose state is not.
    pub fn initialise_state(&mut self, slot: u32, member: Option<u32>, updates: u64) -> Result<(), Offence> {
        if self.chunks[slot as usize].initialised || !self.speaks_for_rank_0(member) {
            return Err(Offence::StateInitialised);
        }
        if member.is_some_and(|member| self.is_unanswered(slot, member)) {
            return Err(Offence::Unanswered);
        }
        if updates > STATE_UPDATES_MAX {
            return Err(Offence::StateUpdates(updates));
        }
        self.chunks[slot as usize].updates = updates;
        if let Some(rank_0) = member.filter(|_| member == self.rules.rank_0) {
            self.book_mut(slot, rank_0).request = Request::Owed(Answer::Applied);
        }
        Ok(())
    }

    /// Takes a request for a slot of the optimizer's state. It is answered as soon as there are parameters, with what the
    /// chunk's last update left: see [`Exchange::settle`].
    pub fn pull_state(&mut self, slot: u32, member: u32, state_slot: u8) -> Result<(), Offence> {
        if self.is_unanswered(slot, member) {
            return Err(Offence::Unanswered);
        }
        self.book_mut(slot, member).request = Request::Waiting(Answer::State(state_slot));
        Ok(())
    }

    /// The step of the chunk that is under way.
    pub fn step(&self, slot: u32) -> u32 {
        self.chunks[slot as usize].version as u32
    }

    /// Whether the chunk has the parameters to start from.
    pub fn has_begun(&self, slot: u32) -> bool {
        self.chunks[slot as usize].initialised
    }

    /// The steps of the chunk that every member has contributed to.
    pub fn steps_of_all(&self, slot: u32) -> u32 {
        let members = self.chunks[slot as usize].reach.members;
        (0..members).map(|member| self.book(slot, member).next_step).min().unwrap_or(0)
    }

    /// Updates of the chunk since its optimizer's state was zero.
    pub fn updates(&self, slot: u32) -> u64 {
        self.chunks[slot as usize].updates
    }

    /// What is owed to `member` and has not begun to leave.
    pub fn owed(&self, slot: u32, member: u32) -> Option<Answer> {
        match self.book(slot, member).request {
            Request::Owed(answer) => Some(answer),
            Request::None | Request::Cut | Request::Waiting(_) => None,
        }
    }

    /// Takes a contribution that is here whole. The caller does what the arrival says and, if it ran the optimizer,
    /// calls [`Exchange::settle`].
    pub fn push(&mut self, slot: u32, member: u32, step: u32, answer: Answer) -> Result<Arrival, Offence> {
        if self.is_repeat(slot, member, step) {
            self.book_mut(slot, member).request = Request::Waiting(answer);
            return Ok(Arrival { fold: Fold::Drop, then: Then::Repeated });
        }
        self.may_push(slot, member, step)?;
        let chunk = self.chunks[slot as usize];
        if self.rules.quorum.is_some() {
            return self.push_in_time_or_late(slot, member, step, answer);
        }
        *self.book_mut(slot, member) =
            MemberBook { next_step: step + 1, request: Request::Waiting(answer), is_prompt: true };
        let (members_due, contributions_due) = match self.rules.consistency {
            Consistency::Synchronous => (chunk.reach.members, self.rules.workers),
            Consistency::Asynchronous | Consistency::BoundedStaleness(_) => (1, 1),
        };
        let fold = self.fold(slot, member);
        let chunk = &mut self.chunks[slot as usize];
        chunk.arrived += 1;
        let then = match chunk.arrived == members_due {
            false => Then::Wait,
            true if chunk.reach.has_above => {
                chunk.stage = Stage::Raised;
                Then::Raise
            }
            true if chunk.by_factors => {
                chunk.stage = Stage::Making;
                Then::Make
            }
            true => self.complete(slot, step, contributions_due),
        };
        Ok(Arrival { fold, then })
    }

    /// What keeps a contribution of this member to `step` from being taken now, unless it is a
    /// [repetition](Self::is_repeat). Nothing changes.
    pub fn may_push(&self, slot: u32, member: u32, step: u32) -> Result<(), Offence> {
        let (chunk, book) = (self.chunks[slot as usize], self.book(slot, member));
        if !chunk.initialised {
            return Err(Offence::NotInitialised);
        }
        if !matches!(book.request, Request::None | Request::Cut) {
            return Err(Offence::Unanswered);
        }
        let expected = book.next_step;
        match step {
            got if got < expected => return Err(Offence::StepBehind { expected, got }),
            got if got > expected => return Err(Offence::StepAhead { expected, got }),
            u32::MAX => return Err(Offence::StepsExhausted),
            _ => {}
        }
        if self.rules.consistency == Consistency::Synchronous && u64::from(step) > chunk.version {
            return Err(Offence::StepAhead { expected: chunk.version as u32, got: step });
        }
        Ok(())
    }

    /// The sum of a chunk that was to be [made](Then::Make) is complete: what becomes of it.
    ///
    /// # Panics
    /// If it was not to be made.
    pub fn made(&mut self, slot: u32) -> Then {
        let chunk = self.chunks[slot as usize];
        assert_eq!(chunk.stage, Stage::Making, "only what all have contributed to is made");
        self.complete(slot, chunk.version as u32, self.rules.workers)
    }

    /// Notes that a member's stream was cut and another takes its place. What was owed to it counts as lost, whether or not it
    /// has left: the member asks again for all that it has had no whole answer to, and is answered again. In a synchronous
    /// job a chunk cannot have moved on since, so that the answer is the same.
    pub fn resume(&mut self, member: u32) {
        debug_assert_eq!(self.rules.consistency, Consistency::Synchronous, "others move on");
        for slot in 0..self.chunks.len() as u32 {
            self.book_mut(slot, member).request = Request::Cut;
        }
    }

    /// Whether a contribution to `step` was taken before the member's stream was cut.
    pub fn is_repeat(&self, slot: u32, member: u32, step: u32) -> bool {
        let book = self.book(slot, member);
        book.request == Request::Cut && step.checked_add(1) == Some(book.next_step)
    }

    /// Takes the answer of the site above to a sum that was raised at `step`: the sum of all workers' gradients. What
    /// follows is as of a sum that was completed here.
    pub fn lower(&mut self, slot: u32, step: u32) -> Result<Then, Offence> {
        let chunk = self.chunks[slot as usize];
        if chunk.stage != Stage::Raised || chunk.version != u64::from(step) {
            return Err(Offence::NotAwaited(step));
        }
        Ok(self.complete(slot, step, self.rules.workers))
    }

    /// All workers' gradients are in the sum.
    fn complete(&mut self, slot: u32, step: u32, contributions: u32) -> Then {
        let chunk = &mut self.chunks[slot as usize];
        if self.rules.two_phase {
            chunk.stage = Stage::Held;
            self.held += 1;
            return Then::Hold;
        }
        Then::Update(chunk.update(step, contributions))
    }

    /// The step that all chunks are held at, if they are: its norm is due.
    pub fn held_step(&self) -> Option<u32> {
        let all = self.rules.two_phase && self.held as usize == self.chunks.len();
        all.then(|| self.chunks[0].version as u32)
    }

    /// Takes rank 0's release of the step that all chunks are held at. The caller then asks for their updates, a few at a
    /// time: see [`Exchange::release_next`].
    pub fn release(&mut self, member: u32, step: u32) -> Result<(), Offence> {
        if self.rules.rank_0 != Some(member) || self.held_step() != Some(step) {
            return Err(Offence::Released(step));
        }
        self.held = 0;
        self.release_at = 0;
        Ok(())
    }

    /// The next chunk of the release under way and its update, most urgent first. The caller runs the optimizer and calls
    /// [`Exchange::settle`].
    pub fn release_next(&mut self) -> Option<(u32, Update)> {
        let slot = self.release_at;
        let chunk = self.chunks.get_mut(slot as usize)?;
        self.release_at += 1;
        Some((slot, chunk.update(chunk.version as u32, self.rules.workers)))
    }

    /// Whether chunks of a released step wait for their update.
    pub fn is_releasing(&self) -> bool {
        (self.release_at as usize) < self.chunks.len()
    }

    /// Takes a request for parameters of at least `version`. The answer may be due at once: see [`Exchange::settle`].
    pub fn pull(&mut self, slot: u32, member: u32, version: u32) -> Result<(), Offence> {
        let chunk = self.chunks[slot as usize];
        let book = self.book(slot, member);
        if self.is_unanswered(slot, member) {
            return Err(Offence::Unanswered);
        }
        let newest = match self.rules.consistency {
            Consistency::Synchronous => chunk.version as u32,
            Consistency::Asynchronous | Consistency::BoundedStaleness(_) => book.next_step,
        };
        // Until rank 0 has spoken, nobody knows the version it starts from.
        if chunk.initialised && version > newest {
            return Err(Offence::StepAhead { expected: newest, got: version });
        }
        self.book_mut(slot, member).request = Request::Waiting(Answer::Parameters);
        Ok(())
    }

    /// Calls `owed` for each member whose request for this chunk may now be answered and could not before; where late ones are
    /// left out, also for those whose parameters have not begun to leave. Called after every initialise, update, pull,
    /// pull_state and late push of the chunk.
    pub fn settle(&mut self, slot: u32, mut owed: impl FnMut(u32, Answer)) {
        let slowest = self.slowest(slot);
        for member in 0..self.rules.members {
            match self.book(slot, member).request {
                Request::Waiting(answer) if self.may_answer(slot, member, answer, slowest) => {
                    self.book_mut(slot, member).request = Request::Owed(answer);
                    owed(member, answer);
                }
                // The chunk has gone on without it. What has not begun to leave goes with the newest values, also where it was
                // put in an arena before.
                Request::Owed(Answer::Parameters) if self.rules.quorum.is_some() => {
                    owed(member, Answer::Parameters);
                }
                _ => {}
            }
        }
    }

    /// The version to send with the answer to `member`.
    pub fn answer_version(&self, slot: u32, member: u32) -> u32 {
        match self.rules.consistency {
            Consistency::Synchronous => self.chunks[slot as usize].version as u32,
            // Each worker counts its own steps where there is no common one.
            Consistency::Asynchronous | Consistency::BoundedStaleness(_) => self.book(slot, member).next_step,
        }
    }

    /// The answer to `member` has begun to leave: from now on it may ask for this chunk again.
    pub fn answer_begun(&mut self, slot: u32, member: u32) {
        let request = &mut self.book_mut(slot, member).request;
        debug_assert!(matches!(request, Request::Owed(_)), "only what is owed is sent");
        let owed = std::mem::take(request);
        if self.rules.quorum.is_some() {
            self.catch_up(slot, member, owed);
        }
    }

    /// Notes that a member has left of its own accord, and calls `owed` as [`Exchange::settle`] does for every slot the
    /// departure frees.
    ///
    /// Fails if others wait, now or for ever, for a contribution that will not come.
    pub fn leave(&mut self, member: u32, mut owed: impl FnMut(u32, u32, Answer)) -> Result<(), Stranded> {
        self.left[member as usize] = true;
        self.departures += 1;
        for slot in 0..self.chunks.len() as u32 {
            // What is owed to it may still be sent.
            if let Request::Waiting(_) = self.book(slot, member).request {
                self.book_mut(slot, member).request = Request::None;
            }
            self.count_awaited(slot);
            self.settle(slot, |waiting, answer| owed(slot, waiting, answer));
            self.stranded_at(slot)?;
        }
        Ok(())
    }

    /// Fails if a member waits on this chunk for one that has left. Called after every pull, and after every push that
    /// brought no update.
    pub fn stranded_at(&self, slot: u32) -> Result<(), Stranded> {
        if self.departures == 0 {
            return Ok(());
        }
        let chunk = self.chunks[slot as usize];
        let gone_rank_0 = self.rules.rank_0.filter(|&rank_0| self.left[rank_0 as usize]);
        let missing = if !chunk.initialised {
            gone_rank_0.map(|rank_0| (rank_0, Awaited::Parameters))
        } else if chunk.stage == Stage::Making {
            // All that it takes is here.
            None
        } else if chunk.stage == Stage::Held {
            let is_released = self.is_releasing() && slot >= self.release_at;
            let gone = gone_rank_0.filter(|_| !is_released);
            gone.map(|rank_0| (rank_0, Awaited::Release(chunk.version as u32)))
        } else if self.rules.consistency == Consistency::Synchronous && self.rules.quorum.is_none() {
            self.missing(slot)
                .find(|&member| self.left[member as usize])
                .map(|member| (member, Awaited::Contribution(chunk.version as u32)))
        } else {
            None
        };
        let waits = |member: u32| {
            matches!(self.book(slot, member).request, Request::Waiting(_)) && !self.left[member as usize]
        };
        match missing {
            Some((member, awaited)) if (0..self.rules.members).any(waits) => {
                Err(Stranded { member, awaited })
            }
            _ => Ok(()),
        }
    }

    /// How many members contribute to the chunk: the first so many.
    pub(super) fn members_of(&self, slot: u32) -> u32 {
        self.chunks[slot as usize].reach.members
    }

    /// Members whose contribution to this chunk's step under way is missing, ascending.
    pub fn missing(&self, slot: u32) -> impl Iterator<Item = u32> + '_ {
        let chunk = self.chunks[slot as usize];
        let version = chunk.version;
        (0..chunk.reach.members)
            .filter(move |&member| u64::from(self.book(slot, member).next_step) <= version)
    }

    /// In the order of members if the job is reproducible, else in order of arrival.
    fn fold(&mut self, slot: u32, member: u32) -> Fold {
        let chunk = self.chunks[slot as usize];
        if !self.rules.reproducible {
            self.chunks[slot as usize].folded += 1;
            return Fold::Sum { first: chunk.folded == 0, parked: 0..0 };
        }
        if chunk.folded != member {
            return Fold::Park;
        }
        let step = self.book(slot, member).next_step;
        let mut end = member + 1;
        while end < chunk.reach.members && self.book(slot, end).next_step == step {
            end += 1;
        }
        self.chunks[slot as usize].folded = end;
        Fold::Sum { first: member == 0, parked: member + 1..end }
    }

    fn may_answer(&self, slot: u32, member: u32, answer: Answer, slowest: u32) -> bool {
        let chunk = self.chunks[slot as usize];
        let next_step = self.book(slot, member).next_step;
        chunk.initialised
            && match self.rules.consistency {
                _ if matches!(answer, Answer::State(_)) => true,
                Consistency::Synchronous => u64::from(next_step) <= chunk.version,
                Consistency::Asynchronous => true,
                Consistency::BoundedStaleness(bound) => next_step - slowest <= bound,
            }
    }

    /// The least advanced member's next step; members that have left hold nobody back.
    pub(super) fn slowest(&self, slot: u32) -> u32 {
        let present = (0..self.rules.members).filter(|&member| !self.left[member as usize]);
        present.map(|member| self.book(slot, member).next_step).min().unwrap_or(u32::MAX)
    }

    fn is_unanswered(&self, slot: u32, member: u32) -> bool {
        matches!(self.book(slot, member).request, Request::Waiting(_) | Request::Owed(_))
    }

    pub(super) fn book(&self, slot: u32, member: u32) -> MemberBook {
        self.books[slot as usize * self.rules.members as usize + member as usize]
    }

    pub(super) fn book_mut(&mut self, slot: u32, member: u32) -> &mut MemberBook {
        &mut self.books[slot as usize * self.rules.members as usize + member as usize]
    }
}
