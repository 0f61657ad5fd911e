//! Key-value stores over collectives, or within one process (MPI collectives in DAGs, sections 3.3 and 4),
//! with MXNet's names.
//!
//! A store has a value for each key. The store sums what the ranks push, and each rank pulls the sum; with an
//! optimizer the sum first becomes new parameters, the same at every rank. Only calls that must wait do:
//! pushes and pulls are operations of the [engine](crate::engine), which orders them by the arrays that they
//! touch.
//!
//! The three designs differ in which thread calls the collective, and when:
//!
//! - [funnel](StoreKind::Funnel): the caller of push, which waits for the gradient and reduces it at once;
//! - [concom](StoreKind::ConCom): threads of the engine, with keys distributed over several communicators and
//!   a barrier every few keys;
//! - [depcha](StoreKind::DepCha): threads of the engine, one collective after the other in the order of the
//!   pulls, since every allreduce mutates one dummy variable. Pushes only copy, so all of them come before
//!   the first pull.
//!
//! A [hub](StoreKind::Hub) needs no order, since every answer names its key.

mod array;
mod concom;
mod depcha;
mod entry;
mod entry_table;
mod error;
mod funnel;
mod hub;
mod local;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

pub use array::Array;
pub use error::StoreError;
pub use hub::HubStoreConfig;
use paramhub_core::combinations::{self, Feature, Features};
use paramhub_kernels::{Hyperparameters, Registry};

use crate::communicator::Communicator;
use crate::engine::Engine;

/// The key of a value: a name, or a number as in MXNet.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Key {
    /// A number.
    Number(u64),
    /// A name.
    Name(Arc<str>),
}

/// The way in which ranks exchange the values that they push.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoreKind {
    /// Through a hub.
    Hub,
    /// Without an exchange: the process is the only rank.
    Local,
    /// By collectives that the caller of push makes, key by key.
    Funnel,
    /// By collectives of the engine's threads over several communicators.
    ConCom,
    /// By collectives of the engine's threads in a chain of dependencies.
    DepCha,
}

/// The optimizer's state of a key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OptimizerState {
    /// A value for each element of the key, for each of the optimizer's slots.
    pub slots: Vec<Vec<f32>>,
    /// The number of updates that the state has had.
    pub updates: u64,
}

/// The options of a store. See [`create`].
pub struct StoreOptions {
    /// The engine of the arrays' variables.
    pub engine: Arc<Engine>,
    /// A communicator of all ranks, for [`StoreKind::Funnel`], [`ConCom`](StoreKind::ConCom) and
    /// [`DepCha`](StoreKind::DepCha).
    pub communicator: Option<Box<dyn Communicator>>,
    /// The membership and options of this rank in a job, for [`StoreKind::Hub`].
    pub hub: Option<HubStoreConfig>,
    /// The available optimizers, except at hubs.
    pub registry: Registry,
    /// For [`StoreKind::ConCom`]: the number of communicators over which keys are distributed, and of keys
    /// between two barriers. At most as many as the engine has threads to communicate; by default that many.
    pub outstanding: Option<usize>,
}

impl StoreOptions {
    /// Options of a local store.
    pub fn new(engine: Arc<Engine>) -> StoreOptions {
        let registry = Registry::with_builtins();
        StoreOptions { engine, communicator: None, hub: None, registry, outstanding: None }
    }

    /// Options of a store that exchanges by collectives.
    pub fn over(engine: Arc<Engine>, communicator: impl Communicator + 'static) -> StoreOptions {
        StoreOptions { communicator: Some(Box::new(communicator)), ..StoreOptions::new(engine) }
    }

    /// Options of a store that exchanges through a hub.
    pub fn at_hub(engine: Arc<Engine>, config: HubStoreConfig) -> StoreOptions {
        StoreOptions { hub: Some(config), ..StoreOptions::new(engine) }
    }
}

/// A store of values by keys. All ranks make the same calls in the same order, and a rank one call at a time.
///
/// # Errors
/// Every method fails if the key or an array does not fit, and if an operation that it had to wait for
/// failed. A wait for an array reports failures that come later.
pub trait KvStore: Send + Sync {
    /// The kind of exchange.
    fn kind(&self) -> StoreKind;

    /// The rank of this process, counted from 0.
    fn rank(&self) -> u32;

    /// The number of ranks that share the store.
    fn size(&self) -> u32;

    /// The engine that runs pushes and pulls.
    fn engine(&self) -> &Arc<Engine>;

    /// Gives a key its initial value: rank 0's, at every rank. Called once for each key.
    fn init(&self, key: &Key, value: &Array) -> Result<(), StoreError>;

    /// Sums `values`, one or more arrays of this rank, and the other ranks' to the key's new sum, or has the
    /// optimizer make new parameters of their mean over ranks. Keys of higher `priority` are copied first
    /// where several are ready.
    fn push(&self, key: &Key, values: &[Array], priority: i32) -> Result<(), StoreError>;

    /// Copies the key's value to `outs`: with an optimizer its parameters, else the sum of the last push, or
    /// the initial value.
    fn pull(&self, key: &Key, outs: &[Array], priority: i32) -> Result<(), StoreError>;

    /// [`push`](Self::push), then [`pull`](Self::pull).
    fn pushpull(&self, key: &Key, values: &[Array], outs: &[Array], priority: i32) -> Result<(), StoreError> {
        self.push(key, values, priority)?;
        self.pull(key, outs, priority)
    }

