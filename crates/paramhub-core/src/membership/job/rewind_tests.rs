//! Jobs whose ranks all go back to an earlier step when one of them is lost.

use super::losses::MembershipChange;
use super::tests::{call, init_answer, later, leave, now, process, running_with, settings};
use super::*;
use crate::auth::Purpose;
use crate::service::{JobEnd, OnWorkerLoss};

const REASON: &str = "rank 1 was lost";

/// A running job of three workers and two hubs that goes back to an earlier step.
fn rewinding() -> Job {
    let options = JobOptions {
        on_worker_loss: OnWorkerLoss::Rewind,
        rewind_every: 4,
        linger_s: 60.0,
        ..JobOptions::default()
    };
    let mut job = running_with(3, 2, options);
    (0..2).for_each(|hub| job.hub_reserved(hub, 0, 3));
    job
}

fn changes(transition: Transition) -> Vec<MembershipChange> {
    match transition {
        Transition::MembershipChanged { changes, .. } => changes,
        other => panic!("{other:?}"),
    }
}

fn rewind(epoch: u64) -> MembershipChange {
    MembershipChange::Rewind { rank: Some(1), epoch, reason: REASON.into() }
}

fn expect((rank, epoch): (u32, u64)) -> MembershipChange {
    MembershipChange::Expect { rank, epoch }
}

fn lose(job: &mut Job, epoch: u64) -> Transition {
    job.worker_lost((1, epoch), REASON, later(1.0))
}

/// The job after the loss of rank 1.
fn lost() -> Job {
    let mut job = rewinding();
    assert_eq!(changes(lose(&mut job, 1)), [rewind(2)]);
    job
}

/// A process of this number takes a rank and hands in its settings. Returns what hubs hear of it, and the call's ticket.
fn come(job: &mut Job, rank: u32, number: u8) -> (Vec<MembershipChange>, u64) {
    job.connect(&call(rank, number), later(2.0)).unwrap();
    submit(job, rank, number)
}

fn submit(job: &mut Job, rank: u32, number: u8) -> (Vec<MembershipChange>, u64) {
    let InitNext::Join { ticket, .. } = job.submit(rank, process(number), &settings(), later(2.0)).unwrap()
    else {
        panic!("it joins")
    };
    (changes(job.join(rank)), ticket)
}

/// Each rank has a process again, since epochs 3 to 5: the hubs were told.
fn complete() -> Job {
    let mut job = lost();
    for rank in [0, 2] {
        assert!(come(&mut job, rank, 10 + rank as u8).0.is_empty(), "rank 1 has no process");
    }
    let told = come(&mut job, 1, 11).0;
    assert_eq!(told, [rewind(2), expect((0, 3)), expect((1, 5)), expect((2, 4))]);
    job
}

/// Lets both hubs name the steps 8 and 4 for a rank and let it join.
fn join(job: &mut Job, rank: u32, epoch: u64) {
    assert_eq!(job.rank_expected(0, (rank, epoch), Some(8)), Transition::None);
    let named = changes(job.rank_expected(1, (rank, epoch), Some(4)));
    assert_eq!(named, [MembershipChange::Join { rank, epoch, step: Some(4) }], "the earliest of all hubs");
    assert_eq!(job.rank_joined(1, (rank, epoch), later(3.0)), Transition::None);
    assert!(changes(job.rank_joined(0, (rank, epoch), later(3.0))).is_empty());
}

fn losses(job: &Job) -> (u64, u64) {
    let counted = job.losses(later(3.0)).unwrap();
    (counted.workers_lost, counted.workers_joined)
}

#[test]
fn all_ranks_are_lost_with_the_first_in_one_epoch() {
    let mut job = lost();
    let status = job.status(now());
    assert_eq!((status.lost, status.epoch), (vec![0, 1, 2], 2));
    assert_eq!(losses(&job), (1, 0), "one worker was lost, and the others go back with it");
    assert_eq!(lose(&mut job, 1), Transition::None, "the other hub reports it, too");
    assert_eq!(
        job.worker_lost((0, 1), "rank 0 was lost", later(1.0)),
        Transition::None,
        "it is lost already"
    );
}

