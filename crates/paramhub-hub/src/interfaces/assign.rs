//! Ties interfaces, cores and processors of one NUMA node together (PHub section 3.3), so that what arrives
//! at a card is summed by a processor of its own node, in memory that this processor touched first.

use std::cmp::Reverse;

use paramhub_transport::interface::Sysfs;

/// The demand of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Demand {
    /// Its share of the load relative to the others.
    pub(crate) weight: u32,
    /// The NUMA node of its device, if it is known.
    pub(crate) node: Option<u32>,
}

/// A processor that the hub may run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Processor {
    pub(crate) number: usize,
    /// Its NUMA node, if the machine has any.
    pub(crate) node: Option<u32>,
}

/// The cores of each interface, and the processors of each core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Assignment {
    /// The cores of each interface, at least one. An interface shares a core only if there are fewer cores
    /// than interfaces.
    pub(crate) cores_of: Vec<Vec<u16>>,
    /// The processor of each core. Several cores have the same one if there are more cores than processors.
    pub(crate) processor_of: Vec<Processor>,
}

/// The processors this process may run on, with their nodes.
pub(crate) fn processors(sysfs: &Sysfs) -> std::io::Result<Vec<Processor>> {
    use rustix::thread::{CpuSet, sched_getaffinity};
    let allowed = sched_getaffinity(None)?;
    let nodes = sysfs.nodes();
    let node_of = |number| nodes.iter().find(|(_, here)| here.contains(&number)).map(|&(node, _)| node);
    let numbers = (0..CpuSet::MAX_CPU).filter(|&number| allowed.is_set(number));
    Ok(numbers.map(|number| Processor { number, node: node_of(number) }).collect())
}

/// Deals `cores` cores to `interfaces` in proportion to their weights, and a processor to each core: one of
/// its interface's node as long as there is one, then any free one.
///
/// There must be a core, an interface and a processor.
pub(super) fn assign(interfaces: &[Demand], cores: usize, processors: &[Processor]) -> Assignment {
    let mut groups = groups(interfaces);
    if cores < groups.len() {
        // Some core would serve two nodes in any case.
        groups = vec![Group { node: None, members: (0..interfaces.len()).collect() }];
    }
    let room = |group: &Group| match group.node {
        Some(node) => processors.iter().filter(|processor| processor.node == Some(node)).count(),
        None => processors.len(),
    };
    let weights: Vec<u64> = groups.iter().map(|group| group.weight(interfaces)).collect();
    let rooms: Vec<usize> = groups.iter().map(room).collect();
    let least = |group: &Group| if cores < interfaces.len() { 1 } else { group.members.len() };
    let of_group = share_out(cores, groups.iter().map(least).collect(), &weights, &rooms);

    let mut cores_of = vec![Vec::new(); interfaces.len()];
    let mut node_of_core = Vec::with_capacity(cores);
    for (group, &count) in groups.iter().zip(&of_group) {
        let first = node_of_core.len();
        node_of_core.extend(std::iter::repeat_n(group.node, count));
        deal(interfaces, &group.members, first, count, &mut cores_of);
    }
    Assignment { cores_of, processor_of: place(&node_of_core, processors) }
}

/// The interfaces of one node, or of an unknown one.
struct Group {
    node: Option<u32>,
    members: Vec<usize>,
}

impl Group {
    fn weight(&self, interfaces: &[Demand]) -> u64 {
        self.members.iter().map(|&member| u64::from(interfaces[member].weight)).sum()
    }
}

fn groups(interfaces: &[Demand]) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for (member, interface) in interfaces.iter().enumerate() {
        match groups.iter_mut().find(|group| group.node == interface.node) {
            Some(group) => group.members.push(member),
            None => groups.push(Group { node: interface.node, members: vec![member] }),
        }
    }
    groups
}

/// Deals what `all` exceeds the initial `shares` by, one at a time, to the taker with the least for its
/// weight: first to those whose `rooms` are not full, then to any. The sum of the shares must not exceed
/// `all`.
fn share_out(all: usize, mut shares: Vec<usize>, weights: &[u64], rooms: &[usize]) -> Vec<usize> {
    for _ in shares.iter().sum()..all {
        let worst_off = |candidates: &mut dyn Iterator<Item = usize>| {
            candidates.reduce(|best, candidate| {
                let is_worse = u128::from(weights[candidate]) * (shares[best] + 1) as u128
                    > u128::from(weights[best]) * (shares[candidate] + 1) as u128;
                if is_worse { candidate } else { best }
            })
        };
        let with_room =
            worst_off(&mut (0..weights.len()).filter(|&candidate| shares[candidate] < rooms[candidate]));
        let candidate =
            with_room.or_else(|| worst_off(&mut (0..weights.len()))).expect("an interface takes part");
        shares[candidate] += 1;
    }
    shares
}

/// Deals the cores `first..first + count` to a group's interfaces.
fn deal(interfaces: &[Demand], members: &[usize], first: usize, count: usize, cores_of: &mut [Vec<u16>]) {
    let core = |number: usize| (first + number) as u16;
    if count >= members.len() {
        // Interfaces take cores in turn, so that those of equal weight get evenly spaced ones.
        let weights: Vec<u64> = members.iter().map(|&member| interfaces[member].weight.into()).collect();
        let mut left = share_out(count, vec![1; members.len()], &weights, &vec![usize::MAX; members.len()]);
        let mut next = 0;
        while next < count {
            for (&member, left) in members.iter().zip(&mut left).filter(|(_, left)| **left > 0) {
                cores_of[member].push(core(next));
                *left -= 1;
                next += 1;
            }
        }
        return;
    }
    // The heaviest first, as chunks are placed.
    let mut heaviest_first = members.to_vec();
    heaviest_first.sort_by_key(|&member| Reverse(interfaces[member].weight));
    let mut loads = vec![0u64; count];
    for member in heaviest_first {
        let lightest = (0..count).min_by_key(|&core| loads[core]).expect("every group has a core");
        loads[lightest] += u64::from(interfaces[member].weight);
        cores_of[member].push(core(lightest));
    }
}

