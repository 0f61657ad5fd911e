use super::calls::AnswersBySite;
use super::*;
use crate::membership::hubs::OfferedHub;
use crate::membership::probes::CoreBandwidth;
use crate::membership::time::at;

use crate::auth::{EpochSecret, Incarnation, Proof, Purpose, RankClaim, StreamSecret};
use crate::key::{Key, KeyTable};
use crate::placement::{HubShape, Imbalance, InterfaceShape};
use crate::scheme::{HubPlace, Plan};
use crate::service::{CauseKind, ConnectService, JobEnd, LeaveService, ServiceInitialised};

pub(super) fn now() -> Now {
    at(0.0)
}

pub(super) fn later(seconds: f64) -> Now {
    at(seconds)
}

pub(super) fn job(workers: u32) -> Job {
    job_with(workers, JobOptions::default())
}

pub(super) fn job_with(workers: u32, options: JobOptions) -> Job {
    let request = CreateService { name: "x".into(), workers, options };
    Job::new(0, request, Namespace([1; 16]), Nonce([2; 32]), Some(epoch()), now())
}

pub(in crate::membership) fn epoch() -> Epoch {
    Epoch { number: 1, secret: EpochSecret([3; 32]) }
}

pub(super) fn process(number: u8) -> Incarnation {
    Incarnation([number; 16])
}

pub(super) fn call(rank: u32, number: u8) -> ConnectService {
    let (incarnation, proof) = (process(number), Proof([0; 32]));
    ConnectService {
        rank,
        incarnation,
        proof,
        claim: Some(RankClaim([number; 32])),
        host: format!("node-{number}"),
        process: u32::from(number),
        place: Default::default(),
        peer_address: None,
        workers: None,
    }
}

pub(super) fn leave(job: &mut Job, rank: u32, number: u8, reason: &str) -> Result<Transition, ServiceError> {
    let (incarnation, proof) = (process(number), Proof([0; 32]));
    let call =
        LeaveService { rank, incarnation, proof, reason: reason.into(), finished: false, lost_hub: None };
    job.leave(&call, reason, now())
}

pub(super) fn hubs(count: u32) -> Vec<OfferedHub> {
    let shape = |hub: u32| {
        let interface = InterfaceShape { address: format!("10.0.0.{hub}:7771"), cores: vec![0], weight: 1 };
        (hub, (HubShape { interfaces: vec![interface], local: None, between_hubs: None }, Place::default()))
    };
    (0..count).map(shape).collect()
}

pub(super) fn settings() -> Arc<Settings> {
    Arc::new(Settings::new(KeyTable::new(vec![Key::new("w", [4])]).unwrap()))
}

pub(super) fn placed() -> SitePlacement {
    let imbalance = Imbalance { hubs: 1.0, interfaces: 1.0, cores: 1.0 };
    SitePlacement { hash: "hash".into(), imbalance, empty_hubs: Vec::new() }
}

/// The information book that the manager makes for those settings, of a job whose hubs report no machine.
pub(super) fn information_book(job: &Job) -> Arc<InformationBook> {
    let roster = job.roster(job.hubs().map(|hub| (hub, "")));
    let plan = Plan::new(&settings(), &roster.cluster());
    Arc::new(InformationBook { job: job.name.clone(), roster, plan })
}

/// The answer to a rank that waits in InitService.
pub(super) fn init_answer(job: &Job, rank: u32) -> Result<Arc<ServiceInitialised>, ServiceError> {
    job.init_answer(rank, &mut AnswersBySite::new())
}

pub(super) fn phase(job: &Job) -> JobPhase {
    job.phase
}

/// A job whose ranks have connected; rank r is process r.
pub(super) fn initialising(workers: u32, hub_count: u32) -> Job {
    initialising_with(workers, hub_count, JobOptions::default())
}

