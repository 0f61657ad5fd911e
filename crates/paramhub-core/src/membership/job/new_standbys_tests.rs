//! Hubs that become standbys while their job runs.

use super::cause::Cause;
use super::tests::{hubs, later, now, running_with, settings};
use super::*;
use crate::placement::HubShape;
use crate::service::{CauseKind, HubCommand, JobEnd, JobPlan, StandbyCounts, StopWhen, TeamAllowance};
use crate::standbys::HubLocation;

/// A running job at two hubs, of which the second has taken over from the first.
fn after_a_loss() -> Job {
    let mut job = running_with(2, 2, JobOptions { replicas: 1, ..JobOptions::default() });
    job.choose_standbys(|_| HubLocation::default());
    job.settings = Some(settings());
    assert!(job.lacking_shares().is_empty());
    let cause = Cause { kind: CauseKind::HubLost, rank: None, began: now(), message: "it was lost".into() };
    assert!(matches!(job.hub_lost(0, cause, now()), Transition::SharesChanged { .. }));
    assert_eq!(job.shares(), [Share::new(1, None); 2]);
    job
}

fn shape(hub: u32) -> HubShape {
    let (_, (shape, _)) = hubs(hub + 1).pop().expect("there are hubs");
    shape
}

fn lacking(job: &Job) -> Vec<u16> {
    job.lacking_shares().into_iter().map(|lacking| lacking.share).collect()
}

fn ask(job: &mut Job, hub: u32, shares: &[u16], at: Now) -> JobPlan {
    let asked = job.ask_standby(hub, shape(hub), shares.to_vec(), TeamAllowance::default(), at);
    match asked {
        Some(HubCommand::Allocate(plan)) => *plan,
        other => panic!("{other:?}"),
    }
}

/// A job whose hub 5 is about to become the standby of both shares.
fn copying() -> Job {
    let mut job = after_a_loss();
    ask(&mut job, 5, &[0, 1], later(1.0));
    assert!(matches!(
        job.hub_allocated(5, "hash", (None, None), later(2.0)),
        Transition::SharesChanged { .. }
    ));
    job
}

fn counts(job: &Job) -> (u32, u32) {
    let StandbyCounts { ready, copying, .. } = job.standby_counts().expect("it is to have standbys");
    (ready, copying)
}

#[test]
fn a_hub_is_asked_allocates_gets_its_copies_and_can_then_take_over() {
    let mut job = after_a_loss();
    assert_eq!((lacking(&job), counts(&job)), (vec![0, 1], (0, 0)));
    assert_eq!(job.lacking_shares()[0].served_by, 1);
    assert!(job.may_ask_standby(5, later(1.0)) && !job.may_ask_standby(1, later(1.0)));
    let plan = ask(&mut job, 5, &[0, 1], later(1.0));
    let followed = Share { copying: true, ..Share::new(1, Some(2)) };
    assert_eq!((plan.hub, plan.shares, plan.later_hubs), (2, vec![followed; 2], vec![shape(5)]));
    // Nobody else knows of it before it has allocated.
    assert_eq!((job.shares().to_vec(), lacking(&job)), (vec![Share::new(1, None); 2], vec![]));
    assert!(!job.hubs_told_of_shares().contains(&5) && !job.may_ask_standby(5, later(1.0)));

    let transition = job.hub_allocated(5, "hash", (None, None), later(2.0));
    assert!(matches!(transition, Transition::SharesChanged { message: Some(_), .. }), "{transition:?}");
    assert_eq!((job.shares(), counts(&job)), (&[followed; 2][..], (0, 2)));
    assert!(job.hubs_told_of_shares().contains(&5));
    assert_eq!(job.standby_ready(5, 0, 2), Transition::None, "it is for the hub that serves to say");
    assert_eq!(job.standby_ready(1, 0, 0), Transition::None, "that is no standby of it");
    assert!(matches!(job.standby_ready(1, 0, 2), Transition::SharesChanged { .. }));
    assert_eq!((job.standby_ready(1, 0, 2), counts(&job)), (Transition::None, (1, 1)));
    assert!(matches!(job.standby_ready(1, 1, 2), Transition::SharesChanged { .. }));
    assert!(job.message().contains("has all chunks"), "{}", job.message());

    let cause = Cause::known("the hub that served was lost".into(), later(9.0));
    assert!(matches!(job.hub_lost(1, cause, later(9.0)), Transition::SharesChanged { .. }));
    assert_eq!((job.shares(), lacking(&job)), (&[Share::new(2, None); 2][..], vec![0, 1]));
    // The hub that was lost at first has come back under another number.
    assert_eq!(ask(&mut job, 6, &[0, 1], later(10.0)).hub, 3);
}

