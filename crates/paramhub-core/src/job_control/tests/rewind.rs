//! Jobs whose ranks all go back to an earlier step when one of them is lost, at a hub.

use super::*;

/// A running job that goes back.
fn rewinding() -> Hub {
    Hub::running(|terms| (terms.min_workers, terms.rewinds) = (Some(2), true))
}

fn rewind(hub: &mut Hub, epoch: u64) -> Vec<Output> {
    hub.handle(Event::Rewind { namespace: job(1), rank: Some(1), epoch, reason: "rank 1 was lost".into() })
}

fn expect(hub: &mut Hub, (rank, epoch): (u32, u64)) -> Vec<Output> {
    hub.handle(Event::ExpectRank { namespace: job(1), rank, epoch })
}

fn join(hub: &mut Hub, (rank, epoch): (u32, u64), step: impl Into<Option<u32>>) -> Vec<Output> {
    hub.handle(Event::JoinRank { namespace: job(1), rank, epoch, step: step.into() })
}

/// A core names a step.
fn named(hub: &mut Hub, (rank, epoch): (u32, u64), step: impl Into<Option<u32>>) -> Vec<Output> {
    hub.core(1, CoreEvent::RankExpected { rank, epoch, step: step.into() })
}

/// All chunks of a core have gone back.
fn joined(hub: &mut Hub, (rank, epoch): (u32, u64)) -> Vec<Output> {
    hub.core(1, CoreEvent::RankJoined { rank, epoch })
}

fn expected((rank, epoch): (u32, u64), step: impl Into<Option<u32>>) -> HubEvent {
    HubEvent::RankExpected { namespace: job(1), rank, epoch, step: step.into() }
}

/// The changes of a rank that all cores are to make.
fn changes(outputs: &[Output], of: u32) -> Vec<RankChange> {
    let of_cores = outputs.iter().filter_map(|output| match output {
        Output::ChangeRank { rank, change, .. } if *rank == of => Some(*change),
        _ => None,
    });
    let mut of_cores: Vec<RankChange> = of_cores.collect();
    assert!(of_cores.len().is_multiple_of(ROUTES.len()), "every core changes: {outputs:?}");
    of_cores.dedup();
    of_cores
}

/// The cores that are to close all streams of the job.
fn rewound(outputs: &[Output]) -> usize {
    outputs.iter().filter(|output| matches!(output, Output::Rewind { .. })).count()
}

/// Both ranks are lost in epoch 2 and have processes since epochs 3 and 4, of which cores have named steps.
fn all_named() -> Hub {
    let mut hub = rewinding();
    rewind(&mut hub, 2);
    for of in [(0, 3), (1, 4)] {
        expect(&mut hub, of);
        [9, 5].into_iter().for_each(|step| drop(named(&mut hub, of, step)));
    }
    hub
}

/// Both processes have joined, and have yet to open their streams.
fn all_joined() -> Hub {
    let mut hub = all_named();
    hub.streams.missing.extend(RANKS);
    for of in [(0, 3), (1, 4)] {
        join(&mut hub, of, 4);
        (0..2).for_each(|_| drop(joined(&mut hub, of)));
    }
    hub
}

#[test]
fn all_ranks_are_lost_and_told_why() {
    let mut hub = rewinding();
    let outputs = hub.fault(FaultCause::Kind(CauseKind::PeerLost));
    assert!(matches!(reports(&outputs)[..], [HubEvent::WorkerLost { rank: 1, epoch: 1, .. }]));
    let outputs = rewind(&mut hub, 2);
    for lost in 0..2 {
        assert!(has!(outputs, Output::RefuseRank { rank, epoch: 2, .. } if *rank == lost));
    }
    let told = "job `job-1` goes back to an earlier step: rank 1 was lost. It goes on when each of its ranks has a \
                process again";
    let with_reason = outputs.iter().filter(|output| {
        matches!(output, Output::Rewind { epoch: 2, notice, .. } if notice.rank == Some(1) && notice.message == told)
    });
    assert_eq!(with_reason.count(), ROUTES.len());
    assert!(failures(&outputs).is_empty() && matches!(hub.phase(1), Phase::Running));
    // A manager that has restarted says so again, and hears it in case that the one before could not save it.
    assert!(rewind(&mut hub, 2).is_empty());
    assert!(reports(&hub.fault(FaultCause::Silence)).is_empty(), "it is known");
    let again = hub.handle(Event::ReportJobs { question: 1 });
    assert!(has!(again, Output::Report(HubEvent::WorkerLost { epoch: 2, .. })));
    assert!(!has!(again, Output::Report(HubEvent::WorkerLost { epoch: 1, .. })), "{again:?}");
}

