//! Which steps a job has gone back to: the same for all ranks, and not far back.

use std::collections::BTreeMap;

/// The times at which all ranks have gone back.
#[derive(Debug, Default)]
pub(super) struct Rewinds {
    /// The number of steps from one to which the job can go back to the next, if it ever goes back.
    every: Option<u32>,
    /// The step at which the ranks have gone on, or `Some(None)` if they have begun anew, by the epoch that began with the
    /// loss.
    steps: BTreeMap<u64, Option<Option<u32>>>,
    /// The number of ranks that take part, by the epoch that began with the loss; 0 stands for the beginning.
    workers: BTreeMap<u64, u32>,
    /// The most steps of which a rank has had all parameters.
    reached: u32,
}

impl Rewinds {
    pub(super) fn new(every: Option<u32>) -> Rewinds {
        Rewinds { every, ..Rewinds::default() }
    }

    /// Whether the job is one that goes back.
    pub(super) fn may_happen(&self) -> bool {
        self.every.is_some()
    }

    /// A hub has heard that all ranks go back.
    pub(super) fn begun(&mut self, epoch: u64) {
        self.steps.entry(epoch).or_default();
    }

    /// How often all ranks have gone back to a step and gone on.
    pub(super) fn count(&self) -> usize {
        self.steps.values().flatten().flatten().count()
    }

    /// How often all ranks have begun anew instead.
    pub(super) fn count_anew(&self) -> usize {
        self.steps.values().filter(|step| **step == Some(None)).count()
    }

    /// The newest epoch in which all ranks have begun to go back; 0 if there is none.
    pub(super) fn newest(&self) -> u64 {
        self.steps.last_key_value().map_or(0, |(&epoch, _)| epoch)
    }

    /// A rank has the parameters of all chunks after so many steps.
    pub(super) fn reached(&mut self, step: u32) {
        self.reached = self.reached.max(step);
    }

    /// The number of ranks that take part since the ranks have gone back in an epoch; 0 if none has joined.
    pub(super) fn workers_since(&self, rewound_in: u64) -> u32 {
        self.workers.get(&rewound_in).copied().unwrap_or(0)
    }

    /// A process that has a rank since an epoch begins at a step, with so many ranks in all.
    pub(super) fn joined(
        &mut self,
        rank: u32,
        epoch: u64,
        step: Option<u32>,
        workers: u32,
    ) -> Result<(), String> {
        let Some(every) = self.every else { return Ok(()) };
        let since = self.steps.range(..epoch).next_back().map_or(0, |(&rewound_in, _)| rewound_in);
        let others = *self.workers.entry(since).or_insert(workers);
        if others != workers || rank >= workers {
            return Err(format!("rank {rank} of {workers} joins, and others were started as {others} ranks"));
        }
        let newest = self.newest();
        let before = self.steps.range(..epoch).filter_map(|(_, &step)| step.flatten()).max().unwrap_or(0);
        let Some((rewound_in, of_rewind)) = self.steps.range_mut(..epoch).next_back() else {
            return match step {
                None => Ok(()),
                Some(step) => Err(format!("rank {rank} joins at step {step} of a job that has lost nobody")),
            };
        };
        let first = *of_rewind.get_or_insert(step);
        if first != step {
            return Err(format!(
                "rank {rank} goes back to step {step:?}, and another to step {first:?}, in epoch {rewound_in}"
            ));
        }
        let Some(step) = step else {
            return match self.reached {
                0 => Ok(()),
                reached => Err(format!("rank {rank} begins anew, although a rank has had step {reached}")),
            };
        };
        // A process that stood still hears late of the way before last, and is refused then.
        let is_past = *rewound_in < newest;
        match step < before || (!is_past && step + every <= self.reached) {
            false => Ok(()),
            true => Err(format!(
                "rank {rank} goes back to step {step}, although the job has gone back to step {before}, and a rank has had \
                 step {}",
                self.reached
            )),
        }
    }
}