pub(super) fn initialising_with(workers: u32, hub_count: u32, options: JobOptions) -> Job {
    let mut job = job_with(workers, options);
    for rank in 0..options.first_workers(workers) {
        job.connect(&call(rank, rank as u8), now()).unwrap();
    }
    assert_eq!(job.begin_initialising(hubs(hub_count), &CoreBandwidth::Unneeded), Transition::Advanced);
    job
}

/// A job whose hubs have been asked to allocate.
pub(super) fn placing(workers: u32, hub_count: u32) -> Job {
    placing_with(workers, hub_count, JobOptions::default())
}

fn placing_with(workers: u32, hub_count: u32, options: JobOptions) -> Job {
    let mut job = initialising_with(workers, hub_count, options);
    let first_workers = options.first_workers(workers);
    for rank in 0..first_workers {
        job.submit(rank, process(rank as u8), &settings(), now()).unwrap();
        assert_eq!(job.agree(rank).is_some(), rank + 1 == first_workers);
    }
    assert!(job.place(SettingsSummary::default(), vec![placed()], information_book(&job)));
    job
}

pub(super) fn running(workers: u32, hub_count: u32) -> Job {
    running_with(workers, hub_count, JobOptions::default())
}

pub(super) fn running_with(workers: u32, hub_count: u32, options: JobOptions) -> Job {
    let mut job = placing_with(workers, hub_count, options);
    for hub in 0..hub_count {
        let expected = if hub + 1 == hub_count { Transition::Advanced } else { Transition::None };
        assert_eq!(job.hub_allocated(hub, "hash", (None, None), now()), expected);
    }
    assert_eq!(job.state(), JobState::Running);
    job
}

/// A hub reports that every worker has left.
pub(super) fn finish(job: &mut Job, hub: u32) -> Transition {
    let end = JobEnd::finished(job.namespace);
    job.hub_ended(hub, &end, now())
}

/// A hub reports that the job has failed there.
pub(super) fn fail_at(job: &mut Job, hub: u32, cause: CauseKind, reason: &str) -> Transition {
    let end = JobEnd::failed(job.namespace, reason.into(), cause);
    job.hub_ended(hub, &end, now())
}

/// A hub is lost that called until now.
pub(super) fn lose(job: &mut Job, hub: u32, message: &str) -> Transition {
    let cause = Cause { kind: CauseKind::HubLost, rank: None, began: now(), message: message.into() };
    job.hub_lost(hub, cause, now())
}

#[test]
fn a_job_goes_from_rendezvous_to_its_end() {
    let mut job = running(3, 2);
    assert_eq!(init_answer(&job, 0).unwrap().placement_hash, "hash");
    assert_eq!(finish(&mut job, 0), Transition::None);
    assert_eq!(finish(&mut job, 0), Transition::None);
    assert_eq!(finish(&mut job, 1), Transition::Ended { stop: vec![] });
    assert_eq!((job.state(), phase(&job)), (JobState::Finished, JobPhase::Cleared));
    assert_eq!(job.status(now()).connected, [0, 1, 2]);
    let refused = job.connect(&call(0, 0), now()).unwrap_err();
    assert_eq!((refused.code, refused.message.as_str()), (ErrorCode::JobEnded, "job `x` has finished"));
}

#[test]
fn a_second_process_cannot_have_a_rank_but_the_first_may_ask_again() {
    let mut job = job(2);
    let first = job.connect(&call(1, 7), now()).unwrap();
    let refused = job.connect(&call(1, 8), now()).unwrap_err();
    assert_eq!(refused.code, ErrorCode::RankTaken);
    assert!(refused.message.contains("process 7 on node-7"), "{}", refused.message);
    let second = job.connect(&call(1, 7), now()).unwrap();
    // The first call's connection closes late: the second call holds the rank by now.
    job.connect_dropped(1, first);
    assert_eq!(job.status(now()).connected, [1]);
    job.connect_dropped(1, second);
    assert_eq!(job.status(now()).connected, [] as [u32; 0]);
    job.connect(&call(1, 8), now()).unwrap();
    assert_eq!(
        job.connect(&call(2, 9), now()).unwrap_err().message,
        "job `x` has ranks 0 and 1 only, not rank 2"
    );
}

