//! Ranks that are lost while their job runs, and the processes that take them.

use super::losses::MembershipChange;
use super::tests::{
    call, init_answer, initialising_with, job_with, later, leave, now, process, running_with, settings,
};
use super::*;
use crate::auth::Purpose;
use crate::checkpoint::CheckpointStatus;
use crate::service::{JobEnd, LossCounters, OnWorkerLoss, StopWhen};

/// A running job of three workers and two hubs that goes on with so many workers.
fn outliving(min_workers: u32) -> Job {
    let options = JobOptions {
        on_worker_loss: OnWorkerLoss::Continue,
        min_workers,
        linger_s: 10.0,
        ..JobOptions::default()
    };
    running_with(3, 2, options)
}

fn changes(transition: Transition) -> Vec<MembershipChange> {
    match transition {
        Transition::MembershipChanged { changes, .. } => changes,
        other => panic!("{other:?}"),
    }
}

fn lose(job: &mut Job, rank: u32, epoch: u64) -> Transition {
    job.worker_lost((rank, epoch), &format!("rank {rank} was lost"), now())
}

fn lost(rank: u32, epoch: u64) -> Vec<MembershipChange> {
    vec![MembershipChange::Lose { rank, epoch, reason: format!("rank {rank} was lost") }]
}

/// Rank 1 is lost, as hubs hear that have not heard of it before.
fn taken_in(epoch: u64) -> MembershipChange {
    MembershipChange::Lose { rank: 1, epoch, reason: "another process takes rank 1".into() }
}

/// Rank 1 is lost, and process 7 calls for it.
fn taken(min_workers: u32) -> Job {
    let mut job = outliving(min_workers);
    assert_eq!(changes(lose(&mut job, 1, 1)), lost(1, 2));
    job.connect(&call(1, 7), later(1.0)).unwrap();
    job
}

fn submit(job: &mut Job) -> InitNext {
    job.submit(1, process(7), &settings(), later(1.0)).unwrap()
}

/// Lets both hubs answer.
fn join(job: &mut Job) {
    let expected = MembershipChange::Expect { rank: 1, epoch: 3 };
    assert_eq!(changes(job.join(1)), [taken_in(2), expected]);
    assert_eq!(job.rank_expected(0, (1, 3), Some(8)), Transition::None);
    let named = changes(job.rank_expected(1, (1, 3), Some(6)));
    assert_eq!(
        named,
        [MembershipChange::Join { rank: 1, epoch: 3, step: Some(8) }],
        "the latest of all hubs"
    );
    assert_eq!(job.rank_joined(1, (1, 3), later(1.0)), Transition::None);
    assert!(job.is_joining(1));
    assert!(changes(job.rank_joined(0, (1, 3), later(1.0))).is_empty());
}

#[test]
fn a_lost_rank_begins_an_epoch_once() {
    let mut job = outliving(1);
    assert_eq!(changes(lose(&mut job, 1, 1)), lost(1, 2));
    assert_eq!(lose(&mut job, 1, 1), Transition::None, "the other hub reports it, too");
    assert_eq!(changes(lose(&mut job, 0, 1)), lost(0, 3));
    let status = job.status(now());
    assert_eq!((status.lost, status.connected, status.epoch), (vec![0, 1], vec![2], 3));
    assert_eq!(job.state(), JobState::Running);
    let mut job = running_with(3, 2, JobOptions::default());
    assert_eq!(lose(&mut job, 1, 1), Transition::None, "its hubs end such a job");
}

