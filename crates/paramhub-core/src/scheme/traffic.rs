//! These functions compute the bytes of each scheme on the link of each machine, with the two directions
//! apart.

use serde::{Deserialize, Serialize};

use super::{Layer, Scheme};

/// The place where hubs run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum HubPlace {
    /// On machines that also have a worker: CC and CS.
    BesideWorkers,
    /// On machines of their own: NCC and NCS.
    Dedicated {
        /// The rate of all interfaces of one hub together, divided by that of a worker's link.
        width: f64,
    },
    /// At several sites, below or beside one another, which exchange only sums. The load of the hubs follows
    /// from how the sites reduce ([`cost`](crate::cost)), so only workers are counted here, and there are no
    /// factors.
    Sites,
}

/// Bytes per number on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ElementBytes {
    /// A gradient on the way to a hub.
    pub gradient: f64,
    /// A parameter on the way from a hub.
    pub parameter: f64,
    /// A factor.
    pub factor: f64,
}

impl ElementBytes {
    /// f32 everywhere.
    pub const F32: ElementBytes = ElementBytes { gradient: 4.0, parameter: 4.0, factor: 4.0 };
    /// Counts numbers instead of bytes, as the paper does.
    pub const NUMBERS: ElementBytes = ElementBytes { gradient: 1.0, parameter: 1.0, factor: 1.0 };
}

/// The workers and hubs that exchange, and the links between them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Cluster {
    /// The number of workers (Poseidon's P1).
    pub workers: u32,
    /// The number of machines over which the workers are spread as evenly as possible; the ranks of one
    /// machine share its link. The paper has one machine per worker.
    pub machines: u32,
    /// The number of hubs (Poseidon's P2); layers are spread evenly over them. There is at most one on each
    /// machine that has workers.
    pub hubs: u32,
    /// The place where the hubs run.
    pub place: HubPlace,
    /// The way in which numbers are encoded.
    pub encoding: ElementBytes,
}

/// The bytes on the link of one machine in a step; numbers where a [`Cluster`] counts
/// [numbers](ElementBytes::NUMBERS).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LinkBytes {
    /// Bytes that leave the machine.
    pub sent: f64,
    /// Bytes that enter it.
    pub received: f64,
}

impl LinkBytes {
    /// The busier direction: it determines how long a full-duplex link takes.
    pub fn busier(self) -> f64 {
        self.sent.max(self.received)
    }
}

/// The bytes that the exchange of one layer moves at the busiest machine of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Traffic {
    /// A machine with a worker and without a hub to which the layer goes; `None` if there is none.
    pub worker: Option<LinkBytes>,
    /// A machine with only a hub.
    pub hub: Option<LinkBytes>,
    /// A machine with both.
    pub both: Option<LinkBytes>,
}

impl Cluster {
    /// CS: a hub beside each worker, f32.
    pub fn beside_workers(workers: u32) -> Cluster {
        let place = HubPlace::BesideWorkers;
        Cluster { workers, machines: workers, hubs: workers, place, encoding: ElementBytes::F32 }
    }

    /// NCC: one hub with as many links as there are workers, f32.
    pub fn balanced_hub(workers: u32) -> Cluster {
        let place = HubPlace::Dedicated { width: f64::from(workers) };
        Cluster { workers, machines: workers, hubs: 1, place, encoding: ElementBytes::F32 }
    }

    /// Returns the bytes that a scheme moves at the machines; `None` if the scheme sends factors and the layer
    /// has none, or it sends factors to one of several sites.
    pub fn traffic(&self, layer: &Layer, scheme: Scheme) -> Option<Traffic> {
        if self.place == HubPlace::Sites {
            return self.traffic_at_sites(layer, scheme);
        }
        let (workers, hubs) = (f64::from(self.workers), f64::from(self.hubs));
        // Ranks of the fullest machine, and ranks of the other machines.
        let ranks_here = f64::from(self.ranks_of_fullest_machine());
        let others = workers - ranks_here;
        let ElementBytes { gradient, parameter, factor } = self.encoding;
        let numbers = layer.parameters() as f64;
        let (up, down) = (numbers * gradient, numbers * parameter);
        let factors = layer.factors().map(|factors| factors as f64 * factor);
        let is_dedicated = matches!(self.place, HubPlace::Dedicated { .. });
        let has_plain_workers = is_dedicated || self.hubs < self.machines;
        Some(match scheme {
            Scheme::Hub => Traffic {
                worker: has_plain_workers
                    .then_some(LinkBytes { sent: ranks_here * up, received: ranks_here * down }),
                hub: is_dedicated
                    .then_some(LinkBytes { sent: workers * down / hubs, received: workers * up / hubs }),
                // The machine sends as a worker to the other hubs, and as a hub to the other workers.
                both: (!is_dedicated).then_some(LinkBytes {
                    sent: ((hubs - 1.0) * ranks_here * up + others * down) / hubs,
                    received: ((hubs - 1.0) * ranks_here * down + others * up) / hubs,
                }),
            },
            Scheme::Factors => {
                let direction = Some(self.between_ranks(factors?));
                Traffic {
                    worker: direction.filter(|_| has_plain_workers),
                    hub: is_dedicated.then_some(LinkBytes::default()),
                    both: direction.filter(|_| !is_dedicated),
                }
            }
            Scheme::FactorsToHub => {
                let factors = factors?;
                let worker = LinkBytes { sent: ranks_here * factors, received: ranks_here * down };
                Traffic {
                    // A worker beside another hub is as busy as a worker without one.
                    worker: (has_plain_workers || self.hubs > 1).then_some(worker),
                    hub: is_dedicated
                        .then_some(LinkBytes { sent: workers * down, received: workers * factors }),
                    both: (!is_dedicated)
                        .then_some(LinkBytes { sent: others * down, received: others * factors }),
                }
            }
        })
    }

