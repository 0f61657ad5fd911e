use super::*;

fn plan(hub: &mut Hub, change: impl FnOnce(&mut JobTerms)) -> Vec<Output> {
    let mut terms = terms(1);
    change(&mut terms);
    hub.handle(Event::Planned(Box::new(terms)))
}

fn opened(missing_bytes: Option<u64>) -> CoreEvent {
    CoreEvent::Opened { missing_bytes, has_snapshot: false }
}

#[test]
fn a_job_admits_streams_once_every_core_has_allocated() {
    let mut hub = Hub::new();
    hub.streams.missing.extend(RANKS);
    assert!(has!(plan(&mut hub, |_| {}), Output::Open(of) if *of == job(1)));
    assert!(hub.core(1, opened(None)).is_empty());
    assert!(matches!(hub.phase(1), Phase::Opening { routes: 1 }));
    let outputs = hub.core(1, opened(None));
    let [
        Output::AdmitStreams(_),
        Output::Report(HubEvent::Allocated { placement_hash, resumed_step, memory_bytes, streams, .. }),
    ] = &outputs[..]
    else {
        panic!("{outputs:?}");
    };
    assert_eq!((placement_hash.len(), resumed_step), (64, &None));
    assert_eq!((*memory_bytes, *streams), (10 << 20, 4), "of both routes, two streams each");
    assert!(matches!(hub.phase(1), Phase::Connecting { .. }));
}

#[test]
fn a_job_that_is_here_is_not_planned_again() {
    let mut hub = Hub::running(|_| {});
    assert!(!hub.control.wants(job(1), 1, 0) && hub.control.wants(job(2), 1, 0));
    assert!(plan(&mut hub, |_| {}).is_empty());
    let cannot_plan = Event::CannotPlan { namespace: job(1), reason: "no such optimizer".into() };
    assert!(hub.handle(cannot_plan).is_empty(), "the job that runs is not forgotten");
    assert!(matches!(hub.phase(1), Phase::Running));
}

#[test]
fn a_job_that_cannot_be_planned_is_refused_and_forgotten() {
    let mut hub = Hub::new();
    let outputs = hub.handle(Event::CannotPlan { namespace: job(1), reason: "no such optimizer".into() });
    let refused = Output::Report(HubEvent::Refused { namespace: job(1), reason: "no such optimizer".into() });
    assert_eq!(format!("{:?}", outputs[1]), format!("{refused:?}"));
    assert!(has!(outputs, Output::Forget(_)));
}

#[test]
fn a_job_without_chunks_here_finishes_at_once() {
    let mut hub = Hub::new();
    let outputs = plan(&mut hub, |terms| terms.routes.clear());
    assert!(matches!(reports(&outputs)[..], [HubEvent::Allocated { .. }]));
    assert!(end(&outputs).finished && !hub.is_here(1));
}

#[test]
fn a_job_for_which_a_core_has_no_memory_is_refused_and_freed() {
    let mut hub = Hub::new();
    plan(&mut hub, |_| {});
    let outputs = hub.core(1, opened(Some(3 << 20)));
    let ended = outputs.iter().filter(|output| matches!(output, Output::End { failure: None, .. })).count();
    assert_eq!(ended, ROUTES.len());
    let [HubEvent::Refused { reason, .. }] = reports(&outputs)[..] else { panic!("{outputs:?}") };
    assert!(reason.contains("needs 10 MiB") && reason.contains("no 3 MiB left"), "{reason}");
    assert!(!hub.is_here(1));
    // What the other core answers no longer matters.
    assert!(hub.core(1, opened(None)).is_empty() && hub.close(1).is_empty());
}

#[test]
fn a_job_that_resumes_opens_when_its_checkpoint_is_read() {
    let mut hub = Hub::new();
    let outputs = plan(&mut hub, |terms| terms.resumes = true);
    assert!(has!(outputs, Output::Load(_)) && !has!(outputs, Output::Open(_)));
    assert!(has!(
        hub.handle(Event::Loaded { namespace: job(1), result: Ok(Beginning::Checkpoint(7)) }),
        Output::Open(_)
    ));
    hub.core(1, opened(None));
    let outputs = hub.core(1, opened(None));
    assert!(matches!(reports(&outputs)[..], [HubEvent::Allocated { resumed_step: Some(7), .. }]));
}

