//! Jobs that begin again from their newest checkpoint when a hub is lost.

use super::losses::MembershipChange;
use super::tests::{
    call, hubs, information_book, init_answer, later, now, placed, process, running_with, settings,
};
use super::*;
use crate::auth::{Purpose, StreamSecret};
use crate::checkpoint::CheckpointStatus;
use crate::membership::probes::CoreBandwidth;
use crate::service::{CauseKind, JobEnd, LeaveService, OnWorkerLoss};

const WORKERS: u32 = 2;

fn options() -> JobOptions {
    JobOptions {
        on_worker_loss: OnWorkerLoss::Rewind,
        checkpoint_every: Some("20".parse().unwrap()),
        linger_s: 200.0,
        ..JobOptions::default()
    }
}

fn running() -> Job {
    running_with(WORKERS, 2, options())
}

fn cause(message: &str) -> Cause {
    Cause { kind: CauseKind::HubLost, rank: None, began: now(), message: message.into() }
}

/// The hubs that are told that the job begins again.
fn told(transition: Transition, expected_epoch: u64) -> Vec<u32> {
    let Transition::BeganAgain { hubs, change, epoch, .. } = transition else {
        panic!("{transition:?}");
    };
    assert_eq!(epoch, expected_epoch);
    assert!(matches!(change, MembershipChange::Rewind { rank: None, epoch, .. } if epoch == expected_epoch));
    hubs
}

/// Process 10 + r takes rank r.
fn connect(job: &mut Job) {
    for rank in 0..WORKERS {
        job.connect(&call(rank, 10 + rank as u8), later(2.0)).unwrap();
    }
}

fn begin(job: &mut Job, hub_count: u32) -> Transition {
    job.begin_initialising(hubs(hub_count), &CoreBandwidth::Unneeded)
}

/// The ranks agree, and the only hub goes on from its checkpoint.
fn initialise(job: &mut Job, step: u32) {
    for rank in 0..WORKERS {
        job.submit(rank, process(10 + rank as u8), &settings(), later(3.0)).unwrap();
        assert_eq!(job.agree(rank).is_some(), rank + 1 == WORKERS);
    }
    let information_book = information_book(job);
    assert!(job.place(SettingsSummary::default(), vec![placed()], information_book));
    assert_eq!(job.hub_allocated(0, "hash", (Some(step), None), later(4.0)), Transition::Advanced);
}

#[test]
fn all_ranks_connect_anew_and_go_on_from_the_checkpoint_when_no_hub_has_the_job_any_more() {
    let mut job = running();
    assert_eq!(told(job.hub_lost(1, cause("hub 1 was lost"), later(1.0)), 2), [0]);
    let status = job.status(later(1.0));
    assert_eq!((status.state, status.epoch, status.connected), (JobState::Connecting, 2, vec![]));
    assert!(status.message.contains("hub 1 was lost; all ranks go back to its newest checkpoint"));
    connect(&mut job);
    assert_eq!(job.connect_timeout_s(), 200.0);
    assert_eq!(begin(&mut job, 1), Transition::None, "the hub has yet to end its part");
    assert!(job.former_part_over(0) && !job.former_part_over(0));
    assert_eq!(begin(&mut job, 1), Transition::Advanced);
    initialise(&mut job, 40);
    assert_eq!(job.state(), JobState::Running);
    for rank in 0..WORKERS {
        let answer = init_answer(&job, rank).unwrap();
        assert_eq!((answer.resumed_step, answer.joined_running), (Some(40), true));
    }
    assert!(job.losses(later(9.0)).unwrap().incomplete_seconds < 5.0, "it was complete after 3 s");
    assert!(told(job.hub_lost(0, cause("hub 0 was lost"), later(9.0)), 3).is_empty(), "there is no other");
}

