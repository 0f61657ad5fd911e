use std::ops::Range;

use thiserror::Error;

use crate::consistency::Consistency;
use crate::limits::STATE_UPDATES_MAX;

/// What holds for all chunks of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Ranks in the job.
    pub workers: u32,
    /// When contributions take effect and answers may leave.
    pub consistency: Consistency,
    /// Sum in rank order.
    pub reproducible: bool,
    /// Whether rank 0 must send the parameters to start from.
    pub has_parameters: bool,
    /// Whether a complete chunk is held until rank 0 releases the step; synchronous, with parameters.
    pub two_phase: bool,
}

/// The books of one route's chunks. Slots number the chunks as in [`crate::placement::Placement::chunks`].
#[derive(Clone, Debug)]
pub struct Exchange {
    rules: Rules,
    chunks: Vec<ChunkBook>,
    /// Of slot `s` and rank `r`, at `s * workers + r`.
    ranks: Vec<RankBook>,
    left: Vec<bool>,
    departures: u32,
    /// Of the chunks held, those that no release has named.
    held: u32,
    /// Of a release under way: the next slot to be updated; the number of chunks where none is.
    release_at: u32,
    /// The version the first parameters came with.
    start: Option<u32>,
}

#[derive(Clone, Copy, Debug, Default)]
struct ChunkBook {
    /// Grows by one an update; the low 32 bits travel.
    version: u64,
    /// Updates since the optimizer's state was zero, which need not be at version 0.
    updates: u64,
    /// Contributions to the step under way.
    arrived: u32,
    /// Of those, how many are in the sum; fewer than `arrived` only while some are parked.
    folded: u32,
    initialised: bool,
    /// Complete, and not updated yet.
    is_held: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct RankBook {
    /// The step the rank pushes next.
    next_step: u32,
    request: Request,
}

impl ChunkBook {
    /// Ends the step under way.
    fn update(&mut self, step: u32, contributions: u32) -> Update {
        self.version += 1;
        self.updates += 1;
        self.arrived = 0;
        self.folded = 0;
        Update { step, number: self.updates, contributions }
    }
}

/// What a rank waits for on a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Request {
    #[default]
    None,
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

/// A job keeps one of these a chunk and rank.
const _: () = assert!(size_of::<RankBook>() == 8);

/// What to do with a contribution that is here whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Where the payload goes.
    pub fold: Fold,
    /// The optimizer must run on the sum, after the fold.
    pub update: Option<Update>,
    /// The sum is complete, after the fold, and the chunk waits for its step's release.
    pub is_held: bool,
}

/// Where a contribution's payload goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fold {
    /// Into the sum now, then the contributions parked by the ranks of `parked`, in that order.
    Sum {
        /// The sum starts with this payload instead of adding to it.
        first: bool,
        /// Ranks whose parked contributions are due.
        parked: Range<u32>,
    },
    /// Into the rank's parking place, until every lower rank's contribution is in the sum.
    Park,
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

/// A request against the rules: the sender is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Offence {
    /// A step that is over, or that this rank has contributed to already.
    #[error("step {got} was pushed, but step {expected} is due: a step is pushed once and in order")]
    StepBehind {
        /// The step due.
        expected: u32,
        /// The step pushed.
        got: u32,
    },
    /// A step that has not begun.
    #[error("step {got} was asked for, but step {expected} is under way: wait for it first")]
    StepAhead {
        /// The step under way.
        expected: u32,
        /// The step asked for.
        got: u32,
    },
    /// The step after which versions could not be counted any more.
    #[error("step {} was pushed, but a run ends before it: start a new one from these parameters", u32::MAX)]
    StepsExhausted,
    /// The rank has a request for this chunk that is not answered.
    #[error("a second request came before the first was answered")]
    Unanswered,
    /// Parameters were pushed to or asked to be replaced before rank 0 had sent any.
    #[error("a gradient came before rank 0 had sent the parameters to start from")]
    NotInitialised,
    /// Parameters came twice, or from another rank than 0, or to a job that has none.
    #[error("parameters to start from come once, from rank 0, and only to a job with an optimizer")]
    Initialised,
    /// Parameters at another version than the first: in a job whose steps are in two phases all chunks go in step.
    #[error(
        "parameters to start from came with version {got}, but in two phases all start from one version, here {expected}"
    )]
    Versions {
        /// Of the first.
        expected: u32,
        /// Of these.
        got: u32,
    },
    /// A release from another rank than 0, of another step than the one whose norm was told last, or once too often.
    #[error("step {0} was released, but a step is released by rank 0, once, after its norm was told")]
    Released(u32),
    /// Optimizer state came when somebody may already have contributed, or from another rank than 0.
    #[error("optimizer state to start from comes from rank 0, before its parameters to start from")]
    StateInitialised,
    /// Optimizer state that has had more updates than can be counted on from.
    #[error(
        "optimizer state to start from has had {0} updates, more than the {STATE_UPDATES_MAX} it may have had"
    )]
    StateUpdates(u64),
}

