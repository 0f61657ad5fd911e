//! Bytes on each kind of link for each arrangement of hubs, and the time they take at least.

use std::fmt;

use serde::Serialize;

use super::{CostModel, Network, Rate};

/// Where hubs stand and how they reduce: PHub's four deployments (section 2.1), then the reductions that sum within each
/// rack first (section 3.4). Of those, a rack has one hub, with as many interfaces as the other dedicated hubs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum Arrangement {
    /// CC: one hub, beside a worker.
    #[serde(rename = "CC")]
    HubBesideOneWorker,
    /// CS, PShard: a hub beside every worker, each with its part of the model.
    #[serde(rename = "CS")]
    HubBesideEveryWorker,
    /// NCC, PBox: one dedicated hub.
    #[serde(rename = "NCC")]
    DedicatedHub,
    /// NCS: several dedicated hubs, each with its part of the model.
    #[serde(rename = "NCS")]
    DedicatedHubs,
    /// Rack hubs below a parent hub, a machine of its own in the first rack.
    #[serde(rename = "tree")]
    Tree,
    /// Rack hubs in a ring: reduce-scatter, then all-gather.
    #[serde(rename = "ring")]
    Ring,
    /// Rack hubs that each sum one part of the model for all racks.
    #[serde(rename = "sharded")]
    Sharded,
}

impl Arrangement {
    /// Those that send every gradient straight to the hub that sums it.
    pub const FLAT: [Arrangement; 4] = [
        Arrangement::HubBesideOneWorker,
        Arrangement::HubBesideEveryWorker,
        Arrangement::DedicatedHub,
        Arrangement::DedicatedHubs,
    ];
    /// Those that sum within each rack first. Where two take equally long, the earlier one is to be preferred: it takes
    /// fewer rounds between racks, or fewer machines.
    pub const HIERARCHICAL: [Arrangement; 3] = [Arrangement::Sharded, Arrangement::Ring, Arrangement::Tree];

    /// As the paper or `--reduction` writes it.
    pub fn name(self) -> &'static str {
        match self {
            Arrangement::HubBesideOneWorker => "CC",
            Arrangement::HubBesideEveryWorker => "CS",
            Arrangement::DedicatedHub => "NCC",
            Arrangement::DedicatedHubs => "NCS",
            Arrangement::Tree => "tree",
            Arrangement::Ring => "ring",
            Arrangement::Sharded => "sharded",
        }
    }

    /// Machines that only hubs use.
    pub fn hub_machines(self, network: &Network) -> u32 {
        match self {
            Arrangement::HubBesideOneWorker | Arrangement::HubBesideEveryWorker => 0,
            Arrangement::DedicatedHub => 1,
            Arrangement::DedicatedHubs => network.hubs,
            Arrangement::Tree => network.racks + 1,
            Arrangement::Ring | Arrangement::Sharded => network.racks,
        }
    }
}

impl fmt::Display for Arrangement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A kind of link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Link {
    /// Of a worker's machine without a hub.
    Worker,
    /// Of a machine where a hub runs beside a worker.
    SharedMachine,
    /// One interface of a dedicated hub.
    HubInterface,
    /// One interface of the parent of the rack hubs.
    ParentInterface,
    /// A rack's link to the core.
    Core,
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Link::Worker => "worker's link",
            Link::SharedMachine => "link of worker and hub",
            Link::HubInterface => "hub's interface",
            Link::ParentInterface => "parent's interface",
            Link::Core => "rack's link to the core",
        })
    }
}

/// What one link carries in a step, the busiest of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Load {
    /// Its kind.
    pub link: Link,
    /// Bytes out of the machine or rack.
    pub sent_bytes: f64,
    /// Bytes into it.
    pub received_bytes: f64,
    /// What the link carries each way.
    pub rate: Rate,
    /// How long its busier direction takes.
    pub seconds: f64,
}

impl Load {
    fn new(link: Link, sent_bytes: f64, received_bytes: f64, rate: Rate) -> Load {
        Load { link, sent_bytes, received_bytes, rate, seconds: rate.seconds(sent_bytes.max(received_bytes)) }
    }

    fn both_ways(link: Link, bytes: f64, rate: Rate) -> Load {
        Load::new(link, bytes, bytes, rate)
    }
}

/// What an exchange costs with one arrangement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Exchange {
    /// Which.
    pub arrangement: Arrangement,
    /// The busiest link of each kind that there is.
    pub loads: Vec<Load>,
    /// Bytes that leave racks for others in a step, all racks together.
    pub core_bytes: f64,
    /// Lower bound: no exchange is shorter than its busiest link takes.
    pub seconds: f64,
    /// That link; of several equally busy the one nearest to the workers.
    pub limit: Link,
}

impl Exchange {
    /// The busiest link of a kind.
    pub fn load(&self, link: Link) -> Option<&Load> {
        self.loads.iter().find(|load| load.link == link)
    }

