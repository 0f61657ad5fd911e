//! A real manager on a loopback port, and real peers of its protocol over real sockets.
#![allow(dead_code, reason = "each test file uses its share")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paramhub_control::{ControlError, ManagerClient};
use paramhub_core::auth::{Incarnation, Namespace, Nonce, Proof, Purpose, RankClaim, StreamSecret};
use paramhub_core::chunk::ChunkMap;
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::placement::{HubShape, InterfaceShape, Placement};
use paramhub_core::scheme::Plan;
use paramhub_core::service::{
    CauseKind, ConnectService, CoreCounters, CreateService, ErrorCode, HubCommand, HubEvent, HubJobCounters,
    HubRegistered, HubReport, InitService, JobCounters, JobEnd, JobOptions, JobPlan, LeaveService,
    PollCommands, RegisterHub, ServiceConnected, ServiceInitialised, StopWhen,
};
use paramhub_core::settings::Settings;
use paramhub_core::wire::VERSION;
use paramhub_manager::{Manager, ManagerConfig, RunningManager};

/// Far above what any wait in these tests should take, and far below a job's default timeout of 60 s.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) fn config() -> ManagerConfig {
    ManagerConfig { listen: "127.0.0.1:0".parse().unwrap(), ..ManagerConfig::default() }
}

pub(crate) fn start(config: ManagerConfig) -> (RunningManager, ManagerClient) {
    let manager = Manager::start(config).unwrap();
    let client = ManagerClient::new(&manager.url(), None).unwrap();
    (manager, client)
}

/// Waits until `holds`; fails the test if it never does.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < WAIT_TIMEOUT, "waited {WAIT_TIMEOUT:?} for this: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn shape() -> HubShape {
    static NEXT_PORT: AtomicU16 = AtomicU16::new(1000);
    let port = NEXT_PORT.fetch_add(1, Ordering::Relaxed);
    let interface = InterfaceShape { address: format!("127.0.0.1:{port}"), cores: vec![0, 1], weight: 1 };
    HubShape { interfaces: vec![interface], local: None, between_hubs: None }
}

pub(crate) fn settings(elements: u64) -> Settings {
    let keys = vec![Key::new("conv.weight", [elements, 3]), Key::new("conv.bias", [elements])];
    Settings::new(KeyTable::new(keys).unwrap())
}

/// Settings of this many keys.
pub(crate) fn many_keys(keys: usize) -> Settings {
    let keys = (0..keys).map(|key| Key::new(format!("layer.{key}.weight"), [3, 5])).collect();
    Settings::new(KeyTable::new(keys).unwrap())
}

pub(crate) fn code<T: std::fmt::Debug>(result: &Result<T, ControlError>) -> ErrorCode {
    match result {
        Err(ControlError::Service(refusal)) => refusal.code,
        other => panic!("expected a refusal, not {other:?}"),
    }
}

pub(crate) fn message<T: std::fmt::Debug>(result: &Result<T, ControlError>) -> String {
    match result {
        Err(refused) => refused.to_string(),
        Ok(value) => panic!("expected a refusal, not {value:?}"),
    }
}

/// A created job, and its ranks' calls.
#[derive(Clone)]
pub(crate) struct Job {
    pub(crate) client: ManagerClient,
    pub(crate) name: String,
    pub(crate) namespace: Namespace,
    pub(crate) nonce: Nonce,
    /// The secrets of the ranks that have connected.
    pub(crate) secrets: Arc<Mutex<BTreeMap<u32, StreamSecret>>>,
}

impl Job {
    pub(crate) fn create(client: &ManagerClient, name: &str, workers: u32) -> Job {
        Job::create_with(client, name, workers, JobOptions::default())
    }

    pub(crate) fn create_with(client: &ManagerClient, name: &str, workers: u32, options: JobOptions) -> Job {
        let request = CreateService { name: name.into(), workers, options };
        let created = client.create_service(&request).unwrap();
        let (namespace, nonce) = (created.namespace, created.nonce);
        Job { client: client.clone(), name: name.into(), namespace, nonce, secrets: Arc::default() }
    }

    pub(crate) fn connect_request(&self, rank: u32, incarnation: Incarnation) -> ConnectService {
        let proof = self.nonce.prove_rank(Purpose::Connect, self.namespace, rank, incarnation);
        ConnectService {
            rank,
            incarnation,
            proof,
            claim: Some(RankClaim([incarnation.0, incarnation.0].concat().try_into().unwrap())),
            host: "testhost".into(),
            process: 1000 + rank,
            place: Default::default(),
            peer_address: None,
            workers: None,
        }
    }

    pub(crate) fn connect(&self, rank: u32) -> Result<ServiceConnected, ControlError> {
        self.connect_as(rank, process(rank))
    }

    pub(crate) fn connect_as(
        &self,
        rank: u32,
        incarnation: Incarnation,
    ) -> Result<ServiceConnected, ControlError> {
        self.connect_with(&self.connect_request(rank, incarnation))
    }

