//! What an exchange costs the network, as pure functions: bytes on each kind of link, the time they take at least, and
//! which deployment or reduction takes least (PHub sections 2.1, 2.3.1 and 3.4); then what a cluster costs to buy (section 4.9).
//!
//! Every worker has the same gradient of M bytes at the start of a step and wants M bytes of parameters at its end. Links
//! are full duplex, so a link takes as long as its busier direction. Hubs compute infinitely fast, chunks are small against
//! M and spread evenly, and everything overlaps: what comes out is a lower bound of the exchange, which no implementation
//! of that deployment can beat.
//!
//! ```
//! use paramhub_core::cost::{Arrangement, CostModel, Network, Rates};
//!
//! let rate = |text: &str| text.parse().unwrap();
//! let rates = Rates { worker: rate("500mbit"), hub: rate("500mbit"), core: None };
//! let network = Network { hub_interfaces: 8, ..Network::new(46_800_000, 8, rates) };
//! let model = CostModel::new(network).unwrap();
//! let balanced = model.exchange(Arrangement::DedicatedHub);
//! let sharded = model.exchange(Arrangement::HubBesideEveryWorker);
//! assert!((balanced.seconds - 0.749).abs() < 0.001);
//! assert!((sharded.seconds / balanced.seconds - 1.75).abs() < 0.001);
//! ```

mod choice;
mod exchange;
mod price;
mod rate;

pub use choice::{Inequality, Recommendation, ReductionChoice};
pub use exchange::{Arrangement, Exchange, Link, Load};
pub use price::{Prices, Value};
pub use rate::{Rate, RateError};

use serde::Serialize;
use thiserror::Error;

use crate::limits::{HUBS_MAX, INTERFACES_MAX, WORKERS_MAX};

/// A job and the network it runs on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Network {
    /// Bytes of gradients that one worker sends in a step; as many bytes of parameters come back.
    pub model_bytes: u64,
    /// Workers in all, spread evenly over the racks.
    pub workers: u32,
    /// Racks, each with one link to the core that joins them.
    pub racks: u32,
    /// Dedicated hubs where the job's keys are spread over several, dealt to the racks in turn.
    pub hubs: u32,
    /// Interfaces of each dedicated hub.
    pub hub_interfaces: u32,
    /// Of the links.
    pub rates: Rates,
}

/// What links carry in each direction, both at once.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rates {
    /// A worker's machine, also where a hub runs beside the worker.
    pub worker: Rate,
    /// One interface of a dedicated hub.
    pub hub: Rate,
    /// A rack's link to the core. Needed where there are several racks.
    pub core: Option<Rate>,
}

/// Why a network makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NetworkError {
    /// A count beyond its bounds.
    #[error("{count} {what}: a plan is for {least} to {most}")]
    Count {
        /// What was counted.
        what: &'static str,
        /// How many there are.
        count: u64,
        /// Fewest.
        least: u64,
        /// Most.
        most: u64,
    },
    /// Nothing to exchange.
    #[error("a model of 0 bytes has nothing to exchange")]
    NoBytes,
    /// Racks without a rate between them.
    #[error(
        "{racks} racks are joined by a core, whose rate is missing: name what a rack's link to it carries"
    )]
    NoCore {
        /// How many racks.
        racks: u32,
    },
}

impl Network {
    /// One rack, with as many dedicated hubs as workers, of one interface each, as in PHub's table 2.
    pub fn new(model_bytes: u64, workers: u32, rates: Rates) -> Network {
        Network { model_bytes, workers, racks: 1, hubs: workers, hub_interfaces: 1, rates }
    }

    fn check(&self) -> Result<(), NetworkError> {
        let within = |what, count: u32, most: u64| match u64::from(count) {
            count if (1..=most).contains(&count) => Ok(()),
            count => Err(NetworkError::Count { what, count, least: 1, most }),
        };
        within("workers", self.workers, WORKERS_MAX.into())?;
        within("racks", self.racks, self.workers.into())?;
        within("hubs", self.hubs, HUBS_MAX as u64)?;
        within("interfaces of a hub", self.hub_interfaces, INTERFACES_MAX as u64)?;
        if self.model_bytes == 0 {
            return Err(NetworkError::NoBytes);
        }
        if self.racks > 1 && self.rates.core.is_none() {
            return Err(NetworkError::NoCore { racks: self.racks });
        }
        Ok(())
    }

    /// Of `count` things dealt to the racks in turn, how many `rack` gets.
    fn share(&self, count: u32, rack: u32) -> u32 {
        count / self.racks + u32::from(rack < count % self.racks)
    }
}

/// Computes what exchanges cost on a network that makes sense.
#[derive(Clone, Copy, Debug)]
pub struct CostModel {
    network: Network,
}

impl CostModel {
    /// Checks the network.
    pub fn new(network: Network) -> Result<CostModel, NetworkError> {
        network.check()?;
        Ok(CostModel { network })
    }

    /// What it computes for.
    pub fn network(&self) -> &Network {
        &self.network
    }
}
