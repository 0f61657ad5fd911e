//! Connections that have proved nothing yet, and their bounds.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Connections that one event loop accepts before it serves those that it has, so that a flood of new ones
/// cannot keep the others from completing their handshakes.
pub const ACCEPTS_PER_TURN: usize = 64;
/// Bytes that are read from a refused connection and dropped. Closing a connection with unread bytes resets
/// it, and the reset could overtake the reason for the refusal. An honest peer has sent fewer.
pub const DISCARDED_BYTES_MAX: usize = 16 << 10;

/// The connections whose handshakes are under way, by token.
///
/// Their number is bounded. If a new one arrives and all places are taken, the peer address with the most
/// connections loses its oldest one. An honest handshake takes a few round trips, so it is the newest of its
/// address and seldom the one that is dropped, even if strangers use the same address.
#[derive(Debug)]
pub struct PendingHandshakes<C> {
    places: usize,
    connections: BTreeMap<u64, (Option<IpAddr>, C)>,
    /// The tokens of each address; processes of this host have none and count as one peer.
    of_peer: HashMap<Option<IpAddr>, BTreeSet<u64>>,
}

impl<C> PendingHandshakes<C> {
    /// An empty table with `places` places, at least one.
    pub fn new(places: usize) -> Self {
        PendingHandshakes { places: places.max(1), connections: BTreeMap::new(), of_peer: HashMap::new() }
    }

    /// Returns whether no handshake is under way.
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// Adds a connection. Tokens must grow from call to call. Returns the connection that lost its place, if
    /// one did.
    ///
    /// # Panics
    /// If the token is not larger than all those in the table.
    pub fn insert(&mut self, token: u64, peer: Option<IpAddr>, connection: C) -> Option<C> {
        assert!(self.connections.keys().next_back().is_none_or(|&last| last < token), "tokens grow");
        let displaced = if self.connections.len() >= self.places { self.remove_one() } else { None };
        self.connections.insert(token, (peer, connection));
        self.of_peer.entry(peer).or_default().insert(token);
        displaced
    }

    /// Removes the oldest connection of the peer that has the most.
    pub fn remove_one(&mut self) -> Option<C> {
        let busiest = self.of_peer.values().max_by_key(|tokens| tokens.len())?;
        let oldest = *busiest.first().expect("a peer without connections is not in the table");
        self.remove(oldest)
    }

    /// The connection of this token.
    pub fn get_mut(&mut self, token: u64) -> Option<&mut C> {
        self.connections.get_mut(&token).map(|(_, connection)| connection)
    }

    /// Removes the connection of this token.
    pub fn remove(&mut self, token: u64) -> Option<C> {
        let (peer, connection) = self.connections.remove(&token)?;
        let tokens = self.of_peer.get_mut(&peer).expect("every connection is listed under its peer");
        tokens.remove(&token);
        if tokens.is_empty() {
            self.of_peer.remove(&peer);
        }
        Some(connection)
    }

    /// Removes the connections for which `is_late` holds.
    pub fn remove_late(&mut self, is_late: impl Fn(&C) -> bool) -> Vec<C> {
        let late = self.connections.iter().filter(|(_, (_, connection))| is_late(connection));
        let late: Vec<u64> = late.map(|(&token, _)| token).collect();
        late.into_iter().filter_map(|token| self.remove(token)).collect()
    }
}

/// Raises the number of descriptors that this process may open to the system's maximum, and returns that
/// number. Each stream of each worker takes one at the hub, and the usual limit of 1,024 exists for programs
/// that call select(2).
pub fn raise_descriptor_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    // If the system refuses, the limit stays as it was; a lack of descriptors is reported where it occurs.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> Option<IpAddr> {
        Some(IpAddr::from([10, 0, 0, last]))
    }

    #[test]
    fn an_address_with_few_connections_keeps_them_when_another_floods() {
        let mut table = PendingHandshakes::new(8);
        assert_eq!(table.insert(0, address(1), 0), None);
        for token in 1..1000 {
            let displaced = table.insert(token, address(2), token);
            // The first one stays; among the others the oldest is removed.
            assert_eq!(displaced, (token >= 8).then(|| token - 7), "{token}");
        }
        assert_eq!(table.get_mut(0), Some(&mut 0));
        assert_eq!(table.connections.len(), 8);
    }

    #[test]
    fn the_newest_of_a_flooding_address_stays() {
        let mut table = PendingHandshakes::new(4);
        for token in 0..100 {
            table.insert(token, None, token);
            assert!(table.get_mut(token).is_some());
        }
        assert_eq!(table.remove_late(|&token| token < 98), [96, 97]);
        assert_eq!(table.remove(98), Some(98));
        assert_eq!(table.remove(98), None);
        assert_eq!(table.remove_one(), Some(99));
        assert_eq!((table.remove_one(), table.of_peer.len()), (None, 0));
    }
}