    pub(crate) fn connect_with(&self, request: &ConnectService) -> Result<ServiceConnected, ControlError> {
        let connected = self.client.connect_service(self.namespace, request, Duration::from_secs(60))?;
        let secret = connected.secrets.as_ref().unwrap().rank;
        self.secrets.lock().unwrap().insert(request.rank, secret);
        Ok(connected)
    }

    /// The proof of a rank's later calls: by its secret, or by the nonce if it has none.
    pub(crate) fn prove(&self, purpose: Purpose, rank: u32) -> Proof {
        let secret = self.secrets.lock().unwrap().get(&rank).copied().unwrap_or(self.nonce.into());
        secret.prove_rank(purpose, self.namespace, rank, process(rank))
    }

    pub(crate) fn init(&self, rank: u32, settings: Settings) -> Result<ServiceInitialised, ControlError> {
        let incarnation = process(rank);
        let proof = self.prove(Purpose::Init, rank);
        let request = InitService { rank, incarnation, proof, settings };
        self.client.init_service(self.namespace, &request, Duration::from_secs(60))
    }

    pub(crate) fn leave(&self, rank: u32, reason: &str) -> Result<(), ControlError> {
        self.leave_as(rank, reason, false, None)
    }

    pub(crate) fn finish(&self, rank: u32) -> Result<(), ControlError> {
        self.leave_as(rank, "", true, None)
    }

    /// The rank has lost the hub at this address.
    pub(crate) fn lose(&self, rank: u32, hub: &str) -> Result<(), ControlError> {
        self.leave_as(rank, "it closed the connection", false, Some(hub.to_owned()))
    }

    fn leave_as(
        &self,
        rank: u32,
        reason: &str,
        finished: bool,
        lost_hub: Option<String>,
    ) -> Result<(), ControlError> {
        let incarnation = process(rank);
        let proof = self.prove(Purpose::Leave, rank);
        let request = LeaveService { rank, incarnation, proof, reason: reason.into(), finished, lost_hub };
        self.client.leave_service(self.namespace, &request)
    }

    /// Runs `call` for every rank at once, and returns the answers in rank order.
    pub(crate) fn all_ranks<T: Send + 'static>(
        &self,
        ranks: impl IntoIterator<Item = u32>,
        call: impl Fn(&Job, u32) -> T + Send + Sync + Clone + 'static,
    ) -> Vec<T> {
        let threads: Vec<JoinHandle<T>> = ranks
            .into_iter()
            .map(|rank| {
                let (job, call) = (self.clone(), call.clone());
                std::thread::spawn(move || call(&job, rank))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    }

    pub(crate) fn connected(&self) -> Vec<u32> {
        self.client.job(&self.namespace.to_string()).unwrap().connected
    }
}

/// The process that holds a rank in these tests.
pub(crate) fn process(rank: u32) -> Incarnation {
    Incarnation([rank as u8; 16])
}

/// What a [`Hub`] says that a job takes there, besides one stream from each worker.
pub(crate) const MEMORY_BYTES: u64 = 100 << 20;

/// The reaction of a [`Hub`] that is asked to allocate.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum HubBehaviour {
    Serve,
    Refuse,
    PlaceOtherwise,
    /// Takes the command and does not answer.
    IgnoreAllocations,
}

/// Speaks the hub's side of the protocol, without a data path.
pub(crate) struct Hub {
    pub(crate) registered: HubRegistered,
    pub(crate) client: ManagerClient,
    pub(crate) shape: HubShape,
    behaviour: HubBehaviour,
    quit: Arc<AtomicBool>,
    thread: Option<JoinHandle<ServedCommands>>,
}

/// What a [`Hub`] knows besides its registration.
#[derive(Default)]
struct ServedCommands {
    taken: Vec<HubCommand>,
    acknowledged: u64,
    /// The jobs that it has allocated, as it has reported them.
    allocated: BTreeMap<Namespace, HubEvent>,
}

impl Hub {
    pub(crate) fn join(client: &ManagerClient, behaviour: HubBehaviour) -> Hub {
        let shape = shape();
        let registered = client
            .register_hub(&RegisterHub {
                protocol: VERSION,
                shape: shape.clone(),
                place: Default::default(),
                machine: String::new(),
                keeps_checkpoints: None,
                encrypt: false,
                labels: Vec::new(),
            })
            .unwrap();
        // A hub takes jobs once it has called, and its thread may be slow to do so.
        client.report(&registered, &HubReport::default()).unwrap();
        Hub::serve(client, registered, shape, behaviour, ServedCommands::default())
    }

    /// Goes on under a manager that has restarted. It forgets a job first, if one is given.
    pub(crate) fn go_on(mut self, client: &ManagerClient, forgotten: Option<Namespace>) -> Hub {
        let mut served = self.thread.take().unwrap().join().unwrap();
        forgotten.inspect(|forgotten| drop(served.allocated.remove(forgotten)));
        Hub::serve(client, self.registered.clone(), self.shape.clone(), self.behaviour, served)
    }

