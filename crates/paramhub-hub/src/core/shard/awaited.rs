//! Whom others wait for, for longer than recent steps explain.

use std::time::Duration;

use paramhub_core::exchange::Awaited;
use paramhub_core::lateness::{Lateness, Wait};

use super::Shard;
use crate::core::ports::Neighbour;

/// Slots that are looked at in one go. It takes about a tenth of a millisecond.
const SLOTS: usize = 16 << 10;

/// What is to be told of those whom others wait for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AwaitedNews {
    Late(Absence),
    /// It has come.
    Over {
        waited: Duration,
    },
}

/// Others wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Absence {
    /// For these, in order.
    pub(crate) who: Vec<Neighbour>,
    /// And this of them.
    pub(crate) awaited: Awaited,
    /// The key that has waited longest.
    pub(crate) key: String,
    pub(crate) waited: Duration,
    /// For as long as the job lets them.
    pub(crate) has_expired: bool,
}

impl Shard {
    /// Looks at some of the chunks, `awake` after any fixed time, and says what is to be told of all of them.
    pub(crate) fn news_of_awaited(&mut self, awake: Duration) -> Option<AwaitedNews> {
        let exchange = &self.exchange;
        let news = self.watch.look(awake, SLOTS, |slot| exchange.awaits(slot))?;
        Some(match news {
            Lateness::Late(wait) => AwaitedNews::Late(self.absence(wait, false)),
            Lateness::Expired(wait) => AwaitedNews::Late(self.absence(wait, true)),
            Lateness::Over { waited } => AwaitedNews::Over { waited },
        })
    }

    fn absence(&self, Wait { slot, awaited, waited }: Wait, has_expired: bool) -> Absence {
        let ports = &self.plan.ports;
        let who = match awaited {
            // Wherever it exchanges.
            Awaited::Parameters | Awaited::Release(_) => vec![Neighbour::Worker(0)],
            Awaited::Contribution(_) => self.exchange.late(slot).map(|member| ports.member(member)).collect(),
        };
        let key = self.key_name(self.slots[slot as usize].key);
        Absence { who, awaited, key, waited, has_expired }
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
    fn who_keeps_the_others_waiting_is_named_with_the_key() {
        let keys = vec![Key::new("a", [2]), Key::new("b", [2])];
        let mut shard = shard_with(3, keys, Stragglers::Wait, |_| {});
        for rank in 0..3 {
            push_pull(&mut shard, rank, 0, 0, &[1.0, 2.0]).unwrap();
        }
        for rank in [0, 2] {
            push_pull(&mut shard, rank, 1, 0, &[1.0, 2.0]).unwrap();
        }
        let news: Vec<_> =
            (0..20).filter_map(|tick| shard.news_of_awaited(Duration::from_millis(250 * tick))).collect();
        let absence = Absence {
            who: vec![Neighbour::Worker(1)],
            awaited: Awaited::Contribution(0),
            key: "b".into(),
            waited: GRACE,
            has_expired: false,
        };
        assert_eq!(news, [AwaitedNews::Late(absence)]);
        push_pull(&mut shard, 1, 1, 0, &[1.0, 2.0]).unwrap();
        let waited = Duration::from_secs(5);
        assert_eq!(shard.news_of_awaited(waited), Some(AwaitedNews::Over { waited }));
    }
}
