//! Whether racks should sum within themselves first: PHub's condition (section 3.4) on what hubs, workers and operator say.

use std::collections::BTreeMap;
use std::fmt;

use super::{Place, Reduction};
use crate::cost::{Arrangement, CostModel, Inequality, Network, Rate, Rates};
use crate::placement::HubShape;

/// Bytes of which both sides are told: the condition is the same for any model.
const BYTES: u64 = 1_000_000;

/// What [`Reduction::Auto`] takes, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// [`Reduction::Flat`] or a hierarchical one.
    pub reduction: Reduction,
    /// For a megabyte of gradients.
    pub inequality: Inequality,
    /// Of all hubs of the weakest rack together.
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

/// A rack that hubs serve and workers are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServedRack<'a> {
    /// Its name.
    pub name: &'a str,
    /// What the interfaces of its hubs carry together, by their weights.
    pub mbit: u64,
    /// How many there are.
    pub workers: u32,
}

/// The racks that both hubs and workers are in, by name.
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

/// Applies the condition where hubs serve several racks that have workers, each with a link of the rate `core` to the others.
///
/// Interfaces carry what their weights say, in Mbit/s; B_PBox is that of the weakest rack's hubs together, and a worker's link is
/// taken to carry as much as the weakest of their interfaces.
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

/// Hubs that serve racks.
fn of_racks(hubs: &[(HubShape, Place)]) -> impl Iterator<Item = &(HubShape, Place)> {
    hubs.iter().filter(|(_, place)| !place.rack.is_empty() && place.host.is_empty())
}