#[test]
fn a_timeout_distinguishes_ranks_that_never_came_from_those_that_gave_up() {
    let mut job = job(4);
    let zero = job.connect(&call(0, 0), now()).unwrap();
    let two = job.connect(&call(2, 2), now()).unwrap();
    let missing = job.connect_timed_out(0, zero, &[]).message;
    assert_eq!(missing, "ranks 1 and 3 have not connected to job `x` within 60 s");
    let missing = job.connect_timed_out(2, two, &[]).message;
    assert_eq!(
        missing,
        "ranks 1 and 3 have not connected to job `x` within 60 s, and rank 0 gave up waiting before"
    );
    // Ranks that timed out may call again, and now only a hub is missing.
    let tickets: Vec<u64> = (0..4).map(|rank| job.connect(&call(rank, 9), now()).unwrap()).collect();
    let missing = job.connect_timed_out(3, tickets[3], &[]);
    assert_eq!(missing.code, ErrorCode::Missing);
    assert!(missing.message.contains("no hub has joined"), "{}", missing.message);
    let missing = job.connect_timed_out(0, tickets[0], &hubs(1)).message;
    assert_eq!(missing, "job `x` was never complete within 60 s: rank 3 gave up waiting");
}

#[test]
fn a_job_waits_for_the_hubs_it_was_created_for_and_names_those_that_came() {
    let mut job = job(2);
    job.options.hubs = Some(10);
    let tickets: Vec<u64> = (0..2).map(|rank| job.connect(&call(rank, 9), now()).unwrap()).collect();
    for (joined, listed) in [(0, "none"), (2, "only 2, hub 0 (10.0.0.0:7771) and hub 1 (10.0.0.1:7771)")] {
        assert_eq!(job.begin_initialising(hubs(joined), &CoreBandwidth::Unneeded), Transition::None);
        let missing = job.hubs_missing(&hubs(joined)).unwrap();
        let expected = format!(
            "of the 10 hubs that it waits for {listed} had joined the connection manager within 60 s"
        );
        assert!(missing.starts_with(&expected), "{missing}");
    }
    let missing = job.connect_timed_out(0, tickets[0], &hubs(9)).message;
    assert!(missing.starts_with("every rank of job `x` is there, but of the 10 hubs"), "{missing}");
    assert!(missing.contains("hub 7 (10.0.0.7:7771) and 1 more had"), "{missing}");
    let missing = job.connect_timed_out(1, tickets[1], &hubs(9)).message;
    assert!(missing.contains("rank 0 gave up waiting; of the 10 hubs"), "{missing}");
    for rank in 0..2 {
        job.connect(&call(rank, 9), now()).unwrap();
    }
    assert_eq!(job.begin_initialising(hubs(10), &CoreBandwidth::Unneeded), Transition::Advanced);
    assert_eq!(job.hubs().count(), 10);
}

