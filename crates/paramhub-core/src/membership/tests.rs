mod begin_again;
mod silence;
mod standbys;

use super::job::tests::epoch;
use super::time::at;
use super::*;
use crate::auth::{Incarnation, Proof, RankClaim};
use crate::composition::{Place, Reduction};
use crate::key::{Key, KeyTable};
use crate::placement::{HubShape, Imbalance, InterfaceShape};
use crate::scheme::Plan;
use crate::service::{
    ConnectService, CreateService, HubEvent, HubLabel, HubReport, JobEnd, JobOptions, RegisterHub, StopWhen,
    TeamQuotas,
};
use crate::settings::Settings;
use crate::teams::{TEAMS_MAX, TeamRecord};
use crate::wire::VERSION;

fn new(now: Now) -> Membership {
    let hub_timeout = Duration::from_secs(10);
    let limits = MembershipLimits {
        hub_timeout,
        living_jobs_max: 8,
        ended_jobs_max: 8,
        core_rate: None,
        unheard_max: UNHEARD_MAX,
    };
    Membership::new(Vec::new(), Vec::new(), limits, Nonce([9; 32]), now)
}

/// A hub of one core that serves one rack, or all, and that has called.
fn hub_at(state: &mut Membership, address: &str, rack: &str, now: Now) -> u32 {
    let hub = join(state, address, rack, now);
    state.admit_hub(hub, Some("token"), now).unwrap();
    hub
}

fn join(state: &mut Membership, address: &str, rack: &str, now: Now) -> u32 {
    let place = Place { rack: rack.into(), host: String::new() };
    state.register_hub(RegisterHub { place, ..offer(address) }, "token", now).unwrap()
}

/// A hub at this port, which serves all racks.
fn hub_on(state: &mut Membership, port: u32, now: Now) -> Result<u32, ServiceError> {
    let hub = state.register_hub(offer(&format!("127.0.0.1:{port}")), "token", now)?;
    state.admit_hub(hub, Some("token"), now)?;
    Ok(hub)
}

fn offer(address: &str) -> RegisterHub {
    let interface = InterfaceShape { address: address.into(), cores: vec![0], weight: 1 };
    RegisterHub {
        protocol: VERSION,
        shape: HubShape { interfaces: vec![interface], local: None, between_hubs: None },
        place: Place::default(),
        machine: String::new(),
        keeps_checkpoints: None,
        encrypt: false,
        labels: Vec::new(),
    }
}

/// A job with a rank in each of these racks, all of which have connected.
fn job_in(state: &mut Membership, name: &str, racks: &[&str], reduction: Reduction, now: Now) -> Namespace {
    let namespace = Namespace([name.as_bytes()[0]; 16]);
    let options = JobOptions { reduction, ..JobOptions::default() };
    let request = CreateService { name: name.into(), workers: racks.len() as u32, options };
    let order = state.reserve(name, 1, namespace).unwrap();
    state.admit(Job::new(order, request, namespace, Nonce([2; 32]), Some(epoch()), now));
    (0..).zip(racks).for_each(|(rank, rack)| connect(state, namespace, rank, rack, now));
    namespace
}

