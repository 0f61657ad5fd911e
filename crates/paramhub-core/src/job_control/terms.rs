//! What a hub knows of itself and of a job before the job is admitted.

use std::sync::Arc;
use std::time::Duration;

use crate::auth::Namespace;
use crate::composition::{Composed, SiteId};
use crate::placement::{Placement, RouteId};
use crate::service::TeamAllowance;
use crate::standbys::Share;
use crate::stragglers::Stragglers;

/// The time in which a process must open its streams once the manager has told it to, in a job that goes on when workers
/// are lost. The others wait for it, and it opens them at once unless it has died.
const OPENING_TIMEOUT: Duration = Duration::from_secs(8);

/// What a hub has, and what it allows.
#[derive(Clone, Debug)]
pub struct HubTerms {
    /// Number of interfaces in the hub's shape. An interface is listed once for each stream that a worker has
    /// to a core through it.
    pub interfaces: usize,
    /// The names of the interfaces for people, in the order of the shape, each once.
    pub interface_names: Vec<String>,
    /// Bytes that all jobs' buffers may take together.
    pub memory_bytes: u64,
    /// What one job may take.
    pub job_limits: JobLimits,
    /// How many files and sockets the process may have open.
    pub descriptors_max: u64,
}

/// What one job may take of a hub; `None` sets no limit. The hub refuses a job that asks for more at
/// InitService, and says what would fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobLimits {
    /// Bytes of its buffers; at least 1.
    pub memory_bytes: Option<u64>,
    /// Streams of all its workers and sites to all cores together; at least 1.
    pub streams: Option<u32>,
    /// Percent of a core's time that a job is promised for each 1 of its weight, on every core that has its
    /// chunks, 1 to 100. The hub refuses a job whose promise does not fit beside those of the others. A core
    /// that is idle otherwise gives more.
    pub share_percent: Option<u32>,
}

/// A job as the hub has planned it.
#[derive(Clone, Debug)]
pub struct JobTerms {
    /// The job.
    pub namespace: Namespace,
    /// The job's name.
    pub name: String,
    /// The sites of the job, with the placement at each.
    pub composed: Arc<Composed>,
    /// The hub's site in the composition.
    pub site: SiteId,
    /// This hub's routes that carry chunks. They may be none, if the job is very small.
    pub routes: Vec<RouteTerms>,
    /// How long the streams of all neighbours may take to open.
    pub rendezvous: Duration,
    /// The silence after which a neighbour counts as dead.
    pub dead_after: Duration,
    /// How long members may wait for one of them, if a longer wait ends the job.
    pub progress_timeout: Option<Duration>,
    /// Whether streams continue over other interfaces.
    pub continues: bool,
    /// The least number of workers with which steps go on, if the job goes on when workers are lost.
    pub min_workers: Option<u32>,
    /// The number of workers that are there from the beginning, counted from rank 0.
    pub first_workers: u32,
    /// The hubs of each share, if the chunks have standbys; otherwise empty.
    pub shares: Vec<Share>,
    /// This hub's position among those of its site.
    pub hub: u16,
    /// Whether all workers go back to an earlier step when one is lost, of which the hubs have copies.
    pub rewinds: bool,
    /// Whether the job begins again from its newest checkpoint when a worker, a site or a hub is lost: its hubs end their parts.
    pub begins_again: bool,
    /// The epoch with which the job begins.
    pub epoch: u64,
    /// Whether steps wait for late workers.
    pub stragglers: Stragglers,
    /// The job's share of a core's time, relative to other jobs' weights.
    pub weight: u32,
    /// What its team may still have.
    pub team: TeamAllowance,
    /// Whether its chunks begin with a checkpoint.
    pub resumes: bool,
    /// Whether it writes checkpoints.
    pub writes_checkpoints: bool,
    /// The folder of its checkpoints for people; empty if it neither begins with one nor writes any.
    pub checkpoint_folder: String,
}

/// A route of a job at the hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteTerms {
    /// The route.
    pub id: RouteId,
    /// Its core.
    pub core: u16,
    /// Its interface.
    pub interface: u16,
    /// The share that it belongs to: the position of its hub in the placement.
    pub share: u16,
    /// Number of its streams: one for each worker, and one for each route of another site that has chunks in
    /// common with this one or, last, one for the other hub of the share.
    pub streams: u32,
    /// Bytes of its buffers.
    pub memory_bytes: u64,
}

impl JobTerms {
    /// Bytes of all its buffers at this hub.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.routes.iter().map(|route| route.memory_bytes).sum()
    }

    /// The cores that serve the job, each once, ascending.
    pub(super) fn cores(&self) -> Vec<u16> {
        let mut cores: Vec<u16> = self.routes.iter().map(|route| route.core).collect();
        cores.sort_unstable();
        cores.dedup();
        cores
    }

    /// How long a process may take to open its streams, in a job that goes on when workers are lost.
    pub(super) fn opening(&self) -> Duration {
        self.rendezvous.min(OPENING_TIMEOUT)
    }

    /// Number of streams on all routes.
    pub(super) fn streams(&self) -> u64 {
        self.routes.iter().map(|route| u64::from(route.streams)).sum()
    }

    /// The placement at the hub's site.
    pub(super) fn placement(&self) -> &Placement {
        &self.composed.placements[usize::from(self.site)]
    }
}
