//! The neighbours at the other ends of the streams of a hub's route.
//!
//! A port is the route's number for one of its streams: there is one for each worker of the site, and one for each
//! route of another site that has chunks in common with this route. Every hub computes the ports of any route from
//! the same placements, so the hub that dials knows the number of its stream here.

use std::collections::BTreeMap;

use crate::composition::{Composed, Crossing, Neighbour, SiteId};
use crate::consistency::Consistency;
use crate::exchange::ChunkReach;
use crate::placement::RouteId;
use crate::wire::Direction;

/// No port.
const NONE: u32 = u32::MAX;

/// The role of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Contributions arrive from the worker that is this member. Its number is not its rank.
    Worker(u32),
    /// Contributions arrive from a part of the site that is this member: a site below or beside this one.
    Below(u32),
    /// Sums leave, and answers arrive.
    Above,
    /// Sums leave to the other hub of the chunks, their [standby](crate::standbys), and acknowledgements arrive.
    Standby,
    /// This hub is the standby. Sums arrive from the hub that serves the chunks, and acknowledgements leave.
    Serving,
}

impl Side {
    /// The direction of the frames that arrive there.
    pub fn incoming(self) -> Direction {
        match self {
            Side::Worker(_) => Direction::ToHub,
            Side::Below(_) | Side::Above | Side::Standby | Side::Serving => Direction::Both,
        }
    }

    /// Returns whether a worker is at the other end.
    pub fn is_worker(self) -> bool {
        matches!(self, Side::Worker(_))
    }

    /// Returns whether sums leave by the port. This hub opens its stream, and is the first to leave.
    pub fn takes_sums(self) -> bool {
        matches!(self, Side::Above | Side::Standby)
    }
}

/// A port for a site, or for the other hub of a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SitePort {
    /// Its role.
    pub side: Side,
    /// The site.
    pub site: SiteId,
    /// The route at the other end.
    pub route: RouteId,
}

/// The ports of a route: first those of its workers by rank, then those of member sites, then those of sites
/// above.
#[derive(Clone, Debug)]
pub struct Ports {
    /// The ranks of the workers.
    ranks: Vec<u32>,
    sites: Vec<SitePort>,
    member_sites: Vec<SiteId>,
    /// The ranks of the workers of each member site and of the sites below it.
    ranks_of_sites: Vec<Vec<u32>>,
    /// The number of members that are sites below this one, not beside it. They come first in `member_sites`.
    children: usize,
    /// `true` if the only member site comes before the workers here: the sites are in a line.
    site_first: bool,
    /// The port of slot `s` and member site `j`, at `s * member_sites + j`.
    below: Vec<u32>,
    /// The port above of each slot.
    above: Vec<u32>,
}

impl Ports {
    /// The ports of a route of a site.
    pub fn new(composed: &Composed, site: SiteId, route: RouteId) -> Ports {
        let composition = &composed.composition;
        let member_sites = composition.member_sites(site);
        let is_child = |member: &&SiteId| composition.sites[usize::from(**member)].parent == Some(site);
        let children = member_sites.iter().filter(is_child).count();
        let chunks = composed.placements[usize::from(site)].chunks(route);
        let route_at = |other: SiteId, chunk: u32| {
            let located = composed.placements[usize::from(other)].locate(chunk);
            located.expect("every site places every chunk").0
        };
        // The order is by member and route, so every hub numbers the ports alike.
        let mut found: BTreeMap<(usize, SiteId, RouteId), Vec<(usize, usize)>> = BTreeMap::new();
        for (slot, &chunk) in chunks.iter().enumerate() {
            for (index, &member) in member_sites.iter().enumerate() {
                if composed.above(member, chunk) == Some(site) {
                    found.entry((index, member, route_at(member, chunk))).or_default().push((slot, index));
                }
            }
            if let Some(above) = composed.above(site, chunk) {
                let index = member_sites.len();
                found.entry((index, above, route_at(above, chunk))).or_default().push((slot, index));
            }
        }
        let ranks = composition.sites[usize::from(site)].workers.clone();
        let mut ports = Ports {
            sites: Vec::with_capacity(found.len()),
            children,
            site_first: composition.crossing == Crossing::Line && !member_sites.is_empty(),
            below: vec![NONE; chunks.len() * member_sites.len()],
            above: vec![NONE; chunks.len()],
            ranks,
            ranks_of_sites: member_sites.iter().map(|&member| composition.ranks_below(member)).collect(),
            member_sites,
        };
        for ((index, site, route), slots) in found {
            let port = ports.len();
            let is_above = index == ports.member_sites.len();
            let member = (ports.ranks.len() + index) as u32;
            let side = if is_above { Side::Above } else { Side::Below(member) };
            ports.sites.push(SitePort { side, site, route });
            for (slot, index) in slots {
                match is_above {
                    true => ports.above[slot] = port,
                    false => ports.below[slot * ports.member_sites.len() + index] = port,
                }
            }
        }
        ports
    }

