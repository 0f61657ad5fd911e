use super::*;
use crate::exchange::Awaited;
use crate::service::AwaitedRanks;

/// The ranks that get a notice, `None` for all, and its text.
fn notices(outputs: &[Output]) -> Vec<(Option<u32>, &str)> {
    let notices = outputs.iter().filter_map(|output| match output {
        Output::Notify { core: 0, to, notice, .. } => Some((to, &*notice.message)),
        _ => None,
    });
    let rank = |to: &Recipient| match to {
        Recipient::Rank(rank) => Some(*rank),
        Recipient::Site(_) | Recipient::All => None,
    };
    notices.map(|(to, message)| (rank(to), message)).collect()
}

fn waits(waited_s: u64, awaited: Awaited, has_expired: bool) -> OverdueEvent {
    let waited = Duration::from_secs(waited_s);
    OverdueEvent::Late(OverdueNeighbours {
        neighbours: vec![RANKS[1]],
        awaited,
        key: "w".into(),
        waited,
        has_expired,
    })
}

fn awaited(hub: &mut Hub, route: RouteId, event: OverdueEvent) -> Vec<Output> {
    hub.core(1, CoreEvent::Awaited { route, event })
}

#[test]
fn the_silence_of_a_rank_is_announced_once_and_so_is_its_end() {
    let mut hub = Hub::running(|_| {});
    let silent = CoreEvent::Silence { neighbour: RANKS[1], seconds: Some(3.0) };
    let outputs = hub.core(1, silent.clone());
    let text = "rank 1 of job `job-1` has not been heard for 3 s; the job fails after 15 s";
    assert_eq!(notices(&outputs), [(Some(0), text)]);
    assert!(matches!(reports(&outputs)[..], [HubEvent::Noticed { .. }]));
    assert!(hub.core(1, silent).is_empty(), "every stream reports it");
    let heard = CoreEvent::Silence { neighbour: RANKS[1], seconds: None };
    assert_eq!(notices(&hub.core(1, heard.clone())), [(Some(0), "rank 1 of job `job-1` is heard again")]);
    assert!(hub.core(1, heard).is_empty());
}

#[test]
fn a_rank_that_goes_on_over_another_interface_is_announced_once_in_a_while() {
    let mut hub = Hub::running(|terms| terms.continues = true);
    let moved = CoreEvent::Moved { route: ROUTES[0], neighbour: RANKS[1], by: 1 };
    let outputs = hub.core(1, moved.clone());
    let text = "rank 1 of job `job-1` goes on over eth1: a stream of it was cut";
    assert_eq!(notices(&outputs), [(Some(0), text)]);
    hub.now += RESUME / 2;
    assert!(hub.core(1, moved.clone()).is_empty(), "another of its streams");
    hub.now += RESUME;
    assert_eq!(notices(&hub.core(1, moved)).len(), 1);
}

#[test]
fn a_late_rank_is_announced_to_itself_and_to_rank_0_at_every_magnitude() {
    let mut hub = Hub::running(|_| {});
    let late =
        |rank, steps| CoreEvent::Late(LateNeighbour { neighbour: Neighbour::Worker(rank), steps, of: 500 });
    let recipients = |outputs: Vec<Output>| -> Vec<Option<u32>> {
        notices(&outputs).iter().map(|(rank, _)| *rank).collect()
    };
    assert_eq!(recipients(hub.core(1, late(1, 1))), [Some(0), Some(1)]);
    assert_eq!(recipients(hub.core(1, late(1, 9))), []);
    assert_eq!(recipients(hub.core(1, late(1, 10))), [Some(0), Some(1)]);
    assert_eq!(recipients(hub.core(1, late(0, 1))), [Some(0)]);
}

#[test]
fn a_notice_of_another_hub_goes_to_all_ranks() {
    let mut hub = Hub::running(|_| {});
    let tell = |namespace| Event::Tell { namespace, rank: Some(1), message: "rank 1 is slow".into() };
    assert_eq!(notices(&hub.handle(tell(job(1)))), [(None, "rank 1 is slow")]);
    assert!(hub.handle(tell(job(2))).is_empty());
}

#[test]
fn a_rank_that_others_wait_for_is_announced_at_every_magnitude_until_the_job_goes_on() {
    let mut hub = Hub::running(|_| {});
    let step = Awaited::Contribution(7);
    let outputs = awaited(&mut hub, 0, waits(2, step, false));
    let text =
        "rank 1 of job `job-1` is awaited: others have waited 2 s for its contribution to step 7 of key `w`";
    assert_eq!(notices(&outputs), [(None, text)]);
    let [HubEvent::Awaited { awaited: Some(AwaitedRanks { ranks, .. }), .. }] = reports(&outputs)[..] else {
        panic!("{outputs:?}");
    };
    assert_eq!(ranks, &[1]);
    assert!(awaited(&mut hub, 1, waits(3, step, false)).is_empty(), "every route reports it");
    assert_eq!(notices(&awaited(&mut hub, 1, waits(10, step, false))).len(), 1);
    let over = OverdueEvent::Over { waited: Duration::from_secs(11) };
    assert!(awaited(&mut hub, 0, over.clone()).is_empty(), "a route still waits");
    let outputs = awaited(&mut hub, 1, over.clone());
    assert_eq!(notices(&outputs), [(None, "job `job-1` goes on: rank 1 kept the others waiting for 11 s")]);
    assert!(matches!(reports(&outputs)[..], [HubEvent::Awaited { awaited: None, .. }]));
    assert!(awaited(&mut hub, 1, over).is_empty());
}

#[test]
fn a_wait_that_reaches_the_limit_of_the_job_ends_it() {
    let mut hub = Hub::running(|terms| terms.progress_timeout = Some(seconds(60.0)));
    let outputs = awaited(&mut hub, 0, waits(60, Awaited::Contribution(7), true));
    let reason = "rank 1 made no progress: others have waited 60 s for its contribution to step 7 of key `w`, and the \
                  job ends after 60 s of that (progress_timeout_s)";
    assert_eq!(failure(&outputs), format!("job `job-1` failed: {reason}"));
    let outputs = hub.close(1);
    assert_eq!((end(&outputs).cause, end(&outputs).rank), (CauseKind::Known, Some(1)));
}

#[test]
fn a_release_counts_when_all_routes_wait_for_it() {
    let mut hub = Hub::running(|_| {});
    assert!(awaited(&mut hub, 0, waits(5, Awaited::Release(3), false)).is_empty());
    assert_eq!(notices(&awaited(&mut hub, 1, waits(5, Awaited::Release(3), false))).len(), 1);
}

#[test]
fn a_job_that_is_ending_announces_nothing() {
    let mut hub = Hub::running(|_| {});
    hub.stop(StopWhen::Now);
    assert!(hub.core(1, CoreEvent::Silence { neighbour: RANKS[1], seconds: Some(3.0) }).is_empty());
    assert!(awaited(&mut hub, 0, waits(5, Awaited::Contribution(7), false)).is_empty());
}

#[test]
fn a_probe_is_refused_while_a_job_is_here() {
    let order = || {
        Event::Probe(crate::service::ProbeOrder {
            probe: job(9),
            nonce: crate::auth::Nonce([1; 32]),
            dial: Vec::new(),
            streams: 1,
        })
    };
    let mut hub = Hub::new();
    assert!(has!(hub.handle(order()), Output::Probe { refused: None, .. }));
    hub.run(1, |_| {});
    assert!(has!(hub.handle(order()), Output::Probe { refused: Some(why), .. } if why.contains("job-1")));
}
