//! This decides whether racks should sum within themselves first: PHub's condition (section 3.4), with the
//! rates that hubs, workers and the operator state.

use std::collections::BTreeMap;
use std::fmt;

use super::{Place, Reduction};
use crate::cost::{Arrangement, CostModel, Inequality, Network, Rate, Rates};
use crate::placement::HubShape;

/// Bytes for which both sides of the condition are reported; the condition is the same for any model.
const BYTES: u64 = 1_000_000;

/// The reduction that [`Reduction::Auto`] chooses, and the reason.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// [`Reduction::Flat`] or a hierarchical one.
    pub reduction: Reduction,
    /// Both sides of the condition for a megabyte of gradients.
    pub inequality: Inequality,
    /// The rate of all hubs of the weakest rack together.
    pub hub: Rate,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inequality { flat_s, rack_s, between_racks_s } = self.inequality;
        let sign = if self.inequality.holds() { '>' } else { '<' };
        write!(
            f,
            "a megabyte takes {:.2} ms through the core, flat, {sign} {:.2} ms = {:.2} ms within a rack + {:.2} ms between \
             racks: {}",
            flat_s * 1e3,
            self.inequality.hierarchical_s() * 1e3,
            rack_s * 1e3,
            between_racks_s * 1e3,
            self.reduction
        )
    }
}

/// A rack that has hubs and workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServedRack<'a> {
    /// The rack's name.
    pub name: &'a str,
    /// The rate of all interfaces of its hubs together, by their weights.
    pub mbit: u64,
    /// Number of its workers.
    pub workers: u32,
}

/// The racks that have both hubs and workers, by name.
pub fn served_racks<'a>(hubs: &'a [(HubShape, Place)], workers: &[Place]) -> Vec<ServedRack<'a>> {
    let mut racks: BTreeMap<&str, ServedRack> = BTreeMap::new();
    for (hub, place) in of_racks(hubs) {
        let name = place.rack.as_str();
        racks.entry(name).or_insert(ServedRack { name, mbit: 0, workers: 0 }).mbit += hub.weight();
    }
    for worker in workers {
        if let Some(rack) = racks.get_mut(worker.rack.as_str()) {
            rack.workers += 1;
        }
    }
    racks.into_values().filter(|rack| rack.workers > 0).collect()
}

/// Applies the condition if hubs serve several racks with workers, each rack with a link of the rate `core`
/// to the others.
///
/// The weight of an interface is its rate in Mbit/s. B_PBox is the rate of all hubs of the weakest rack
/// together. A worker's link is assumed to have the rate of the weakest interface of a hub.
pub fn choose(hubs: &[(HubShape, Place)], workers: &[Place], core: Rate) -> Option<Choice> {
    let racks = served_racks(hubs, workers);
    let weights = of_racks(hubs).flat_map(|(hub, _)| &hub.interfaces).map(|interface| interface.weight);
    let mbit = |mbit: u64| Rate::from_bits_per_second(mbit as f64 * 1e6);
    let hub = mbit(racks.iter().map(|rack| rack.mbit).min()?)?;
    let rates = Rates { worker: mbit(weights.min()?.into())?, hub, core: Some(core) };
    let (workers, racks) = (racks.iter().map(|rack| rack.workers).sum(), racks.len() as u32);
    let network = Network { racks, hubs: racks, ..Network::new(BYTES, workers, rates) };
    let chosen = CostModel::new(network).ok()?.choose_reduction()?;
    let reduction = match chosen.chosen {
        Arrangement::Tree => Reduction::Tree,
        Arrangement::Ring => Reduction::Ring,
        Arrangement::Sharded => Reduction::Sharded,
        _ => Reduction::Flat,
    };
    Some(Choice { reduction, inequality: chosen.inequality, hub })
}

/// The hubs that serve racks.
fn of_racks(hubs: &[(HubShape, Place)]) -> impl Iterator<Item = &(HubShape, Place)> {
    hubs.iter().filter(|(_, place)| !place.rack.is_empty() && place.host.is_empty())
}