#[test]
fn what_an_earlier_manager_could_not_save_is_decided_again() {
    let mut job = outliving(1);
    assert_eq!(changes(lose(&mut job, 1, 2)), lost(1, 3), "a hub knows since epoch 2 that it is lost");
    assert_eq!(lose(&mut job, 1, 2), Transition::None, "the other hub reports it, too");
    assert_eq!(changes(lose(&mut job, 1, 7)), lost(1, 8), "a process that is not known had taken it");
    assert_eq!(lose(&mut job, 1, u64::MAX), Transition::None, "no manager has begun so many epochs");
    job.connect(&call(1, 7), now()).unwrap();
    assert_eq!(lose(&mut job, 1, 8), Transition::None);
    // The hubs expect a process that is not known.
    let mut job = outliving(1);
    let Transition::MembershipChanged { changes, .. } = job.process_expected(0, (1, 3), Some(8), now())
    else {
        panic!()
    };
    assert!(matches!(changes[..], [MembershipChange::Lose { rank: 1, epoch: 4, .. }]), "{changes:?}");
    assert_eq!(
        job.process_expected(1, (1, 3), Some(8), now()),
        Transition::None,
        "the other hub expects it, too"
    );
}

#[test]
fn another_process_takes_the_rank_of_one_that_has_left() {
    let mut job = outliving(1);
    job.worker_left((1, 7));
    assert!(job.connect(&call(1, 7), now()).is_err(), "it has left in no such epoch");
    job.worker_left((1, 1));
    job.connect(&call(1, 7), now()).unwrap();
    assert_eq!(job.connect(&call(1, 8), now()).unwrap_err().code, ErrorCode::Busy, "one process has it");
    submit(&mut job);
    join(&mut job);
    assert_eq!(job.joined_at(1), Some(8));
    assert!(job.connect(&call(1, 8), now()).is_err(), "the process that has taken it has not left");
}

#[test]
fn a_job_that_has_finished_at_a_hub_finishes_at_the_others() {
    let with_chunks = || {
        let mut job = outliving(3);
        (0..2).for_each(|hub| job.hub_reserved(hub, 0, 3));
        job
    };
    let mut job = with_chunks();
    (0..3).for_each(|rank| job.worker_left((rank, 1)));
    job.connect(&call(1, 7), now()).unwrap();
    submit(&mut job);
    let _ = job.join(1);
    let end = JobEnd::finished(job.namespace);
    assert_eq!(
        changes(job.hub_ended(0, &end, now())),
        [MembershipChange::Finish],
        "nobody is awaited for rank 1"
    );
    // A process dies while it leaves, and the other hub reports that later.
    let mut job = with_chunks();
    (0..3).for_each(|rank| job.worker_left((rank, 1)));
    let end = JobEnd::finished(job.namespace);
    assert_eq!(job.hub_ended(0, &end, now()), Transition::None, "all are about to leave the other hub, too");
    assert_eq!(changes(lose(&mut job, 1, 1)), [lost(1, 2), vec![MembershipChange::Finish]].concat());
    assert!(matches!(job.hub_ended(1, &end, now()), Transition::Ended { .. }));
    assert_eq!(job.state(), JobState::Finished);
    // A hub without chunks has finished before anybody has left.
    let mut job = outliving(3);
    let end = JobEnd::finished(job.namespace);
    assert_eq!(job.hub_ended(0, &end, now()), Transition::None);
    assert_eq!(changes(lose(&mut job, 1, 1)), lost(1, 2));
}

#[test]
fn a_hub_without_chunks_neither_finishes_a_job_nor_is_awaited_by_one_that_joins() {
    let mut job = taken(1);
    job.hub_reserved(1, 0, 3);
    submit(&mut job);
    changes(job.join(1));
    assert_eq!(job.rank_expected(1, (1, 3), Some(6)), Transition::None, "the other hub has not answered");
    // It says to a manager that has restarted that it was done when it had allocated.
    let end = JobEnd::finished(job.namespace);
    let named = changes(job.hub_ended(0, &end, now()));
    assert_eq!(named, [MembershipChange::Join { rank: 1, epoch: 3, step: Some(6) }]);
    assert!(changes(job.rank_joined(1, (1, 3), now())).is_empty());
    assert!(!job.is_joining(1));
    // Or when the last answer of the other is here already.
    let mut job = taken(1);
    submit(&mut job);
    changes(job.join(1));
    (0..2).for_each(|hub| drop(job.rank_expected(hub, (1, 3), Some(6))));
    assert_eq!(job.rank_joined(1, (1, 3), now()), Transition::None);
    assert!(changes(job.hub_ended(0, &end, now())).is_empty());
    assert!(!job.is_joining(1));
    // While all ranks are lost, nobody has left.
    let mut job = outliving(1);
    job.hub_reserved(1, 0, 3);
    (0..3).for_each(|rank| drop(lose(&mut job, rank, 1)));
    assert_eq!(job.hub_ended(0, &end, now()), Transition::None);
    assert_eq!(job.state(), JobState::Running);
}

