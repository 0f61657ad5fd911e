//! What user threads know of the gradient's norms.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use paramhub_core::norms::GradientNorm;

/// The newest norms, who waits for more, and what was released.
#[derive(Debug, Default)]
pub(crate) struct NormBook {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Oldest first.
    kept: VecDeque<GradientNorm>,
    waits: usize,
    /// The last step released by hand.
    released: Option<u32>,
    /// The version that rank 0's parameters start from.
    start: Option<u32>,
}

/// What there is to say about a step's norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Known {
    Yes(f64),
    /// It is still to come.
    NotYet,
    /// It was forgotten.
    NoMore,
}

impl NormBook {
    /// Norms remembered.
    pub(crate) const KEPT_MAX: usize = 16;
    /// Waits at one time.
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

    /// What is known of a step's norm.
    pub(crate) fn known(&self, step: u32) -> Known {
        let state = self.state();
        match (state.kept.iter().find(|kept| kept.step == step), state.kept.front()) {
            (Some(kept), _) => Known::Yes(kept.norm),
            (None, Some(oldest)) if step < oldest.step => Known::NoMore,
            _ => Known::NotYet,
        }
    }

    /// One more waits; `false` if too many do.
    pub(crate) fn begin_wait(&self) -> bool {
        let mut state = self.state();
        let has_room = state.waits < Self::WAITS_MAX;
        state.waits += usize::from(has_room);
        has_room
    }

    /// One waits no more.
    pub(crate) fn end_wait(&self) {
        self.state().waits -= 1;
    }

    /// Notes that a step is released by hand; `false` unless its norm is the newest and it was not before.
    pub(crate) fn release(&self, step: u32) -> bool {
        let mut state = self.state();
        let is_due = state.kept.back().is_some_and(|kept| kept.step == step) && state.released != Some(step);
        if is_due {
            state.released = Some(step);
        }
        is_due
    }

    /// Notes that parameters start from `version`, or says which one others started from.
    pub(crate) fn start(&self, version: u32) -> Result<(), u32> {
        let start = *self.state().start.get_or_insert(version);
        if start == version { Ok(()) } else { Err(start) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_norms_are_kept_and_the_newest_step_is_released_once() {
        let book = NormBook::default();
        assert_eq!((book.last(), book.known(0), book.release(0)), (None, Known::NotYet, false));
        for step in 5..40 {
            book.keep(GradientNorm { step, norm: f64::from(step) });
            assert!(!book.release(step - 1), "too late");
            assert!(book.release(step));
            assert!(!book.release(step), "twice");
        }
        assert_eq!(book.last().unwrap().norm, 39.0);
        let known = [23, 24, 39, 40].map(|step| book.known(step));
        assert_eq!(known, [Known::NoMore, Known::Yes(24.0), Known::Yes(39.0), Known::NotYet]);
    }

    #[test]
    fn waits_are_counted_and_the_first_version_holds() {
        let book = NormBook::default();
        assert!((0..NormBook::WAITS_MAX).all(|_| book.begin_wait()));
        assert!(!book.begin_wait());
        book.end_wait();
        assert!(book.begin_wait());
        assert_eq!([book.start(7), book.start(8), book.start(7)], [Ok(()), Err(7), Ok(())]);
    }
}
