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

/// Applies the condition where hubs serve several racks that have workers, each with a link of the rate `core` to the others.
///
/// Interfaces carry what their weights say, in Mbit/s; B_PBox is that of the weakest rack's hubs together, and a worker's link is
/// taken to carry as much as the weakest of their interfaces.
pub fn choose(hubs: &[(HubShape, Place)], workers: &[Place], core: Rate) -> Option<Choice> {
    let mut racks: BTreeMap<&str, (u64, u32)> = BTreeMap::new();
    let mut weakest = u32::MAX;
    for (hub, place) in hubs.iter().filter(|(_, place)| !place.rack.is_empty() && place.host.is_empty()) {
        racks.entry(&place.rack).or_default().0 += hub.weight();
        let weights = hub.interfaces.iter().map(|interface| interface.weight);
        weakest = weakest.min(weights.min().unwrap_or(u32::MAX));
    }
    for worker in workers {
        if let Some((_, workers)) = racks.get_mut(worker.rack.as_str()) {
            *workers += 1;
        }
    }
    racks.retain(|_, (_, workers)| *workers > 0);
    let mbit = |mbit: u64| Rate::from_bits_per_second(mbit as f64 * 1e6);
    let hub = racks.values().map(|&(mbit, _)| mbit).min()?;
    let rates = Rates { worker: mbit(weakest.into())?, hub: mbit(hub)?, core: Some(core) };
    let (workers, racks) = (racks.values().map(|(_, workers)| workers).sum(), racks.len() as u32);
    let network = Network { racks, hubs: racks, ..Network::new(BYTES, workers, rates) };
    let chosen = CostModel::new(network).ok()?.choose_reduction()?;
    let reduction = match chosen.chosen {
        Arrangement::Tree => Reduction::Tree,
        Arrangement::Ring => Reduction::Ring,
        Arrangement::Sharded => Reduction::Sharded,
        _ => Reduction::Flat,
    };
    Some(Choice { reduction, inequality: chosen.inequality })
}
