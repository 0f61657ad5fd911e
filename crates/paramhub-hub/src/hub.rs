use std::collections::{BTreeMap, HashMap};
use std::net::{SocketAddr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use paramhub_control::ManagerClient;
use paramhub_core::composition::Place;
use paramhub_core::limits::{CORES_MAX, INTERFACES_MAX};
use paramhub_core::placement::HubShape;
use paramhub_core::service::{CoreCounters, RegisterHub};
use paramhub_transport::handshakes::raise_descriptor_limit;
use paramhub_transport::host_identity;
use paramhub_transport::interface::{self, Interface, LeftOut, Sysfs};
use paramhub_transport::socket;
use tracing::{error, info, warn};

use crate::checkpoint::Board;
use crate::config::{HubConfig, HubError};
use crate::core::{Core, CoreHandle, mailbox};
use crate::directory::Directory;
use crate::door::{Door, DoorStop};
use crate::interfaces::{self, Assignment, Listening, addresses_of, describe, plan, shape};
use crate::link::Link;
use crate::probe::Prober;
use crate::steward::{Letter, Steward};

/// Letters the steward may have waiting.
const LETTERS: usize = 4096;
/// Events the manager may not have been told yet.
const NEWS: usize = 4096;
/// Core threads for each processor there is: some more than one are of use in tests, and none in earnest.
const CORES_PER_PROCESSOR_MAX: usize = 8;
/// How long a stopping hub waits for its manager to hear the last of them, and that the hub is gone.
const LAST_REPORT: Duration = Duration::from_secs(2);

/// A hub at work: its cores, its door, its steward and its link to the manager, each a thread.
///
/// Dropping it stops it.
#[derive(Debug)]
pub struct RunningHub {
    addresses: Vec<SocketAddr>,
    cores: Vec<CoreHandle>,
    letters: SyncSender<Letter>,
    door: DoorStop,
    /// Dropped to end the thread that looks after the interfaces.
    watching: Option<SyncSender<()>>,
    stop: Arc<AtomicBool>,
    failure: Arc<Mutex<Option<String>>>,
    threads: Vec<JoinHandle<()>>,
    all_told: Mutex<Receiver<()>>,
}

/// A hub that listens and has not joined a manager yet: what is wrong with its configuration, or with its addresses, has shown.
pub struct ListeningHub {
    config: HubConfig,
    found: Vec<Interface>,
    left_out: Vec<LeftOut>,
    listeners: Vec<TcpListener>,
    addresses: Vec<SocketAddr>,
    local: Option<UnixListener>,
    listening: Vec<Listening>,
    assignment: Assignment,
    shape: HubShape,
    descriptors_max: u64,
}

impl ListeningHub {
    /// Checks the configuration and listens.
    pub fn open(config: HubConfig) -> Result<ListeningHub, HubError> {
        check(&config)?;
        if let Some(checkpoints) = &config.checkpoints {
            let folder = checkpoints.folder.clone();
            checkpoints.try_out().map_err(|cause| HubError::Checkpoints { folder, cause })?;
        }
        // A connection manager in this process starts after this, and divides what descriptors there are.
        let descriptors_max = raise_descriptor_limit();
        let sysfs = Sysfs::default();
        let found = interface::interfaces().unwrap_or_else(|error| {
            warn!("this host's interfaces cannot be listed, so that nothing is known of them: {error}");
            Vec::new()
        });
        let (chosen, left_out) = addresses_of(&config, &found, &sysfs)?;
        check_streams(chosen.len(), config.streams)?;
        let listeners: Vec<TcpListener> = chosen
            .iter()
            .map(|&address| socket::listen(address).map_err(HubError::Listen))
            .collect::<Result<_, _>>()?;
        let addresses: Vec<SocketAddr> = listeners
            .iter()
            .map(TcpListener::local_addr)
            .collect::<Result<_, _>>()
            .map_err(|cause| HubError::System { what: "learn its own addresses", cause })?;
        let (local, local_name) = match config.shared_memory {
            true => listen_locally()
                .map(|(listener, name)| (Some(listener), Some(name)))
                .map_err(|cause| HubError::System { what: "listen for processes of its host", cause })?,
            false => (None, None),
        };
        let listening = Listening::all(&addresses, &config, &found, &sysfs)?;
        let assignment = plan(&listening, config.cores, &sysfs)?;
        let shape = HubShape { local: local_name, ..shape(&config, &listening, &assignment)? };
        Ok(ListeningHub {
            config,
            found,
            left_out,
            listeners,
            addresses,
            local,
            listening,
            assignment,
            shape,
            descriptors_max,
        })
    }

    /// Joins the manager and serves. Returns when workers can be served.
    pub fn join(self, manager: ManagerClient) -> Result<RunningHub, HubError> {
        let ListeningHub {
            config,
            found,
            left_out,
            listeners,
            addresses,
            local,
            listening,
            assignment,
            shape,
            descriptors_max,
        } = self;
        let stop = Arc::new(AtomicBool::new(false));
        let failure = Arc::new(Mutex::new(None));
        // Before any thread starts, so that a manager that refuses leaves none behind.
        let place = Place {
            rack: config.rack.clone().unwrap_or_default(),
            host: config.host.clone().unwrap_or_default(),
        };
        let machine = config.host.clone().unwrap_or_else(host_identity);
        let keeps_checkpoints = Some(config.checkpoints.is_some());
        let offer = RegisterHub { shape: shape.clone(), place, machine, keeps_checkpoints };
        let link = Link::join(manager, offer, stop.clone(), failure.clone())?;
        describe(&listening, &assignment, config.pin).iter().for_each(|line| info!("{line}"));
        for left_out in left_out.iter().filter(|left_out| left_out.is_worth_saying(&found)) {
            info!("interface {} is left out: {}", left_out.name, left_out.why);
        }

        let (letters, letterbox) = sync_channel(LETTERS);
        let (news, newsbox) = sync_channel(NEWS);
        let mut threads = Vec::new();
        let mut cores = Vec::new();
        for index in 0..config.cores {
            let processor = config.pin.then(|| assignment.processor_of[index].number);
            let (handle, thread) =
                start_core(index, config.spin, processor, letters.clone(), failure.clone())?;
            cores.push(handle);
            threads.push(thread);
        }
        let directory = Arc::new(Directory::default());
        let board = Board::default();
        let copies = config.streams as u16;
        let (door, door_stop) =
            Door::new(listeners, copies, local, directory.clone(), cores.clone(), descriptors_max)
                .map_err(|cause| HubError::System { what: "wait for connections", cause })?;
        let prober = Prober {
            addresses: addresses.clone(),
            is_rated: listening.iter().all(|listening| listening.rate.is_some()),
            is_probing: Arc::default(),
        };
        let steward = Steward {
            letters: letterbox,
            own_letters: letters.clone(),
            cores: cores.clone(),
            directory,
            news,
            absence: link.absence(),
            registry: config.registry,
            shape,
            memory_bytes: config.memory_bytes.unwrap_or_else(available_memory_bytes),
            job_limits: config.job_limits,
            descriptors_max,
            jobs: HashMap::new(),
            interfaces_down: BTreeMap::new(),
            interface_names: listening.iter().map(Listening::called).collect(),
            prober,
            checkpoints: config.checkpoints,
            board: board.clone(),
            writing: Vec::new(),
        };
        let fail = failure.clone();
        threads.push(spawn("hub-door", move || watch(&fail, "door", || door.run()))?);
        let fail = failure.clone();
        let decide = move || {
            watch(&fail, "steward", || {
                steward.run();
                Ok(())
            });
        };
        threads.push(spawn("hub-steward", decide)?);
        let (watching, tell_watch) = sync_channel(1);
        let (copies, watch_letters) = (config.streams as u16, letters.clone());
        threads.push(spawn("hub-interfaces", move || {
            interfaces::watch(&listening, copies, &watch_letters, &tell_watch);
        })?);
        let (reporter, cores_to_report) = (link.clone(), cores.clone());
        let (told, all_told) = sync_channel(1);
        // Neither of the link's threads is joined: each may be waiting for the manager, and holds nothing.
        spawn("hub-reporter", move || {
            reporter.report(&newsbox, &cores_to_report, &board);
            // Fails if nobody waits any more.
            let _ = told.send(());
        })?;
        let commands = letters.clone();
        spawn("hub-commands", move || link.take_commands(&commands))?;
        Ok(RunningHub {
            addresses,
            cores,
            letters,
            door: door_stop,
            watching: Some(watching),
            stop,
            failure,
            threads,
            all_told: Mutex::new(all_told),
        })
    }
}

impl RunningHub {
    /// Listens, joins the manager and serves. Returns when workers can be served.
    pub fn start(manager: ManagerClient, config: HubConfig) -> Result<RunningHub, HubError> {
        ListeningHub::open(config)?.join(manager)
    }

    /// The addresses listened on, one per interface, with the ports that were found free.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// What each core did with its time since the hub started.
    pub fn cores(&self) -> Vec<CoreCounters> {
        self.reports().map(|(time, _)| time).collect()
    }

    /// Bytes the buffers of all jobs take.
    pub fn memory_bytes(&self) -> u64 {
        self.reports().map(|(_, memory_bytes)| memory_bytes).sum()
    }

    /// Why the hub cannot go on, if so: a core has died, or a manager that had forgotten it refuses to take it back.
    pub fn has_failed(&self) -> Option<String> {
        self.failure.lock().expect("no panic while holding it").clone()
    }

    /// Tells every job's workers that the hub is shutting down, frees all, signs off at the manager and returns, within a second or,
    /// where the manager does not answer, three; where jobs have checkpoints, when the last ones are written.
    pub fn stop(mut self) {
        self.stop_threads();
    }

    fn reports(&self) -> impl Iterator<Item = (CoreCounters, u64)> {
        self.cores.iter().map(|core| {
            let report = core.report.lock().expect("no panic while counting");
            (report.time, report.jobs.iter().map(|(_, job)| job.memory_bytes).sum())
        })
    }

    fn stop_threads(&mut self) {
        if self.stop.swap(true, Ordering::AcqRel) {
            return;
        }
        self.door.stop();
        self.watching = None;
        // A steward that is gone has stopped already.
        let _ = self.letters.send(Letter::Stop);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                error!("a thread of the hub panicked");
            }
        }
        // A manager that does not listen finds out by the hub's silence.
        let _ = self.all_told.lock().expect("no panic while holding it").recv_timeout(LAST_REPORT);
    }
}

