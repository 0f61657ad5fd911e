//! Jobs that leave a hub which an operator drains.

use super::tests::{later, now, running_with};
use super::*;
use crate::service::{JobEnd, TeamAllowance};
use crate::standbys::HubLocation;

/// A running job at three hubs, each of which is the standby of the one before.
fn at_three_hubs() -> Job {
    let mut job = running_with(2, 3, JobOptions { replicas: 1, ..JobOptions::default() });
    job.choose_standbys(|_| HubLocation::default());
    job.settings = Some(super::tests::settings());
    job
}

/// Lets the job leave a drained hub. All hubs have just called.
fn leave(job: &mut Job, is_drained: impl Fn(u32) -> bool, at: Now) -> Transition {
    let calls = |_| Some(LastContact { call: at, has_hung_up: false });
    job.leave_drained_hub(is_drained, calls, at)
}

#[test]
fn standbys_take_over_from_a_hub_that_is_drained() {
    let mut job = at_three_hubs();
    assert_eq!(leave(&mut job, |_| false, now()), Transition::None);
    assert_eq!((job.stays_because(1).as_str(), job.holding_hubs().len()), ("it is about to leave", 3));
    let left = leave(&mut job, |hub| hub == 1, now());
    assert!(matches!(left, Transition::SharesChanged { message: Some(_), .. }), "{left:?}");
    assert_eq!(job.shares(), [Share::new(0, None), Share::new(2, None), Share::new(2, Some(0))]);
    assert!(job.message().contains("drained by an operator; hub 2"), "{}", job.message());
    assert!(job.hubs_told_of_shares().contains(&1) && !job.holding_hubs().contains(&1));
    assert_eq!(leave(&mut job, |hub| hub == 1, later(1.0)), Transition::None, "it has left");
    let end =
        JobEnd::failed(job.namespace, "it goes on at other hubs".into(), crate::service::CauseKind::Hearsay);
    assert_eq!(job.hub_ended(1, &end, later(1.0)), Transition::None);
    assert_eq!(job.state(), JobState::Running);
}

#[test]
fn a_hub_is_not_left_before_others_have_its_chunks() {
    let mut job = at_three_hubs();
    let _ = leave(&mut job, |hub| hub == 1, now());
    for drained in [0, 2] {
        assert_eq!(leave(&mut job, |hub| hub == drained, later(1.0)), Transition::None, "{drained}");
        assert!(job.stays_because(drained).contains("another of its hubs does so soon"));
    }
    let (_, (shape, _)) = super::tests::hubs(6).pop().expect("there are hubs");
    assert!(job.ask_standby(5, shape, vec![0, 1], TeamAllowance::default(), later(2.0)).is_some());
    assert_eq!(job.stays_because(2), "it leaves once another hub has all chunks");
    assert!(matches!(
        job.hub_allocated(5, "hash", (None, None), later(3.0)),
        Transition::SharesChanged { .. }
    ));
    assert!(job.stays_because(2).starts_with("it leaves once hub 5 ("), "{}", job.stays_because(2));
    assert_eq!(leave(&mut job, |hub| hub == 2, later(3.0)), Transition::None);
    // Hub 0 gets a standby for its share, and has none to wait for as the standby of another.
    assert!(matches!(job.standby_ready(0, 0, 3), Transition::SharesChanged { .. }));
    assert!(matches!(leave(&mut job, |hub| hub == 0, later(4.0)), Transition::SharesChanged { .. }));
    assert_eq!(leave(&mut job, |hub| hub == 2, later(4.0)), Transition::None, "it serves the last copy");
    assert!(matches!(job.standby_ready(2, 1, 3), Transition::SharesChanged { .. }));
    assert_eq!(leave(&mut job, |hub| hub == 2, later(5.0)), Transition::None, "share 2 has no standby");
}

#[test]
fn a_hub_that_is_to_become_a_standby_is_given_up_when_it_is_drained() {
    let mut job = at_three_hubs();
    let _ = leave(&mut job, |hub| hub == 1, now());
    let (_, (shape, _)) = super::tests::hubs(6).pop().expect("there are hubs");
    assert!(job.ask_standby(5, shape.clone(), vec![0], TeamAllowance::default(), later(1.0)).is_some());
    let given_up = leave(&mut job, |hub| hub == 5, later(2.0));
    assert!(matches!(given_up, Transition::AskHubs { ref hubs, .. } if *hubs == [5]), "{given_up:?}");
    assert!(job.ask_standby(5, shape, vec![0], TeamAllowance::default(), later(50.0)).is_some());
    assert!(matches!(
        job.hub_allocated(5, "hash", (None, None), later(51.0)),
        Transition::SharesChanged { .. }
    ));
    let given_up = leave(&mut job, |hub| hub == 5, later(52.0));
    assert!(matches!(given_up, Transition::SharesChanged { .. }), "{given_up:?}");
    assert_eq!((job.shares()[0], job.state()), (Share::new(0, None), JobState::Running));
}

#[test]
fn jobs_that_cannot_leave_say_why() {
    let mut plain = running_with(2, 2, JobOptions::default());
    assert_eq!(leave(&mut plain, |_| true, now()), Transition::None);
    assert!(plain.stays_because(0).contains("it stays until it ends, since it has no standbys"));
    let mut ending = at_three_hubs();
    let _ = ending.conclude("its workers have ended".into(), later(1.0));
    assert_eq!(leave(&mut ending, |_| true, later(2.0)), Transition::None);
    assert_eq!(ending.stays_because(0), "it is ending");
}

#[test]
fn a_hub_is_not_left_for_one_that_may_be_lost() {
    let mut job = at_three_hubs();
    let known = |call, has_hung_up| move |_: u32| Some(LastContact { call, has_hung_up });
    for (contact, what) in
        [(known(now(), false), "it has not called"), (known(later(4.0), true), "it has hung up")]
    {
        let stays = job.leave_drained_hub(|hub| hub == 1, contact, later(4.0));
        assert_eq!(stays, Transition::None, "{what}");
    }
    assert_eq!(
        job.leave_drained_hub(|hub| hub == 1, |_| None, later(4.0)),
        Transition::None,
        "it is forgotten"
    );
    let left = job.leave_drained_hub(|hub| hub == 1, known(later(3.0), false), later(4.0));
    assert!(matches!(left, Transition::SharesChanged { .. }), "{left:?}");
}

#[test]
fn a_drained_standby_is_left_only_for_a_hub_that_calls() {
    let mut job = at_three_hubs();
    let silent = |hub| {
        let call = if hub == 0 { now() } else { later(10.0) };
        Some(LastContact { call, has_hung_up: false })
    };
    // Hub 0 serves what hub 1 follows.
    assert_eq!(job.leave_drained_hub(|hub| hub == 1, silent, later(10.0)), Transition::None);
    assert!(matches!(leave(&mut job, |hub| hub == 1, later(11.0)), Transition::SharesChanged { .. }));
}
