//! The completion vector: which layers of an iteration are synchronised, and how long the computation waited
//! (Poseidon section 4.1).

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The completion vector: an entry a syncer, which is set when nothing of its layer is under way. It also
/// counts the time in which anything was under way, and the part of it that the computing thread spent
/// waiting.
///
/// The job has a clock of its own, but it starts when the I/O thread takes a request, which on a busy machine
/// is long after the push.
#[derive(Debug)]
pub(crate) struct CompletionVector {
    state: Mutex<CompletionState>,
    is_set: Condvar,
}

#[derive(Debug, Default)]
struct CompletionState {
    /// The number of exchanges under way of each layer.
    under_way: Vec<u32>,
    /// The number of exchanges under way of all layers.
    total: u64,
    /// The time at which the first of `total` left; `None` while nothing is under way.
    since: Option<Instant>,
    /// The time at which the last of `total` ended.
    ended: Option<Instant>,
    in_flight: Duration,
    waits_since: Option<Instant>,
    exposed: Duration,
}

impl CompletionVector {
    pub(crate) fn new(layers: usize) -> Self {
        let state = CompletionState { under_way: vec![0; layers], ..CompletionState::default() };
        CompletionVector { state: Mutex::new(state), is_set: Condvar::new() }
    }

    /// Notes that an exchange of a layer begins.
    pub(crate) fn begin(&self, layer: usize) {
        let mut state = self.state();
        state.under_way[layer] += 1;
        state.total += 1;
        state.since.get_or_insert_with(Instant::now);
    }

    /// Notes that the answer has come, or will not.
    pub(crate) fn end(&self, layer: usize) {
        let mut state = self.state();
        state.under_way[layer] -= 1;
        state.total -= 1;
        if state.under_way[layer] == 0 {
            self.is_set.notify_all();
        }
        if state.total == 0 {
            let since = state.since.take().expect("set by the first of them");
            let now = Instant::now();
            state.in_flight += now - since;
            state.ended = Some(now);
        }
    }

    /// Returns whether a layer's entry is set.
    pub(crate) fn is_complete(&self, layer: usize) -> bool {
        self.state().under_way[layer] == 0
    }

    /// Waits until a layer's entry is set. A handle may end a moment before its entry is set.
    pub(crate) fn wait(&self, layer: usize) {
        let state = self.state();
        let set = self.is_set.wait_while(state, |state| state.under_way[layer] > 0);
        drop(set.unwrap_or_else(PoisonError::into_inner));
    }

    /// Runs `wait`, and counts the time until it returns or nothing is under way any more: the time after the
    /// last arrival, in which the caller waits for a processor, is no part of the exchange.
    pub(crate) fn waiting<R>(&self, wait: impl FnOnce() -> R) -> R {
        {
            let mut state = self.state();
            state.waits_since = state.since.map(|_| Instant::now());
        }
        let result = wait();
        let mut state = self.state();
        if let Some(waits_since) = state.waits_since.take() {
            let until = if state.since.is_some() { Some(Instant::now()) } else { state.ended };
            state.exposed +=
                until.map_or(Duration::ZERO, |until| until.saturating_duration_since(waits_since));
        }
        result
    }

    /// The time in which anything was under way, and the part of it that the caller waited.
    pub(crate) fn times(&self) -> (Duration, Duration) {
        let state = self.state();
        (state.in_flight + state.since.map_or(Duration::ZERO, |since| since.elapsed()), state.exposed)
    }

    fn state(&self) -> MutexGuard<'_, CompletionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;

    use super::*;

    const PAUSE: Duration = Duration::from_millis(30);

    #[test]
    fn an_entry_is_set_while_nothing_of_its_layer_is_under_way() {
        let completion = CompletionVector::new(3);
        completion.begin(1);
        completion.begin(1);
        completion.begin(2);
        completion.end(1);
        assert_eq!([0, 1, 2].map(|layer| completion.is_complete(layer)), [true, false, false]);
        completion.end(1);
        assert_eq!([0, 1, 2].map(|layer| completion.is_complete(layer)), [true, true, false]);
    }

    #[test]
    fn time_while_the_trainer_computes_is_hidden_and_time_while_it_waits_is_exposed() {
        let completion = CompletionVector::new(2);
        completion.waiting(|| sleep(PAUSE));
        assert_eq!(completion.times(), (Duration::ZERO, Duration::ZERO), "nothing was under way");
        completion.begin(0);
        completion.begin(1);
        // The time in which the caller computes.
        sleep(PAUSE);
        completion.end(0);
        let in_flight = completion.waiting(|| {
            sleep(PAUSE);
            completion.end(1);
            let (in_flight, _) = completion.times();
            // The answer has come, but the waiter gets no processor.
            sleep(PAUSE);
            in_flight
        });
        let (still, exposed) = completion.times();
        assert_eq!(still, in_flight, "nothing is under way any more");
        assert!(
            exposed >= PAUSE && in_flight >= exposed + PAUSE,
            "{in_flight:?} in flight, {exposed:?} exposed"
        );
    }
}
