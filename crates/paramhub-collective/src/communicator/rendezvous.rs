//! The rendezvous of a job's ranks for a communicator: the connection manager gives each rank the addresses
//! of all. No hub takes part.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use paramhub_syncer::{PeerAddresses, PeerListener, PortRange, SyncError};
use paramhub_worker::{JobLease, Member, Membership, Options, Transport, WorkerError};

use super::{Collective, Communicator, CommunicatorError, MeshCommunicator};

/// Options of the rendezvous.
#[derive(Clone, Debug)]
pub struct RendezvousOptions {
    /// The worker's options, such as how long it waits for the other ranks. Ranks share memory if all are on
    /// one host, unless the transport is TCP.
    pub worker: Options,
    /// The ports on which this rank may listen for the others.
    pub ports: PortRange,
}

impl Default for RendezvousOptions {
    fn default() -> Self {
        RendezvousOptions { worker: Options::default(), ports: PortRange::ANY }
    }
}

/// Joins a job as one of its ranks and makes a communicator of all of them.
///
/// The job may be one [without hubs](paramhub_core::service::JobOptions::hubs), or one whose hubs no rank
/// uses. It has finished when all ranks have left the communicator; a rank that ends without leaving ends it
/// for all. If the job ends otherwise, so does the communicator.
///
/// # Errors
/// If ranks do not come, which the manager names, or cannot reach one another.
pub fn rendezvous(
    membership: Membership,
    options: RendezvousOptions,
) -> Result<Box<dyn Communicator>, CommunicatorError> {
    let RendezvousOptions { worker, ports } = options;
    let shares_memory = worker.transport != Transport::Tcp;
    let rendezvous_failed = |error: SyncError| CommunicatorError::Rendezvous(Arc::new(error));
    let peer_listener = PeerListener::listen(&membership, ports).map_err(rendezvous_failed)?;
    let member =
        Member::connect_with(membership, Options { peer_address: Some(peer_listener.address()), ..worker })?;
    let (listener, mut config) =
        peer_listener.mesh_config(&PeerAddresses::of(&member), "communicator").map_err(rendezvous_failed)?;
    config.shares_memory &= shares_memory;
    let mesh = Arc::new(MeshCommunicator::join(listener, config)?);
    let communicators = JobCommunicators::default();
    communicators.add(&mesh);
    let ended = communicators.clone();
    let lease = member.hold_lease(move |error| ended.end(&error))?;
    Ok(Box::new(JobCommunicator { mesh, communicators, lease: Some(Mutex::new(Some(lease))) }))
}

/// A communicator of a job's ranks.
struct JobCommunicator {
    mesh: Arc<MeshCommunicator>,
    communicators: JobCommunicators,
    /// The lease, which the first communicator holds; its duplicates have none and may be left at any time.
    lease: Option<Mutex<Option<JobLease>>>,
}

/// All communicators of the job, which end with it.
#[derive(Clone, Default)]
struct JobCommunicators(Arc<Mutex<Vec<Weak<MeshCommunicator>>>>);

impl JobCommunicators {
    fn add(&self, mesh: &Arc<MeshCommunicator>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|one| one.strong_count() > 0);
        all.push(Arc::downgrade(mesh));
    }

    fn end(&self, error: &WorkerError) {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).for_each(|mesh| mesh.abort(&error.to_string()));
    }
}

impl JobCommunicator {
    fn take_lease(&self) -> Option<JobLease> {
        self.lease.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Communicator for JobCommunicator {
    fn rank(&self) -> u32 {
        self.mesh.rank()
    }

    fn size(&self) -> u32 {
        self.mesh.size()
    }

    fn transport(&self) -> &'static str {
        self.mesh.transport()
    }

    fn call(&self, name: &str, collective: Collective<'_>) -> Result<(), CommunicatorError> {
        self.mesh.call(name, collective)
    }

    fn duplicate(&self) -> Result<Box<dyn Communicator>, CommunicatorError> {
        let mesh = Arc::new(self.mesh.another()?);
        self.communicators.add(&mesh);
        Ok(Box::new(JobCommunicator { mesh, communicators: self.communicators.clone(), lease: None }))
    }

    fn abort(&self, reason: &str) {
        self.mesh.abort(reason);
        if let Some(lease) = self.take_lease() {
            // The other ranks receive the reason over the communicator already; the manager may be gone.
            let _ = lease.abort(reason);
        }
    }

    fn leave(&self) -> Result<(), CommunicatorError> {
        self.mesh.leave()?;
        match self.take_lease() {
            Some(lease) => Ok(lease.leave()?),
            None => Ok(()),
        }
    }

    fn failure(&self) -> Option<CommunicatorError> {
        self.mesh.failure()
    }
}
