//! How a shard's memory is taken and given back: in parts, between the turns of other jobs.

use super::{Arenas, Shard, encode};
use crate::core::buffer::Pages;
use crate::core::restored::Restored;

/// What a shard begins with that is still to be copied.
pub(super) struct Restoring {
    restored: Restored,
    /// Slots before this one have it.
    at: u32,
}

impl Shard {
    /// Says what every chunk begins with, where a checkpoint has it.
    pub(super) fn begin_restoring(&mut self, restored: Restored) {
        self.newest_step = restored.step;
        self.restoring = (!self.slots.is_empty()).then_some(Restoring { restored, at: 0 });
    }

    /// Touches the next pages, or copies what the next chunks begin with, about so many bytes. `false` when all is done and
    /// frames may come.
    pub(crate) fn open_some(&mut self, bytes: usize) -> bool {
        let mut left = bytes;
        while let Some(mut restoring) = self.restoring.take() {
            self.restore_next(&mut restoring, &mut left);
            if (restoring.at as usize) < self.slots.len() {
                self.restoring = Some(restoring);
            }
            if left == 0 {
                return true;
            }
        }
        self.each_array(&mut |array| touch(array, &mut left));
        left == 0
    }

    /// Restores the next chunk, or touches some of the pages that it needs. What needs none of what is restored is touched behind
    /// that, in the room it leaves.
    fn restore_next(&mut self, restoring: &mut Restoring, left: &mut usize) {
        let slot = self.slots[restoring.at as usize];
        let (range, slots) = (slot.range(), self.state_slots);
        touch(&mut self.encoded, left);
        self.quantised.each_array(&mut |array| touch(array, left));
        for (array, end) in [(&mut self.model, range.end), (&mut self.state, range.end * slots)] {
            while !array.reaches(end) && *left > 0 {
                touch(array, left);
            }
        }
        if *left > 0 {
            self.restore(restoring.at, &restoring.restored);
            *left = left.saturating_sub(range.len() * (1 + slots) * size_of::<f32>());
            restoring.restored.forget_up_to(restoring.at);
            restoring.at += 1;
        }
    }

    /// Begins a chunk with what a checkpoint has of it.
    fn restore(&mut self, index: u32, restored: &Restored) {
        let slot = self.slots[index as usize];
        let state = slot.offset * self.state_slots..slot.range().end * self.state_slots;
        let model = self.model.part_mut(slot.range());
        model.copy_from_slice(restored.parameters(index));
        encode(model, &mut self.encoded, slot.range(), slot.parameter);
        self.state.part_mut(state).copy_from_slice(restored.state(index));
        // As a site above would say it; nobody has contributed, and the counts were checked when they were read.
        let known = self.exchange.initialise_state(index, None, restored.updates[index as usize]);
        known.and_then(|()| self.exchange.initialise(index, None, restored.step)).expect("a new chunk");
        if slot.gradient.is_quantised() {
            self.quantised.start(&slot, restored.received(index));
        }
    }

    /// The job is over: what has begun to leave is saved, and nothing reads or writes the arrays any more, which
    /// [`free_some`](Self::free_some) gives back. Returns the memory that its ranks have shared.
    pub(crate) fn close(&mut self) -> Arenas {
        self.spill_all();
        for outbox in &mut self.outboxes {
            outbox.forget();
        }
        self.deadlines = None;
        self.factors.stop();
        std::mem::replace(&mut self.arenas, Arenas::new(self.plan.ports.workers()))
    }

    /// Gives pages back, about so many bytes. `false` when none are left.
    pub(crate) fn free_some(&mut self, bytes: usize) -> bool {
        let mut left = bytes;
        self.each_array(&mut |array| {
            if left > 0 {
                left = left.saturating_sub(array.free_some(left));
            }
        });
        while left > 0
            && let Some(Restoring { restored, at }) = &mut self.restoring
        {
            let Some(slot) = self.slots.get(*at as usize) else {
                self.restoring = None;
                break;
            };
            restored.forget_up_to(*at);
            *at += 1;
            left = left.saturating_sub(slot.elements as usize * (1 + self.state_slots) * size_of::<f32>());
        }
        if left == 0 {
            return true;
        }
        self.counters.memory_bytes = 0;
        false
    }

    /// Bytes of its arrays that have been written, and of what is still to be copied there.
    #[cfg(test)]
    pub(crate) fn touched_bytes(&mut self) -> u64 {
        let mut bytes = self.restoring.as_ref().map_or(0, |restoring| restoring.restored.memory_bytes());
        self.each_array(&mut |array| bytes += array.touched_bytes() as u64);
        bytes
    }

    fn each_array(&mut self, each: &mut dyn FnMut(&mut dyn Pages)) {
        for array in [&mut self.model, &mut self.merge, &mut self.state, &mut self.total] {
            each(array);
        }
        self.parked.iter_mut().for_each(|array| each(array));
        each(&mut self.encoded);
        self.quantised.each_array(each);
        self.factors.each_array(each);
        let armed = self.armed.as_mut().map(|armed| &mut armed.snapshot);
        for snapshot in self.spare_snapshot.iter_mut().chain(armed) {
            snapshot.each_array(each);
        }
    }
}

fn touch(array: &mut dyn Pages, left: &mut usize) {
    if *left > 0 {
        *left = left.saturating_sub(array.touch_some(*left));
    }
}