#[test]
fn a_job_does_not_depend_on_a_hub_that_has_not_all_chunks() {
    let lost = || Cause::known("it was lost".into(), later(9.0));
    let ways: [fn(&mut Job) -> Transition; 4] = [
        |job| job.hub_lost(5, Cause::known("it was lost".into(), later(9.0)), later(9.0)),
        |job| job.hub_refused(5, "it has no room", later(9.0)),
        |job| {
            let end = JobEnd::failed(job.namespace, "a fault".into(), CauseKind::Known);
            job.hub_ended(5, &end, later(9.0))
        },
        |job| job.counterpart_lost(1, (1, 2), job.shares_number, "it was reset", later(9.0)),
    ];
    for way in ways {
        let mut job = copying();
        let transition = way(&mut job);
        assert!(matches!(transition, Transition::SharesChanged { .. }), "{transition:?}");
        assert_eq!((job.state(), job.shares()[1]), (JobState::Running, Share::new(1, None)));
    }
    let mut job = copying();
    let transition = job.hub_lost(1, lost(), later(9.0));
    assert!(
        matches!(transition, Transition::Ended { .. }),
        "a part of the chunks is nothing: {transition:?}"
    );
}

#[test]
fn a_hub_that_could_not_become_a_standby_is_asked_again_after_a_while() {
    let mut job = after_a_loss();
    ask(&mut job, 5, &[0, 1], later(1.0));
    assert_eq!(job.hub_refused(5, "it has no room", later(2.0)), Transition::None, "no hub knew of it");
    assert!(job.message().contains("does not become a standby: it has no room"), "{}", job.message());
    assert_eq!((lacking(&job), job.may_ask_standby(5, later(20.0))), (vec![0, 1], false));
    assert!(job.may_ask_standby(6, later(20.0)) && job.may_ask_standby(5, later(40.0)));
    let plan = ask(&mut job, 5, &[0, 1], later(40.0));
    assert_eq!((plan.hub, plan.later_hubs.len()), (3, 2), "it has another position than before");
    assert!(matches!(
        job.hub_allocated(5, "hash", (None, None), later(41.0)),
        Transition::SharesChanged { .. }
    ));
    assert_eq!(job.shares()[0].standby, Some(3));
}

#[test]
fn a_hub_that_does_not_allocate_is_given_up() {
    let mut job = after_a_loss();
    ask(&mut job, 5, &[0], later(1.0));
    assert_eq!(job.check_asked_standbys(later(100.0)), Transition::None);
    let given_up = job.check_asked_standbys(later(130.0));
    assert!(matches!(given_up, Transition::AskHubs { when: StopWhen::Now, ref hubs, .. } if *hubs == [5]));
    assert_eq!((job.check_asked_standbys(later(131.0)), lacking(&job)), (Transition::None, vec![0, 1]));
    let mut job = after_a_loss();
    ask(&mut job, 5, &[0], later(1.0));
    let other = job.hub_allocated(5, "another placement", (None, None), later(2.0));
    assert!(matches!(other, Transition::AskHubs { ref hubs, .. } if *hubs == [5]), "{other:?}");
    assert_eq!(lacking(&job), [0, 1]);
}