#[test]
fn a_job_waits_for_hubs_that_serve_all_workers() {
    let at = |rack: &str, host: &str| Place { rack: rack.into(), host: host.into() };
    let mut job = job(2);
    for (rank, rack) in [(0, "a"), (1, "b")] {
        job.connect(&ConnectService { place: at(rack, "h"), ..call(rank, rank as u8) }, now()).unwrap();
    }
    let mut offered = hubs(3);
    for (hub, place) in offered.iter_mut().zip([at("", "another run's"), at("a", ""), at("b", "")]) {
        hub.1.1 = place;
    }
    assert_eq!(job.begin_initialising(offered[..1].to_vec(), &CoreBandwidth::Unneeded), Transition::None);
    assert!(job.hubs_missing(&offered[..1]).unwrap().contains("no hub has joined"));
    assert_eq!(job.begin_initialising(offered[..2].to_vec(), &CoreBandwidth::Unneeded), Transition::None);
    let missing = job.hubs_missing(&offered[..2]).unwrap();
    assert!(missing.contains("rank 1 is in rack \"b\", which no hub serves"), "{missing}");
    assert_eq!(job.hubs_missing(&offered), None);
    assert_eq!(job.begin_initialising(offered, &CoreBandwidth::Unneeded), Transition::Advanced);
    assert_eq!(job.hubs().collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn a_hub_that_no_chunk_falls_to_may_be_done_before_the_others_have_allocated() {
    let mut job = placing(1, 2);
    assert_eq!(job.hub_allocated(1, "hash", (None, None), now()), Transition::None);
    assert_eq!(finish(&mut job, 1), Transition::None);
    assert_eq!(job.hub_allocated(0, "hash", (None, None), now()), Transition::Advanced);
    assert_eq!(job.state(), JobState::Running);
    assert!(matches!(finish(&mut job, 0), Transition::Ended { .. }));
    assert_eq!(job.state(), JobState::Finished);
    // An earlier manager had asked it, too, and its report of that comes when the placement is made once more.
    let mut job = placing(1, 2);
    assert_eq!(finish(&mut job, 1), Transition::None);
    assert_eq!(job.hub_allocated(0, "hash", (None, None), now()), Transition::None);
    assert_eq!(job.hub_allocated(1, "hash", (None, None), now()), Transition::Advanced);
    assert_eq!(finish(&mut job, 1), Transition::None);
    assert!(matches!(finish(&mut job, 0), Transition::Ended { .. }));
}

#[test]
fn init_needs_connect_first() {
    let mut job = job(2);
    job.connect(&call(0, 0), now()).unwrap();
    let refused = job.submit(0, process(0), &settings(), now()).unwrap_err();
    assert!(refused.message.contains("ConnectService"), "{}", refused.message);
    let mut job = initialising(2, 1);
    let refused = job.submit(0, process(9), &settings(), now()).unwrap_err();
    assert_eq!(refused.code, ErrorCode::RankTaken);
}

#[test]
fn settings_are_handed_out_once_and_never_copied() {
    let mut job = initialising(2, 1);
    assert!(matches!(job.submit(1, process(1), &settings(), now()), Ok(InitNext::Wait { .. })));
    assert!(job.agree(1).is_none());
    // The same rank again, as after a broken connection: it is compared with itself and counted once.
    assert!(matches!(job.submit(1, process(1), &settings(), now()), Ok(InitNext::Compare { first: 1, .. })));
    assert!(job.agree(1).is_none());
    assert!(matches!(job.submit(0, process(0), &settings(), now()), Ok(InitNext::Compare { first: 1, .. })));
    assert!(Arc::try_unwrap(job.agree(0).unwrap()).is_ok());
    assert!(matches!(job.submit(1, process(1), &settings(), now()), Ok(InitNext::Wait { .. })));
    assert!(job.agree(1).is_none());
}

#[test]
fn a_failure_reaches_ranks_in_its_own_words_and_hubs_that_hold_something() {
    let mut job = placing(2, 3);
    let Transition::Ended { stop } = job.hub_refused(1, "needs 3 GB, has 2", now()) else {
        panic!("a refusal ends the job");
    };
    assert_eq!((stop, phase(&job)), (vec![0, 2], JobPhase::Ended));
    let refused = init_answer(&job, 0).unwrap_err();
    assert_eq!(refused.code, ErrorCode::DoesNotFit);
    assert!(refused.message.contains("hub 1 (10.0.0.1:7771)"), "{}", refused.message);
    assert_eq!(job.submit(0, process(0), &settings(), now()).unwrap_err(), refused);
    assert_eq!(fail_at(&mut job, 0, CauseKind::PeerLost, "stopped"), Transition::None);
    assert_eq!(fail_at(&mut job, 2, CauseKind::PeerLost, "stopped"), Transition::Advanced);
    assert_eq!(phase(&job), JobPhase::Cleared);
    assert_eq!(job.status(now()).message, refused.message);
}

#[test]
fn a_hub_that_places_otherwise_fails_the_job_loudly() {
    let mut job = placing(1, 1);
    assert_eq!(job.hub_allocated(0, "other", (None, None), now()), Transition::Ended { stop: vec![0] });
    assert!(init_answer(&job, 0).unwrap_err().message.contains("other, not hash"));
}

#[test]
fn a_hub_that_ends_a_job_early_fails_it_with_its_reason() {
    let mut job = running(2, 2);
    assert_eq!(
        fail_at(&mut job, 1, CauseKind::PeerLost, "rank 0 was lost"),
        Transition::Ended { stop: vec![0] }
    );
    assert_eq!((job.state(), job.status(now()).message.as_str()), (JobState::Failed, "rank 0 was lost"));
    let mut job = running(1, 1);
    assert_eq!(lose(&mut job, 0, "hub 0 was lost"), Transition::Ended { stop: vec![] });
    assert_eq!(phase(&job), JobPhase::Cleared);
    assert_eq!(lose(&mut job, 0, "hub 0 was lost"), Transition::None);
}

#[test]
fn events_of_a_hub_that_does_not_serve_the_job_change_nothing() {
    let mut job = running(1, 1);
    assert_eq!(fail_at(&mut job, 5, CauseKind::PeerLost, "nonsense"), Transition::None);
    assert_eq!(job.hub_refused(5, "nonsense", now()), Transition::None);
    assert_eq!(job.hub_noticed(5, "nonsense".into()), Transition::None);
    assert_eq!((job.state(), job.status(now()).message.as_str()), (JobState::Running, ""));
    assert_eq!(job.hub_noticed(0, "rank 0 is silent".into()), Transition::None);
    assert_eq!(job.status(now()).message, "rank 0 is silent");
}

#[test]
fn the_lease_runs_only_while_no_rank_waits() {
    let mut job = job(2);
    assert_eq!(job.check_time(later(119.0)), Transition::None);
    let ticket = job.connect(&call(0, 0), now()).unwrap();
    let waiting = CallId(1);
    job.wait(waiting, JobCall::Connect { rank: 0, incarnation: process(0), ticket });
    assert_eq!(job.check_time(later(500.0)), Transition::None);
    assert!(job.call_expired(waiting, &[], later(500.0)).is_some());
    assert_eq!(job.check_time(later(619.0)), Transition::None);
    assert_eq!(job.check_time(later(621.0)), Transition::Ended { stop: vec![] });
    assert!(
        job.status(now()).message.starts_with("its lease of 120 s ran out"),
        "{}",
        job.status(now()).message
    );
    // The hubs watch over a job that runs.
    assert_eq!(running(1, 1).check_time(later(1e6)), Transition::None);
}

#[test]
fn a_rank_that_breaks_off_in_init_may_come_back_for_a_while() {
    let mut job = initialising(2, 1);
    let Ok(InitNext::Wait { ticket }) = job.submit(0, process(0), &settings(), now()) else {
        panic!("the first call waits");
    };
    job.init_dropped(0, ticket, now());
    assert_eq!(job.check_time(later(COME_BACK_S / 2.0)), Transition::None);
    job.submit(0, process(0), &settings(), now()).unwrap();
    // The rank has called again, and its first connection does not matter any more.
    job.init_dropped(0, ticket, now());
    assert_eq!(job.check_time(later(2.0 * COME_BACK_S)), Transition::None);
    let Ok(InitNext::Compare { ticket, .. }) = job.submit(1, process(1), &settings(), now()) else {
        panic!("the second rank is compared");
    };
    job.init_dropped(1, ticket, now());
    assert_eq!(job.check_time(later(2.0 * COME_BACK_S)), Transition::Ended { stop: vec![] });
    let message = job.status(now()).message;
    assert_eq!(message, "rank 1 (process 1 on node-1) was lost before the job ran");
}

#[test]
fn init_timeouts_name_ranks_then_hubs() {
    let mut job = initialising(3, 1);
    job.submit(1, process(1), &settings(), now()).unwrap();
    job.agree(1);
    assert_eq!(job.init_timed_out(now()), Transition::Ended { stop: vec![] });
    let refused = init_answer(&job, 0).unwrap_err();
    assert_eq!(refused.code, ErrorCode::Missing);
    assert_eq!(refused.message, "ranks 0 and 2 have not called InitService for job `x` within 60 s");

    let mut job = placing(1, 2);
    assert_eq!(job.hub_allocated(0, "hash", (None, None), now()), Transition::None);
    assert_eq!(job.init_timed_out(now()), Transition::Ended { stop: vec![0, 1] });
    let message = init_answer(&job, 0).unwrap_err().message;
    assert_eq!(message, "hub 1 (10.0.0.1:7771) did not allocate job `x` within 60 s");
}

#[test]
fn leaving_frees_a_rank_or_fails_the_job() {
    let mut job = job(2);
    job.connect(&call(0, 0), now()).unwrap();
    assert_eq!(leave(&mut job, 0, 0, ""), Ok(Transition::None));
    assert!(leave(&mut job, 0, 0, "").is_err());
    assert!(job.status(now()).connected.is_empty());

    let mut job = initialising(2, 1);
    assert!(leave(&mut job, 0, 5, "").is_err());
    assert_eq!(leave(&mut job, 0, 0, "no disk"), Ok(Transition::Ended { stop: vec![] }));
    assert_eq!(job.status(now()).message, "rank 0 left before the job ran: no disk");
    assert_eq!(leave(&mut job, 1, 1, ""), Ok(Transition::None));
}

#[test]
fn the_information_book_shows_where_hubs_run() {
    let mut job = job(2);
    let mut places = ["blue", "green"].into_iter();
    for rank in 0..2 {
        let place = Place { host: places.next().unwrap().into(), ..Place::default() };
        job.connect(&ConnectService { place, ..call(rank, rank as u8) }, now()).unwrap();
    }
    assert_eq!(job.begin_initialising(hubs(2), &CoreBandwidth::Unneeded), Transition::Advanced);
    let roster = |machines: [&str; 2]| job.roster(job.hubs().zip(machines));
    let dedicated = roster(["red", ""]);
    assert_eq!(dedicated.place, HubPlace::Dedicated { width: 1.0 });
    assert_eq!(dedicated.workers[1].host, "node-1");
    let mixed = roster(["red", "green"]);
    assert_eq!(mixed.place, HubPlace::BesideWorkers, "the busiest machine has both");
    assert_eq!([mixed.hubs[0].is_beside_worker, mixed.hubs[1].is_beside_worker], [false, true]);
    assert_eq!(mixed.hubs[0].addresses, ["10.0.0.0:7771"]);
    let cluster = mixed.cluster();
    assert_eq!((cluster.workers, cluster.hubs), (2, 2));
}

#[test]
fn a_job_has_its_information_book_while_it_is_placed_and_lives() {
    let mut job = job(1);
    assert_eq!(job.information_book().unwrap_err().code, ErrorCode::Missing);
    job.connect(&call(0, 0), now()).unwrap();
    assert_eq!(job.begin_initialising(hubs(1), &CoreBandwidth::Unneeded), Transition::Advanced);
    job.submit(0, process(0), &settings(), now()).unwrap();
    assert!(job.agree(0).is_some());
    assert!(job.place(SettingsSummary::default(), vec![placed()], information_book(&job)));
    assert_eq!(job.information_book().unwrap().plan.rows().count(), 1);
    let _ = job.fail(ErrorCode::JobEnded, "enough".into(), now());
    let refused = job.information_book().unwrap_err();
    assert!(refused.code == ErrorCode::JobEnded && refused.message.contains("enough"), "{refused}");
}

#[test]
fn hubs_go_on_from_one_step() {
    let mut same = placing(1, 3);
    assert_eq!(same.hub_allocated(0, "hash", (Some(7), None), now()), Transition::None);
    // No chunk of the job is on this hub.
    assert_eq!(same.hub_allocated(1, "hash", (None, None), now()), Transition::None);
    assert_eq!(same.hub_allocated(2, "hash", (Some(7), None), now()), Transition::Advanced);
    assert_eq!(init_answer(&same, 0).unwrap().resumed_step, Some(7));

    let mut apart = placing(1, 2);
    assert_eq!(apart.hub_allocated(0, "hash", (Some(7), None), now()), Transition::None);
    assert!(matches!(apart.hub_allocated(1, "hash", (Some(9), None), now()), Transition::Ended { .. }));
    let message = apart.status(now()).message;
    assert!(
        message.contains("step 9") && message.contains("step 7") && message.contains("share one folder"),
        "{message}"
    );

    // Both have chunks, and one has found no checkpoint.
    for steps in [[Some(7), None], [None, Some(7)]] {
        let mut half = placing(1, 2);
        for (hub, step) in (0..).zip(steps) {
            half.hub_reserved(hub, 100, 1);
            let _ = half.hub_allocated(hub, "hash", (step, None), now());
        }
        let (state, message) = (half.status(now()).state, half.status(now()).message);
        assert_eq!(state, JobState::Failed, "{steps:?}");
        assert!(message.contains("step 7") && message.contains("has found none"), "{message}");
    }
}

#[test]
fn a_job_has_the_checkpoints_that_all_its_hubs_have() {
    let mut job = placing(1, 2);
    assert_eq!(job.status(now()).checkpoints, None);
    let status = |step| CheckpointStatus { step, failure: "x".repeat(5000), ..Default::default() };
    job.hub_kept(0, status(Some(20)));
    job.hub_kept(1, status(Some(10)));
    job.hub_kept(9, status(None));
    let reported = job.status(now()).checkpoints.unwrap();
    assert_eq!((reported.step, reported.failure.len()), (Some(10), 1024));
}

#[test]
fn the_first_process_to_claim_a_rank_has_it_and_proves_its_calls_with_a_secret_of_its_own() {
    let mut job = job(2);
    let nonce = Some(StreamSecret(job.nonce.0));
    let own = |rank| Some(epoch().secret.of_rank(rank));
    job.connect(&call(0, 1), now()).unwrap();
    // Streams carry the incarnation, so who repeats it may be a stranger with the job's nonce.
    for claim in [None, Some(RankClaim([9; 32]))] {
        let refused = job.connect(&ConnectService { claim, ..call(0, 1) }, now()).unwrap_err();
        assert_eq!(refused.code, ErrorCode::RankTaken);
    }
    job.connect(&call(0, 1), now()).unwrap();
    assert_eq!(job.call_secrets(0, Purpose::Connect), [nonce, own(0)], "the nonce may be replaced");
    assert_eq!(job.call_secrets(1, Purpose::Connect), [nonce, own(1)]);
    assert_eq!(job.call_secrets(0, Purpose::Leave), [own(0), None], "the nonce does not do");
    assert_eq!(job.call_secrets(1, Purpose::Leave), [nonce, own(1)], "it has not connected");
    assert_eq!(job.version_1_ranks(), [0; 0]);
}

#[test]
fn a_worker_of_version_1_has_no_secret_and_cannot_get_that_of_another() {
    let mut job = job(2);
    let of_version_1 = ConnectService { claim: None, ..call(1, 2) };
    job.connect(&call(0, 1), now()).unwrap();
    job.connect(&of_version_1, now()).unwrap();
    job.connect(&of_version_1, now()).unwrap();
    assert_eq!(job.connect(&call(1, 2), now()).unwrap_err().code, ErrorCode::RankTaken);
    assert_eq!(job.version_1_ranks(), [1]);
    assert_eq!(job.call_secrets(1, Purpose::Init), [Some(StreamSecret(job.nonce.0)), None]);
}