impl Drop for RunningHub {
    fn drop(&mut self) {
        self.stop_threads();
    }
}

fn check(config: &HubConfig) -> Result<(), HubError> {
    let refused = |why: String| Err(HubError::Config(why));
    if config.cores == 0 || config.cores > CORES_MAX {
        return refused(format!("a hub has 1 to {CORES_MAX} cores, not {}", config.cores));
    }
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let most = processors * CORES_PER_PROCESSOR_MAX;
    if config.cores > most {
        return refused(format!(
            "{} cores are threads that would take turns on the {processors} processors this process may run on: ask for \
             {processors}, and for {most} at most",
            config.cores
        ));
    }
    if config.listen.is_empty() || config.listen.len() > INTERFACES_MAX {
        return refused(format!(
            "a hub listens on 1 to {INTERFACES_MAX} addresses, not {}",
            config.listen.len()
        ));
    }
    if config.checkpoints.as_ref().is_some_and(|checkpoints| checkpoints.keep == 0) {
        return refused("at least 1 checkpoint of a job is kept".to_string());
    }
    let limits = &config.job_limits;
    if limits.memory_bytes == Some(0) || limits.streams == Some(0) {
        return refused("a job needs some memory and some streams: leave the limit out for none".to_string());
    }
    if let Some(percent) = limits.share_percent
        && !(1..=100).contains(&percent)
    {
        return refused(format!("a job is promised 1 to 100 percent of a core, not {percent}"));
    }
    if !config.advertise.is_empty() && config.advertise.len() != config.listen.len() {
        let (given, needed) = (config.advertise.len(), config.listen.len());
        return refused(format!(
            "{given} addresses are advertised for {needed} listened on: give one for each"
        ));
    }
    Ok(())
}