#[test]
fn the_rank_of_a_process_that_has_called_twice_and_gone_is_free() {
    let mut job = taken(1);
    job.connect(&call(1, 7), later(2.0)).unwrap();
    assert_eq!(job.connect(&call(1, 8), later(3.9)).unwrap_err().code, ErrorCode::Busy);
    job.connect(&call(1, 8), later(4.0)).unwrap();
}

#[test]
fn another_process_takes_a_lost_rank_with_a_secret_of_its_own() {
    let mut job = taken(1);
    let [former, own] = [1, 3].map(|since| job.epoch.unwrap().of_rank(1, since));
    assert_ne!(former, own);
    assert_eq!(job.call_secrets(1, Purpose::Init), [Some(own), None]);
    let answer = job.connect_answer(1, process(7), &mut calls::AnswersBySite::new()).unwrap().answer();
    assert_eq!((answer.epoch, answer.secrets.unwrap().rank), (3, own));
    assert!(job.connect(&call(1, 8), later(1.0)).is_err(), "one process has it");
    assert!(job.connect(&call(2, 9), later(1.0)).is_err(), "rank 2 is not lost");
    assert!(matches!(submit(&mut job), InitNext::Join { .. }));
    join(&mut job);
    assert_eq!(init_answer(&job, 1).unwrap().resumed_step, Some(8));
    assert_eq!(init_answer(&job, 0).unwrap().resumed_step, None);
    assert!(job.status(now()).lost.is_empty());
    assert_eq!(lose(&mut job, 1, 1), Transition::None, "a late report about the former process");
    assert_eq!(changes(lose(&mut job, 1, 3)), lost(1, 4));
}

#[test]
fn a_process_that_goes_before_it_has_joined_gives_the_rank_up() {
    // Nobody waits for a process that has only connected, but its rank is free for others soon.
    let mut job = taken(1);
    assert_eq!(job.check_time(later(30.0)), Transition::None);
    job.connect(&call(1, 8), later(31.0)).unwrap();
    assert_eq!(job.status(now()).epoch, 5, "one for the loss of the process that has gone");
    let InitNext::Join { .. } = job.submit(1, process(8), &settings(), later(31.0)).unwrap() else {
        panic!("it joins")
    };
    let expected = MembershipChange::Expect { rank: 1, epoch: 5 };
    assert_eq!(changes(job.join(1)), [taken_in(4), expected]);
    // One that says so gives it up at once.
    let mut job = taken(1);
    let leaves = leave(&mut job, 1, 7, "it has no memory left").unwrap();
    assert!(matches!(changes(leaves)[..], [MembershipChange::Lose { rank: 1, epoch: 4, .. }]));
    job.connect(&call(1, 8), later(1.0)).unwrap();
    // The hubs wait for a process that has sent its settings.
    let mut job = taken(1);
    let InitNext::Join { ticket, .. } = submit(&mut job) else { panic!("it joins") };
    changes(job.join(1));
    assert_eq!(job.rank_expected(0, (1, 3), Some(8)), Transition::None);
    job.init_dropped(1, ticket, later(2.0));
    assert_eq!(job.check_time(later(3.9)), Transition::None);
    let gone = changes(job.check_time(later(4.0)));
    assert!(matches!(&gone[..], [MembershipChange::Lose { rank: 1, epoch: 4, .. }]), "{gone:?}");
    assert_eq!(job.rank_expected(1, (1, 3), Some(8)), Transition::None);
    job.connect(&call(1, 8), later(4.0)).unwrap();
}

