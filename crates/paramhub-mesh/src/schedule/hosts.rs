//! Collectives that know which ranks share a host, so that data crosses between two hosts only once.

use super::{BufferRange, Schedule, Work};

/// Does the same as [`allgather`](super::allgather), where `hosts` has the host of each rank. A block goes
/// straight to the ranks of its own host, and to one rank of each other host, which passes it on there.
/// Which rank of a host passes a block on depends on the rank that the block comes from.
pub(crate) fn allgather_between_hosts(
    rank: u32,
    hosts: &[u32],
    lengths: &[usize],
    has_input: bool,
) -> Schedule {
    let mut schedule = Schedule::default();
    let size = lengths.len() as u32;
    let host = |rank: u32| hosts[rank as usize];
    let members = |of: u32| (0..size).filter(move |&rank| host(rank) == of);
    // The rank that passes a block on at another host.
    let forwarder = |of: u32, block: u32| {
        let among = members(of).count();
        members(of).nth(block as usize % among).expect("less than there are")
    };
    let block = |rank: u32| BufferRange::whole(rank, lengths[rank as usize]);
    let own = if has_input { BufferRange { buffer: size, ..block(rank) } } else { block(rank) };
    let here = host(rank);
    for distance in 1..size {
        let from = (rank + size - distance) % size;
        let carrier = if host(from) == here { from } else { forwarder(here, from) };
        if carrier != rank {
            schedule.push(Work::Receive { peer: carrier, index: from, into: block(from) }, &[]);
            continue;
        }
        let receive = Work::Receive { peer: from, index: from, into: block(from) };
        let arrived = schedule.push(receive, &[]);
        for peer in members(here).filter(|&peer| peer != rank) {
            schedule.push(Work::Send { peer, index: from, from: block(from) }, &[Some(arrived)]);
        }
    }
    for distance in 1..size {
        let to = (rank + distance) % size;
        if host(to) == here || forwarder(host(to), rank) == to {
            schedule.push(Work::Send { peer: to, index: rank, from: own }, &[]);
        }
    }
    if has_input {
        schedule.push(Work::Copy { into: block(rank), from: own }, &[]);
    }
    schedule
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_crosses_to_each_other_host_once() {
        let hosts = [7, 2, 7, 2, 2, 9];
        let lengths = [10, 20, 30, 40, 50, 60];
        let mut crossings = vec![vec![0; 10]; hosts.len()];
        for rank in 0..6 {
            let schedule = allgather_between_hosts(rank, &hosts, &lengths, false);
            for work in schedule.work {
                let Work::Send { peer, index, from } = work else { continue };
                assert_eq!(from, BufferRange::whole(index, lengths[index as usize]));
                if hosts[peer as usize] != hosts[rank as usize] {
                    assert_eq!(index, rank, "only a block's own rank sends it to another host");
                    crossings[index as usize][hosts[peer as usize] as usize] += 1;
                }
            }
        }
        for (block, crossings) in crossings.iter().enumerate() {
            for host in [2, 7, 9] {
                assert_eq!(
                    crossings[host],
                    u32::from(host as u32 != hosts[block]),
                    "block {block}, host {host}"
                );
            }
        }
    }

    #[test]
    fn the_ranks_of_a_host_share_in_passing_on() {
        let hosts = [0, 0, 0, 0, 1, 1];
        let passed_on = |rank| {
            let schedule = allgather_between_hosts(rank, &hosts, &[8; 6], false);
            schedule
                .work
                .iter()
                .filter(|work| matches!(work, Work::Send { index, .. } if *index != rank))
                .count()
        };
        assert_eq!([4, 5].map(passed_on), [2, 2], "two blocks each, to the one other rank");
        assert_eq!([0, 1, 2, 3].map(passed_on), [3, 3, 0, 0], "a block each by two of them, to three");
    }
}
