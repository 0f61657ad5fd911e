//! Steps in two phases: complete chunks are held until rank 0, which gets the norm of all gradients, releases
//! their step.

use std::sync::Arc;

use paramhub_core::norms::TensorSquares;
use paramhub_core::wire::{Norm, Release, Tensors};
use paramhub_kernels::squares::squares;
use paramhub_kernels::{Step, mean_factor};

use super::Shard;
use super::timing::{HeldStep, UpdateTiming};
use crate::core::fault::Fault;
use crate::core::layout::{BLOCK_ELEMENTS, ChunkPlace};

impl Shard {
    /// Adds a sum's part of the norm; with the last chunk of the step, sends the norm to all ranks.
    pub(super) fn hold(&mut self, index: u32, slot: ChunkPlace) {
        let UpdateTiming::OnRelease(held) = &mut self.timing else {
            unreachable!("chunks are held in two phases only")
        };
        let contributions = self.exchange.contributors();
        let factor = mean_factor(contributions);
        let blocks = slot.blocks(BLOCK_ELEMENTS);
        let total = blocks.map(|block| {
            squares(self.sums.part(slot.array_offset + block.start..slot.array_offset + block.end), factor)
        });
        held.squares[index as usize] = total.sum();
        if let Some(part) = held.parts.get_mut(index as usize) {
            let step = Step {
                hyperparameters: self.schedules[usize::from(slot.group)].at(self.exchange.step(index)),
                number: self.exchange.updates(index) + 1,
                contributions,
                factor: 1.0,
                tensor: None,
            };
            *part = TensorSquares::default();
            for block in slot.blocks(self.model.block_elements) {
                let at = slot.array_offset + block.start..slot.array_offset + block.end;
                let (parameters, state) = self.model.block_mut(at.clone());
                *part += self.plan.optimizer.squares(&step, parameters, self.sums.part(at), state);
            }
        }
        if let Some(step) = self.exchange.held_step() {
            let norm = held.norm(&self.slots);
            held.last = Some((step, Arc::clone(&norm)));
            for (outbox, port) in self.outboxes.iter_mut().zip(0..) {
                outbox.send_norm(step, Arc::clone(&norm));
                self.dirty.insert(port);
            }
        }
    }

    /// Takes rank 0's release of a step, with the factor for its mean gradient.
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
        let is_new = self.exchange.release(port, step).map_err(Fault::Release)?;
        if let UpdateTiming::OnRelease(held) = &mut self.timing
            && is_new
        {
            held.factor = factor;
            held.tensors.iter_mut().zip(tensors.iter()).for_each(|(held, whole)| *held = whole);
        }
        Ok(())
    }

    /// Takes rank 0's order to end a held step without an update.
    pub(super) fn skip(&mut self, port: u32, step: u32) -> Result<(), Fault> {
        self.exchange.skip(port, step).map_err(Fault::Release).map(drop)
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
            let slot = self.slots[index as usize];
            // The sum was complete when the chunk was held.
            self.arenas.find_no_sources();
            self.optimise(index, slot, update);
            done += slot.elements as usize;
        }
    }
}

impl HeldStep {
    /// The payload of the Norm of a step whose chunks are all held. Sums are added up in the order of slots, whatever the order of
    /// arrival.
    fn norm(&mut self, slots: &[ChunkPlace]) -> Arc<[u8]> {
        let mut payload = Norm(self.squares.iter().sum()).encode().to_vec();
        self.tensors.fill(TensorSquares::default());
        for (part, slot) in self.parts.iter().zip(slots) {
            self.tensors[slot.key as usize] += *part;
        }
        Tensors::encode(&self.tensors, &mut payload);
        payload.into()
    }
}
