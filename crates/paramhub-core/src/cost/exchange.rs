//! Bytes on each kind of link for each arrangement of hubs, and a lower bound of the time they take.

use std::fmt;

use serde::Serialize;

use super::{CostModel, Network, Rate};

/// The arrangement of hubs: PHub's four deployments (section 2.1), then the reductions that sum within each
/// rack first (section 3.4). In the latter, a rack has one hub, with as many interfaces as the other
/// dedicated hubs.
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
    /// The arrangements that send every gradient straight to the hub that sums it.
    pub const FLAT: [Arrangement; 4] = [
        Arrangement::HubBesideOneWorker,
        Arrangement::HubBesideEveryWorker,
        Arrangement::DedicatedHub,
        Arrangement::DedicatedHubs,
    ];
    /// The arrangements that sum within each rack first. If two take equally long, the earlier one is
    /// preferable: it takes fewer rounds between racks, or fewer machines.
    pub const HIERARCHICAL: [Arrangement; 3] = [Arrangement::Sharded, Arrangement::Ring, Arrangement::Tree];

    /// The name in the paper or in `--reduction`.
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

    /// Hubs among which the model is divided, if there is no rack's hub below another.
    fn flat_hubs(self, network: &Network) -> u32 {
        match self {
            Arrangement::HubBesideOneWorker | Arrangement::DedicatedHub => 1,
            Arrangement::HubBesideEveryWorker => network.workers,
            Arrangement::DedicatedHubs => network.hubs,
            Arrangement::Tree | Arrangement::Ring | Arrangement::Sharded => 0,
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
pub enum LinkKind {
    /// The link of a worker's machine without a hub.
    Worker,
    /// The link of a machine where a hub runs beside a worker.
    SharedMachine,
    /// One interface of a dedicated hub.
    HubInterface,
    /// One interface of the parent of the rack hubs.
    ParentInterface,
    /// A rack's link to the core.
    Core,
}

impl fmt::Display for LinkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LinkKind::Worker => "worker's link",
            LinkKind::SharedMachine => "link of worker and hub",
            LinkKind::HubInterface => "hub's interface",
            LinkKind::ParentInterface => "parent's interface",
            LinkKind::Core => "rack's link to the core",
        })
    }
}

/// The bytes that the busiest link of one kind carries in a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LinkLoad {
    /// The kind of link.
    pub link: LinkKind,
    /// Bytes out of the machine or rack.
    pub sent_bytes: f64,
    /// Bytes into the machine or rack.
    pub received_bytes: f64,
    /// The rate of the link in each direction.
    pub rate: Rate,
    /// The time that the busier direction takes.
    pub seconds: f64,
}

impl LinkLoad {
    fn new(link: LinkKind, sent_bytes: f64, received_bytes: f64, rate: Rate) -> LinkLoad {
        LinkLoad {
            link,
            sent_bytes,
            received_bytes,
            rate,
            seconds: rate.seconds(sent_bytes.max(received_bytes)),
        }
    }

    fn both_ways(link: LinkKind, bytes: f64, rate: Rate) -> LinkLoad {
        LinkLoad::new(link, bytes, bytes, rate)
    }
}

/// The costs of an exchange in one arrangement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExchangeCost {
    /// The arrangement.
    pub arrangement: Arrangement,
    /// The busiest link of each kind that exists.
    pub loads: Vec<LinkLoad>,
    /// Bytes that leave racks for others in a step, all racks together; 0 if the rate between racks is not known.
    pub core_bytes: f64,
    /// Lower bound: no exchange is shorter than its busiest link takes.
    pub seconds: f64,
    /// The kind of that link; among equally busy links, the one nearest to the workers.
    pub limit: LinkKind,
}

impl ExchangeCost {
    /// The busiest link of a kind.
    pub fn load(&self, link: LinkKind) -> Option<&LinkLoad> {
        self.loads.iter().find(|load| load.link == link)
    }

    /// The rate that the busiest machine with a hub must carry so that the exchange fits into `seconds` of
    /// computation, in bits per second, both directions and all its interfaces together (PHub, table 2).
    /// `hub_interfaces` is the network's.
    pub fn hub_side_bits_per_second(&self, hub_interfaces: u32, seconds: f64) -> f64 {
        let of_machine = |load: &LinkLoad| {
            let interfaces = match load.link {
                LinkKind::HubInterface | LinkKind::ParentInterface => f64::from(hub_interfaces),
                LinkKind::SharedMachine => 1.0,
                LinkKind::Worker | LinkKind::Core => 0.0,
            };
            (load.sent_bytes + load.received_bytes) * interfaces
        };
        self.loads.iter().map(of_machine).fold(0.0, f64::max) * 8.0 / seconds
    }
}

impl CostModel {
    /// The arrangements that this job can have: with standbys only those of several hubs that sum for all racks.
    pub fn arrangements(&self) -> Vec<Arrangement> {
        let network = &self.network;
        let between_racks = if network.racks > 1 { &Arrangement::HIERARCHICAL[..] } else { &[] };
        let can_be = |arrangement: &&Arrangement| {
            network.replicas == 0 || arrangement.flat_hubs(network) > network.replicas
        };
        Arrangement::FLAT.iter().chain(between_racks).filter(can_be).copied().collect()
    }

