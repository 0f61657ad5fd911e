//! Aggregators and optimizers whose results bypass the cache (PHub sections 3.2.2 and 4.5, table 4), for
//! comparison with those whose results do not.
//!
//! A hub soon reads again what it writes: the next contribution reads the sum, and the sends read the model.
//! Bypassing the cache leaves room in it for other data and costs memory bandwidth. PHub measured that this
//! is slower, and here anyone can repeat the measurement.
//!
//! The kernels under comparison process a tile in the L1 cache, so the bits are the same, and the tile is
//! then streamed to its place. That pass through L1 is part of the measurement; it is small compared with
//! memory.

use paramhub_core::codec::Codec;
use paramhub_core::hyperparameters::{HyperparameterError, Hyperparameters};

use crate::aggregate::Aggregator;
use crate::convert::assert_holds;
use crate::optimizer::{Optimizer, Step};

/// Elements of a tile: with two state slots it takes 4 KiB, a fraction of any L1 cache.
const TILE_ELEMENTS: usize = 256;
/// State slots that go through a tile.
const SLOTS_MAX: usize = 2;

/// `true` if this target has stores that bypass the cache. If it has none, [`NonTemporal`] works but
/// bypasses nothing.
pub const IS_SUPPORTED: bool = cfg!(target_arch = "x86_64");

/// Does what `R` does, and writes the result past the cache: an aggregator its sum, an optimizer its model
/// and its state. The results of an optimizer with more than two state slots are written as usual.
#[derive(Clone, Copy, Debug, Default)]
pub struct NonTemporal<R> {
    rule: R,
}

impl<R> NonTemporal<R> {
    /// The non-temporal form of `rule`.
    pub fn new(rule: R) -> Self {
        Self { rule }
    }
}

impl<R: Aggregator> NonTemporal<R> {
    /// Calls `work` with every tile of the old sum, and its first element.
    fn by_tiles(&self, sum: &mut [f32], keeps: bool, mut work: impl FnMut(&mut [f32], usize)) {
        let mut target = Streamed::new(sum);
        let mut tile = [0.0; TILE_ELEMENTS];
        while !target.rest().is_empty() {
            let first = target.written;
            let rest = target.rest();
            let tile = &mut tile[..rest.len().min(TILE_ELEMENTS)];
            if keeps {
                prefetch(&rest[tile.len()..]);
                tile.copy_from_slice(&rest[..tile.len()]);
            }
            work(tile, first);
            target.write(tile);
        }
    }
}

impl<R: Aggregator> Aggregator for NonTemporal<R> {
    fn assign_f32(&self, sum: &mut [f32], contribution: &[f32]) {
        assert_eq!(sum.len(), contribution.len(), "a contribution is as long as its sum");
        self.by_tiles(sum, false, |tile, first| {
            self.rule.assign_f32(tile, &contribution[first..][..tile.len()])
        });
    }

    fn add_f32(&self, sum: &mut [f32], contribution: &[f32]) {
        assert_eq!(sum.len(), contribution.len(), "a contribution is as long as its sum");
        self.by_tiles(sum, true, |tile, first| self.rule.add_f32(tile, &contribution[first..][..tile.len()]));
    }

    fn assign(&self, sum: &mut [f32], wire: &[u8], codec: Codec) {
        assert_holds(codec, sum.len(), wire.len());
        let bytes = codec.bytes();
        self.by_tiles(sum, false, |tile, first| {
            self.rule.assign(tile, &wire[first * bytes..][..tile.len() * bytes], codec);
        });
    }

    fn add(&self, sum: &mut [f32], wire: &[u8], codec: Codec) {
        assert_holds(codec, sum.len(), wire.len());
        let bytes = codec.bytes();
        self.by_tiles(sum, true, |tile, first| {
            self.rule.add(tile, &wire[first * bytes..][..tile.len() * bytes], codec);
        });
    }
}

