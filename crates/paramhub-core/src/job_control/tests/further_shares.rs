//! A hub that serves share 0 and is asked to become the standby of share 2, too, which another hub serves.

use super::standbys::{change, roles};
use super::*;
use crate::job_control::standbys::RoleChange;
use crate::service::{FurtherShares, HubEvent};
use crate::standbys::Share;

const FURTHER: RouteId = 2;
const MEMORY_BYTES: u64 = 7 << 20;

/// The shares, of which the last two lack a standby or have this one.
fn shares(further: Option<u16>) -> Vec<Share> {
    let last = Share { copying: further.is_some(), ..Share::new(1, further) };
    vec![Share::new(0, Some(1)), Share::new(1, None), last]
}

/// The job runs at this hub, which has given its part in share 1 up.
fn running() -> Hub {
    let mut hub = Hub::running(|terms| {
        terms.shares = vec![Share::new(0, Some(1)), Share::new(1, Some(0)), Share::new(1, None)];
        for (route, share) in terms.routes.iter_mut().zip(0..) {
            (route.share, route.streams) = (share, 3);
        }
    });
    let outputs = change(&mut hub, 1, shares(None));
    assert_eq!(roles(&outputs), [(1, RoleChange::Stop)]);
    assert_eq!(allocated(&outputs), [(None, 5 << 20)], "it has one route left");
    hub
}

fn further(number: u32) -> FurtherShares {
    FurtherShares { number, shares: vec![2] }
}

/// The manager asks the hub for the further share.
fn ask(hub: &mut Hub, number: u32) -> Vec<Output> {
    let mut terms = terms(1);
    let route =
        RouteTerms { id: FURTHER, share: 2, streams: 3, memory_bytes: MEMORY_BYTES, ..terms.routes[1] };
    terms.routes = vec![route];
    assert!(hub.control.wants_further(job(1), 1, 0, &further(number)));
    hub.handle(Event::PlannedFurther { terms: Box::new(terms), further: further(number) })
}

fn opened(hub: &mut Hub, missing_bytes: Option<u64>) -> Vec<Output> {
    hub.core(1, CoreEvent::Opened { missing_bytes, has_snapshot: false })
}

fn closed(hub: &mut Hub) -> Vec<Output> {
    hub.core(1, CoreEvent::Closed { counters: JobCounters::default(), left_out: Vec::new() })
}

/// The reports of what the hub has allocated: the number of further shares, and its memory.
fn allocated(outputs: &[Output]) -> Vec<(Option<u32>, u64)> {
    let allocated = reports(outputs).into_iter().filter_map(|event| match event {
        HubEvent::Allocated { further, memory_bytes, .. } => Some((*further, *memory_bytes)),
        _ => None,
    });
    allocated.collect()
}

fn refused(outputs: &[Output]) -> Option<&str> {
    reports(outputs).into_iter().find_map(|event| match event {
        HubEvent::Refused { reason, .. } => Some(reason.as_str()),
        _ => None,
    })
}

/// The hub has allocated the further share.
fn with_further() -> Hub {
    let mut hub = running();
    closed(&mut hub);
    let outputs = ask(&mut hub, 1);
    assert!(has!(outputs, Output::OpenFurther { routes, .. } if *routes == [FURTHER]), "{outputs:?}");
    assert!(allocated(&outputs).is_empty());
    assert_eq!(allocated(&opened(&mut hub, None)), [(Some(1), (5 << 20) + MEMORY_BYTES)]);
    hub
}

#[test]
fn a_hub_allocates_a_further_share_and_is_its_standby_until_it_gives_it_up() {
    let mut hub = with_further();
    assert!(!hub.control.wants_further(job(1), 1, 0, &further(1)), "the same command has come again");
    let again = hub.handle(again(1, 0));
    assert_eq!(allocated(&again), [(Some(1), (5 << 20) + MEMORY_BYTES)]);
    let outputs = change(&mut hub, 2, shares(Some(0)));
    assert!(roles(&outputs).is_empty() && allocated(&outputs).is_empty(), "{outputs:?}");
    assert_eq!(allocated(&hub.handle(Event::ReportJobs { question: 1 }))[0].0, None, "that is known");
    let outputs = change(&mut hub, 3, shares(None));
    assert_eq!(roles(&outputs), [(FURTHER, RoleChange::Stop)]);
    assert_eq!(allocated(&outputs), [(None, 5 << 20)]);
    // A core still frees what the hub has given up.
    assert!(ask(&mut hub, 3).is_empty());
    assert!(!hub.control.wants_further(job(1), 1, 0, &further(3)), "it waits");
    assert!(has!(closed(&mut hub), Output::OpenFurther { routes, .. } if *routes == [FURTHER]));
    assert_eq!(allocated(&opened(&mut hub, None)), [(Some(3), (5 << 20) + MEMORY_BYTES)]);
}

