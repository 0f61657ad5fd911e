use super::job::tests::epoch;
use super::time::at;
use super::*;
use crate::auth::{Incarnation, Proof, RankClaim};
use crate::composition::{Place, Reduction};
use crate::placement::{HubShape, InterfaceShape};
use crate::service::{ConnectService, HubReport, JobOptions, RegisterHub};
use crate::wire::VERSION;

fn new(now: Now) -> Membership {
    let hub_timeout = Duration::from_secs(10);
    let limits = MembershipLimits { hub_timeout, living_jobs_max: 8, ended_jobs_max: 8, core_rate: None };
    Membership::new(Vec::new(), limits, Nonce([9; 32]), now)
}

/// A hub of one core that serves one rack, or all.
fn hub_at(state: &mut Membership, address: &str, rack: &str, now: Now) -> u32 {
    let interface = InterfaceShape { address: address.into(), cores: vec![0], weight: 1 };
    let shape = HubShape { interfaces: vec![interface], local: None };
    let place = Place { rack: rack.into(), host: String::new() };
    state
        .register_hub(
            RegisterHub { protocol: VERSION, shape, place, machine: String::new(), keeps_checkpoints: None },
            "token".into(),
            now,
        )
        .unwrap()
}

/// A job with a rank in each of these racks, all of which have connected.
fn job_in(state: &mut Membership, name: &str, racks: &[&str], reduction: Reduction, now: Now) -> Namespace {
    let namespace = Namespace([name.as_bytes()[0]; 16]);
    let options = JobOptions { reduction, ..JobOptions::default() };
    let request = CreateService { name: name.into(), workers: racks.len() as u32, options };
    state.admit(Job::new(0, request, namespace, Nonce([2; 32]), Some(epoch()), now));
    for (rank, rack) in (0..).zip(racks) {
        let call = ConnectService {
            rank,
            incarnation: Incarnation([rank as u8; 16]),
            proof: Proof([0; 32]),
            claim: Some(RankClaim([rank as u8; 32])),
            host: String::new(),
            process: 1,
            place: Place { rack: rack.to_string(), host: String::new() },
            peer_address: None,
        };
        state.connect(namespace, &call, now).unwrap();
    }
    namespace
}

fn is_begun(state: &Membership, namespace: Namespace) -> bool {
    state.job(namespace).unwrap().state() != JobState::Connecting
}

#[test]
fn a_probe_holds_up_jobs_while_it_lasts_and_makes_none_fail() {
    let now = at(0.0);
    let mut state = new(now);
    let hubs =
        ["a", "b"].map(|rack| hub_at(&mut state, &format!("127.0.0.1:{}", rack.as_bytes()[0]), rack, now));
    let asks = job_in(&mut state, "asks", &["a", "b"], Reduction::Auto, now);
    let beside = job_in(&mut state, "beside", &["a"], Reduction::Sharded, now);
    let waits = job_in(&mut state, "waits", &["a", "b"], Reduction::Auto, now);
    assert!(![asks, beside, waits].iter().any(|&job| is_begun(&state, job)), "hubs probe");
    // Its ranks would give up now.
    state.advance_job_without_probing(waits, now);
    assert!(is_begun(&state, waits) && !is_begun(&state, beside));
    let reduction = state.job(waits).unwrap().status(now).reduction;
    assert!(reduction.contains("not known, and its ranks could not wait for a probe to end"), "{reduction}");
    // No hub answers.
    let end = at(2.0);
    hubs.iter().for_each(|&hub| state.report(hub, Some("token"), HubReport::default(), end).unwrap());
    assert!(is_begun(&state, asks) && is_begun(&state, beside));
    let reduction = state.job(asks).unwrap().status(now).reduction;
    assert!(reduction.contains("has not answered a probe within 2 s"), "{reduction}");
}
