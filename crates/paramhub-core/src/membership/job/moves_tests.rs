//! Jobs that an operator moves off a hub.

use super::tests::{later, now, running_with};
use super::*;
use crate::service::{JobOptions, StopWhen};
use crate::standbys::{HubLocation, Role};

#[test]
fn only_a_running_job_with_standbys_moves() {
    let mut plain = running_with(2, 2, JobOptions::default());
    let refused = plain.order_move(0, None).unwrap_err().to_string();
    assert!(refused.contains("no standbys") && refused.contains("`--replicas 1`"), "{refused}");
    let mut job = running_with(2, 3, JobOptions { replicas: 1, ..JobOptions::default() });
    job.choose_standbys(|_| HubLocation::default());
    let calls = |_| Some(LastContact { call: now(), has_hung_up: false });
    assert_eq!(job.leave_drained_hub(|_| false, calls, now()), Transition::None);
    job.order_move(1, None).unwrap();
    let left = job.leave_drained_hub(|_| false, calls, now());
    assert!(matches!(left, Transition::SharesChanged { .. }), "{left:?}");
    assert!(job.message().contains("an operator has moved the job off hub 1 ("), "{}", job.message());
    assert!(job.shares().iter().all(|share| share.role(1) == Role::None));
    assert!(job.move_status().unwrap().has_left && job.is_moved_off(1) && !job.is_moved_off(0));
    let again = job.order_move(1, None).unwrap_err().to_string();
    assert!(again.contains("nothing at hub 1, but at hub 0 ("), "{again}");
    let _ = job.stop("enough".into(), StopWhen::Now, later(1.0));
    assert!(job.order_move(0, None).is_err(), "it ends");
}