#[test]
fn a_job_finishes_without_its_new_standby() {
    for is_copying in [false, true] {
        let mut job = if is_copying { copying() } else { after_a_loss() };
        if !is_copying {
            ask(&mut job, 5, &[0, 1], later(1.0));
        }
        let finished = JobEnd::finished(job.namespace);
        assert_eq!(job.hub_ended(1, &finished, later(9.0)), Transition::Ended { stop: vec![5] });
        assert_eq!((job.state(), job.standby_counts()), (JobState::Finished, None));
    }
}

#[test]
fn nobody_becomes_a_standby_of_a_job_that_ends_or_of_a_share_without_chunks() {
    let mut job = after_a_loss();
    job.placements[0].empty_hubs = vec![0];
    assert_eq!((lacking(&job), job.standby_counts().map(|counts| counts.shares)), (vec![1], Some(1)));
    let _ = job.conclude("its workers have ended".into(), later(5.0));
    assert!(lacking(&job).is_empty());
}

#[test]
fn a_manager_that_restarts_knows_the_later_hubs_and_can_ask_others() {
    let mut job = copying();
    let _ = job.standby_ready(1, 0, 2);
    ask(&mut job, 7, &[], later(3.0));
    let (mut restored, _) = Job::restore(job.record(now()), later(30.0));
    assert_eq!((restored.shares(), restored.later_hubs()), (job.shares(), vec![shape(5), shape(7)]));
    assert!(matches!(restored.standby_ready(1, 1, 2), Transition::SharesChanged { .. }), "it is said again");
    // The hub that was only asked is not needed any more, and hears that.
    let told = restored.hub_allocated(7, "hash", (None, None), later(31.0));
    assert!(matches!(told, Transition::SharesChanged { message: None, .. }), "{told:?}");
    assert!(restored.hubs_told_of_shares().contains(&7));
    let cause = Cause::known("it was lost".into(), later(40.0));
    assert!(matches!(restored.hub_lost(1, cause, later(40.0)), Transition::SharesChanged { .. }));
    assert_eq!(ask(&mut restored, 8, &[0, 1], later(41.0)).shares[0].standby, Some(4));
}

#[test]
fn a_manager_that_restarts_does_not_take_a_hub_for_lost_that_it_has_just_asked() {
    let (mut job, _) = Job::restore(after_a_loss().record(now()), later(30.0));
    ask(&mut job, 5, &[0, 1], later(31.0));
    // It has answered the question of the manager before it took the command.
    assert_eq!(job.hub_reported_all(5, later(32.0)), Transition::None);
    assert!(matches!(
        job.hub_allocated(5, "hash", (None, None), later(33.0)),
        Transition::SharesChanged { .. }
    ));
    assert_eq!(job.state(), JobState::Running);
}

#[test]
fn a_hub_that_has_lost_its_part_while_the_manager_was_away_is_replaced() {
    let mut job = copying();
    for share in 0..2 {
        assert!(matches!(job.standby_ready(1, share, 2), Transition::SharesChanged { .. }));
    }
    let (mut restored, _) = Job::restore(job.record(now()), later(30.0));
    let transition = restored.hub_reported_all(1, later(31.0));
    assert!(matches!(transition, Transition::SharesChanged { message: Some(_), .. }), "{transition:?}");
    assert_eq!((restored.state(), restored.shares()), (JobState::Running, &[Share::new(2, None); 2][..]));
}

#[test]
fn a_hub_without_chunks_that_becomes_a_standby_has_its_newest_part_after_a_restart() {
    let mut job = after_a_loss();
    job.placements[0].empty_hubs = vec![0];
    job.shares = vec![Share::new(0, None), Share::new(1, None)];
    assert_eq!(lacking(&job), [1]);
    ask(&mut job, 0, &[1], later(1.0));
    assert!(matches!(
        job.hub_allocated(0, "hash", (None, None), later(2.0)),
        Transition::SharesChanged { .. }
    ));
    let (mut restored, _) = Job::restore(job.record(now()), later(30.0));
    let finished = JobEnd::finished(restored.namespace);
    assert_eq!(restored.hub_ended(0, &finished, later(40.0)), Transition::None);
    assert_eq!(restored.hub_ended(1, &finished, later(40.0)), Transition::Ended { stop: vec![] });
}
