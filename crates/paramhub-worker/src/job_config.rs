//! The configuration of a job, and its opening: placement, streams, I/O thread.

use std::collections::{BTreeSet, HashMap};
use std::io::ErrorKind;
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use paramhub_core::arena::ArenaLayout;
use paramhub_core::auth::{Incarnation, Namespace, StreamSecret};
use paramhub_core::chunk::ChunkMap;
use paramhub_core::codec::Codec;
use paramhub_core::combinations::{Feature, Features};
use paramhub_core::factors::FactorBlock;
use paramhub_core::liveness::LivenessRules;
use paramhub_core::placement::{HubShape, Placement, Route, RouteId};
use paramhub_core::program_states::payload_bytes_max;
use paramhub_core::requests::Requests;
use paramhub_core::resuming::{ResumeNotices, ResumeTerms, Retunes};
use paramhub_core::scheme::{InformationBook, Plan, Roster};
use paramhub_core::service::{JobOptions, OnWorkerLoss};
use paramhub_core::settings::Settings;
use paramhub_core::standbys::Share;
use paramhub_core::wire::{
    Attempt, Caller, Capabilities, Direction, FACTORS_HEAD_BYTES, Hello, Refusal, State,
};
use paramhub_transport::shm::{Arena, RING_BYTES_DEFAULT, Segment};
use paramhub_transport::{Connection, ShmStream, TcpStream, Waker};

use crate::arena::WorkerArena;
use crate::command::{JobInbox, RETUNES_MAX};
use crate::dial::{Dialler, OpenedTcp};
use crate::error::{WorkerError, WorkerId};
use crate::interfaces::{self, Interfaces};
use crate::io_loop::{Failover, IoLoop, IoLoopConfig};
use crate::job::{Job, Shared};
use crate::lane::Lane;
use crate::loss_report::LossReporter;
use crate::norms::NormHistory;
use crate::notices::Notices;
use crate::options::{Options, ParameterSharing, Transport, deadline};
use crate::program_state::ProgramStateClaims;
use crate::requests_in_flight::RequestsInFlight;
use crate::resume::{Redialler, RoutePlace, StreamEndpoint, StreamEventSender};
use crate::share_hubs::{ShareAsker, ShareHubs};
use crate::staging::Staging;
use crate::statistics::Counters;
use crate::steps::KeySteps;

/// The opened streams, one for each route, and the memory shared with hubs of this host.
struct OpenedStreams {
    streams: Vec<OpenedStream>,
    /// The interfaces of this host that the streams leave by, each with the address there.
    interfaces: BTreeSet<(String, IpAddr)>,
    arena: Option<WorkerArena>,
    /// The number of state values that the optimizer keeps for each parameter, as the hubs say.
    state_slots: u8,
}

/// A stream whose handshake is over.
struct OpenedStream {
    route: RouteId,
    hub: Arc<str>,
    stream: Connection,
    /// The address that a stream over TCP leaves from.
    source: Option<IpAddr>,
    endpoint: StreamEndpoint,
}

/// Events of interfaces that may wait in addition to those of streams.
const INTERFACE_EVENTS_MAX: usize = 64;

/// Everything that ConnectService and InitService settle. [`Member::init`](crate::Member::init) makes one; a
/// caller that settles these things otherwise, such as a test with a hub of its own, makes it by hand.
#[derive(Clone, Debug)]
pub struct JobConfig {
    /// The job's name.
    pub name: String,
    /// The job's namespace.
    pub namespace: Namespace,
    /// The secret with which the rank proves its streams.
    pub secret: StreamSecret,
    /// The job's epoch.
    pub epoch: u64,
    /// This worker's rank.
    pub rank: u32,
    /// Ranks in the job.
    pub workers: u32,
    /// The incarnation given to ConnectService.
    pub incarnation: Incarnation,
    /// Every hub of the worker's site, in the order in which the placement counts them.
    pub hubs: Vec<HubShape>,
    /// The hubs of each share of the chunks, by their positions in `hubs`, if they have standbys.
    pub shares: Vec<Share>,
    /// The settings that the ranks agreed on.
    pub settings: Settings,
    /// The job's waits and lifetimes.
    pub job_options: JobOptions,
    /// The step of the checkpoint that the hubs begin with, if they do.
    pub resumed_step: Option<u32>,
    /// Whether the job was running already, and this worker has taken a rank that was lost.
    pub joined_running: bool,
    /// The hubs' digest of their placement, in hexadecimal; if it is given, the worker compares its own with
    /// it.
    pub placement_hash: Option<String>,
    /// The members of the job.
    pub roster: Roster,
}

