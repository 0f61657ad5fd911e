//! This lists the hosts that send to one another, so that every link of a testbed is full at some time.

use std::net::Ipv4Addr;

use crate::testbed::rate::Rate;
use crate::testbed::shape::{Host, Shape};

/// A host's name and one of its addresses.
pub(super) type HostAddress = (String, Ipv4Addr);

/// Two hosts that send to one another.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Flow {
    pub(super) from: HostAddress,
    pub(super) to: HostAddress,
}

/// Flows that run at the same time over links of one kind.
#[derive(Debug)]
pub(super) struct FlowBatch {
    pub(super) what: &'static str,
    pub(super) flows: Vec<Flow>,
    /// The number of neighbours in the list that share a link.
    pub(super) flows_a_link: usize,
    /// The rate of each link.
    pub(super) rate: Rate,
    /// The rate that the flows over one link can reach together.
    pub(super) carries: Rate,
}

/// For each kind of link, the batches that fill each link at least once.
pub(super) fn flow_batches(shape: &Shape) -> Vec<Vec<FlowBatch>> {
    let hosts = shape.hosts();
    let mut kinds = vec![of_hosts(shape, &hosts)];
    if shape.racks > 1 {
        kinds.push(of_core(shape, &hosts));
    }
    kinds
}

/// Pairs workers with interfaces of their rack's hub. As many pairs run at once as need no end twice.
fn of_hosts(shape: &Shape, hosts: &[Host]) -> Vec<FlowBatch> {
    let (workers, interfaces) = (shape.workers, shape.hub_interfaces);
    let (at_once, pairs) = (workers.min(interfaces), workers.max(interfaces));
    let flow_batch = |first: usize| {
        let mut flows = Vec::new();
        for rack in 0..shape.racks {
            for pair in first..(first + at_once).min(pairs) {
                let to = interface(hosts, shape, rack, workers, pair % interfaces);
                flows.push(Flow { from: interface(hosts, shape, rack, pair % workers, 0), to });
            }
        }
        FlowBatch { what: "links of hosts", flows, flows_a_link: 1, rate: shape.rate, carries: shape.rate }
    };
    (0..pairs).step_by(at_once).map(flow_batch).collect()
}

/// The least number of pairs of workers over a link to the core, if a rack has so many. Few streams that lose
/// packets share the link too unevenly over the time of a probe.
const PAIRS_OVER_CORE: usize = 4;

/// Pairs racks, with as many pairs of workers as the link to the core takes, or more.
fn of_core(shape: &Shape, hosts: &[Host]) -> Vec<FlowBatch> {
    let needed = shape.core_rate.0.div_ceil(shape.rate.0) as usize;
    let flows_a_link = needed.max(PAIRS_OVER_CORE).min(shape.workers);
    let carries = Rate(shape.core_rate.0.min(shape.rate.0 * flows_a_link as u64));
    let flow_batch = |pairs: Vec<(usize, usize)>| {
        let of_pair = |&(one, other): &(usize, usize)| {
            (0..flows_a_link).map(move |worker| Flow {
                from: interface(hosts, shape, one, worker, 0),
                to: interface(hosts, shape, other, worker, 0),
            })
        };
        let flows = pairs.iter().flat_map(of_pair).collect();
        FlowBatch { what: "links to the core", flows, flows_a_link, rate: shape.core_rate, carries }
    };
    let mut flow_batches =
        vec![flow_batch((0..shape.racks / 2).map(|pair| (2 * pair, 2 * pair + 1)).collect())];
    if !shape.racks.is_multiple_of(2) {
        flow_batches.push(flow_batch(vec![(shape.racks - 1, 0)]));
    }
    flow_batches
}

/// The interface of a rack's member: its workers come first, then its hub.
fn interface(hosts: &[Host], shape: &Shape, rack: usize, member: usize, interface: usize) -> HostAddress {
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
            let flow_batches = flow_batches(&shape).remove(0);
            let mut seen = HashSet::new();
            for flow_batch in &flow_batches {
                let places: Vec<_> =
                    flow_batch.flows.iter().flat_map(|flow| [&flow.from, &flow.to]).collect();
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
            let flow_batches = flow_batches(&shape).remove(1);
            assert!(flow_batches.iter().all(|flow_batch| flow_batch.flows_a_link == flows_a_link));
            assert!(flow_batches.iter().all(|flow_batch| flow_batch.carries == Rate(carries * 1_000_000)));
            let flows = flow_batches.iter().flat_map(|flow_batch| &flow_batch.flows);
            let racks_seen: HashSet<_> =
                flows.flat_map(|flow| [flow.from.1.octets()[2], flow.to.1.octets()[2]]).collect();
            assert_eq!(racks_seen.len(), racks);
        }
    }
}
