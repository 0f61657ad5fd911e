//! The step of each key, and whether the key is busy: user threads must know this without asking the I/O
//! thread.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use paramhub_core::requests::Request;

/// The step of every key. The thread that makes a request claims the key, and the I/O thread releases it when
/// the request ends; only the holder of the claim touches the key's step.
#[derive(Debug)]
pub(crate) struct KeySteps {
    keys: Vec<KeyStep>,
}

#[derive(Debug, Default)]
struct KeyStep {
    /// 0 while the key is free, else the [`mark`] of the request under way.
    busy: AtomicU8,
    /// The step that the next push contributes to, and the version that a pull asks for.
    next: AtomicU32,
}

/// The requests in the order of their declaration.
const REQUESTS: [Request; 7] = [
    Request::Push,
    Request::Pull,
    Request::PushPull,
    Request::Initialise,
    Request::PullState,
    Request::InitialiseState,
    Request::Factors,
];

/// One more than the position of a request in [`REQUESTS`].
const fn mark(request: Request) -> u8 {
    request as u8 + 1
}

/// A claimed key: the step to ask for, and the step to restore if the request cannot be submitted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyClaim {
    pub(crate) step: u32,
    before: u32,
}

impl KeySteps {
    pub(crate) fn new(keys: usize) -> Self {
        KeySteps { keys: std::iter::repeat_with(KeyStep::default).take(keys).collect() }
    }

    /// Claims a key for a request, or returns the request that holds it. `number` is the version that an
    /// initialisation starts from, or the slot of the optimizer's state.
    pub(crate) fn claim(&self, key: u32, request: Request, number: u32) -> Result<KeyClaim, Request> {
        let key_step = &self.keys[key as usize];
        let claimed = key_step.busy.compare_exchange(0, mark(request), Ordering::Acquire, Ordering::Relaxed);
        if let Err(busy) = claimed {
            return Err(REQUESTS[usize::from(busy) - 1]);
        }
        let before = key_step.next.load(Ordering::Relaxed);
        let (step, next) = match request {
            Request::Push | Request::PushPull | Request::Factors => (before, before.wrapping_add(1)),
            Request::Pull => (before, before),
            Request::Initialise => (number, number),
            Request::PullState | Request::InitialiseState => (number, before),
        };
        key_step.next.store(next, Ordering::Relaxed);
        Ok(KeyClaim { step, before })
    }

    /// Undoes a claim whose request could not be submitted.
    pub(crate) fn undo(&self, key: u32, claim: KeyClaim) {
        self.keys[key as usize].next.store(claim.before, Ordering::Relaxed);
        self.release(key);
    }

    /// Sets the key's step to the version of an answer: the hub counts this worker's steps from there. Called
    /// before [`KeySteps::release`].
    pub(crate) fn adopt(&self, key: u32, version: u32) {
        self.keys[key as usize].next.store(version, Ordering::Relaxed);
    }

    /// Lets the key be claimed again.
    pub(crate) fn release(&self, key: u32) {
        self.keys[key as usize].busy.store(0, Ordering::Release);
    }

    /// The step that the key's next push contributes to.
    pub(crate) fn next(&self, key: u32) -> u32 {
        self.keys[key as usize].next.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_key_names_the_request_that_holds_it() {
        let steps = KeySteps::new(1);
        for request in REQUESTS {
            steps.claim(0, request, 0).unwrap();
            assert_eq!(steps.claim(0, Request::Pull, 0).unwrap_err(), request);
            steps.release(0);
        }
    }

    #[test]
    fn pushes_count_up_and_a_failed_claim_counts_nothing() {
        let steps = KeySteps::new(1);
        assert_eq!(steps.claim(0, Request::PushPull, 0).unwrap().step, 0);
        assert_eq!(steps.claim(0, Request::Pull, 0).unwrap_err(), Request::PushPull);
        steps.release(0);
        let claim = steps.claim(0, Request::Push, 0).unwrap();
        assert_eq!(claim.step, 1);
        steps.undo(0, claim);
        assert_eq!(steps.claim(0, Request::Pull, 0).unwrap().step, 1);
        steps.release(0);
        assert_eq!(steps.claim(0, Request::Initialise, 70).unwrap().step, 70);
        steps.release(0);
        assert_eq!(steps.next(0), 70);
        assert_eq!(steps.claim(0, Request::PullState, 1).unwrap().step, 1, "the slot asked for");
        steps.release(0);
        assert_eq!(steps.next(0), 70);
    }
}
