//! This compares two causes of a job's end and finds which is nearer to the root. So a job keeps the first
//! cause if several are reported, wherever it was observed.
//!
//! A worker that is killed, a hub that shuts down, a link that is cut: many observe it, at hubs, at launchers
//! and here, and each process that ends because of it sends a report, too. Reports arrive in any order. A
//! cause is known by how its reporter knows it ([`CauseKind`]), when it began, and to which rank it happened.
//! That decides which of two causes is nearer to the root. The rules need no clock and no sockets.

use crate::service::CauseKind;

use crate::membership::Now;

/// The time by which a cause of kind `Known` may begin later than its consequences, because it begins when it
/// is noticed: a hub reports an interface once it has been down for some seconds, and a launcher's death is
/// noticed by its supervisor.
const NOTICED_LATE_S: f64 = 5.0;
/// The same for a cause of kind `HubLost`. It begins with the hub's last call, mostly before its
/// consequences, so that little is enough: the second after which a hub calls again.
const HUB_LOSS_DELAY_S: f64 = 1.0;

/// One report of why a job has ended.
#[derive(Clone, Debug)]
pub(crate) struct Cause {
    pub(crate) kind: CauseKind,
    /// The rank to which it happened, or which reported it.
    pub(crate) rank: Option<u32>,
    /// The moment at which it began, on the manager's clock. A `HubLost` begins with the hub's last call, and
    /// what a hub reports begins when the job ends at that hub. Any other cause begins when the manager
    /// notices it or receives the report.
    pub(crate) began: Now,
    pub(crate) message: String,
}

impl Cause {
    /// A cause of kind `Known` that begins now.
    pub(crate) fn known(message: String, now: Now) -> Cause {
        Cause { kind: CauseKind::Known, rank: None, began: now, message }
    }

    /// Returns whether `other` is likely a consequence of this cause. If either could be the consequence, the
    /// cause recorded first stays.
    pub(crate) fn explains(&self, other: &Cause) -> bool {
        // A smaller kind is nearer to the root.
        if self.kind >= other.kind {
            return false;
        }
        // A rank's own report tells more than the report that the rank was lost.
        if self.kind == CauseKind::PeerLost && self.rank.is_some() && self.rank == other.rank {
            return false;
        }
        let may_be_late_s = match (self.kind, other.kind) {
            // Hearsay comes from a launcher whose workers have ended, or from a hub that was told to end the
            // job. It soon follows the end, and so may come before the cause is noticed.
            (_, CauseKind::Hearsay) | (CauseKind::Known, _) => NOTICED_LATE_S,
            (CauseKind::HubLost, _) => HUB_LOSS_DELAY_S,
            // Ranks that are notified of a failure end a little later than what failed.
            _ => 0.0,
        };
        self.began.seconds_since(other.began) <= may_be_late_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership::time::at;
    use CauseKind::{GaveUp, Hearsay, HubLost, Known, PeerLost};
    use std::time::Duration;

    /// A cause that began `at_s` seconds after `start`, or before it if negative.
    fn cause(start: Now, kind: CauseKind, rank: Option<u32>, at_s: f64) -> Cause {
        let distance = Duration::from_secs_f64(at_s.abs());
        let monotonic = if at_s < 0.0 { start.monotonic - distance } else { start.monotonic + distance };
        let began = Now { monotonic, ..start };
        Cause { kind, rank, began, message: format!("{kind:?} {rank:?} at {at_s}") }
    }

    /// The message that is recorded if the reports arrive in this order.
    fn recorded<'a>(reports: impl IntoIterator<Item = &'a Cause>) -> &'a str {
        let mut reports = reports.into_iter();
        let first = reports.next().unwrap();
        &reports.fold(first, |held, next| if next.explains(held) { next } else { held }).message
    }

    /// Checks that the first of these causes is recorded, in whichever order they are reported.
    fn is_the_root_in_every_order(causes: &[Cause]) {
        let mut order: Vec<usize> = (0..causes.len()).collect();
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
            let message = recorded(order.iter().map(|&index| &causes[index]));
            assert_eq!(message, causes[0].message, "reported in the order {order:?} of {causes:?}");
        });
    }

    #[test]
    fn a_hub_that_shuts_down_is_the_cause_and_not_the_ranks_that_left_another_hub_over_it() {
        let start = at(0.0);
        is_the_root_in_every_order(&[
            cause(start, Known, None, 0.0),
            cause(start, GaveUp, Some(0), 0.01),
            cause(start, PeerLost, Some(1), 0.02),
            cause(start, Hearsay, None, 0.3),
        ]);
    }

    #[test]
    fn a_killed_hub_is_the_cause_although_the_manager_notices_last() {
        let start = at(0.0);
        is_the_root_in_every_order(&[
            cause(start, HubLost, None, -0.4),
            cause(start, GaveUp, Some(0), 1.0),
            cause(start, PeerLost, Some(1), 1.01),
            cause(start, Hearsay, None, 1.3),
        ]);
    }

    #[test]
    fn a_killed_rank_is_the_cause_and_not_the_launchers_of_those_it_took_along() {
        let start = at(0.0);
        is_the_root_in_every_order(&[
            cause(start, PeerLost, Some(2), 0.0),
            cause(start, Hearsay, None, 0.2),
            cause(start, Hearsay, None, 0.2),
        ]);
    }

    #[test]
    fn a_killed_launcher_is_the_cause_although_its_workers_ended_before_that_was_noticed() {
        let start = at(0.0);
        is_the_root_in_every_order(&[
            cause(start, Known, None, 0.5),
            cause(start, PeerLost, Some(3), 0.1),
            cause(start, GaveUp, Some(1), 0.2),
        ]);
    }

    #[test]
    fn an_interface_that_was_down_is_the_cause_when_its_hub_can_speak_again() {
        let start = at(0.0);
        // The manager loses the silent hub first. What the hub reports later happened before that.
        is_the_root_in_every_order(&[
            cause(start, Known, None, 3.0),
            cause(start, HubLost, None, 0.5),
            cause(start, Hearsay, None, 5.0),
        ]);
    }

    #[test]
    fn a_later_cause_does_not_replace_an_earlier_one() {
        let start = at(0.0);
        let lost = cause(start, PeerLost, Some(1), 0.0);
        assert_eq!(recorded([&lost, &cause(start, HubLost, None, 8.0)]), lost.message);
        assert_eq!(recorded([&lost, &cause(start, Known, None, 60.0)]), lost.message);
        let gave_up = cause(start, GaveUp, Some(0), 0.0);
        assert_eq!(recorded([&gave_up, &cause(start, PeerLost, Some(1), 0.01)]), gave_up.message);
    }

    #[test]
    fn a_reason_that_a_rank_gives_itself_is_not_replaced_by_its_loss() {
        let start = at(0.0);
        let gave_up = cause(start, GaveUp, Some(0), 0.0);
        let lost = cause(start, PeerLost, Some(0), -30.0);
        assert_eq!(recorded([&gave_up, &lost]), gave_up.message);
        let other = cause(start, PeerLost, Some(1), -30.0);
        assert_eq!(
            recorded([&gave_up, &other]),
            other.message,
            "but by another's, which it may have waited for"
        );
    }

    #[test]
    fn the_first_report_of_two_causes_of_a_kind_stays() {
        let start = at(0.0);
        for kind in [Known, HubLost, PeerLost, GaveUp, Hearsay] {
            let (first, second) = (cause(start, kind, Some(0), 1.0), cause(start, kind, Some(1), 0.0));
            assert_eq!(recorded([&first, &second]), first.message);
        }
    }
}
