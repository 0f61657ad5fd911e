//! A hub of two, which serves share 0 by route 0 and is the standby of share 1 by route 1.

use super::*;
use crate::job_control::shutdown::LAST_COPIES;
use crate::job_control::standbys::LOSS_CERTAIN;
use crate::service::HubEvent;
use crate::standbys::Share;

fn shares(of: [(u16, Option<u16>); 2]) -> Vec<Share> {
    of.map(|(served_by, standby)| Share::new(served_by, standby)).to_vec()
}

fn whole() -> Vec<Share> {
    shares([(0, Some(1)), (1, Some(0))])
}

/// The job runs at this hub.
fn running() -> Hub {
    Hub::running(|terms| {
        terms.shares = whole();
        for (route, share) in terms.routes.iter_mut().zip(0..) {
            (route.share, route.streams) = (share, 3);
        }
    })
}

fn lose(hub: &mut Hub, route: RouteId) -> Vec<Output> {
    let culprit = Neighbour::Counterpart(route);
    let cause = FaultCause::Kind(CauseKind::PeerLost);
    hub.core(1, CoreEvent::Faulted { route, culprit, message: "the other hub was lost".into(), cause })
}

pub(super) fn change(hub: &mut Hub, number: u32, shares: Vec<Share>) -> Vec<Output> {
    let (later_hubs, reason) = (Vec::new(), "a hub was lost".into());
    hub.handle(Event::ChangeShares { namespace: job(1), number, shares, later_hubs, reason })
}

/// Lets time pass.
fn wait(hub: &mut Hub, time: Duration) -> Vec<Output> {
    hub.now += time;
    hub.check()
}

pub(super) fn roles(outputs: &[Output]) -> Vec<(RouteId, RoleChange)> {
    let role = |output: &Output| match output {
        Output::ChangeRole { route, role, .. } => Some((*route, *role)),
        _ => None,
    };
    outputs.iter().filter_map(role).collect()
}

fn reported(outputs: &[Output]) -> Vec<(u16, u16, u32)> {
    let lost = |output: &Output| match output {
        Output::Report(HubEvent::HubLost { share, hub, number, .. }) => Some((*share, *hub, *number)),
        _ => None,
    };
    outputs.iter().filter_map(lost).collect()
}

fn has_failed(outputs: &[Output]) -> bool {
    outputs.iter().any(|output| matches!(output, Output::End { failure: Some(_), .. }))
}

#[test]
fn a_lost_standby_is_reported_once_and_the_manager_has_the_share_go_on_alone() {
    let mut hub = running();
    let outputs = lose(&mut hub, 0);
    assert_eq!((reported(&outputs), has_failed(&outputs)), (vec![(0, 1, 0)], false));
    assert!(reported(&lose(&mut hub, 0)).is_empty());
    let outputs = change(&mut hub, 1, shares([(0, None), (1, Some(0))]));
    assert_eq!(roles(&outputs), [(0, RoleChange::GoOnAlone)]);
    assert!(roles(&change(&mut hub, 1, whole())).is_empty(), "the change comes again");
    assert!(reported(&lose(&mut hub, 0)).is_empty(), "it has no other hub any more");
}

#[test]
fn workers_are_sent_away_while_it_is_not_known_which_hub_serves_them() {
    let mut hub = running();
    lose(&mut hub, 0);
    assert!(roles(&wait(&mut hub, seconds(0.2))).is_empty());
    assert_eq!(roles(&wait(&mut hub, seconds(0.2))), [(0, RoleChange::Doubt)]);
    assert!(roles(&wait(&mut hub, seconds(5.0))).is_empty(), "once");
    hub.streams.missing.insert(RANKS[1]);
    assert_eq!(roles(&change(&mut hub, 1, shares([(0, None), (1, Some(0))]))), [(0, RoleChange::GoOnAlone)]);
    assert!(!has_failed(&wait(&mut hub, seconds(20.0))));
    assert!(has_failed(&wait(&mut hub, seconds(6.0))), "rank 1 has not come");
}

