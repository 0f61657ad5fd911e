//! Why a job has ended, where several tell of it: the first cause, wherever it was seen.
//!
//! A worker that is killed, a hub that shuts down, a link that is cut: each is seen by many, at hubs, at launchers and here, and
//! each of those who had to end because of it tells so, too. Reports arrive in any order. What is known of a cause is how its
//! reporter knows it ([`CauseKind`]), when it began, and to which rank it happened; that decides which of two lies nearer to the
//! root. It needs no clock and no sockets.

use paramhub_core::service::CauseKind;

use crate::clock::Now;

/// How much later than its consequences a cause may be noticed that its reporter knows for certain: hubs look at their interfaces
/// every few seconds, and a launcher's death is noticed by a process beside it.
const NOTICED_LATE_S: f64 = 5.0;
/// The same of hubs that the manager has lost, which it last heard some time before they were.
const HEARD_LATE_S: f64 = 1.0;

/// One report of why a job has ended.
#[derive(Clone, Debug)]
pub(crate) struct Cause {
    pub(crate) kind: CauseKind,
    /// To which it happened, or which said so.
    pub(crate) rank: Option<u32>,
    pub(crate) began: Now,
    pub(crate) message: String,
}

impl Cause {
    /// What is known for certain and begins now.
    pub(crate) fn known(message: String, now: Now) -> Cause {
        Cause { kind: CauseKind::Known, rank: None, began: now, message }
    }

    /// Whether the other one is likely a consequence of this one. Of two that could be either, the one recorded first stays.
    pub(crate) fn explains(&self, other: &Cause) -> bool {
        if self.kind >= other.kind {
            return false;
        }
        // What a rank has said itself tells more than that it was lost.
        if self.kind == CauseKind::PeerLost && self.rank.is_some() && self.rank == other.rank {
            return false;
        }
        let may_be_late_s = match (self.kind, other.kind) {
            // A launcher sees its workers' ends only, and those soon.
            (_, CauseKind::Hearsay) | (CauseKind::Known, _) => NOTICED_LATE_S,
            (CauseKind::HubLost, _) => HEARD_LATE_S,
            // Ranks that are told of a failure end, too, a little later.
            _ => 0.0,
        };
        self.began.seconds_since(other.began) <= may_be_late_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use CauseKind::{GaveUp, Hearsay, HubLost, Known, PeerLost};
    use std::time::Duration;

    /// So many seconds after `start`, or before it where they are negative.
    fn cause(start: Now, kind: CauseKind, rank: Option<u32>, at_s: f64) -> Cause {
        let distance = Duration::from_secs_f64(at_s.abs());
        let instant = if at_s < 0.0 { start.instant - distance } else { start.instant + distance };
        let began = Now { instant, ..start };
        Cause { kind, rank, began, message: format!("{kind:?} {rank:?} at {at_s}") }
    }

    /// What is recorded of reports that arrive in this order.
    fn recorded<'a>(reports: impl IntoIterator<Item = &'a Cause>) -> &'a str {
        let mut reports = reports.into_iter();
        let first = reports.next().unwrap();
        &reports.fold(first, |held, next| if next.explains(held) { next } else { held }).message
    }

    /// The first of these causes is recorded, in whichever order they are reported.
    fn is_the_root_in_every_order(story: &[Cause]) {
        let mut order: Vec<usize> = (0..story.len()).collect();
        // Heap's algorithm.
        fn permute(order: &mut Vec<usize>, fixed: usize, look: &mut dyn FnMut(&[usize])) {
            if fixed == order.len() {
                return look(order);
            }
            for next in fixed..order.len() {
                order.swap(fixed, next);
                permute(order, fixed + 1, look);
                order.swap(fixed, next);
            }
        }
        permute(&mut order, 0, &mut |order| {
            let told = recorded(order.iter().map(|&index| &story[index]));
            assert_eq!(told, story[0].message, "reported in the order {order:?} of {story:?}");
        });
    }

    #[test]
    fn a_hub_that_shuts_down_is_the_cause_and_not_the_ranks_that_left_another_hub_over_it() {
        let start = Now::read();
        is_the_root_in_every_order(&[
            cause(start, Known, None, 0.0),
            cause(start, GaveUp, Some(0), 0.01),
            cause(start, PeerLost, Some(1), 0.02),
            cause(start, Hearsay, None, 0.3),
        ]);
    }

    #[test]
    fn a_killed_hub_is_the_cause_although_the_manager_notices_last() {
        let start = Now::read();
        is_the_root_in_every_order(&[
            cause(start, HubLost, None, -0.4),
            cause(start, GaveUp, Some(0), 1.0),
            cause(start, PeerLost, Some(1), 1.01),
            cause(start, Hearsay, None, 1.3),
        ]);
    }

    #[test]
    fn a_killed_rank_is_the_cause_and_not_the_launchers_of_those_it_took_along() {
        let start = Now::read();
        is_the_root_in_every_order(&[
            cause(start, PeerLost, Some(2), 0.0),
            cause(start, Hearsay, None, 0.2),
            cause(start, Hearsay, None, 0.2),
        ]);
    }

    #[test]
    fn a_killed_launcher_is_the_cause_although_its_workers_ended_before_that_was_noticed() {
        let start = Now::read();
        is_the_root_in_every_order(&[
            cause(start, Known, None, 0.5),
            cause(start, PeerLost, Some(3), 0.1),
            cause(start, GaveUp, Some(1), 0.2),
        ]);
    }

    #[test]
    fn an_interface_that_was_down_is_the_cause_when_its_hub_can_speak_again() {
        let start = Now::read();
        // The hub is lost here first, as it could not be heard; what it tells later happened before that.
        is_the_root_in_every_order(&[
            cause(start, Known, None, 3.0),
            cause(start, HubLost, None, 0.5),
            cause(start, Hearsay, None, 5.0),
        ]);
    }

    #[test]
    fn what_happens_later_explains_nothing_before_it() {
        let start = Now::read();
        let lost = cause(start, PeerLost, Some(1), 0.0);
        assert_eq!(recorded([&lost, &cause(start, HubLost, None, 8.0)]), lost.message);
        assert_eq!(recorded([&lost, &cause(start, Known, None, 60.0)]), lost.message);
        let gave_up = cause(start, GaveUp, Some(0), 0.0);
        assert_eq!(recorded([&gave_up, &cause(start, PeerLost, Some(1), 0.01)]), gave_up.message);
    }

    #[test]
    fn what_a_rank_says_of_itself_is_not_replaced_by_its_loss() {
        let start = Now::read();
        let said = cause(start, GaveUp, Some(0), 0.0);
        let lost = cause(start, PeerLost, Some(0), -30.0);
        assert_eq!(recorded([&said, &lost]), said.message);
        let other = cause(start, PeerLost, Some(1), -30.0);
        assert_eq!(
            recorded([&said, &other]),
            other.message,
            "but by another's, which it may have waited for"
        );
    }

    #[test]
    fn of_two_that_are_known_alike_the_first_that_is_told_stays() {
        let start = Now::read();
        for kind in [Known, HubLost, PeerLost, GaveUp, Hearsay] {
            let (first, second) = (cause(start, kind, Some(0), 1.0), cause(start, kind, Some(1), 0.0));
            assert_eq!(recorded([&first, &second]), first.message);
        }
    }
}
