//! The description of one route of a job for the core that serves it.

use std::sync::Arc;
use std::time::Duration;

use paramhub_core::auth::Namespace;
use paramhub_core::chunk::ChunkMap;
use paramhub_core::composition::{Composed, Neighbour, OptimizeAt, SiteId};
use paramhub_core::consistency::Consistency;
use paramhub_core::factors::FactorBlock;
use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_core::limits::CONTROL_BYTES_MAX;
use paramhub_core::placement::{Placement, RouteId};
use paramhub_core::ports::Ports;
use paramhub_core::resuming::ResumeTerms;
use paramhub_core::settings::Settings;
use paramhub_core::standbys::Role;
use paramhub_core::stragglers::{Quorum, Stragglers};
use paramhub_core::wire::STATE_HEAD_BYTES;
use paramhub_kernels::{Aggregator, Optimizer};

/// The description of one route of a job for the core that serves it.
#[derive(Clone)]
pub(crate) struct ShardPlan {
    pub(crate) name: String,
    pub(crate) namespace: Namespace,
    pub(crate) dead_after: Duration,
    /// Which streams are replaced when they are cut, and how long the hub waits for that.
    pub(crate) resuming: ResumeTerms,
    pub(crate) stragglers: Stragglers,
    /// The condition that ends a chunk's step without some workers, if it may.
    pub(crate) quorum: Option<Quorum>,
    /// The number of workers that are there from the beginning, counted from rank 0.
    pub(crate) first_workers: u32,
    /// The number of updates from one copy of a chunk to the next, if all workers go back to an earlier step when one is
    /// lost.
    pub(crate) rewind_every: Option<u32>,
    /// Whether the job begins again from its newest checkpoint if this hub loses its part.
    pub(crate) outlives_hubs: bool,
    /// The largest number of bytes of a program state of the job, if any can be saved.
    pub(crate) program_state_bytes: u32,
    /// The time that members may wait for one of them, if a longer wait ends the job.
    pub(crate) progress_timeout: Option<Duration>,
    /// The job's share of the core's time, relative to other jobs' weights.
    pub(crate) weight: u32,
    pub(crate) settings: Arc<Settings>,
    pub(crate) map: Arc<ChunkMap>,
    /// The factor blocks of the job's layers whose factors go to hubs, to this one or others.
    pub(crate) factor_blocks: Arc<[FactorBlock]>,
    pub(crate) composed: Arc<Composed>,
    /// The hub's site in the composition.
    pub(crate) site: SiteId,
    pub(crate) route: RouteId,
    pub(crate) ports: Arc<Ports>,
    /// What this hub is for the route, in a job with standbys.
    pub(crate) role: Role,
    /// The position of the route's standby in the job, if this hub serves the route and has one.
    pub(crate) standby: Option<u16>,
    /// The name of the other hub of the route's share for people; empty if there is none.
    pub(crate) counterpart: String,
    pub(crate) aggregator: Arc<dyn Aggregator>,
    pub(crate) optimizer: Arc<dyn Optimizer>,
    /// The hyperparameters of each group at step 0.
    pub(crate) groups: Arc<[Hyperparameters]>,
    /// `true` if streams over TCP are encrypted.
    pub(crate) encrypts: bool,
    /// `true` if snapshots will be requested.
    pub(crate) checkpoints: bool,
}

impl ShardPlan {
    /// The placement at the shard's site.
    pub(crate) fn placement(&self) -> &Placement {
        &self.composed.placements[usize::from(self.site)]
    }

    /// Number of workers of the whole job.
    pub(crate) fn workers(&self) -> u32 {
        self.composed.composition.workers()
    }

    /// Returns whether every site optimises, including this one, and answers are sums; otherwise each chunk's
    /// owner does. Where a chunk may move on without a site, no sum is that of all of them.
    pub(crate) fn optimizes_here(&self) -> bool {
        self.composed.composition.optimize_at == OptimizeAt::EverySite
            && self.settings.consistency == Consistency::Synchronous
            && !self.stragglers.leaves_out()
    }

    /// Returns whether the job goes on without workers that are lost.
    pub(crate) fn loses_workers(&self) -> bool {
        matches!(self.quorum, Some(Quorum::NotLost { .. }))
    }

    /// The name of the neighbour at the other end of a port, for people.
    pub(crate) fn name(&self, neighbour: Neighbour) -> String {
        match neighbour {
            Neighbour::Counterpart(_) => self.counterpart.clone(),
            neighbour => self.composed.composition.name_of(neighbour),
        }
    }

    /// Bytes of the largest payload that a worker may send.
    pub(crate) fn frame_bytes_max(&self) -> usize {
        (self.settings.chunk_bytes as usize + STATE_HEAD_BYTES).max(CONTROL_BYTES_MAX as usize)
    }
}

impl std::fmt::Debug for ShardPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShardPlan")
            .field("name", &self.name)
            .field("route", &self.route)
            .finish_non_exhaustive()
    }
}
