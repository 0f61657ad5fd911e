//! Opens a store: an engine, and the rendezvous of the ranks.

use std::sync::Arc;

use paramhub::collective::communicator::{CheckedCommunicator, RendezvousOptions, rendezvous};
use paramhub::collective::engine::{Engine, EngineConfig, EngineError};
use paramhub::collective::kvstore::{HubStoreConfig, KvStore, StoreError, StoreKind, StoreOptions, create};
use paramhub::{Codec, Membership, Options};
use paramhub_core::combinations::{self, Feature, Features};
use paramhub_core::consistency::Consistency;
use pyo3::prelude::*;

use super::Store;
use crate::errors;
use crate::fork::refuse_in_child;
use crate::join_options;
use crate::waiting::interruptible;

/// The identity of this rank: the manager's URL, the job's namespace and secret, the rank.
type RankCredentials = (String, String, String, u32);

/// The parts of a store.
struct StorePlan {
    kind: StoreKind,
    /// The rank's membership and options; `None` for a store of one process.
    membership: Option<(Membership, Options)>,
    compute_threads: Option<usize>,
    outstanding: Option<usize>,
    checks: bool,
    codec: Option<Codec>,
    reproducible: bool,
    consistency: Consistency,
}

enum OpenError {
    Engine(EngineError),
    Store(StoreError),
}

/// Opens a store; returns when every rank has opened it. A local store has no `membership`.
#[pyfunction]
#[pyo3(signature = (
    kind, membership, *, transport = None, interfaces = None, rendezvous_timeout = None, rack = None, host = None,
    compute_threads = None, outstanding = None, check = false, codec = None, reproducible = false,
    consistency = None
))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
pub(crate) fn open_store(
    py: Python<'_>,
    kind: &str,
    membership: Option<RankCredentials>,
    transport: Option<&str>,
    interfaces: Option<&str>,
    rendezvous_timeout: Option<f64>,
    rack: Option<String>,
    host: Option<String>,
    compute_threads: Option<usize>,
    outstanding: Option<usize>,
    check: bool,
    codec: Option<&str>,
    reproducible: bool,
    consistency: Option<&str>,
) -> PyResult<Store> {
    refuse_in_child(py)?;
    let kind: StoreKind = kind.parse().map_err(|error| errors::store(py, "", &error, None))?;
    let asked = Features::of([
        (Feature::OutstandingKeys, outstanding.is_some()),
        (Feature::CheckedCollectives, check),
        (Feature::ChosenCodec, codec.is_some()),
        (Feature::Reproducible, reproducible),
        (Feature::ChosenConsistency, consistency.is_some()),
        (Feature::ChosenTransport, transport.is_some()),
        (Feature::SharedMemory, transport == Some("shm")),
        (Feature::WorkerInterfaces, interfaces.is_some()),
    ]);
    combinations::check(asked.with(kind.feature()))
        .map_err(|conflict| errors::misuse(py, &conflict.to_string()))?;
    let codec = codec.map(str::parse).transpose().map_err(|problem: String| errors::misuse(py, &problem))?;
    let consistency = match consistency {
        None => Consistency::default(),
        Some(text) => text.parse().map_err(|problem: String| errors::misuse(py, &problem))?,
    };
    let membership = match membership {
        None => None,
        Some((url, namespace, secret, rank)) => Some((
            join_options::membership(py, url, &namespace, &secret, rank)?,
            join_options::options(py, transport, interfaces, rendezvous_timeout, rack, host)?,
        )),
    };
    let plan = StorePlan {
        kind,
        membership,
        compute_threads,
        outstanding,
        checks: check,
        codec,
        reproducible,
        consistency,
    };
    let store = interruptible(py, move || open(plan))?.map_err(|failed| match failed {
        OpenError::Engine(error @ EngineError::Spawn { .. }) => errors::connect(py, &error.to_string()),
        OpenError::Engine(error) => errors::misuse(py, &error.to_string()),
        OpenError::Store(error) => errors::store(py, "", &error, None),
    })?;
    Store::new(store).map_err(|error| errors::connect(py, &format!("cannot start a thread: {error}")))
}

fn open(plan: StorePlan) -> Result<Arc<dyn KvStore>, OpenError> {
    let StorePlan {
        kind,
        membership,
        compute_threads,
        outstanding,
        checks,
        codec,
        reproducible,
        consistency,
    } = plan;
    let usual = EngineConfig::default();
    let config = EngineConfig {
        compute_threads: compute_threads.unwrap_or(usual.compute_threads),
        // There are as many threads as collectives may be under way.
        communicate_threads: outstanding.unwrap_or(usual.communicate_threads).max(1),
        ..usual
    };
    let engine = Arc::new(Engine::new(config).map_err(OpenError::Engine)?);
    let options = match membership {
        Some((membership, options)) if kind == StoreKind::Hub => {
            let config = HubStoreConfig { membership, options, codec, reproducible, consistency };
            StoreOptions::at_hub(engine, config)
        }
        Some((membership, worker)) if kind.is_collective() => {
            let options = RendezvousOptions { worker, ..RendezvousOptions::default() };
            let communicator =
                rendezvous(membership, options).map_err(|error| OpenError::Store(error.into()))?;
            match checks {
                true => StoreOptions::over(engine, CheckedCommunicator::new(communicator)),
                false => StoreOptions::over(engine, communicator),
            }
        }
        _ => StoreOptions::new(engine),
    };
    let store = create(kind, StoreOptions { outstanding, ..options }).map_err(OpenError::Store)?;
    Ok(Arc::from(store))
}