impl JobConfig {
    /// Places the chunks, opens a stream to every core that owns some, and starts the I/O thread.
    ///
    /// # Errors
    /// If the settings are contradictory, the hubs computed another placement, or a stream cannot be opened
    /// in time.
    pub fn open(self, options: Options) -> Result<Job, WorkerError> {
        self.open_reporting(options, None, None)
    }

    /// [`open`](Self::open) of a rank that tells its manager when it loses a hub, and asks it which others the job has.
    pub(crate) fn open_reporting(
        self,
        options: Options,
        loss_reporter: Option<LossReporter>,
        share_asker: Option<ShareAsker>,
    ) -> Result<Job, WorkerError> {
        let who = WorkerId { job: self.name.as_str().into(), rank: self.rank };
        self.settings
            .check()
            .map_err(|cause| WorkerError::Settings { who: who.clone(), cause: Arc::new(cause) })?;
        options.check(&who, &self.settings, &self.job_options, self.hubs.len())?;
        let map = ChunkMap::new(&self.settings.keys, self.settings.chunk_bytes)
            .map_err(|cause| WorkerError::Settings { who: who.clone(), cause: Arc::new(cause.into()) })?;
        let plan = Plan::new(&self.settings, &self.roster.cluster());
        let resuming = ResumeTerms::of(&self.job_options, self.features(), &plan);
        let placement = self.place(&who, &map, &plan)?;
        let chunk_bytes = self.chunk_bytes_max(&map);
        let OpenedStreams { streams, interfaces, arena, state_slots } = self
            .open_streams(&who, &placement, &options, chunk_bytes)
            .map_err(|error| self.explain(error))?;

        let system = |what| {
            let who = who.clone();
            move |error: std::io::Error| WorkerError::System { who, what, reason: error.to_string().into() }
        };
        let blocks = FactorBlock::planned(&self.settings, &map, &plan);
        let staging_bytes = self.staging_bytes(&map, &blocks);
        let now = Instant::now();
        let (mut lanes, mut endpoints) = (Vec::new(), Vec::new());
        for OpenedStream { route, hub, stream, source, endpoint } in streams {
            let slots = placement.chunks(route).len() as u32;
            let mut lane = Lane::new(stream, route, hub, slots, Staging::new(staging_bytes), now);
            lane.source = source;
            lanes.push(lane);
            endpoints.push(endpoint);
        }

        let waker = Waker::new().map_err(system("make a waker"))?;
        let keys = self.settings.keys.keys();
        let dtypes = keys.iter().map(|key| key.dtype).collect();
        let mut codecs: Vec<Codec> = keys.iter().map(|key| self.settings.codec_of(key)).collect();
        for key in blocks.iter().flat_map(FactorBlock::keys) {
            codecs[key as usize] = keys[key as usize].dtype.codec();
        }
        let index = keys.iter().enumerate().map(|(index, key)| (key.name.clone(), index as u32));
        let shared = Arc::new(Shared {
            who: who.clone(),
            workers: self.workers,
            index: index.collect::<HashMap<_, _>>(),
            steps: KeySteps::new(keys.len()),
            imbalance: placement.imbalance(),
            book: InformationBook { job: self.name, roster: self.roster, plan },
            settings: self.settings,
            blocks: blocks.clone(),
            state_slots,
            resumed_step: self.resumed_step,
            joined_running: self.joined_running,
            has_checkpoints: self.job_options.checkpoint_every.is_some(),
            rewind_every: self.job_options.rewinds().then_some(self.job_options.rewind_every),
            loses_workers: self.job_options.on_worker_loss == OnWorkerLoss::Continue,
            program_state_bytes: self.job_options.program_state_bytes,
            arena: arena.clone(),
            inbox: JobInbox::new(waker.clone(), RETUNES_MAX),
            counters: Counters::default(),
            notices: Notices::default(),
            norms: NormHistory::default(),
            program_states: ProgramStateClaims::default(),
        });
        if let Some(step) = shared.resumed_step.filter(|_| shared.settings.is_two_phase()) {
            // Nothing was initialised yet, and nothing else will be.
            let _ = shared.norms.start(step);
        }
        let mut requests = Requests::new(map, dtypes, codecs).with_blocks(&blocks);
        if self.job_options.stragglers.leaves_out() {
            requests = requests.with_steps_of_chunks();
        }
        let begin_every = self.job_options.residuals_begin_every(&shared.settings);
        let in_flight =
            RequestsInFlight::new(Arc::clone(&shared), requests, placement, arena, lanes.len(), begin_every);
        let dead_after = Duration::try_from_secs_f64(self.job_options.dead_after_s).unwrap_or(Duration::MAX);
        let heartbeat = match lanes.iter().all(|lane: &Lane| lane.stream.is_shm()) {
            true => options.heartbeat,
            false => resuming.heartbeat(options.heartbeat),
        };
        let liveness_rules = LivenessRules::of_stream(heartbeat, dead_after);
        let (spin, scratch_bytes, hub_rank) = (options.spin, options.scratch_bytes, options.hub_rank);
        let outlives_hubs = self.job_options.outlives_hubs();
        let config = IoLoopConfig {
            liveness_rules,
            spin,
            scratch_bytes,
            hub_rank,
            loss_reporter,
            outlives_hubs,
            resuming,
        };
        let failover = resuming.resumes().then(|| {
            let (events, received) = sync_channel(2 * lanes.len() + INTERFACE_EVENTS_MAX);
            let redialler = Redialler {
                who: who.clone(),
                secret: self.secret,
                epoch: self.epoch,
                encrypts: self.job_options.encrypt,
                moves: resuming.moves,
                share_hubs: resuming
                    .has_standbys
                    .then(|| ShareHubs::new(self.hubs.clone(), self.shares.clone(), share_asker)),
                selector: options.interfaces.clone(),
                shared: Arc::downgrade(&shared),
                chunk_bytes,
                send_bytes: options.socket_send_bytes,
                receive_bytes: options.socket_receive_bytes,
                endpoints,
            };
            let event_sender = StreamEventSender { events, waker: waker.clone() };
            Failover {
                redialler: Arc::new(redialler),
                events: received,
                event_sender,
                retunes: Retunes::default(),
                release: None,
                notices: ResumeNotices::default(),
            }
        });
        let moving = failover.as_ref().filter(|_| resuming.moves);
        let event_sender = moving.map(|failover| failover.event_sender.clone());
        let io_loop =
            IoLoop::new(in_flight, lanes, waker, config, failover).map_err(system("poll its streams"))?;
        // Start the watcher before the I/O thread: if the watcher cannot be started, no I/O thread is left
        // behind. The watcher ends with `shared`.
        let watched = Arc::downgrade(&shared);
        interfaces::watch(watched, interfaces, event_sender).map_err(system("watch its interfaces"))?;
        let thread = std::thread::Builder::new()
            .name("paramhub-io".into())
            .spawn(move || io_loop.run())
            .map_err(system("start its I/O thread"))?;
        Ok(Job::new(shared, thread, options.leave_timeout))
    }