/// Ranks wait for what another rank will never send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("rank {rank} left the job, but other ranks wait for {awaited}")]
pub struct Stranded {
    /// Who left.
    pub rank: u32,
    /// What will not come.
    pub awaited: Awaited,
}

/// What ranks wait for in vain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Awaited {
    /// Rank 0's parameters.
    #[error("the parameters to start from")]
    Parameters,
    /// A contribution to this step.
    #[error("its contribution to step {0}")]
    Contribution(u32),
    /// Rank 0's release of this step.
    #[error("its release of step {0}")]
    Release(u32),
}

impl Exchange {
    /// Books for `chunks` chunks; allocates all they will ever need.
    pub fn new(rules: Rules, chunks: u32) -> Self {
        let initialised = !rules.has_parameters;
        Exchange {
            rules,
            chunks: vec![ChunkBook { initialised, ..Default::default() }; chunks as usize],
            ranks: vec![RankBook::default(); chunks as usize * rules.workers as usize],
            left: vec![false; rules.workers as usize],
            departures: 0,
            held: 0,
            release_at: chunks,
            start: None,
        }
    }

    /// Bytes these books take.
    pub fn memory_bytes(rules: Rules, chunks: u32) -> u64 {
        let per_chunk = size_of::<ChunkBook>() + size_of::<RankBook>() * rules.workers as usize;
        u64::from(chunks) * per_chunk as u64
    }

    /// Takes the parameters to start from, at `version`. The caller copies them into the model if this is `Ok`, then
    /// calls [`Exchange::settle`].
    pub fn initialise(&mut self, slot: u32, rank: u32, version: u32) -> Result<(), Offence> {
        let chunk = self.chunks[slot as usize];
        if chunk.initialised || rank != 0 {
            return Err(Offence::Initialised);
        }
        if self.rank(slot, rank).request != Request::None {
            return Err(Offence::Unanswered);
        }
        let expected = self.start.unwrap_or(version);
        if self.rules.two_phase && version != expected {
            return Err(Offence::Versions { expected, got: version });
        }
        self.start = Some(expected);
        self.chunks[slot as usize] = ChunkBook {
            version: u64::from(version),
            initialised: true,
            updates: chunk.updates,
            ..Default::default()
        };
        for rank in 0..self.rules.workers {
            self.rank_mut(slot, rank).next_step = version;
        }
        self.rank_mut(slot, rank).request = Request::Waiting(Answer::Applied);
        Ok(())
    }

    /// Takes a slot of the optimizer's state to start from, which has had so many updates; the last slot's count holds. The
    /// caller copies it if this is `Ok`, and owes rank 0 an acknowledgement at once.
    ///
    /// It comes before the parameters: until these are here nobody else may contribute or is answered, so nobody meets a
    /// chunk whose parameters are restored and whose state is not.
    pub fn initialise_state(&mut self, slot: u32, rank: u32, updates: u64) -> Result<(), Offence> {
        if self.chunks[slot as usize].initialised || rank != 0 {
            return Err(Offence::StateInitialised);
        }
        if self.rank(slot, rank).request != Request::None {
            return Err(Offence::Unanswered);
        }
        if updates > STATE_UPDATES_MAX {
            return Err(Offence::StateUpdates(updates));
        }
        self.chunks[slot as usize].updates = updates;
        self.rank_mut(slot, rank).request = Request::Owed(Answer::Applied);
        Ok(())
    }

    /// Takes a request for a slot of the optimizer's state. It is answered as soon as there are parameters, with what the
    /// chunk's last update left: see [`Exchange::settle`].
    pub fn pull_state(&mut self, slot: u32, rank: u32, state_slot: u8) -> Result<(), Offence> {
        if self.rank(slot, rank).request != Request::None {
            return Err(Offence::Unanswered);
        }
        self.rank_mut(slot, rank).request = Request::Waiting(Answer::State(state_slot));
        Ok(())
    }

