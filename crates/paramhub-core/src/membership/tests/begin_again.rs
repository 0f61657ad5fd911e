//! Jobs that begin again, and the hubs that had them before.

use super::*;
use crate::service::{CauseKind, OnWorkerLoss};

/// A job that outlives its hubs, and runs at two of them.
fn outliving(state: &mut Membership, hubs: [u32; 2], now: Now) -> Namespace {
    let options = JobOptions {
        on_worker_loss: OnWorkerLoss::Rewind,
        checkpoint_every: Some("20".parse().unwrap()),
        ..JobOptions::default()
    };
    running_at(state, hubs, options, now)
}

#[test]
fn a_job_does_not_wait_for_a_hub_that_had_a_part_of_it_and_is_gone() {
    let now = at(0.0);
    let mut state = teams(["vision", "speech"], TeamQuotas::default());
    let [stays, dies] = [1, 2].map(|port| hub_on(&mut state, port, now).unwrap());
    let job = outliving(&mut state, [stays, dies], now);
    // A core of one hub has panicked just when the other dies.
    let end = JobEnd::failed(job, "core 0 of its hub panicked".into(), CauseKind::HubLost);
    reports(&mut state, stays, vec![HubEvent::Ended(end)], now);
    assert_eq!(state.job(job).unwrap().state(), JobState::Connecting);
    connect(&mut state, job, 0, "", now);
    let mut state_at = |seconds: f64| {
        reports(&mut state, stays, vec![], at(seconds));
        state.check_time(at(seconds));
        let serves = [stays, dies].map(|hub| state.job(job).unwrap().is_served_by(hub));
        (state.job(job).unwrap().state(), serves)
    };
    for seconds in [0.5, 1.0, 1.5, 2.0, 2.5] {
        assert_eq!(state_at(seconds), (JobState::Connecting, [false, false]), "it may be there");
    }
    assert_eq!(state_at(3.1), (JobState::Initialising, [true, false]));
}
