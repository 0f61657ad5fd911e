//! Ranks and sites that keep others waiting for longer than recent steps explain.

use std::time::Duration;

use paramhub_core::composition::Neighbour;
use paramhub_core::exchange::Awaited;
use paramhub_core::job_control::{OverdueEvent, OverdueNeighbours};
use paramhub_core::lateness::{Lateness, OverdueChunk};

use super::Shard;

/// Slots that are looked at in one go, which takes about a tenth of a millisecond.
const SLOTS: usize = 16 << 10;

impl Shard {
    /// Looks at some of the chunks, `awake` after any fixed time, and returns what to report after the last
    /// of them.
    pub(crate) fn overdue_event(&mut self, awake: Duration) -> Option<OverdueEvent> {
        let exchange = &self.exchange;
        let lateness = self.watch.look(awake, SLOTS, |slot| exchange.awaits(slot))?;
        Some(match lateness {
            Lateness::Late(wait) => OverdueEvent::Late(self.overdue(wait, false)),
            Lateness::Expired(wait) => OverdueEvent::Late(self.overdue(wait, true)),
            Lateness::Over { waited } => OverdueEvent::Over { waited },
        })
    }

    fn overdue(
        &self,
        OverdueChunk { slot, awaited, waited }: OverdueChunk,
        has_expired: bool,
    ) -> OverdueNeighbours {
        let ports = &self.plan.ports;
        let neighbours = match awaited {
            // Rank 0, at whichever site it exchanges.
            Awaited::Parameters | Awaited::Release(_) => vec![Neighbour::Worker(0)],
            Awaited::Contribution(_) => self.exchange.late(slot).map(|member| ports.member(member)).collect(),
        };
        let key = self.key_name(self.slots[slot as usize].key);
        OverdueNeighbours { neighbours, awaited, key, waited, has_expired }
    }
}

#[cfg(test)]
mod tests {
    use paramhub_core::key::Key;
    use paramhub_core::lateness::GRACE;
    use paramhub_core::stragglers::Stragglers;

    use super::super::tests::{push_pull, shard_with};
    use super::*;

    #[test]
    fn a_rank_that_keeps_others_waiting_is_named_with_the_key() {
        let keys = vec![Key::new("a", [2]), Key::new("b", [2])];
        let mut shard = shard_with(3, keys, Stragglers::Wait, |_| {});
        for rank in 0..3 {
            push_pull(&mut shard, rank, 0, 0, &[1.0, 2.0]).unwrap();
        }
        for rank in [0, 2] {
            push_pull(&mut shard, rank, 1, 0, &[1.0, 2.0]).unwrap();
        }
        let events: Vec<_> =
            (0..20).filter_map(|tick| shard.overdue_event(Duration::from_millis(250 * tick))).collect();
        let overdue = OverdueNeighbours {
            neighbours: vec![Neighbour::Worker(1)],
            awaited: Awaited::Contribution(0),
            key: "b".into(),
            waited: GRACE,
            has_expired: false,
        };
        assert_eq!(events, [OverdueEvent::Late(overdue)]);
        push_pull(&mut shard, 1, 1, 0, &[1.0, 2.0]).unwrap();
        let waited = Duration::from_secs(5);
        assert_eq!(shard.overdue_event(waited), Some(OverdueEvent::Over { waited }));
    }
}
