use super::*;

/// The time in which a process that has joined must open its streams.
const OPENING: Duration = Duration::from_secs(8);

/// A running job that goes on with one worker.
fn outliving() -> Hub {
    Hub::running(|terms| terms.min_workers = Some(1))
}

fn lost(hub: &mut Hub) -> Vec<Output> {
    hub.fault(FaultCause::Kind(CauseKind::PeerLost))
}

fn lose(hub: &mut Hub, epoch: u64) -> Vec<Output> {
    let reason = "rank 1 was lost".into();
    hub.handle(Event::LoseRank { namespace: job(1), rank: 1, epoch, reason })
}

fn expect(hub: &mut Hub, epoch: u64) -> Vec<Output> {
    hub.handle(Event::ExpectRank { namespace: job(1), rank: 1, epoch })
}

fn join(hub: &mut Hub, epoch: u64, step: u32) -> Vec<Output> {
    hub.handle(Event::JoinRank { namespace: job(1), rank: 1, epoch, step: Some(step) })
}

fn expected(hub: &mut Hub, epoch: u64, step: u32) -> Vec<Output> {
    hub.core(1, CoreEvent::RankExpected { rank: 1, epoch, step: Some(step) })
}

fn joined(hub: &mut Hub, epoch: u64) -> Vec<Output> {
    hub.core(1, CoreEvent::RankJoined { rank: 1, epoch })
}

/// The changes that all cores of the job are to make.
fn changes(outputs: &[Output]) -> Vec<RankChange> {
    let of_cores = outputs.iter().filter_map(|output| match output {
        Output::ChangeRank { rank: 1, change, .. } => Some(*change),
        _ => None,
    });
    let mut of_cores: Vec<RankChange> = of_cores.collect();
    assert!(of_cores.len().is_multiple_of(ROUTES.len()), "every core changes: {outputs:?}");
    of_cores.dedup();
    of_cores
}

/// Lets a hub lose rank 1 and another process take it, in epochs 2 and 3.
fn replaced() -> Hub {
    let mut hub = outliving();
    lost(&mut hub);
    lose(&mut hub, 2);
    expect(&mut hub, 3);
    (0..2).for_each(|core| drop(expected(&mut hub, 3, 5 + core)));
    join(&mut hub, 3, 7);
    hub.streams.missing.insert(RANKS[1]);
    (0..2).for_each(|_| drop(joined(&mut hub, 3)));
    hub
}

#[test]
fn the_manager_decides_whether_a_worker_is_lost() {
    let mut hub = outliving();
    let outputs = lost(&mut hub);
    assert!(changes(&outputs).is_empty() && failures(&outputs).is_empty());
    let [HubEvent::WorkerLost { rank: 1, epoch: 1, reason, .. }] = reports(&outputs)[..] else {
        panic!("{outputs:?}")
    };
    assert_eq!(reason, "rank 1 was lost");
    assert!(reports(&lost(&mut hub)).is_empty(), "every stream reports it");
    // A manager that has restarted hears it again.
    let again = hub.handle(Event::ReportJobs { question: 1 });
    assert!(has!(again, Output::Report(HubEvent::WorkerLost { rank: 1, epoch: 1, .. })));
    let outputs = lose(&mut hub, 2);
    assert_eq!(changes(&outputs), [RankChange::Lose]);
    assert!(has!(outputs, Output::RefuseRank { rank: 1, epoch: 2, .. }));
    let told = "job `job-1` goes on with 1 of its 2 workers: rank 1 was lost";
    assert!(has!(outputs, Output::Notify { notice, .. } if notice.message == told), "{outputs:?}");
    assert!(lose(&mut hub, 2).is_empty(), "a command can come twice");
}

#[test]
fn a_job_with_too_few_workers_says_that_it_waits() {
    let mut hub = Hub::running(|terms| terms.min_workers = Some(2));
    lost(&mut hub);
    let told = "job `job-1` waits: rank 1 was lost. It has 1 of its 2 workers, and goes on with 2 or more";
    assert!(has!(lose(&mut hub, 2), Output::Notify { notice, .. } if notice.message == told));
}

#[test]
fn a_worker_that_breaks_the_rules_ends_the_job_all_the_same() {
    let mut hub = outliving();
    let outputs = hub.fault(FaultCause::Kind(CauseKind::Known));
    assert_eq!(failure(&outputs), "job `job-1` failed: rank 1 was lost");
    for cause in [FaultCause::Silence, FaultCause::Kind(CauseKind::GaveUp)] {
        assert!(failures(&outliving().fault(cause)).is_empty());
    }
    let mut hub = Hub::running(|_| {});
    assert_eq!(failures(&lost(&mut hub)).len(), ROUTES.len());
}