#[test]
fn the_answer_to_a_stop_of_the_former_part_ends_nothing() {
    let mut job = running();
    assert_eq!(told(job.hub_lost(1, cause("hub 1 was lost"), later(1.0)), 2), [0]);
    connect(&mut job);
    assert!(job.former_part_over(0));
    assert_eq!(begin(&mut job, 1), Transition::Advanced);
    // The hub was told twice to stop, and had ended its part after the first time.
    let end = JobEnd::failed(job.namespace, "it is not known any more".into(), CauseKind::Hearsay);
    assert_eq!(job.hub_ended(0, &end, later(3.0)), Transition::None);
    initialise(&mut job, 40);
    assert!(
        matches!(job.hub_ended(0, &end, later(5.0)), Transition::Ended { .. }),
        "this is its present part"
    );
}

#[test]
fn a_job_is_deserted_until_a_rank_comes() {
    let mut job = running();
    assert!(!job.is_deserted());
    drop(told(job.hub_lost(1, cause("hub 1 was lost"), later(1.0)), 2));
    assert!(job.is_deserted());
    job.connect(&call(1, 11), later(2.0)).unwrap();
    assert!(!job.is_deserted());
}

#[test]
fn former_processes_are_told_to_begin_anew() {
    let mut job = running();
    let secret_of = |job: &Job, since| job.epoch.map(|epoch| epoch.of_rank(1, since));
    let former = secret_of(&job, 1);
    drop(told(job.hub_lost(1, cause("hub 1 was lost"), later(1.0)), 2));
    let knows =
        |job: &Job, secret: Option<StreamSecret>| job.call_secrets(1, Purpose::Init).contains(&secret);
    assert!(knows(&job, former));
    connect(&mut job);
    assert!(knows(&job, former) && knows(&job, secret_of(&job, 2)) && former != secret_of(&job, 2));
    let refused = job.submit(1, process(1), &settings(), later(3.0)).err().unwrap();
    assert_eq!(refused.code, ErrorCode::Busy);
    assert!(refused.message.contains("begin again with ConnectService"), "{}", refused.message);
    // Another process may call for a rank before the end of its own last call is noticed.
    let refused = job.connect(&call(1, 9), later(3.0)).err().unwrap();
    assert_eq!(refused.code, ErrorCode::Busy);
}

#[test]
fn a_manager_that_restarts_waits_for_the_hubs_that_may_still_have_the_job() {
    let mut job = running();
    drop(told(job.hub_lost(1, cause("hub 1 was lost"), later(1.0)), 2));
    let text = serde_json::to_string(&job.record(later(1.0))).unwrap();
    let restored = || Job::restore(serde_json::from_str(&text).unwrap(), later(2.0)).0;
    for reports_it in [true, false] {
        let mut job = restored();
        connect(&mut job);
        assert_eq!(job.status(later(2.0)).epoch, 2);
        assert_eq!(begin(&mut job, 1), Transition::None, "hub 0 has not said that it has nothing");
        if reports_it {
            job.former_part_reported(0);
            assert!(!job.former_parts_reported(0));
            assert_eq!(begin(&mut job, 1), Transition::None, "it is told to end that");
            assert!(job.former_part_over(0));
        } else {
            assert!(job.former_parts_reported(0));
        }
        assert_eq!(begin(&mut job, 1), Transition::Advanced);
    }
}

#[test]
fn a_hub_that_a_rank_has_lost_is_gone_when_it_has_hung_up() {
    for has_hung_up in [true, false] {
        let mut job = running();
        let lost_hub = Some("10.0.0.1:7771".to_owned());
        let reason = "reset".to_owned();
        let (incarnation, proof) = (process(0), crate::auth::Proof([0; 32]));
        let report = LeaveService { rank: 0, incarnation, proof, reason, finished: false, lost_hub };
        assert_eq!(job.leave(&report, "reset", later(1.0)), Ok(Transition::None));
        let contact = |_| Some(LastContact { call: later(0.5), has_hung_up });
        let then = job.check_losses(contact, later(1.1));
        match has_hung_up {
            true => assert_eq!(told(then, 2), [0, 1]),
            false => assert_eq!(then, Transition::None, "it may call yet"),
        }
    }
}