#[test]
fn a_standby_takes_over_and_waits_for_its_workers() {
    let mut hub = running();
    assert_eq!(reported(&lose(&mut hub, 1)), [(1, 1, 0)]);
    assert!(roles(&wait(&mut hub, seconds(5.0))).is_empty(), "a standby has no workers to send away");
    let outputs = change(&mut hub, 1, shares([(0, None), (0, None)]));
    assert_eq!(roles(&outputs), [(0, RoleChange::GoOnAlone), (1, RoleChange::TakeOver)]);
    hub.streams.missing.insert(RANKS[0]);
    assert!(!has_failed(&wait(&mut hub, seconds(20.0))));
    hub.streams.missing.clear();
    assert!(!has_failed(&wait(&mut hub, seconds(60.0))));
}

#[test]
fn a_hub_without_a_share_ends_its_part_without_a_word_to_its_workers() {
    let mut hub = running();
    lose(&mut hub, 0);
    let outputs = change(&mut hub, 1, shares([(1, None), (1, None)]));
    assert!(outputs.iter().any(|output| matches!(output, Output::SendElsewhere { .. })));
    assert!(!has_failed(&outputs));
    let outputs = hub.close(1);
    assert!(outputs.iter().any(|output| matches!(output, Output::Forget(_))));
    assert!(!outputs.iter().any(|output| matches!(output, Output::ReportEnd(_))), "the job has not ended");
}

#[test]
fn a_part_that_the_manager_ends_while_it_ends_already_is_reported() {
    let mut hub = running();
    change(&mut hub, 1, shares([(1, None), (1, None)]));
    hub.stop(StopWhen::Now);
    let outputs = hub.close(1);
    assert!(
        outputs.iter().any(|output| matches!(output, Output::ReportEnd(_))),
        "a job that begins again waits for this"
    );
}

#[test]
fn a_core_that_panics_hands_the_job_over_if_it_can() {
    let panicked = || CoreEvent::Panicked { reason: "core 0 of its hub panicked".into() };
    let mut hub = running();
    let outputs = hub.core(1, panicked());
    assert_eq!((reported(&outputs), has_failed(&outputs)), (vec![(0, 0, 0)], false));
    let mut hub = running();
    change(&mut hub, 1, shares([(0, None), (1, Some(0))]));
    assert!(has_failed(&hub.core(1, panicked())), "no other hub has share 0");
}

#[test]
fn a_job_finishes_when_the_workers_of_its_own_share_and_the_other_hub_have_left() {
    let mut hub = running();
    for (route, port) in [(0, 0), (0, 1), (0, 2), (1, 2)] {
        let outputs = hub.core(1, CoreEvent::Left { route, port });
        let finished = outputs.iter().any(|output| matches!(output, Output::End { failure: None, .. }));
        assert_eq!(finished, (route, port) == (1, 2));
    }
}

#[test]
fn a_standby_that_has_taken_over_does_not_wait_for_workers_that_had_left() {
    let mut hub = running();
    hub.core(1, CoreEvent::Left { route: 1, port: 1 });
    lose(&mut hub, 1);
    change(&mut hub, 1, shares([(0, None), (0, None)]));
    for (route, port) in [(0, 0), (0, 1)] {
        hub.core(1, CoreEvent::Left { route, port });
    }
    let outputs = hub.core(1, CoreEvent::Left { route: 1, port: 0 });
    assert!(outputs.iter().any(|output| matches!(output, Output::End { failure: None, .. })));
}

#[test]
fn a_manager_that_has_restarted_hears_again_which_hub_is_lost() {
    let mut hub = running();
    lose(&mut hub, 0);
    assert_eq!(reported(&hub.handle(Event::ReportJobs { question: 1 })), [(0, 1, 0)]);
}

/// This hub serves both shares alone, and gets the hub at position 2 as the standby of the first.
fn with_new_standby() -> (Hub, Vec<Output>) {
    let mut hub = running();
    lose(&mut hub, 1);
    let lost = change(&mut hub, 1, shares([(0, None), (0, None)]));
    assert!(has!(lost, Output::Notify { .. }) && has!(lost, Output::Warning(_)), "{lost:?}");
    let copying = Share { copying: true, ..Share::new(0, Some(2)) };
    let outputs = change(&mut hub, 2, vec![copying, Share::new(0, None)]);
    (hub, outputs)
}