/// Gives each core a free processor of its node, then a free one of any node to the cores that got none; the
/// rest share processors in turn.
fn place(node_of_core: &[Option<u32>], processors: &[Processor]) -> Vec<Processor> {
    let mut free = processors.to_vec();
    let mut placed: Vec<Option<Processor>> = vec![None; node_of_core.len()];
    for is_second_round in [false, true] {
        for (core, node) in
            node_of_core.iter().enumerate().filter(|(_, node)| node.is_some() || is_second_round)
        {
            let fits = |processor: &Processor| is_second_round || processor.node == *node;
            if placed[core].is_none()
                && let Some(position) = free.iter().position(fits)
            {
                placed[core] = Some(free.remove(position));
            }
        }
    }
    let crowded = placed.into_iter().enumerate();
    crowded.map(|(core, placed)| placed.unwrap_or(processors[core % processors.len()])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANYWHERE: Demand = Demand { weight: 10_000, node: None };

    fn on(node: u32, weight: u32) -> Demand {
        Demand { weight, node: Some(node) }
    }

    /// Two nodes with this many processors each, numbered as the kernel does.
    fn machine(each: usize) -> Vec<Processor> {
        (0..2 * each).map(|number| Processor { number, node: Some((number / each) as u32) }).collect()
    }

    fn numbers(assignment: &Assignment) -> Vec<usize> {
        assignment.processor_of.iter().map(|processor| processor.number).collect()
    }

    #[test]
    fn interfaces_without_nodes_and_speeds_take_turns() {
        let uniform: Vec<Processor> = (0..4).map(|number| Processor { number, node: None }).collect();
        let assigned = assign(&[ANYWHERE; 2], 5, &uniform);
        assert_eq!(assigned.cores_of, [vec![0, 2, 4], vec![1, 3]]);
        assert_eq!(numbers(&assigned), [0, 1, 2, 3, 0], "more cores than processors wrap");
        assert_eq!(
            assign(&[ANYWHERE; 3], 2, &uniform).cores_of,
            [[0], [1], [0]],
            "fewer cores than interfaces"
        );
    }

    #[test]
    fn cores_are_in_the_node_of_their_interface() {
        let assigned = assign(&[on(1, 10), on(0, 10), on(1, 10), on(0, 10)], 8, &machine(4));
        assert_eq!(assigned.cores_of, [[0, 2], [4, 6], [1, 3], [5, 7]]);
        assert_eq!(numbers(&assigned), [4, 5, 6, 7, 0, 1, 2, 3]);
    }

    #[test]
    fn faster_interfaces_have_more_cores() {
        let assigned = assign(&[on(0, 100), on(0, 25), on(1, 25)], 6, &machine(8));
        let counts: Vec<usize> = assigned.cores_of.iter().map(Vec::len).collect();
        assert_eq!(counts, [4, 1, 1]);
    }

    #[test]
    fn a_full_node_leaves_its_further_cores_to_the_other() {
        let assigned = assign(&[on(0, 10)], 6, &machine(4));
        assert_eq!(assigned.cores_of, [[0, 1, 2, 3, 4, 5]]);
        assert_eq!(numbers(&assigned), [0, 1, 2, 3, 4, 5]);
        // A core with a processor of its own keeps it.
        let assigned = assign(&[on(0, 30), on(1, 10)], 8, &machine(4));
        assert_eq!(assigned.cores_of, [[0, 1, 2, 3], [4, 5, 6, 7]]);
        assert_eq!(numbers(&assigned), [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn a_node_that_the_process_may_not_use_still_gets_cores() {
        let half: Vec<Processor> = machine(2).into_iter().filter(|p| p.node == Some(0)).collect();
        let assigned = assign(&[on(0, 10), on(1, 10)], 2, &half);
        assert_eq!((assigned.cores_of.clone(), numbers(&assigned)), (vec![vec![0], vec![1]], vec![0, 1]));
    }

    #[test]
    fn one_core_serves_interfaces_of_all_nodes() {
        let assigned = assign(&[on(0, 10), on(1, 10), ANYWHERE], 2, &machine(1));
        assert!(assigned.cores_of.iter().all(|cores| cores.len() == 1));
        let mut cores = assigned.cores_of.concat();
        cores.sort_unstable();
        assert!(cores == [0, 0, 1] || cores == [0, 1, 1], "{cores:?}");
    }

    #[test]
    fn every_core_serves_and_every_interface_is_served() {
        for (interfaces, cores) in (1..6).flat_map(|interfaces| (1..12).map(move |cores| (interfaces, cores)))
        {
            let demands: Vec<Demand> = (0..interfaces)
                .map(|i| Demand { weight: 1 + i * i * 7, node: [None, Some(0), Some(1)][i as usize % 3] })
                .collect();
            let assigned = assign(&demands, cores, &machine(3));
            assert_eq!(assigned.processor_of.len(), cores);
            assert!(assigned.cores_of.iter().all(|cores| !cores.is_empty()));
            let mut served = assigned.cores_of.concat();
            served.sort_unstable();
            served.dedup();
            if cores >= interfaces as usize {
                assert_eq!(served.len(), cores, "{interfaces} interfaces, {cores} cores: {assigned:?}");
                assert_eq!(assigned.cores_of.concat().len(), cores, "no core serves two");
            }
        }
    }
}
