//! These functions compute the price of a cluster, and the training that it buys (PHub section 4.9).

use serde::Serialize;

use super::{Arrangement, CostModel, ExchangeCost, Network};

/// Prices of a cluster's parts, all in one currency.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Prices {
    /// A worker's machine with its accelerators, without network.
    pub worker: f64,
    /// A port of its network card.
    pub worker_port: f64,
    /// A dedicated hub's machine without network.
    pub hub: f64,
    /// A port of its network cards.
    pub hub_port: f64,
    /// A port of a switch, as fast as the machines' ports.
    pub switch_port: f64,
    /// A cable to a switch port.
    pub cable: f64,
    /// The factor by which the racks' links to the core are narrower than all machines' links together: 1 for
    /// full bisection bandwidth.
    pub oversubscription: f64,
}

/// The price and the speed of one arrangement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Value {
    /// Price of everything, for each worker.
    pub price_per_worker: f64,
    /// Steps per second, at best: the exchange overlaps with the computation entirely.
    pub steps_per_second: f64,
    /// Steps per second for each thousand of the currency spent on a worker.
    pub steps_per_second_per_thousand: f64,
}

impl Prices {
    /// The price of connecting one port of a machine in a network of three layers: the port's card at
    /// `card_port`, cable and switch port, and its part of the two layers above, of four more switch ports
    /// and two cables.
    pub fn connection(&self, card_port: f64) -> f64 {
        let above = 4.0 * self.switch_port + 2.0 * self.cable;
        card_port + self.switch_port + self.cable + above / self.oversubscription
    }

    /// The price of a worker with `hubs_per_worker` of a dedicated hub that has this many ports.
    pub fn per_worker(&self, hubs_per_worker: f64, hub_ports: u32) -> f64 {
        let hub = self.hub + f64::from(hub_ports) * self.connection(self.hub_port);
        self.worker + self.connection(self.worker_port) + hubs_per_worker * hub
    }
}

impl CostModel {
    /// The steps that an arrangement makes for its price if each step computes for `compute_s`.
    pub fn value(&self, exchange: &ExchangeCost, compute_s: f64, prices: &Prices) -> Value {
        let network = self.network();
        let hubs = hubs_per_worker(network, exchange.arrangement);
        let price_per_worker = prices.per_worker(hubs, network.hub_interfaces);
        let steps_per_second = 1.0 / exchange.seconds.max(compute_s);
        Value {
            price_per_worker,
            steps_per_second,
            steps_per_second_per_thousand: steps_per_second * 1000.0 / price_per_worker,
        }
    }
}

fn hubs_per_worker(network: &Network, arrangement: Arrangement) -> f64 {
    f64::from(arrangement.hub_machines(network)) / f64::from(network.workers)
}
