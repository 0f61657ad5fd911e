//! Which hub serves each share of a job's chunks, and which hub is its standby.
//!
//! The placement deals the chunks of a job to its hubs. The chunks of one hub are a *share*, which has the number of that
//! hub. In a job with replicas two hubs have each share: one serves it, the other is its *standby* and makes the same
//! updates from the same sums. A sum is acknowledged by the standby before any worker gets an answer that is made of it.
//! So the standby is never behind an answer, and can take over when the first hub is lost.
//!
//! The connection manager alone decides which hub serves a share. It saves that before hubs hear of it.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::placement::{HubShape, Route};

/// The hubs of one share, by their positions among the hubs of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Share {
    /// The hub that exchanges with the workers.
    pub served_by: u16,
    /// The hub that follows it; absent once one of the two is lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby: Option<u16>,
}

/// What a hub is for a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It exchanges with the workers, and has a standby or not.
    Serves {
        /// Whether sums go to a standby first.
        has_standby: bool,
    },
    /// It is the standby.
    StandsBy,
    /// Neither.
    None,
}

impl Share {
    /// What the hub at this position is for the share.
    pub fn role(&self, hub: u16) -> Role {
        match *self {
            Share { served_by, standby } if served_by == hub => {
                Role::Serves { has_standby: standby.is_some() }
            }
            Share { standby, .. } if standby == Some(hub) => Role::StandsBy,
            _ => Role::None,
        }
    }

    /// The other hub of the share, if this is one of the two and there is another.
    pub fn counterpart(&self, hub: u16) -> Option<u16> {
        match self.role(hub) {
            Role::Serves { .. } => self.standby,
            Role::StandsBy => Some(self.served_by),
            Role::None => None,
        }
    }
}

/// Where a hub is, as far as that says what it is lost together with. Empty names are unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HubLocation {
    /// The machine.
    pub machine: String,
    /// The rack.
    pub rack: String,
}

/// The shares of a job that begins at hubs at these locations: each hub serves its own, and is the standby of one other. Hub
/// and standby are on different machines, and in different racks, for as many shares as one rotation of the hubs allows. With
/// one hub no share has a standby.
pub fn first_shares(hubs: &[HubLocation]) -> Vec<Share> {
    let count = hubs.len();
    let is_same = |one: &str, other: &str| !one.is_empty() && one == other;
    let lost_together = |&distance: &usize| {
        let pairs = || (0..count).map(|hub| (&hubs[hub], &hubs[(hub + distance) % count]));
        let machines = pairs().filter(|(one, other)| is_same(&one.machine, &other.machine)).count();
        let racks = pairs().filter(|(one, other)| is_same(&one.rack, &other.rack)).count();
        (machines, racks)
    };
    let distance = (1..count).min_by_key(lost_together);
    (0..count)
        .map(|hub| Share {
            served_by: hub as u16,
            standby: distance.map(|distance| ((hub + distance) % count) as u16),
        })
        .collect()
}

/// A share whose only hub is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("no other hub has the chunks of share {0}")]
pub struct ShareLost(pub u16);

/// The shares once the hub at this position is lost: standbys take over what it has served, and what it has followed goes on
/// without a standby. Returns the same shares if it had no part in any.
///
/// # Errors
/// If it was the only hub of a share.
pub fn without_hub(shares: &[Share], lost: u16) -> Result<Vec<Share>, ShareLost> {
    let without = |(number, share): (u16, &Share)| match share.role(lost) {
        Role::Serves { .. } => {
            let served_by = share.standby.ok_or(ShareLost(number))?;
            Ok(Share { served_by, standby: None })
        }
        Role::StandsBy => Ok(Share { standby: None, ..*share }),
        Role::None => Ok(*share),
    };
    (0..).zip(shares).map(without).collect()
}

/// The interface and the core at which a hub has a route of another hub's share. The route's own hub has the shape `from`, this
/// one the shape `to`. Interfaces and cores are taken in turn where `to` has fewer.
pub fn route_at(route: &Route, from: &HubShape, to: &HubShape) -> (u16, u16) {
    let own = &from.interfaces[usize::from(route.interface)];
    let position = own.cores.iter().position(|&core| core == route.core).unwrap_or(0);
    let interface = usize::from(route.interface) % to.interfaces.len();
    let cores = &to.interfaces[interface].cores;
    (interface as u16, cores[position % cores.len()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::InterfaceShape;

    fn at(places: &[(&str, &str)]) -> Vec<HubLocation> {
        let location =
            |&(machine, rack): &(&str, &str)| HubLocation { machine: machine.into(), rack: rack.into() };
        places.iter().map(location).collect()
    }

    fn standbys(shares: &[Share]) -> Vec<Option<u16>> {
        shares.iter().map(|share| share.standby).collect()
    }

    #[test]
    fn each_hub_is_the_standby_of_one_other_elsewhere_if_that_is_possible() {
        assert_eq!(standbys(&first_shares(&at(&[("a", "")]))), [None]);
        assert_eq!(
            standbys(&first_shares(&at(&[("", ""), ("", ""), ("", "")]))),
            [Some(1), Some(2), Some(0)]
        );
        let machines = at(&[("a", ""), ("a", ""), ("b", ""), ("b", "")]);
        assert_eq!(standbys(&first_shares(&machines)), [Some(2), Some(3), Some(0), Some(1)]);
        let racks = at(&[("a", "r"), ("b", "r"), ("c", "s"), ("d", "s")]);
        assert_eq!(standbys(&first_shares(&racks)), [Some(2), Some(3), Some(0), Some(1)]);
        let shares = first_shares(&machines);
        assert!((0..4).all(|hub| shares[usize::from(hub)].role(hub) == Role::Serves { has_standby: true }));
    }

    #[test]
    fn a_lost_hub_is_replaced_by_its_standby_once() {
        let shares = first_shares(&at(&[("", ""), ("", ""), ("", "")]));
        let left = without_hub(&shares, 1).unwrap();
        let share = |served_by, standby| Share { served_by, standby };
        assert_eq!(left, [share(0, None), share(2, None), share(2, Some(0))]);
        assert_eq!(without_hub(&left, 1), Ok(left.clone()), "it has no part any more");
        assert_eq!(without_hub(&left, 2), Err(ShareLost(1)));
        assert_eq!(without_hub(&left, 0), Err(ShareLost(0)));
        assert_eq!([0, 1, 2].map(|hub| left[2].counterpart(hub)), [Some(2), None, Some(0)]);
        assert_eq!(left[0].role(1), Role::None);
    }

    #[test]
    fn a_route_has_a_place_at_a_hub_of_another_shape() {
        let interface =
            |cores: &[u16]| InterfaceShape { address: "10.0.0.1:1".into(), cores: cores.to_vec(), weight: 1 };
        let shape = |interfaces: Vec<InterfaceShape>| HubShape { interfaces, local: None };
        let from = shape(vec![interface(&[0, 1, 2]), interface(&[3, 4])]);
        let to = shape(vec![interface(&[5, 6])]);
        let route = |interface, core| Route { hub: 0, interface, core };
        assert_eq!(route_at(&route(0, 2), &from, &to), (0, 5));
        assert_eq!(route_at(&route(1, 4), &from, &to), (0, 6));
        assert_eq!(route_at(&route(1, 4), &from, &from), (1, 4));
    }
}
