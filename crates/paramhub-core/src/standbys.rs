//! Which hub serves each share of a job's chunks, and which hub is its standby.
//!
//! The placement deals the chunks of a job to its hubs. The chunks of one hub are a *share*, which has the number of that
//! hub. In a job with replicas two hubs have each share: one serves it, the other is its *standby* and makes the same
//! updates from the same sums. A sum is acknowledged by the standby before any worker gets an answer that is made of it.
//! So the standby is never behind an answer, and can take over when the first hub is lost.
//!
//! A share that has lost one of its hubs gets another standby while the job runs, as soon as there is a hub that has no part in
//! the job, or after a while one that has; or the hub that an operator has named, who moves the job. The hub that serves the share sends it every chunk, with the optimizer's state, and from then on the sums of that
//! chunk. Once the standby has all chunks it is one like any other; before that it cannot take over.
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
    /// Whether the standby still receives its copies of the chunks, so that it cannot take over yet.
    #[serde(default, skip_serializing_if = "is_default")]
    pub copying: bool,
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
    /// A share whose standby, if there is one, has all chunks.
    pub fn new(served_by: u16, standby: Option<u16>) -> Share {
        Share { served_by, standby, copying: false }
    }

    /// The standby, if it has all chunks.
    pub fn ready_standby(&self) -> Option<u16> {
        self.standby.filter(|_| !self.copying)
    }

    /// What the hub at this position is for the share.
    pub fn role(&self, hub: u16) -> Role {
        match *self {
            Share { served_by, standby, .. } if served_by == hub => {
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
        .map(|hub| Share::new(hub as u16, distance.map(|distance| ((hub + distance) % count) as u16)))
        .collect()
}

/// A share whose only hub is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("no other hub has the chunks of share {0}")]
pub struct ShareLost(pub u16);

/// The shares once the hub at this position is lost: standbys take over what it has served, and what it has followed goes on
/// without a standby. Returns the same shares if it had no part in any. `is_empty` says of a share that it has no chunks, so that
/// nothing is lost with its hub.
///
/// # Errors
/// If it was the only hub that had all chunks of a share.
pub fn without_hub(
    shares: &[Share],
    lost: u16,
    is_empty: impl Fn(u16) -> bool,
) -> Result<Vec<Share>, ShareLost> {
    let without = |(number, share): (u16, &Share)| match (share.role(lost), share.ready_standby()) {
        (Role::Serves { .. }, Some(standby)) => Ok(Share::new(standby, None)),
        (Role::Serves { .. }, None) if is_empty(number) => Ok(Share::new(share.served_by, None)),
        (Role::Serves { .. }, None) => Err(ShareLost(number)),
        (Role::StandsBy, _) => Ok(Share::new(share.served_by, None)),
        (Role::None, _) => Ok(*share),
    };
    (0..).zip(shares).map(without).collect()
}

/// A hub that can become the standby of a share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Where it is.
    pub location: HubLocation,
    /// How many parts it has: in the job's shares, and in other jobs.
    pub parts: (usize, usize),
}

/// The best new standby for a share whose chunks are at this place: on another machine, in another rack, with the fewest shares of
/// the job and then with the fewest other jobs, in this order. Returns its position among the candidates; `None` if there are
/// none.
pub fn best_candidate(serving: &HubLocation, candidates: &[Candidate]) -> Option<usize> {
    let is_same = |one: &str, other: &str| !one.is_empty() && one == other;
    let rank = |&position: &usize| {
        let Candidate { location, parts } = &candidates[position];
        (is_same(&location.machine, &serving.machine), is_same(&location.rack, &serving.rack), *parts)
    };
    (0..candidates.len()).min_by_key(rank)
}

/// Returns whether a field has its default, and is left out.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
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
        let without_hub = |shares: &[Share], lost| without_hub(shares, lost, |_| false);
        let left = without_hub(&shares, 1).unwrap();
        let share = Share::new;
        assert_eq!(left, [share(0, None), share(2, None), share(2, Some(0))]);
        assert_eq!(without_hub(&left, 1), Ok(left.clone()), "it has no part any more");
        assert_eq!(without_hub(&left, 2), Err(ShareLost(1)));
        assert_eq!(without_hub(&left, 0), Err(ShareLost(0)));
        assert_eq!([0, 1, 2].map(|hub| left[2].counterpart(hub)), [Some(2), None, Some(0)]);
        assert_eq!(left[0].role(1), Role::None);
    }

    #[test]
    fn a_standby_without_all_chunks_does_not_take_over() {
        let copying = Share { copying: true, ..Share::new(0, Some(2)) };
        assert_eq!(copying.role(0), Role::Serves { has_standby: true });
        assert_eq!((copying.role(2), copying.ready_standby()), (Role::StandsBy, None));
        assert_eq!(without_hub(&[copying], 0, |_| false), Err(ShareLost(0)));
        assert_eq!(without_hub(&[copying], 2, |_| false), Ok(vec![Share::new(0, None)]));
        assert_eq!(without_hub(&[copying], 0, |_| true), Ok(vec![Share::new(0, None)]), "it has no chunks");
    }

    #[test]
    fn a_new_standby_is_elsewhere_and_has_little_to_do() {
        let candidate = |machine: &str, rack: &str, parts| Candidate {
            location: HubLocation { machine: machine.into(), rack: rack.into() },
            parts,
        };
        let serving = HubLocation { machine: "a".into(), rack: "r".into() };
        assert_eq!(best_candidate(&serving, &[]), None);
        let same = candidate("a", "r", (0, 0));
        assert_eq!(best_candidate(&serving, std::slice::from_ref(&same)), Some(0), "better than none");
        let in_rack = candidate("b", "r", (0, 0));
        let busy = candidate("c", "s", (1, 0));
        let elsewhere = candidate("d", "s", (0, 5));
        let all = [same, in_rack, busy, elsewhere];
        assert_eq!(best_candidate(&serving, &all), Some(3));
        assert_eq!(best_candidate(&serving, &all[..3]), Some(2));
        assert_eq!(best_candidate(&serving, &all[..2]), Some(1));
        assert_eq!(best_candidate(&HubLocation::default(), &all), Some(0), "nothing is known");
    }

    #[test]
    fn a_route_has_a_place_at_a_hub_of_another_shape() {
        let interface =
            |cores: &[u16]| InterfaceShape { address: "10.0.0.1:1".into(), cores: cores.to_vec(), weight: 1 };
        let shape =
            |interfaces: Vec<InterfaceShape>| HubShape { interfaces, local: None, between_hubs: None };
        let from = shape(vec![interface(&[0, 1, 2]), interface(&[3, 4])]);
        let to = shape(vec![interface(&[5, 6])]);
        let route = |interface, core| Route { hub: 0, interface, core };
        assert_eq!(route_at(&route(0, 2), &from, &to), (0, 5));
        assert_eq!(route_at(&route(1, 4), &from, &to), (0, 6));
        assert_eq!(route_at(&route(1, 4), &from, &from), (1, 4));
    }
}