#[test]
fn all_go_back_to_the_earliest_step_of_all_cores() {
    let mut hub = rewinding();
    rewind(&mut hub, 2);
    assert_eq!(changes(&expect(&mut hub, (0, 3)), 0), [RankChange::Expect]);
    assert!(expect(&mut hub, (0, 3)).is_empty(), "the cores have not answered");
    assert!(reports(&named(&mut hub, (0, 3), 5)).is_empty());
    assert_eq!(reports(&named(&mut hub, (0, 3), 9)), [&expected((0, 3), 5)]);
    assert_eq!(reports(&expect(&mut hub, (0, 3))), [&expected((0, 3), 5)], "to a manager that has restarted");
    assert!(join(&mut hub, (0, 2), 4).is_empty(), "an epoch that is over");
    assert_eq!(changes(&join(&mut hub, (0, 3), 4), 0), [RankChange::Join { step: Some(4) }]);
    assert!(join(&mut hub, (0, 3), 4).is_empty(), "chunks are going back");
    assert_eq!(reports(&expect(&mut hub, (0, 3))), [&expected((0, 3), 4)], "the step to which they go back");
    assert!(reports(&joined(&mut hub, (0, 3))).is_empty());
    let outputs = joined(&mut hub, (0, 3));
    let report = HubEvent::RankJoined { namespace: job(1), rank: 0, epoch: 3 };
    assert_eq!(reports(&outputs), [&report]);
    assert!(has!(outputs, Output::AdmitRank { rank: 0, epoch: 3, .. }));
    assert_eq!(reports(&join(&mut hub, (0, 3), 4)), [&report], "to a manager that has restarted");
    assert!(rewind(&mut hub, 2).is_empty(), "from one that has restarted");
    assert_eq!(changes(&expect(&mut hub, (1, 4)), 1), [RankChange::Expect], "the other rank is as far");
}

#[test]
fn all_begin_anew_if_the_chunks_of_a_core_have_no_parameters() {
    let mut hub = rewinding();
    rewind(&mut hub, 2);
    expect(&mut hub, (0, 3));
    assert!(reports(&named(&mut hub, (0, 3), None)).is_empty());
    assert_eq!(reports(&named(&mut hub, (0, 3), 0)), [&expected((0, 3), None)]);
    assert_eq!(changes(&join(&mut hub, (0, 3), None), 0), [RankChange::Join { step: None }]);
    assert_eq!(reports(&expect(&mut hub, (0, 3))), [&expected((0, 3), None)], "from one that has restarted");
    joined(&mut hub, (0, 3));
    assert!(has!(joined(&mut hub, (0, 3)), Output::AdmitRank { rank: 0, epoch: 3, .. }));
}

#[test]
fn all_ranks_may_be_lost_again_at_any_moment() {
    let begun: [fn() -> Hub; 3] = [
        || {
            let mut hub = rewinding();
            rewind(&mut hub, 2);
            expect(&mut hub, (0, 3));
            named(&mut hub, (0, 3), 5);
            hub
        },
        all_named,
        || {
            let mut hub = all_named();
            join(&mut hub, (0, 3), 4);
            joined(&mut hub, (0, 3));
            hub
        },
    ];
    for begin in begun.into_iter().chain([all_joined as fn() -> Hub]) {
        let mut hub = begin();
        assert_eq!(rewound(&rewind(&mut hub, 5)), ROUTES.len());
        // Answers and commands that belong to the time before.
        assert!(named(&mut hub, (0, 3), 5).is_empty() && joined(&mut hub, (0, 3)).is_empty());
        assert!(join(&mut hub, (0, 3), 4).is_empty() && expect(&mut hub, (0, 3)).is_empty());
        assert!(rewind(&mut hub, 2).is_empty());
        for of in [(0, 6), (1, 7)] {
            assert_eq!(changes(&expect(&mut hub, of), of.0), [RankChange::Expect]);
            assert!(reports(&named(&mut hub, of, 4)).is_empty());
            assert_eq!(reports(&named(&mut hub, of, 4)), [&expected(of, 4)]);
        }
    }
}

#[test]
fn a_process_that_has_joined_and_opens_no_streams_is_reported() {
    let mut hub = all_joined();
    hub.streams.missing.remove(&RANKS[0]);
    hub.check();
    hub.now += seconds(8.0);
    let outputs = hub.check();
    assert!(matches!(reports(&outputs)[..], [HubEvent::WorkerLost { rank: 1, epoch: 4, .. }]), "{outputs:?}");
    assert!(failures(&outputs).is_empty());
}

#[test]
fn a_job_that_cannot_go_back_ends_with_the_reason() {
    let mut hub = rewinding();
    rewind(&mut hub, 2);
    expect(&mut hub, (0, 3));
    let reason = "a chunk of key `w` cannot go back".to_string();
    let outputs = hub.core(1, CoreEvent::CannotGoOn { reason });
    assert_eq!(failure(&outputs), "job `job-1` failed: a chunk of key `w` cannot go back");
    assert!(rewind(&mut hub, 3).is_empty(), "it is over");
}