#[test]
fn another_process_joins_at_the_latest_step_of_all_cores() {
    let mut hub = outliving();
    lost(&mut hub);
    assert!(expect(&mut hub, 3).is_empty(), "the rank is not lost yet");
    lose(&mut hub, 2);
    assert_eq!(changes(&expect(&mut hub, 3)), [RankChange::Expect]);
    assert!(expect(&mut hub, 3).is_empty(), "the cores have not answered");
    assert!(reports(&expected(&mut hub, 3, 9)).is_empty());
    let named = HubEvent::RankExpected { namespace: job(1), rank: 1, epoch: 3, step: Some(9) };
    assert_eq!(reports(&expected(&mut hub, 3, 4)), [&named]);
    assert_eq!(reports(&expect(&mut hub, 3)), [&named], "to a manager that has restarted");
    assert!(join(&mut hub, 2, 12).is_empty(), "an epoch that is over");
    assert_eq!(changes(&join(&mut hub, 3, 12)), [RankChange::Join { step: Some(12) }]);
    let named = HubEvent::RankExpected { namespace: job(1), rank: 1, epoch: 3, step: Some(12) };
    assert_eq!(reports(&expect(&mut hub, 3)), [&named], "the step at which it joins");
    assert!(reports(&joined(&mut hub, 3)).is_empty());
    let outputs = joined(&mut hub, 3);
    let report = HubEvent::RankJoined { namespace: job(1), rank: 1, epoch: 3 };
    assert_eq!(reports(&outputs), [&report]);
    assert!(has!(outputs, Output::AdmitRank { rank: 1, epoch: 3, .. }));
    assert_eq!(reports(&join(&mut hub, 3, 12)), [&report], "to a manager that has restarted");
}

/// A job of which all cores have allocated, and that waits for the streams of its ranks.
fn connecting() -> Hub {
    let mut hub = Hub::new();
    hub.streams.missing.extend(RANKS);
    let terms = JobTerms { min_workers: Some(1), ..terms(1) };
    hub.handle(Event::Planned(Box::new(terms)));
    for _ in ROUTES {
        hub.core(1, CoreEvent::Opened { missing_bytes: None, has_snapshot: false });
    }
    hub
}

#[test]
fn processes_that_die_before_they_open_their_streams_are_lost_soon_after_all_hubs_have_allocated() {
    let mut hub = connecting();
    // Another hub may take longer, and no worker is told before.
    assert!(hub.reach(RENDEZVOUS - OPENING / 2).is_empty());
    hub.handle(Event::Link { namespace: job(1) });
    hub.streams.missing.remove(&RANKS[0]);
    let outputs = hub.reach(OPENING);
    let [HubEvent::WorkerLost { rank: 1, reason, .. }] = reports(&outputs)[..] else { panic!("{outputs:?}") };
    assert!(reason.contains("did not open all streams within 8 s"), "{reason}");
    assert!(reports(&hub.reach(OPENING)).is_empty(), "it is reported once");
    assert_eq!(changes(&lose(&mut hub, 2)), [RankChange::Lose]);
    hub.streams.missing.clear();
    hub.check();
    assert!(matches!(hub.phase(1), Phase::Running));
}

#[test]
fn ranks_have_their_time_to_come_once_more_if_the_manager_restarts_before_it_has_answered_them() {
    let mut hub = connecting();
    let link = Event::Link { namespace: job(1) };
    assert!(has!(hub.handle(link.clone()), Output::Link { .. }));
    assert!(hub.reach(OPENING - OPENING / 8).is_empty());
    assert!(hub.handle(link.clone()).is_empty(), "the streams between hubs are ordered once");
    let late = hub.reach(OPENING);
    assert!(matches!(reports(&late)[..], [HubEvent::WorkerLost { .. }, HubEvent::WorkerLost { .. }]));
    // The manager did not know yet that the job runs, and has ignored that.
    assert!(hub.handle(link.clone()).is_empty());
    hub.streams.missing.remove(&RANKS[0]);
    assert!(matches!(reports(&hub.reach(OPENING))[..], [HubEvent::WorkerLost { rank: 1, .. }]));
    let died = lost(&mut hub);
    assert!(reports(&died).is_empty(), "it is known: {died:?}");
}

