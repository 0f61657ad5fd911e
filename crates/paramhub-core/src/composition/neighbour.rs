//! The other end of a stream at a hub.

use super::{Composition, SiteId};
use crate::placement::RouteId;

/// A worker, the hubs of another site, or the other hub of a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Neighbour {
    /// The worker, by its rank.
    Worker(u32),
    /// The site, by its number in the composition.
    Site(SiteId),
    /// The other hub of the [share](crate::standbys) that this route belongs to.
    Counterpart(RouteId),
}

impl Neighbour {
    /// The rank, if the neighbour is a worker.
    pub fn rank(self) -> Option<u32> {
        match self {
            Neighbour::Worker(rank) => Some(rank),
            Neighbour::Site(_) | Neighbour::Counterpart(_) => None,
        }
    }
}

impl Composition {
    /// The name of a neighbour for people.
    pub fn name_of(&self, neighbour: Neighbour) -> String {
        match neighbour {
            Neighbour::Worker(rank) => format!("rank {rank}"),
            Neighbour::Site(site) => self.name(site),
            Neighbour::Counterpart(_) => "the other hub of the chunks".to_owned(),
        }
    }
}