    fn traffic_at_sites(&self, layer: &Layer, scheme: Scheme) -> Option<Traffic> {
        let ElementBytes { gradient, parameter, factor } = self.encoding;
        let numbers = layer.parameters() as f64;
        let worker = match scheme {
            Scheme::Hub => LinkBytes { sent: numbers * gradient, received: numbers * parameter },
            Scheme::Factors => self.between_ranks(layer.factors()? as f64 * factor),
            Scheme::FactorsToHub => return None,
        };
        Some(Traffic { worker: Some(worker), hub: None, both: None })
    }

    /// Bytes of the fullest machine if each rank's factors, of so many bytes, go to each other machine once.
    fn between_ranks(&self, factors: f64) -> LinkBytes {
        let ranks_here = f64::from(self.ranks_of_fullest_machine());
        LinkBytes {
            sent: factors * ranks_here * f64::from(self.machines.saturating_sub(1)),
            received: factors * (f64::from(self.workers) - ranks_here),
        }
    }

    fn ranks_of_fullest_machine(&self) -> u32 {
        self.workers.div_ceil(self.machines.max(1))
    }

    /// Returns the bytes that a worker's link would carry while a scheme keeps the busiest link busy; `None` if
    /// [`Self::traffic`] is `None`.
    pub fn cost(&self, layer: &Layer, scheme: Scheme) -> Option<f64> {
        self.traffic(layer, scheme).map(|traffic| self.busiest(&traffic))
    }

    /// Returns the bytes that a worker's link would carry while the busiest link is busy.
    pub fn busiest(&self, traffic: &Traffic) -> f64 {
        let width = match self.place {
            HubPlace::BesideWorkers | HubPlace::Sites => 1.0,
            HubPlace::Dedicated { width } => width,
        };
        let busier = |direction: Option<LinkBytes>| direction.map_or(0.0, LinkBytes::busier);
        busier(traffic.worker).max(busier(traffic.hub) / width).max(busier(traffic.both))
    }

