//! Who sends to whom so that every link of a testbed is full at some time.

use std::net::Ipv4Addr;

use crate::testbed::rate::Rate;
use crate::testbed::shape::{Host, Shape};

/// A host's name and one of its addresses.
pub(super) type Place = (String, Ipv4Addr);

/// Two hosts that send to one another.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Flow {
    pub(super) from: Place,
    pub(super) to: Place,
}

/// Flows at the same time over links of one kind.
#[derive(Debug)]
pub(super) struct Wave {
    pub(super) what: &'static str,
    pub(super) flows: Vec<Flow>,
    /// So many neighbours in the list share a link.
    pub(super) flows_a_link: usize,
    /// The links' own.
    pub(super) rate: Rate,
    /// What the flows over one link can bring together.
    pub(super) carries: Rate,
}

/// For each kind of link the waves that fill each of them at least once.
pub(super) fn waves(shape: &Shape) -> Vec<Vec<Wave>> {
    let hosts = shape.hosts();
    let mut kinds = vec![of_hosts(shape, &hosts)];
    if shape.racks > 1 {
        kinds.push(of_core(shape, &hosts));
    }
    kinds
}

/// In every rack workers and interfaces of the hub, pair by pair: as many at once as neither side has to take part twice.
fn of_hosts(shape: &Shape, hosts: &[Host]) -> Vec<Wave> {
    let (workers, interfaces) = (shape.workers, shape.hub_interfaces);
    let (at_once, pairs) = (workers.min(interfaces), workers.max(interfaces));
    let wave = |first: usize| {
        let mut flows = Vec::new();
        for rack in 0..shape.racks {
            for pair in first..(first + at_once).min(pairs) {
                let to = interface(hosts, shape, rack, workers, pair % interfaces);
                flows.push(Flow { from: interface(hosts, shape, rack, pair % workers, 0), to });
            }
        }
        Wave { what: "links of hosts", flows, flows_a_link: 1, rate: shape.rate, carries: shape.rate }
    };
    (0..pairs).step_by(at_once).map(wave).collect()
}

/// Pairs of workers over a link to the core at least, where a rack has so many: few streams share it too unevenly over the time
/// of a probe when they lose packets.
const PAIRS_OVER_CORE: usize = 4;

/// Racks two by two, with as many pairs of workers as the link to the core takes, or more.
fn of_core(shape: &Shape, hosts: &[Host]) -> Vec<Wave> {
    let needed = shape.core_rate.0.div_ceil(shape.rate.0) as usize;
    let flows_a_link = needed.max(PAIRS_OVER_CORE).min(shape.workers);
    let carries = Rate(shape.core_rate.0.min(shape.rate.0 * flows_a_link as u64));
    let wave = |pairs: Vec<(usize, usize)>| {
        let of_pair = |&(one, other): &(usize, usize)| {
            (0..flows_a_link).map(move |worker| Flow {
                from: interface(hosts, shape, one, worker, 0),
                to: interface(hosts, shape, other, worker, 0),
            })
        };
        let flows = pairs.iter().flat_map(of_pair).collect();
        Wave { what: "links to the core", flows, flows_a_link, rate: shape.core_rate, carries }
    };
    let mut waves = vec![wave((0..shape.racks / 2).map(|pair| (2 * pair, 2 * pair + 1)).collect())];
    if !shape.racks.is_multiple_of(2) {
        waves.push(wave(vec![(shape.racks - 1, 0)]));
    }
    waves
}

/// Of a rack's member: its workers, then its hub.
fn interface(hosts: &[Host], shape: &Shape, rack: usize, member: usize, interface: usize) -> Place {
    let host = &hosts[rack * (shape.workers + 1) + member];
    (host.name.clone(), host.addresses[interface])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_address_takes_part_and_never_twice_at_once() {
        for (racks, workers, hub_interfaces) in [(1, 8, 8), (2, 5, 2), (3, 2, 5), (1, 1, 1)] {
            let shape = Shape { hub_interfaces, ..Shape::new("bed", racks, workers, Rate(500_000_000)) };
            let waves = waves(&shape).remove(0);
            let mut seen = HashSet::new();
            for wave in &waves {
                let places: Vec<_> = wave.flows.iter().flat_map(|flow| [&flow.from, &flow.to]).collect();
                assert_eq!(places.iter().collect::<HashSet<_>>().len(), places.len(), "{shape}");
                seen.extend(places.into_iter().map(|(_, address)| *address));
            }
            assert!(
                shape.hosts().iter().flat_map(|host| &host.addresses).all(|address| seen.contains(address))
            );
        }
    }

    #[test]
    fn every_link_to_the_core_is_filled() {
        for (racks, core, flows_a_link, carries) in
            [(2, 250, 4, 250), (2, 3000, 6, 3000), (3, 500, 4, 500), (5, 9000, 8, 4000)]
        {
            let mut shape = Shape::new("bed", racks, 8, Rate(500_000_000));
            shape.core_rate = Rate(core * 1_000_000);
            let waves = waves(&shape).remove(1);
            assert!(waves.iter().all(|wave| wave.flows_a_link == flows_a_link));
            assert!(waves.iter().all(|wave| wave.carries == Rate(carries * 1_000_000)));
            let flows = waves.iter().flat_map(|wave| &wave.flows);
            let racks_seen: HashSet<_> =
                flows.flat_map(|flow| [flow.from.1.octets()[2], flow.to.1.octets()[2]]).collect();
            assert_eq!(racks_seen.len(), racks);
        }
    }
}
