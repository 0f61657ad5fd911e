//! Operations that must run at the same time: some wait for others to have begun or ended, which would never
//! happen if these waited for them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use paramhub_collective::engine::{EngineConfig, Event, Observer};
use paramhub_collective::kvstore::StoreKind;
use paramhub_kernels::{Hyperparameters, Optimizer, Step};
use paramhub_train::net::NetKind;

use super::group::{self, Before, Run, at_all, digits, local, sgd, store};

const RUN: Run = Run { kind: NetKind::Inception, batch: 64, ..group::RUN };
/// Only a failing test waits so long.
const LONG: Duration = Duration::from_secs(30);

/// The events so far: operations that have begun and ended.
#[derive(Default)]
struct Timeline {
    events: Mutex<Vec<String>>,
    happened: Condvar,
}

impl Timeline {
    fn add(&self, what: &str, operation: &Event<'_>) {
        self.events.lock().unwrap().push(format!("{what} {}", operation.name));
        self.happened.notify_all();
    }

    /// Waits until the event has happened `times` times; false if it does not.
    fn awaits(&self, event: &str, times: usize) -> bool {
        let is_missing =
            |events: &mut Vec<String>| events.iter().filter(|other| *other == event).count() < times;
        let events = self.events.lock().unwrap();
        !self.happened.wait_timeout_while(events, LONG, is_missing).unwrap().1.timed_out()
    }
}

impl Observer for Timeline {
    fn begin(&self, operation: &Event<'_>) {
        self.add("begin", operation);
    }

    fn end(&self, operation: &Event<'_>, _succeeded: bool) {
        self.add("end", operation);
    }
}

#[test]
fn gradients_travel_while_layers_below_compute_and_other_keys_are_updated() {
    let data = digits();
    // While fc.weight travels, the whole backward pass can go on; while the stem's does, the last layer is
    // updated.
    let held = [("fc.weight", "end gradient stem"), ("stem.weight", "end update fc.weight")];
    let timeline = Arc::new(Timeline::default());
    at_all(1, |native| {
        let of_others = Arc::clone(&timeline);
        let before = move |_: &_, name: &str| {
            if let Some((_, event)) = held.iter().find(|(key, _)| *key == name) {
                assert!(of_others.awaits(event, 1), "{name} waits for `{event}`");
            }
            Ok(())
        };
        let config = EngineConfig { observer: Some(Arc::clone(&timeline) as _), ..RUN.engine() };
        let store = store(StoreKind::DepCha, config, Before { inner: native, before });
        let report = RUN.through(&data, &*store, sgd(), &mut |_| {}).unwrap();
        assert!(report.hidden_fraction > 0.0, "{report:?}");
        store.leave().unwrap();
    });
}

/// Sgd that, for one key, waits until the next step's forward pass has begun.
struct Late {
    inner: Arc<dyn Optimizer>,
    timeline: Arc<Timeline>,
    elements: usize,
}

impl Optimizer for Late {
    fn state_slots(&self, hyperparameters: &Hyperparameters) -> usize {
        self.inner.state_slots(hyperparameters)
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
        // No forward pass follows the last update.
        let (next, last) = (step.number as usize + 1, 1437 / 64);
        if model.len() == self.elements && next <= last {
            assert!(self.timeline.awaits("end forward c.concatenate", next), "update {}", step.number);
        }
        self.inner.apply(step, model, sum, state);
    }
}

#[test]
fn a_forward_pass_waits_only_for_the_parameters_of_the_layers_it_has_come_to() {
    let data = digits();
    let timeline = Arc::new(Timeline::default());
    // Other threads compute while the update waits.
    let run = Run { threads: 2, ..RUN };
    let config = EngineConfig { observer: Some(Arc::clone(&timeline) as _), ..run.engine() };
    let elements = 10 * 112;
    let late = Late { inner: sgd(), timeline: Arc::clone(&timeline), elements };
    let found = run.through(&data, &*local(config), Arc::new(late), &mut |_| {}).unwrap();
    assert!(found.parameters == run.alone(&data).parameters);
    assert_eq!(found.parameters.iter().filter(|key| key.len() == elements).count(), 1);
}

/// Holds one branch until another one computes.
#[derive(Default)]
struct BranchOverlap {
    timeline: Timeline,
    held: AtomicBool,
    met: AtomicBool,
}

impl Observer for BranchOverlap {
    fn begin(&self, operation: &Event<'_>) {
        self.timeline.begin(operation);
        // This happens only once, in the middle of both.
        if operation.name == "forward a.3x3" && !self.held.swap(true, Ordering::Relaxed) {
            self.met.store(self.timeline.awaits("begin forward a.double.2", 1), Ordering::Relaxed);
        }
    }

    fn end(&self, _operation: &Event<'_>, _succeeded: bool) {}
}

#[test]
fn branches_compute_at_the_same_time() {
    let data = digits();
    let overlap = Arc::new(BranchOverlap::default());
    let run = Run { threads: 2, ..RUN };
    let config = EngineConfig { observer: Some(Arc::clone(&overlap) as _), ..run.engine() };
    run.through(&data, &*local(config), sgd(), &mut |_| {}).unwrap();
    assert!(overlap.met.load(Ordering::Relaxed), "one branch waited for another to end");
}