#[test]
fn a_rank_that_was_lost_with_a_hub_says_so_also_when_it_has_joined_again() {
    let report = |incarnation| LeaveService {
        rank: 0,
        incarnation,
        proof: crate::auth::Proof([0; 32]),
        reason: "reset".into(),
        finished: false,
        lost_hub: Some("10.0.0.1:7771".into()),
    };
    for joins in [false, true] {
        let mut job = running();
        let secret = job.epoch.map(|epoch| epoch.of_rank(0, 1));
        let lost = job.worker_lost((0, 1), "rank 0 gave up: it lost the hub", later(1.0));
        assert!(matches!(lost, Transition::MembershipChanged { epoch: 2, .. }));
        if joins {
            job.connect(&call(0, 10), later(1.1)).unwrap();
        }
        assert!(job.call_secrets(0, Purpose::Leave).contains(&secret));
        assert_eq!(job.leave(&report(process(0)), "reset", later(1.2)), Ok(Transition::None));
        assert!(job.has_losses_to_check() && job.is_joining(0) == joins, "the rank stays as it was");
        let contact = |_| Some(LastContact { call: later(0.5), has_hung_up: true });
        assert_eq!(told(job.check_losses(contact, later(1.3)), if joins { 4 } else { 3 }), [0, 1]);
    }
}

#[test]
fn a_job_that_loses_a_rank_or_a_hub_before_it_runs_again_begins_once_more() {
    let initialising = || {
        let mut job = running();
        drop(told(job.hub_lost(1, cause("hub 1 was lost"), later(1.0)), 2));
        let _ = job.former_part_over(0);
        connect(&mut job);
        assert_eq!(begin(&mut job, 2), Transition::Advanced);
        job
    };
    let mut job = initialising();
    let Ok(InitNext::Wait { ticket }) = job.submit(0, process(10), &settings(), later(3.0)) else {
        panic!("it waits");
    };
    job.init_dropped(0, ticket, later(3.5));
    assert_eq!(job.check_time(later(4.0)), Transition::None, "it may call again");
    assert!(told(job.check_time(later(6.0)), 3).is_empty(), "no hub was asked");
    let mut job = initialising();
    assert!(told(job.hub_lost(1, cause("hub 1 was lost"), later(3.0)), 3).is_empty());
    let mut job = initialising();
    let silent = job.hub_fell_silent(1, cause("hub 1 has not been heard"), String::new(), later(3.0));
    assert!(told(silent, 3).is_empty());
    let mut job = initialising();
    assert!(told(job.fail_before_it_runs("hub 1 is shutting down".into(), later(3.0)), 3).is_empty());
    let mut job = initialising();
    assert!(told(job.init_timed_out(later(60.0)), 3).is_empty());
    let mut first = super::tests::initialising_with(WORKERS, 2, options());
    let failed = first.hub_lost(1, cause("hub 1 was lost"), later(3.0));
    assert!(matches!(failed, Transition::Ended { .. }), "it has no checkpoint: {failed:?}");
}

#[test]
fn another_process_of_a_rank_shows_that_the_first_has_died_before_it_called_init_service() {
    let mut job = running();
    drop(told(job.hub_lost(1, cause("hub 1 was lost"), later(1.0)), 2));
    let _ = job.former_part_over(0);
    connect(&mut job);
    assert_eq!(begin(&mut job, 2), Transition::Advanced);
    assert_eq!(job.check_time(later(20.0)), Transition::None, "no other process has called");
    let refused = |job: &mut Job, rank, at| job.connect(&call(rank, 20), later(at)).unwrap_err().code;
    assert_eq!(refused(&mut job, 0, 20.0), ErrorCode::Busy);
    // The process is there after all.
    let Ok(InitNext::Wait { ticket }) = job.submit(0, process(10), &settings(), later(21.0)) else {
        panic!("it waits");
    };
    let init = JobCall::Init { rank: 0, ticket };
    job.wait(CallId(7), init);
    for (rank, at) in [(0, 21.5), (1, 22.0), (1, 23.5)] {
        assert_eq!(refused(&mut job, rank, at), ErrorCode::Busy);
    }
    assert_eq!(job.check_time(later(23.9)), Transition::None);
    let transition = job.check_time(later(24.1));
    assert!(matches!(&transition, Transition::BeganAgain { reason, .. } if reason.contains("rank 1")));
    assert!(told(transition, 3).is_empty());
}