/// Refuses more streams than there is room for once it is known what is listened on: a copy of an interface counts as one.
fn check_streams(interfaces: usize, streams: usize) -> Result<(), HubError> {
    if streams == 0 || interfaces.saturating_mul(streams) > INTERFACES_MAX {
        return Err(HubError::Config(format!(
            "a hub that listens on {interfaces} addresses can have 1 to {} streams a core and address, not {streams}",
            INTERFACES_MAX / interfaces
        )));
    }
    Ok(())
}

/// A listener of a random name that only processes of this host, and of its network namespace, can reach.
fn listen_locally() -> std::io::Result<(UnixListener, String)> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(std::io::Error::other)?;
    let name = format!("paramhub-{:032x}", u128::from_le_bytes(random));
    let listener = UnixListener::bind_addr(&UnixAddr::from_abstract_name(&name)?)?;
    Ok((listener, name))
}

fn start_core(
    index: usize,
    spin: Duration,
    processor: Option<usize>,
    letters: SyncSender<Letter>,
    failure: Arc<Mutex<Option<String>>>,
) -> Result<(CoreHandle, JoinHandle<()>), HubError> {
    let system = |cause| HubError::System { what: "start a core", cause };
    let tell = Box::new(move |event| match letters.try_send(Letter::Core(event)) {
        Err(TrySendError::Full(Letter::Core(event))) => Some(event),
        // Told, or nobody is left to be told.
        _ => None,
    });
    let (handle, mailbox) = mailbox(tell).map_err(system)?;
    let core = Core::new(index, mailbox, spin).map_err(system)?;
    let thread = spawn(&format!("hub-core-{index}"), move || {
        if let Some(processor) = processor {
            pin_to_processor(index, processor);
        }
        watch(&failure, "core", || core.run());
    })?;
    Ok((handle, thread))
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, HubError> {
    let spawned = std::thread::Builder::new().name(name.to_string()).spawn(run);
    spawned.map_err(|cause| HubError::System { what: "start a thread", cause })
}

/// Runs a thread's work and notes why it ended, if it should not have.
fn watch(failure: &Mutex<Option<String>>, what: &str, run: impl FnOnce() -> std::io::Result<()>) {
    // What the work shared with others is not looked at again: the whole hub is reported as failed.
    let cause = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
        Ok(Ok(())) => return,
        Ok(Err(cause)) => cause.to_string(),
        Err(_) => "it panicked, which is a bug: please report it".to_string(),
    };
    error!("the hub's {what} died: {cause}");
    failure
        .lock()
        .expect("no panic while holding it")
        .get_or_insert(format!("the hub's {what} died: {cause}"));
}

fn pin_to_processor(index: usize, processor: usize) {
    use rustix::thread::{CpuSet, sched_setaffinity};
    let mut one = CpuSet::new();
    one.set(processor);
    if let Err(cause) = sched_setaffinity(None, &one) {
        warn!("core {index} cannot be pinned to processor {processor}: {cause}");
    }
}

/// Four fifths of what the machine has free now.
fn available_memory_bytes() -> u64 {
    let free = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    });
    free.map_or(u64::MAX, |kibibytes| kibibytes * 1024 / 5 * 4)
}
