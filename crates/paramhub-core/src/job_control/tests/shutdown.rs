use super::super::shutdown::{LAST_CHECKPOINT, SHUTDOWN};
use super::*;

fn closed(outputs: &[Output]) -> bool {
    has!(outputs, Output::StopCores)
}

#[test]
fn a_hub_without_jobs_stops_at_once() {
    let mut hub = Hub::new();
    let outputs = hub.handle(Event::ShutDown);
    assert!(matches!(outputs[..], [Output::ReportLeaving, Output::StopCores]), "{outputs:?}");
    assert!(hub.control.is_done());
    assert!(hub.handle(Event::ShutDown).is_empty() && hub.check().is_empty());
}

#[test]
fn a_hub_that_stops_ends_its_jobs_and_waits_until_they_are_freed() {
    let mut hub = Hub::running(|_| {});
    hub.run(2, |_| {});
    let outputs = hub.handle(Event::ShutDown);
    assert!(matches!(outputs[0], Output::ReportLeaving), "the manager gives it no further jobs");
    assert_eq!(failures(&outputs).len(), 2 * ROUTES.len());
    assert!(failures(&outputs)[0].message.ends_with("the hub is shutting down"));
    assert!(!closed(&hub.close(1)));
    assert!(closed(&hub.close(2)));
}

#[test]
fn a_hub_that_stops_does_not_wait_long_for_its_cores() {
    let mut hub = Hub::running(|_| {});
    hub.handle(Event::ShutDown);
    assert_eq!(hub.control.until_next_check(hub.now), SHUTDOWN);
    assert!(closed(&hub.reach(SHUTDOWN)));
    assert!(hub.close(1).is_empty(), "nothing comes after the end");
}

#[test]
fn last_checkpoints_are_taken_while_jobs_go_on() {
    let mut hub = Hub::running(|terms| terms.writes_checkpoints = true);
    hub.run(2, |terms| terms.writes_checkpoints = true);
    hub.run(3, |_| {});
    let outputs = hub.handle(Event::ShutDown);
    assert!(matches!(
        outputs[..],
        [
            Output::ReportLeaving,
            Output::TakeLastCheckpoint { .. },
            Output::TakeLastCheckpoint { before: LastCheckpoint::Shutdown, .. }
        ]
    ));
    assert!(hub.handle(Event::LastCheckpointTaken { namespace: job(1) }).is_empty());
    // What cores report still counts.
    assert_eq!(failures(&hub.fault(FaultCause::Kind(CauseKind::PeerLost))).len(), ROUTES.len());
    let outputs = hub.handle(Event::LastCheckpointTaken { namespace: job(2) });
    assert_eq!(failures(&outputs).len(), 2 * ROUTES.len(), "jobs 2 and 3 end now: {outputs:?}");
}

#[test]
fn a_last_checkpoint_that_does_not_come_holds_up_the_stop_for_a_bounded_time() {
    let mut hub = Hub::running(|terms| terms.writes_checkpoints = true);
    hub.handle(Event::ShutDown);
    let wait = hub.control.until_next_check(hub.now);
    assert!(wait > LAST_CHECKPOINT && wait < LAST_CHECKPOINT * 2);
    assert!(failure(&hub.reach(wait)).ends_with("the hub is shutting down"));
}

#[test]
fn a_hub_that_stops_waits_for_the_last_checkpoint_of_a_job_that_finishes() {
    let mut hub = Hub::running(|terms| terms.writes_checkpoints = true);
    hub.leave();
    let outputs = hub.handle(Event::ShutDown);
    assert!(matches!(outputs[..], [Output::ReportLeaving]), "it is being taken already: {outputs:?}");
    assert!(failures(&hub.handle(Event::LastCheckpointTaken { namespace: job(1) })).is_empty());
    let outputs = hub.close(1);
    assert!(end(&outputs).finished && closed(&outputs));
}

#[test]
fn a_job_that_ends_meanwhile_holds_up_the_stop_no_longer() {
    let mut hub = Hub::running(|terms| terms.writes_checkpoints = true);
    hub.handle(Event::ShutDown);
    hub.fault(FaultCause::Kind(CauseKind::PeerLost));
    let outputs = hub.close(1);
    assert!(closed(&outputs) && end(&outputs).reason == "rank 1 was lost");
}

#[test]
fn a_job_that_has_left_its_last_checkpoint_is_not_asked_for_another() {
    let mut hub = Hub::running(|terms| terms.writes_checkpoints = true);
    hub.stop(StopWhen::WorkersEnding);
    let outputs = hub.handle(Event::ShutDown);
    assert!(failure(&outputs).ends_with("the hub is shutting down"));
    assert!(!has!(outputs, Output::TakeLastCheckpoint { .. }));
}

#[test]
fn a_hub_that_stops_takes_no_job_and_no_command() {
    let mut hub = Hub::running(|terms| terms.writes_checkpoints = true);
    hub.handle(Event::ShutDown);
    assert!(!hub.control.wants(job(2), 1, 0));
    assert!(hub.handle(Event::Planned(Box::new(terms(2)))).is_empty() && !hub.is_here(2));
    assert!(hub.stop(StopWhen::Now).is_empty() && hub.handle(Event::Link { namespace: job(1) }).is_empty());
}
