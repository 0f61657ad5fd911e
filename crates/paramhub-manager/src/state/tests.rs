use super::*;
use paramhub_core::auth::{Epoch, EpochSecret, Nonce, Proof, RankClaim};
use paramhub_core::checkpoint::Resume;
use paramhub_core::combinations::Caller;
use paramhub_core::composition::{BetweenSites, OptimizeAt, Place, Reduction};
use paramhub_core::membership::{Job, MembershipLimits, UNHEARD_MAX, WaitingCall};
use paramhub_core::placement::{HubShape, InterfaceShape};
use paramhub_core::service::{
    CauseKind, ConnectService, HubEvent, HubReport, JobEnd, JobOptions, JobState, OnInterfaceDown,
    OnWorkerLoss, Presence, RegisterHub, StopWhen,
};
use paramhub_core::stragglers::Stragglers;
use paramhub_core::wire::VERSION;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tracing::span::{Attributes, Id, Record as Values};
use tracing::{Event, Level, Metadata, Subscriber};

/// The levels of all log lines.
#[derive(Clone, Default)]
struct Levels(Arc<Mutex<Vec<Level>>>);

impl Subscriber for Levels {
    fn enabled(&self, _: &Metadata) -> bool {
        true
    }
    fn new_span(&self, _: &Attributes) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Values) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event) {
        self.0.lock().unwrap().push(*event.metadata().level());
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

fn empty_membership() -> Membership {
    let hub_timeout = Duration::from_secs(10);
    let limits = MembershipLimits {
        hub_timeout,
        living_jobs_max: 8,
        ended_jobs_max: 8,
        core_rate: None,
        unheard_max: UNHEARD_MAX,
    };
    Membership::new(Vec::new(), Vec::new(), limits, Nonce([9; 32]), now())
}

/// A job of one rank whose hub is there, the hub, and the rank's call to ConnectService.
fn connecting() -> (ManagerState, u32, Namespace, WaitingCall) {
    let mut state = ManagerState::new(empty_membership());
    let interface = InterfaceShape { address: "127.0.0.1:1".into(), cores: vec![0], weight: 1 };
    let shape = HubShape { interfaces: vec![interface], local: None, between_hubs: None };
    let place = Place::default();
    let offer = RegisterHub {
        protocol: VERSION,
        shape,
        place,
        machine: String::new(),
        keeps_checkpoints: None,
        encrypt: false,
        labels: Vec::new(),
    };
    let hub = state.membership.register_hub(offer, "token", now()).unwrap();
    state.membership.admit_hub(hub, Some("token"), now()).unwrap();
    let namespace = Namespace([1; 16]);
    let request = CreateService { name: "x".into(), workers: 1, options: JobOptions::default() };
    state.membership.admit(Job::new(
        0,
        request,
        namespace,
        Nonce([2; 32]),
        Some(Epoch { number: 1, secret: EpochSecret([3; 32]) }),
        now(),
    ));
    let call = ConnectService {
        rank: 0,
        incarnation: Incarnation([1; 16]),
        proof: Proof([0; 32]),
        claim: Some(RankClaim([1; 32])),
        host: String::new(),
        process: 1,
        place: Place::default(),
        peer_address: None,
        workers: None,
    };
    let waiting = state.membership.connect(namespace, &call, now()).unwrap();
    (state, hub, namespace, waiting)
}

/// The levels of what is logged when this happens to a job that a hub serves.
fn logged(happens: impl FnOnce(&mut Membership, u32, Namespace)) -> Vec<Level> {
    let (mut state, hub, namespace, _) = connecting();
    state.carry_out();
    let levels = Levels::default();
    tracing::subscriber::with_default(levels.clone(), || {
        happens(&mut state.membership, hub, namespace);
        state.carry_out();
    });
    assert_eq!(state.membership.job(namespace).unwrap().state(), JobState::Failed);
    levels.0.lock().unwrap().clone()
}

#[test]
fn callers_are_told_what_is_saved() {
    let (mut state, hub, namespace, waiting) = connecting();
    let mut answer = state.wait(waiting.call);
    state.carry_out();
    assert!(answer.try_recv().is_err(), "the job's members are not saved");
    let changes = state.take_unsaved().unwrap();
    assert_eq!((changes.hubs.len(), changes.jobs.len()), (1, 1));
    assert_eq!(changes.jobs[0].status.state, JobState::Initialising);
    // What is told of it while it is being saved waits as well.
    let stop = state.membership.stop(namespace, "enough".into(), StopWhen::WorkersEnding, now()).unwrap();
    let mut stopped = state.wait(stop.call);
    state.carry_out();
    assert!(answer.try_recv().is_err() && stopped.try_recv().is_err());
    state.saved();
    assert!(matches!(answer.try_recv(), Ok(Answer::Connected(Ok(_)))));
    assert!(matches!(stopped.try_recv(), Ok(Answer::Stopped(Ok(_)))));
    assert!(state.take_unsaved().is_none());

    // A disk that fails holds nobody up, and what it did not take is saved later.
    let stop = state.membership.stop(namespace, "enough".into(), StopWhen::Now, now()).unwrap();
    let mut stopped = state.wait(stop.call);
    let report = HubReport { presence: Presence::Gone, ..HubReport::default() };
    state.membership.report(hub, Some("token"), report, now()).unwrap();
    state.carry_out();
    assert!(stopped.try_recv().is_err());
    let changes = state.take_unsaved().unwrap();
    assert_eq!((changes.removed_hubs, changes.hubs.len()), (vec![hub], 0));
    state.not_saved();
    assert!(matches!(stopped.try_recv(), Ok(Answer::Stopped(Ok(_)))));
    let again = state.take_unsaved().unwrap();
    assert_eq!((again.removed_hubs, again.jobs.len()), (vec![hub], 1));
}

#[test]
fn the_commands_about_a_job_keep_their_order_while_one_of_them_waits_to_be_saved() {
    let (mut state, hub, namespace, _) = connecting();
    state.carry_out();
    let other = Namespace([9; 16]);
    let stop = |namespace| Output::Command {
        hub,
        command: HubCommand::Stop { namespace, reason: "enough".into(), when: StopWhen::Now },
        unless_queued: false,
    };
    let change = Output::ChangeMembership { hub, namespace, command: HubCommand::Finish { namespace } };
    [change, stop(namespace), stop(other)].into_iter().for_each(|output| state.carry_out_one(output));
    let queued = |state: &mut ManagerState| {
        let waiting = state.queues.poll(hub, 0).unwrap().unwrap().commands;
        let commands = waiting.iter().map(|(_, json)| serde_json::from_slice::<HubCommand>(json).unwrap());
        let name = |command: HubCommand| (command.namespace(), matches!(command, HubCommand::Stop { .. }));
        commands.map(name).collect::<Vec<_>>()
    };
    let of_others = [(Some(other), true)];
    assert_eq!(queued(&mut state), of_others, "other jobs do not wait");
    state.take_unsaved().unwrap();
    state.carry_out_one(stop(namespace));
    let Output::Command { hub, command, .. } = stop(namespace) else { unreachable!("it is a command") };
    state.carry_out_one(Output::Command { hub, command, unless_queued: true });
    assert_eq!(queued(&mut state), of_others);
    state.saved();
    let own = [(Some(namespace), false), (Some(namespace), true), (Some(namespace), true)];
    assert_eq!(queued(&mut state), [&of_others[..], &own[..]].concat());
    state.carry_out_one(stop(namespace));
    assert_eq!(queued(&mut state).len(), 5, "nothing waits any more");
}

#[test]
fn a_failure_that_a_hub_reports_and_has_warned_of_is_no_second_warning() {
    let report = |event: fn(Namespace) -> HubEvent| {
        logged(|state, hub, namespace| {
            let events = vec![event(namespace)];
            let report = HubReport { events, ..HubReport::default() };
            state.report(hub, Some("token"), report, now()).unwrap();
        })
    };
    let refused = |namespace| HubEvent::Refused { namespace, reason: "it is full".into() };
    let ended =
        |namespace| HubEvent::Ended(JobEnd::failed(namespace, "rank 0 was lost".into(), CauseKind::PeerLost));
    assert_eq!(report(refused), [Level::INFO]);
    assert_eq!(report(ended), [Level::INFO]);
    // Only the manager logs its own decisions.
    let stopped = logged(|state, _, namespace| {
        state.stop(namespace, "stopped".into(), StopWhen::Now, now()).unwrap();
    });
    assert_eq!(stopped, [Level::WARN]);
}

#[test]
fn options_that_do_not_combine_are_refused_with_every_reason_of_the_table() {
    let mut membership = empty_membership();
    let interface = InterfaceShape { address: "127.0.0.1:1".into(), cores: vec![0], weight: 1 };
    let shape = HubShape { interfaces: vec![interface], local: None, between_hubs: None };
    let keeps_none = RegisterHub {
        protocol: VERSION,
        shape,
        place: Place::default(),
        machine: String::new(),
        keeps_checkpoints: Some(false),
        encrypt: false,
        labels: Vec::new(),
    };
    membership.register_hub(keeps_none, "token", now()).unwrap();
    let refusal = |options| {
        let request = CreateService { name: "x".into(), workers: 4, options };
        check_request(&request).and_then(|()| membership.check_checkpoints(&request)).err()
    };
    let usual = JobOptions::default();
    assert_eq!(refusal(usual), None);
    let continues = JobOptions { on_interface_down: OnInterfaceDown::Continue, ..usual };
    let outlives = JobOptions { on_worker_loss: OnWorkerLoss::Continue, ..usual };
    assert_eq!(refusal(JobOptions { min_workers: 4, linger_s: 5.0, ..outlives }), None);
    for min_workers in [0, 5] {
        let refused = refusal(JobOptions { min_workers, ..outlives }).unwrap().to_string();
        assert!(refused.ends_with("set min_workers to 1 to 4"), "{refused}");
    }
    assert_eq!(refusal(JobOptions { min_workers: 2, start_workers: Some(2), ..outlives }), None);
    for start_workers in [1, 5].map(Some) {
        let refused = refusal(JobOptions { min_workers: 2, start_workers, ..outlives }).unwrap().to_string();
        assert!(refused.ends_with("set start_workers to 2 to 4, from min_workers to all"), "{refused}");
    }
    for (max_hubs, replicas, hubs) in [(0, 0, None), (1, 1, None), (2, 0, Some(3))] {
        let options = JobOptions { max_hubs: Some(max_hubs), replicas, hubs, ..usual };
        let refused = refusal(options).unwrap().to_string();
        assert!(refused.contains(&format!("is to have {max_hubs} hubs at most")), "{refused}");
        assert_eq!(refusal(JobOptions { max_hubs: Some(3), ..options }), None);
    }
    let rewinds = JobOptions { on_worker_loss: OnWorkerLoss::Rewind, ..usual };
    assert_eq!(refusal(JobOptions { rewind_every: 1000, linger_s: 5.0, ..rewinds }), None);
    assert_eq!(refusal(JobOptions { start_workers: Some(2), ..rewinds }), None);
    for rewind_every in [0, 1001] {
        let refused = refusal(JobOptions { rewind_every, ..rewinds }).unwrap().to_string();
        assert!(refused.ends_with("1 to 1000 steps are possible"), "{refused}");
    }
    let saves = |program_state_bytes| JobOptions { program_state_bytes, ..usual };
    assert_eq!(refusal(saves(64 << 20)), None);
    let refused = refusal(saves((64 << 20) + 1)).unwrap().to_string();
    assert!(
        refused.ends_with("program_state_bytes of job `x` is 67108865: at most 67108864 are possible"),
        "{refused}"
    );
    let replicas = JobOptions { replicas: 1, ..usual };
    let kept = JobOptions { checkpoint_every: Some("5".parse().unwrap()), ..rewinds };
    assert_eq!(refusal(replicas), None);
    for (replicas, hubs, says) in
        [(2, None, "0 or 1 is possible"), (1, Some(1), "ask for 2 hubs or more, or leave `replicas` out")]
    {
        let refused = refusal(JobOptions { replicas, hubs, ..usual }).unwrap().to_string();
        assert!(refused.ends_with(says), "{refused}");
    }
    let refused: Vec<String> = [
        JobOptions { stragglers: Stragglers::Backup(1), ..replicas },
        JobOptions { replicas: 1, ..outlives },
        JobOptions { resume: Some(Resume::Latest), ..replicas },
        JobOptions { replicas: 1, ..rewinds },
        JobOptions { replicas: 1, start_workers: Some(2), ..kept },
        JobOptions { replicas: 1, rewind_every: 2, ..kept },
        JobOptions { on_interface_down: OnInterfaceDown::Continue, ..replicas },
        JobOptions { optimize_at: OptimizeAt::Owner, reduction: Reduction::Flat, ..usual },
        JobOptions { between_sites: BetweenSites::BF16, reduction: Reduction::Flat, ..usual },
        JobOptions { stragglers: Stragglers::Backup(1), ..continues },
        JobOptions { hubs: Some(0), weight: 2, ..usual },
        JobOptions { min_workers: 2, ..usual },
        JobOptions { start_workers: Some(2), ..usual },
        JobOptions { stragglers: Stragglers::Backup(1), ..outlives },
        JobOptions { min_workers: 2, ..rewinds },
        JobOptions { rewind_every: 2, ..usual },
        JobOptions { stragglers: Stragglers::Backup(1), ..rewinds },
        JobOptions { resume: Some(Resume::Latest), ..usual },
    ]
    .map(|options| refusal(options).expect("these do not combine").to_string())
    .into();
    for rule in Caller::CreateService.rules() {
        let shown = format!("{}; {}", rule.why, rule.remedy);
        assert!(refused.iter().any(|message| message.ends_with(&shown)), "no example meets {rule:?}");
    }
    assert!(
        refused.last().unwrap().starts_with("job `x`: no hub that has joined keeps any checkpoints: "),
        "{}",
        refused.last().unwrap()
    );
}