#[test]
fn ranks_that_come_when_the_manager_has_answered_them_have_time_while_it_is_away() {
    let mut hub = connecting();
    hub.handle(Event::Link { namespace: job(1) });
    hub.control.note_manager(Some(hub.now));
    assert!(hub.reach(OPENING * 2).is_empty());
    hub.control.note_manager(None);
    assert!(matches!(
        reports(&hub.reach(OPENING))[..],
        [HubEvent::WorkerLost { .. }, HubEvent::WorkerLost { .. }]
    ));
    // The same for processes that take their ranks later.
    let mut hub = replaced();
    hub.control.note_manager(Some(hub.now));
    assert!(hub.reach(OPENING * 2).is_empty());
    hub.control.note_manager(None);
    assert!(matches!(reports(&hub.reach(OPENING))[..], [HubEvent::WorkerLost { rank: 1, epoch: 3, .. }]));
}

#[test]
fn a_process_that_has_joined_must_open_its_streams_in_time() {
    let mut hub = replaced();
    let outputs = hub.reach(OPENING);
    let [HubEvent::WorkerLost { rank: 1, epoch: 3, reason, .. }] = reports(&outputs)[..] else {
        panic!("{outputs:?}")
    };
    assert!(reason.contains("did not open all streams within 8 s"), "{reason}");
    assert_eq!(changes(&lose(&mut hub, 4)), [RankChange::Lose]);
    let mut hub = replaced();
    hub.streams.missing.clear();
    assert!(hub.check().is_empty());
    hub.streams.missing.insert(RANKS[1]);
    hub.now += RENDEZVOUS * 2;
    assert!(hub.check().is_empty(), "its streams were there");
    let outputs = lost(&mut hub);
    assert!(has!(outputs, Output::Report(HubEvent::WorkerLost { rank: 1, epoch: 3, .. })));
}

#[test]
fn a_manager_that_has_restarted_answers_a_process_later() {
    let repeat: [fn(&mut Hub) -> Vec<Output>; 2] = [|hub| expect(hub, 3), |hub| join(hub, 3, 7)];
    for again in repeat {
        let mut hub = replaced();
        hub.now += OPENING / 2;
        assert_eq!(reports(&again(&mut hub)).len(), 1);
        let outputs = hub.reach(OPENING);
        assert!(has!(outputs, Output::Report(HubEvent::WorkerLost { rank: 1, epoch: 3, .. })));
    }
}

#[test]
fn a_manager_that_has_restarted_hears_of_the_losses_that_were_decided_before() {
    let mut hub = outliving();
    lost(&mut hub);
    lose(&mut hub, 2);
    let outputs = hub.handle(Event::ReportJobs { question: 7 });
    assert!(has!(outputs, Output::Report(HubEvent::WorkerLost { rank: 1, epoch: 2, .. })), "{outputs:?}");
    expect(&mut hub, 3);
    let outputs = hub.handle(Event::ReportJobs { question: 8 });
    assert!(!has!(outputs, Output::Report(HubEvent::WorkerLost { .. })), "a process takes it: {outputs:?}");
}

#[test]
fn a_process_may_be_lost_before_it_has_joined() {
    for answers in 0..2 {
        let mut hub = outliving();
        lost(&mut hub);
        lose(&mut hub, 2);
        expect(&mut hub, 3);
        (0..answers).for_each(|_| drop(expected(&mut hub, 3, 5)));
        assert_eq!(changes(&lose(&mut hub, 4)), [RankChange::Lose]);
        assert!(expected(&mut hub, 3, 5).is_empty() && join(&mut hub, 3, 5).is_empty());
        assert_eq!(changes(&expect(&mut hub, 5)), [RankChange::Expect]);
    }
}

#[test]
fn a_silent_worker_is_reported_although_the_manager_is_out_of_reach() {
    let mut hub = outliving();
    hub.control.note_manager(Some(hub.now - CUT_OFF * 2));
    let outputs = hub.fault(FaultCause::Silence);
    assert!(failures(&outputs).is_empty() && matches!(hub.phase(1), Phase::Running));
    assert!(has!(outputs, Output::Report(HubEvent::WorkerLost { rank: 1, epoch: 1, .. })));
}

#[test]
fn a_job_has_finished_when_those_who_remain_have_left() {
    let leave = |hub: &mut Hub, port: u32| {
        let left = |route: RouteId| CoreEvent::Left { route, port };
        ROUTES.iter().flat_map(|&route| hub.core(1, left(route))).collect::<Vec<Output>>()
    };
    let mut hub = outliving();
    lost(&mut hub);
    lose(&mut hub, 2);
    leave(&mut hub, 0);
    assert!(end(&hub.close(1)).finished);
    // The last who is lost decides if the others have left before.
    let mut hub = outliving();
    leave(&mut hub, 0);
    lost(&mut hub);
    lose(&mut hub, 2);
    assert!(end(&hub.close(1)).finished);
    // Another process must leave, too.
    let mut hub = replaced();
    hub.streams.missing.clear();
    leave(&mut hub, 0);
    assert!(matches!(hub.phase(1), Phase::Running));
    leave(&mut hub, 1);
    assert!(end(&hub.close(1)).finished);
}