#[test]
fn ranks_that_have_left_must_leave_again() {
    let left = |hub: &mut Hub, port| {
        ROUTES.iter().for_each(|&route| drop(hub.core(1, CoreEvent::Left { route, port })));
    };
    let mut hub = rewinding();
    left(&mut hub, 0);
    rewind(&mut hub, 2);
    assert!(matches!(hub.phase(1), Phase::Running), "a job of which all ranks are lost has not finished");
    for of in [(0, 3), (1, 4)] {
        expect(&mut hub, of);
        [9, 5].into_iter().for_each(|step| drop(named(&mut hub, of, step)));
        join(&mut hub, of, 4);
        (0..2).for_each(|_| drop(joined(&mut hub, of)));
    }
    left(&mut hub, 1);
    assert!(matches!(hub.phase(1), Phase::Running));
    left(&mut hub, 0);
    assert!(end(&hub.close(1)).finished);
    // Unless all had left another hub.
    let mut hub = rewinding();
    left(&mut hub, 0);
    rewind(&mut hub, 2);
    hub.handle(Event::Finish { namespace: job(1) });
    assert!(end(&hub.close(1)).finished);
}

#[test]
fn a_job_that_goes_on_with_fewer_ranks_has_finished_when_these_have_left() {
    let mut hub = rewinding();
    rewind(&mut hub, 2);
    expect(&mut hub, (0, 3));
    [9, 5].into_iter().for_each(|step| drop(named(&mut hub, (0, 3), step)));
    join(&mut hub, (0, 3), 4);
    (0..2).for_each(|_| drop(joined(&mut hub, (0, 3))));
    ROUTES.iter().for_each(|&route| drop(hub.core(1, CoreEvent::Left { route, port: 0 })));
    assert!(end(&hub.close(1)).finished, "rank 1 takes no part any more");
}

/// A running job at several sites, which begins again from its newest checkpoint.
fn beginning_again() -> Hub {
    Hub::running(|terms| terms.begins_again = true)
}

fn faulted(hub: &mut Hub, kind: CauseKind, message: &str) -> Vec<Output> {
    let cause = FaultCause::Kind(kind);
    let (route, culprit, message) = (ROUTES[0], RANKS[1], message.to_owned());
    hub.core(1, CoreEvent::Faulted { route, culprit, message, cause })
}

/// What a site hears that ends its part of the job.
fn failure(outputs: &[Output]) -> &str {
    let failures = outputs.iter().find_map(|output| match output {
        Output::End { failure: Some(failure), .. } => Some(failure.message.as_str()),
        _ => None,
    });
    failures.unwrap_or_else(|| panic!("{outputs:?}"))
}

#[test]
fn a_site_sends_its_ranks_back_and_ends_its_part_when_it_loses_a_rank_or_another_site() {
    let mut hub = beginning_again();
    let outputs = faulted(&mut hub, CauseKind::PeerLost, "rank 1 was lost");
    assert_eq!(rewound(&outputs), ROUTES.len());
    assert_eq!(failure(&outputs), "job `job-1` goes back to its newest checkpoint: rank 1 was lost");
    // Another site hears this, and says it once.
    let mut other = beginning_again();
    let outputs = faulted(&mut other, CauseKind::GaveUp, failure(&outputs));
    assert_eq!(failure(&outputs), "job `job-1` goes back to its newest checkpoint: rank 1 was lost");
    let mut hub = beginning_again();
    let outputs = faulted(&mut hub, CauseKind::Known, "rank 1 sent a frame that it may not send");
    assert_eq!(rewound(&outputs), 0, "it would send it again");
    // The manager says that the job begins again, and then that this part is to end.
    let mut hub = beginning_again();
    assert_eq!(rewound(&rewind(&mut hub, 2)), ROUTES.len());
    let stop = Event::Stop { namespace: job(1), reason: "rank 1 was lost".into(), when: StopWhen::Now };
    assert_eq!(rewound(&hub.handle(stop)), 0);
}

#[test]
fn a_core_that_panics_costs_a_job_with_checkpoints_no_more_than_a_rewind() {
    let panicked = || CoreEvent::Panicked { reason: "core 0 of its hub panicked".into() };
    for change in [(|terms: &mut JobTerms| terms.begins_again = true) as fn(&mut JobTerms), |terms| {
        (terms.min_workers, terms.rewinds, terms.writes_checkpoints) = (Some(2), true, true)
    }] {
        let mut hub = Hub::new();
        let mut terms = terms(1);
        change(&mut terms);
        hub.handle(Event::Planned(Box::new(terms)));
        for _ in ROUTES {
            hub.core(1, CoreEvent::Opened { missing_bytes: None, has_snapshot: true });
        }
        let outputs = hub.core(1, panicked());
        assert_eq!(rewound(&outputs), ROUTES.len(), "{outputs:?}");
        let mut closed = Vec::new();
        for _ in ROUTES {
            closed =
                hub.core(1, CoreEvent::Closed { counters: JobCounters::default(), left_out: Vec::new() });
        }
        assert!(
            matches!(&closed[..], [Output::ReportEnd(report), ..] if report.end.cause == CauseKind::HubLost),
            "{closed:?}"
        );
    }
    let outputs = rewinding().core(1, panicked());
    assert_eq!(rewound(&outputs), 0, "it has no checkpoint to go back to");
}