fn connect(state: &mut Membership, namespace: Namespace, rank: u32, rack: &str, now: Now) {
    let call = ConnectService {
        rank,
        incarnation: Incarnation([rank as u8; 16]),
        proof: Proof([0; 32]),
        claim: Some(RankClaim([rank as u8; 32])),
        host: String::new(),
        process: 1,
        place: Place { rack: rack.to_string(), host: String::new() },
        peer_address: None,
        workers: None,
    };
    state.connect(namespace, &call, now).unwrap();
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

#[test]
fn a_hub_of_an_earlier_manager_takes_jobs_when_it_calls() {
    let now = at(0.0);
    let mut before = new(now);
    let hub = hub_at(&mut before, "127.0.0.1:1", "", now);
    let waiting = create(&mut before, "waiting", 1).unwrap();
    let mut state = restarted(&before, hub, 1, now);
    assert!(question_to(&mut state, hub, now).is_some());
    connect(&mut state, waiting, 0, "", now);
    assert!(!is_begun(&state, waiting), "nobody knows whether the hub is still there");
    assert_eq!(state.admit_hub(hub, Some("wrong"), now).unwrap_err().code, ErrorCode::Unauthorized);
    assert!(!is_begun(&state, waiting));
    state.admit_hub(hub, Some("token"), now).unwrap();
    assert!(is_begun(&state, waiting));
    // Its number is not given to another.
    assert_eq!(hub_at(&mut state, "127.0.0.1:2", "", now), 1);
}

/// The number of the question that a manager asks a hub of an earlier one.
fn question_to(state: &mut Membership, asked: u32, now: Now) -> Option<u32> {
    state.take_outputs(now).into_iter().find_map(|output| match output {
        Output::Command { hub, command: HubCommand::ReportJobs { question }, .. } if hub == asked => {
            Some(question)
        }
        _ => None,
    })
}

/// What a manager knows that is started with the records of another.
fn restarted(before: &Membership, hub: u32, drawn: u8, now: Now) -> Membership {
    let jobs = before.jobs().map(|job| job.record(now)).collect();
    let hubs = vec![before.hub_record(hub).unwrap()];
    Membership::new(jobs, hubs, before.limits, Nonce([drawn; 32]), now)
}

/// A job of one rank that runs at one hub.
fn running(state: &mut Membership, hub: u32, now: Now) -> Namespace {
    let namespace = job_in(state, "runs", &[""], Reduction::Auto, now);
    place(state, namespace, now);
    reports(state, hub, vec![allocated(namespace)], now);
    assert_eq!(state.job(namespace).unwrap().state(), JobState::Running);
    namespace
}

/// Has the only rank of a job hand in its settings, and the job placed.
fn place(state: &mut Membership, namespace: Namespace, now: Now) {
    let settings = Arc::new(Settings::new(KeyTable::new(vec![Key::new("w", [4])]).unwrap()));
    let submitted = state.submit(namespace, 0, Incarnation([0; 16]), &settings, now, now).unwrap();
    let Submission::Wait(waiting) = submitted else { panic!("{submitted:?}") };
    state.agree(waiting.call, now).unwrap();
    let roster = state.roster(namespace).unwrap();
    let plan = Plan::new(&settings, &roster.cluster());
    let book = InformationBook { job: "runs".into(), roster, plan };
    let imbalance = Imbalance { hubs: 1.0, interfaces: 1.0, cores: 1.0 };
    let placed = SitePlacement { hash: "hash".into(), imbalance, empty_hubs: Vec::new() };
    state.place(namespace, SettingsSummary::default(), vec![placed], Arc::new(book));
}

fn allocated(namespace: Namespace) -> HubEvent {
    let (placement_hash, resumed_step) = ("hash".into(), None);
    HubEvent::Allocated {
        namespace,
        placement_hash,
        resumed_step,
        memory_bytes: 1,
        streams: 1,
        further: None,
    }
}

fn reports(state: &mut Membership, hub: u32, events: Vec<HubEvent>, now: Now) {
    state.report(hub, Some("token"), HubReport { events, ..HubReport::default() }, now).unwrap();
}

#[test]
fn an_answer_to_an_earlier_manager_ends_no_job() {
    let now = at(0.0);
    let mut first = new(now);
    let hub = hub_at(&mut first, "127.0.0.1:1", "", now);
    let job = running(&mut first, hub, now);
    let state_of = |state: &Membership| state.job(job).unwrap().state();
    let mut second = restarted(&first, hub, 1, now);
    let earlier = question_to(&mut second, hub, now).unwrap();
    // The second manager takes the first part of the hub's answer, and the third one the rest.
    reports(&mut second, hub, vec![allocated(job)], now);
    let mut third = restarted(&second, hub, 2, now);
    let question = question_to(&mut third, hub, now).unwrap();
    reports(&mut third, hub, vec![HubEvent::AllReported { question: earlier }], now);
    assert_eq!(state_of(&third), JobState::Running);
    let answers = [
        (vec![allocated(job), HubEvent::AllReported { question }], JobState::Running),
        (
            vec![HubEvent::Ended(JobEnd::finished(job)), HubEvent::AllReported { question }],
            JobState::Finished,
        ),
        (vec![HubEvent::AllReported { question }], JobState::Failed),
    ];
    for (events, expected) in answers {
        let mut state = restarted(&second, hub, 2, now);
        reports(&mut state, hub, events.clone(), now);
        assert_eq!(state_of(&state), expected, "{events:?}");
    }
}

#[test]
fn a_hub_that_joins_again_because_it_had_no_answer_ends_no_job() {
    let now = at(0.0);
    let mut state = new(now);
    let waiting = create(&mut state, "waiting", 1).unwrap();
    connect(&mut state, waiting, 0, "", now);
    join(&mut state, "127.0.0.1:1", "", now);
    assert!(!is_begun(&state, waiting), "the hub may not know that it has joined");
    let hub = join(&mut state, "127.0.0.1:1", "", now);
    state.admit_hub(hub, Some("token"), now).unwrap();
    assert_eq!(state.job(waiting).unwrap().hubs().collect::<Vec<_>>(), [hub]);
}

fn teams(names: [&str; 2], quotas: TeamQuotas) -> Membership {
    let mut state = new(at(0.0));
    names.into_iter().for_each(|name| state.set_team(TeamRecord { name: name.into(), quotas }));
    state
}

/// Creates a job of one rank that has yet to connect.
/// A job of the team `vision` with one rank, which runs at these hubs.
fn running_at(state: &mut Membership, hubs: [u32; 2], options: JobOptions, now: Now) -> Namespace {
    let namespace = Namespace([77; 16]);
    let request = CreateService { name: "vision/kept".into(), workers: 1, options };
    let order = state.reserve("vision/kept", 1, namespace).unwrap();
    state.admit(Job::new(order, request, namespace, Nonce([2; 32]), Some(epoch()), now));
    connect(state, namespace, 0, "", now);
    place(state, namespace, now);
    hubs.into_iter().for_each(|hub| reports(state, hub, vec![allocated(namespace)], now));
    assert_eq!(state.job(namespace).unwrap().state(), JobState::Running);
    namespace
}

fn create(state: &mut Membership, name: &str, weight: u32) -> Result<Namespace, ServiceError> {
    let namespace = Namespace([state.next_order as u8 + 1; 16]);
    let order = state.reserve(name, weight, namespace)?;
    let options = JobOptions { weight, ..JobOptions::default() };
    let request = CreateService { name: name.into(), workers: 1, options };
    state.admit(Job::new(order, request, namespace, Nonce([2; 32]), Some(epoch()), at(0.0)));
    Ok(namespace)
}

#[test]
fn a_team_sees_its_own_jobs_alone() {
    let now = at(0.0);
    let mut state = teams(["vision", "speech"], TeamQuotas::default());
    let [mine, theirs, longer, nobodys] =
        ["vision/a", "speech/a", "vision2/a", "a"].map(|name| create(&mut state, name, 1).unwrap());
    let find = |text: &str| state.find_for(Some("vision"), text).map(|job| job.namespace);
    for text in ["a", "vision/a", &mine.to_string()] {
        assert_eq!(find(text), Ok(mine), "{text}");
    }
    for other in ["speech/a", "vision2/a", &theirs.to_string(), &longer.to_string(), &nobodys.to_string()] {
        let (refused, unknown) = (find(other).unwrap_err(), state.find("unknown").err().unwrap());
        let as_if_unknown = unknown.message.replace("unknown", other);
        assert_eq!((refused.code, refused.message), (unknown.code, as_if_unknown), "{other}");
    }
    let listed: Vec<String> =
        state.statuses_for(Some("vision"), now).into_iter().map(|job| job.name).collect();
    assert_eq!(listed, ["vision/a"]);
    assert_eq!(state.statuses_for(None, now).len(), 4);
    // A job that has ended is still the team's.
    let _ = state.stop(theirs, "enough".into(), StopWhen::Now, now).unwrap();
    let _ = state.stop(mine, "enough".into(), StopWhen::Now, now).unwrap();
    assert!(state.find_for(Some("vision"), &theirs.to_string()).is_err());
    assert_eq!(state.find_for(Some("vision"), "a").unwrap().namespace, mine);
}

#[test]
fn a_name_that_is_being_written_counts_in_its_teams_quotas() {
    let quotas = TeamQuotas { jobs: Some(2), weight: Some(4), ..TeamQuotas::default() };
    let mut state = teams(["vision", "speech"], quotas);
    state.reserve("vision/a", 3, Namespace([9; 16])).unwrap();
    assert_eq!(create(&mut state, "vision/b", 2).unwrap_err().code, ErrorCode::DoesNotFit);
    create(&mut state, "speech/b", 4).unwrap();
    create(&mut state, "anyone", 100).unwrap();
    create(&mut state, "vision2/a", 100).unwrap();
    create(&mut state, "vision/b", 1).unwrap();
    assert_eq!(create(&mut state, "vision/c", 1).unwrap_err().code, ErrorCode::DoesNotFit);
    state.give_back("vision/a");
    let [speech, vision] = &state.teams()[..] else { panic!("two teams") };
    assert_eq!((speech.jobs, speech.weight, vision.jobs, vision.weight), (1, 4, 1, 1));
    create(&mut state, "vision/c", 3).unwrap();
    // An ended job counts no more.
    let ended = state.find("vision/c").unwrap().namespace;
    let _ = state.stop(ended, "enough".into(), StopWhen::Now, at(0.0)).unwrap();
    create(&mut state, "vision/c", 3).unwrap();
    assert_eq!(state.reserve("vision/c", 1, Namespace([8; 16])).unwrap_err().code, ErrorCode::NameTaken);
}

#[test]
fn teams_are_few() {
    let mut state = new(at(0.0));
    let quotas = TeamQuotas::default();
    (0..TEAMS_MAX).for_each(|number| state.set_team(TeamRecord { name: format!("t{number}"), quotas }));
    assert_eq!(state.check_team_name("more").unwrap_err().code, ErrorCode::DoesNotFit);
    assert!(state.check_team_name("t0").is_ok(), "its quotas can change");
    state.remove_team("t0");
    assert!(state.check_team_name("more").is_ok() && state.team("t0").is_err());
}

/// The hubs of a job of one worker, in this rack, which has called.
fn begun(state: &mut Membership, number: u8, options: JobOptions, rack: &str) -> Vec<u32> {
    let (now, namespace) = (at(0.0), Namespace([number; 16]));
    let request = CreateService { name: format!("job-{number}"), workers: 1, options };
    let order = state.reserve(&request.name, 1, namespace).unwrap();
    state.admit(Job::new(order, request, namespace, Nonce([2; 32]), Some(epoch()), now));
    connect(state, namespace, 0, rack, now);
    state.job(namespace).unwrap().hubs().collect()
}

#[test]
fn a_job_gets_the_hubs_with_the_label_that_it_asks_for() {
    let now = at(0.0);
    let mut state = new(now);
    let [fast, slow]: [HubLabel; 2] = ["fast", "slow"].map(|label| label.parse().unwrap());
    let mut joined = |port: u16, host: &str, labels: Vec<HubLabel>| {
        let place = Place { host: host.into(), ..Place::default() };
        let offer = RegisterHub { labels, place, ..offer(&format!("127.0.0.1:{port}")) };
        let hub = state.register_hub(offer, "token", now).unwrap();
        state.admit_hub(hub, Some("token"), now).unwrap();
        hub
    };
    let plain = joined(1, "", Vec::new());
    let labelled = joined(2, "", vec![slow, fast]);
    let of_host = joined(3, "elsewhere", Vec::new());
    let with = |label| JobOptions { hub_label: Some(label), ..JobOptions::default() };
    assert_eq!(begun(&mut state, 1, with(fast), ""), [labelled]);
    assert_eq!(begun(&mut state, 2, JobOptions::default(), ""), [plain, labelled]);
    assert!(state.hubs.is_chosen(of_host, Some(fast)), "it serves its host's workers alone");
    // The job waits for a hub that has the label, and the error says so.
    let other: HubLabel = "other".parse().unwrap();
    assert!(begun(&mut state, 3, with(other), "").is_empty());
    let job = &state.job(Namespace([3; 16])).unwrap();
    let missing = job.hubs_missing(&state.hubs_for(Namespace([3; 16]))).unwrap();
    assert!(missing.contains("no hub with the label `other` has joined"), "{missing}");
    assert!(missing.contains("`paramhub hub --label other`"), "{missing}");
    let too_many = RegisterHub { labels: vec![fast; 17], ..offer("127.0.0.1:9") };
    assert!(state.register_hub(too_many, "token", now).unwrap_err().message.contains("17 labels"));
}

#[test]
fn a_job_gets_no_more_hubs_than_it_asks_for_and_those_with_the_fewest_jobs() {
    let now = at(0.0);
    let mut state = new(now);
    let hubs = [1, 2, 3].map(|port| hub_on(&mut state, port, now).unwrap());
    let of_rack = hub_at(&mut state, "10.0.0.1:1", "a", now);
    let at_most = |max_hubs: u32| JobOptions { max_hubs: Some(max_hubs), ..JobOptions::default() };
    assert_eq!(begun(&mut state, 1, at_most(1), ""), [hubs[0]]);
    assert_eq!(begun(&mut state, 2, at_most(2), ""), [hubs[1], hubs[2]], "the first has a job");
    assert_eq!(begun(&mut state, 3, at_most(2), ""), [hubs[0], hubs[1]], "all have one");
    assert_eq!(begun(&mut state, 4, at_most(9), ""), hubs);
    assert_eq!(begun(&mut state, 5, JobOptions::default(), ""), hubs);
    let in_rack = begun(&mut state, 6, at_most(1), "a");
    assert!(in_rack.contains(&of_rack), "the hub of its rack does not count: {in_rack:?}");
}
