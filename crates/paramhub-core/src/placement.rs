//! This module decides which hub, interface and core owns each chunk (PHub section 3.2.4). Both ends
//! compute the same placement.
//!
//! At each level (hubs, then interfaces, then cores) chunks go longest first to the bin that is least loaded
//! for its weight. This is longest processing time first, the 4/3 approximation of the best partition.

mod spread;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::chunk::{ChunkId, ChunkMap};
use crate::key::KeyTable;
use crate::limits::{CORES_MAX, HUBS_MAX, INTERFACES_MAX, ROUTES_MAX};

pub use spread::Spread;

/// The resources of a hub: its interfaces, and the cores that serve each of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct HubShape {
    /// The interfaces in the order in which the placement counts them; at least one.
    pub interfaces: Vec<InterfaceShape>,
    /// The abstract Unix socket at which workers of the hub's own host may open streams over shared memory;
    /// `None` if the hub offers none. The name cannot be guessed, so a worker that can connect to it is on
    /// that host, whatever the addresses are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<String>,
    /// The address at which other hubs reach this one, as `host:port`, where they have a link of their own; `None` if they take
    /// the interfaces. Hubs that cannot reach it take the interfaces, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub between_hubs: Option<String>,
}

/// One address a hub listens on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct InterfaceShape {
    /// The address that workers dial, as `host:port`.
    pub address: String,
    /// Cores that serve this interface, numbered within the hub; at least one.
    pub cores: Vec<u16>,
    /// Share of the load relative to the others, for interfaces of different rates; at least 1.
    pub weight: u32,
}

/// The reason why a hub's shape cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ShapeError {
    /// No hub at all, or too many.
    #[error("a job needs 1 to {HUBS_MAX} hubs, not {0}")]
    Hubs(usize),
    /// A hub without interfaces, or with too many.
    #[error("hub {hub} offers {interfaces} interfaces: 1 to {INTERFACES_MAX} are possible")]
    Interfaces {
        /// Position of the hub.
        hub: usize,
        /// Interfaces found.
        interfaces: usize,
    },
    /// An interface without cores, with too many or repeated ones, or without weight.
    #[error(
        "interface {address} of hub {hub} needs 1 to {CORES_MAX} distinct cores and a weight of at least 1"
    )]
    Interface {
        /// Position of the hub.
        hub: usize,
        /// The interface.
        address: String,
    },
    /// More routes than a frame can number.
    #[error("the hubs offer {0} pairs of interface and core, more than {ROUTES_MAX}")]
    Routes(usize),
}

/// One core, reached through one interface of one hub. A worker keeps one stream per route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Route {
    /// Position of the hub among the job's hubs.
    pub hub: u16,
    /// Position of the interface in its hub.
    pub interface: u16,
    /// Core number within the hub.
    pub core: u16,
}

/// Largest load divided by mean load at each level, with weights; 1.0 if the load is even.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Imbalance {
    /// Between hubs.
    pub hubs: f64,
    /// Between the interfaces of one hub, the worst hub.
    pub interfaces: f64,
    /// Between the cores of one interface, the worst interface.
    pub cores: f64,
}

/// Position of a route among the job's routes.
pub type RouteId = u16;

/// The placement of all chunks of a job.
#[derive(Clone, Debug)]
pub struct Placement {
    routes: Vec<Route>,
    /// The route of each chunk.
    route_of: Vec<RouteId>,
    /// The slot of each chunk: its position among the chunks of its route.
    slot_of: Vec<u32>,
    /// The chunks of each route, most urgent first. A chunk's index here is its slot.
    chunks_of: Vec<Vec<ChunkId>>,
    imbalance: Imbalance,
    hash: blake3::Hash,
}

impl Placement {
    /// Places each chunk of `map`, which must have been cut from `table`.
    pub fn new(table: &KeyTable, map: &ChunkMap, hubs: &[HubShape]) -> Result<Self, ShapeError> {
        Placement::planned(table, map, hubs, &[])
    }

