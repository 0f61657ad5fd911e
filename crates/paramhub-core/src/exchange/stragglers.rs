//! Steps that end without those who are late.
//!
//! Every chunk decides for itself, and its mean is over those who were counted there. Nobody ever waits because it was late: its
//! contribution is dropped and it is answered at once. So whoever waits has contributed, and no ring of chunks and workers that wait
//! for each other can close, if every worker pushes every chunk once before it pushes any again. For suppose that all workers wait. A
//! chunk that somebody waits at lacks a *prompt* member, one that was counted in the chunk's step before. That member waits at another
//! chunk with the newest parameters of it; it has had these since before it was counted in the first. So the other chunk's last
//! update is the older one, and it lacks a prompt member in its turn: the chain would never end. Members that were late do not do
//! in place of prompt ones, which is why these are counted apart.

use super::offence::Offence;
use super::rules::{Answer, Arrival, Exchange, Fold, MemberBook, Request, Then, Update};
use crate::stragglers::Quorum;

impl Exchange {
    /// Takes a contribution to the step under way, or drops one to a step that is over.
    pub(super) fn push_in_time_or_late(
        &mut self,
        slot: u32,
        member: u32,
        step: u32,
        answer: Answer,
    ) -> Result<Arrival, Offence> {
        let chunk = &mut self.chunks[slot as usize];
        if u64::from(step) < chunk.version {
            let next_step = u32::try_from(chunk.version).map_err(|_| Offence::StepsExhausted)?;
            chunk.awaited += 1;
            let request = Request::Waiting(answer);
            *self.book_mut(slot, member) = MemberBook { next_step, request, is_prompt: false };
            return Ok(Arrival { fold: Fold::Drop, then: Then::Late });
        }
        let fold = Fold::Sum { first: chunk.folded == 0, parked: 0..0 };
        chunk.arrived += 1;
        chunk.folded += 1;
        chunk.awaited -= 1;
        let book = self.book(slot, member);
        self.chunks[slot as usize].prompt -= u32::from(book.is_prompt);
        *self.book_mut(slot, member) =
            MemberBook { next_step: step + 1, request: Request::Waiting(answer), ..book };
        let then = self.end_if_complete(slot).map_or(Then::Wait, Then::Update);
        Ok(Arrival { fold, then })
    }

    /// Ends the chunk's step under way if all are there that it waits for. Called for every slot after a member has left; the
    /// caller runs the optimizer and calls [`Exchange::settle`].
    pub fn end_if_complete(&mut self, slot: u32) -> Option<Update> {
        let (chunk, quorum) = (self.chunks[slot as usize], self.rules.quorum?);
        let is_complete = chunk.awaited == 0
            || match quorum {
                Quorum::Count(count) => chunk.arrived >= count || chunk.prompt == 0,
                Quorum::Clock => false,
            };
        if is_complete { self.end_step(slot) } else { None }
    }

    /// Ends the chunk's step under way with the contributions that are there, if there is any. The caller runs the optimizer and
    /// calls [`Exchange::settle`].
    pub fn end_step(&mut self, slot: u32) -> Option<Update> {
        let chunk = self.chunks[slot as usize];
        if chunk.arrived == 0 {
            return None;
        }
        for member in 0..self.rules.members {
            let book = self.book_mut(slot, member);
            let is_missing = u64::from(book.next_step) <= chunk.version;
            book.is_prompt = !is_missing;
            self.left_out[member as usize] += u64::from(is_missing && !self.left[member as usize]);
        }
        let update = self.chunks[slot as usize].update(chunk.version as u32, chunk.arrived);
        self.count_awaited(slot);
        Some(update)
    }

    /// Whether half of the members that are expected to contribute to the step under way have, or more; or all of those that
    /// contributed to the step before.
    pub fn has_median(&self, slot: u32) -> bool {
        let chunk = self.chunks[slot as usize];
        chunk.arrived > 0 && (chunk.arrived >= chunk.awaited || chunk.prompt == 0)
    }

    /// Of every member, how many updates of chunks it was left out of; empty where all are waited for.
    pub fn left_out(&self) -> &[u64] {
        &self.left_out
    }

    /// An answer to a member has begun to leave: it has the newest parameters now, and may contribute to the step under way.
    pub(super) fn catch_up(&mut self, slot: u32, member: u32, owed: Request) {
        let version = self.chunks[slot as usize].version as u32;
        let is_behind = self.book(slot, member).next_step < version;
        // Optimizer state says nothing of parameters.
        if matches!(owed, Request::Owed(Answer::Parameters | Answer::Applied)) && is_behind {
            self.book_mut(slot, member).next_step = version;
            self.chunks[slot as usize].awaited += u32::from(!self.left[member as usize]);
        }
    }

    /// Counts who may contribute to the step under way and has not.
    pub(super) fn count_awaited(&mut self, slot: u32) {
        if self.rules.quorum.is_some() {
            let version = self.chunks[slot as usize].version;
            let (mut awaited, mut prompt) = (0, 0);
            for member in (0..self.rules.members).filter(|&member| !self.left[member as usize]) {
                let book = self.book(slot, member);
                let is_awaited = u64::from(book.next_step) == version;
                awaited += u32::from(is_awaited);
                prompt += u32::from(is_awaited && book.is_prompt);
            }
            let chunk = &mut self.chunks[slot as usize];
            (chunk.awaited, chunk.prompt) = (awaited, prompt);
        }
    }

    /// [`count_awaited`](Self::count_awaited), of all chunks.
    pub(super) fn await_all(&mut self) {
        for slot in 0..self.chunks.len() as u32 {
            self.count_awaited(slot);
        }
    }
}
