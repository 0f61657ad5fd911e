//! The changes of hyperparameters that were sent, to be repeated on streams that replace others.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::hyperparameters::Schedule;

/// The changes of every group, by the first step they hold for. A hub does not answer a Retune, so the worker
/// does not know which ones a broken stream lost; sending a change twice changes nothing. A hub remembers as
/// many.
#[derive(Debug, Default)]
pub struct Retunes {
    sent: BTreeMap<u16, BTreeMap<u32, Arc<[u8]>>>,
}

impl Retunes {
    /// Remembers a change that every stream sends; a later change for the same step replaces it.
    pub fn record(&mut self, group: u16, first_step: u32, wire: Arc<[u8]>) {
        let of_group = self.sent.entry(group).or_default();
        of_group.insert(first_step, wire);
        if of_group.len() > Schedule::CHANGES_MAX {
            of_group.pop_first();
        }
    }

    /// All changes that are remembered.
    pub fn iter(&self) -> impl Iterator<Item = (u16, u32, &Arc<[u8]>)> {
        self.sent
            .iter()
            .flat_map(|(&group, changes)| changes.iter().map(move |(&first, wire)| (group, first, wire)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_change_for_a_step_counts_and_the_oldest_steps_make_room() {
        let mut retunes = Retunes::default();
        let wire = |byte: u8| -> Arc<[u8]> { vec![byte].into() };
        retunes.record(3, 10, wire(1));
        retunes.record(0, 7, wire(2));
        retunes.record(3, 10, wire(3));
        let all: Vec<_> = retunes.iter().map(|(group, first, wire)| (group, first, wire[0])).collect();
        assert_eq!(all, [(0, 7, 2), (3, 10, 3)]);
        for step in 100..100 + Schedule::CHANGES_MAX as u32 {
            retunes.record(3, step, wire(4));
        }
        let of_group = retunes.iter().filter(|&(group, ..)| group == 3);
        assert_eq!(of_group.map(|(_, first, _)| first).min(), Some(100));
    }
}
