//! The parts with which a process of the comparison simulates or trains: the store of its design, its engine, and a trace.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use paramhub::{Membership, Options, Transport};
use paramhub_collective::communicator::{Communicator, MeshCommunicator, TracedCommunicator};
use paramhub_collective::engine::{Engine, EngineConfig, Trace};
use paramhub_collective::kvstore::{HubStoreConfig, KvStore, StoreOptions, create};
use paramhub_harness::exchange::usage;
use paramhub_mesh::{MeshConfig, MeshListener};

use super::messages::RankSpec;
use super::mpi;
use super::scenario::Design;

/// The parts of one rank.
pub(super) struct RankRuntime {
    pub(super) engine: Arc<Engine>,
    pub(super) store: Box<dyn KvStore>,
    /// Another communicator of the same kind, for measurements beside the store; `None` with a hub.
    pub(super) spare: Option<Box<dyn Communicator>>,
    pub(super) trace: Option<Arc<Trace>>,
    pub(super) origin: Instant,
}

impl RankRuntime {
    pub(super) fn open(
        rank_spec: &RankSpec,
        rank: u32,
        membership: Option<Membership>,
        native: Option<(MeshListener, MeshConfig)>,
    ) -> anyhow::Result<RankRuntime> {
        // This is the same instant in all processes of a machine.
        let origin = Instant::now().checked_sub(usage::monotonic()).unwrap_or_else(Instant::now);
        let trace = rank_spec.is_traced.then(|| Arc::new(Trace::since(origin)));
        let is_concurrent = rank_spec.scenario.design == Design::ConCom;
        let engine = Arc::new(Engine::new(EngineConfig {
            // One thread stands for the stream of a GPU.
            compute_threads: 1,
            communicate_threads: if is_concurrent { rank_spec.outstanding } else { 1 },
            observer: trace.as_ref().map(|trace| Arc::clone(trace) as _),
            ..EngineConfig::default()
        })?);
        let communicator: Option<Box<dyn Communicator>> = match native {
            Some((listener, config)) => Some(Box::new(MeshCommunicator::join(listener, config)?)),
            None if rank_spec.scenario.is_by_mpi() => Some(mpi::start(is_concurrent)?),
            None => None,
        };
        if let Some(communicator) = &communicator
            && (communicator.rank(), communicator.size()) != (rank, rank_spec.ranks)
        {
            let (is, of) = (communicator.rank(), communicator.size());
            bail!(
                "this is rank {is} of {of}, and rank {rank} of {} is expected: mpirun is another MPI's than this program's",
                rank_spec.ranks
            );
        }
        let spare = communicator.as_ref().map(|communicator| communicator.duplicate()).transpose()?;
        let options = match (communicator, &trace) {
            (Some(communicator), None) => StoreOptions::over(Arc::clone(&engine), communicator),
            (Some(communicator), Some(trace)) => StoreOptions::over(
                Arc::clone(&engine),
                TracedCommunicator::new(communicator, Arc::clone(trace)),
            ),
            (None, _) => {
                let membership = membership.context("a hub's rank has a job")?;
                let transport = if rank_spec.shares_memory { Transport::Auto } else { Transport::Tcp };
                let options = Options { transport, ..Options::default() };
                let config = HubStoreConfig { options, ..HubStoreConfig::new(membership) };
                StoreOptions::at_hub(Arc::clone(&engine), config)
            }
        };
        let outstanding = is_concurrent.then_some(rank_spec.outstanding);
        let store = create(rank_spec.scenario.design.store(), StoreOptions { outstanding, ..options })?;
        Ok(RankRuntime { engine, store, spare, trace, origin })
    }

    /// Leaves the exchange. Every rank must call this.
    pub(super) fn leave(&self) -> anyhow::Result<()> {
        self.store.leave()?;
        if let Some(spare) = &self.spare {
            spare.leave()?;
        }
        Ok(())
    }
}