#[test]
fn ranks_begin_anew_if_a_hub_has_no_parameters_yet() {
    let mut job = complete();
    for (rank, epoch) in [(0, 3), (1, 5), (2, 4)] {
        assert_eq!(job.rank_expected(0, (rank, epoch), Some(0)), Transition::None);
        let named = changes(job.rank_expected(1, (rank, epoch), None));
        assert_eq!(named, [MembershipChange::Join { rank, epoch, step: None }]);
        (0..2).for_each(|hub| drop(job.rank_joined(hub, (rank, epoch), later(3.0))));
    }
    assert!(job.status(now()).lost.is_empty());
    for rank in 0..3 {
        let answer = init_answer(&job, rank).unwrap();
        assert_eq!((answer.resumed_step, answer.joined_running), (None, false), "as at the beginning");
    }
}

#[test]
fn hubs_hear_of_processes_when_each_rank_has_one() {
    let mut job = complete();
    for (rank, epoch) in [(2, 4), (0, 3), (1, 5)] {
        assert!(job.status(now()).lost.contains(&rank));
        join(&mut job, rank, epoch);
    }
    assert!(job.status(now()).lost.is_empty());
    assert_eq!(losses(&job), (1, 3));
    for rank in 0..3 {
        assert_eq!(init_answer(&job, rank).unwrap().resumed_step, Some(4));
    }
    assert_eq!(job.hub_allocated(0, "hash", (None, None), later(4.0)), Transition::None, "it is over");
    assert_eq!(lose(&mut job, 1), Transition::None, "a late report about the former process");
    assert_eq!(changes(lose(&mut job, 5)), [rewind(6)], "the next one");
}

#[test]
fn a_process_that_goes_while_others_are_missing_concerns_its_rank_alone() {
    let mut job = lost();
    let (_, ticket) = come(&mut job, 0, 10);
    come(&mut job, 2, 12);
    job.init_dropped(0, ticket, later(3.0));
    assert_eq!(job.check_time(later(4.9)), Transition::None, "it may call again");
    assert!(changes(job.check_time(later(5.0))).is_empty(), "hubs have never heard of it");
    assert_eq!(job.ranks_without_process(), [0, 1]);
    // Its call comes late, and is refused in such a way that it begins again.
    assert_eq!(init_answer(&job, 0).unwrap_err().code, ErrorCode::Busy);
    assert!(come(&mut job, 1, 11).0.is_empty());
    // One that says that it gives up is replaced at once.
    assert!(changes(leave(&mut job, 1, 11, "it has no memory left").unwrap()).is_empty());
    assert!(come(&mut job, 1, 21).0.is_empty());
    let told = come(&mut job, 0, 20).0;
    assert_eq!(told, [rewind(2), expect((0, 7)), expect((1, 6)), expect((2, 4))]);
}

#[test]
fn all_ranks_are_lost_again_when_a_process_goes_of_which_hubs_have_heard() {
    let mut job = complete();
    join(&mut job, 0, 3);
    let gone = changes(leave(&mut job, 2, 12, "it has no memory left").unwrap());
    assert!(matches!(&gone[..], [MembershipChange::Rewind { rank: Some(2), epoch: 6, .. }]), "{gone:?}");
    assert_eq!(job.status(now()).lost, [0, 1, 2]);
    for rank in [1, 2] {
        let refused = init_answer(&job, rank).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Busy, "it begins again");
        assert!(refused.to_string().contains("begin again with ConnectService"), "{refused}");
    }
    // The answers of hubs to the earlier epoch change nothing.
    assert_eq!(job.rank_expected(0, (1, 5), Some(8)), Transition::None);
    assert_eq!(job.rank_joined(0, (1, 5), later(3.0)), Transition::None);
    // A member that hubs report as lost before all others have joined takes all with it, too.
    let mut job = complete();
    join(&mut job, 1, 5);
    assert_eq!(changes(lose(&mut job, 5)), [rewind(6)]);
    assert_eq!(losses(&job), (2, 1));
}

