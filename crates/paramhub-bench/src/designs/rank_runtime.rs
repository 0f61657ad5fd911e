//! A process of the comparison: the store of its design, and what else it needs.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use paramhub::service::ServiceCreated;
use paramhub::{Membership, Options, Transport};
use paramhub_collective::communicator::{Communicator, MeshCommunicator, TracedCommunicator};
use paramhub_collective::engine::{Engine, EngineConfig, Trace};
use paramhub_collective::kvstore::{HubStoreConfig, KvStore, StoreOptions, create};
use paramhub_harness::exchange::spec::JsonConnection;
use paramhub_harness::exchange::usage;
use paramhub_mesh::{MeshConfig, MeshListener};
use paramhub_syncer::address_towards;

use super::messages::{RankSpec, ScenarioCommand, ScenarioReply, Work};
use super::mpi;
use super::scenario::{Carrier, Design};
use super::simulated_rank::SimulatedRank;
use super::train::train_rank;

/// The parts with which a rank simulates or trains.
pub(super) struct RankRuntime {
    pub(super) engine: Arc<Engine>,
    pub(super) store: Box<dyn KvStore>,
    /// Another communicator of the same kind, for measurements beside the store; `None` with a hub.
    pub(super) spare: Option<Box<dyn Communicator>>,
    pub(super) trace: Option<Arc<Trace>>,
    pub(super) origin: Instant,
}

/// Runs a rank of a scenario until the launcher hangs up.
pub(crate) fn run_rank(command: ScenarioCommand, connection: &mut JsonConnection) -> anyhow::Result<()> {
    let ScenarioCommand::Enter { rank_spec, rank, url, job } = command else {
        bail!("the launcher sent a command out of turn")
    };
    let listener = match rank_spec.scenario.over {
        Some(Carrier::Native) => Some(listen(&url)?),
        _ => None,
    };
    connection.send(&ScenarioReply::Listening(listener.as_ref().map(MeshListener::address)))?;
    let (addresses, secret) = match connection.receive()? {
        Some(ScenarioCommand::Meet { addresses, secret }) => (addresses, secret),
        Some(_) => bail!("the launcher sent a command out of turn"),
        None => return Ok(()),
    };
    let native = listener.map(|listener| {
        let config =
            MeshConfig { shares_memory: rank_spec.shares_memory, ..MeshConfig::new(rank, secret, addresses) };
        (listener, config)
    });
    let membership =
        job.map(|ServiceCreated { namespace, nonce, .. }| Membership { url, namespace, nonce, rank });
    let runtime = RankRuntime::open(&rank_spec, rank, membership, native)?;
    match &rank_spec.work {
        Work::Play(workload) => {
            SimulatedRank::new(runtime, workload, rank, rank_spec.ranks)?.play(connection)
        }
        Work::Train(section) => train_rank(&runtime, section, connection),
    }
}

/// Listens on this host's interface towards the hubs.
fn listen(url: &str) -> anyhow::Result<MeshListener> {
    let address = address_towards(url).map_err(anyhow::Error::msg)?;
    MeshListener::bind(address).with_context(|| format!("cannot listen on {address}"))
}

impl RankRuntime {
    fn open(
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