#[test]
fn a_job_waits_for_others_only_so_long() {
    let mut job = outliving(2);
    changes(lose(&mut job, 1, 1));
    assert_eq!(job.check_time(later(100.0)), Transition::None, "two are enough");
    changes(job.worker_lost((2, 1), "rank 2 was lost", later(100.0)));
    assert_eq!(job.check_time(later(109.0)), Transition::None);
    assert!(matches!(job.check_time(later(110.0)), Transition::Ended { .. }));
    let expected = "ranks 1 and 2 were lost, and no other process has come for 10 s (linger_s)";
    assert!(job.message().starts_with(expected), "{}", job.message());
    // A process that takes a rank ends the wait.
    let mut job = taken(3);
    submit(&mut job);
    join(&mut job);
    assert_eq!(job.check_time(later(100.0)), Transition::None);
}

#[test]
fn a_manager_that_restarts_knows_who_is_lost_and_who_was_about_to_come() {
    let mut before = taken(2);
    let (mut job, _) = Job::restore(before.record(now()), later(50.0));
    assert_eq!((job.status(now()).lost, job.status(now()).epoch), (vec![1], 3));
    // A hub that has the job hears of the loss again, for it may not have heard of it.
    let again = changes(job.hub_allocated(0, "hash", (None, None), later(50.0)));
    assert!(matches!(&again[..], [MembershipChange::Lose { rank: 1, epoch: 2, .. }]), "{again:?}");
    // The process repeats its call.
    assert!(job.connect(&call(1, 8), later(50.0)).is_err());
    job.connect(&call(1, 7), later(50.0)).unwrap();
    assert!(matches!(submit(&mut job), InitNext::Join { .. }));
    changes(job.join(1));
    // The other hub, which may not have heard of the process either, has the job, too.
    let again = changes(job.hub_allocated(1, "hash", (None, None), later(50.0)));
    assert!(matches!(
        again[..],
        [MembershipChange::Lose { .. }, MembershipChange::Expect { rank: 1, epoch: 3 }]
    ));
    join(&mut job);
    assert_eq!(init_answer(&job, 1).unwrap().resumed_step, Some(8));
    let (job, _) = Job::restore(job.record(now()), later(90.0));
    assert_eq!(init_answer(&job, 1).unwrap().resumed_step, Some(8), "for a process that asks again");
    assert_eq!(job.status(now()).epoch, 3);
    // A rank that is lost stays so.
    changes(before.rank_lost_again(1, now()));
    let (mut job, _) = Job::restore(before.record(now()), later(50.0));
    let again = changes(job.hub_allocated(0, "hash", (None, None), later(50.0)));
    assert!(matches!(&again[..], [MembershipChange::Lose { rank: 1, epoch: 4, .. }]), "{again:?}");
    let (mut job, _) = Job::restore(outliving(3).record(now()), now());
    assert_eq!(job.hub_allocated(0, "hash", (None, None), now()), Transition::None);
}

/// A running job of four ranks that has begun with two.
fn elastic() -> Job {
    let options = JobOptions {
        on_worker_loss: OnWorkerLoss::Continue,
        start_workers: Some(2),
        linger_s: 10.0,
        ..JobOptions::default()
    };
    running_with(4, 1, options)
}

#[test]
fn a_job_begins_with_its_first_ranks_and_takes_others_while_it_runs() {
    let mut job = elastic();
    let status = job.status(now());
    assert_eq!((status.connected, status.lost, status.workers), (vec![0, 1], vec![], 4));
    job.connect(&call(3, 7), later(1.0)).unwrap();
    assert!(matches!(job.submit(3, process(7), &settings(), later(1.0)), Ok(InitNext::Join { .. })));
    let expected = MembershipChange::Expect { rank: 3, epoch: 2 };
    assert_eq!(changes(job.join(3)).last(), Some(&expected));
    let named = changes(job.rank_expected(0, (3, 2), Some(5)));
    assert_eq!(named, [MembershipChange::Join { rank: 3, epoch: 2, step: Some(5) }]);
    let Transition::MembershipChanged { message, .. } = job.rank_joined(0, (3, 2), later(1.0)) else {
        panic!("the rank is a member now")
    };
    assert_eq!(message, "rank 3 has joined: 3 of 4 workers");
    assert_eq!(job.status(now()).connected, [0, 1, 3]);
    assert_eq!(counted(&job, later(5.0)), (0, 1, 0.0), "it never had fewer workers than at the beginning");
    // With as many as at the beginning no time is counted.
    changes(job.worker_lost((3, 2), "rank 3 was lost", later(6.0)));
    assert_eq!(job.status(now()).lost, [3]);
    assert_eq!(counted(&job, later(9.0)), (1, 1, 0.0));
    changes(job.worker_lost((1, 1), "rank 1 was lost", later(10.0)));
    assert_eq!(counted(&job, later(12.0)), (2, 1, 2.0));
}