    /// The same ports and, behind them, one for the other hub of the route's [share](crate::standbys): its
    /// [standby](Side::Standby), or the hub that it [follows](Side::Serving).
    #[must_use]
    pub fn with_counterpart(mut self, side: Side, site: SiteId, route: RouteId) -> Ports {
        let port = self.len();
        self.sites.push(SitePort { side, site, route });
        if side == Side::Standby {
            self.above.fill(port);
        }
        self
    }

    /// The same ports, of which the one for the other hub of the route's share is that of a standby.
    #[must_use]
    pub fn with_standby(mut self) -> Ports {
        if let Some(port) = self.counterpart() {
            let index = port as usize - self.ranks.len();
            self.sites[index].side = Side::Standby;
            self.above.fill(port);
        }
        self
    }

    /// The port for the other hub of the route's share, if it has one.
    pub fn counterpart(&self) -> Option<u32> {
        let is_counterpart = |side| matches!(side, Side::Standby | Side::Serving);
        self.to_sites().find(|(_, port)| is_counterpart(port.side)).map(|(number, _)| number)
    }

    /// Number of ports.
    #[expect(clippy::len_without_is_empty, reason = "a route with chunks has ports")]
    pub fn len(&self) -> u32 {
        (self.ranks.len() + self.sites.len()) as u32
    }

    /// Number of slots of the route.
    pub fn slots(&self) -> u32 {
        self.above.len() as u32
    }

