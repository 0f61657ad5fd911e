//! These pure functions compute what an exchange costs the network: bytes on each kind of link, a lower
//! bound of the time they take, and the deployment or reduction that takes least (PHub sections 2.1, 2.3.1
//! and 3.4); then what a cluster costs to buy (section 4.9).
//!
//! Every worker has a gradient of M bytes at the start of a step and needs M bytes of parameters at its end.
//! Links are full duplex, so a link takes as long as its busier direction. The model assumes that hubs
//! compute infinitely fast, that chunks are small against M and spread evenly, and that everything overlaps.
//! The result is a lower bound of the exchange, which no implementation of that deployment can beat.
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
pub use exchange::{Arrangement, ExchangeCost, LinkKind, LinkLoad};
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
    /// Dedicated hubs in an arrangement that spreads the job's keys over several; they are dealt to the racks
    /// in turn.
    pub hubs: u32,
    /// Interfaces of each dedicated hub.
    pub hub_interfaces: u32,
    /// The number of [standbys](crate::standbys) of each chunk, 0 or 1.
    pub replicas: u32,
    /// The rates of the links.
    pub rates: Rates,
}

/// The rates of links, in each direction, both at once.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rates {
    /// The link of a worker's machine, also if a hub runs beside the worker.
    pub worker: Rate,
    /// One interface of a dedicated hub.
    pub hub: Rate,
    /// A rack's link to the core; required if there are several racks.
    pub core: Option<Rate>,
}

/// The reason why a network is invalid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NetworkError {
    /// A count out of bounds.
    #[error("{count} {what}: a plan is for {least} to {most}")]
    Count {
        /// The thing counted.
        what: &'static str,
        /// The number found.
        count: u64,
        /// The smallest number allowed.
        least: u64,
        /// The largest number allowed.
        most: u64,
    },
    /// A model of no bytes.
    #[error("a model of 0 bytes has nothing to exchange")]
    NoBytes,
    /// Standbys where no arrangement has two hubs.
    #[error(
        "a standby is at another hub, and here no arrangement has two: plan for two workers or two hubs at least"
    )]
    NoSecondHub,
    /// Several racks without a rate between them.
    #[error(
        "{racks} racks are joined by a core, whose rate is missing: name what a rack's link to it carries"
    )]
    NoCore {
        /// Number of racks.
        racks: u32,
    },
}

impl Network {
    /// One rack, with as many dedicated hubs as workers, each with one interface, as in PHub's table 2.
    pub fn new(model_bytes: u64, workers: u32, rates: Rates) -> Network {
        Network { model_bytes, workers, racks: 1, hubs: workers, hub_interfaces: 1, replicas: 0, rates }
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
        if self.replicas > 0 && self.workers.max(self.hubs) < 2 {
            return Err(NetworkError::NoSecondHub);
        }
        if self.racks > 1 && self.rates.core.is_none() {
            return Err(NetworkError::NoCore { racks: self.racks });
        }
        Ok(())
    }

    /// Returns how many of `count` things `rack` gets if they are dealt to the racks in turn.
    fn share(&self, count: u32, rack: u32) -> u32 {
        count / self.racks + u32::from(rack < count % self.racks)
    }
}

/// Computes what exchanges cost on a valid network.
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

    /// The network.
    pub fn network(&self) -> &Network {
        &self.network
    }
}
