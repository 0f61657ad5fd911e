//! Which step each key is at, and whether it is busy: what user threads must know without asking the I/O thread.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use paramhub_core::requests::Request;

/// One book a key. A key is claimed by the thread that asks for it and released by the I/O thread when it is answered;
/// whoever holds the claim alone touches the key's step.
#[derive(Debug)]
pub(crate) struct Steps {
    keys: Vec<Book>,
}

#[derive(Debug, Default)]
struct Book {
    /// 0, or one more than the position of the request under way in [`REQUESTS`].
    busy: AtomicU8,
    /// The step the next push contributes to, and the version a pull asks for.
    next: AtomicU32,
}

const REQUESTS: [Request; 7] = [
    Request::Push,
    Request::Pull,
    Request::PushPull,
    Request::Initialise,
    Request::PullState,
    Request::InitialiseState,
    Request::Factors,
];

/// A claimed key: the step to ask for, and what to restore should the request not get on its way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    pub(crate) step: u32,
    before: u32,
}

impl Steps {
    pub(crate) fn new(keys: usize) -> Self {
        Steps { keys: std::iter::repeat_with(Book::default).take(keys).collect() }
    }

    /// Claims a key for a request, or says which one holds it. `number` is the version an initialisation starts from, or the
    /// slot of the optimizer's state.
    pub(crate) fn claim(&self, key: u32, request: Request, number: u32) -> Result<Claim, Request> {
        let book = &self.keys[key as usize];
        let mark = 1 + REQUESTS.iter().position(|&other| other == request).expect("all are listed") as u8;
        if let Err(busy) = book.busy.compare_exchange(0, mark, Ordering::Acquire, Ordering::Relaxed) {
            return Err(REQUESTS[usize::from(busy) - 1]);
        }
        let before = book.next.load(Ordering::Relaxed);
        let (step, next) = match request {
            Request::Push | Request::PushPull | Request::Factors => (before, before.wrapping_add(1)),
            Request::Pull => (before, before),
            Request::Initialise => (number, number),
            Request::PullState | Request::InitialiseState => (number, before),
        };
        book.next.store(next, Ordering::Relaxed);
        Ok(Claim { step, before })
    }

    /// Undoes a claim whose request did not get on its way.
    pub(crate) fn undo(&self, key: u32, claim: Claim) {
        self.keys[key as usize].next.store(claim.before, Ordering::Relaxed);
        self.release(key);
    }

    /// A request was answered with this version: the hub counts this worker's steps from there. Before [`Steps::release`].
    pub(crate) fn adopt(&self, key: u32, version: u32) {
        self.keys[key as usize].next.store(version, Ordering::Relaxed);
    }

    /// The key may be claimed again.
    pub(crate) fn release(&self, key: u32) {
        self.keys[key as usize].busy.store(0, Ordering::Release);
    }

    /// The step the key's next push contributes to.
    pub(crate) fn next(&self, key: u32) -> u32 {
        self.keys[key as usize].next.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pushes_count_up_and_a_failed_claim_counts_nothing() {
        let steps = Steps::new(1);
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