impl<R: Optimizer> Optimizer for NonTemporal<R> {
    fn state_slots(&self, hyperparameters: &Hyperparameters) -> usize {
        self.rule.state_slots(hyperparameters)
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
        let len = model.len();
        let slots = state.len().checked_div(len).unwrap_or(0);
        if slots > SLOTS_MAX {
            return self.rule.apply(step, model, sum, state);
        }
        assert_eq!(sum.len(), len, "a sum is as long as its model");
        let mut model = Streamed::new(model);
        let (first, second) = state[..slots * len].split_at_mut(slots.min(1) * len);
        let mut state = [Streamed::new(first), Streamed::new(second)];
        let mut tiles = [0.0; TILE_ELEMENTS * (1 + SLOTS_MAX)];
        while !model.rest().is_empty() {
            let (at, length) = (model.written, model.rest().len().min(TILE_ELEMENTS));
            let (tile, memory) = tiles.split_at_mut(length);
            let memory = &mut memory[..slots * length];
            let sources = [&model].into_iter().chain(&state[..slots]);
            for (source, tile) in sources.zip([&mut *tile].into_iter().chain(memory.chunks_mut(length))) {
                prefetch(&source.rest()[length..]);
                tile.copy_from_slice(&source.rest()[..length]);
            }
            self.rule.apply(step, tile, &sum[at..][..length], memory);
            model.write(tile);
            for (target, tile) in state.iter_mut().zip(memory.chunks(length)) {
                target.write(tile);
            }
        }
    }

    fn defaults(&self) -> Hyperparameters {
        self.rule.defaults()
    }

    fn needs_whole_chunks(&self) -> bool {
        self.rule.needs_whole_chunks()
    }

    fn check(&self, hyperparameters: &Hyperparameters) -> Result<(), HyperparameterError> {
        self.rule.check(hyperparameters)
    }
}

/// A slice that is overwritten from its beginning, past the cache. Nothing reads what was written before this
/// is dropped, and by then all threads see it.
struct Streamed<'a> {
    target: &'a mut [f32],
    written: usize,
}

impl<'a> Streamed<'a> {
    fn new(target: &'a mut [f32]) -> Self {
        Self { target, written: 0 }
    }

    /// The part that is not overwritten yet.
    fn rest(&self) -> &[f32] {
        &self.target[self.written..]
    }

    fn write(&mut self, tile: &[f32]) {
        stream(&mut self.target[self.written..][..tile.len()], tile);
        self.written += tile.len();
    }
}

impl Drop for Streamed<'_> {
    fn drop(&mut self) {
        fence();
    }
}

/// Copies past the cache; [`fence`] must follow before anything reads the target.
#[cfg(target_arch = "x86_64")]
fn stream(target: &mut [f32], source: &[f32]) {
    use std::arch::x86_64::{_mm_loadu_ps, _mm_stream_ps};
    const LANES: usize = 4;
    assert_eq!(target.len(), source.len());
    // Streaming stores need addresses that are multiples of 16.
    let head = target.as_ptr().align_offset(LANES * size_of::<f32>()).min(target.len());
    let (target_head, target) = target.split_at_mut(head);
    let (source_head, source) = source.split_at(head);
    target_head.copy_from_slice(source_head);
    let (target, target_tail) = target.as_chunks_mut::<LANES>();
    let (source, source_tail) = source.as_chunks::<LANES>();
    for (target, source) in target.iter_mut().zip(source) {
        // SAFETY: `source` is four readable values; the load needs no alignment. SSE is part of x86-64.
        let values = unsafe { _mm_loadu_ps(source.as_ptr()) };
        // SAFETY: `target` is four writable values at a multiple of 16 bytes, counted from `head` on. The
        // caller's duty, a fence before anything reads them, is met by the drop of `Streamed`, until which it
        // holds them exclusively.
        unsafe { _mm_stream_ps(target.as_mut_ptr(), values) };
    }
    target_tail.copy_from_slice(source_tail);
}

#[cfg(not(target_arch = "x86_64"))]
fn stream(target: &mut [f32], source: &[f32]) {
    target.copy_from_slice(source);
}

/// Makes the streamed values visible.
fn fence() {
    // SAFETY: a fence touches no memory, and SSE is part of x86-64.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Prefetches the first tile of `values`, for one use and not for the cache.
fn prefetch(values: &[f32]) {
    #[cfg(target_arch = "x86_64")]
    for line in values[..values.len().min(TILE_ELEMENTS)].chunks(16) {
        use std::arch::x86_64::{_MM_HINT_NTA, _mm_prefetch};
        // SAFETY: a prefetch reads nothing by itself, and the address is a live value's.
        unsafe { _mm_prefetch::<_MM_HINT_NTA>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = values;
}
