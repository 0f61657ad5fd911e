use super::*;
use paramhub_core::auth::Proof;
use paramhub_core::composition::{Place, Reduction};
use paramhub_core::placement::{HubShape, InterfaceShape};
use paramhub_core::service::{ConnectService, JobOptions};
use std::sync::Mutex;
use std::time::Duration;
use tracing::span::{Attributes, Id, Record as Values};
use tracing::{Event, Level, Metadata, Subscriber};

/// The levels of all that is logged.
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

/// A hub of one core that serves a rack, or everybody.
fn hub_at(world: &mut World, address: &str, rack: &str, now: Now) -> u32 {
    let interface = InterfaceShape { address: address.into(), cores: vec![0], weight: 1 };
    let shape = HubShape { interfaces: vec![interface], local: None };
    let place = Place { rack: rack.into(), host: String::new() };
    world
        .register_hub(
            RegisterHub { shape, place, machine: String::new(), keeps_checkpoints: None },
            "token".into(),
            now,
        )
        .unwrap()
}

/// A job with a rank in each of these racks, all of which have connected.
fn job_in(world: &mut World, name: &str, racks: &[&str], reduction: Reduction, now: Now) -> Namespace {
    let namespace = Namespace([name.as_bytes()[0]; 16]);
    let options = JobOptions { reduction, ..JobOptions::default() };
    let request = CreateService { name: name.into(), workers: racks.len() as u32, options };
    world.admit(Job::new(0, request, namespace, Nonce([2; 32]), now));
    for (rank, rack) in (0..).zip(racks) {
        let call = ConnectService {
            rank,
            incarnation: Incarnation([rank as u8; 16]),
            proof: Proof([0; 32]),
            host: String::new(),
            process: 1,
            place: Place { rack: rack.to_string(), host: String::new() },
            peer_address: None,
        };
        world.change(namespace, |job| (job.connect(&call, now).unwrap(), Transition::None)).unwrap();
    }
    world.convene(namespace, now);
    namespace
}

fn is_begun(world: &World, namespace: Namespace) -> bool {
    world.job(namespace).unwrap().state() != JobState::Connecting
}

/// What is logged when this happens to a job that a hub serves.
fn logged(happens: impl FnOnce(&mut World, u32, Namespace)) -> Vec<Level> {
    let now = Now::read();
    let mut world = World::new(Vec::new(), None, Nonce([9; 32]), 8, 8, now);
    let hub = hub_at(&mut world, "127.0.0.1:1", "", now);
    let namespace = job_in(&mut world, "x", &[""], Reduction::Auto, now);
    let levels = Levels::default();
    tracing::subscriber::with_default(levels.clone(), || happens(&mut world, hub, namespace));
    assert_eq!(world.job(namespace).unwrap().state(), JobState::Failed);
    levels.0.lock().unwrap().clone()
}

#[test]
fn a_probe_holds_up_jobs_while_it_lasts_and_makes_none_fail() {
    let now = Now::read();
    let mut world = World::new(Vec::new(), None, Nonce([9; 32]), 8, 8, now);
    let hubs =
        ["a", "b"].map(|rack| hub_at(&mut world, &format!("127.0.0.1:{}", rack.as_bytes()[0]), rack, now));
    let asks = job_in(&mut world, "asks", &["a", "b"], Reduction::Auto, now);
    let beside = job_in(&mut world, "beside", &["a"], Reduction::Sharded, now);
    let waits = job_in(&mut world, "waits", &["a", "b"], Reduction::Auto, now);
    assert!(![asks, beside, waits].iter().any(|&job| is_begun(&world, job)), "hubs probe");
    // Its ranks would give up now.
    world.convene_at_last(waits, now);
    assert!(is_begun(&world, waits) && !is_begun(&world, beside));
    let said = world.job(waits).unwrap().status().reduction;
    assert!(said.contains("not known, and its ranks could not wait for a probe to end"), "{said}");
    // Nobody answers.
    let end = Now { instant: now.instant + Duration::from_secs(2), ..now };
    hubs.iter().for_each(|&hub| world.report(hub, Some("token"), HubReport::default(), end).unwrap());
    assert!(is_begun(&world, asks) && is_begun(&world, beside));
    let said = world.job(asks).unwrap().status().reduction;
    assert!(said.contains("has not answered a probe within 2 s"), "{said}");
}

#[test]
fn a_failure_that_a_hub_reports_and_has_warned_of_is_no_second_warning() {
    let report = |event: fn(Namespace) -> HubEvent| {
        logged(|world, hub, namespace| {
            let events = vec![event(namespace)];
            let report = HubReport { events, ..HubReport::default() };
            world.report(hub, Some("token"), report, Now::read()).unwrap();
        })
    };
    let refused = |namespace| HubEvent::Refused { namespace, reason: "it is full".into() };
    let ended =
        |namespace| HubEvent::Ended(JobEnd::failed(namespace, "rank 0 was lost".into(), CauseKind::PeerLost));
    assert_eq!(report(refused), [Level::INFO]);
    assert_eq!(report(ended), [Level::INFO]);
    // What the manager decides nobody else tells.
    let early = |namespace| HubEvent::Ended(JobEnd::finished(namespace));
    assert_eq!(report(early), [Level::WARN]);
    let stopped = logged(|world, _, namespace| {
        let fail = |job: &mut Job| ((), job.fail(ErrorCode::JobEnded, "stopped".into(), Now::read()));
        world.change(namespace, fail).unwrap();
    });
    assert_eq!(stopped, [Level::WARN]);
}