    /// Updates of the chunk since its optimizer's state was zero.
    pub fn updates(&self, slot: u32) -> u64 {
        self.chunks[slot as usize].updates
    }

    /// What is owed to `rank` and has not begun to leave.
    pub fn owed(&self, slot: u32, rank: u32) -> Option<Answer> {
        match self.rank(slot, rank).request {
            Request::Owed(answer) => Some(answer),
            Request::None | Request::Waiting(_) => None,
        }
    }

    /// Takes a contribution that is here whole. The caller does what the arrival says and, if it ran the optimizer,
    /// calls [`Exchange::settle`].
    pub fn push(&mut self, slot: u32, rank: u32, step: u32, answer: Answer) -> Result<Arrival, Offence> {
        let chunk = self.chunks[slot as usize];
        let book = self.rank(slot, rank);
        if !chunk.initialised {
            return Err(Offence::NotInitialised);
        }
        if book.request != Request::None {
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
        *self.rank_mut(slot, rank) = RankBook { next_step: step + 1, request: Request::Waiting(answer) };
        let contributions_due = match self.rules.consistency {
            Consistency::Synchronous => self.rules.workers,
            Consistency::Asynchronous | Consistency::BoundedStaleness(_) => 1,
        };
        let fold = self.fold(slot, rank);
        let chunk = &mut self.chunks[slot as usize];
        chunk.arrived += 1;
        let is_complete = chunk.arrived == contributions_due;
        let is_held = is_complete && self.rules.two_phase;
        chunk.is_held = is_held;
        self.held += u32::from(is_held);
        let update = (is_complete && !is_held).then(|| chunk.update(step, contributions_due));
        Ok(Arrival { fold, update, is_held })
    }

    /// The step that all chunks are held at, if they are: its norm is due.
    pub fn held_step(&self) -> Option<u32> {
        let all = self.rules.two_phase && self.held as usize == self.chunks.len();
        all.then(|| self.chunks[0].version as u32)
    }

    /// Takes rank 0's release of the step that all chunks are held at. The caller then asks for their updates, a few at a
    /// time: see [`Exchange::release_next`].
    pub fn release(&mut self, rank: u32, step: u32) -> Result<(), Offence> {
        if rank != 0 || self.held_step() != Some(step) {
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
        chunk.is_held = false;
        Some((slot, chunk.update(chunk.version as u32, self.rules.workers)))
    }

    /// Whether chunks of a released step wait for their update.
    pub fn is_releasing(&self) -> bool {
        (self.release_at as usize) < self.chunks.len()
    }

    /// Takes a request for parameters of at least `version`. The answer may be due at once: see [`Exchange::settle`].
    pub fn pull(&mut self, slot: u32, rank: u32, version: u32) -> Result<(), Offence> {
        let chunk = self.chunks[slot as usize];
        let book = self.rank(slot, rank);
        if book.request != Request::None {
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
        self.rank_mut(slot, rank).request = Request::Waiting(Answer::Parameters);
        Ok(())
    }

    /// Calls `owed` for each rank whose request for this chunk may now be answered and could not before. Called after
    /// every initialise, update, pull and pull_state of the chunk.
    pub fn settle(&mut self, slot: u32, mut owed: impl FnMut(u32, Answer)) {
        let slowest = self.slowest(slot);
        for rank in 0..self.rules.workers {
            if let Request::Waiting(answer) = self.rank(slot, rank).request
                && self.may_answer(slot, rank, answer, slowest)
            {
                self.rank_mut(slot, rank).request = Request::Owed(answer);
                owed(rank, answer);
            }
        }
    }

    /// The version to send with the answer to `rank`.
    pub fn answer_version(&self, slot: u32, rank: u32) -> u32 {
        match self.rules.consistency {
            Consistency::Synchronous => self.chunks[slot as usize].version as u32,
            // Each worker counts its own steps where there is no common one.
            Consistency::Asynchronous | Consistency::BoundedStaleness(_) => self.rank(slot, rank).next_step,
        }
    }

    /// The answer to `rank` has begun to leave: from now on the rank may ask for this chunk again.
    pub fn answer_begun(&mut self, slot: u32, rank: u32) {
        let request = &mut self.rank_mut(slot, rank).request;
        debug_assert!(matches!(request, Request::Owed(_)), "only what is owed is sent");
        *request = Request::None;
    }

    /// Notes that a rank has left of its own accord, and calls `owed` as [`Exchange::settle`] does for every slot the
    /// departure frees.
    ///
    /// Fails if others wait, now or for ever, for a contribution that will not come.
    pub fn leave(&mut self, rank: u32, mut owed: impl FnMut(u32, u32, Answer)) -> Result<(), Stranded> {
        self.left[rank as usize] = true;
        self.departures += 1;
        for slot in 0..self.chunks.len() as u32 {
            // What is owed to it may still be sent.
            if let Request::Waiting(_) = self.rank(slot, rank).request {
                self.rank_mut(slot, rank).request = Request::None;
            }
            self.settle(slot, |waiting, answer| owed(slot, waiting, answer));
            self.stranded_at(slot)?;
        }
        Ok(())
    }

    /// Fails if a rank waits on this chunk for a rank that has left. Called after every pull, and after every push that
    /// brought no update.
    pub fn stranded_at(&self, slot: u32) -> Result<(), Stranded> {
        if self.departures == 0 {
            return Ok(());
        }
        let chunk = self.chunks[slot as usize];
        let missing = if !chunk.initialised {
            self.left[0].then_some((0, Awaited::Parameters))
        } else if chunk.is_held {
            let is_released = self.is_releasing() && slot >= self.release_at;
            (self.left[0] && !is_released).then_some((0, Awaited::Release(chunk.version as u32)))
        } else if self.rules.consistency == Consistency::Synchronous {
            self.missing(slot)
                .find(|&rank| self.left[rank as usize])
                .map(|rank| (rank, Awaited::Contribution(chunk.version as u32)))
        } else {
            None
        };
        let waits = |rank: u32| {
            matches!(self.rank(slot, rank).request, Request::Waiting(_)) && !self.left[rank as usize]
        };
        match missing {
            Some((rank, awaited)) if (0..self.rules.workers).any(waits) => Err(Stranded { rank, awaited }),
            _ => Ok(()),
        }
    }

    /// Ranks whose contribution to this chunk's step under way is missing, ascending.
    pub fn missing(&self, slot: u32) -> impl Iterator<Item = u32> + '_ {
        let version = self.chunks[slot as usize].version;
        (0..self.rules.workers).filter(move |&rank| u64::from(self.rank(slot, rank).next_step) <= version)
    }

    /// In rank order if the job is reproducible, else in order of arrival.
    fn fold(&mut self, slot: u32, rank: u32) -> Fold {
        let chunk = self.chunks[slot as usize];
        if !self.rules.reproducible {
            self.chunks[slot as usize].folded += 1;
            return Fold::Sum { first: chunk.folded == 0, parked: 0..0 };
        }
        if chunk.folded != rank {
            return Fold::Park;
        }
        let step = self.rank(slot, rank).next_step;
        let mut end = rank + 1;
        while end < self.rules.workers && self.rank(slot, end).next_step == step {
            end += 1;
        }
        self.chunks[slot as usize].folded = end;
        Fold::Sum { first: rank == 0, parked: rank + 1..end }
    }

    fn may_answer(&self, slot: u32, rank: u32, answer: Answer, slowest: u32) -> bool {
        let chunk = self.chunks[slot as usize];
        let next_step = self.rank(slot, rank).next_step;
        chunk.initialised
            && match self.rules.consistency {
                _ if matches!(answer, Answer::State(_)) => true,
                Consistency::Synchronous => u64::from(next_step) <= chunk.version,
                Consistency::Asynchronous => true,
                Consistency::BoundedStaleness(bound) => next_step - slowest <= bound,
            }
    }

    /// The least advanced rank's next step; ranks that have left hold nobody back.
    fn slowest(&self, slot: u32) -> u32 {
        let present = (0..self.rules.workers).filter(|&rank| !self.left[rank as usize]);
        present.map(|rank| self.rank(slot, rank).next_step).min().unwrap_or(u32::MAX)
    }

    fn rank(&self, slot: u32, rank: u32) -> RankBook {
        self.ranks[slot as usize * self.rules.workers as usize + rank as usize]
    }

    fn rank_mut(&mut self, slot: u32, rank: u32) -> &mut RankBook {
        &mut self.ranks[slot as usize * self.rules.workers as usize + rank as usize]
    }
}
