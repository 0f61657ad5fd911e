//! The choice of hubs that become standbys of jobs which run.

use super::*;
use crate::service::{HubJobCounters, JobCounters, JobPlan, MoveJob};

/// A job of a team, with standbys, that runs at two hubs.
fn with_standbys(state: &mut Membership, hubs: [u32; 2], now: Now) -> Namespace {
    running_at(state, hubs, JobOptions { replicas: 1, ..JobOptions::default() }, now)
}

/// The hubs that are asked to become standbys, and what they are asked.
fn asked(state: &mut Membership, now: Now) -> Vec<(u32, JobPlan)> {
    state.check_time(now);
    let outputs = state.take_outputs(now).into_iter();
    let asked = outputs.filter_map(|output| match output {
        Output::ChangeMembership { hub, command: HubCommand::Allocate(plan), .. } => Some((hub, *plan)),
        _ => None,
    });
    asked.collect()
}

fn lose(state: &mut Membership, hub: u32, now: Now) {
    state.lose_hub(hub, "was lost", now);
    drop(state.take_outputs(now));
}

#[test]
fn a_hub_without_a_part_in_the_job_is_asked_as_soon_as_it_is_there() {
    let now = at(0.0);
    let mut state = teams(["vision", "speech"], TeamQuotas::default());
    let hubs = [1, 2].map(|port| hub_on(&mut state, port, now).unwrap());
    let job = with_standbys(&mut state, hubs, now);
    assert!(asked(&mut state, now).is_empty(), "no share lacks one");
    lose(&mut state, hubs[0], now);
    assert!(asked(&mut state, now).is_empty(), "there is no other hub");

    let of_rack = hub_at(&mut state, "127.0.0.1:8", "r", now);
    let strict = RegisterHub { encrypt: true, ..offer("127.0.0.1:9") };
    let strict = state.register_hub(strict, "token", now).unwrap();
    state.admit_hub(strict, Some("token"), now).unwrap();
    assert!(asked(&mut state, now).is_empty(), "hub {of_rack} serves others, and hub {strict} encrypts all");

    let free = hub_on(&mut state, 3, now).unwrap();
    let [(hub, plan)] = &asked(&mut state, now)[..] else { panic!("one hub is asked") };
    assert_eq!((*hub, plan.hub, plan.later_hubs.len()), (free, 2, 1));
    assert!(plan.shares.iter().all(|share| share.copying && share.standby == Some(2)));
    assert!(asked(&mut state, now).is_empty(), "it is asked once");
    reports(&mut state, free, vec![allocated(job)], now);
    for share in 0..2 {
        let ready = HubEvent::StandbyReady { namespace: job, share, standby: 2 };
        reports(&mut state, hubs[1], vec![ready], now);
    }
    let standbys = state.job(job).unwrap().standby_counts().unwrap();
    assert_eq!((standbys.shares, standbys.ready), (2, 2));
    lose(&mut state, hubs[1], now);
    assert_eq!(state.job(job).unwrap().state(), JobState::Running);
}

#[test]
fn a_new_standby_has_the_label_that_the_job_asks_for() {
    let now = at(0.0);
    let mut state = teams(["vision", "speech"], TeamQuotas::default());
    let label = "fast".parse().unwrap();
    let with_label = |state: &mut Membership, port: u16| {
        let offer = RegisterHub { labels: vec![label], ..offer(&format!("127.0.0.1:{port}")) };
        let hub = state.register_hub(offer, "token", now).unwrap();
        state.admit_hub(hub, Some("token"), now).unwrap();
        hub
    };
    let hubs = [1, 2].map(|port| with_label(&mut state, port));
    let options = JobOptions { replicas: 1, hub_label: Some(label), ..JobOptions::default() };
    running_at(&mut state, hubs, options, now);
    lose(&mut state, hubs[0], now);
    hub_on(&mut state, 3, now).unwrap();
    assert!(asked(&mut state, now).is_empty());
    let labelled = with_label(&mut state, 4);
    assert_eq!(asked(&mut state, now)[0].0, labelled);
}

#[test]
fn a_standby_that_is_more_than_the_team_may_have_ends_no_job() {
    let now = at(0.0);
    let quotas = TeamQuotas { memory_bytes: Some(2), ..TeamQuotas::default() };
    let mut state = teams(["vision", "speech"], quotas);
    let hubs = [1, 2].map(|port| hub_on(&mut state, port, now).unwrap());
    let job = with_standbys(&mut state, hubs, now);
    lose(&mut state, hubs[0], now);
    let free = hub_on(&mut state, 3, now).unwrap();
    assert_eq!(asked(&mut state, now).len(), 1);
    let HubEvent::Allocated { namespace, placement_hash, resumed_step, streams, .. } = allocated(job) else {
        panic!("it says so")
    };
    let more = HubEvent::Allocated {
        namespace,
        placement_hash,
        resumed_step,
        memory_bytes: 2,
        streams,
        further: None,
    };
    reports(&mut state, free, vec![more], now);
    assert_eq!(state.job(job).unwrap().state(), JobState::Running);
    let is_stopped = |output: &Output| matches!(output, Output::Command { hub, command: HubCommand::Stop { .. }, .. } if *hub == free);
    let told = |output: &Output| {
        matches!(output, Output::ChangeMembership { hub, command: HubCommand::ChangeShares { .. }, .. }
            if *hub == free)
    };
    assert!(state.take_outputs(now).iter().any(|output| is_stopped(output) || told(output)));
    assert!(asked(&mut state, at(10.0)).is_empty(), "not at once again");
}