#[test]
fn a_rank_that_may_join_later_waits_until_the_job_runs() {
    let options = JobOptions {
        on_worker_loss: OnWorkerLoss::Continue,
        start_workers: Some(2),
        ..JobOptions::default()
    };
    let mut job = job_with(3, options);
    let refused = job.connect(&call(2, 7), now()).unwrap_err();
    assert_eq!(refused.code, ErrorCode::Busy);
    assert_eq!(refused.message, "job `x` begins with 2 of its 3 workers, and rank 2 can join when it runs");
    assert!(job.status(now()).lost.is_empty() && !job.is_complete());
}

#[test]
fn a_manager_that_restarts_knows_which_ranks_nobody_has_had() {
    let (job, _) = Job::restore(elastic().record(now()), later(5.0));
    let status = job.status(later(5.0));
    assert_eq!((status.connected, status.lost, job.version_1_ranks()), (vec![0, 1], vec![], vec![]));
    assert_eq!(counted(&job, later(9.0)), (0, 0, 0.0));
    let mut job = elastic();
    assert!(matches!(job.fail(ErrorCode::JobEnded, "stopped".into(), now()), Transition::Ended { .. }));
    assert_eq!(job.status(now()).connected, [0, 1]);
    // One that was opening waits for the settings of the first ranks alone.
    let options = JobOptions {
        on_worker_loss: OnWorkerLoss::Continue,
        start_workers: Some(2),
        ..JobOptions::default()
    };
    let (mut job, _) = Job::restore(initialising_with(3, 1, options).record(now()), later(1.0));
    for rank in 0..2 {
        job.submit(rank, process(rank as u8), &settings(), later(1.0)).unwrap();
    }
    assert!(job.agree(0).is_none());
    assert!(job.agree(1).is_some(), "nobody else is awaited");
}

/// Workers lost, ranks taken by other processes, and seconds with a lost rank.
fn counted(job: &Job, now: Now) -> (u64, u64, f64) {
    let LossCounters { workers_lost, workers_joined, incomplete_seconds } = job.losses(now).unwrap();
    (workers_lost, workers_joined, incomplete_seconds)
}

#[test]
fn losses_and_those_who_take_the_ranks_are_counted_and_the_time_in_between() {
    let mut job = taken(1);
    assert_eq!(counted(&job, later(1.0)), (1, 0, 1.0), "while it lasts");
    submit(&mut job);
    join(&mut job);
    assert_eq!(counted(&job, later(9.0)), (1, 1, 1.0));
    assert_eq!(job.status(later(9.0)).losses, job.losses(later(9.0)));
    // While two are lost the time passes once.
    changes(job.worker_lost((0, 1), "rank 0 was lost", later(10.0)));
    changes(job.worker_lost((2, 1), "rank 2 was lost", later(12.0)));
    assert_eq!(counted(&job, later(14.0)), (3, 1, 5.0));
    // A process that gives a rank up before it has joined is no worker that was lost.
    job.connect(&call(0, 8), later(14.0)).unwrap();
    changes(job.rank_lost_again(0, later(14.0)));
    assert_eq!(counted(&job, later(14.0)), (3, 1, 5.0));
    // The time ends with the job.
    assert!(matches!(job.fail(ErrorCode::JobEnded, "stopped".into(), later(15.0)), Transition::Ended { .. }));
    assert_eq!(counted(&job, later(100.0)), (3, 1, 6.0));
    let (job, _) = Job::restore(job.record(later(100.0)), later(200.0));
    assert_eq!(counted(&job, later(200.0)), (3, 1, 6.0), "a manager that restarts remembers it");
    assert_eq!(running_with(3, 2, JobOptions::default()).losses(now()), None, "such a job fails instead");
}

