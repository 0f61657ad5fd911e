//! A process of the comparison: the store of its design, and what else it needs.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use paramhub_collective::communicator::{Communicator, Native, Tracing};
use paramhub_collective::engine::{Engine, EngineConfig, Trace};
use paramhub_collective::kvstore::{HubSeat, KvStore, StoreOptions, create};
use paramhub_mesh::{MeshConfig, MeshListener};
use paramhub_syncer::address_towards;

use super::contestant::{Carrier, Design};
use super::mpi;
use super::part::{Cue, Heard, Part, Work};
use super::player::Player;
use super::train::learn;
use crate::cli::bench::spec::{Line, Order, Report};
use crate::cli::bench::usage;
use crate::service::ServiceCreated;
use crate::{Membership, Options, Transport};

/// What a rank plays or trains with.
pub(super) struct Stage {
    pub(super) engine: Arc<Engine>,
    pub(super) store: Box<dyn KvStore>,
    /// Another communicator of the same kind, for what is measured beside the store; none of a hub.
    pub(super) spare: Option<Box<dyn Communicator>>,
    pub(super) trace: Option<Arc<Trace>>,
    pub(super) origin: Instant,
}

/// Is a rank of a contestant until the launcher hangs up.
pub(in crate::cli::bench) fn appear(cue: Cue, line: &mut Line) -> anyhow::Result<()> {
    let Cue::Enter { part, rank, url, job } = cue else { bail!("the launcher gave a cue out of turn") };
    let listener = match part.contestant.over {
        Some(Carrier::Native) => Some(listen(&url)?),
        _ => None,
    };
    line.say(&Report::Design(Heard::Listening(listener.as_ref().map(MeshListener::address))))?;
    let (addresses, secret) = match line.hear()? {
        Some(Order::Design(Cue::Meet { addresses, secret })) => (addresses, secret),
        Some(_) => bail!("the launcher gave a cue out of turn"),
        None => return Ok(()),
    };
    let native = listener.map(|listener| {
        let config =
            MeshConfig { shares_memory: part.shares_memory, ..MeshConfig::new(rank, secret, addresses) };
        (listener, config)
    });
    let membership =
        job.map(|ServiceCreated { namespace, nonce, .. }| Membership { url, namespace, nonce, rank });
    let stage = Stage::open(&part, rank, membership, native)?;
    match &part.work {
        Work::Play(score) => Player::new(stage, score, rank, part.ranks)?.play(line),
        Work::Train(section) => learn(&stage, section, line),
    }
}

/// On this host's interface towards the hubs.
fn listen(url: &str) -> anyhow::Result<MeshListener> {
    let address = address_towards(url).map_err(anyhow::Error::msg)?;
    MeshListener::bind(address).with_context(|| format!("cannot listen on {address}"))
}

impl Stage {
    fn open(
        part: &Part,
        rank: u32,
        membership: Option<Membership>,
        native: Option<(MeshListener, MeshConfig)>,
    ) -> anyhow::Result<Stage> {
        // The same instant in all processes of a machine.
        let origin = Instant::now().checked_sub(usage::monotonic()).unwrap_or_else(Instant::now);
        let trace = part.is_traced.then(|| Arc::new(Trace::since(origin)));
        let is_concurrent = part.contestant.design == Design::ConCom;
        let engine = Arc::new(Engine::new(EngineConfig {
            // Stands for the stream of a GPU.
            compute_threads: 1,
            communicate_threads: if is_concurrent { part.outstanding } else { 1 },
            observer: trace.as_ref().map(|trace| Arc::clone(trace) as _),
            ..EngineConfig::default()
        })?);
        let communicator: Option<Box<dyn Communicator>> = match native {
            Some((listener, config)) => Some(Box::new(Native::join(listener, config)?)),
            None if part.contestant.is_by_mpi() => Some(mpi::start(is_concurrent)?),
            None => None,
        };
        if let Some(communicator) = &communicator
            && (communicator.rank(), communicator.size()) != (rank, part.ranks)
        {
            let (is, of) = (communicator.rank(), communicator.size());
            bail!(
                "this is rank {is} of {of}, and rank {rank} of {} is expected: mpirun is another MPI's than this program's",
                part.ranks
            );
        }
        let spare = communicator.as_ref().map(|communicator| communicator.duplicate()).transpose()?;
        let options = match (communicator, &trace) {
            (Some(communicator), None) => StoreOptions::over(Arc::clone(&engine), communicator),
            (Some(communicator), Some(trace)) => {
                StoreOptions::over(Arc::clone(&engine), Tracing::new(communicator, Arc::clone(trace)))
            }
            (None, _) => {
                let membership = membership.context("a hub's rank has a job")?;
                let transport = if part.shares_memory { Transport::Auto } else { Transport::Tcp };
                let options = Options { transport, ..Options::default() };
                let seat = HubSeat { options, ..HubSeat::new(membership) };
                StoreOptions::at_hub(Arc::clone(&engine), seat)
            }
        };
        let outstanding = is_concurrent.then_some(part.outstanding);
        let store = create(part.contestant.design.store(), StoreOptions { outstanding, ..options })?;
        Ok(Stage { engine, store, spare, trace, origin })
    }

    /// Every rank does.
    pub(super) fn leave(&self) -> anyhow::Result<()> {
        self.store.leave()?;
        if let Some(spare) = &self.spare {
            spare.leave()?;
        }
        Ok(())
    }
}
