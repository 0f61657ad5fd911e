//! Hubs that are lost while their job has standbys.

use super::cause::Cause;
use super::standbys::LastContact;
use super::tests::{call, hubs, later, now, running_with};
use super::*;
use crate::membership::probes::CoreBandwidth;
use crate::service::{CauseKind, HubCommand, JobEnd, OnWorkerLoss};
use crate::standbys::{HubLocation, Share};

/// A running job at three hubs, each of which is the standby of another.
fn running() -> Job {
    let mut job = running_with(2, 3, JobOptions { replicas: 1, ..JobOptions::default() });
    job.choose_standbys(|_| HubLocation::default());
    assert_eq!(job.shares(), shares([(0, Some(1)), (1, Some(2)), (2, Some(0))]));
    job
}

fn shares(of: [(u16, Option<u16>); 3]) -> [Share; 3] {
    of.map(|(served_by, standby)| Share::new(served_by, standby))
}

/// What hubs hear of the shares.
fn told(job: &Job) -> (u32, Vec<Share>) {
    match job.shares_command() {
        HubCommand::ChangeShares { number, shares, .. } => (number, shares),
        other => panic!("{other:?}"),
    }
}

fn has_changed(transition: &Transition) -> bool {
    matches!(transition, Transition::SharesChanged { .. })
}

/// The hub at the second position reports the loss of that at the first.
fn lose(job: &mut Job, reporter: u32, share: u16, lost: u16) -> Transition {
    let (number, _) = told(job);
    job.counterpart_lost(reporter, (share, lost), number, "it was reset", later(10.0))
}

/// A hub that has called so many seconds after the job began to run.
fn called(at_s: f64, has_hung_up: bool) -> Option<LastContact> {
    Some(LastContact { call: later(at_s), has_hung_up })
}

#[test]
fn a_hub_goes_on_without_the_standby_that_it_has_lost() {
    let mut job = running();
    let changed = lose(&mut job, 0, 0, 1);
    let Transition::SharesChanged { message: Some(_), told_later: Some(1) } = changed else {
        panic!("{changed:?}")
    };
    assert_eq!(told(&job), (1, shares([(0, None), (1, Some(2)), (2, Some(0))]).to_vec()));
    assert_eq!(lose(&mut job, 0, 0, 1), Transition::None);
    assert_eq!(job.state(), JobState::Running);
    // It is there, and hears of the change.
    let there = job.check_suspected_hubs(|_| called(12.1, false), later(12.2));
    assert_eq!(there, Transition::SharesChanged { message: None, told_later: None });
    assert!(!job.has_suspected_hubs());
}

#[test]
fn a_standby_takes_over_once_the_manager_does_not_hear_the_hub_either() {
    for contact in [None, called(9.9, true), called(8.0, false)] {
        let mut job = running();
        assert_eq!(lose(&mut job, 1, 0, 0), Transition::None);
        assert!(job.has_suspected_hubs());
        let changed =
            job.check_suspected_hubs(|hub| if hub == 0 { contact } else { called(10.0, false) }, later(10.0));
        assert!(has_changed(&changed), "{contact:?}");
        assert_eq!(told(&job), (1, shares([(1, None), (1, Some(2)), (2, None)]).to_vec()));
        assert!(!job.has_suspected_hubs());
    }
}

/// A running job of which one hub serves its share alone, and which the hub that it follows has lost.
fn alone() -> Job {
    let mut job = running();
    assert!(has_changed(&lose(&mut job, 0, 0, 1)));
    assert!(has_changed(&job.check_suspected_hubs(|_| called(12.1, false), later(12.2))));
    // Hub 0 serves its share alone when the hub that it follows has lost it, too.
    assert!(has_changed(&lose(&mut job, 2, 2, 0)));
    job
}

#[test]
fn a_hub_without_which_the_job_fails_may_call_late() {
    let check = |contact| alone().check_suspected_hubs(|_| contact, later(10.0));
    assert_eq!(check(called(8.0, false)), Transition::None, "hubs that are there may be quiet for 2 s");
    for contact in [None, called(8.0, true)] {
        assert!(matches!(check(contact), Transition::Ended { .. }), "{contact:?}");
    }
}

#[test]
fn a_hub_that_is_heard_again_when_its_job_has_failed_for_want_of_it_is_to_stop() {
    let mut job = alone();
    assert!(matches!(job.check_suspected_hubs(|_| None, later(12.5)), Transition::Ended { .. }));
    assert!(job.is_over_at(0), "the job has failed without it");
    assert!(!job.went_on_without(0), "it serves chunks in the newest shares, and would keep them for ever");
}

#[test]
fn hubs_that_both_call_and_do_not_reach_each_other_stay_with_the_one_that_serves() {
    let mut job = running();
    let _ = lose(&mut job, 1, 0, 0);
    let mut check = |call_s, at_s| job.check_suspected_hubs(|_| called(call_s, false), later(at_s));
    assert_eq!(check(10.5, 11.0), Transition::None, "it may have called before it died");
    assert!(has_changed(&check(12.1, 12.2)));
    assert_eq!(told(&job).1, shares([(0, None), (1, Some(2)), (2, Some(0))]));
}

