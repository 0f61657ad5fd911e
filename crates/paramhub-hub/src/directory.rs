//! The jobs that a hub serves, in the form that the acceptor needs.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use paramhub_core::auth::{Incarnation, Namespace, StreamSecret};
use paramhub_core::composition::{Composed, Neighbour, SiteId};
use paramhub_core::job_control::AdmittedStreams;
use paramhub_core::placement::RouteId;
use paramhub_core::stream_admission::{StreamSecrets, check_attempt};
use paramhub_core::wire::{Caller, Hello, Refusal};

use crate::core::{Ports, Side};
use crate::expected_probe::ExpectedProbe;
use crate::local::{JobMemory, LocalMemory};

/// Ended jobs whose reason is kept, for workers that connect too late to receive it on a stream.
const ENDED_MAX: usize = 256;

/// The jobs whose buffers are allocated. Job controller and acceptor share them; neither is on the data path.
#[derive(Default)]
pub(crate) struct Directory {
    jobs: Mutex<JobTables>,
    /// The probe for whose streams the hub waits.
    pub(crate) probe: ExpectedProbe,
}

#[derive(Default)]
struct JobTables {
    living: HashMap<Namespace, JobEntry>,
    /// The ended jobs, oldest first.
    ended: VecDeque<EndedJob>,
}

struct EndedJob {
    namespace: Namespace,
    secrets: StreamSecrets,
    message: String,
}

/// What the acceptor checks a stream against.
pub(crate) struct JobEntry {
    pub(crate) name: String,
    pub(crate) secrets: StreamSecrets,
    /// The job's sites; the hub's place among them is in `site`, `ports` and the placements.
    pub(crate) composed: Arc<Composed>,
    pub(crate) site: SiteId,
    pub(crate) ports: HashMap<RouteId, Arc<Ports>>,
    /// State values per parameter of the job's optimizer.
    pub(crate) state_slots: u8,
    /// Routes with chunks, by interface and core number.
    pub(crate) routes: HashMap<(u16, u16), RouteId>,
    pub(crate) incarnations: HashMap<u32, Incarnation>,
    /// The ports that have their stream.
    pub(crate) taken: HashMap<(RouteId, u32), TakenPort>,
    /// Whether a stream that breaks is replaced over another interface.
    pub(crate) continues: bool,
    /// Whether streams over TCP must be encrypted.
    pub(crate) encrypts: bool,
    pub(crate) memory: JobMemory,
}

/// A port's stream.
pub(crate) struct TakenPort {
    /// The interface; `None` for a stream over shared memory. A port keeps one of the two kinds for the life
    /// of the job: the shard keeps a port's tensors in an arena or sends them, never both.
    by: Option<u16>,
    /// The stream's number among those of its caller.
    attempt: u32,
}

/// The origin of a stream.
pub(crate) enum StreamOrigin {
    /// A listener that stands for these interfaces.
    Interfaces(Range<u16>),
    /// A process of this host, which sent these descriptors.
    Local(Vec<OwnedFd>),
}

/// The place of an admitted stream.
pub(crate) struct AdmittedStream {
    pub(crate) route: RouteId,
    pub(crate) port: u32,
    /// The stream's number among those of its caller. An older stream must not displace a newer one.
    pub(crate) attempt: u32,
    /// The job's epoch.
    pub(crate) epoch: u64,
    /// State values per parameter of the job's optimizer.
    pub(crate) state_slots: u8,
    /// The shared memory of the stream; `None` for TCP.
    pub(crate) memory: Option<LocalMemory>,
    /// The interface over which the stream resumes the port's; `None` for a new stream.
    pub(crate) resumed_by: Option<u16>,
}

impl AdmittedStreams for Directory {
    /// None for an unknown job.
    fn missing(&self, namespace: Namespace) -> Vec<Neighbour> {
        let jobs = self.jobs();
        let Some(entry) = jobs.living.get(&namespace) else { return Vec::new() };
        let mut missing = BTreeSet::new();
        for (&route, ports) in &entry.ports {
            let open = (0..ports.len()).filter(|&port| !entry.taken.contains_key(&(route, port)));
            missing.extend(
                open.filter(|&port| ports.side(port) != Side::Above).map(|port| ports.neighbour(port)),
            );
        }
        missing.into_iter().collect()
    }

