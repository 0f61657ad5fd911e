//! The jobs that a hub serves, in the form that the acceptor needs.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use paramhub_core::auth::{Namespace, StreamSecret};
use paramhub_core::composition::Neighbour;
use paramhub_core::job_control::AdmittedStreams;
use paramhub_core::placement::RouteId;
use paramhub_core::ports::Ports;
use paramhub_core::standbys::Role;
use paramhub_core::stream_admission::{JobStreams, StreamOrigin, StreamPlace, StreamSecrets};
use paramhub_core::wire::{Caller, Hello, Refusal};

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
    /// Whether it goes on at other hubs, where its callers are to try again.
    is_elsewhere: bool,
}

/// What the acceptor checks a stream against.
pub(crate) struct JobEntry {
    pub(crate) streams: JobStreams,
    /// State values per parameter of the job's optimizer.
    pub(crate) state_slots: u8,
    pub(crate) memory: JobMemory,
}

/// The origin of a stream.
pub(crate) enum Origin {
    /// A listener that stands for these interfaces.
    Interfaces(Range<u16>),
    /// A process of this host, which sent these descriptors.
    Local(Vec<OwnedFd>),
}

/// An admitted stream.
pub(crate) struct AdmittedStream {
    pub(crate) place: StreamPlace,
    /// State values per parameter of the job's optimizer.
    pub(crate) state_slots: u8,
    /// The shared memory of the stream; `None` for TCP.
    pub(crate) memory: Option<LocalMemory>,
}

impl AdmittedStreams for Directory {
    /// None for an unknown job.
    fn missing(&self, namespace: Namespace) -> Vec<Neighbour> {
        self.jobs().living.get(&namespace).map_or_else(Vec::new, |entry| entry.streams.missing())
    }

    /// None for an unknown job.
    fn through(&self, namespace: Namespace, interface: u16) -> Vec<(RouteId, u32, Neighbour)> {
        self.jobs().living.get(&namespace).map_or_else(Vec::new, |entry| entry.streams.through(interface))
    }
}

impl Directory {
    pub(crate) fn insert(&self, namespace: Namespace, entry: JobEntry) {
        let mut jobs = self.jobs();
        // The job may have ended here before it began again.
        jobs.ended.retain(|ended| ended.namespace != namespace);
        jobs.living.insert(namespace, entry);
    }

    /// Refuses the streams of a rank's former process: the rank is lost since `epoch`.
    pub(crate) fn refuse_rank(&self, namespace: Namespace, rank: u32, epoch: u64) {
        if let Some(entry) = self.jobs().living.get_mut(&namespace) {
            entry.streams.lose_rank(rank, epoch);
            entry.memory.forget(rank);
        }
    }

    /// Admits the streams of the process that has taken a lost rank since `epoch`.
    pub(crate) fn admit_rank(&self, namespace: Namespace, rank: u32, epoch: u64) {
        if let Some(entry) = self.jobs().living.get_mut(&namespace) {
            entry.streams.admit_rank(rank, epoch);
        }
    }

    /// Admits the streams of a route as this hub's role from now on says.
    pub(crate) fn change_role(&self, namespace: Namespace, route: RouteId, role: Role) {
        if let Some(entry) = self.jobs().living.get_mut(&namespace) {
            entry.streams.change_role(route, role);
        }
    }

    /// Admits the streams of the hub that serves a further route, whose standby this hub is.
    pub(crate) fn add_standby_route(
        &self,
        namespace: Namespace,
        route: RouteId,
        at: (u16, u16),
        ports: Arc<Ports>,
    ) {
        if let Some(entry) = self.jobs().living.get_mut(&namespace) {
            entry.streams.add_standby_route(route, at, ports);
        }
    }

    /// Refuses further streams of a job that has ended, with `message`.
    pub(crate) fn remove(&self, namespace: Namespace, message: String) {
        self.end(namespace, message, false);
    }

    /// Refuses further streams of a job that goes on at other hubs, with `message`.
    pub(crate) fn send_elsewhere(&self, namespace: Namespace, message: String) {
        self.end(namespace, message, true);
    }

    fn end(&self, namespace: Namespace, message: String, is_elsewhere: bool) {
        let mut jobs = self.jobs();
        if let Some(JobEntry { streams, .. }) = jobs.living.remove(&namespace) {
            let secrets = streams.secrets().clone();
            if jobs.ended.len() == ENDED_MAX {
                jobs.ended.pop_front();
            }
            jobs.ended.push_back(EndedJob { namespace, secrets, message, is_elsewhere });
        }
    }

    /// The secret with which the caller must prove its stream to a job that lives or has ended recently.
    pub(crate) fn stream_secret(&self, hello: &Hello, version: u16) -> Option<StreamSecret> {
        let jobs = self.jobs();
        let living = jobs.living.get(&hello.namespace).map(|entry| entry.streams.secrets());
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
        origin: Origin,
        is_encrypted: bool,
    ) -> Result<AdmittedStream, (Refusal, String)> {
        let mut jobs = self.jobs();
        if let Some(ended) = jobs.ended.iter().find(|ended| ended.namespace == hello.namespace) {
            let refusal = if ended.is_elsewhere { Refusal::Busy } else { Refusal::JobEnded };
            return Err((refusal, ended.message.clone()));
        }
        let Some(entry) = jobs.living.get_mut(&hello.namespace) else {
            return Err((Refusal::JobEnded, "the job has just ended".to_string()));
        };
        let (origin, descriptors) = match origin {
            Origin::Interfaces(interfaces) => (StreamOrigin::Interfaces { interfaces, is_encrypted }, None),
            Origin::Local(descriptors) => (StreamOrigin::Local, Some(descriptors)),
        };
        let place = entry.streams.place(hello, &origin)?;
        let memory = match (descriptors, hello.caller) {
            (Some(descriptors), Caller::Worker { rank, shares_parameters, .. }) => {
                let attached = entry.memory.attach(rank, descriptors, shares_parameters);
                Some(attached.map_err(|why| {
                    let (who, name) = (entry.streams.name_of(hello.caller), entry.streams.job_name());
                    (Refusal::Memory, format!("{who} of job `{name}` offers memory that is no use: {why}"))
                })?)
            }
            _ => None,
        };
        entry.streams.take(&place, hello, &origin);
        Ok(AdmittedStream { place, state_slots: entry.state_slots, memory })
    }
}