#[test]
fn a_drained_hub_gets_no_jobs_and_is_left_by_those_with_standbys_also_under_the_next_manager() {
    let now = at(0.0);
    let mut state = teams(["vision", "speech"], TeamQuotas::default());
    let hubs = [1, 2].map(|port| hub_on(&mut state, port, now).unwrap());
    let job = with_standbys(&mut state, hubs, now);
    assert_eq!(state.drain_hub(9, true, now).unwrap_err().code, ErrorCode::NotFound);
    let free = hub_on(&mut state, 3, now).unwrap();
    assert_eq!(
        state.hub_statuses(now).iter().map(|hub| (hub.jobs, hub.drained)).collect::<Vec<_>>(),
        [(1, false), (1, false), (0, false)]
    );

    let status = state.drain_hub(hubs[0], true, now).unwrap();
    let [there] = &status.jobs[..] else { panic!("{status:?}") };
    assert_eq!((there.name.as_str(), status.drained), ("vision/kept", true));
    let saves = |state: &mut Membership| {
        let outputs = state.take_outputs(now).into_iter();
        outputs.filter(|output| matches!(output, Output::SaveHub { hub } if *hub == hubs[0])).count()
    };
    assert_eq!(saves(&mut state), 1);
    assert!(state.drain_hub(hubs[0], true, now).is_ok() && saves(&mut state) == 0, "it was drained already");
    let record = state.hub_record(hubs[0]).unwrap();
    let record: HubRecord = serde_json::from_str(&serde_json::to_string(&record).unwrap()).unwrap();

    for hub in [hubs[1], free] {
        state.admit_hub(hub, Some("token"), at(1.0)).unwrap();
    }
    // The standby of all that the hub has takes over at the next tick, and a hub without a part becomes the new standby.
    let [(hub, plan)] = &asked(&mut state, at(1.0))[..] else { panic!("one hub is asked") };
    assert_eq!((*hub, plan.shares.len()), (free, 2));
    assert!(state.drain_status(hubs[0]).unwrap().jobs.is_empty());
    assert!(state.hub_statuses(now).iter().any(|hub| hub.drained && hub.jobs == 0));
    lose(&mut state, free, at(2.0));
    assert!(asked(&mut state, at(60.0)).is_empty(), "the drained hub is not asked");

    let limits = state.limits;
    let records = vec![state.job(job).unwrap().record(at(60.0))];
    let mut next = Membership::new(records, vec![record], limits, Nonce([9; 32]), at(61.0));
    assert!(next.drain_status(hubs[0]).unwrap().drained);
    assert!(!next.drain_hub(hubs[0], false, at(61.0)).unwrap().drained);

    state.drain_hub(hubs[0], false, at(61.0)).unwrap();
    assert_eq!(asked(&mut state, at(100.0)).len(), 1, "it may be asked again");
}

