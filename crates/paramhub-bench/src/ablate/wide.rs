//! In wide aggregation, a group of threads works on one array at a time, each thread on a piece of it (PHub
//! section 3.2.2, figure 7).

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use paramhub::{Aggregator, Codec, Hyperparameters, Optimizer};
use paramhub_kernels::{HyperparameterError, Step};

/// The f32 elements in a cache line of 64 bytes. Pieces are multiples of it, so that no two threads write to
/// one cache line if the array begins on one.
const CACHE_LINE_ELEMENTS: usize = 16;

/// Threads that together work on one array at a time: none begins the next array before all are done.
pub(super) struct ThreadGroup {
    pool: rayon::ThreadPool,
    /// A caller holds this lock while the threads work on its array.
    turn: Mutex<()>,
}

impl ThreadGroup {
    pub(super) fn new(threads: usize) -> anyhow::Result<Arc<ThreadGroup>> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|number| format!("wide-{number}"))
            .build()
            .context("cannot start the threads")?;
        Ok(Arc::new(ThreadGroup { pool, turn: Mutex::new(()) }))
    }

    /// Returns the number of elements of each thread's piece. The last piece may be shorter.
    fn piece_elements(&self, elements: usize) -> usize {
        let share = elements.div_ceil(self.pool.current_num_threads());
        share.next_multiple_of(CACHE_LINE_ELEMENTS).max(CACHE_LINE_ELEMENTS)
    }

    /// Calls `work` with each piece of an array, each on a thread of its own. Returns when all are done.
    fn run_on_pieces<P: Send>(&self, pieces: impl Iterator<Item = P> + Send, work: impl Fn(P) + Sync) {
        // A panic in a piece is passed on to the caller and leaves no state to repair.
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let work = &work;
        self.pool.scope(|threads| pieces.for_each(|piece| threads.spawn(move |_| work(piece))));
    }
}

/// An aggregator or optimizer that lets a group of threads apply another one, its `rule`.
pub(super) struct Wide<R> {
    threads: Arc<ThreadGroup>,
    rule: R,
}

impl<R> Wide<R> {
    pub(super) fn new(threads: &Arc<ThreadGroup>, rule: R) -> Wide<R> {
        Wide { threads: Arc::clone(threads), rule }
    }
}

impl<R: Aggregator> Aggregator for Wide<R> {
    fn assign_f32(&self, sum: &mut [f32], contribution: &[f32]) {
        let piece_elements = self.threads.piece_elements(sum.len());
        let pieces = sum.chunks_mut(piece_elements).zip(contribution.chunks(piece_elements));
        self.threads.run_on_pieces(pieces, |(sum, contribution)| self.rule.assign_f32(sum, contribution));
    }

    fn add_f32(&self, sum: &mut [f32], contribution: &[f32]) {
        let piece_elements = self.threads.piece_elements(sum.len());
        let pieces = sum.chunks_mut(piece_elements).zip(contribution.chunks(piece_elements));
        self.threads.run_on_pieces(pieces, |(sum, contribution)| self.rule.add_f32(sum, contribution));
    }

    fn assign(&self, sum: &mut [f32], wire: &[u8], codec: Codec) {
        let piece_elements = self.threads.piece_elements(sum.len());
        let pieces = sum.chunks_mut(piece_elements).zip(wire.chunks(piece_elements * codec.bytes()));
        self.threads.run_on_pieces(pieces, |(sum, wire)| self.rule.assign(sum, wire, codec));
    }

    fn add(&self, sum: &mut [f32], wire: &[u8], codec: Codec) {
        let piece_elements = self.threads.piece_elements(sum.len());
        let pieces = sum.chunks_mut(piece_elements).zip(wire.chunks(piece_elements * codec.bytes()));
        self.threads.run_on_pieces(pieces, |(sum, wire)| self.rule.add(sum, wire, codec));
    }
}

impl<R: Optimizer> Optimizer for Wide<R> {
    fn state_slots(&self, hyperparameters: &Hyperparameters) -> usize {
        self.rule.state_slots(hyperparameters)
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
        let (length, piece_elements) = (model.len(), self.threads.piece_elements(model.len()));
        let slots = state.len().checked_div(length).unwrap_or(0);
        // Each piece has all its state slots in one range of `state`. The rule alone reads the state, so a
        // layout by pieces is as good as one by slots.
        let mut rest = state;
        let pieces = model.chunks_mut(piece_elements).zip(sum.chunks(piece_elements)).map(|(model, sum)| {
            let (state, tail) = std::mem::take(&mut rest).split_at_mut(slots * model.len());
            rest = tail;
            (model, sum, state)
        });
        let pieces: Vec<_> = pieces.collect();
        self.threads.run_on_pieces(pieces.into_iter(), |(model, sum, state)| {
            self.rule.apply(step, model, sum, state);
        });
    }

    fn defaults(&self) -> Hyperparameters {
        self.rule.defaults()
    }

    fn needs_whole_chunks(&self) -> bool {
        // The layout of the state depends on the length of the array.
        true
    }

    fn check(&self, hyperparameters: &Hyperparameters) -> Result<(), HyperparameterError> {
        self.rule.check(hyperparameters)
    }
}

#[cfg(test)]
mod tests {
    use paramhub_kernels::{Adam, Sum};

    use super::*;

    #[test]
    fn a_group_of_threads_makes_what_one_thread_makes() {
        for count in [1, 2, 3] {
            let threads = ThreadGroup::new(count).unwrap();
            for length in [0, 1, 15, 16, 17, 1000] {
                let wire: Vec<u8> = (0..length).flat_map(|i| (i as f32 / 8.0 - 3.0).to_le_bytes()).collect();
                let one = step(&Sum::new(), &Adam::new(), &wire);
                let wide = step(&Wide::new(&threads, Sum::new()), &Wide::new(&threads, Adam::new()), &wire);
                assert_eq!(wide, one, "{count} threads, {length} elements");
            }
        }
    }

    /// The sum and the model after three updates. The state is read back through the rule itself.
    fn step(sum_rule: &dyn Aggregator, rule: &dyn Optimizer, wire: &[u8]) -> (Vec<f32>, Vec<f32>) {
        let length = wire.len() / 4;
        let hyperparameters = rule.defaults();
        let (mut sum, mut model) = (vec![f32::NAN; length], vec![1.0; length]);
        let mut state = vec![0.0; rule.state_slots(&hyperparameters) * length];
        for number in 1..=3 {
            sum_rule.assign(&mut sum, wire, Codec::F32);
            sum_rule.add(&mut sum, wire, Codec::F32);
            let copy = sum.clone();
            sum_rule.add_f32(&mut sum, &copy);
            rule.apply(
                &Step {
                    hyperparameters: &hyperparameters,
                    number,
                    contributions: 4,
                    factor: 1.0,
                    tensor: None,
                },
                &mut model,
                &sum,
                &mut state,
            );
        }
        (sum, model)
    }
}
