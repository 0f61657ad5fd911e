//! Hubs that have a part in a job and become standbys of further shares.

use super::cause::Cause;
use super::tests::{later, now, running_with, settings};
use super::*;
use crate::service::{CauseKind, FurtherShares, HubCommand, JobEnd, JobPlan, TeamAllowance};
use crate::standbys::HubLocation;

fn cause() -> Cause {
    Cause { kind: CauseKind::HubLost, rank: None, began: now(), message: "it was lost".into() }
}

/// A job that runs at three hubs, of which hub 2 was lost: its standby, hub 0, serves two shares, and hub 1 one.
fn after_a_loss() -> Job {
    let mut job = running_with(2, 3, JobOptions { replicas: 1, ..JobOptions::default() });
    job.choose_standbys(|_| HubLocation::default());
    job.settings = Some(settings());
    assert!(matches!(job.hub_lost(2, cause(), now()), Transition::SharesChanged { .. }));
    assert_eq!(job.shares(), [Share::new(0, Some(1)), Share::new(1, None), Share::new(0, None)]);
    job.note_lacking(later(1.0));
    job
}

/// Asks a hub for a share.
fn ask(job: &mut Job, hub: u32, share: u16, at: Now) -> JobPlan {
    match job.ask_further(hub, vec![share], TeamAllowance::default(), at) {
        Some(HubCommand::Allocate(plan)) => *plan,
        other => panic!("{other:?}"),
    }
}

/// The shares for which this hub may be asked.
fn may_ask(job: &Job, hub: u32, at: Now) -> Vec<u16> {
    let lacking = job.lacking_shares().into_iter();
    lacking.filter(|&lacking| job.may_ask_further(hub, lacking, at)).map(|lacking| lacking.share).collect()
}

fn allocated(job: &mut Job, hub: u32, further: Option<u32>, at: Now) -> Transition {
    job.hub_allocated(hub, "hash", (None, further), at)
}

#[test]
fn a_hub_that_has_a_part_is_asked_when_no_other_has_come_for_a_while() {
    let mut job = after_a_loss();
    assert!(may_ask(&job, 0, later(10.0)).is_empty(), "another hub may come");
    assert_eq!((may_ask(&job, 0, later(11.0)), may_ask(&job, 1, later(11.0))), (vec![1], vec![2]));
    assert!(may_ask(&job, 2, later(11.0)).is_empty(), "it is lost");
    assert!(may_ask(&job, 7, later(11.0)).is_empty(), "it has no part in the job");

    let plan = ask(&mut job, 0, 1, later(11.0));
    assert_eq!(plan.further, Some(FurtherShares { number: 1, shares: vec![1] }));
    let copying = Share { copying: true, ..Share::new(1, Some(0)) };
    assert_eq!((plan.hub, plan.shares[1]), (0, copying));
    assert!(may_ask(&job, 0, later(12.0)).is_empty() && may_ask(&job, 1, later(12.0)) == [2]);
    assert!(matches!(allocated(&mut job, 0, Some(1), later(12.0)), Transition::SharesChanged { .. }));
    assert_eq!(job.shares()[1], copying);
    assert!(matches!(job.standby_ready(1, 1, 0), Transition::SharesChanged { .. }));
    assert_eq!(job.shares()[1], Share::new(1, Some(0)));
    // Hub 0 can take over all that hub 1 serves.
    assert!(matches!(job.hub_lost(1, cause(), later(20.0)), Transition::SharesChanged { .. }));
    assert_eq!(job.state(), JobState::Running);
    assert!(job.shares().iter().all(|share| share.served_by == 0));
}

#[test]
fn an_answer_does_not_count_once_the_shares_have_changed() {
    let mut job = after_a_loss();
    ask(&mut job, 0, 1, later(11.0));
    ask(&mut job, 1, 2, later(11.0));
    assert!(matches!(allocated(&mut job, 0, Some(1), later(12.0)), Transition::SharesChanged { .. }));
    let before = job.shares().to_vec();
    assert!(matches!(
        allocated(&mut job, 1, Some(1), later(12.0)),
        Transition::SharesChanged { message: None, .. }
    ));
    assert_eq!(job.shares(), before);
    assert_eq!(may_ask(&job, 1, later(12.0)), [2], "it is asked again");
    let plan = ask(&mut job, 1, 2, later(12.0));
    assert_eq!(plan.further, Some(FurtherShares { number: 2, shares: vec![2] }));
    assert!(matches!(
        allocated(&mut job, 1, None, later(12.0)),
        Transition::SharesChanged { message: None, .. }
    ));
    assert!(matches!(
        allocated(&mut job, 1, Some(2), later(13.0)),
        Transition::SharesChanged { message: Some(_), .. }
    ));
}

#[test]
fn a_hub_that_cannot_take_a_further_share_keeps_its_part() {
    let mut job = after_a_loss();
    ask(&mut job, 0, 1, later(11.0));
    assert_eq!(job.hub_refused(0, "it has no memory left", later(12.0)), Transition::None);
    assert_eq!(job.state(), JobState::Running);
    assert!(may_ask(&job, 0, later(40.0)).is_empty() && may_ask(&job, 0, later(42.0)) == [1]);
    assert_eq!(job.hub_refused(0, "that was an earlier one", later(90.0)), Transition::None);

    // It may also never answer, or take more than the team may have.
    ask(&mut job, 0, 1, later(90.0));
    assert_eq!(job.check_asked_standbys(later(200.0)), Transition::None);
    assert!(matches!(job.check_asked_standbys(later(211.0)), Transition::SharesChanged { .. }));
    ask(&mut job, 0, 1, later(300.0));
    job.hub_reserved(0, 1000, 10);
    let exceeds = job.exceeds_team(0, "it is too much", later(301.0));
    assert!(matches!(exceeds, Some(Transition::SharesChanged { .. })));
    assert_eq!(job.exceeds_team(0, "it is too much", later(302.0)), None);
    assert_eq!((job.state(), job.shares()[1]), (JobState::Running, Share::new(1, None)));
}

#[test]
fn a_hub_that_has_finished_is_not_awaited_by_one_that_was_to_copy_from_it() {
    let mut job = after_a_loss();
    ask(&mut job, 0, 1, later(11.0));
    assert!(matches!(allocated(&mut job, 0, Some(1), later(12.0)), Transition::SharesChanged { .. }));
    let ended = job.hub_ended(1, &JobEnd::finished(job.namespace), later(13.0));
    assert!(matches!(ended, Transition::SharesChanged { message: Some(_), .. }), "{ended:?}");
    assert_eq!(job.shares()[1], Share::new(1, None));
    assert!(matches!(
        job.hub_ended(0, &JobEnd::finished(job.namespace), later(14.0)),
        Transition::Ended { .. }
    ));
    assert_eq!(job.state(), JobState::Finished);
}