    fn serve(
        client: &ManagerClient,
        registered: HubRegistered,
        shape: HubShape,
        behaviour: HubBehaviour,
        mut served: ServedCommands,
    ) -> Hub {
        let quit = Arc::new(AtomicBool::new(false));
        let thread = {
            let (client, registered, quit) = (client.clone(), registered.clone(), quit.clone());
            std::thread::spawn(move || {
                serve(&client, &registered, &quit, behaviour, &mut served);
                served
            })
        };
        Hub { registered, client: client.clone(), shape, behaviour, quit, thread: Some(thread) }
    }

    pub(crate) fn report(&self, event: HubEvent) {
        let report = HubReport { events: vec![event], ..HubReport::default() };
        self.client.report(&self.registered, &report).unwrap();
    }

    pub(crate) fn finish(&self, job: &Job) {
        self.report(HubEvent::Ended(JobEnd::finished(job.namespace)));
    }

    pub(crate) fn count(&self, job: &Job, counters: JobCounters) {
        let report = HubReport {
            cores: vec![CoreCounters { busy_ns: 1_500_000_000, idle_ns: 500_000_000 }; 2],
            jobs: vec![HubJobCounters { namespace: job.namespace, counters, left_out: vec![5, 6] }],
            ..HubReport::default()
        };
        self.client.report(&self.registered, &report).unwrap();
    }

    /// Falls silent. Returns the commands that it was given.
    pub(crate) fn die(mut self) -> Vec<HubCommand> {
        self.quit.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap().taken
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.quit.store(true, Ordering::Relaxed);
    }
}

fn serve(
    client: &ManagerClient,
    registered: &HubRegistered,
    quit: &AtomicBool,
    behaviour: HubBehaviour,
    served: &mut ServedCommands,
) {
    while !quit.load(Ordering::Relaxed) {
        let acknowledged = served.acknowledged;
        let Ok(polled) = client.poll_commands(registered, &PollCommands { acknowledged, wait_s: 0.2 }) else {
            return;
        };
        for numbered in polled.commands {
            assert_eq!(numbered.sequence, served.acknowledged + 1, "commands are numbered without gaps");
            served.acknowledged = numbered.sequence;
            let events = match &numbered.command {
                HubCommand::Allocate(plan) => {
                    let event = allocate(plan, behaviour);
                    served.allocated.extend(event.clone().map(|event| (plan.namespace, event)));
                    event.into_iter().collect()
                }
                HubCommand::Link { .. } | HubCommand::Tell { .. } | HubCommand::Probe(_) => Vec::new(),
                HubCommand::LoseRank { .. }
                | HubCommand::Rewind { .. }
                | HubCommand::ChangeShares { .. }
                | HubCommand::Finish { .. } => Vec::new(),
                &HubCommand::ExpectRank { namespace, rank, epoch } => {
                    vec![HubEvent::RankExpected { namespace, rank, epoch, step: Some(7) }]
                }
                &HubCommand::JoinRank { namespace, rank, epoch, .. } => {
                    vec![HubEvent::RankJoined { namespace, rank, epoch }]
                }
                &HubCommand::ReportJobs { question } => {
                    let living = served.allocated.values().cloned();
                    living.chain([HubEvent::AllReported { question }]).collect()
                }
                HubCommand::Stop { namespace, when: StopWhen::WorkersEnding, .. } => {
                    vec![HubEvent::Kept { namespace: *namespace }]
                }
                // A hub that knows no other cause reports the one in the command, like a real one.
                HubCommand::Stop { namespace, reason, .. } => {
                    vec![HubEvent::Ended(JobEnd::failed(*namespace, reason.clone(), CauseKind::Hearsay))]
                }
            };
            served.taken.push(numbered.command);
            if client.report(registered, &HubReport { events, ..HubReport::default() }).is_err() {
                return;
            }
        }
    }
}

fn allocate(plan: &JobPlan, behaviour: HubBehaviour) -> Option<HubEvent> {
    let namespace = plan.namespace;
    let placement_hash = match behaviour {
        HubBehaviour::Serve => {
            let map = ChunkMap::new(&plan.settings.keys, plan.settings.chunk_bytes).unwrap();
            let settings = &plan.settings;
            let spreads = Plan::new(settings, &plan.cluster).spreads(settings.keys.len());
            let hubs = &plan.composition.sites[usize::from(plan.site)].hubs;
            let placement = Placement::planned(&settings.keys, &map, hubs, &spreads).unwrap();
            placement.hash().to_hex().to_string()
        }
        HubBehaviour::PlaceOtherwise => "0".repeat(64),
        HubBehaviour::Refuse => {
            let reason = "it needs 3 GB and 2 GB are free".into();
            return Some(HubEvent::Refused { namespace, reason });
        }
        HubBehaviour::IgnoreAllocations => return None,
    };
    let (memory_bytes, streams) = (MEMORY_BYTES, u64::from(plan.composition.workers()));
    Some(HubEvent::Allocated {
        namespace,
        placement_hash,
        resumed_step: None,
        memory_bytes,
        streams,
        further: None,
    })
}

/// Sends bytes to the manager and returns everything it answers until it closes the connection.
pub(crate) fn raw(address: SocketAddr, bytes: &[u8]) -> String {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    // The manager may close before it has read everything.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

/// A request with this body, as bytes.
pub(crate) fn request(method: &str, path: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}