#[test]
fn a_job_moves_off_a_hub_to_the_one_that_is_named_and_does_not_come_back() {
    let now = at(0.0);
    let mut state = teams(["vision", "speech"], TeamQuotas::default());
    let hubs = [1, 2].map(|port| hub_on(&mut state, port, now).unwrap());
    let job = with_standbys(&mut state, hubs, now);
    let [other, named] = [3, 4].map(|port| hub_on(&mut state, port, now).unwrap());
    let refused = |state: &mut Membership, from, to| state.move_job(job, MoveJob { from, to }).unwrap_err();
    assert_eq!(refused(&mut state, 9, None).code, ErrorCode::NotFound);
    assert_eq!(refused(&mut state, hubs[0], Some(9)).code, ErrorCode::NotFound);
    let nothing = refused(&mut state, other, None).message;
    assert!(nothing.contains("nothing at hub 2, but at hub 0 (127.0.0.1:1) and hub 1"), "{nothing}");
    assert!(refused(&mut state, hubs[0], Some(hubs[0])).message.contains("are the same"));
    state.drain_hub(named, true, now).unwrap();
    assert!(refused(&mut state, hubs[0], Some(named)).message.contains("takes no jobs: it is drained"));
    state.drain_hub(named, false, now).unwrap();
    assert_eq!(state.move_status(job).unwrap_err().code, ErrorCode::NotFound);
    let of_rack = hub_at(&mut state, "10.0.0.9:1", "a", now);
    let narrow = refused(&mut state, hubs[0], Some(of_rack)).message;
    assert!(narrow.contains("cannot serve job `vision/kept`: it serves one rack"), "{narrow}");
    lose(&mut state, of_rack, now);

    let order = MoveJob { from: hubs[0], to: Some(named) };
    let status = state.move_job(job, order).unwrap();
    assert_eq!((status.has_left, status.why.as_str()), (false, "it is about to leave"));
    let is_saved = |output: &Output| matches!(output, Output::Save(saved) if *saved == job);
    assert!(state.take_outputs(now).iter().any(is_saved));
    // A manager that restarts goes on with it.
    let records = vec![state.job(job).unwrap().record(now)];
    let stored = serde_json::to_string(&records).unwrap();
    let hub_records = [hubs[0], hubs[1], other, named].map(|hub| state.hub_record(hub).unwrap()).into();
    let limits = state.limits;
    let restored = serde_json::from_str(&stored).unwrap();
    let next = Membership::new(restored, hub_records, limits, Nonce([9; 32]), now);
    assert_eq!(next.move_status(job).unwrap(), status);

    for hub in [hubs[1], other, named] {
        state.admit_hub(hub, Some("token"), at(1.0)).unwrap();
    }
    let [(hub, plan)] = &asked(&mut state, at(1.0))[..] else { panic!("one hub is asked") };
    assert_eq!((*hub, plan.shares.len()), (named, 2), "and not the other, which joined first");
    let status = state.move_status(job).unwrap();
    assert!(status.has_left && !status.has_arrived, "the named hub has no chunks yet");
    lose(&mut state, named, at(2.0));
    let [(hub, _)] = &asked(&mut state, at(3.0))[..] else { panic!("one hub is asked") };
    assert_eq!(*hub, other, "the named one is gone");
    lose(&mut state, other, at(4.0));
    assert!(asked(&mut state, at(60.0)).is_empty(), "the job does not come back");
    assert!(state.hub_statuses(now).iter().all(|hub| !hub.drained), "which takes other jobs");
    // The way back is a move, too.
    state.move_job(job, MoveJob { from: hubs[1], to: Some(hubs[0]) }).unwrap();
    assert_eq!(asked(&mut state, at(100.0)).len(), 1);
    assert!(!state.move_status(job).unwrap().has_left, "no other hub has the chunks yet");
}

#[test]
fn a_rank_that_waits_in_vain_for_hubs_hears_of_one_that_is_drained() {
    let now = at(0.0);
    let mut state = new(now);
    let hub = hub_on(&mut state, 1, now).unwrap();
    state.drain_hub(hub, true, now).unwrap();
    let job = create(&mut state, "waits", 1).unwrap();
    let begun_after_waiting = |state: &mut Membership| {
        connect(state, job, 0, "", now);
        let call = state.calls.keys().next().copied();
        call.into_iter().for_each(|call| state.expire(call, at(100.0)));
        state.take_outputs(at(100.0)).into_iter().find_map(|output| match output {
            Output::Answer { answer: Answer::Connected(answer), .. } => {
                Some(answer.map(drop).map_err(|refused| refused.message))
            }
            _ => None,
        })
    };
    let refused = begun_after_waiting(&mut state).unwrap().unwrap_err();
    assert!(refused.contains("hub 0 (127.0.0.1:1) is here, but an operator drains it"), "{refused}");
    state.drain_hub(hub, false, now).unwrap();
    assert_eq!(begun_after_waiting(&mut state), Some(Ok(())));
}

#[test]
fn a_standby_that_was_frozen_until_the_job_had_finished_without_it_frees_its_part() {
    let now = at(0.0);
    let mut state = teams(["vision", "speech"], TeamQuotas::default());
    let [serving, standby] = [1, 2].map(|port| hub_on(&mut state, port, now).unwrap());
    let job = with_standbys(&mut state, [serving, standby], now);
    let lost = HubEvent::HubLost {
        namespace: job,
        share: 0,
        hub: 1,
        number: 0,
        reason: "it has not been heard for 25 s".into(),
    };
    state.admit_hub(serving, Some("token"), at(25.0)).unwrap();
    reports(&mut state, serving, vec![lost], at(25.0));
    reports(&mut state, serving, vec![HubEvent::Ended(JobEnd::finished(job))], at(26.0));
    assert_eq!(state.job(job).unwrap().state(), JobState::Finished);
    drop(state.take_outputs(at(26.0)));

    let counted = HubJobCounters { namespace: job, counters: JobCounters::default(), left_out: Vec::new() };
    let report = HubReport { jobs: vec![counted], ..HubReport::default() };
    state.report(standby, Some("token"), report, at(40.0)).unwrap();
    let told = state.take_outputs(at(40.0)).into_iter().filter(|output| {
        matches!(output, Output::Command { hub, command: HubCommand::ChangeShares { .. }, .. } if *hub == standby)
    });
    assert_eq!(told.count(), 1, "it ends its part as the job goes on elsewhere");
}