#[test]
fn one_process_cannot_take_the_place_of_another_of_which_hubs_have_heard() {
    let mut job = complete();
    let InitNext::Join { ticket, .. } = job.submit(2, process(12), &settings(), later(2.0)).unwrap() else {
        panic!("it joins")
    };
    job.init_dropped(2, ticket, later(3.0));
    assert_eq!(job.connect(&call(2, 22), later(6.0)).unwrap_err().code, ErrorCode::Busy);
    assert!(matches!(
        changes(job.check_time(later(6.0)))[..],
        [MembershipChange::Rewind { rank: Some(2), epoch: 6, .. }]
    ));
    job.connect(&call(2, 22), later(6.0)).unwrap();
}

#[test]
fn the_rank_of_a_process_that_has_left_is_free_when_another_is_lost() {
    let mut job = rewinding();
    job.worker_left((0, 1));
    assert_eq!(
        job.connect(&call(0, 10), now()).unwrap_err().code,
        ErrorCode::Busy,
        "the others still need no one"
    );
    changes(lose(&mut job, 1));
    assert!(come(&mut job, 0, 10).0.is_empty());
}

#[test]
fn a_process_that_was_not_lost_itself_is_told_to_begin_again() {
    let job = lost();
    let [former, lost] = [1, 2].map(|since| job.epoch.unwrap().of_rank(2, since));
    assert_eq!(job.call_secrets(2, Purpose::Init), [Some(lost), Some(former)]);
    assert_eq!(
        job.call_secrets(2, Purpose::Leave),
        [Some(lost), Some(former)],
        "it may have lost a hub, too"
    );
    let (restored, _) = Job::restore(job.record(now()), later(50.0));
    assert_eq!(restored.call_secrets(2, Purpose::Init), [Some(lost), Some(former)]);
    for mut job in [job, restored] {
        assert!(matches!(job.submit(2, process(2), &settings(), now()).unwrap(), InitNext::Wait { .. }));
        assert_eq!(init_answer(&job, 2).unwrap_err().code, ErrorCode::Busy);
    }
}

fn restored(job: &Job) -> Job {
    Job::restore(job.record(later(3.0)), later(10.0)).0
}

#[test]
fn a_manager_that_restarts_while_ranks_are_missing_tells_hubs_again() {
    let mut job = restored(&lost());
    assert_eq!(job.status(now()).lost, [0, 1, 2]);
    assert_eq!(changes(job.hub_allocated(0, "hash", (None, None), later(10.0))), [rewind(2)]);
    come(&mut job, 0, 10);
    // A process that waited calls again, with the settings that it had handed in.
    let mut job = restored(&job);
    job.connect(&call(0, 10), later(10.0)).unwrap();
    assert!(submit(&mut job, 0, 10).0.is_empty());
    assert_eq!(
        changes(job.hub_allocated(0, "hash", (None, None), later(10.0))),
        [rewind(2)],
        "rank 0 is not expected yet"
    );
    come(&mut job, 1, 11);
    assert_eq!(come(&mut job, 2, 12).0, [rewind(2), expect((0, 3)), expect((1, 4)), expect((2, 5))]);
}

