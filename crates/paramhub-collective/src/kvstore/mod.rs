//! Key-value stores over collectives, or over none (MPI collectives in DAGs, sections 3.3 and 4), under MXNet's names.
//!
//! A store has a value for each key. What ranks push is summed over all of them, and pulled by each; with an optimizer the sum
//! becomes new parameters first, at every rank alike. Nothing here waits but what must: pushes and pulls are operations of the
//! [engine](crate::engine), which know their order by the arrays that they touch.
//!
//! The three designs differ in who calls the collective, and when:
//!
//! - [funnel](StoreKind::Funnel): the caller of push, which waits for the gradient and reduces it there and then;
//! - [concom](StoreKind::ConCom): threads of the engine, keys being dealt to several communicators, with a barrier every few keys;
//! - [depcha](StoreKind::DepCha): threads of the engine, one after the other in the order in which they were pulled, since every
//!   allreduce mutates one dummy variable. Pushes only copy; so all of them come before the first pull.
//!
//! A [hub](StoreKind::Hub) needs no order: keys tell its answers apart.

mod array;
mod concom;
mod depcha;
mod entry;
mod error;
mod funnel;
mod hub;
mod local;
mod shelf;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

pub use array::Array;
pub use error::StoreError;
pub use hub::HubSeat;
use paramhub_kernels::{Hyperparameters, Registry};

use crate::communicator::Communicator;
use crate::engine::Engine;

/// What a value is called: a name, or a number as in MXNet.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Key {
    /// By number.
    Number(u64),
    /// By name.
    Name(Arc<str>),
}

/// How ranks exchange what they push.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoreKind {
    /// Through a hub.
    Hub,
    /// Not at all: this process is alone.
    Local,
    /// By the caller of push, key by key.
    Funnel,
    /// By threads of the engine over several communicators.
    ConCom,
    /// By threads of the engine in a chain of dependencies.
    DepCha,
}

/// How a store is made. See [`create`].
pub struct StoreOptions {
    /// Whose variables the arrays have.
    pub engine: Arc<Engine>,
    /// Between all ranks, for [`StoreKind::Funnel`], [`ConCom`](StoreKind::ConCom) and [`DepCha`](StoreKind::DepCha).
    pub communicator: Option<Box<dyn Communicator>>,
    /// This rank's place in a job, for [`StoreKind::Hub`].
    pub hub: Option<HubSeat>,
    /// The optimizers that there are, but for those of hubs.
    pub registry: Registry,
    /// Of [`StoreKind::ConCom`]: communicators that keys are dealt to, and keys between two barriers. At most as many as the engine
    /// has threads to communicate; by default that many.
    pub outstanding: Option<usize>,
}

impl StoreOptions {
    /// Of a local store.
    pub fn new(engine: Arc<Engine>) -> StoreOptions {
        let registry = Registry::with_builtins();
        StoreOptions { engine, communicator: None, hub: None, registry, outstanding: None }
    }

    /// Of one that exchanges by collectives.
    pub fn over(engine: Arc<Engine>, communicator: impl Communicator + 'static) -> StoreOptions {
        StoreOptions { communicator: Some(Box::new(communicator)), ..StoreOptions::new(engine) }
    }

    /// Of one that exchanges through a hub.
    pub fn at_hub(engine: Arc<Engine>, seat: HubSeat) -> StoreOptions {
        StoreOptions { hub: Some(seat), ..StoreOptions::new(engine) }
    }
}

/// A store of values by keys. All ranks make the same calls in the same order, one thread at a time.
///
/// # Errors
/// Every method fails if the key or an array does not fit, and if an operation that it had to wait for failed. What fails later is
/// told at a wait for an array that depends on it.
pub trait KvStore: Send + Sync {
    /// How it exchanges.
    fn kind(&self) -> StoreKind;

    /// This process, counted from 0.
    fn rank(&self) -> u32;

    /// Ranks that share the store.
    fn size(&self) -> u32;

    /// The engine that runs what is pushed and pulled.
    fn engine(&self) -> &Arc<Engine>;

    /// Gives a key its value, rank 0's at every rank. Once for each key.
    fn init(&self, key: &Key, value: &Array) -> Result<(), StoreError>;