    /// Bytes of sums that each hub sends to its standby, and gets as the standby of another.
    fn standby_bytes(&self, arrangement: Arrangement) -> f64 {
        let hubs = arrangement.flat_hubs(&self.network).max(1);
        f64::from(self.network.replicas) * self.network.model_bytes as f64 / f64::from(hubs)
    }

    /// The costs of one exchange.
    pub fn exchange(&self, arrangement: Arrangement) -> ExchangeCost {
        let mut loads = self.within_racks(arrangement);
        let mut core_bytes = 0.0;
        if let (true, Some(rate)) = (self.network.racks > 1, self.network.rates.core) {
            // As many bytes enter a rack as leave it: a gradient that leaves comes back as parameters, and
            // vice versa.
            let of_racks = (0..self.network.racks).map(|rack| self.out_of(rack, arrangement));
            let (busiest, all) =
                of_racks.fold((0.0, 0.0), |(most, all), bytes| (bytes.max(most), all + bytes));
            core_bytes = all;
            loads.push(LinkLoad::both_ways(LinkKind::Core, busiest, rate));
        }
        let slowest = loads
            .iter()
            .copied()
            .reduce(|slowest, load| if load.seconds > slowest.seconds { load } else { slowest })
            .expect("every arrangement has a link");
        ExchangeCost { arrangement, loads, core_bytes, seconds: slowest.seconds, limit: slowest.link }
    }

    fn within_racks(&self, arrangement: Arrangement) -> Vec<LinkLoad> {
        let network = &self.network;
        let (model, workers) = (network.model_bytes as f64, f64::from(network.workers));
        let worker = LinkLoad::both_ways(LinkKind::Worker, model, network.rates.worker);
        let beside = |bytes| LinkLoad::both_ways(LinkKind::SharedMachine, bytes, network.rates.worker);
        let hub = |link, bytes: f64| {
            LinkLoad::both_ways(link, bytes / f64::from(network.hub_interfaces), network.rates.hub)
        };
        match arrangement {
            // The only worker is beside the hub and needs no network.
            Arrangement::HubBesideOneWorker if network.workers == 1 => vec![beside(0.0)],
            Arrangement::HubBesideOneWorker => vec![worker, beside((workers - 1.0) * model)],
            // The machine sends its worker's gradients except those of its own part; its hub receives the
            // others' contributions to that part.
            Arrangement::HubBesideEveryWorker => {
                vec![beside(2.0 * (workers - 1.0) / workers * model + self.standby_bytes(arrangement))]
            }
            Arrangement::DedicatedHub => vec![worker, hub(LinkKind::HubInterface, workers * model)],
            Arrangement::DedicatedHubs => {
                let from_workers = workers * model / f64::from(network.hubs);
                vec![worker, hub(LinkKind::HubInterface, from_workers + self.standby_bytes(arrangement))]
            }
            Arrangement::Tree => {
                let below = f64::from(network.share(network.workers, 0));
                let racks = f64::from(network.racks);
                vec![
                    worker,
                    hub(LinkKind::HubInterface, (below + 1.0) * model),
                    hub(LinkKind::ParentInterface, racks * model),
                ]
            }
            Arrangement::Ring | Arrangement::Sharded => {
                let below = f64::from(network.share(network.workers, 0));
                vec![worker, hub(LinkKind::HubInterface, (below + self.between_hubs()) * model)]
            }
        }
    }

    /// Bytes that leave a rack.
    fn out_of(&self, rack: u32, arrangement: Arrangement) -> f64 {
        let network = &self.network;
        let model = network.model_bytes as f64;
        let workers = f64::from(network.workers);
        let here = f64::from(network.share(network.workers, rack));
        // `part` of the model is summed in this rack: the gradients of the rest leave, and so do the
        // parameters of the part.
        let flat = |part: f64| (here * (1.0 - part) + (workers - here) * part) * model;
        match arrangement {
            Arrangement::HubBesideOneWorker | Arrangement::DedicatedHub => flat(f64::from(rack == 0)),
            Arrangement::HubBesideEveryWorker => {
                flat(here / workers) + here.min(workers - here) * self.standby_bytes(arrangement)
            }
            Arrangement::DedicatedHubs => {
                let hubs = f64::from(network.hubs);
                let hubs_here = f64::from(network.share(network.hubs, rack));
                // As many standbys as can be are in other racks.
                let elsewhere = hubs_here.min(hubs - hubs_here);
                flat(hubs_here / hubs) + elsewhere * self.standby_bytes(arrangement)
            }
            Arrangement::Tree if rack == 0 => f64::from(network.racks - 1) * model,
            Arrangement::Tree => model,
            Arrangement::Ring | Arrangement::Sharded => self.between_hubs() * model,
        }
    }

    /// The amount that a rack hub sends to the others, in models: in a ring all parts but one, twice; in a
    /// sharded reduction its sums of the others' parts, and its own part to each of them.
    fn between_hubs(&self) -> f64 {
        let racks = f64::from(self.network.racks);
        2.0 * (racks - 1.0) / racks
    }
}