#[test]
fn a_manager_that_restarts_while_ranks_join_lets_all_join() {
    let mut before = complete();
    join(&mut before, 2, 4);
    let mut job = restored(&before);
    assert_eq!(job.status(now()).lost, [0, 1]);
    assert!(submit(&mut job, 1, 11).0.is_empty(), "rank 0 has not called again");
    let again = changes(job.hub_allocated(0, "hash", (None, None), later(10.0)));
    assert_eq!(again, [rewind(2)], "a hub that had not heard of any would begin with rank 1 alone");
    assert_eq!(submit(&mut job, 0, 10).0, [rewind(2), expect((0, 3)), expect((1, 5))]);
    join(&mut job, 0, 3);
    join(&mut job, 1, 5);
    assert_eq!(init_answer(&job, 2).unwrap().resumed_step, Some(4), "it may ask again");
    assert_eq!(restored(&job).hub_allocated(0, "hash", (None, None), later(10.0)), Transition::None);
    // A process that died while no manager ran takes all others with it: hubs expect it.
    let mut job = restored(&before);
    submit(&mut job, 1, 11);
    assert_eq!(job.connect(&call(0, 20), later(12.0)).unwrap_err().code, ErrorCode::Busy);
    let gone = changes(job.check_time(later(12.0)));
    assert!(matches!(&gone[..], [MembershipChange::Rewind { rank: Some(0), epoch: 6, .. }]), "{gone:?}");
}

#[test]
fn a_job_waits_for_all_its_ranks_only_so_long() {
    let mut job = lost();
    come(&mut job, 0, 10);
    assert_eq!(job.check_time(later(60.9)), Transition::None);
    assert!(matches!(job.check_time(later(61.0)), Transition::Ended { .. }));
    assert_eq!(
        job.message(),
        "ranks 0 to 2 were lost, and no other process has come for 60 s (linger_s), while the job goes on with all of its \
         workers. The last loss: rank 1 was lost"
    );
}

#[test]
fn a_call_that_has_waited_long_enough_says_who_is_missing() {
    let mut job = lost();
    come(&mut job, 0, 10);
    let refused = job.join_timed_out(0).to_string();
    assert!(
        refused.contains("ranks 1 and 2 have no process that has joined job `x` again within 60 s"),
        "{refused}"
    );
    let refused = complete().join_timed_out(0).to_string();
    assert!(refused.contains("the hubs of job `x` did not let rank 0 join"), "{refused}");
}

#[test]
fn a_job_that_has_finished_at_a_hub_goes_back_no_more() {
    let end = JobEnd::finished(Namespace([1; 16]));
    let lose_rank = MembershipChange::Lose { rank: 1, epoch: 2, reason: REASON.into() };
    let mut job = rewinding();
    (0..3).for_each(|rank| job.worker_left((rank, 1)));
    assert_eq!(job.hub_ended(0, &end, now()), Transition::None);
    assert_eq!(changes(lose(&mut job, 1)), [lose_rank, MembershipChange::Finish]);
    // The report of the end comes after that of the loss.
    let mut job = lost();
    assert_eq!(changes(job.hub_ended(0, &end, now())), [MembershipChange::Finish]);
    assert!(matches!(job.hub_ended(1, &end, now()), Transition::Ended { .. }));
    assert_eq!(job.state(), JobState::Finished);
    // A hub without chunks was done before anybody had left, which it says again to a manager that has restarted.
    let mut job = complete();
    job.hub_reserved(0, 0, 0);
    assert_eq!(job.hub_ended(0, &end, now()), Transition::None);
    let named = changes(job.rank_expected(1, (0, 3), Some(4)));
    assert_eq!(named, [MembershipChange::Join { rank: 0, epoch: 3, step: Some(4) }]);
}

/// A running job of up to four workers that has begun with two, and goes back.
fn elastic() -> Job {
    let options = JobOptions {
        on_worker_loss: OnWorkerLoss::Rewind,
        start_workers: Some(2),
        linger_s: 60.0,
        ..JobOptions::default()
    };
    let mut job = running_with(4, 1, options);
    job.hub_reserved(0, 0, 4);
    job
}

/// The call of a process that was started together with others, this many in all.
fn of_start(workers: u32, rank: u32, number: u8) -> crate::service::ConnectService {
    crate::service::ConnectService { workers: Some(workers), ..call(rank, number) }
}

