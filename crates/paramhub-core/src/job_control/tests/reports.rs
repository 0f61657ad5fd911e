use super::*;

/// The ends among outputs.
fn ends(outputs: &[Output]) -> Vec<&EndReport> {
    let ends = outputs.iter().filter_map(|output| match output {
        Output::ReportEnd(report) => Some(report),
        _ => None,
    });
    ends.collect()
}

#[test]
fn a_manager_that_restarts_hears_of_every_job() {
    let mut hub = Hub::running(|_| {});
    hub.run(2, |_| {});
    hub.handle(Event::Planned(Box::new(terms(3))));
    let decided = hub.now;
    hub.leave();
    hub.core(2, CoreEvent::CannotGoOn { reason: "index".into() });
    hub.now += seconds(9.0);
    hub.close(1);
    let outputs = hub.handle(Event::ReportJobs { question: 7 });
    let [HubEvent::Allocated { namespace, streams: 4, .. }, HubEvent::AllReported { question: 7 }] =
        reports(&outputs)[..]
    else {
        panic!("{outputs:?}");
    };
    assert_eq!(*namespace, job(2), "it still frees what it had, and job 3 is not open yet");
    let [EndReport { end, since, counters }] = ends(&outputs)[..] else { panic!("{outputs:?}") };
    assert_eq!((end.namespace, end.finished, *since), (job(1), true, decided));
    assert_eq!(counters.namespace, job(1));
    // It may restart again.
    hub.close(2);
    let outputs = hub.handle(Event::ReportJobs { question: 8 });
    assert_eq!(
        ends(&outputs).iter().map(|report| report.end.namespace).collect::<Vec<_>>(),
        [job(1), job(2)]
    );
    assert!(matches!(reports(&outputs)[..], [HubEvent::AllReported { question: 8 }]));
}

#[test]
fn the_newest_ends_are_kept() {
    let mut hub = Hub::new();
    for number in 0..=ENDS_KEPT {
        let mut terms = terms(0);
        terms.namespace = Namespace((number as u128).to_le_bytes());
        terms.routes.clear();
        hub.handle(Event::Planned(Box::new(terms)));
    }
    let outputs = hub.handle(Event::ReportJobs { question: 8 });
    let kept = ends(&outputs);
    assert_eq!((kept.len(), kept[0].end.namespace), (ENDS_KEPT, Namespace(1u128.to_le_bytes())));
}

#[test]
fn a_job_that_is_to_be_allocated_again_is_reported_once_it_is_open() {
    let mut hub = Hub::new();
    hub.handle(Event::Planned(Box::new(terms(1))));
    assert!(hub.handle(again(1, 0)).is_empty());
    hub.core(1, CoreEvent::Opened { missing_bytes: None, has_snapshot: false });
    let first = hub.core(1, CoreEvent::Opened { missing_bytes: None, has_snapshot: false });
    assert_eq!(reports(&first), reports(&hub.handle(again(1, 0))));
    assert!(hub.handle(again(2, 0)).is_empty());
}

#[test]
fn a_job_that_has_ended_is_not_allocated_again_unless_the_hub_had_none_of_it() {
    let mut hub = Hub::running(|_| {});
    hub.leave();
    hub.close(1);
    assert!(!hub.control.wants(job(1), 1, 0), "the order came from a manager that has restarted since");
    assert!(hub.handle(Event::Planned(Box::new(terms(1)))).is_empty());
    let again = hub.handle(again(1, 0));
    assert!(again.is_empty() && !hub.is_here(1), "{again:?}");
    let without_chunks = || Event::Planned(Box::new(JobTerms { routes: Vec::new(), ..terms(2) }));
    let first = hub.handle(without_chunks());
    let second = hub.handle(without_chunks());
    assert!(matches!(reports(&first)[..], [HubEvent::Allocated { .. }]), "{first:?}");
    assert_eq!((reports(&first), ends(&second).len()), (reports(&second), 1));
}
