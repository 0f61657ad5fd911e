//! Going back to an earlier step: the copies of the chunks that this takes, and how a shard goes back.
//!
//! A chunk is copied block by block while the update has it in cache, and the copy is written past the caches, since it
//! is read only if a worker is lost. The job takes back chunks a few at a time, between the turns of other jobs.

use paramhub_core::exchange::{CannotRewind, RewoundTo};
use paramhub_kernels::shared;

use super::Shard;
use crate::core::arenas::Arenas;
use crate::core::buffer::{Buffer, OutOfMemory, Pages};
use crate::core::layout::{ChunkPlace, Layout};
use crate::core::plan::ShardPlan;

/// Copies of the parameters and the optimizer state of all chunks, at the offsets that these have in the model; empty
/// if the job never goes back.
pub(in crate::core) struct Copies {
    parameters: Buffer,
    state: Buffer,
    state_slots: usize,
}

/// How far a shard has gone back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rewind {
    /// All members take part, or none has been lost yet.
    NotNeeded,
    /// A member is lost. The step to go back to is not known. The first `workers` of the ranks are expected so far.
    Awaited { workers: u32 },
    /// Chunks go back to `step`, or begin anew if it is `None`, from slot `next` on.
    UnderWay { step: Option<u32>, next: u32 },
}

impl Copies {
    pub(super) fn new(plan: &ShardPlan, layout: &Layout) -> Result<Copies, OutOfMemory> {
        let elements = if plan.rewind_every.is_some() { layout.elements } else { 0 };
        Ok(Copies {
            parameters: Buffer::reserved(elements, 8)?,
            state: Buffer::reserved(elements * layout.state_slots, 9)?,
            state_slots: layout.state_slots,
        })
    }

    /// The number of arrays as long as that of the parameters.
    pub(super) fn arrays(plan: &ShardPlan, layout: &Layout) -> usize {
        if plan.rewind_every.is_some() { 1 + layout.state_slots } else { 0 }
    }

    /// Copies a block that is about to be updated. `first` is the place of its first element in the model.
    #[inline]
    pub(super) fn take(&mut self, first: usize, parameters: &[f32], state: &[f32]) {
        let kept = &mut self.parameters[first..first + parameters.len()];
        shared::stream(bytemuck::cast_slice(parameters), bytemuck::cast_slice_mut(kept));
        let first = first * self.state_slots;
        let kept = &mut self.state[first..first + state.len()];
        shared::stream(bytemuck::cast_slice(state), bytemuck::cast_slice_mut(kept));
    }

    /// The copy of a chunk.
    fn of(&self, slot: &ChunkPlace) -> (&[f32], &[f32]) {
        let range = slot.range();
        let state = range.start * self.state_slots..range.end * self.state_slots;
        (&self.parameters[range], &self.state[state])
    }

    pub(super) fn each_array(&mut self, each: &mut dyn FnMut(&mut dyn Pages)) {
        each(&mut self.parameters);
        each(&mut self.state);
    }
}

impl Shard {
    /// Returns whether all members go back to an earlier step if one is lost.
    pub(crate) fn rewinds(&self) -> bool {
        self.plan.rewind_every.is_some()
    }

    /// Notes that a member is lost, so that all are to begin again at an earlier step. Nothing leaves by any worker's port any more.
    /// Returns the arenas of all, which no sum may read again.
    pub(crate) fn stop_for_rewind(&mut self) -> Arenas {
        let ports = self.plan.ports.clone();
        let of_workers = (0..).zip(&mut self.outboxes).filter(|(port, _)| ports.side(*port).is_worker());
        for (_, outbox) in of_workers {
            outbox.start_again();
            outbox.norm = None;
        }
        (0..self.plan.ports.workers()).for_each(|worker| self.program_states.cut(worker));
        self.departures.lose_workers(&ports);
        self.rewind = Rewind::Awaited { workers: 0 };
        std::mem::replace(&mut self.arenas, Arenas::new(self.plan.ports.workers()))
    }

