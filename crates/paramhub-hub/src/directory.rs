//! The jobs a hub serves, as the door needs to know them.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use paramhub_core::auth::{Incarnation, Namespace, Nonce};
use paramhub_core::composition::{Composed, SiteId};
use paramhub_core::placement::RouteId;
use paramhub_core::wire::{Caller, Hello, Refusal};

use crate::core::{Neighbour, Ports, Side};
use crate::local::{JobMemory, LocalMemory};
use crate::probe::Awaited;

/// Ended jobs whose end is remembered, for workers that come too late to hear it on a stream.
const ENDED_MAX: usize = 256;

/// Jobs whose buffers stand. Steward and door share it; neither is on the data path.
#[derive(Default)]
pub(crate) struct Directory {
    jobs: Mutex<Jobs>,
    /// The probe for whose streams the hub waits.
    pub(crate) probe: Awaited,
}

#[derive(Default)]
struct Jobs {
    living: HashMap<Namespace, Entry>,
    /// Oldest first.
    ended: VecDeque<Ended>,
}

struct Ended {
    namespace: Namespace,
    nonce: Nonce,
    message: String,
}

/// What a stream must fit.
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) nonce: Nonce,
    /// Where the hub is among the job's sites; its ports and placements.
    pub(crate) composed: Arc<Composed>,
    pub(crate) site: SiteId,
    pub(crate) ports: HashMap<RouteId, Arc<Ports>>,
    /// Values of state the optimizer keeps a parameter.
    pub(crate) state_slots: u8,
    /// Routes with chunks, by interface and core number.
    pub(crate) routes: HashMap<(u16, u16), RouteId>,
    pub(crate) incarnations: HashMap<u32, Incarnation>,
    /// Ports that have their stream, and the interface that it came by, unless it is one over shared memory. Which of the two it
    /// is stays so for as long as the job lives: the shard keeps a port's tensors in an arena or sends them, never both.
    pub(crate) taken: HashMap<(RouteId, u32), Option<u16>>,
    /// Streams may be resumed.
    pub(crate) continues: bool,
    pub(crate) memory: JobMemory,
}

/// How a stream came in.
pub(crate) enum Origin {
    /// By a listener that is these interfaces.
    Interfaces(Range<u16>),
    /// From a process of this host, which brought these descriptors.
    Local(Vec<OwnedFd>),
}

/// A stream's place.
pub(crate) struct Admitted {
    pub(crate) route: RouteId,
    pub(crate) port: u32,
    /// Values of state the job's optimizer keeps a parameter.
    pub(crate) state_slots: u8,
    /// What it exchanges through, unless it is TCP.
    pub(crate) memory: Option<LocalMemory>,
    /// It takes the place of the port's stream, and came by this interface.
    pub(crate) resumed_by: Option<u16>,
}

impl Directory {
    pub(crate) fn insert(&self, namespace: Namespace, entry: Entry) {
        self.jobs().living.insert(namespace, entry);
    }

    /// Closes the door to a job; who still comes for it is told `message`.
    pub(crate) fn remove(&self, namespace: Namespace, message: String) {
        let mut jobs = self.jobs();
        if let Some(Entry { nonce, .. }) = jobs.living.remove(&namespace) {
            if jobs.ended.len() == ENDED_MAX {
                jobs.ended.pop_front();
            }
            jobs.ended.push_back(Ended { namespace, nonce, message });
        }
    }

    /// The secret of a job that lives or has lately ended.
    pub(crate) fn nonce(&self, namespace: Namespace) -> Option<Nonce> {
        let jobs = self.jobs();
        let living = jobs.living.get(&namespace).map(|entry| entry.nonce);
        living
            .or_else(|| jobs.ended.iter().find(|ended| ended.namespace == namespace).map(|ended| ended.nonce))
    }

    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().expect("no panic while holding it")
    }

    /// Who lacks a stream on some route: workers by rank, then sites; nobody for an unknown job.
    pub(crate) fn missing(&self, namespace: Namespace) -> Vec<Neighbour> {
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

    /// The ports of a living job whose streams come by this interface.
    pub(crate) fn ports_through(&self, namespace: Namespace, interface: u16) -> Vec<(RouteId, u32)> {
        let jobs = self.jobs();
        let Some(entry) = jobs.living.get(&namespace) else { return Vec::new() };
        let through = entry.taken.iter().filter(|(_, by)| **by == Some(interface));
        through.map(|(&port, _)| port).collect()
    }

    /// Gives a proven worker, or a hub of another site, its place on a route, or says why it cannot have it.
    pub(crate) fn admit(&self, hello: &Hello, origin: Origin) -> Result<Admitted, (Refusal, String)> {
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
        let resumes = matches!(hello.caller, Caller::Worker { resumes: true, .. });
        if resumes && !entry.continues {
            let why = format!(
                "{who} of job `{name}` resumes a stream, but the job fails when an interface goes down: create it with \
                 --on-interface-down continue"
            );
            return refused(Refusal::Route, why);
        }
        let route = entry.routes.get(&(hello.interface, hello.core)).filter(|_| match &origin {
            // The way is another, the route is the same.
            Origin::Interfaces(_) if resumes => true,
            Origin::Interfaces(interfaces) => interfaces.contains(&hello.interface),
            Origin::Local(_) if resumes => false,
            // Whoever is on this host needs no interface: it names one to say which route.
            Origin::Local(_) => true,
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
        if is_other || (entry.taken.contains_key(&(route, port)) && !resumes) {
            let why = format!("{who} of job `{name}` is connected already: two processes have the same rank");
            return refused(Refusal::RankTaken, why);
        }
        // Its tensors lie where no interface carries them, and its way cannot be cut.
        if resumes && entry.taken.get(&(route, port)) == Some(&None) {
            let why = format!(
                "{who} of job `{name}` resumes a stream over shared memory, which goes by no interface: only a stream over TCP \
                 can be resumed, by another one"
            );
            return refused(Refusal::Route, why);
        }
        let by = match &origin {
            Origin::Interfaces(interfaces) if resumes => Some(interfaces.start),
            Origin::Interfaces(_) => Some(hello.interface),
            Origin::Local(_) => None,
        };
        let memory = match (origin, hello.caller) {
            (Origin::Local(descriptors), Caller::Worker { rank, shares_parameters, .. }) => {
                let attached = entry.memory.attach(rank, descriptors, shares_parameters);
                Some(attached.map_err(|why| {
                    (Refusal::Memory, format!("{who} of job `{name}` offers memory that is no use: {why}"))
                })?)
            }
            (Origin::Local(_), Caller::Hub { .. } | Caller::Prober) => {
                return refused(Refusal::Route, "hubs reach one another over interfaces".to_string());
            }
            (Origin::Interfaces(_), _) => None,
        };
        let replaces = entry.taken.insert((route, port), by).is_some();
        let resumed_by = by.filter(|_| replaces);
        Ok(Admitted { route, port, state_slots: entry.state_slots, memory, resumed_by })
    }
}
