use super::*;

/// Plans job 2 beside job 1, which takes 10 MiB and 4 streams, and returns why it is refused.
fn refused(hub: HubTerms, change: impl FnOnce(&mut JobTerms)) -> Option<String> {
    let mut hub = Hub::with(hub);
    hub.run(1, |_| {});
    let mut second = terms(2);
    change(&mut second);
    let outputs = hub.handle(Event::Planned(Box::new(second)));
    let reason = match reports(&outputs)[..] {
        [HubEvent::Refused { reason, .. }] => Some(reason.clone()),
        _ => None,
    };
    assert_eq!(reason.is_some(), has!(outputs, Output::Forget(of) if *of == job(2)));
    assert_eq!(reason.is_none(), hub.is_here(2));
    reason
}

fn limited(job_limits: JobLimits) -> HubTerms {
    HubTerms { job_limits, ..hub_terms() }
}

#[test]
fn the_memory_of_all_jobs_has_a_bound() {
    let hub = || HubTerms { memory_bytes: 30 << 20, ..hub_terms() };
    assert_eq!(refused(hub(), |job| job.routes[0].memory_bytes = 15 << 20), None);
    let why = refused(hub(), |job| job.routes[0].memory_bytes = (15 << 20) + 1).unwrap();
    assert!(why.contains("needs 21 MiB at this hub, which has 20 of 30 MiB free"), "{why}");
}

#[test]
fn the_streams_of_all_jobs_need_descriptors() {
    let hub = |descriptors_max| HubTerms { descriptors_max, ..hub_terms() };
    assert_eq!(refused(hub(8 + 32), |_| {}), None);
    let why = refused(hub(7 + 32), |_| {}).unwrap();
    assert!(why.contains("may have 39 files and sockets open, 4 of them"), "{why}");
}

#[test]
fn one_job_has_limits_of_its_own() {
    let memory = || limited(JobLimits { memory_bytes: Some(10 << 20), ..JobLimits::default() });
    assert_eq!(refused(memory(), |_| {}), None);
    let why = refused(memory(), |job| job.routes[0].memory_bytes += 1).unwrap();
    assert!(why.contains("gives 10 MiB to a job"), "{why}");

    let streams = || limited(JobLimits { streams: Some(4), ..JobLimits::default() });
    assert_eq!(refused(streams(), |_| {}), None);
    let why = refused(streams(), |job| job.routes[0].streams = 4).unwrap();
    assert!(why.contains("takes 4 of a job: 2 workers would fit"), "{why}");
}

#[test]
fn a_job_takes_no_more_than_is_left_to_its_team() {
    let allowance = |left| Some(Allowance { left, terms: "team `vision` has no more".into() });
    let memory = |left| TeamAllowance { memory_bytes: allowance(left), streams: None };
    assert_eq!(refused(hub_terms(), |job| job.team = memory(10 << 20)), None);
    let why = refused(hub_terms(), |job| job.team = memory((10 << 20) - 1)).unwrap();
    assert_eq!(why, "job `job-2` needs 10 MiB at this hub, and team `vision` has no more");

    let streams = |left| TeamAllowance { memory_bytes: None, streams: allowance(left) };
    assert_eq!(refused(hub_terms(), |job| job.team = streams(4)), None);
    let why = refused(hub_terms(), |job| job.team = streams(3)).unwrap();
    assert_eq!(why, "job `job-2` would open 4 streams to this hub, and team `vision` has no more");
}

#[test]
fn promises_of_a_core_do_not_exceed_it() {
    let hub = || limited(JobLimits { share_percent: Some(40), ..JobLimits::default() });
    assert_eq!(refused(hub(), |_| {}), None);
    let why = refused(hub(), |job| job.weight = 2).unwrap();
    assert!(why.contains("80 % of core 0 of this hub, of which 60 % are not promised"), "{why}");
    assert!(why.contains("a weight of 1 would fit"), "{why}");
}

#[test]
fn a_job_gets_no_chunks_at_an_interface_that_does_not_work() {
    let mut hub = Hub::new();
    hub.handle(Event::Interfaces { numbers: 0..1, down: Some("interface eth0 is down".into()) });
    let outputs = hub.handle(Event::Planned(Box::new(terms(1))));
    let [HubEvent::Refused { reason, .. }] = reports(&outputs)[..] else { panic!("{outputs:?}") };
    assert!(reason.contains("that does not work: interface eth0 is down"), "{reason}");
    hub.handle(Event::Interfaces { numbers: 0..1, down: None });
    assert!(has!(hub.handle(Event::Planned(Box::new(terms(1)))), Output::Open(_)));
}