    /// Does the same as [`Self::new`], but keys are dealt as a [`Plan`](crate::scheme::Plan) requires.
    /// `spreads` has one entry per key, or none if each chunk is dealt by itself.
    pub fn planned(
        table: &KeyTable,
        map: &ChunkMap,
        hubs: &[HubShape],
        spreads: &[Spread],
    ) -> Result<Self, ShapeError> {
        debug_assert!(spreads.is_empty() || spreads.len() == table.len(), "one entry a key");
        check_shapes(hubs)?;
        let routes: Vec<Route> = routes_of(hubs).collect();
        if routes.len() > ROUTES_MAX {
            return Err(ShapeError::Routes(routes.len()));
        }
        let route_of = assign_routes(table, map, hubs, &routes, spreads);

        let mut chunks_of = vec![Vec::new(); routes.len()];
        let mut slot_of = vec![0; map.len() as usize];
        for key in table.by_urgency() {
            for chunk in map.chunks_of(key as u32) {
                let chunks: &mut Vec<ChunkId> = &mut chunks_of[usize::from(route_of[chunk as usize])];
                slot_of[chunk as usize] = chunks.len() as u32;
                chunks.push(chunk);
            }
        }
        let imbalance = measure_imbalance(&spread::exchanged_sizes(map, spreads), hubs, &routes, &chunks_of);
        let hash = digest(table, map, hubs, &route_of, spreads);
        Ok(Placement { routes, route_of, slot_of, chunks_of, imbalance, hash })
    }

    /// All routes, ordered by hub, interface and core; some may carry no chunk.
    pub fn routes(&self) -> &[Route] {
        &self.routes
    }

    /// The route of a chunk and its slot there; `None` beyond the last chunk.
    pub fn locate(&self, chunk: ChunkId) -> Option<(RouteId, u32)> {
        let index = chunk as usize;
        Some((*self.route_of.get(index)?, self.slot_of[index]))
    }

    /// The chunks of a route, most urgent first. The index is the slot.
    pub fn chunks(&self, route: RouteId) -> &[ChunkId] {
        &self.chunks_of[usize::from(route)]
    }

    /// The hubs that have no chunks, by their positions.
    pub fn empty_hubs(&self) -> Vec<u16> {
        let carries = |(route, _): &(RouteId, &Route)| !self.chunks(*route).is_empty();
        let with_chunks = || (0..).zip(&self.routes).filter(carries).map(|(_, route)| route.hub);
        let hubs = self.routes.iter().map(|route| route.hub + 1).max().unwrap_or(0);
        (0..hubs).filter(|&hub| !with_chunks().any(|other| other == hub)).collect()
    }

    /// The route by whose streams ranks exchange their [program states](crate::program_states): the first that carries
    /// chunks. `None` if none does.
    pub fn program_state_route(&self) -> Option<RouteId> {
        self.chunks_of.iter().position(|chunks| !chunks.is_empty()).map(|route| route as RouteId)
    }

    /// The imbalance of the placement at each level.
    pub fn imbalance(&self) -> Imbalance {
        self.imbalance
    }

    /// Digest of everything that both ends must share to understand each other's frames.
    pub fn hash(&self) -> blake3::Hash {
        self.hash
    }
}

fn check_shapes(hubs: &[HubShape]) -> Result<(), ShapeError> {
    if hubs.is_empty() || hubs.len() > HUBS_MAX {
        return Err(ShapeError::Hubs(hubs.len()));
    }
    for (hub, shape) in hubs.iter().enumerate() {
        shape.check(hub)?;
    }
    Ok(())
}

impl HubShape {
    /// Checks one hub's shape; `hub` is its position, for the message.
    pub fn check(&self, hub: usize) -> Result<(), ShapeError> {
        let interfaces = self.interfaces.len();
        if interfaces == 0 || interfaces > INTERFACES_MAX {
            return Err(ShapeError::Interfaces { hub, interfaces });
        }
        for interface in &self.interfaces {
            let mut cores = interface.cores.clone();
            cores.sort_unstable();
            cores.dedup();
            let distinct = cores.len() == interface.cores.len();
            if cores.is_empty() || cores.len() > CORES_MAX || !distinct || interface.weight == 0 {
                return Err(ShapeError::Interface { hub, address: interface.address.clone() });
            }
        }
        Ok(())
    }

    /// Share of the load relative to other hubs: the sum over its interfaces.
    pub fn weight(&self) -> u64 {
        self.interfaces.iter().map(|interface| u64::from(interface.weight)).sum()
    }
}

fn routes_of(hubs: &[HubShape]) -> impl Iterator<Item = Route> + '_ {
    hubs.iter().enumerate().flat_map(|(hub, shape)| {
        shape.interfaces.iter().enumerate().flat_map(move |(interface, offered)| {
            offered.cores.iter().map(move |&core| Route {
                hub: hub as u16,
                interface: interface as u16,
                core,
            })
        })
    })
}

