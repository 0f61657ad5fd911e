use super::*;
use crate::job_control::EndReport;

#[test]
fn a_job_ends_with_its_first_cause_and_is_reported_when_every_route_is_freed() {
    let mut hub = Hub::running(|_| {});
    let decided = hub.now;
    let outputs = hub.fault(FaultCause::Kind(CauseKind::PeerLost));
    assert!(has!(outputs, Output::RefuseStreams { message, .. } if message.ends_with("rank 1 was lost")));
    assert_eq!(failures(&outputs)[0].rank, Some(1));
    // Later causes change nothing.
    hub.now += seconds(1.0);
    assert!(hub.stop(StopWhen::Now).is_empty());
    assert!(hub.core(1, CoreEvent::CannotGoOn { reason: "index".into() }).is_empty());
    assert!(hub.leave().is_empty());
    let counted = |bytes_received| JobCounters { bytes_received, ..JobCounters::default() };
    assert!(hub.core(1, CoreEvent::Closed { counters: counted(3), left_out: vec![0, 2] }).is_empty());
    let outputs = hub.core(1, CoreEvent::Closed { counters: counted(4), left_out: vec![1] });
    let [Output::ReportEnd(EndReport { end, since, counters }), Output::Forget(_)] = &outputs[..] else {
        panic!("{outputs:?}");
    };
    assert_eq!((end.finished, end.rank, end.cause), (false, Some(1), CauseKind::PeerLost));
    assert_eq!((*since, counters.counters.bytes_received, &counters.left_out), (decided, 7, &vec![1, 2]));
    assert!(!hub.is_here(1) && hub.close(1).is_empty());
}

#[test]
fn a_job_finishes_when_every_neighbour_has_left_by_every_port() {
    let mut hub = Hub::running(|_| {});
    for (route, port) in [(0, 0), (0, 1), (1, 0), (1, 0)] {
        assert!(hub.core(1, CoreEvent::Left { route, port }).is_empty());
    }
    let outputs = hub.core(1, CoreEvent::Left { route: 1, port: 1 });
    assert!(has!(outputs, Output::End { failure: None, .. }) && failures(&outputs).is_empty());
    assert!(end(&hub.close(1)).finished);
}

#[test]
fn the_last_checkpoint_is_taken_before_a_finished_job_is_freed() {
    let mut hub = Hub::running(|terms| terms.writes_checkpoints = true);
    let outputs = hub.leave();
    assert!(
        matches!(outputs[..], [Output::TakeLastCheckpoint { before: LastCheckpoint::Finish, .. }]),
        "{outputs:?}"
    );
    // The job has finished, whatever stop comes after that.
    assert!(hub.stop(StopWhen::Now).is_empty() && hub.stop(StopWhen::WorkersEnded).is_empty());
    hub.now += OUTCOME_TIMEOUT * 2;
    assert!(hub.check().is_empty());
    let outputs = hub.handle(Event::LastCheckpointTaken { namespace: job(1) });
    assert!(matches!(outputs[0], Output::StopCheckpoints(_)), "before the cores free what it copies");
    assert!(has!(outputs, Output::End { failure: None, .. }));
    assert!(hub.handle(Event::LastCheckpointTaken { namespace: job(1) }).is_empty());
    assert!(end(&hub.close(1)).finished);
}

#[test]
fn a_disk_that_does_not_answer_keeps_a_finished_job_for_a_bounded_time() {
    let mut hub = Hub::running(|terms| terms.writes_checkpoints = true);
    hub.leave();
    let outputs = hub.reach(LAST_CHECKPOINT_TIMEOUT);
    assert!(
        matches!(outputs[1], Output::StopCheckpoints(_)),
        "before the cores free what it copies: {outputs:?}"
    );
    let reason = failure(&outputs);
    assert!(reason.contains("within 300 s") && reason.contains("written to /data/job-1"), "{reason}");
    assert!(hub.handle(Event::LastCheckpointTaken { namespace: job(1) }).is_empty());
    let outputs = hub.close(1);
    assert_eq!((end(&outputs).finished, end(&outputs).cause), (false, CauseKind::Known));
}

#[test]
fn a_core_that_panics_ends_a_job_although_its_last_checkpoint_is_being_taken() {
    let mut hub = Hub::running(|terms| terms.writes_checkpoints = true);
    hub.leave();
    assert!(failure(&hub.core(1, CoreEvent::CannotGoOn { reason: "index".into() })).ends_with("index"));
    assert!(hub.handle(Event::LastCheckpointTaken { namespace: job(1) }).is_empty());
    assert!(!end(&hub.close(1)).finished);
}