    /// Chooses the optimizer. From the next push on every key's value is its parameters, which the optimizer
    /// updates with the mean of the ranks' pushes. All keys are in group 0, whose hyperparameters these are. Called before the
    /// first push.
    fn set_optimizer(&self, name: &str, hyperparameters: Hyperparameters) -> Result<(), StoreError>;

    /// Makes keys that have their values a further group, with hyperparameters of its own. Returns its number: 1 for the first
    /// after [`set_optimizer`](Self::set_optimizer). Called before the first push.
    fn add_group(&self, keys: &[Key], hyperparameters: Hyperparameters) -> Result<u16, StoreError>;

    /// Changes the hyperparameters of a group from the next push on.
    fn set_hyperparameters(&self, group: u16, hyperparameters: Hyperparameters) -> Result<(), StoreError>;

    /// Waits for this rank's pushes, and returns the optimizer's state of a key. At a hub the first such call opens the
    /// job, as the first push does.
    fn optimizer_state(&self, key: &Key) -> Result<OptimizerState, StoreError>;

    /// Gives a key the optimizer's state of an earlier run. Every rank calls it with equal arguments, after
    /// [`set_optimizer`](Self::set_optimizer) and before the first push.
    fn set_optimizer_state(&self, key: &Key, state: OptimizerState) -> Result<(), StoreError>;

    /// Waits until every rank has called it and all earlier pushes and pulls of this rank have been
    /// exchanged.
    fn barrier(&self) -> Result<(), StoreError>;

    /// Waits for all that is under way and leaves in order. Every rank calls it, and makes no calls
    /// afterwards.
    fn leave(&self) -> Result<(), StoreError>;

    /// Ends the store, here and at all other ranks, which receive the reason; also ends calls that wait on
    /// other threads. Exchanges under way at a hub end when the store is dropped.
    fn abort(&self, reason: &str);

    /// Returns the reason why the ranks cannot exchange any more, if they cannot.
    fn failure(&self) -> Option<StoreError>;
}

/// Makes a store.
///
/// # Errors
/// If the options do not fit the kind. Every rank must pass the same kind.
pub fn create(kind: StoreKind, options: StoreOptions) -> Result<Box<dyn KvStore>, StoreError> {
    let StoreOptions { engine, communicator, hub, registry, outstanding } = options;
    let asked = Features::of([
        (Feature::Communicator, communicator.is_some()),
        (Feature::HubMembership, hub.is_some()),
        (Feature::OutstandingKeys, outstanding.is_some()),
    ]);
    combinations::check(asked.with(kind.feature()))
        .map_err(|conflict| StoreError::Options(conflict.to_string()))?;
    Ok(match (kind, communicator, hub) {
        (StoreKind::Local, ..) => Box::new(local::LocalStore::new(engine, registry)),
        (StoreKind::Funnel, Some(communicator), _) => {
            Box::new(funnel::Funnel::new(engine, registry, communicator))
        }
        (StoreKind::ConCom, Some(communicator), _) => {
            Box::new(concom::ConCom::new(engine, registry, communicator, outstanding)?)
        }
        (StoreKind::DepCha, Some(communicator), _) => {
            Box::new(depcha::DepCha::new(engine, registry, communicator))
        }
        (StoreKind::Hub, _, Some(config)) => Box::new(hub::HubStore::new(engine, config)?),
        (StoreKind::Hub, _, None) => {
            return Err(StoreError::Options(
                "a hub store needs a HubStoreConfig: make its options with StoreOptions::at_hub".into(),
            ));
        }
        (_, None, _) => return Err(StoreError::Options(format!("a {kind} store needs a communicator"))),
    })
}

impl StoreKind {
    /// All kinds.
    pub const ALL: [StoreKind; 5] =
        [StoreKind::Hub, StoreKind::Local, StoreKind::Funnel, StoreKind::ConCom, StoreKind::DepCha];

    /// Returns whether the kind exchanges by collectives.
    pub fn is_collective(self) -> bool {
        matches!(self, StoreKind::Funnel | StoreKind::ConCom | StoreKind::DepCha)
    }

    /// The feature of an exchange of this kind.
    pub fn feature(self) -> Feature {
        match self {
            StoreKind::Hub => Feature::ExchangeHub,
            StoreKind::Local => Feature::ExchangeLocal,
            StoreKind::Funnel => Feature::ExchangeFunnel,
            StoreKind::ConCom => Feature::ExchangeConcom,
            StoreKind::DepCha => Feature::ExchangeDepcha,
        }
    }

    /// The name that users write.
    pub fn name(self) -> &'static str {
        match self {
            StoreKind::Hub => "hub",
            StoreKind::Local => "local",
            StoreKind::Funnel => "funnel",
            StoreKind::ConCom => "concom",
            StoreKind::DepCha => "depcha",
        }
    }
}

impl FromStr for StoreKind {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let known = Self::ALL.into_iter().find(|kind| kind.name() == text);
        known.ok_or_else(|| {
            StoreError::Options(format!(
                "there is no store `{text}`: expected {}",
                Self::ALL.map(Self::name).join(", ")
            ))
        })
    }
}

impl fmt::Display for StoreKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<u64> for Key {
    fn from(number: u64) -> Key {
        Key::Number(number)
    }
}

impl From<&str> for Key {
    fn from(name: &str) -> Key {
        Key::Name(name.into())
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key::Number(number) => number.fmt(f),
            Key::Name(name) => name.fmt(f),
        }
    }
}
