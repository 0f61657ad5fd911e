use std::sync::Arc;

use paramhub_core::codec::Codec;

use crate::convert::{assert_holds, decode};
use crate::dispatch::Isa;
use crate::quantise;
use crate::shared::{self, Floats};
use crate::sum;

/// Elements that the default wire forms decode at a time, and the most that [`Aggregator::gather`] gets; one
/// tile is on the stack.
pub const TILE_ELEMENTS: usize = 256;

/// The way in which the contributions to a chunk combine (PHub section 3.2.2).
///
/// The first contribution is assigned, the others are added, each as it arrives or, in reproducible mode, in
/// rank order. Element `i` of the result may depend only on elements `i` of the contributions: a hub cuts
/// tensors into chunks, and the default wire forms cut chunks into tiles or the blocks of a quantised codec.
///
/// Only [`add_f32`](Self::add_f32) is required. The wire forms decode a tile at a time and call the f32
/// forms, so both give the same bits; an aggregator that can read wire bytes faster overrides them. `sum` and
/// the contribution always have the same number of elements.
pub trait Aggregator: Send + Sync {
    /// `sum` after the first contribution, given as f32. By default a copy.
    fn assign_f32(&self, sum: &mut [f32], contribution: &[f32]) {
        sum.copy_from_slice(contribution);
    }

    /// `sum` after one more contribution, given as f32.
    fn add_f32(&self, sum: &mut [f32], contribution: &[f32]);

    /// `sum` after the first contribution, given as `sum.len()` elements of `codec` at any alignment.
    fn assign(&self, sum: &mut [f32], wire: &[u8], codec: Codec) {
        by_tiles(sum, wire, codec, |sum, contribution| self.assign_f32(sum, contribution));
    }

    /// `sum` after all of `sources`, in order: f32 contributions that other processes may overwrite
    /// meanwhile. If it `adds`, it adds them to `sum`; otherwise the first one begins `sum`. By default a
    /// private copy of each goes through [`assign_f32`](Self::assign_f32) and [`add_f32`](Self::add_f32).
    fn gather(&self, sum: &mut [f32], adds: bool, sources: &[Floats<'_>]) {
        let mut copy = [0.0; TILE_ELEMENTS];
        assert!(sum.len() <= TILE_ELEMENTS, "contributions in shared memory are summed tile by tile");
        for (number, source) in sources.iter().enumerate() {
            let contribution = &mut copy[..sum.len()];
            source.read(contribution);
            match number == 0 && !adds {
                true => self.assign_f32(sum, contribution),
                false => self.add_f32(sum, contribution),
            }
        }
    }

    /// `sum` after one more contribution, given as `sum.len()` elements of `codec` at any alignment.
    fn add(&self, sum: &mut [f32], wire: &[u8], codec: Codec) {
        by_tiles(sum, wire, codec, |sum, contribution| self.add_f32(sum, contribution));
    }
}

impl<A: Aggregator + ?Sized> Aggregator for Arc<A> {
    fn assign_f32(&self, sum: &mut [f32], contribution: &[f32]) {
        (**self).assign_f32(sum, contribution);
    }

    fn add_f32(&self, sum: &mut [f32], contribution: &[f32]) {
        (**self).add_f32(sum, contribution);
    }

    fn assign(&self, sum: &mut [f32], wire: &[u8], codec: Codec) {
        (**self).assign(sum, wire, codec);
    }

    fn add(&self, sum: &mut [f32], wire: &[u8], codec: Codec) {
        (**self).add(sum, wire, codec);
    }

    fn gather(&self, sum: &mut [f32], adds: bool, sources: &[Floats<'_>]) {
        (**self).gather(sum, adds, sources);
    }
}

/// The built-in aggregator, registered as `sum`: the sum in f32.
#[derive(Clone, Copy, Debug)]
pub struct Sum {
    isa: Isa,
}

impl Sum {
    /// The sum with the widest instruction set of this CPU.
    pub fn new() -> Self {
        Self::with_isa(Isa::best())
    }

    /// The sum with the bodies for `isa`.
    pub fn with_isa(isa: Isa) -> Self {
        Self { isa }
    }
}

impl Default for Sum {
    fn default() -> Self {
        Self::new()
    }
}

impl Aggregator for Sum {
    fn add_f32(&self, sum: &mut [f32], contribution: &[f32]) {
        sum::add_f32_with(self.isa, sum, contribution);
    }

    fn assign(&self, sum: &mut [f32], wire: &[u8], codec: Codec) {
        sum::assign_with(self.isa, sum, wire, codec);
    }

    fn add(&self, sum: &mut [f32], wire: &[u8], codec: Codec) {
        sum::add_with(self.isa, sum, wire, codec);
    }

    fn gather(&self, sum: &mut [f32], adds: bool, sources: &[Floats<'_>]) {
        shared::gather(sum, adds, sources);
    }
}

fn by_tiles(sum: &mut [f32], wire: &[u8], codec: Codec, combine: impl Fn(&mut [f32], &[f32])) {
    assert_holds(codec, sum.len(), wire.len());
    if codec.is_quantised() {
        return quantise::by_blocks(Isa::best(), sum, wire, codec, combine);
    }
    let mut tile = [0.0; TILE_ELEMENTS];
    for (sum, wire) in sum.chunks_mut(TILE_ELEMENTS).zip(wire.chunks(TILE_ELEMENTS * codec.bytes())) {
        let contribution = &mut tile[..sum.len()];
        decode(wire, contribution, codec);
        combine(sum, contribution);
    }
}