#[test]
fn a_stop_ends_a_job_at_once_and_that_of_an_unknown_job_is_answered() {
    let mut hub = Hub::running(|_| {});
    assert_eq!(failure(&hub.stop(StopWhen::Now)), "job `job-1` failed: enough");
    hub.close(1);
    for when in [StopWhen::Now, StopWhen::WorkersEnded] {
        let outputs = hub.stop(when);
        let [HubEvent::Ended(end)] = reports(&outputs)[..] else { panic!("{outputs:?}") };
        assert_eq!((&*end.reason, end.cause), ("enough", CauseKind::Hearsay));
    }
    let outputs = hub.stop(StopWhen::WorkersEnding);
    assert!(matches!(reports(&outputs)[..], [HubEvent::Kept { .. }]));
}

#[test]
fn a_job_whose_workers_have_ended_has_some_time_to_receive_what_they_sent() {
    let mut hub = Hub::running(|_| {});
    assert!(hub.stop(StopWhen::WorkersEnded).is_empty());
    hub.now += seconds(1.0);
    // A second order does not extend the first.
    hub.stop(StopWhen::WorkersEnded);
    assert!(failure(&hub.reach(OUTCOME_TIMEOUT - seconds(1.0))).ends_with("enough"));
    assert_eq!(end(&hub.close(1)).cause, CauseKind::Hearsay);

    let mut hub = Hub::running(|_| {});
    hub.stop(StopWhen::WorkersEnded);
    hub.leave();
    assert!(end(&hub.close(1)).finished, "all Leaves came in time");
}

#[test]
fn a_job_that_has_lost_all_workers_is_soon_concluded() {
    let mut hub = Hub::running(|terms| terms.min_workers = Some(1));
    for (rank, epoch) in [(0, 2), (1, 3)] {
        let reason = format!("rank {rank} was lost");
        hub.handle(Event::LoseRank { namespace: job(1), rank, epoch, reason });
    }
    hub.stop(StopWhen::WorkersEnded);
    assert!(failure(&hub.reach(seconds(2.0))).ends_with("enough"), "they may have left another hub before");
}

#[test]
fn a_job_whose_workers_are_about_to_be_ended_goes_on_after_a_last_checkpoint() {
    let mut hub = Hub::running(|terms| terms.writes_checkpoints = true);
    let outputs = hub.stop(StopWhen::WorkersEnding);
    assert!(
        matches!(outputs[..], [Output::TakeLastCheckpoint { before: LastCheckpoint::EndOfWorkers, .. }]),
        "{outputs:?}"
    );
    assert!(matches!(hub.phase(1), Phase::Running));
    let outputs = hub.handle(Event::CheckpointKept { namespace: job(1) });
    assert!(matches!(reports(&outputs)[..], [HubEvent::Kept { .. }]));
    assert!(matches!(hub.phase(1), Phase::Running));

    let mut hub = Hub::running(|_| {});
    let outputs = hub.stop(StopWhen::WorkersEnding);
    assert!(matches!(reports(&outputs)[..], [HubEvent::Kept { .. }]), "there are no checkpoints");

    let mut hub = Hub::running(|terms| (terms.writes_checkpoints, terms.min_workers) = (true, Some(2)));
    hub.fault(FaultCause::Kind(CauseKind::PeerLost));
    hub.handle(Event::LoseRank { namespace: job(1), rank: 1, epoch: 2, reason: "rank 1 was lost".into() });
    let outputs = hub.stop(StopWhen::WorkersEnding);
    let before = LastCheckpoint::FailureForWorkers;
    assert!(has!(outputs, Output::TakeLastCheckpoint { before: of, .. } if *of == before), "{outputs:?}");
}

#[test]
fn an_announced_end_is_the_reason_unless_the_hub_knows_a_better_one() {
    let mut hub = Hub::running(|_| {});
    hub.stop(StopWhen::WorkersEnding);
    hub.fault(FaultCause::Kind(CauseKind::PeerLost));
    let outputs = hub.close(1);
    assert_eq!((&*end(&outputs).reason, end(&outputs).cause), ("enough", CauseKind::Known));
    assert_eq!(end(&outputs).rank, None);

    let mut hub = Hub::running(|_| {});
    hub.stop(StopWhen::WorkersEnding);
    hub.fault(FaultCause::Kind(CauseKind::Known));
    assert_eq!(end(&hub.close(1)).reason, "rank 1 was lost");
}

#[test]
fn jobs_end_independently() {
    let mut hub = Hub::running(|_| {});
    hub.run(2, |_| {});
    hub.stop(StopWhen::Now);
    assert!(matches!(hub.phase(2), Phase::Running));
    end(&hub.close(1));
    assert!(hub.is_here(2) && !hub.is_here(1));
}