#[test]
fn a_job_that_finds_no_checkpoint_to_go_on_from_by_itself_begins_anew_and_says_why() {
    let mut hub = Hub::new();
    plan(&mut hub, |terms| terms.resumes = true);
    let anew = Beginning::Anew("its last run finished at step 9".into());
    let outputs = hub.handle(Event::Loaded { namespace: job(1), result: Ok(anew) });
    let says =
        |output: &Output| format!("{output:?}").contains("begins anew: its last run finished at step 9");
    assert!(outputs.iter().any(says) && has!(outputs, Output::Open(_)), "{outputs:?}");
    hub.core(1, opened(None));
    let outputs = hub.core(1, opened(None));
    assert!(matches!(reports(&outputs)[..], [HubEvent::Allocated { resumed_step: None, .. }]));
}

#[test]
fn a_job_whose_checkpoint_cannot_be_read_is_refused() {
    let mut hub = Hub::new();
    plan(&mut hub, |terms| terms.resumes = true);
    let outputs = hub.handle(Event::Loaded { namespace: job(1), result: Err("no such file".into()) });
    let [HubEvent::Refused { reason, .. }] = reports(&outputs)[..] else { panic!("{outputs:?}") };
    assert_eq!(reason, "job `job-1` cannot go on: no such file");
    assert!(has!(outputs, Output::Forget(_)) && !hub.is_here(1));
}

#[test]
fn a_job_that_is_stopped_while_its_checkpoint_is_read_ends_when_that_is_done() {
    for result in [Ok(Beginning::Checkpoint(7)), Err("no such file".to_string())] {
        let mut hub = Hub::new();
        plan(&mut hub, |terms| terms.resumes = true);
        assert!(failure(&hub.stop(StopWhen::Now)).ends_with("enough"));
        let outputs = hub.handle(Event::Loaded { namespace: job(1), result });
        assert_eq!(end(&outputs).cause, CauseKind::Hearsay);
        assert!(!has!(outputs, Output::Open(_)) && !hub.is_here(1));
    }
}

#[test]
fn a_job_that_is_stopped_while_it_opens_ends_when_every_core_has_answered() {
    let mut hub = Hub::new();
    plan(&mut hub, |_| {});
    hub.stop(StopWhen::Now);
    assert!(hub.core(1, opened(None)).is_empty(), "what has opened must also close");
    let closed = CoreEvent::Closed { counters: JobCounters::default(), left_out: Vec::new() };
    assert!(hub.core(1, closed).is_empty());
    assert_eq!(end(&hub.core(1, opened(Some(1)))).reason, "enough", "what did not open has nothing to close");
}

#[test]
fn checkpoints_are_written_where_a_route_has_memory_for_them() {
    let start = |writes_checkpoints, has_snapshot| {
        let mut hub = Hub::new();
        plan(&mut hub, |terms| terms.writes_checkpoints = writes_checkpoints);
        let opened = || CoreEvent::Opened { missing_bytes: None, has_snapshot };
        let outputs: Vec<Output> = ROUTES.iter().flat_map(|_| hub.core(1, opened())).collect();
        has!(outputs, Output::StartCheckpoints(_))
    };
    assert_eq!([start(true, true), start(true, false), start(false, true)], [true, false, false]);
}

#[test]
fn a_job_whose_checkpoint_is_not_read_in_time_is_refused_with_the_folder_and_the_limit() {
    for result in [Ok(Beginning::Checkpoint(7)), Err("no such file".to_string())] {
        let mut hub = Hub::new();
        plan(&mut hub, |terms| (terms.resumes, terms.routes[0].memory_bytes) = (true, 55 << 20));
        let outputs = hub.reach(RENDEZVOUS.mul_f64(READING_SHARE));
        let [HubEvent::Refused { reason, .. }] = reports(&outputs)[..] else { panic!("{outputs:?}") };
        assert!(reason.contains("in /data/job-1 was not read within 27 s"), "{reason}");
        assert!(hub.check().is_empty(), "it is refused once");
        // What was decided stays, and the thread that reads still holds the memory.
        assert!(hub.stop(StopWhen::Now).is_empty() && !hub.control.wants(job(1), 1, 0));
        let mut other = terms(2);
        other.routes[0].memory_bytes = 55 << 20;
        let outputs = hub.handle(Event::Planned(Box::new(other.clone())));
        assert!(matches!(reports(&outputs)[..], [HubEvent::Refused { .. }]), "{outputs:?}");
        let outputs = hub.handle(Event::Loaded { namespace: job(1), result });
        assert!(matches!(outputs[..], [Output::Forget(_)]) && !hub.is_here(1), "{outputs:?}");
        assert!(has!(hub.handle(Event::Planned(Box::new(other))), Output::Open(_)));
    }
}