    /// The features of the job as far as a worker knows them: whether there are other sites, it does not. A hub of such a job
    /// refuses streams that are opened again.
    fn features(&self) -> Features {
        let hubs = Features::of([(Feature::SeveralHubs, self.hubs.len() > 1)]);
        self.settings.features().and(self.job_options.features()).and(hubs)
    }

    fn place(&self, who: &WorkerId, map: &ChunkMap, plan: &Plan) -> Result<Placement, WorkerError> {
        let fail = |reason: String| WorkerError::Placement { who: who.clone(), reason: reason.into() };
        let spreads = plan.spreads(self.settings.keys.len());
        let placement = Placement::planned(&self.settings.keys, map, &self.hubs, &spreads)
            .map_err(|error| fail(format!("the hubs cannot be placed on: {error}")))?;
        let mine = placement.hash().to_hex();
        match &self.placement_hash {
            Some(theirs) if *theirs != mine.as_str() => Err(fail(format!(
                "this worker placed the chunks as {mine}, the hubs as {theirs}: use the same release of paramhub on both ends"
            ))),
            _ => Ok(placement),
        }
    }

    /// In a job that goes back, a hub refuses the streams of a process that has joined before another worker was lost.
    fn explain(&self, error: WorkerError) -> WorkerError {
        match error {
            WorkerError::Refused { who, refusal: Refusal::Stale, message, .. }
                if self.job_options.rewinds() =>
            {
                WorkerError::Rewound { who, culprit: None, message }
            }
            error => error,
        }
    }