    /// None for an unknown job.
    fn through(&self, namespace: Namespace, interface: u16) -> Vec<(RouteId, u32, Neighbour)> {
        let jobs = self.jobs();
        let Some(entry) = jobs.living.get(&namespace) else { return Vec::new() };
        let through = entry.taken.iter().filter(|(_, taken)| taken.by == Some(interface));
        through.map(|(&(route, port), _)| (route, port, entry.ports[&route].neighbour(port))).collect()
    }
}

impl Directory {
    pub(crate) fn insert(&self, namespace: Namespace, entry: JobEntry) {
        self.jobs().living.insert(namespace, entry);
    }

    /// Refuses further streams of a job, with `message`.
    pub(crate) fn remove(&self, namespace: Namespace, message: String) {
        let mut jobs = self.jobs();
        if let Some(JobEntry { secrets, .. }) = jobs.living.remove(&namespace) {
            if jobs.ended.len() == ENDED_MAX {
                jobs.ended.pop_front();
            }
            jobs.ended.push_back(EndedJob { namespace, secrets, message });
        }
    }

    /// The secret with which the caller must prove its stream to a job that lives or has ended recently.
    pub(crate) fn stream_secret(&self, hello: &Hello, version: u16) -> Option<StreamSecret> {
        let jobs = self.jobs();
        let living = jobs.living.get(&hello.namespace).map(|entry| &entry.secrets);
        let ended = || jobs.ended.iter().find(|ended| ended.namespace == hello.namespace);
        living.or_else(|| ended().map(|ended| &ended.secrets))?.of(hello, version)
    }