    /// Number of workers that exchange here. Theirs are the first ports.
    pub fn workers(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// The ranks of the workers that exchange here, ascending.
    pub fn ranks(&self) -> &[u32] {
        &self.ranks
    }

    /// Number of members that contribute: workers and sites.
    pub fn members(&self) -> u32 {
        (self.ranks.len() + self.member_sites.len()) as u32
    }

    /// Returns whether sums in the order of members begin with the last member, a [site](ChunkReach::site_first).
    pub fn site_first(&self) -> bool {
        self.site_first
    }

    /// Returns whether sites contribute here and receive answers.
    pub fn has_member_sites(&self) -> bool {
        !self.member_sites.is_empty()
    }

    /// The member that is rank 0, if rank 0 exchanges here.
    pub fn rank_0(&self) -> Option<u32> {
        (self.ranks.first() == Some(&0)).then_some(0)
    }

    /// The role of a port.
    pub fn side(&self, port: u32) -> Side {
        match self.site_port(port) {
            Some(site) => site.side,
            None => Side::Worker(port),
        }
    }

    /// The neighbour at the other end of a port.
    pub fn neighbour(&self, port: u32) -> Neighbour {
        match self.site_port(port) {
            Some(SitePort { side: Side::Standby | Side::Serving, route, .. }) => {
                Neighbour::Counterpart(route)
            }
            Some(site) => Neighbour::Site(site.site),
            None => Neighbour::Worker(self.ranks[port as usize]),
        }
    }

    /// The neighbour that is the member of this number.
    pub fn member(&self, member: u32) -> Neighbour {
        match self.ranks.get(member as usize) {
            Some(&rank) => Neighbour::Worker(rank),
            None => Neighbour::Site(self.member_sites[member as usize - self.ranks.len()]),
        }
    }

    /// Returns whether a member is a worker or a site below this one: then nothing more arrives from it, or from
    /// what is below it, after it has left.
    pub fn is_worker_or_child(&self, member: u32) -> bool {
        (member as usize) < self.ranks.len() + self.children
    }

    /// The port by which a member contributes to a slot.
    pub fn of_member(&self, slot: u32, member: u32) -> u32 {
        let Some(index) = (member as usize).checked_sub(self.ranks.len()) else { return member };
        let port = self.below[slot as usize * self.member_sites.len() + index];
        debug_assert_ne!(port, NONE, "only members that contribute are answered");
        port
    }

    /// The port by which a slot's sum goes up, or to the standby, if it does.
    pub fn above(&self, slot: u32) -> Option<u32> {
        Some(self.above[slot as usize]).filter(|&port| port != NONE)
    }

    /// Returns whether the slot's chunk is updated here, and not at a site above.
    pub fn updates_here(&self, slot: u32) -> bool {
        self.above(slot).is_none_or(|port| self.side(port) == Side::Standby)
    }

    /// Returns whether frames about a slot may arrive by a port, at whose other end is `side`.
    pub fn carries(&self, port: u32, side: Side, slot: u32) -> bool {
        match side {
            Side::Worker(_) | Side::Standby | Side::Serving => true,
            Side::Below(member) => {
                let index = member as usize - self.ranks.len();
                self.below[slot as usize * self.member_sites.len() + index] == port
            }
            Side::Above => self.above[slot as usize] == port,
        }
    }

    /// The reach of each slot, in order: how many members contribute to it and step together, and whether its sum goes up.
    ///
    /// In an asynchronous job, and one with bounded staleness, a site's members step together, and sites do not: at the owner
    /// of a chunk each site that is beside it or, if there is none, below it, contributes by itself.
    pub fn reach(&self, consistency: Consistency) -> impl Iterator<Item = ChunkReach> + '_ {
        let has_peers = self.member_sites.len() > self.children;
        let at_owner = match (self.has_member_sites(), has_peers) {
            (false, _) => 0,
            (true, false) => self.ranks.len(),
            (true, true) => self.ranks.len() + self.children,
        };
        (0..self.above.len()).map(move |slot| {
            let at = slot * self.member_sites.len();
            let sites =
                self.below[at..at + self.member_sites.len()].iter().filter(|&&port| port != NONE).count();
            let members = (self.ranks.len() + sites) as u32;
            let has_above = self.above[slot] != NONE;
            let is_synchronous = consistency == Consistency::Synchronous || has_above;
            ChunkReach {
                members,
                together: if is_synchronous { members } else { at_owner as u32 },
                has_above,
                site_first: self.site_first,
            }
        })
    }

    /// For each member, the number of workers whose gradients its contributions sum up; in a ring, without those of the sites
    /// that are farther away.
    pub fn workers_of(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.members()).map(|member| self.ranks_of(member).len() as u32)
    }

    /// The ranks of these workers.
    pub fn ranks_of(&self, member: u32) -> &[u32] {
        let member = member as usize;
        match member.checked_sub(self.ranks.len()) {
            None => &self.ranks[member..=member],
            Some(site) => &self.ranks_of_sites[site],
        }
    }

    /// The ports for sites, with their numbers.
    pub fn to_sites(&self) -> impl Iterator<Item = (u32, SitePort)> + '_ {
        (self.ranks.len() as u32..).zip(self.sites.iter().copied())
    }

    /// The port of a rank.
    pub fn of_rank(&self, rank: u32) -> Option<u32> {
        self.ranks.binary_search(&rank).ok().map(|port| port as u32)
    }

    /// A port by which contributions of a neighbour arrive.
    pub fn of_neighbour(&self, neighbour: Neighbour) -> Option<u32> {
        let contributes =
            |port: &SitePort| matches!(port.side, Side::Below(_)) && Neighbour::Site(port.site) == neighbour;
        match neighbour {
            Neighbour::Worker(rank) => self.of_rank(rank),
            Neighbour::Site(_) | Neighbour::Counterpart(_) => {
                self.to_sites().find(|(_, port)| contributes(port)).map(|(number, _)| number)
            }
        }
    }

    /// The port at which the sums of a site's route arrive.
    pub fn of_site(&self, site: SiteId, route: RouteId) -> Option<u32> {
        let wanted = |port: &SitePort| port.site == site && port.route == route && !port.side.takes_sums();
        self.to_sites().find(|(_, port)| wanted(port)).map(|(number, _)| number)
    }

    fn site_port(&self, port: u32) -> Option<SitePort> {
        (port as usize).checked_sub(self.ranks.len()).map(|index| self.sites[index])
    }
}
