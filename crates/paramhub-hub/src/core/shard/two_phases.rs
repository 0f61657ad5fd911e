//! Steps in two phases: complete chunks are held until rank 0, which gets the norm of all gradients, releases
//! their step.

use paramhub_core::wire::{Norm, Release};
use paramhub_kernels::mean_factor;
use paramhub_kernels::squares::squares;

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
        let factor = mean_factor(self.exchange.contributors());
        let blocks = slot.blocks(BLOCK_ELEMENTS);
        let total = blocks.map(|block| {
            squares(self.sums.part(slot.array_offset + block.start..slot.array_offset + block.end), factor)
        });
        held.squares[index as usize] = total.sum();
        if let Some(step) = self.exchange.held_step() {
            // The norm is added up in the order of slots, whatever the order of arrival.
            let norm = Norm(held.squares.iter().sum());
            held.last = Some((step, norm));
            for (outbox, port) in self.outboxes.iter_mut().zip(0..) {
                outbox.send_norm(step, norm);
                self.dirty.insert(port);
            }
        }
    }

    /// Takes rank 0's release of a step, with the factor for its mean gradient.
    pub(super) fn release(&mut self, port: u32, step: u32, payload: &[u8]) -> Result<(), Fault> {
        let short = || Fault::Frame(format!("a Release of {} bytes, not {}", payload.len(), Release::BYTES));
        let Release(factor) = Release::decode(payload).ok_or_else(short)?;
        let is_new = self.exchange.release(port, step).map_err(Fault::Release)?;
        if let UpdateTiming::OnRelease(held) = &mut self.timing
            && is_new
        {
            held.factor = factor;
        }
        Ok(())
    }

    /// Takes rank 0's order to end a held step without an update.
    pub(super) fn skip(&mut self, port: u32, step: u32) -> Result<(), Fault> {
        self.exchange.skip(port, step).map_err(Fault::Release).map(drop)
    }

    /// Sends the last norm once more to a rank whose stream was replaced, since it may have been lost with the old one.
    pub(super) fn repeat_norm(&mut self, port: u32) {
        if let UpdateTiming::OnRelease(HeldStep { last: Some((step, norm)), .. }) = self.timing {
            self.outboxes[port as usize].send_norm(step, norm);
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
