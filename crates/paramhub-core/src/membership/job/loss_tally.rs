//! How many workers a job has lost, how many have taken their ranks, and for how long ranks were lost.

use crate::membership::Now;
use crate::service::LossCounters;

/// The losses of a job so far.
#[derive(Debug, Default)]
pub(super) struct LossTally {
    /// What is over.
    counted: LossCounters,
    /// Since when at least one rank has been lost, if one is.
    incomplete_since: Option<Now>,
}

impl LossTally {
    /// Goes on from what an earlier manager had counted.
    pub(super) fn restored(counted: LossCounters) -> LossTally {
        LossTally { counted, incomplete_since: None }
    }

    /// A worker is lost.
    pub(super) fn lost(&mut self) {
        self.counted.workers_lost += 1;
    }

    /// Another process has taken a lost rank.
    pub(super) fn joined(&mut self) {
        self.counted.workers_joined += 1;
    }

    /// From now on at least one rank is lost, or none is.
    pub(super) fn note(&mut self, is_incomplete: bool, now: Now) {
        match (self.incomplete_since, is_incomplete) {
            (None, true) => self.incomplete_since = Some(now),
            (Some(since), false) => {
                self.counted.incomplete_seconds += now.seconds_since(since);
                self.incomplete_since = None;
            }
            (None, false) | (Some(_), true) => {}
        }
    }

    /// The counters at this time.
    pub(super) fn counters(&self, now: Now) -> LossCounters {
        let open = self.incomplete_since.map_or(0.0, |since| now.seconds_since(since));
        LossCounters { incomplete_seconds: self.counted.incomplete_seconds + open, ..self.counted }
    }
}