/// All chunks, longest first.
fn sorted(table: &KeyTable, map: &ChunkMap, sizes: &[u32]) -> Vec<ChunkId> {
    let mut chunks: Vec<ChunkId> =
        table.by_urgency().into_iter().flat_map(|key| map.chunks_of(key as u32)).collect();
    // The sort is stable, so chunks of one size, which are nearly all chunks, are dealt in order of urgency,
    // and each route gets its share of each key.
    chunks.sort_by_key(|&chunk| std::cmp::Reverse(sizes[chunk as usize]));
    chunks
}

/// Deals all chunks, longest first, to bins of the given weights.
pub(crate) fn deal(table: &KeyTable, map: &ChunkMap, weights: &[u64]) -> Vec<Vec<ChunkId>> {
    let sizes = sizes_of(map);
    longest_first(&sorted(table, map, &sizes), &sizes, weights)
}

fn assign_routes(
    table: &KeyTable,
    map: &ChunkMap,
    hubs: &[HubShape],
    routes: &[Route],
    spreads: &[Spread],
) -> Vec<RouteId> {
    let sizes = sizes_of(map);
    let hub_weights: Vec<u64> = hubs.iter().map(HubShape::weight).collect();
    let to_deal = spread::ChunksToDeal::new(table, map, &sizes, spreads);
    let mut route_of = vec![0; sizes.len()];
    let deal = |chunks: &[ChunkId], weights: &[u64]| spread::deal(chunks, map, &sizes, spreads, weights);
    for chunks in [to_deal.exchanged, to_deal.aside] {
        let mut next_route = 0;
        for (hub, chunks) in hubs.iter().zip(deal(&chunks, &hub_weights)) {
            let weights: Vec<u64> =
                hub.interfaces.iter().map(|interface| u64::from(interface.weight)).collect();
            for (interface, chunks) in hub.interfaces.iter().zip(deal(&chunks, &weights)) {
                for chunks in deal(&chunks, &vec![1; interface.cores.len()]) {
                    for chunk in chunks {
                        route_of[chunk as usize] = next_route as RouteId;
                    }
                    next_route += 1;
                }
            }
        }
        debug_assert_eq!(next_route, routes.len());
    }
    route_of
}

fn sizes_of(map: &ChunkMap) -> Vec<u32> {
    let mut sizes = vec![map.chunk_elements(); map.len() as usize];
    for key in 0..map.keys() as u32 {
        let last = map.chunks_of(key).end - 1;
        sizes[last as usize] = map.extent(last).expect("a key's last chunk is in the map").elements;
    }
    sizes
}

/// Deals `chunks`, which come longest first, to bins of the given weights.
fn longest_first(chunks: &[ChunkId], sizes: &[u32], weights: &[u64]) -> Vec<Vec<ChunkId>> {
    let mut dealt = vec![Vec::with_capacity(chunks.len() / weights.len() + 1); weights.len()];
    let lengths = chunks.iter().map(|&chunk| u64::from(sizes[chunk as usize]));
    for (bin, &chunk) in bins(lengths, weights).into_iter().zip(chunks) {
        dealt[bin].push(chunk);
    }
    dealt
}

/// The bin of each of these lengths, which descend: the bin that is least loaded for its weight afterwards;
/// the first one on a tie.
fn bins(lengths: impl Iterator<Item = u64>, weights: &[u64]) -> Vec<usize> {
    let mut loads = vec![0u64; weights.len()];
    let bin_of = |length: u64| {
        let lighter = |a: usize, b: usize| {
            u128::from(loads[a] + length) * u128::from(weights[b])
                < u128::from(loads[b] + length) * u128::from(weights[a])
        };
        let bin = (1..weights.len()).fold(0, |best, bin| if lighter(bin, best) { bin } else { best });
        loads[bin] += length;
        bin
    };
    lengths.map(bin_of).collect()
}