#[test]
fn the_time_with_a_lost_rank_goes_on_while_the_manager_restarts() {
    let mut job = outliving(1);
    changes(lose(&mut job, 1, 1));
    let (mut job, _) = Job::restore(job.record(later(3.0)), later(8.0));
    assert_eq!(counted(&job, later(9.0)), (1, 0, 9.0));
    job.connect(&call(1, 7), later(9.0)).unwrap();
    job.submit(1, process(7), &settings(), later(9.0)).unwrap();
    changes(job.join(1));
    for hub in [0, 1] {
        let _ = job.rank_expected(hub, (1, 3), Some(8));
        let _ = job.rank_joined(hub, (1, 3), later(10.0));
    }
    assert_eq!(counted(&job, later(20.0)), (1, 1, 10.0));
    // Nothing is lost while it restarts once more.
    let (job, _) = Job::restore(job.record(later(20.0)), later(30.0));
    assert_eq!(counted(&job, later(40.0)), (1, 1, 10.0));
}

/// A job with checkpoints at two hubs has lost all of its three workers, and its time for others is over.
fn waiting_in_vain() -> (Job, String) {
    let options = JobOptions {
        on_worker_loss: OnWorkerLoss::Continue,
        linger_s: 10.0,
        checkpoint_every: Some("100".parse().unwrap()),
        ..JobOptions::default()
    };
    let mut job = running_with(3, 2, options);
    for hub in 0..2 {
        job.hub_reserved(hub, 100, 3);
        job.hub_kept(hub, CheckpointStatus { step: Some(100), ..CheckpointStatus::default() });
    }
    (0..3).for_each(|rank| drop(lose(&mut job, rank, 1)));
    assert_eq!(job.check_time(later(9.9)), Transition::None);
    let asked = job.check_time(later(10.0));
    let Transition::AskHubs { hubs, reason, when: StopWhen::WorkersEnding } = asked else {
        panic!("{asked:?}")
    };
    assert_eq!(hubs, [0, 1]);
    assert!(reason.contains("no other process has come for 10 s"), "{reason}");
    (job, reason)
}

#[test]
fn a_job_for_which_nobody_comes_fails_when_its_last_checkpoint_is_written() {
    let (mut job, reason) = waiting_in_vain();
    // A process comes too late, while the hubs may have gone back already.
    job.connect(&call(1, 7), later(10.5)).unwrap();
    submit(&mut job);
    assert_eq!(job.join(1), Transition::None);
    for hub in 0..2 {
        assert_eq!(job.check_time(later(11.0)), Transition::None, "hub {hub} has not written its part");
        job.hub_kept(hub, CheckpointStatus { step: Some(123), ..CheckpointStatus::default() });
        job.hub_kept_last(hub);
    }
    assert!(matches!(job.check_time(later(11.0)), Transition::Ended { .. }));
    let status = job.status(later(11.0));
    assert_eq!(status.state, JobState::Failed);
    assert!(status.message.starts_with(&reason), "{}", status.message);
    assert!(status.message.contains("checkpoint, of step 123, has been written"), "{}", status.message);
}

#[test]
fn a_job_whose_hubs_have_no_last_checkpoint_in_common_says_so() {
    let (mut job, _) = waiting_in_vain();
    job.hub_kept(0, CheckpointStatus { step: Some(123), ..CheckpointStatus::default() });
    job.hub_kept_last(0);
    assert_eq!(job.check_time(later(69.0)), Transition::None);
    assert!(matches!(job.check_time(later(70.0)), Transition::Ended { .. }), "hub 1 does not answer");
    let message = job.status(later(70.0)).message;
    assert!(message.contains("No checkpoint of its last step could be written"), "{message}");
}