    fn open_streams(
        &self,
        who: &WorkerId,
        placement: &Placement,
        options: &Options,
        chunk_bytes: usize,
    ) -> Result<OpenedStreams, WorkerError> {
        let interfaces = Interfaces::learn(&options.interfaces)
            .map_err(|reason| WorkerError::Interfaces { who: who.clone(), reason: reason.into() })?;
        let dialler = Dialler {
            who,
            secret: &self.secret,
            interfaces: &interfaces,
            encrypts: self.job_options.encrypt,
            deadline: deadline(options.dial_timeout),
        };
        let system = |what| {
            let who = who.clone();
            move |error: std::io::Error| WorkerError::System { who, what, reason: error.to_string().into() }
        };
        let features = self.features();
        let mut opened =
            OpenedStreams { streams: Vec::new(), interfaces: BTreeSet::new(), arena: None, state_slots: 0 };
        for (id, route) in placement.routes().iter().enumerate() {
            if placement.chunks(id as RouteId).is_empty() {
                continue;
            }
            let shape = &self.hubs[usize::from(route.hub)];
            let hub: Arc<str> = shape.interfaces[usize::from(route.interface)].address.as_str().into();
            let caller = Caller::Worker { rank: self.rank, shares_parameters: false };
            let hello = Hello {
                caller,
                interface: route.interface,
                core: route.core,
                standby_route: None,
                offered: Capabilities::default(),
                required: Capabilities::default(),
                attempt: Attempt::first(self.epoch),
                namespace: self.namespace,
                incarnation: self.incarnation,
                placement: *placement.hash().as_bytes(),
                challenge: [0; 32],
            };
            let mut leaves_from = None;
            let (stream, state_slots) = match self.reach_locally(&dialler, &hub, shape, options)? {
                Some(socket) => {
                    let arena = match &mut opened.arena {
                        Some(arena) => arena,
                        none => none.insert(self.arena().map_err(system("share memory"))?),
                    };
                    let shares_parameters = options.wants_shared_parameters(features);
                    let caller = Caller::Worker { rank: self.rank, shares_parameters };
                    let hello = Hello { caller, ..hello };
                    let stream = dialler.open_locally(&hub, socket, hello, arena.own.segment())?;
                    if let Some(common) = stream.common
                        && arena.common.is_none()
                    {
                        let layout = ArenaLayout::parameters_only(&self.settings);
                        let segment = Segment::adopt_to_read(common, layout.bytes() as usize)
                            .map_err(system("read the hub's parameters"))?;
                        arena.common = Some((Arc::new(segment), Arc::new(layout)));
                    }
                    let (capacity, to) = (RING_BYTES_DEFAULT, Direction::ToWorker);
                    let connection = ShmStream::new(stream.socket, stream.rings, capacity, to, chunk_bytes)
                        .map(|stream| Connection::Shm(stream.with_arena()))
                        .map_err(system("prepare a stream"))?;
                    (connection, stream.state_slots)
                }
                None => {
                    let OpenedTcp { socket, keys, state_slots } = dialler.open(&hub, hello)?;
                    leaves_from = socket.local_addr().ok().map(|source| source.ip());
                    if let Ok(source) = socket.local_addr()
                        && let Some(name) = interfaces.name_of(source.ip())
                        && socket.peer_addr().is_ok_and(|hub| hub.ip() != source.ip())
                    {
                        opened.interfaces.insert((name.to_owned(), source.ip()));
                    }
                    let connection = TcpStream::new(socket, Direction::ToWorker, chunk_bytes)
                        .map(|stream| stream.with_encryption(keys.as_ref()))
                        .and_then(|stream| {
                            stream.with_buffer_bytes(options.socket_send_bytes, options.socket_receive_bytes)
                        })
                        .map(Connection::Tcp)
                        .map_err(system("prepare a stream"))?;
                    (connection, state_slots)
                }
            };
            if !opened.streams.is_empty() && state_slots != opened.state_slots {
                let before = opened.state_slots;
                return Err(dialler.fail(
                    &hub,
                    format!(
                        "its optimizer `{}` keeps {state_slots} values of state a parameter, that of the hubs before {before}: \
                         register the same one at all hubs",
                        self.settings.optimizer.name
                    ),
                ));
            }
            opened.state_slots = state_slots;
            let endpoint = StreamEndpoint {
                hello,
                route: (id as RouteId, *route),
                places: self.places(route),
                attempts: AtomicU32::new(0),
            };
            let route = id as RouteId;
            opened.streams.push(OpenedStream { route, hub, stream, source: leaves_from, endpoint });
        }
        if self.job_options.continues() && !opened.interfaces.is_empty() {
            // Streams may move to the other usable interfaces, so watch those, too.
            opened.interfaces.extend(interfaces.usable());
        }
        Ok(opened)
    }