fn ready(outputs: &[Output]) -> Vec<(u16, u16)> {
    let ready = |output: &Output| match output {
        Output::Report(HubEvent::StandbyReady { share, standby, .. }) => Some((*share, *standby)),
        _ => None,
    };
    outputs.iter().filter_map(ready).collect()
}

#[test]
fn a_new_standby_is_linked_and_the_manager_hears_when_it_has_all_chunks() {
    let (mut hub, outputs) = with_new_standby();
    assert_eq!(roles(&outputs), [(0, RoleChange::TakeStandby { standby: 2 })]);
    assert!(!has!(outputs, Output::Notify { .. } | Output::Warning(_)), "no rank need know: {outputs:?}");
    let linked = |output: &Output| matches!(output, Output::LinkStandbys { routes, .. } if *routes == [0]);
    assert!(outputs.iter().any(linked), "{outputs:?}");
    assert_eq!(ready(&hub.core(1, CoreEvent::Copied { route: 0 })), [(0, 2)]);
    // The manager may have restarted before it had the report.
    assert_eq!(ready(&hub.handle(Event::ReportJobs { question: 1 })), [(0, 2)]);
    let outputs = change(&mut hub, 3, shares([(0, Some(2)), (0, None)]));
    assert!(roles(&outputs).is_empty(), "it goes on as before");
    assert!(ready(&hub.handle(Event::ReportJobs { question: 2 })).is_empty(), "the manager knows it");
}

#[test]
fn a_new_standby_that_is_at_fault_or_out_of_reach_counts_as_lost() {
    let (mut hub, _) = with_new_standby();
    let unreachable = |standby| Event::StandbyUnreachable {
        namespace: job(1),
        route: 0,
        standby,
        reason: "refused".into(),
    };
    assert!(reported(&hub.handle(unreachable(1))).is_empty(), "that is not the standby any more");
    assert_eq!(reported(&hub.handle(unreachable(2))), [(0, 2, 2)]);
    let (mut hub, _) = with_new_standby();
    let fault = |hub: &mut Hub| {
        let (culprit, cause) = (Neighbour::Counterpart(0), FaultCause::Kind(CauseKind::GaveUp));
        hub.core(1, CoreEvent::Faulted { route: 0, culprit, message: "it gave up".into(), cause })
    };
    let outputs = fault(&mut hub);
    assert_eq!((reported(&outputs), has_failed(&outputs)), (vec![(0, 2, 2)], false));
    assert!(ready(&hub.core(1, CoreEvent::Copied { route: 0 })).is_empty(), "it is lost");
    let (mut hub, _) = with_new_standby();
    change(&mut hub, 3, shares([(0, Some(2)), (0, None)]));
    assert!(has_failed(&fault(&mut hub)), "the job may depend on it");
}

#[test]
fn a_hub_that_misses_a_change_does_what_both_say() {
    let (mut hub, _) = with_new_standby();
    let next = Share { copying: true, ..Share::new(0, Some(3)) };
    let outputs = change(&mut hub, 4, vec![next, Share::new(0, None)]);
    let roles_of_0 = [RoleChange::GoOnAlone, RoleChange::TakeStandby { standby: 3 }].map(|role| (0, role));
    assert_eq!(roles(&outputs), roles_of_0);
    let mut hub = running();
    lose(&mut hub, 1);
    let outputs = change(&mut hub, 2, vec![Share::new(0, None), next]);
    let roles_of_1 = [RoleChange::TakeOver, RoleChange::TakeStandby { standby: 3 }].map(|role| (1, role));
    assert_eq!(roles(&outputs), [vec![(0, RoleChange::GoOnAlone)], roles_of_1.to_vec()].concat());
}

