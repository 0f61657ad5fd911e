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
    assert_eq!(job.order_move(1, None), Ok(true));
    let left = job.leave_drained_hub(|_| false, calls, now());
    assert!(matches!(left, Transition::SharesChanged { .. }), "{left:?}");
    assert!(job.message().contains("an operator has moved the job off hub 1 ("), "{}", job.message());
    assert!(job.shares().iter().all(|share| share.role(1) == Role::None));
    assert!(job.move_status().unwrap().has_left && job.is_moved_off(1) && !job.is_moved_off(0));
    assert_eq!(job.order_move(1, None), Ok(false), "it is the same order");
    let again = job.order_move(1, Some(0)).unwrap_err().to_string();
    assert!(again.contains("nothing at hub 1, but at hub 0 ("), "{again}");
    let _ = job.stop("enough".into(), StopWhen::Now, later(1.0));
    assert!(job.order_move(0, None).is_err(), "it ends");
}

#[test]
fn an_order_names_the_hub_of_the_shares_that_it_leaves_behind_alone() {
    let mut job = running_with(2, 3, JobOptions { replicas: 1, ..JobOptions::default() });
    job.choose_standbys(|_| HubLocation::default());
    // Each hub is the standby of the one before: hub 0 has the shares 0 and 2.
    job.order_move(0, Some(7)).unwrap();
    let lacking = |share, served_by| super::new_standbys::LackingShare { share, served_by };
    let named = [0, 1, 2].map(|share| job.destination(lacking(share, 2), now()));
    assert_eq!(named, [Some(7), None, Some(7)]);
    assert_eq!(job.destination(lacking(0, 7), now()), None, "it serves that share");
    assert!(!job.move_status().unwrap().has_arrived, "it has no part yet");
    job.order_move(1, None).unwrap();
    assert_eq!(job.destination(lacking(2, 2), now()), Some(7), "the first order goes on");
}

#[test]
fn a_job_moves_to_the_hub_that_has_all_its_chunks_already() {
    let mut job = running_with(2, 2, JobOptions { replicas: 1, ..JobOptions::default() });
    job.choose_standbys(|_| HubLocation::default());
    job.order_move(0, Some(1)).unwrap();
    let calls = |_| Some(LastContact { call: now(), has_hung_up: false });
    let left = job.leave_drained_hub(|_| false, calls, now());
    assert!(matches!(left, Transition::SharesChanged { .. }), "{left:?}");
    let status = job.move_status().unwrap();
    assert_eq!((status.has_left, status.has_arrived), (true, true));
    assert_eq!(status.standbys.map(|counts| counts.ready), Some(0), "and no third hub is there");
}
