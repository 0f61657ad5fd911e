use super::Dataset;
use crate::random::Random;

/// Separates the shuffles from every other use of the seed.
const PURPOSE: u64 = 1;

/// The assignment of examples to workers and steps in one epoch.
///
/// The epoch's examples are shuffled by (seed, epoch) alone, so that every rank computes the same order
/// without communication. Step t takes the next `workers * batch` of them: the *global batch*. Rank r's shard
/// is the r-th run of `batch` examples within it, so the global batch is the ranks' shards one after the
/// other, and one process can compute all of them in turn. The last, incomplete global batch is dropped.
#[derive(Clone, Debug)]
pub struct EpochOrder {
    examples: Vec<u32>,
    workers: usize,
    batch: usize,
}

impl EpochOrder {
    /// The order of one epoch; `batch` examples per worker and step.
    ///
    /// # Panics
    /// If `workers` or `batch` is zero.
    pub fn new(data: &Dataset, seed: u64, epoch: usize, workers: usize, batch: usize) -> Self {
        assert!(workers > 0 && batch > 0, "an epoch needs at least one worker and one example per batch");
        let examples = u32::try_from(data.len()).expect("readers bound a data set far below 2^32 examples");
        let mut examples: Vec<u32> = (0..examples).collect();
        Random::new(seed, &[PURPOSE, epoch as u64]).shuffle(&mut examples);
        EpochOrder { examples, workers, batch }
    }

    /// Whole global batches in the epoch.
    pub fn steps(&self) -> usize {
        self.examples.len() / self.workers / self.batch
    }

    /// The examples of all workers at one step, in rank order.
    pub fn global_batch(&self, step: usize) -> impl ExactSizeIterator<Item = usize> {
        let size = self.workers * self.batch;
        self.examples[step * size..][..size].iter().map(|&example| example as usize)
    }

    /// The examples of one worker at one step.
    pub fn shard(&self, step: usize, rank: usize) -> impl ExactSizeIterator<Item = usize> {
        assert!(rank < self.workers);
        let start = (step * self.workers + rank) * self.batch;
        self.examples[start..][..self.batch].iter().map(|&example| example as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::DataSource;

    #[test]
    fn shards_concatenate_to_the_global_batch_and_cover_each_example_at_most_once() {
        let data = DataSource::Digits.load().unwrap().train;
        for (workers, batch) in [(1, 64), (4, 16), (3, 7), (1, 1437), (7, 300)] {
            let order = EpochOrder::new(&data, 11, 2, workers, batch);
            assert_eq!(order.steps(), data.len() / (workers * batch));
            let mut seen = vec![false; data.len()];
            for step in 0..order.steps() {
                let shards: Vec<usize> = (0..workers).flat_map(|rank| order.shard(step, rank)).collect();
                assert!(order.global_batch(step).eq(shards.iter().copied()));
                for example in shards {
                    assert!(!std::mem::replace(&mut seen[example], true), "{example} came twice");
                }
            }
            let covered = seen.iter().filter(|&&seen| seen).count();
            assert_eq!(covered, order.steps() * workers * batch);
        }
    }

    #[test]
    fn the_global_batch_depends_on_seed_and_epoch_but_not_on_how_it_is_split() {
        let data = DataSource::Digits.load().unwrap().train;
        let global = |seed, epoch, workers, batch| -> Vec<usize> {
            EpochOrder::new(&data, seed, epoch, workers, batch).global_batch(3).collect()
        };
        assert_eq!(global(1, 0, 4, 16), global(1, 0, 4, 16));
        assert_eq!(global(1, 0, 4, 16), global(1, 0, 1, 64));
        assert_ne!(global(1, 0, 4, 16), global(2, 0, 4, 16));
        assert_ne!(global(1, 0, 4, 16), global(1, 1, 4, 16));
    }
}
