use super::*;
use paramhub_core::auth::Proof;
use paramhub_core::placement::InterfaceShape;
use paramhub_core::service::{ConnectService, JobOptions};
use std::sync::Mutex;
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

/// What is logged when this happens to a job that a hub serves.
fn logged(happens: impl FnOnce(&mut World, u32, Namespace)) -> Vec<Level> {
    let now = Now::read();
    let mut world = World::new(Vec::new(), None, Nonce([9; 32]), 8, 8, now);
    let interface = InterfaceShape { address: "127.0.0.1:1".into(), cores: vec![0], weight: 1 };
    let shape = HubShape { interfaces: vec![interface], local: None };
    let hub = world.register_hub(shape, Default::default(), "token".into(), now).unwrap();
    let namespace = Namespace([1; 16]);
    let request = CreateService { name: "x".into(), workers: 1, options: JobOptions::default() };
    world.admit(Job::new(0, request, namespace, Nonce([2; 32]), now));
    let (incarnation, proof) = (Incarnation([3; 16]), Proof([0; 32]));
    let call = ConnectService {
        rank: 0,
        incarnation,
        proof,
        host: String::new(),
        process: 1,
        place: Default::default(),
    };
    world.change(namespace, |job| (job.connect(&call, now).unwrap(), Transition::None)).unwrap();
    world.convene(namespace, now);
    let levels = Levels::default();
    tracing::subscriber::with_default(levels.clone(), || happens(&mut world, hub, namespace));
    assert_eq!(world.job(namespace).unwrap().state(), JobState::Failed);
    levels.0.lock().unwrap().clone()
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
    let ended = |namespace| HubEvent::Ended { namespace, finished: false, reason: "rank 0 was lost".into() };
    assert_eq!(report(refused), [Level::INFO]);
    assert_eq!(report(ended), [Level::INFO]);
    // What the manager decides nobody else tells.
    let early = |namespace| HubEvent::Ended { namespace, finished: true, reason: String::new() };
    assert_eq!(report(early), [Level::WARN]);
    let stopped = logged(|world, _, namespace| {
        let fail = |job: &mut Job| ((), job.fail(ErrorCode::JobEnded, "stopped".into(), Now::read()));
        world.change(namespace, fail).unwrap();
    });
    assert_eq!(stopped, [Level::WARN]);
}
