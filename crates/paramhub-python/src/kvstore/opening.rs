//! How a store comes to be: an engine, and ranks that meet.

use std::sync::Arc;

use paramhub::collective::communicator::{Checking, MeetOptions, meet};
use paramhub::collective::engine::{Engine, EngineConfig, EngineError};
use paramhub::collective::kvstore::{HubSeat, KvStore, StoreError, StoreKind, StoreOptions, create};
use paramhub::{Codec, Membership, Options};
use pyo3::prelude::*;

use super::Store;
use crate::errors;
use crate::fork::refuse_in_child;
use crate::seat;
use crate::waiting::interruptible;

/// Who this rank is: the manager's URL, the job's namespace and secret, the rank.
type Seat = (String, String, String, u32);

/// What a store is made of.
struct Plan {
    kind: StoreKind,
    /// None of a store of one process.
    seat: Option<(Membership, Options)>,
    compute_threads: Option<usize>,
    outstanding: Option<usize>,
    checks: bool,
    codec: Option<Codec>,
    reproducible: bool,
}

enum Failed {
    Engine(EngineError),
    Store(StoreError),
}

/// Opens a store; returns when every rank has. Of a local one there is no seat.
#[pyfunction]
#[pyo3(signature = (
    kind, seat, *, transport = None, interfaces = None, rendezvous_timeout = None, rack = None, host = None,
    compute_threads = None, outstanding = None, check = false, codec = None, reproducible = false
))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
pub(crate) fn open_store(
    py: Python<'_>,
    kind: &str,
    seat: Option<Seat>,
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
) -> PyResult<Store> {
    refuse_in_child(py)?;
    let kind: StoreKind = kind.parse().map_err(|error| errors::store(py, "", &error, None))?;
    let given = [
        (outstanding.is_some() && kind != StoreKind::ConCom, "a number of outstanding keys"),
        (check && !kind.is_collective(), "checked calls"),
        (codec.is_some() && kind != StoreKind::Hub, "a codec"),
        (reproducible && kind != StoreKind::Hub, "reproducible sums"),
    ];
    if let Some((_, option)) = given.into_iter().find(|(is_wrong, _)| *is_wrong) {
        return Err(errors::misuse(py, &format!("a {kind} store takes no such thing as {option}")));
    }
    let codec = codec.map(str::parse).transpose().map_err(|problem: String| errors::misuse(py, &problem))?;
    let seat = match seat {
        None => None,
        Some((url, namespace, secret, rank)) => Some((
            seat::membership(py, url, &namespace, &secret, rank)?,
            seat::options(py, transport, interfaces, rendezvous_timeout, rack, host)?,
        )),
    };
    let plan = Plan { kind, seat, compute_threads, outstanding, checks: check, codec, reproducible };
    let store = interruptible(py, move || open(plan))?.map_err(|failed| match failed {
        Failed::Engine(error @ EngineError::Spawn { .. }) => errors::connect(py, &error.to_string()),
        Failed::Engine(error) => errors::misuse(py, &error.to_string()),
        Failed::Store(error) => errors::store(py, "", &error, None),
    })?;
    Store::new(store).map_err(|error| errors::connect(py, &format!("cannot start a thread: {error}")))
}

fn open(plan: Plan) -> Result<Arc<dyn KvStore>, Failed> {
    let Plan { kind, seat, compute_threads, outstanding, checks, codec, reproducible } = plan;
    let usual = EngineConfig::default();
    let config = EngineConfig {
        compute_threads: compute_threads.unwrap_or(usual.compute_threads),
        // As many as collectives may be under way.
        communicate_threads: outstanding.unwrap_or(usual.communicate_threads).max(1),
        ..usual
    };
    let engine = Arc::new(Engine::new(config).map_err(Failed::Engine)?);
    let options = match seat {
        Some((membership, options)) if kind == StoreKind::Hub => {
            StoreOptions::at_hub(engine, HubSeat { membership, options, codec, reproducible })
        }
        Some((membership, worker)) if kind.is_collective() => {
            let options = MeetOptions { worker, ..MeetOptions::default() };
            let communicator = meet(membership, options).map_err(|error| Failed::Store(error.into()))?;
            match checks {
                true => StoreOptions::over(engine, Checking::new(communicator)),
                false => StoreOptions::over(engine, communicator),
            }
        }
        _ => StoreOptions::new(engine),
    };
    let store = create(kind, StoreOptions { outstanding, ..options }).map_err(Failed::Store)?;
    Ok(Arc::from(store))
}
