//! Steps in two phases: complete chunks are held until rank 0, which gets the norm of all gradients, releases
//! their step.
//!
//! Among sites every hub holds its chunks, and sends the norm of those to its own workers, so each worker gets the parts of
//! all chunks. A total goes on to the sites below as soon as its chunk is held, and a release to all sites around.

use std::sync::Arc;

use paramhub_core::exchange::Update;
use paramhub_core::norms::TensorSquares;
use paramhub_core::ports::Side;
use paramhub_core::wire::{Header, Norm, Operation, Release, Tensors};
use paramhub_kernels::squares::squares;
use paramhub_kernels::{Step, mean_factor};

use super::Shard;
use super::timing::{HeldStep, UpdateTiming};
use crate::core::fault::Fault;
use crate::core::layout::{BLOCK_ELEMENTS, ChunkPlace};

impl Shard {
    /// Adds a sum's part of the norm and answers the sites below; with the last chunk of the step, sends the norm to all ranks
    /// here. Updates the chunk if its step is released already.
    pub(super) fn hold(&mut self, index: u32, slot: ChunkPlace) {
        // It rounds the sum, so the norm comes after it.
        self.keep_total(index);
        let UpdateTiming::OnRelease(held) = &mut self.timing else {
            unreachable!("chunks are held in two phases only")
        };
        let contributions = self.exchange.contributors();
        let factor = mean_factor(contributions);
        let blocks = slot.blocks(BLOCK_ELEMENTS);
        let total = blocks.map(|block| {
            squares(self.sums.part(slot.array_offset + block.start..slot.array_offset + block.end), factor)
        });
        let step = self.exchange.step(index);
        let at_step = step as usize % 2;
        held.squares[index as usize][at_step] = total.sum();
        if let Some(part) = held.parts.get_mut(index as usize) {
            let of_step = Step {
                hyperparameters: self.schedules[usize::from(slot.group)].at(step),
                number: self.exchange.updates(index) + 1,
                contributions,
                factor: 1.0,
                tensor: None,
            };
            part[at_step] = TensorSquares::default();
            for block in slot.blocks(self.model.block_elements) {
                let at = slot.array_offset + block.start..slot.array_offset + block.end;
                let (parameters, state) = self.model.block_mut(at.clone());
                part[at_step] += self.plan.optimizer.squares(&of_step, parameters, self.sums.part(at), state);
            }
        }
        // It changes with the last chunk of a step.
        if self.exchange.complete_step() == Some(step) {
            let norm = held.norm(step, &self.slots);
            held.last = Some((step, Arc::clone(&norm)));
            let workers = self.plan.ports.workers();
            for (outbox, port) in self.outboxes.iter_mut().zip(0..workers) {
                outbox.send_norm(step, Arc::clone(&norm));
                self.dirty.insert(port);
            }
        }
        if self.sums.keeps_totals() {
            self.settle(index);
        }
        self.update_if_released(index);
    }

    /// Takes the release of a step, from rank 0 or from another site, with the factor for its mean gradient.
    pub(super) fn release(&mut self, port: u32, step: u32, payload: &[u8]) -> Result<(), Fault> {
        let keys = match &self.timing {
            UpdateTiming::OnRelease(held) => held.tensors.len(),
            UpdateTiming::WhenComplete | UpdateTiming::WithQuorum(_) => 0,
        };
        let read = Release::decode(payload).filter(|(_, tensors)| tensors.len() == keys);
        let (Release(factor), tensors) = read.ok_or_else(|| {
            let expected = Release::BYTES + keys * Tensors::BYTES_EACH;
            Fault::Frame(format!("a Release of {} bytes, not {expected}", payload.len()))
        })?;
        let is_new = self.exchange.release(self.releaser(port), step).map_err(Fault::Release)?;
        if let UpdateTiming::OnRelease(held) = &mut self.timing
            && is_new
        {
            held.factor = factor;
            held.tensors.iter_mut().zip(tensors.iter()).for_each(|(held, whole)| *held = whole);
            self.pass_on_end(port);
        }
        Ok(())
    }

