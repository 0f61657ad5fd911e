//! What is to happen, in virtual time.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

/// Events in the order of their times; those of one time in the order in which they were added.
#[derive(Debug)]
pub(crate) struct Agenda<Event> {
    now: Duration,
    added: u64,
    events: BTreeMap<Reverse<(Duration, u64)>, Event>,
}

impl<Event> Default for Agenda<Event> {
    fn default() -> Self {
        Agenda { now: Duration::ZERO, added: 0, events: BTreeMap::new() }
    }
}

impl<Event> Agenda<Event> {
    /// The time of the event that was taken last, since the beginning.
    pub(crate) fn now(&self) -> Duration {
        self.now
    }

    /// Adds an event at a time, which is now if it has passed.
    pub(crate) fn add(&mut self, at: Duration, event: Event) {
        self.added += 1;
        self.events.insert(Reverse((at.max(self.now), self.added)), event);
    }

    /// Forgets the events that are not to be kept.
    pub(crate) fn retain(&mut self, is_kept: impl Fn(&Event) -> bool) {
        self.events.retain(|_, event| is_kept(event));
    }

    /// Takes the next event; its time is now from then on.
    pub(crate) fn take(&mut self) -> Option<Event> {
        let (Reverse((at, _)), event) = self.events.pop_last()?;
        self.now = at;
        Some(event)
    }
}