#[test]
fn a_hub_that_is_gone_while_ranks_go_back_is_not_awaited() {
    let gone =
        |has_hung_up| move |hub| Some(LastContact { call: later(1.0), has_hung_up: has_hung_up && hub == 1 });
    let mut job = running();
    assert_eq!(job.check_hubs_to_go_back(gone(true), later(9.0)), Transition::None, "no rank is lost");
    let lost = job.worker_lost((0, 1), "rank 0 lost the hub", later(1.0));
    assert!(matches!(lost, Transition::MembershipChanged { epoch: 2, .. }));
    assert_eq!(job.check_hubs_to_go_back(gone(false), later(3.9)), Transition::None, "it may call late");
    let mut quiet = Job::restore(job.record(later(2.0)), later(2.0)).0;
    assert_eq!(told(quiet.check_hubs_to_go_back(gone(false), later(4.0)), 3), [0, 1]);
    assert_eq!(job.check_hubs_to_go_back(gone(true), later(2.0)), Transition::None, "it may call again");
    let mut unheard = Job::restore(job.record(later(2.0)), later(2.0)).0;
    assert_eq!(told(job.check_hubs_to_go_back(gone(true), later(2.5)), 3), [0, 1]);
    let _ = unheard.hub_fell_silent(1, cause("hub 1 has not been heard"), String::new(), later(2.6));
    assert_eq!(told(unheard.check_hubs_to_go_back(gone(false), later(2.6)), 3), [0, 1]);
}

#[test]
fn a_hub_that_shuts_down_has_the_job_begin_again_and_one_that_cannot_serve_it_ends_it() {
    let end = |job: &Job| JobEnd::failed(job.namespace, "the hub is shutting down".into(), CauseKind::Known);
    let mut job = running();
    let end = end(&job);
    assert_eq!(told(job.leaving_hub_ended(1, &end, later(1.0)), 2), [0]);
    let mut job = running();
    assert!(matches!(job.hub_ended(1, &end, later(1.0)), Transition::Ended { .. }), "it is not leaving");
    assert_eq!(job.leaving_hub_ended(0, &end, later(1.1)), Transition::Advanced);
    assert!(job.is_cleared(), "a hub that leaves has nothing of a job that is over");
}

#[test]
fn a_job_without_checkpoints_or_about_to_end_fails_with_its_hub() {
    let without = |change: fn(&mut JobOptions)| {
        let mut options = options();
        change(&mut options);
        running_with(WORKERS, 2, options)
    };
    let (mut announced, mut concluding, mut left) = (running(), running(), running());
    (0..WORKERS).for_each(|rank| left.worker_left((rank, 1)));
    let _ = announced.announce("interrupted".into(), later(0.5));
    let _ = concluding.conclude("its workers have ended".into(), later(0.5));
    let jobs = [
        without(|options| options.checkpoint_every = None),
        without(|options| options.on_worker_loss = OnWorkerLoss::Continue),
        announced,
        concluding,
        left,
    ];
    for mut job in jobs {
        let lost = job.hub_lost(1, cause("hub 1 was lost"), later(1.0));
        assert!(matches!(lost, Transition::Ended { .. }), "{lost:?}");
        assert_eq!(job.state(), JobState::Failed);
    }
}