    /// Poseidon's BestScheme (algorithm 1), extended: the cheaper of the hub and factors between workers, and the
    /// hub if both cost the same.
    ///
    /// Factors to a hub are not considered: a layer then has one hub, and all wait for the hub with the
    /// largest layer.
    pub fn best_scheme(&self, layer: &Layer) -> Scheme {
        let hub = self.cost(layer, Scheme::Hub).unwrap_or(0.0);
        match self.cost(layer, Scheme::Factors) {
            Some(factors) if factors < hub => Scheme::Factors,
            _ => Scheme::Hub,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::published::FullyConnectedLayer;
    use super::*;

    fn both_ways(direction: Option<LinkBytes>) -> Option<f64> {
        direction.map(|direction| direction.sent + direction.received)
    }

    /// The published counts are our counts, with both directions together and in numbers.
    #[test]
    fn beside_workers_it_is_table_1() {
        for (m, n, k, workers) in
            [(4096, 4096, 32, 8), (1000, 1024, 128, 16), (21841, 4096, 32, 32), (10, 64, 100, 2)]
        {
            let layer = Layer::fully_connected("fc", m, n, k);
            let cluster = Cluster { encoding: ElementBytes::NUMBERS, ..Cluster::beside_workers(workers) };
            let problem = FullyConnectedLayer {
                m: m as f64,
                n: n as f64,
                k: k as f64,
                workers: workers.into(),
                servers: workers.into(),
            };
            let both = |scheme| both_ways(cluster.traffic(&layer, scheme).unwrap().both);
            assert_eq!(both(Scheme::Hub), problem.parameter_server().both);
            assert_eq!(both(Scheme::Factors), Some(problem.sufficient_factors().worker));
            assert_eq!(both(Scheme::FactorsToHub), problem.adam().both);
            assert_eq!(cluster.best_scheme(&layer), problem.best_scheme(), "{m} x {n}, {k}, {workers}");
        }
    }

    #[test]
    fn dedicated_hubs_are_table_1_as_well() {
        let layer = Layer::fully_connected("fc", 300, 200, 8);
        let cluster = Cluster {
            workers: 6,
            machines: 6,
            hubs: 3,
            place: HubPlace::Dedicated { width: 1.0 },
            encoding: ElementBytes::NUMBERS,
        };
        let problem = FullyConnectedLayer { m: 300.0, n: 200.0, k: 8.0, workers: 6.0, servers: 3.0 };
        for (scheme, published) in
            [(Scheme::Hub, problem.parameter_server()), (Scheme::FactorsToHub, problem.adam())]
        {
            let traffic = cluster.traffic(&layer, scheme).unwrap();
            assert_eq!(both_ways(traffic.worker), Some(published.worker));
            assert_eq!((both_ways(traffic.hub), traffic.both), (published.server, None));
        }
        let factors = cluster.traffic(&layer, Scheme::Factors).unwrap();
        assert_eq!(both_ways(factors.worker), Some(problem.sufficient_factors().worker));
        assert_eq!(factors.hub, Some(LinkBytes::default()));
    }

    /// A hub that is as wide as its workers together costs no more than a worker's own link, so factors must
    /// be smaller to pay.
    #[test]
    fn a_balanced_hub_needs_smaller_factors() {
        let layer = Layer::fully_connected("fc", 1000, 1000, 50);
        // Per direction: 7 * 50 * 2000 = 0.7 million, against 1.75 million beside workers and 1 million here.
        assert_eq!(Cluster::beside_workers(8).best_scheme(&layer), Scheme::Factors);
        assert_eq!(Cluster::balanced_hub(8).best_scheme(&layer), Scheme::Factors);
        let more = layer.with_samples(100);
        assert_eq!(Cluster::beside_workers(8).best_scheme(&more), Scheme::Factors);
        assert_eq!(Cluster::balanced_hub(8).best_scheme(&more), Scheme::Hub);
        let narrow = Cluster { place: HubPlace::Dedicated { width: 1.0 }, ..Cluster::balanced_hub(8) };
        assert_eq!(narrow.best_scheme(&more), Scheme::Factors);
    }

    /// Ranks of one machine share its link: gradients cross it once for each rank, factors once for each
    /// other machine.
    #[test]
    fn ranks_of_one_machine_send_their_factors_once_to_each_other() {
        let layer = Layer::fully_connected("fc", 1000, 1000, 50);
        let spread = Cluster { encoding: ElementBytes::NUMBERS, ..Cluster::beside_workers(8) };
        let together = Cluster { machines: 2, hubs: 2, ..spread };
        let factors = 50.0 * 2000.0;
        let each_way = |numbers| Some(LinkBytes { sent: numbers, received: numbers });
        assert_eq!(spread.traffic(&layer, Scheme::Factors).unwrap().both, each_way(7.0 * factors));
        assert_eq!(together.traffic(&layer, Scheme::Factors).unwrap().both, each_way(4.0 * factors));
        // Four gradients go to the other hub and four come to this one; as many parameters go back.
        assert_eq!(together.traffic(&layer, Scheme::Hub).unwrap().both, each_way(4e6));
        let dedicated = Cluster { place: HubPlace::Dedicated { width: 8.0 }, hubs: 1, ..together };
        assert_eq!(dedicated.traffic(&layer, Scheme::Hub).unwrap().worker, each_way(4e6));
        assert_eq!(dedicated.traffic(&layer, Scheme::Factors).unwrap().worker, each_way(4.0 * factors));
        let uneven = Cluster { workers: 7, ..together };
        let fullest = LinkBytes { sent: 4.0 * factors, received: 3.0 * factors };
        assert_eq!(uneven.traffic(&layer, Scheme::Factors).unwrap().both, Some(fullest));
    }

    #[test]
    fn half_precision_moves_the_choice() {
        let layer = Layer::fully_connected("fc", 1000, 1000, 90);
        let cluster = Cluster::balanced_hub(8);
        assert_eq!(cluster.best_scheme(&layer), Scheme::Hub);
        let encoding = ElementBytes { factor: 2.0, ..ElementBytes::F32 };
        assert_eq!(Cluster { encoding, ..cluster }.best_scheme(&layer), Scheme::Factors);
    }

    #[test]
    fn a_layer_without_factors_goes_to_the_hub() {
        let layer = Layer::other("conv", 1_000_000);
        for cluster in [Cluster::beside_workers(2), Cluster::balanced_hub(2)] {
            assert_eq!(cluster.best_scheme(&layer), Scheme::Hub);
            assert_eq!(cluster.traffic(&layer, Scheme::Factors), None);
            assert_eq!(cluster.cost(&layer, Scheme::FactorsToHub), None);
        }
    }

    #[test]
    fn one_worker_alone_sends_nothing_beside_its_hub() {
        let layer = Layer::fully_connected("fc", 100, 100, 1);
        assert_eq!(Cluster::beside_workers(1).cost(&layer, Scheme::Hub), Some(0.0));
        assert_eq!(Cluster::beside_workers(1).best_scheme(&layer), Scheme::Hub);
    }
}
