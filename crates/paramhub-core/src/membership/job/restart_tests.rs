//! Jobs that a manager which has restarted finds in its store.

use super::tests::{
    call, epoch, fail_at, finish, hubs, information_book, init_answer, initialising, job, now, phase, placed,
    placing, process, running, settings,
};
use super::*;
use crate::auth::Proof;
use crate::membership::probes::CoreBandwidth;
use crate::service::{CauseKind, LeaveService};

/// The job as a manager that restarts finds it in the store.
fn restarted(job: &Job) -> Job {
    let stored = serde_json::to_vec(&job.record(now())).unwrap();
    let (job, transition) = Job::restore(serde_json::from_slice(&stored).unwrap(), now());
    assert_eq!(transition, Transition::None);
    job
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap()
}

#[test]
fn a_job_that_runs_goes_on_after_a_restart_if_its_hubs_still_have_it() {
    let mut before = running(2, 2);
    before.hub_counted(0, JobCounters { bytes_received: 5, ..JobCounters::default() }, &[0, 3]);
    before.hub_reserved(1, 7, 2);
    let mut after = restarted(&before);
    assert_eq!(json(&after.status(now())), json(&before.status(now())));
    assert_eq!(after.held(), (7, 2));
    assert_eq!(json(&init_answer(&after, 0).unwrap()), json(&init_answer(&before, 0).unwrap()));
    assert_eq!(*after.information_book().unwrap(), *before.information_book().unwrap());
    // A rank that lost its answer repeats its call, and another process cannot have the rank.
    assert!(matches!(after.submit(1, process(1), &settings(), now()), Ok(InitNext::Wait { .. })));
    assert_eq!(after.submit(1, process(9), &settings(), now()).unwrap_err().code, ErrorCode::RankTaken);
    assert_eq!(after.connect(&call(1, 9), now()).unwrap_err().code, ErrorCode::RankTaken);
    // Hubs count from the job's beginning.
    after.hub_counted(0, JobCounters { bytes_received: 6, ..JobCounters::default() }, &[0, 4]);
    assert_eq!((after.counters().bytes_received, after.left_out()), (6, vec![0, 4]));
    assert_eq!(after.hub_allocated(0, "hash", (None, None), now()), Transition::None);
    assert_eq!(after.hub_reported_all(0, now()), Transition::None);
    assert_eq!(after.state(), JobState::Running);
    // The other hub has lost it.
    assert_eq!(after.hub_reported_all(1, now()), Transition::Ended { stop: vec![0] });
    assert_eq!(after.message(), "hub 1 (10.0.0.1:7771) does not have the job any more");
}

#[test]
fn a_job_whose_hubs_end_while_the_manager_is_away_ends_as_they_report() {
    let mut finished = restarted(&running(2, 1));
    assert_eq!(finish(&mut finished, 0), Transition::Ended { stop: vec![] });
    assert_eq!(finished.hub_reported_all(0, now()), Transition::None);
    let mut failed = restarted(&running(2, 1));
    let _ = fail_at(&mut failed, 0, CauseKind::PeerLost, "rank 1 was lost");
    assert_eq!((failed.state(), failed.message()), (JobState::Failed, "rank 1 was lost"));
}

#[test]
fn ranks_of_a_job_that_begins_hand_in_their_settings_again_after_a_restart() {
    for mut job in [initialising(2, 1), placing(2, 1)].map(|job| restarted(&job)) {
        assert_eq!(phase(&job), JobPhase::Initialising);
        // The hub may have been asked before, and be done if it has no chunks.
        assert_eq!(job.hub_allocated(0, "hash", (None, None), now()), Transition::None);
        assert_eq!(finish(&mut job, 0), Transition::None);
        assert_eq!(job.hub_reported_all(0, now()), Transition::None);
        for rank in 0..2 {
            job.submit(rank, process(rank as u8), &settings(), now()).unwrap();
            assert_eq!(job.agree(rank).is_some(), rank == 1);
        }
        let book = information_book(&job);
        assert!(job.place(SettingsSummary::default(), vec![placed()], book));
        assert_eq!(job.hub_allocated(0, "hash", (None, None), now()), Transition::Advanced);
    }
}

#[test]
fn ranks_connect_again_after_a_restart_while_others_are_missing() {
    let mut before = job(2);
    before.connect(&call(1, 1), now()).unwrap();
    let mut after = restarted(&before);
    assert!(after.status(now()).connected.is_empty());
    // The first process to claim the rank has it.
    after.connect(&call(1, 2), now()).unwrap();
    after.connect(&call(0, 0), now()).unwrap();
    assert_eq!(after.begin_initialising(hubs(1), &CoreBandwidth::Unneeded), Transition::Advanced);
}

#[test]
fn a_restart_keeps_the_ranks_that_have_finished_without_a_hub() {
    let options = JobOptions { hubs: Some(0), ..JobOptions::default() };
    let request = CreateService { name: "x".into(), workers: 2, options };
    let mut job = Job::new(0, request, Namespace([1; 16]), Nonce([2; 32]), Some(epoch()), now());
    for rank in 0..2 {
        job.connect(&call(rank, rank as u8), now()).unwrap();
    }
    assert_eq!(job.begin_initialising(Vec::new(), &CoreBandwidth::Unneeded), Transition::Advanced);
    for rank in 0..2 {
        job = restarted(&job);
        let (incarnation, proof) = (process(rank as u8), Proof([0; 32]));
        let call =
            LeaveService { rank, incarnation, proof, reason: String::new(), finished: true, lost_hub: None };
        let _ = job.leave(&call, "", now()).unwrap();
    }
    assert_eq!(job.state(), JobState::Finished);
}

#[test]
fn a_restart_keeps_what_had_ended() {
    let mut before = running(2, 1);
    let counters = JobCounters { bytes_received: 5, ..JobCounters::default() };
    before.hub_counted(0, counters, &[0, 3]);
    let _ = fail_at(&mut before, 0, CauseKind::PeerLost, "rank 1 was lost");
    let after = restarted(&restarted(&before));
    assert_eq!(json(&after.status(now())), json(&before.status(now())));
    assert_eq!(after.status(now()).connected.len(), 2);
}

#[test]
fn a_record_without_ranks_and_hubs_ends_its_job() {
    let mut record = running(2, 1).record(now());
    record.members = None;
    let (job, transition) = Job::restore(record, now());
    assert_eq!(transition, Transition::Ended { stop: vec![] });
    assert!(job.message().contains("which ranks and hubs the job had"), "{}", job.message());
}