    fn jobs(&self) -> MutexGuard<'_, JobTables> {
        self.jobs.lock().expect("no panic while holding it")
    }

    /// Admits a proven worker, or a hub of another site, to its place on a route, or refuses it with the
    /// reason.
    pub(crate) fn admit(
        &self,
        hello: &Hello,
        origin: StreamOrigin,
        is_encrypted: bool,
    ) -> Result<AdmittedStream, (Refusal, String)> {
        let mut jobs = self.jobs();
        let refused = |refusal, message: String| Err((refusal, message));
        if hello.caller == Caller::Prober {
            return refused(Refusal::Route, "a probe takes part in no job".to_string());
        }
        if let Some(ended) = jobs.ended.iter().find(|ended| ended.namespace == hello.namespace) {
            return refused(Refusal::JobEnded, ended.message.clone());
        }
        let Some(entry) = jobs.living.get_mut(&hello.namespace) else {
            return refused(Refusal::JobEnded, "the job has just ended".to_string());
        };
        let name = &entry.name;
        let who = match hello.caller {
            Caller::Worker { rank, .. } => format!("rank {rank}"),
            Caller::Hub { site, .. } => entry.composed.composition.name(site),
            Caller::Prober => "a probe".to_string(),
        };
        let expected = match hello.caller {
            Caller::Worker { .. } => entry.composed.placements[usize::from(entry.site)].hash(),
            Caller::Hub { .. } | Caller::Prober => entry.composed.hash(),
        };
        if let Caller::Worker { rank, .. } = hello.caller
            && rank >= entry.composed.composition.workers()
        {
            let last = entry.composed.composition.workers() - 1;
            let why = format!("{who} is not in job `{name}`, whose last rank is {last}");
            return refused(Refusal::Rank, why);
        }
        if hello.placement != *expected.as_bytes() {
            let why =
                "the two ends computed different placements: use the same release of paramhub on both ends";
            return refused(Refusal::Placement, format!("{who} of job `{name}`: {why}"));
        }
        if entry.encrypts && !is_encrypted && matches!(origin, StreamOrigin::Interfaces(_)) {
            let why = format!(
                "{who} of job `{name}` does not encrypt its stream, and the job's streams are encrypted: use a release of \
                 paramhub that can, on this end"
            );
            return refused(Refusal::Capability, why);
        }
        let resumes = matches!(hello.caller, Caller::Worker { .. }) && hello.attempt.resumes();
        if resumes && !entry.continues {
            let why = format!(
                "{who} of job `{name}` resumes a stream, but the job fails when an interface goes down: create it with \
                 --on-interface-down continue"
            );
            return refused(Refusal::Route, why);
        }
        let route = entry.routes.get(&(hello.interface, hello.core)).filter(|_| match &origin {
            // The interface differs, the route is the same.
            StreamOrigin::Interfaces(_) if resumes => true,
            StreamOrigin::Interfaces(interfaces) => interfaces.contains(&hello.interface),
            StreamOrigin::Local(_) if resumes => false,
            // A process of this host needs no interface: it names one to identify the route.
            StreamOrigin::Local(_) => true,
        });
        let Some(&route) = route else {
            let (at, core) = (hello.interface, hello.core);
            let why = format!("job `{name}` has no chunks at core {core} of interface {at} here");
            return refused(Refusal::Route, why);
        };
        let port = match hello.caller {
            Caller::Worker { rank, .. } => entry.ports[&route].of_rank(rank),
            Caller::Hub { site, route: theirs } => entry.ports[&route].of_site(site, theirs),
            Caller::Prober => None,
        };
        let Some(port) = port else {
            let why = format!("{who} of job `{name}` exchanges elsewhere, not at this hub");
            return refused(Refusal::Rank, why);
        };
        let is_other = match hello.caller {
            Caller::Worker { rank, .. } => {
                *entry.incarnations.entry(rank).or_insert(hello.incarnation) != hello.incarnation
            }
            Caller::Hub { .. } | Caller::Prober => false,
        };
        let taken = entry.taken.get(&(route, port));
        if is_other || (taken.is_some() && !resumes) {
            let why = format!("{who} of job `{name}` is connected already: two processes have the same rank");
            return refused(Refusal::RankTaken, why);
        }
        let epoch = entry.secrets.epoch.number;
        let attempt = match check_attempt(epoch, taken.map(|taken| taken.attempt), hello.attempt) {
            Ok(attempt) => attempt,
            Err(stale) => return refused(Refusal::Stale, format!("{who} of job `{name}`: {stale}")),
        };
        // The tensors of such a stream are in shared memory, and it cannot be cut.
        if resumes && taken.is_some_and(|taken| taken.by.is_none()) {
            let why = format!(
                "{who} of job `{name}` resumes a stream over shared memory, which goes by no interface: only a stream over TCP \
                 can be resumed, by another one"
            );
            return refused(Refusal::Route, why);
        }
        let by = match &origin {
            StreamOrigin::Interfaces(interfaces) if resumes => Some(interfaces.start),
            StreamOrigin::Interfaces(_) => Some(hello.interface),
            StreamOrigin::Local(_) => None,
        };
        let memory = match (origin, hello.caller) {
            (StreamOrigin::Local(descriptors), Caller::Worker { rank, shares_parameters, .. }) => {
                let attached = entry.memory.attach(rank, descriptors, shares_parameters);
                Some(attached.map_err(|why| {
                    (Refusal::Memory, format!("{who} of job `{name}` offers memory that is no use: {why}"))
                })?)
            }
            (StreamOrigin::Local(_), Caller::Hub { .. } | Caller::Prober) => {
                return refused(Refusal::Route, "hubs reach one another over interfaces".to_string());
            }
            (StreamOrigin::Interfaces(_), _) => None,
        };
        let replaces = entry.taken.insert((route, port), TakenPort { by, attempt }).is_some();
        let resumed_by = by.filter(|_| replaces);
        let state_slots = entry.state_slots;
        Ok(AdmittedStream { route, port, attempt, epoch, state_slots, memory, resumed_by })
    }
}
