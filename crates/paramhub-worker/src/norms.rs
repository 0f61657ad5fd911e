//! The gradient norms, as user threads see them.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use paramhub_core::norms::GradientNorm;

/// The newest norms, the waits for more, and the step that was released.
#[derive(Debug, Default)]
pub(crate) struct NormHistory {
    state: Mutex<NormState>,
}

#[derive(Debug, Default)]
struct NormState {
    /// The newest norms, oldest first.
    kept: VecDeque<GradientNorm>,
    waits: usize,
    /// The last step that the program released.
    released: Option<u32>,
    /// The version of rank 0's initial parameters.
    start: Option<u32>,
}

/// What is known of a step's norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum NormStatus {
    Known(f64),
    /// The norm is still to come.
    Pending,
    /// The norm is no longer kept.
    Forgotten,
}

impl NormHistory {
    /// The number of norms kept.
    pub(crate) const KEPT_MAX: usize = 16;
    /// The maximum of waits at one time.
    pub(crate) const WAITS_MAX: usize = 1024;

    /// Keeps the norm of the newest step.
    pub(crate) fn keep(&self, norm: GradientNorm) {
        let mut state = self.state();
        if state.kept.len() == Self::KEPT_MAX {
            state.kept.pop_front();
        }
        state.kept.push_back(norm);
    }

    /// The newest norm.
    pub(crate) fn last(&self) -> Option<GradientNorm> {
        self.state().kept.back().copied()
    }

    /// Looks up a step's norm.
    pub(crate) fn known(&self, step: u32) -> NormStatus {
        let state = self.state();
        match (state.kept.iter().find(|kept| kept.step == step), state.kept.front()) {
            (Some(kept), _) => NormStatus::Known(kept.norm),
            (None, Some(oldest)) if step < oldest.step => NormStatus::Forgotten,
            _ => NormStatus::Pending,
        }
    }

    /// Counts one more wait; `false` if there are too many.
    pub(crate) fn begin_wait(&self) -> bool {
        let mut state = self.state();
        let has_room = state.waits < Self::WAITS_MAX;
        state.waits += usize::from(has_room);
        has_room
    }

    /// Counts one wait less.
    pub(crate) fn end_wait(&self) {
        self.state().waits -= 1;
    }

    /// Notes that the program releases a step; `false` unless its norm is the newest and the step was not
    /// released before.
    pub(crate) fn release(&self, step: u32) -> bool {
        let mut state = self.state();
        let is_due = state.kept.back().is_some_and(|kept| kept.step == step) && state.released != Some(step);
        if is_due {
            state.released = Some(step);
        }
        is_due
    }

    /// Notes that the initial parameters have `version`; fails with the version of an earlier call if it
    /// differs.
    pub(crate) fn start(&self, version: u32) -> Result<(), u32> {
        let start = *self.state().start.get_or_insert(version);
        if start == version { Ok(()) } else { Err(start) }
    }

    fn state(&self) -> MutexGuard<'_, NormState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_norms_are_kept_and_the_newest_step_is_released_once() {
        let norms = NormHistory::default();
        assert_eq!((norms.last(), norms.known(0), norms.release(0)), (None, NormStatus::Pending, false));
        for step in 5..40 {
            norms.keep(GradientNorm { step, norm: f64::from(step) });
            assert!(!norms.release(step - 1), "too late");
            assert!(norms.release(step));
            assert!(!norms.release(step), "twice");
        }
        assert_eq!(norms.last().unwrap().norm, 39.0);
        let known = [23, 24, 39, 40].map(|step| norms.known(step));
        assert_eq!(
            known,
            [NormStatus::Forgotten, NormStatus::Known(24.0), NormStatus::Known(39.0), NormStatus::Pending]
        );
    }

    #[test]
    fn waits_are_counted_and_the_first_version_holds() {
        let norms = NormHistory::default();
        assert!((0..NormHistory::WAITS_MAX).all(|_| norms.begin_wait()));
        assert!(!norms.begin_wait());
        norms.end_wait();
        assert!(norms.begin_wait());
        assert_eq!([norms.start(7), norms.start(8), norms.start(7)], [Ok(()), Err(7), Ok(())]);
    }
}