fn measure_imbalance(
    sizes: &[u32],
    hubs: &[HubShape],
    routes: &[Route],
    chunks_of: &[Vec<ChunkId>],
) -> Imbalance {
    let load = |wanted: &dyn Fn(&Route) -> bool| -> u64 {
        let of_wanted = routes.iter().zip(chunks_of).filter(|(route, _)| wanted(route));
        of_wanted.flat_map(|(_, chunks)| chunks).map(|&chunk| u64::from(sizes[chunk as usize])).sum()
    };
    let mut imbalance = Imbalance { hubs: 1.0, interfaces: 1.0, cores: 1.0 };
    let mut hub_loads = Vec::new();
    for (h, hub) in hubs.iter().enumerate() {
        let mut interface_loads = Vec::new();
        for (i, interface) in hub.interfaces.iter().enumerate() {
            let here = |route: &Route| usize::from(route.hub) == h && usize::from(route.interface) == i;
            let core_loads: Vec<(u64, u64)> = interface
                .cores
                .iter()
                .map(|&core| (load(&|route| here(route) && route.core == core), 1))
                .collect();
            imbalance.cores = imbalance.cores.max(peak_over_mean(&core_loads));
            interface_loads
                .push((core_loads.iter().map(|(load, _)| load).sum(), u64::from(interface.weight)));
        }
        imbalance.interfaces = imbalance.interfaces.max(peak_over_mean(&interface_loads));
        hub_loads.push((interface_loads.iter().map(|(load, _)| load).sum(), hub.weight()));
    }
    imbalance.hubs = peak_over_mean(&hub_loads);
    imbalance
}

/// Largest load per weight divided by total load per total weight, for pairs of load and weight.
fn peak_over_mean(bins: &[(u64, u64)]) -> f64 {
    let load: u64 = bins.iter().map(|bin| bin.0).sum();
    let weight: u64 = bins.iter().map(|bin| bin.1).sum();
    if load == 0 {
        return 1.0;
    }
    let peak = bins.iter().map(|&(load, weight)| load as f64 / weight as f64).fold(0.0, f64::max);
    peak / (load as f64 / weight as f64)
}