    /// What the busiest machine with a hub must carry so that the exchange fits into `seconds` of computation, in bits per
    /// second, both directions and all its interfaces together (PHub, table 2). `hub_interfaces` is the network's.
    pub fn hub_side_bits_per_second(&self, hub_interfaces: u32, seconds: f64) -> f64 {
        let of_machine = |load: &Load| {
            let interfaces = match load.link {
                Link::HubInterface | Link::ParentInterface => f64::from(hub_interfaces),
                Link::SharedMachine => 1.0,
                Link::Worker | Link::Core => 0.0,
            };
            (load.sent_bytes + load.received_bytes) * interfaces
        };
        self.loads.iter().map(of_machine).fold(0.0, f64::max) * 8.0 / seconds
    }
}

impl CostModel {
    /// What one exchange costs.
    pub fn exchange(&self, arrangement: Arrangement) -> Exchange {
        let mut loads = self.within_racks(arrangement);
        let mut core_bytes = 0.0;
        if let (true, Some(rate)) = (self.network.racks > 1, self.network.rates.core) {
            // As many bytes enter a rack as leave it: a gradient that leaves comes back as parameters, and the other way
            // round.
            let of_racks = (0..self.network.racks).map(|rack| self.out_of(rack, arrangement));
            let (busiest, all) =
                of_racks.fold((0.0, 0.0), |(most, all), bytes| (bytes.max(most), all + bytes));
            core_bytes = all;
            loads.push(Load::both_ways(Link::Core, busiest, rate));
        }
        let slowest = loads
            .iter()
            .copied()
            .reduce(|slowest, load| if load.seconds > slowest.seconds { load } else { slowest })
            .expect("every arrangement has a link");
        Exchange { arrangement, loads, core_bytes, seconds: slowest.seconds, limit: slowest.link }
    }

    fn within_racks(&self, arrangement: Arrangement) -> Vec<Load> {
        let network = &self.network;
        let (model, workers) = (network.model_bytes as f64, f64::from(network.workers));
        let worker = Load::both_ways(Link::Worker, model, network.rates.worker);
        let beside = |bytes| Load::both_ways(Link::SharedMachine, bytes, network.rates.worker);
        let hub = |link, bytes: f64| {
            Load::both_ways(link, bytes / f64::from(network.hub_interfaces), network.rates.hub)
        };
        match arrangement {
            // A worker beside the hub exchanges with it without the network.
            Arrangement::HubBesideOneWorker if network.workers == 1 => vec![beside(0.0)],
            Arrangement::HubBesideOneWorker => vec![worker, beside((workers - 1.0) * model)],
            // To the worker all but its own part, to the hub the others' contributions to that part.
            Arrangement::HubBesideEveryWorker => vec![beside(2.0 * (workers - 1.0) / workers * model)],
            Arrangement::DedicatedHub => vec![worker, hub(Link::HubInterface, workers * model)],
            Arrangement::DedicatedHubs => {
                vec![worker, hub(Link::HubInterface, workers * model / f64::from(network.hubs))]
            }
            Arrangement::Tree => {
                let below = f64::from(network.share(network.workers, 0));
                let racks = f64::from(network.racks);
                vec![
                    worker,
                    hub(Link::HubInterface, (below + 1.0) * model),
                    hub(Link::ParentInterface, racks * model),
                ]
            }
            Arrangement::Ring | Arrangement::Sharded => {
                let below = f64::from(network.share(network.workers, 0));
                vec![worker, hub(Link::HubInterface, (below + self.between_hubs()) * model)]
            }
        }
    }

    /// Bytes that leave a rack.
    fn out_of(&self, rack: u32, arrangement: Arrangement) -> f64 {
        let network = &self.network;
        let model = network.model_bytes as f64;
        let workers = f64::from(network.workers);
        let here = f64::from(network.share(network.workers, rack));
        // `part` of the model is summed in this rack: gradients of the rest leave, and parameters of the part.
        let flat = |part: f64| (here * (1.0 - part) + (workers - here) * part) * model;
        match arrangement {
            Arrangement::HubBesideOneWorker | Arrangement::DedicatedHub => flat(f64::from(rack == 0)),
            Arrangement::HubBesideEveryWorker => flat(here / workers),
            Arrangement::DedicatedHubs => {
                flat(f64::from(network.share(network.hubs, rack)) / f64::from(network.hubs))
            }
            Arrangement::Tree if rack == 0 => f64::from(network.racks - 1) * model,
            Arrangement::Tree => model,
            Arrangement::Ring | Arrangement::Sharded => self.between_hubs() * model,
        }
    }

    /// What a rack hub sends to the others, in models: in a ring all parts but one, twice; between shards its sums of the
    /// others' parts, and its own part to each of them.
    fn between_hubs(&self) -> f64 {
        let racks = f64::from(self.network.racks);
        2.0 * (racks - 1.0) / racks
    }
}