#[test]
fn a_hub_whose_standby_has_not_all_chunks_does_not_hand_over() {
    let (mut hub, _) = with_new_standby();
    assert!(has_failed(&hub.handle(Event::ShutDown)), "another share has no standby at all");
    // The manager may have heard already that the standby has them.
    let (mut hub, _) = with_new_standby();
    let copying = Share { copying: true, ..Share::new(0, Some(2)) };
    change(&mut hub, 3, vec![copying, Share::new(1, None)]);
    hub.core(1, CoreEvent::Copied { route: 0 });
    let outputs = hub.handle(Event::ShutDown);
    assert_eq!((reported(&outputs), has_failed(&outputs)), (vec![(0, 0, 3)], false));
}

#[test]
fn a_hub_that_shuts_down_waits_until_its_standbys_have_all_chunks_but_not_long() {
    let copying = || {
        let (mut hub, _) = with_new_standby();
        change(&mut hub, 3, vec![Share { copying: true, ..Share::new(0, Some(2)) }, Share::new(1, None)]);
        assert!(!has_failed(&hub.handle(Event::ShutDown)));
        hub
    };
    let mut hub = copying();
    let outputs = hub.core(1, CoreEvent::Copied { route: 0 });
    assert_eq!((reported(&outputs), has_failed(&outputs)), (vec![(0, 0, 3)], false));
    let mut hub = copying();
    assert!(!has_failed(&wait(&mut hub, LAST_COPIES / 2)));
    assert!(has_failed(&wait(&mut hub, LAST_COPIES)));
    let mut hub = copying();
    let outputs = change(&mut hub, 4, vec![Share::new(0, None), Share::new(1, None)]);
    assert!(has_failed(&outputs), "the standby is lost");
}

#[test]
fn a_hub_is_asked_under_its_newest_position_alone() {
    let mut hub = running();
    let is_allocated = |output: &Output| matches!(output, Output::Report(HubEvent::Allocated { .. }));
    assert!(hub.handle(again(1, 0)).iter().any(is_allocated));
    change(&mut hub, 1, shares([(1, None), (1, None)]));
    hub.close(1);
    assert!(hub.control.wants(job(1), 1, 2));
}

#[test]
fn a_hub_gets_its_next_part_once_its_former_one_has_ended() {
    let waiting = || {
        let mut hub = running();
        change(&mut hub, 1, shares([(1, None), (1, None)]));
        assert!(hub.handle(again(1, 2)).is_empty(), "its former part is still there");
        hub
    };
    let is_planned = |outputs: &[Output]| has!(outputs, Output::Plan(plan) if plan.hub == 2);
    let mut hub = waiting();
    let outputs = hub.close(1);
    assert!(is_planned(&outputs) && hub.control.wants(job(1), 1, 2), "{outputs:?}");

    let mut hub = waiting();
    let outputs = hub.stop(StopWhen::Now);
    assert!(matches!(reports(&outputs)[..], [HubEvent::Ended(_)]), "{outputs:?}");
    assert!(!is_planned(&hub.close(1)), "the job does not need it any more");

    let mut hub = waiting();
    hub.handle(Event::ShutDown);
    assert!(!is_planned(&hub.close(1)));

    // The job begins again, and the manager has heard already that the part is over.
    let begins_again = || {
        let Event::AllocateAgain(mut plan) = again(1, 0) else { panic!("it is one") };
        plan.epoch.number = 2;
        Event::AllocateAgain(plan)
    };
    let mut hub = waiting();
    hub.stop(StopWhen::Now);
    assert!(hub.handle(begins_again()).is_empty());
    let outputs = hub.close(1);
    assert!(has!(&outputs, Output::Plan(plan) if plan.epoch.number == 2), "{outputs:?}");
    let mut hub = running();
    hub.handle(begins_again());
    assert!(hub.control.jobs[&job(1)].next_part.is_none(), "nobody has ended the part that runs");
}

#[test]
fn a_hub_that_shuts_down_hands_over_what_has_standbys() {
    let mut hub = running();
    let outputs = hub.handle(Event::ShutDown);
    assert_eq!((reported(&outputs), has_failed(&outputs)), (vec![(0, 0, 0)], false));
    let mut hub = running();
    change(&mut hub, 1, shares([(0, None), (1, Some(0))]));
    assert!(has_failed(&hub.handle(Event::ShutDown)), "no other hub has share 0");
}