#[test]
fn a_job_that_goes_on_with_all_its_ranks_alone_has_not_finished_without_one() {
    let mut hub = Hub::running(|terms| terms.min_workers = Some(2));
    ROUTES.iter().for_each(|&route| drop(hub.core(1, CoreEvent::Left { route, port: 0 })));
    lost(&mut hub);
    lose(&mut hub, 2);
    assert!(matches!(hub.phase(1), Phase::Running));
    // Unless the rank had left another hub before it was lost.
    hub.handle(Event::Finish { namespace: job(1) });
    assert!(end(&hub.close(1)).finished);
    // Those who are there are still waited for.
    let mut hub = Hub::running(|terms| terms.min_workers = Some(2));
    hub.handle(Event::Finish { namespace: job(1) });
    lost(&mut hub);
    lose(&mut hub, 2);
    assert!(matches!(hub.phase(1), Phase::Running));
    ROUTES.iter().for_each(|&route| drop(hub.core(1, CoreEvent::Left { route, port: 0 })));
    assert!(end(&hub.close(1)).finished);
}

#[test]
fn a_job_of_which_all_ranks_are_lost_has_not_finished() {
    let mut hub = outliving();
    lost(&mut hub);
    lose(&mut hub, 2);
    let all = hub.handle(Event::LoseRank { namespace: job(1), rank: 0, epoch: 3, reason: "rank 0".into() });
    assert!(failures(&all).is_empty() && matches!(hub.phase(1), Phase::Running));
}

#[test]
fn a_worker_that_has_left_every_route_is_reported_where_others_may_take_its_rank() {
    let left = |hub: &mut Hub, route| hub.core(1, CoreEvent::Left { route, port: 1 });
    let reported = |outputs: &[Output]| {
        let of_left = |event: &&&HubEvent| matches!(event, HubEvent::WorkerLeft { rank: 1, epoch: 1, .. });
        reports(outputs).iter().filter(of_left).count()
    };
    let mut hub = outliving();
    let counts = ROUTES.map(|route| reported(&left(&mut hub, route)));
    assert_eq!(counts.iter().sum::<usize>(), 1, "{counts:?}");
    assert_eq!(counts.last(), Some(&1), "once it has left all of them: {counts:?}");
    assert_eq!(
        reported(&hub.handle(Event::ReportJobs { question: 1 })),
        1,
        "a manager that restarts hears of it"
    );
    assert_eq!(changes(&lose(&mut hub, 2)), [RankChange::Lose], "another process takes it");
    let mut hub = Hub::running(|_| ());
    assert!(ROUTES.iter().all(|&route| reported(&left(&mut hub, route)) == 0));
}

#[test]
fn a_job_that_begins_without_a_rank_lets_a_process_join_in_it() {
    let mut hub = Hub::running(|terms| (terms.min_workers, terms.first_workers) = (Some(1), 1));
    assert!(lose(&mut hub, 1).is_empty(), "nobody has had the rank");
    assert_eq!(changes(&expect(&mut hub, 2)), [RankChange::Expect]);
    (0..2).for_each(|core| drop(expected(&mut hub, 2, 5 + core)));
    assert_eq!(changes(&join(&mut hub, 2, 6)), [RankChange::Join { step: Some(6) }]);
    joined(&mut hub, 2);
    let outputs = joined(&mut hub, 2);
    assert!(has!(outputs, Output::AdmitRank { rank: 1, epoch: 2, .. }));
    let told = "rank 1 of job `job-1` has joined, at step 6";
    assert!(has!(outputs, Output::Notify { notice, .. } if notice.message == told), "{outputs:?}");
    // From then on it is a rank like any other.
    lose(&mut hub, 3);
    expect(&mut hub, 4);
    (0..2).for_each(|_| drop(expected(&mut hub, 4, 8)));
    join(&mut hub, 4, 8);
    joined(&mut hub, 4);
    let told = "rank 1 of job `job-1` is back: another process has it";
    assert!(has!(joined(&mut hub, 4), Output::Notify { notice, .. } if notice.message == told));
}

#[test]
fn a_job_has_finished_when_those_have_left_who_have_joined() {
    let mut hub = Hub::running(|terms| (terms.min_workers, terms.first_workers) = (Some(1), 1));
    for route in ROUTES {
        hub.core(1, CoreEvent::Left { route, port: 0 });
    }
    assert!(matches!(hub.phase(1), Phase::Ending { .. }));
}