    /// Adds up `values`, one or more of this rank, and the other ranks' to the key's new sum, or has the optimizer make new
    /// parameters of their mean over ranks. Keys of higher `priority` are copied first where several are ready.
    fn push(&self, key: &Key, values: &[Array], priority: i32) -> Result<(), StoreError>;

    /// Puts the key's value into `outs`: with an optimizer its parameters, else the sum of what was pushed last, or what it was
    /// given at first.
    fn pull(&self, key: &Key, outs: &[Array], priority: i32) -> Result<(), StoreError>;

    /// [`push`](Self::push), then [`pull`](Self::pull).
    fn pushpull(&self, key: &Key, values: &[Array], outs: &[Array], priority: i32) -> Result<(), StoreError> {
        self.push(key, values, priority)?;
        self.pull(key, outs, priority)
    }

    /// From the next push on every key's value is parameters, which the optimizer of this name changes by the mean of what all
    /// ranks push. Before the first push.
    fn set_optimizer(&self, name: &str, hyperparameters: Hyperparameters) -> Result<(), StoreError>;

    /// Changes the optimizer's numbers from the next push on.
    fn set_hyperparameters(&self, hyperparameters: Hyperparameters) -> Result<(), StoreError>;

    /// Waits until every rank has called it and all that this one has pushed and pulled before has been exchanged.
    fn barrier(&self) -> Result<(), StoreError>;

    /// Waits for all that is under way and leaves the other ranks in order. Every rank does, and nothing comes after it.
    fn leave(&self) -> Result<(), StoreError>;

    /// Ends it, here and at all other ranks, for a reason that these are told: also calls that wait on other threads. What is under
    /// way at a hub ends when the store is dropped.
    fn abort(&self, reason: &str);

    /// Why ranks cannot exchange any more, if they cannot.
    fn failure(&self) -> Option<StoreError>;
}

/// Makes a store.
///
/// # Errors
/// If the options do not fit the kind. Every rank must choose alike.
pub fn create(kind: StoreKind, options: StoreOptions) -> Result<Box<dyn KvStore>, StoreError> {
    let StoreOptions { engine, communicator, hub, registry, outstanding } = options;
    let wanted = [kind.is_collective(), kind == StoreKind::Hub, kind == StoreKind::ConCom];
    let given = [communicator.is_some(), hub.is_some(), outstanding.is_some()];
    let options = ["a communicator", "a seat at a hub", "a number of outstanding keys"];
    for ((wanted, given), option) in wanted.into_iter().zip(given).zip(options) {
        if given && !wanted {
            return Err(StoreError::Options(format!("a {kind} store takes no such thing as {option}")));
        }
    }
    Ok(match (kind, communicator, hub) {
        (StoreKind::Local, ..) => Box::new(local::Local::new(engine, registry)),
        (StoreKind::Funnel, Some(communicator), _) => {
            Box::new(funnel::Funnel::new(engine, registry, communicator))
        }
        (StoreKind::ConCom, Some(communicator), _) => {
            Box::new(concom::ConCom::new(engine, registry, communicator, outstanding)?)
        }
        (StoreKind::DepCha, Some(communicator), _) => {
            Box::new(depcha::DepCha::new(engine, registry, communicator))
        }
        (StoreKind::Hub, _, Some(seat)) => Box::new(hub::AtHub::new(engine, seat)?),
        (StoreKind::Hub, _, None) => {
            return Err(StoreError::Options("a hub store needs a seat at a hub".into()));
        }
        (_, None, _) => return Err(StoreError::Options(format!("a {kind} store needs a communicator"))),
    })
}

impl StoreKind {
    /// All of them.
    pub const ALL: [StoreKind; 5] =
        [StoreKind::Hub, StoreKind::Local, StoreKind::Funnel, StoreKind::ConCom, StoreKind::DepCha];

    /// Whether it exchanges by collectives.
    pub fn is_collective(self) -> bool {
        matches!(self, StoreKind::Funnel | StoreKind::ConCom | StoreKind::DepCha)
    }

    /// As users write it.
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