    /// Takes the order to end a held step without an update, from rank 0 or from another site.
    pub(super) fn skip(&mut self, port: u32, step: u32) -> Result<(), Fault> {
        if self.exchange.skip(self.releaser(port), step).map_err(Fault::Release)? {
            self.pass_on_end(port);
        }
        Ok(())
    }

    /// The worker at a port; `None` if another site is there.
    fn releaser(&self, port: u32) -> Option<u32> {
        match self.plan.ports.side(port) {
            Side::Worker(member) => Some(member),
            Side::Below(_) | Side::Above | Side::Standby | Side::Serving => None,
        }
    }

    /// Sends the end of a held step to the sites around, except to the one from which it came.
    fn pass_on_end(&mut self, from: u32) {
        let ports = self.plan.ports.clone();
        for (to, _) in ports.to_sites() {
            if to != from && !self.departures.has_left(to) {
                self.send_end(to);
                self.dirty.insert(to);
            }
        }
    }

    /// Sends the end of the last held step to a neighbouring site. Over a stream that replaces another it may have been lost with
    /// the old one, and goes after the changes of hyperparameters, which hold for its step if they come before it.
    pub(super) fn send_end(&mut self, port: u32) {
        let (UpdateTiming::OnRelease(held), Some(step)) = (&self.timing, self.exchange.released_step())
        else {
            return;
        };
        let (operation, payload) = match self.exchange.skips() {
            true => (Operation::Skip, Vec::new()),
            false => (Operation::Release, held.release()),
        };
        let header = Header { step, length: payload.len() as u32, ..Header::bare(operation) };
        self.outboxes[port as usize].end_held((header, payload));
    }

    /// Sends the last norm once more to a rank whose stream was replaced, since it may have been lost with the old one.
    pub(super) fn repeat_norm(&mut self, port: u32) {
        if let UpdateTiming::OnRelease(HeldStep { last: Some((step, norm)), .. }) = &self.timing {
            self.outboxes[port as usize].send_norm(*step, Arc::clone(norm));
            self.dirty.insert(port);
        }
    }

    /// Forgets the last norm: all ranks begin again at an earlier step.
    pub(super) fn forget_norm(&mut self) {
        if let UpdateTiming::OnRelease(held) = &mut self.timing {
            held.last = None;
        }
    }

    /// Returns whether chunks of a released step wait for [`Shard::update_released`].
    pub(crate) fn is_releasing(&self) -> bool {
        self.exchange.is_releasing()
    }

    /// Updates the next chunks of a released step, about `elements` elements.
    pub(crate) fn update_released(&mut self, elements: usize) {
        let mut done = 0;
        while done < elements
            && let Some((index, update)) = self.exchange.release_next()
        {
            self.update_held(index, update);
            done += self.slots[index as usize].elements as usize;
        }
    }

    /// Updates a chunk if it is held and its step is released.
    pub(super) fn update_if_released(&mut self, index: u32) {
        if let Some(update) = self.exchange.release_chunk(index) {
            self.update_held(index, update);
        }
    }

    fn update_held(&mut self, index: u32, update: Update) {
        // The sum was complete when the chunk was held.
        self.arenas.find_no_sources();
        self.optimise(index, self.slots[index as usize], update);
    }
}

impl HeldStep {
    /// The payload of the Norm of a step whose chunks are all complete. Sums are added up in the order of slots, whatever the order
    /// of arrival.
    fn norm(&self, step: u32, slots: &[ChunkPlace]) -> Arc<[u8]> {
        let at_step = step as usize % 2;
        let mut payload = Norm(self.squares.iter().map(|by_step| by_step[at_step]).sum()).encode().to_vec();
        let mut tensors = vec![TensorSquares::default(); self.tensors.len()];
        for (part, slot) in self.parts.iter().zip(slots) {
            tensors[slot.key as usize] += part[at_step];
        }
        Tensors::encode(&tensors, &mut payload);
        payload.into()
    }

    /// The payload of the Release of the step that is being released.
    fn release(&self) -> Vec<u8> {
        let mut payload = Release(self.factor).encode().to_vec();
        Tensors::encode(&self.tensors, &mut payload);
        payload
    }
}