#[test]
fn a_hub_that_hands_over_waits_for_no_last_checkpoint_and_one_that_cannot_takes_it() {
    let with_checkpoints = |shares: Vec<Share>| {
        let mut hub = running();
        change(&mut hub, 1, shares);
        let job = hub.control.jobs.get_mut(&job(1)).expect("it runs");
        job.writes_checkpoints = true;
        let outputs = hub.handle(Event::ShutDown);
        let takes_last = outputs.iter().any(|output| matches!(output, Output::TakeLastCheckpoint { .. }));
        let stops_writer = outputs.iter().any(|output| matches!(output, Output::StopCheckpoints(_)));
        (takes_last, stops_writer, reported(&outputs))
    };
    assert_eq!(with_checkpoints(whole()), (false, true, vec![(0, 0, 1)]));
    let alone = shares([(0, None), (1, Some(0))]);
    assert_eq!(with_checkpoints(alone), (true, false, Vec::new()));
}

fn lose_worker(hub: &mut Hub) -> Vec<Output> {
    let cause = FaultCause::Kind(CauseKind::PeerLost);
    let culprit = Neighbour::Worker(0);
    hub.core(
        1,
        CoreEvent::Faulted { route: 0, culprit, message: "rank 0 was lost: it is gone".into(), cause },
    )
}

#[test]
fn a_worker_that_is_lost_ends_the_job_once_the_hub_can_know_that_it_was_not_replaced() {
    let mut hub = running();
    assert!(!has_failed(&lose_worker(&mut hub)));
    assert!(!has_failed(&wait(&mut hub, LOSS_CERTAIN / 2)));
    assert!(has_failed(&wait(&mut hub, LOSS_CERTAIN)));
}

#[test]
fn a_worker_that_comes_by_a_newer_stream_is_not_lost_with_an_older_one() {
    let mut hub = running();
    assert!(!has_failed(&lose_worker(&mut hub)));
    hub.core(1, CoreEvent::Moved { route: 0, neighbour: Neighbour::Worker(1), by: 0 });
    hub.core(1, CoreEvent::Moved { route: 0, neighbour: Neighbour::Worker(0), by: 0 });
    assert!(!has_failed(&wait(&mut hub, LOSS_CERTAIN * 2)));
    for (route, rank) in [(0, 1), (1, 0)] {
        assert!(!has_failed(&lose_worker(&mut hub)));
        hub.core(1, CoreEvent::Moved { route, neighbour: Neighbour::Worker(rank), by: 0 });
    }
    assert!(has_failed(&wait(&mut hub, LOSS_CERTAIN)), "that was another rank, and that another route");
}

#[test]
fn a_hub_that_was_frozen_ends_its_part_alone_although_its_workers_are_gone() {
    let mut hub = running();
    assert!(!has_failed(&lose_worker(&mut hub)));
    let replaced = change(&mut hub, 1, shares([(1, None), (1, None)]));
    assert!(replaced.iter().any(|output| matches!(output, Output::SendElsewhere { .. })));
    assert!(!has_failed(&replaced) && !has_failed(&wait(&mut hub, LOSS_CERTAIN * 2)));
}

#[test]
fn the_silence_of_the_other_hub_is_no_end_of_the_job() {
    let mut hub = running();
    let outputs =
        hub.core(1, CoreEvent::Silence { neighbour: Neighbour::Counterpart(0), seconds: Some(3.0) });
    let noticed = |output: &Output| {
        matches!(output, Output::Report(HubEvent::Noticed { message, .. })
        if message.contains("it counts as lost after"))
    };
    assert!(outputs.iter().any(noticed), "{outputs:?}");
}

#[test]
fn a_hub_that_has_joined_later_opens_no_streams_when_a_manager_that_restarts_says_so() {
    let links = |hub: u16| {
        let mut at = Hub::running(|terms| (terms.shares, terms.hub) = (whole(), hub));
        let outputs = at.handle(Event::Link { namespace: job(1) });
        outputs.iter().filter(|output| matches!(output, Output::Link { .. })).count()
    };
    assert_eq!((links(0), links(7)), (1, 0));
}