#[test]
fn a_standby_that_is_gone_is_not_awaited_at_the_end() {
    let mut job = running_with(2, 2, JobOptions { replicas: 1, ..JobOptions::default() });
    job.choose_standbys(|_| HubLocation::default());
    // It serves no chunks itself, so that nobody else reports its loss.
    assert!(has_changed(&lose(&mut job, 0, 0, 1)));
    assert!(job.has_suspected_hubs());
    assert!(has_changed(&job.check_suspected_hubs(|_| None, later(10.0))));
    let finished = JobEnd::finished(job.namespace);
    assert!(matches!(job.hub_ended(0, &finished, later(11.0)), Transition::Ended { .. }));
    assert_eq!(job.state(), JobState::Finished);
}

#[test]
fn a_hub_that_is_lost_after_all_others_have_finished_has_finished_too() {
    let mut job = running_with(2, 2, JobOptions { replicas: 1, ..JobOptions::default() });
    job.choose_standbys(|_| HubLocation::default());
    let finished = JobEnd::finished(job.namespace);
    let _ = job.hub_ended(0, &finished, later(10.0));
    let cause =
        Cause { kind: CauseKind::HubLost, rank: None, began: later(12.0), message: "hub 1 was lost".into() };
    assert!(matches!(job.hub_lost(1, cause, later(12.0)), Transition::Ended { .. }));
    assert_eq!(job.state(), JobState::Finished);
}

#[test]
fn a_hub_that_knows_an_older_change_is_told_the_newest() {
    let mut job = running();
    let _ = lose(&mut job, 1, 0, 0);
    assert!(has_changed(&job.check_suspected_hubs(|_| None, later(10.0))));
    // The hub was cut off, and reports the loss of what it has taken for its standby.
    let repeated = job.counterpart_lost(0, (0, 1), 0, "it was reset", later(20.0));
    assert!(has_changed(&repeated));
    assert_eq!(told(&job).0, 1, "no further change");
}

#[test]
fn reports_of_two_shares_that_come_together_count_both() {
    let mut job = running_with(2, 2, JobOptions { replicas: 1, ..JobOptions::default() });
    job.choose_standbys(|_| HubLocation::default());
    // The hub serves one share and is the standby of the other, and does not know yet what the first report has changed.
    assert!(has_changed(&job.counterpart_lost(1, (1, 0), 0, "it was reset", later(10.0))));
    assert_eq!(job.counterpart_lost(1, (0, 0), 0, "it was reset", later(10.0)), Transition::None);
    assert!(has_changed(&job.check_suspected_hubs(|_| None, later(10.0))));
    let alone = Share::new(1, None);
    assert_eq!(told(&job), (2, vec![alone, alone]));
}

#[test]
fn a_job_fails_with_the_last_hub_of_a_share() {
    let mut job = running();
    let _ = lose(&mut job, 0, 0, 1);
    let cause =
        Cause { kind: CauseKind::HubLost, rank: None, began: later(12.0), message: "hub 0 was lost".into() };
    let lost = job.hub_lost(0, cause, later(12.0));
    assert!(matches!(lost, Transition::Ended { .. }), "{lost:?}");
    assert!(job.message().contains("no other hub has the chunks of share 0"), "{}", job.message());
}

#[test]
fn a_hub_that_joins_anew_has_lost_what_its_standby_takes_over() {
    let mut job = running();
    let cause =
        Cause { kind: CauseKind::HubLost, rank: None, began: later(12.0), message: "hub 2 was lost".into() };
    assert!(has_changed(&job.hub_lost(2, cause.clone(), later(12.0))));
    assert_eq!(told(&job).1, shares([(0, Some(1)), (1, None), (0, None)]));
    assert_eq!(job.hub_lost(2, cause, later(13.0)), Transition::None);
    assert_eq!(job.state(), JobState::Running);
}

#[test]
fn a_hub_that_shuts_down_leaves_at_once() {
    let mut job = running();
    assert!(has_changed(&lose(&mut job, 1, 1, 1)));
    assert_eq!(told(&job).1, shares([(0, None), (2, None), (2, Some(0))]));
    assert!(job.message().contains("takes over"), "{}", job.message());
}

#[test]
fn a_manager_that_restarts_knows_the_shares_and_repeats_them() {
    let mut job = running();
    let _ = lose(&mut job, 1, 1, 1);
    let (restored, _) = Job::restore(job.record(now()), later(30.0));
    assert_eq!(told(&restored), told(&job));
    assert!(restored.hubs_of_members().eq([0, 2]), "the hub that has left is not awaited");
    let mut restored = restored;
    assert!(has_changed(&restored.hub_allocated(0, "", (None, None), later(31.0))));
}

