//! The ends of jobs, and their causes.

use super::tests::{
    call, fail_at, finish, hubs, initialising, job, later, lose, now, phase, placing, running,
};
use super::*;
use crate::service::{CauseKind, JobEnd};

/// The launcher of a job whose workers have all left asks before the hubs have reported that.
#[test]
fn a_job_whose_workers_have_left_finishes_although_its_launcher_is_quicker_than_its_hubs() {
    let mut job = running(2, 2);
    let reason = "stopped: its workers ended without leaving".to_string();
    let asked =
        Transition::AskHubs { hubs: vec![0, 1], reason: reason.clone(), when: StopWhen::WorkersEnded };
    assert_eq!(job.conclude(reason, now()), asked);
    assert_eq!(job.state(), JobState::Running, "the hubs decide");
    assert_eq!(finish(&mut job, 0), Transition::None);
    assert_eq!(finish(&mut job, 1), Transition::Ended { stop: vec![] });
    assert_eq!((job.state(), &*job.status(now()).message), (JobState::Finished, ""));
    assert_eq!(job.check_time(later(1e6)), Transition::None);
}

#[test]
fn the_first_report_of_a_hub_on_how_a_job_ended_is_final() {
    let mut job = running(1, 2);
    let _ = finish(&mut job, 0);
    let reason = "stopped: its workers ended without leaving".to_string();
    let asked = Transition::AskHubs { hubs: vec![1], reason: reason.clone(), when: StopWhen::WorkersEnded };
    assert_eq!(job.conclude(reason, now()), asked);
    // The hub was asked before its report had arrived, and does not know the job any more.
    assert_eq!(fail_at(&mut job, 0, CauseKind::Hearsay, "stopped"), Transition::None);
    assert!(matches!(finish(&mut job, 1), Transition::Ended { .. }));
    assert_eq!(job.state(), JobState::Finished);
}

#[test]
fn a_job_whose_workers_have_ended_fails_with_what_its_hubs_say() {
    let mut job = running(2, 1);
    let _ = job.conclude("stopped: its worker 0 exited with 1".into(), now());
    let message = "rank 1 was lost: it has not been heard for 30 s";
    assert!(matches!(fail_at(&mut job, 0, CauseKind::PeerLost, message), Transition::Ended { .. }));
    assert_eq!(job.status(now()).message, message);
}

#[test]
fn a_job_whose_hubs_do_not_answer_ends_with_the_reason_of_its_launcher() {
    let mut job = running(2, 1);
    let reason = "stopped: its workers ended without leaving";
    let _ = job.conclude(reason.into(), now());
    assert_eq!(job.check_time(later(359.0)), Transition::None);
    assert_eq!(job.check_time(later(361.0)), Transition::Ended { stop: vec![0] });
    assert_eq!(job.status(now()).message, reason);
}

#[test]
fn a_job_that_no_hub_serves_yet_ends_with_its_workers() {
    for mut job in [job(2), initialising(2, 1), placing(2, 1)] {
        let _ = job.conclude("stopped: its workers ended without joining".into(), now());
        assert_eq!(job.status(now()).message, "stopped: its workers ended without joining");
        assert_eq!(job.state(), JobState::Failed);
    }
}

#[test]
fn an_announced_end_explains_the_ranks_that_are_lost_after_it() {
    let mut job = running(2, 2);
    let reason = "stopped: its launcher was interrupted by SIGTERM";
    let hubs = vec![0, 1];
    let asked = Transition::AskHubs { hubs, reason: reason.into(), when: StopWhen::WorkersEnding };
    assert_eq!(job.announce(reason.into(), now()), asked);
    assert!(!job.is_kept() && job.state() == JobState::Running);
    job.hub_kept_last(0);
    assert!(!job.is_kept());
    job.hub_kept_last(1);
    assert!(job.is_kept());
    let _ = fail_at(&mut job, 1, CauseKind::PeerLost, "rank 0 was lost");
    assert_eq!(job.status(now()).message, reason);
    let _ = fail_at(&mut job, 0, CauseKind::GaveUp, "rank 1 gave up");
    assert_eq!(job.status(now()).message, reason);
}

#[test]
fn workers_that_leave_after_an_announced_end_finish_their_job() {
    let mut job = running(2, 1);
    let _ = job.announce("stopped: its launcher was interrupted by SIGTERM".into(), now());
    assert!(matches!(finish(&mut job, 0), Transition::Ended { .. }));
    assert_eq!((job.state(), &*job.status(now()).message), (JobState::Finished, ""));
}

#[test]
fn a_hub_that_shuts_down_is_named_although_another_hub_was_quicker_to_blame_a_rank() {
    let mut job = running(2, 2);
    let blamed = fail_at(
        &mut job,
        1,
        CauseKind::PeerLost,
        "rank 1 was lost: its connection ended without a leave message",
    );
    assert_eq!(blamed, Transition::Ended { stop: vec![0] });
    assert_eq!(fail_at(&mut job, 0, CauseKind::Known, "the hub is shutting down"), Transition::Explained);
    assert_eq!(
        (job.status(now()).message.as_str(), phase(&job)),
        ("the hub is shutting down", JobPhase::Cleared)
    );
    // Ranks that come late get the same message.
    let refused = job.connect(&call(0, 0), now()).unwrap_err();
    assert!(refused.message.contains("the hub is shutting down"), "{}", refused.message);
}

#[test]
fn a_hub_that_was_cut_off_says_so_when_it_is_back_under_another_number() {
    let mut job = running(2, 1);
    let _ = job.conclude("stopped: its worker 0 exited with 1".into(), now());
    let _ = lose(&mut job, 0, "hub 0 (10.0.0.0:7771) was lost");
    assert_eq!(job.status(now()).message, "hub 0 (10.0.0.0:7771) was lost");
    let reason = "the hub's interface eth1 (10.0.0.0) is down: it has lost its carrier";
    let end = JobEnd { ago_s: 20.0, ..JobEnd::failed(job.namespace, reason.into(), CauseKind::Known) };
    let shapes = hubs(2).into_iter().map(|(_, (shape, _))| shape).collect::<Vec<_>>();
    assert_eq!(job.former_hub_ended(&shapes[1], &end, now()), Transition::None, "another hub");
    assert_eq!(job.former_hub_ended(&shapes[0], &end, now()), Transition::Explained);
    assert_eq!(job.status(now()).message, reason);
}
