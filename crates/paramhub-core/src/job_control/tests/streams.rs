use super::*;

fn down(hub: &mut Hub, interface: u16) -> Vec<Output> {
    let down = Some(format!("interface eth{interface} is down"));
    hub.handle(Event::Interfaces { numbers: interface..interface + 1, down })
}

fn up(hub: &mut Hub, interface: u16) -> Vec<Output> {
    hub.handle(Event::Interfaces { numbers: interface..interface + 1, down: None })
}

/// A running job with the streams of rank 1 over interface 1.
fn over_interface_1(continues: bool) -> Hub {
    let mut hub = Hub::running(|terms| terms.continues = continues);
    hub.streams.through.insert(1, vec![(1, 1, RANKS[1]), (0, 1, RANKS[1])]);
    hub
}

#[test]
fn ranks_whose_streams_do_not_open_in_time_end_the_job() {
    let mut hub = Hub::new();
    hub.streams.missing.extend(RANKS);
    hub.handle(Event::Planned(Box::new(terms(1))));
    for _ in ROUTES {
        hub.core(1, CoreEvent::Opened { missing_bytes: None, has_snapshot: false });
    }
    hub.streams.missing.remove(&RANKS[0]);
    let outputs = hub.reach(RENDEZVOUS);
    assert_eq!(
        failure(&outputs),
        "job `job-1` failed: rank 1 did not open all streams to the hub within 30 s"
    );
    assert_eq!(failures(&outputs)[0].rank, Some(1));
    assert_eq!(end(&hub.close(1)).cause, CauseKind::PeerLost);
}

#[test]
fn a_job_whose_streams_are_all_here_has_no_deadline() {
    let mut hub = Hub::running(|_| {});
    hub.now += RENDEZVOUS * 10;
    assert!(hub.check().is_empty());
}

#[test]
fn streams_to_sites_above_are_ordered_once_and_have_a_deadline() {
    let mut hub = Hub::running(|_| {});
    let outputs = hub.handle(Event::Link { namespace: job(1) });
    let [Output::Link { until, .. }] = outputs[..] else { panic!("{outputs:?}") };
    assert_eq!(until, hub.now + RENDEZVOUS);
    assert!(hub.handle(Event::Link { namespace: job(1) }).is_empty());
    assert!(hub.handle(Event::Link { namespace: job(2) }).is_empty());
    let lost = Event::SitesUnreachable { namespace: job(1), reason: "the hub above is away".into() };
    assert!(failure(&hub.handle(lost)).ends_with("the hub above is away"));
    assert_eq!(end(&hub.close(1)).cause, CauseKind::PeerLost);
}

#[test]
fn a_job_that_cannot_be_linked_ends() {
    let mut hub = Hub::running(|_| {});
    let outputs = hub.handle(Event::CannotLink { namespace: job(1), reason: "no threads".into() });
    assert!(failure(&outputs).ends_with("no threads"));
    assert_eq!(end(&hub.close(1)).cause, CauseKind::Known);
}

#[test]
fn a_job_that_may_not_continue_ends_with_the_interface_of_its_streams() {
    let mut hub = over_interface_1(false);
    assert!(down(&mut hub, 0).is_empty(), "no stream of it is there");
    up(&mut hub, 0);
    assert_eq!(failure(&down(&mut hub, 1)), "job `job-1` failed: the hub's interface eth1 is down");
    assert_eq!(end(&hub.close(1)).cause, CauseKind::Known);
}

#[test]
fn a_job_that_may_continue_has_some_time_to_come_by_another_interface() {
    let mut hub = over_interface_1(true);
    assert!(down(&mut hub, 1).is_empty());
    let reason = "the hub's interface eth1 is down, and rank 1 did not come by another within 10 s";
    assert!(failure(&hub.reach(RESUME)).ends_with(reason));

    let mut hub = over_interface_1(true);
    down(&mut hub, 1);
    hub.now += RESUME / 2;
    hub.streams.through.clear();
    assert!(hub.check().is_empty());
    hub.now += RESUME;
    assert!(hub.check().is_empty(), "all streams go on elsewhere");

    let mut hub = over_interface_1(true);
    down(&mut hub, 1);
    hub.now += RESUME / 2;
    up(&mut hub, 1);
    hub.now += RESUME;
    assert!(hub.check().is_empty(), "the interface is back");
}

#[test]
fn a_job_that_may_continue_ends_at_once_without_another_interface() {
    let mut hub = over_interface_1(true);
    assert!(down(&mut hub, 0).is_empty());
    assert!(failure(&down(&mut hub, 1)).ends_with("eth1 is down; no other of its interfaces is left"));
}

#[test]
fn a_stream_by_which_a_neighbour_has_left_needs_no_other_interface() {
    let mut hub = over_interface_1(true);
    for route in ROUTES {
        hub.core(1, CoreEvent::Left { route, port: 1 });
    }
    down(&mut hub, 1);
    hub.now += RESUME * 2;
    assert!(hub.check().is_empty());
}

#[test]
fn a_silent_rank_is_at_fault_unless_the_hub_is_cut_off_itself() {
    for (out_of_reach, cause) in [
        (None, CauseKind::PeerLost),
        (Some(CUT_OFF - Duration::from_millis(1)), CauseKind::PeerLost),
        (Some(CUT_OFF), CauseKind::Known),
    ] {
        let mut hub = Hub::running(|_| {});
        hub.control.note_manager(out_of_reach.map(|time| hub.now - time));
        let outputs = hub.fault(FaultCause::Silence);
        assert_eq!(failure(&outputs).contains("the hub is cut off"), cause == CauseKind::Known);
        assert!(failure(&outputs).ends_with("rank 1 was lost"));
        assert_eq!(end(&hub.close(1)).cause, cause, "{out_of_reach:?}");
    }
    let mut hub = Hub::running(|_| {});
    hub.control.note_manager(Some(hub.now - CUT_OFF * 2));
    hub.fault(FaultCause::Kind(CauseKind::GaveUp));
    assert_eq!(end(&hub.close(1)).cause, CauseKind::GaveUp, "a rank that speaks is not cut off");
}