fn digest(
    table: &KeyTable,
    map: &ChunkMap,
    hubs: &[HubShape],
    route_of: &[RouteId],
    spreads: &[Spread],
) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_derive_key("paramhub placement v1");
    hasher.update(table.digest().as_bytes()).update(&map.chunk_elements().to_le_bytes());
    for hub in hubs {
        hasher.update(&(hub.interfaces.len() as u64).to_le_bytes());
        for interface in &hub.interfaces {
            hasher.update(&(interface.cores.len() as u64).to_le_bytes());
            interface.cores.iter().for_each(|core| {
                hasher.update(&core.to_le_bytes());
            });
        }
    }
    for route in route_of {
        hasher.update(&route.to_le_bytes());
    }
    spread::digest(&mut hasher, spreads);
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Key;
    use proptest::prelude::*;

    fn table(sizes: &[u64]) -> KeyTable {
        KeyTable::new(sizes.iter().enumerate().map(|(i, &n)| Key::new(format!("k{i}"), [n])).collect())
            .unwrap()
    }

    fn hub(interfaces: &[(&[u16], u32)]) -> HubShape {
        let interface = |&(cores, weight): &(&[u16], u32)| InterfaceShape {
            address: "127.0.0.1:1".into(),
            cores: cores.to_vec(),
            weight,
        };
        HubShape { interfaces: interfaces.iter().map(interface).collect(), local: None, between_hubs: None }
    }

    fn place(sizes: &[u64], chunk_bytes: u32, hubs: &[HubShape]) -> (ChunkMap, Placement) {
        let table = table(sizes);
        let map = ChunkMap::new(&table, chunk_bytes).unwrap();
        let placement = Placement::new(&table, &map, hubs).unwrap();
        (map, placement)
    }

    /// The smallest possible peak, found by trying every assignment.
    fn best_peak(sizes: &[u64], bins: usize) -> u64 {
        fn search(sizes: &[u64], loads: &mut [u64]) -> u64 {
            let Some((&size, rest)) = sizes.split_first() else {
                return *loads.iter().max().unwrap();
            };
            (0..loads.len())
                .map(|bin| {
                    loads[bin] += size;
                    let peak = search(rest, loads);
                    loads[bin] -= size;
                    peak
                })
                .min()
                .unwrap()
        }
        search(sizes, &mut vec![0; bins])
    }

    #[test]
    fn shapes_that_cannot_serve_are_refused() {
        let (table, none) = (table(&[1]), HubShape { interfaces: vec![], local: None, between_hubs: None });
        let map = ChunkMap::new(&table, 4096).unwrap();
        let refused = |hubs: &[HubShape]| Placement::new(&table, &map, hubs).unwrap_err();
        assert_eq!(refused(&[]), ShapeError::Hubs(0));
        assert_eq!(refused(&[none]), ShapeError::Interfaces { hub: 0, interfaces: 0 });
        assert!(matches!(refused(&[hub(&[(&[], 1)])]), ShapeError::Interface { .. }));
        assert!(matches!(refused(&[hub(&[(&[0, 0], 1)])]), ShapeError::Interface { .. }));
        assert!(matches!(refused(&[hub(&[(&[0], 0)])]), ShapeError::Interface { .. }));
    }

    #[test]
    fn slots_follow_urgency() {
        let mut keys = vec![Key::new("front", [3000]), Key::new("head", [3000])];
        keys[1].priority = 1;
        let table = KeyTable::new(keys).unwrap();
        let map = ChunkMap::new(&table, 4096).unwrap();
        let placement = Placement::new(&table, &map, &[hub(&[(&[0], 1)])]).unwrap();
        assert_eq!(placement.chunks(0), [3, 4, 5, 0, 1, 2]);
        assert_eq!(placement.locate(0), Some((0, 3)));
        assert_eq!(placement.locate(6), None);
    }

    #[test]
    fn program_states_go_by_the_first_route_that_carries_chunks() {
        let (_, placement) = place(&[8], 1024, &[hub(&[(&[0, 1], 1)]), hub(&[(&[0], 1)])]);
        let carrying: Vec<RouteId> = (0..3).filter(|&route| !placement.chunks(route).is_empty()).collect();
        assert_eq!(carrying.len(), 1);
        assert_eq!(placement.program_state_route(), Some(carrying[0]));
    }

    #[test]
    fn a_large_key_is_spread_over_every_core() {
        let (_, placement) = place(&[1 << 20], 32 << 10, &[hub(&[(&[0, 1, 2], 1)])]);
        let counts: Vec<usize> = (0..3).map(|route| placement.chunks(route).len()).collect();
        assert_eq!(counts, [43, 43, 42]);
    }

    #[test]
    fn the_hash_distinguishes_placements() {
        let one = place(&[100_000], 4096, &[hub(&[(&[0], 1)])]).1.hash();
        assert_eq!(one, place(&[100_000], 4096, &[hub(&[(&[0], 1)])]).1.hash());
        assert_ne!(one, place(&[100_000], 8192, &[hub(&[(&[0], 1)])]).1.hash());
        assert_ne!(one, place(&[100_000], 4096, &[hub(&[(&[0, 1], 1)])]).1.hash());
        assert_ne!(one, place(&[100_001], 4096, &[hub(&[(&[0], 1)])]).1.hash());
    }

    #[test]
    fn unlike_interfaces_get_proportional_shares() {
        let (_, placement) = place(&[1 << 22], 4096, &[hub(&[(&[0], 3), (&[1], 1)])]);
        assert_eq!([placement.chunks(0).len(), placement.chunks(1).len()], [3072, 1024]);
        assert!((placement.imbalance().interfaces - 1.0).abs() < 1e-9);
    }

    #[test]
    fn longest_first_stays_within_four_thirds_of_the_best_partition() {
        let runner_config = ProptestConfig { cases: 200, ..ProptestConfig::default() };
        proptest!(runner_config, |(mut sizes in prop::collection::vec(1u64..500, 1..9), bins in 1usize..4)| {
            sizes.sort_unstable_by_key(|&size| std::cmp::Reverse(size));
            let chunks: Vec<ChunkId> = (0..sizes.len() as u32).collect();
            let small: Vec<u32> = sizes.iter().map(|&size| size as u32).collect();
            let dealt = longest_first(&chunks, &small, &vec![1; bins]);
            let peak = dealt.iter().map(|bin| bin.iter().map(|&c| sizes[c as usize]).sum::<u64>()).max().unwrap();
            prop_assert!(3 * peak <= 4 * best_peak(&sizes, bins));
        });
    }

    proptest! {
        #[test]
        fn every_chunk_has_one_place(
            sizes in prop::collection::vec(1u64..60_000, 1..30),
            chunk_bytes in prop::sample::select(vec![1024u32, 4096, 32 << 10]),
            cores in 1u16..5,
            interfaces in 1usize..4,
            hubs in 1usize..4,
        ) {
            let cores: Vec<u16> = (0..cores).collect();
            let shapes = vec![hub(&vec![(&cores[..], 1); interfaces]); hubs];
            let (map, placement) = place(&sizes, chunk_bytes, &shapes);
            let mut seen = vec![0; map.len() as usize];
            for route in 0..placement.routes().len() as RouteId {
                for (slot, &chunk) in placement.chunks(route).iter().enumerate() {
                    seen[chunk as usize] += 1;
                    prop_assert_eq!(placement.locate(chunk), Some((route, slot as u32)));
                }
            }
            prop_assert!(seen.iter().all(|&times| times == 1));
        }
    }
}