#[test]
fn a_hub_gives_a_further_share_up_with_a_change_that_does_not_make_it_the_standby() {
    for is_open in [false, true] {
        let mut hub = running();
        closed(&mut hub);
        ask(&mut hub, 1);
        if is_open {
            opened(&mut hub, None);
        }
        let other = vec![Share::new(0, None), Share::new(1, None), Share::new(1, None)];
        assert!(roles(&change(&mut hub, 2, other)).contains(&(FURTHER, RoleChange::Stop)));
        assert!(hub.control.wants_further(job(1), 1, 0, &further(2)));
    }
}

#[test]
fn a_hub_gives_up_further_shares_of_which_the_manager_that_asks_for_others_does_not_know() {
    let mut hub = with_further();
    let other = FurtherShares { number: 1, shares: vec![1, 2] };
    assert!(hub.control.wants_further(job(1), 1, 0, &other));
    let terms = Box::new(JobTerms { routes: Vec::new(), ..terms(1) });
    let outputs = hub.handle(Event::PlannedFurther { terms, further: other });
    assert_eq!(roles(&outputs), [(FURTHER, RoleChange::Stop)]);
    assert!(has!(closed(&mut hub), Output::OpenFurther { routes, .. } if routes.is_empty()));
    // Another change of the shares withdraws also what waits.
    let mut hub = with_further();
    change(&mut hub, 2, shares(None));
    assert!(ask(&mut hub, 2).is_empty());
    change(&mut hub, 3, shares(None));
    assert!(!has!(closed(&mut hub), Output::OpenFurther { .. }));
    assert!(hub.control.wants_further(job(1), 1, 0, &further(3)));
}

#[test]
fn a_hub_that_takes_over_a_further_share_finishes_with_it() {
    let mut hub = with_further();
    change(&mut hub, 2, shares(Some(0)));
    let taken_over = vec![Share::new(0, None), Share::new(0, None), Share::new(0, None)];
    let outputs = change(&mut hub, 4, taken_over);
    assert!(roles(&outputs).contains(&(FURTHER, RoleChange::TakeOver)), "{outputs:?}");
    for port in [0, 1] {
        let left = hub.core(1, CoreEvent::Left { route: 0, port });
        assert!(!has!(left, Output::End { .. }), "the further route has workers, too");
    }
    hub.core(1, CoreEvent::Left { route: FURTHER, port: 0 });
    assert!(has!(
        hub.core(1, CoreEvent::Left { route: FURTHER, port: 1 }),
        Output::End { failure: None, .. }
    ));
}

#[test]
fn a_further_share_for_which_there_is_no_memory_is_refused_and_the_job_goes_on() {
    let mut hub = running();
    closed(&mut hub);
    ask(&mut hub, 1);
    let outputs = opened(&mut hub, Some(MEMORY_BYTES));
    assert!(refused(&outputs).unwrap().contains("no 7 MiB left"), "{outputs:?}");
    assert!(matches!(hub.phase(1), Phase::Running));
    assert_eq!(refused(&ask(&mut hub, 1)), None, "it may be asked again");

    let mut hub = Hub::with(HubTerms { memory_bytes: 12 << 20, ..hub_terms() });
    hub.run(1, |terms| terms.shares = vec![Share::new(0, None), Share::new(1, None), Share::new(1, None)]);
    assert!(refused(&ask(&mut hub, 1)).unwrap().contains("MiB free"));
    assert!(matches!(hub.phase(1), Phase::Running));
}

#[test]
fn the_end_of_a_job_waits_for_the_routes_that_were_given_up() {
    let mut hub = with_further();
    change(&mut hub, 2, shares(None));
    hub.stop(StopWhen::Now);
    assert!(!has!(closed(&mut hub), Output::Forget(_)), "one is still there");
    assert!(has!(closed(&mut hub), Output::Forget(_)));
}