/// A running job at two sites, of which the second is below the first.
fn at_two_sites() -> Job {
    let mut job = running();
    let mut composition = job.composition().unwrap().as_ref().clone();
    let mut below = composition.sites[0].clone();
    below.hubs = vec![composition.sites[0].hubs.pop().unwrap()];
    below.workers = vec![composition.sites[0].workers.pop().unwrap()];
    below.parent = Some(0);
    composition.sites.push(below);
    job.composition = Some(Arc::new(composition));
    job
}

fn ended(job: &Job, cause: CauseKind, reason: &str) -> JobEnd {
    JobEnd { rank: Some(1), ..JobEnd::failed(job.namespace, reason.into(), cause) }
}

#[test]
fn a_job_at_several_sites_begins_again_when_one_of_them_loses_a_rank_or_another() {
    let lost = |cause| {
        let mut job = at_two_sites();
        let end = ended(&job, cause, "rank 1 was lost");
        job.hub_ended(1, &end, later(1.0))
    };
    for cause in [CauseKind::PeerLost, CauseKind::GaveUp, CauseKind::HubLost] {
        assert_eq!(told(lost(cause), 2), [0], "{cause:?}");
    }
    assert!(matches!(lost(CauseKind::Known), Transition::Ended { .. }), "a rank has broken a rule");
    let mut job = at_two_sites();
    assert_eq!(told(job.worker_lost((1, 1), "rank 1 gave up", later(1.0)), 2), [0, 1]);
    assert_eq!(job.losses(later(2.0)).unwrap().workers_lost, 1);
    // A hub at one site can go back by itself, and ends its part only if that is broken.
    let mut job = running();
    let end = ended(&job, CauseKind::PeerLost, "rank 1 was lost");
    assert!(matches!(job.hub_ended(1, &end, later(1.0)), Transition::Ended { .. }));
    let mut job = running();
    let end = ended(&job, CauseKind::HubLost, "core 0 of its hub panicked");
    assert_eq!(told(job.hub_ended(1, &end, later(1.0)), 2), [0]);
}

#[test]
fn what_one_site_can_prove_ends_the_job_although_another_has_reported_what_followed() {
    let after = |end: &dyn Fn(&Job) -> JobEnd, is_leaving| {
        let mut job = at_two_sites();
        let lost = ended(&job, CauseKind::GaveUp, "the hub of rack a gave up");
        assert_eq!(told(job.hub_ended(1, &lost, later(1.0)), 2), [0]);
        assert!(job.former_part_over(0));
        let end = end(&job);
        job.former_part_ended(&end, is_leaving, later(1.1))
    };
    let proven = |job: &Job| ended(job, CauseKind::Known, "rank 1 sent a frame that it may not send");
    assert!(matches!(after(&proven, false), Transition::Ended { .. }));
    assert_eq!(after(&proven, true), Transition::None, "it shuts down");
    assert_eq!(after(&|job| ended(job, CauseKind::Hearsay, "it was told to"), false), Transition::None);
}

#[test]
fn a_job_that_writes_no_newer_checkpoint_does_not_begin_again_for_ever() {
    let mut job = at_two_sites();
    let begin_again = |job: &mut Job, at_s| {
        job.state = JobState::Running;
        let cause = cause("hub 1 was lost");
        job.begin_again_or_fail(cause, later(at_s))
    };
    for time in 1..=10 {
        assert!(matches!(begin_again(&mut job, f64::from(time)), Transition::BeganAgain { .. }), "{time}");
    }
    assert_eq!(
        Job::restore(job.record(later(10.0)), later(11.0)).0.returns,
        job.returns,
        "another manager leads"
    );
    job.recorded_checkpoints = Some(CheckpointStatus { step: Some(20), ..CheckpointStatus::default() });
    for time in 11..=21 {
        assert!(matches!(begin_again(&mut job, f64::from(time)), Transition::BeganAgain { .. }), "{time}");
    }
    assert!(matches!(begin_again(&mut job, 22.0), Transition::Ended { .. }));
    assert!(job.message().contains("has begun again 10 times"), "{}", job.message());
}