/// A running job at two hubs, whose ranks go back to a checkpoint.
fn going_back() -> Job {
    let options = JobOptions {
        replicas: 1,
        hubs: Some(2),
        on_worker_loss: OnWorkerLoss::Rewind,
        checkpoint_every: Some("20".parse().unwrap()),
        ..JobOptions::default()
    };
    let mut job = running_with(2, 2, options);
    job.choose_standbys(|_| HubLocation::default());
    job
}

/// The hubs that are to end their parts, as the job begins again.
fn begun_again(transition: &Transition) -> &[u32] {
    match transition {
        Transition::BeganAgain { hubs, .. } => hubs,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_job_that_goes_back_begins_again_when_a_rank_or_the_last_hub_of_a_share_is_lost() {
    let rank_lost = |job: &Job| JobEnd {
        rank: Some(1),
        ..JobEnd::failed(job.namespace, "rank 1 was lost".into(), CauseKind::PeerLost)
    };
    let mut job = going_back();
    let end = rank_lost(&job);
    assert_eq!(begun_again(&job.hub_ended(0, &end, later(9.0))), [1]);
    assert_eq!((job.state(), job.shares().len()), (JobState::Connecting, 0));
    assert_eq!(job.losses(later(9.0)).unwrap().workers_lost, 1);
    // The first loss of a hub costs no step. A frozen hub may not have heard of it when a rank is lost.
    let mut job = going_back();
    assert!(
        has_changed(&lose(&mut job, 0, 0, 1))
            && has_changed(&job.check_suspected_hubs(|_| None, later(10.0)))
    );
    assert_eq!(begun_again(&job.hub_ended(0, &end, later(11.0))), [1]);
    assert_eq!(job.former_hubs(), [1]);
    // Nor may the last hub of a share that the manager does not hear.
    let mut job = going_back();
    assert!(
        has_changed(&lose(&mut job, 0, 0, 1))
            && has_changed(&job.check_suspected_hubs(|_| None, later(10.0)))
    );
    let cause =
        Cause { kind: CauseKind::HubLost, rank: None, began: later(12.0), message: "hub 0 was lost".into() };
    assert_eq!(begun_again(&job.hub_lost(0, cause, later(12.0))), [0, 1]);
    assert!(
        job.message().contains("no other hub has the chunks of share 0; all ranks go back"),
        "{}",
        job.message()
    );
}

#[test]
fn a_job_that_begins_again_with_one_hub_waits_for_no_standby() {
    let mut job = going_back();
    let end = JobEnd::failed(job.namespace, "rank 1 was lost".into(), CauseKind::PeerLost);
    let _ = job.hub_ended(0, &end, later(9.0));
    for rank in 0..2 {
        job.connect(&call(rank, 10 + rank as u8), later(10.0)).unwrap();
    }
    assert!(job.former_part_over(1));
    let begun = job.begin_initialising(hubs(1), &CoreBandwidth::Unneeded);
    assert_eq!(begun, Transition::Advanced);
    job.choose_standbys(|_| HubLocation::default());
    assert_eq!(job.shares(), [Share::new(0, None)]);
}

#[test]
fn a_hub_without_which_a_job_begins_again_is_awaited_if_the_manager_hears_it() {
    let mut job = going_back();
    assert!(
        has_changed(&lose(&mut job, 0, 0, 1))
            && has_changed(&job.check_suspected_hubs(|_| None, later(10.0)))
    );
    // Hub 0 serves all chunks, and leaves the job because a core has panicked.
    assert_eq!(begun_again(&lose(&mut job, 0, 0, 0)), [0, 1]);
    let mut job = going_back();
    let _ = lose(&mut job, 1, 0, 0);
    job.shares[0].standby = None;
    let gone = job.check_suspected_hubs(|_| None, later(12.0));
    assert!(matches!(gone, Transition::BeganAgain { lost: Some(0), .. }), "{gone:?}");
    assert_eq!(begun_again(&gone), [0, 1], "it ends its part when it calls again");
}

#[test]
fn a_rank_that_is_lost_after_all_have_left_another_hub_has_made_all_steps() {
    for cause in [CauseKind::PeerLost, CauseKind::GaveUp] {
        let mut job = going_back();
        (0..2).for_each(|hub| job.hub_reserved(hub, 1, 1));
        let finished = JobEnd::finished(job.namespace);
        assert_eq!(job.hub_ended(0, &finished, later(9.0)), Transition::None);
        let lost = JobEnd::failed(job.namespace, "rank 1 was lost".into(), cause);
        assert_eq!(job.hub_ended(1, &lost, later(10.0)), Transition::Ended { stop: vec![] });
        assert_eq!(job.state(), JobState::Finished);
    }
    let mut job = going_back();
    (0..2).for_each(|hub| job.hub_reserved(hub, 1, 1));
    let _ = job.hub_ended(0, &JobEnd::finished(job.namespace), later(9.0));
    let broken = JobEnd::failed(job.namespace, "rank 1 broke a rule".into(), CauseKind::Known);
    let _ = job.hub_ended(1, &broken, later(10.0));
    assert_eq!(job.state(), JobState::Failed);
}