    /// Where a stream of a route that was cut may be opened again in a job without standbys: at all addresses of its hub.
    fn places(&self, route: &Route) -> Vec<RoutePlace> {
        let own = &self.hubs[usize::from(route.hub)];
        let of_interface = |interface: u16| RoutePlace {
            address: own.interfaces[usize::from(interface)].address.as_str().into(),
            interface: route.interface,
            core: route.core,
            standby_route: None,
        };
        let mut places: Vec<RoutePlace> = (0..own.interfaces.len() as u16).map(of_interface).collect();
        places.rotate_left(usize::from(route.interface));
        places.dedup_by(|one, other| one.address == other.address);
        places
    }

    /// Connects to the hub's local socket, where shared memory is wanted and the hub is on this host.
    fn reach_locally(
        &self,
        dialler: &Dialler<'_>,
        hub: &Arc<str>,
        shape: &HubShape,
        options: &Options,
    ) -> Result<Option<UnixStream>, WorkerError> {
        if options.transport == Transport::Tcp || self.job_options.has_standbys() {
            return Ok(None);
        }
        let reached = match &shape.local {
            Some(name) => dialler.connect_locally(name).map_err(|error| match error.kind() {
                ErrorKind::ConnectionRefused => {
                    "it is on another host, or in another network namespace".into()
                }
                _ => error.to_string(),
            }),
            None => Err("it offers none (was it started with --no-shared-memory?)".to_string()),
        };
        let is_needed =
            options.transport == Transport::Shm || options.shared_parameters == ParameterSharing::Always;
        match reached {
            Ok(socket) => Ok(Some(socket)),
            Err(why) if is_needed => {
                let (what, instead) = match options.shared_parameters == ParameterSharing::Always {
                    true => ("shared parameters need", "join without shared parameters"),
                    false => ("the transport shm needs", "use the transport auto or tcp"),
                };
                Err(dialler.fail(hub, format!("{what} memory shared with the hub, but {why}: {instead}")))
            }
            Err(_) => Ok(None),
        }
    }

    fn arena(&self) -> std::io::Result<WorkerArena> {
        let layout = ArenaLayout::new(&self.settings);
        let segment = Segment::create("paramhub-arena", layout.bytes() as usize)?;
        Ok(WorkerArena { own: Arena::new(Arc::new(segment)), layout: Arc::new(layout), common: None })
    }

    /// Bytes of the largest payload that a hub sends: a chunk of optimizer state, which takes the most bytes an element, or
    /// a piece of a program state.
    fn chunk_bytes_max(&self, map: &ChunkMap) -> usize {
        let chunk = State::bytes(map.chunk_elements()) as usize;
        chunk.max(payload_bytes_max(self.settings.chunk_bytes, self.job_options.program_state_bytes))
    }

    /// Bytes of the largest payload that is converted before it is sent; 0 if none is.
    fn staging_bytes(&self, map: &ChunkMap, blocks: &[FactorBlock]) -> usize {
        let pieces =
            blocks.iter().map(|block| FACTORS_HEAD_BYTES + block.piece_elements * block.codec.bytes());
        let keys = self.settings.keys.keys().iter();
        let converted = keys
            .map(|key| (self.settings.codec_of(key), key.dtype.codec()))
            .filter(|(travels_as, lies_as)| travels_as != lies_as && !travels_as.is_quantised())
            .map(|(travels_as, _)| travels_as.bytes());
        let converted = map.chunk_elements() as usize * converted.max().unwrap_or(0);
        converted.max(pieces.max().unwrap_or(0))
    }
}