    /// Gives the place of a worker to another process. The ranks that get one are the first of the job.
    ///
    /// Returns the newest step to which these chunks can go back, `None` if one of them has no parameters yet, or why they
    /// cannot.
    pub(crate) fn expect_after_rewind(&mut self, worker: u32) -> Result<Option<u32>, String> {
        if let Rewind::Awaited { workers } = &mut self.rewind {
            *workers = (*workers).max(worker + 1);
        }
        let newest = self.exchange.newest_rewind().map_err(|cannot| self.describe(cannot));
        // A process could not go on from a step of which its program's state is missing.
        let saved = self.program_states.newest_common().unwrap_or(u32::MAX);
        newest.map(|step| step.map(|step| step.min(saved)))
    }

    /// Lets the process that takes a worker's place begin at `step`, or anew if it is `None`. The first one takes the chunks
    /// back to it, for which the caller calls [`rewind_some`](Self::rewind_some).
    ///
    /// Fails if the chunks cannot go back to this step; the text says which cannot, and why.
    pub(crate) fn join_after_rewind(&mut self, worker: u32, step: Option<u32>) -> Result<(), String> {
        if let Rewind::Awaited { workers } = self.rewind {
            self.begin_to_go_back(step, workers).map_err(|cannot| self.describe(cannot))?;
        }
        self.departures.set_lost(worker, false);
        Ok(())
    }

    /// Takes chunks whose members are lost back to `step` for a last checkpoint of it. If they cannot go back to that, the
    /// error is the newest step to which they can. Chunks that no rank is to leave stay as they are.
    pub(super) fn go_back_for_snapshot(&mut self, step: u32) -> Result<(), u32> {
        let Rewind::Awaited { .. } = self.rewind else { return Ok(()) };
        // Chunks without parameters, or without a step in common, have no checkpoint, and the snapshot misses them.
        let Ok(Some(newest)) = self.exchange.newest_rewind() else { return Ok(()) };
        let newest = newest.min(self.program_states.newest_common().unwrap_or(u32::MAX));
        if step > newest {
            Err(newest)
        } else {
            self.begin_to_go_back(Some(step), self.plan.workers()).map_err(|_| newest)
        }
    }

    /// Has the first `workers` of the ranks begin again at `step`, or anew if it is `None`.
    fn begin_to_go_back(&mut self, step: Option<u32>, workers: u32) -> Result<(), CannotRewind> {
        match step {
            Some(step) => {
                self.exchange.check_rewind(step)?;
                self.exchange.rewind(step, workers);
            }
            None => self.exchange.begin_anew(workers),
        }
        let first = step.unwrap_or(0);
        self.sums.drop_parts();
        self.forget_norm();
        self.program_states.begin_again(first, workers);
        // A snapshot of a later step would have chunks from before and from after.
        self.miss_snapshot();
        self.newest_step = first;
        self.counters.steps = first.into();
        self.rewind = Rewind::UnderWay { step, next: 0 };
        Ok(())
    }

    /// Returns whether chunks have not gone back yet.
    pub(crate) fn is_rewinding(&self) -> bool {
        matches!(self.rewind, Rewind::UnderWay { .. })
    }

    /// Takes the next chunks back, about `elements` elements.
    pub(crate) fn rewind_some(&mut self, elements: usize) {
        let mut done = 0;
        while done < elements
            && let Rewind::UnderWay { step, next } = self.rewind
        {
            let Some(&slot) = self.slots.get(next as usize) else {
                self.rewind = Rewind::NotNeeded;
                return;
            };
            match step {
                Some(step) if self.exchange.rewind_chunk(next, step) == RewoundTo::Present => {}
                Some(_) => {
                    let (parameters, state) = self.copies.of(&slot);
                    self.model.restore(&slot, parameters, state);
                    done += slot.elements as usize;
                }
                None => {
                    // A chunk that has no parameters may have a part of a state that rank 0 has sent.
                    self.exchange.begin_chunk_anew(next);
                    self.model.clear_state(&slot);
                    done += slot.elements as usize;
                }
            }
            // Looking at a chunk has a cost, too.
            done += 64;
            self.rewind = Rewind::UnderWay { step, next: next + 1 };
        }
    }

    fn describe(&self, cannot: CannotRewind) -> String {
        let key = self.key_name(self.slots[cannot.slot as usize].key);
        format!(
            "a chunk of key `{key}` cannot go back to the step of the others: {cannot}. All ranks must exchange all keys in \
             every step of a job with on_worker_loss = rewind"
        )
    }
}