/// Processes of a start of this many ranks take them. Returns what hubs hear with the last.
fn start(job: &mut Job, workers: u32, first_number: u8) -> Vec<MembershipChange> {
    let come = |rank: u32| {
        let number = first_number + rank as u8;
        job.connect(&of_start(workers, rank, number), later(2.0)).unwrap();
        submit(job, rank, number).0
    };
    (0..workers).map(come).last().unwrap()
}

#[test]
fn a_start_of_more_or_fewer_ranks_goes_on_with_so_many() {
    let mut job = elastic();
    let status = |job: &Job| {
        let status = job.status(later(3.0));
        (status.connected, status.lost, status.current_workers)
    };
    assert_eq!(status(&job), (vec![0, 1], vec![], Some(2)));
    for (workers, number) in [(4, 10), (1, 20), (3, 30)] {
        let epoch = job.newest_epoch();
        let since = if epoch == 1 { 1 } else { job.assignments.holder(0).unwrap().since };
        assert_eq!(
            changes(job.worker_lost((0, since), REASON, later(1.0))),
            [MembershipChange::Rewind { rank: Some(0), epoch: epoch + 1, reason: REASON.into() }]
        );
        let told = start(&mut job, workers, number);
        let expected: Vec<MembershipChange> =
            (0..workers).map(|rank| expect((rank, epoch + 2 + u64::from(rank)))).collect();
        assert_eq!(told[1..], expected);
        for rank in 0..workers {
            let epoch = epoch + 2 + u64::from(rank);
            assert_eq!(changes(job.rank_expected(0, (rank, epoch), Some(8))).len(), 1);
            assert!(changes(job.rank_joined(0, (rank, epoch), later(3.0))).is_empty());
        }
        assert_eq!(status(&job), ((0..workers).collect(), vec![], Some(workers)));
        assert_eq!(job.check_time(later(200.0)), Transition::None, "it waits for nobody");
        let (restored, _) = Job::restore(job.record(later(3.0)), later(3.0));
        assert_eq!(status(&restored), status(&job));
    }
}

#[test]
fn the_processes_of_an_earlier_start_count_no_more() {
    let mut job = elastic();
    changes(job.worker_lost((0, 1), REASON, later(1.0)));
    job.connect(&of_start(2, 1, 10), later(2.0)).unwrap();
    assert!(submit(&mut job, 1, 10).0.is_empty());
    let told = start(&mut job, 3, 20);
    assert_eq!(told.len(), 4, "rank 1 of the earlier start is not awaited: {told:?}");
    // The hubs know who is expected, so another number waits until these are lost.
    let busy = job.connect(&of_start(4, 3, 30), later(2.0)).unwrap_err();
    assert_eq!(busy.code, ErrorCode::Busy);
    assert_eq!(busy.message, "job `x` has 3 ranks now, and rank 3 can join when all ranks go back");
    // A process that does not say how many were started takes part in the start that there is.
    changes(job.rank_lost_again(0, later(2.0)));
    job.connect(&call(2, 40), later(2.0)).unwrap();
    assert_eq!(job.status(now()).current_workers, Some(3));
}

#[test]
fn a_job_has_no_more_ranks_than_it_was_created_for() {
    let mut job = elastic();
    changes(job.worker_lost((0, 1), REASON, later(1.0)));
    for (workers, reason) in [(5, "job `x` can have 4 at most"), (0, "0 ranks have been started")] {
        let refused = job.connect(&of_start(workers, 0, 10), later(2.0)).unwrap_err();
        assert!(refused.code == ErrorCode::BadRequest && refused.message.contains(reason), "{refused}");
    }
    let refused = lost().connect(&of_start(2, 0, 10), later(2.0)).unwrap_err();
    assert!(
        refused.message.contains("was created for 3: it must be created with a largest number"),
        "{refused}"
    );
}
