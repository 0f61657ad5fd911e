//! Hubs of one kind, composed: sites of hubs below, above and beside one another (PHub section 3.4).
//!
//! A **site** is the hubs that together hold a whole model for the members below them: those of a host, of a
//! rack or of the cluster. A member is a worker or another site. For each chunk the sites form a tree: a site
//! sums the contributions of its members and contributes the sum to the site above, until one site, the
//! chunk's **owner**, has the sum of all workers' gradients. The answer goes back the same way.
//!
//! - A site with a parent has its parent above it for every chunk: a host below its rack, racks below a
//!   parent hub.
//! - Sites without a parent are peers. Each of them owns some chunks, so that all links carry the same load.
//!   [`Crossing::Sharded`]: the owner is above all its peers. [`Crossing::Ring`]: the sum goes round from the
//!   owner's successor to the owner, and the answer goes back; each link carries each chunk at most once each
//!   way, and a site sends and receives as many bytes as in the reduce-scatter and all-gather of a ring.
//! - [`Crossing::Line`]: the last peer owns all chunks. The sum goes there from the first one, and each peer adds
//!   the gradients of its own workers to it, so that all are added in the order of ranks.

mod arrange;
mod choose;
mod neighbour;
mod options;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::chunk::ChunkMap;
use crate::key::KeyTable;
use crate::limits::{HUBS_MAX, WORKERS_MAX};
use crate::placement::{HubShape, Placement, ShapeError, Spread, deal};

pub use arrange::{ArrangeError, Arranged, arrange};
pub use choose::{Choice, ServedRack, choose, served_racks};
pub use neighbour::Neighbour;
pub use options::{BetweenSites, OptimizeAt, Reduction};

/// Sites of one job.
pub const SITES_MAX: usize = HUBS_MAX;
/// Levels of sites from a worker to the top: host, rack, cluster.
pub const DEPTH_MAX: usize = 3;

/// Position of a site in its composition.
pub type SiteId = u16;

/// The sites of a job and how they reduce among one another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Composition {
    /// The sites, at least one.
    pub sites: Vec<Site>,
    /// The way in which the sites without a parent reduce among one another.
    pub crossing: Crossing,
    /// The place where the optimizer runs.
    pub optimize_at: OptimizeAt,
    /// The encoding in which sums cross between sites; f32 if there is only one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub between_sites: BetweenSites,
}

/// Hubs that together hold a whole model for the members below them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Site {
    /// The site's name for people: `rack r1`, `host w3`; empty if there is only one site.
    pub name: String,
    /// The hubs, in the order in which the site's placement counts them.
    pub hubs: Vec<HubShape>,
    /// The ranks that exchange at this site, ascending.
    pub workers: Vec<u32>,
    /// The site above.
    pub parent: Option<SiteId>,
}

/// The way in which sites without a parent reduce among one another. `sharded`: each chunk has an owner
/// among them, to which the others send. `ring`: each chunk goes round, from the owner's successor to the
/// owner, and back. `line`: each chunk goes from the first site to the last one, and back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Crossing {
    /// Each chunk has an owner among them, to which the others send.
    #[default]
    Sharded,
    /// Each chunk goes round, from the owner's successor to the owner, and back.
    Ring,
    /// Each chunk goes from the first site to the last one, which owns it, and back. The ranks of each site come
    /// after those of the one before.
    Line,
}

/// The place of a worker or a hub.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Place {
    /// The rack's name; empty if none was given.
    pub rack: String,
    /// An id that distinguishes the host, and its network namespace, from all others. A hub sets it only if
    /// it serves its own host only. Like the rack at most 128 printable ASCII characters without spaces.
    pub host: String,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// The reason why sites cannot be composed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CompositionError {
    /// No site, or too many.
    #[error("a job needs 1 to {SITES_MAX} sites, not {0}")]
    Sites(usize),
    /// A site whose hubs cannot be used for a placement.
    #[error("{site}: {cause}")]
    Shape {
        /// The site.
        site: String,
        /// The reason.
        cause: ShapeError,
    },
    /// A parent that does not exist, is above itself, or is too high up.
    #[error("site {0} has no way up of at most {DEPTH_MAX} sites")]
    Parent(usize),
    /// A site with neither workers nor sites below it.
    #[error("{0} has neither workers nor sites below it")]
    Idle(String),
    /// Sites in a line that are not in the order of ranks.
    #[error("the sites of a line are not in the order of their ranks")]
    Order,
    /// A rank that is not at exactly one site.
    #[error("rank {0} is at no site, or at two")]
    Rank(u32),
}

impl Composition {
    /// One site for all workers.
    pub fn flat(hubs: Vec<HubShape>, workers: u32) -> Composition {
        let site = Site { name: String::new(), hubs, workers: (0..workers).collect(), parent: None };
        Composition {
            sites: vec![site],
            crossing: Crossing::default(),
            optimize_at: OptimizeAt::default(),
            between_sites: BetweenSites::default(),
        }
    }

    /// Returns whether there is only one site.
    pub fn is_flat(&self) -> bool {
        self.sites.len() == 1
    }

    /// Number of hubs of the job.
    pub fn hubs(&self) -> usize {
        self.sites.iter().map(|site| site.hubs.len()).sum()
    }

    /// Number of ranks of the job.
    pub fn workers(&self) -> u32 {
        self.sites.iter().map(|site| site.workers.len() as u32).sum()
    }

    /// The site at which a rank exchanges.
    pub fn site_of(&self, rank: u32) -> Option<SiteId> {
        (0..).zip(&self.sites).find(|(_, site)| site.workers.binary_search(&rank).is_ok()).map(|(id, _)| id)
    }

    /// The ranks whose gradients a site sums: those that exchange there or at sites below, ascending.
    pub fn ranks_below(&self, site: SiteId) -> Vec<u32> {
        let is_below = |mut from: SiteId| {
            // There are no more levels than sites.
            for _ in 0..self.sites.len() {
                if from == site {
                    return true;
                }
                match self.sites[usize::from(from)].parent {
                    Some(parent) => from = parent,
                    None => return false,
                }
            }
            false
        };
        let below = (0..).zip(&self.sites).filter(|(id, _)| is_below(*id));
        let mut ranks: Vec<u32> = below.flat_map(|(_, site)| site.workers.iter().copied()).collect();
        ranks.sort_unstable();
        ranks
    }

    /// Checks that the sites connect all workers.
    ///
    /// # Errors
    /// The first problem found.
    pub fn check(&self) -> Result<(), CompositionError> {
        if self.sites.is_empty() || self.sites.len() > SITES_MAX {
            return Err(CompositionError::Sites(self.sites.len()));
        }
        let workers = self.workers();
        let mut seen = vec![false; workers.min(WORKERS_MAX) as usize];
        for (id, site) in self.sites.iter().enumerate() {
            for (hub, shape) in site.hubs.iter().enumerate() {
                shape
                    .check(hub)
                    .map_err(|cause| CompositionError::Shape { site: site.name.clone(), cause })?;
            }
            let mut at = site;
            for _ in 1..DEPTH_MAX {
                let Some(parent) = at.parent else { break };
                at = self.sites.get(usize::from(parent)).ok_or(CompositionError::Parent(id))?;
            }
            if at.parent.is_some() {
                return Err(CompositionError::Parent(id));
            }
            let is_parent = self.sites.iter().any(|other| other.parent == Some(id as SiteId));
            if site.workers.is_empty() && !is_parent {
                return Err(CompositionError::Idle(site.name.clone()));
            }
            for &rank in &site.workers {
                match seen.get_mut(rank as usize) {
                    Some(seen) if !*seen => *seen = true,
                    _ => return Err(CompositionError::Rank(rank)),
                }
            }
            if !site.workers.is_sorted() {
                return Err(CompositionError::Rank(site.workers[0]));
            }
        }
        if self.crossing == Crossing::Line {
            let ranks = self.sites.iter().flat_map(|site| site.workers.iter().copied());
            let is_line = self.sites.iter().all(|site| site.parent.is_none()) && ranks.eq(0..workers);
            return if is_line { Ok(()) } else { Err(CompositionError::Order) };
        }
        Ok(())
    }

    /// The sites without a parent, in order.
    pub fn tops(&self) -> Vec<SiteId> {
        (0..).zip(&self.sites).filter(|(_, site)| site.parent.is_none()).map(|(id, _)| id).collect()
    }

    /// The owner of each chunk: in a line the last site; otherwise they are dealt longest first to the sites
    /// without a parent, by the weight of their interfaces.
    pub fn owners(&self, table: &KeyTable, map: &ChunkMap) -> Vec<SiteId> {
        let tops = self.tops();
        let weights: Vec<u64> = tops
            .iter()
            .map(|&top| self.sites[usize::from(top)].hubs.iter().map(HubShape::weight).sum())
            .collect();
        if self.crossing == Crossing::Line {
            return vec![tops[tops.len() - 1]; map.len() as usize];
        }
        let mut owners = vec![tops[0]; map.len() as usize];
        if tops.len() > 1 {
            for (&top, chunks) in tops.iter().zip(deal(table, map, &weights)) {
                chunks.into_iter().for_each(|chunk| owners[chunk as usize] = top);
            }
        }
        owners
    }

    /// The site to which `site` contributes its sum of a chunk; none at the owner itself.
    pub fn above(&self, site: SiteId, owner: SiteId) -> Option<SiteId> {
        let parent = self.sites[usize::from(site)].parent;
        match self.crossing {
            _ if parent.is_some() => parent,
            _ if site == owner => None,
            Crossing::Sharded => Some(owner),
            Crossing::Ring | Crossing::Line => Some(self.beside(site, 1)),
        }
    }

    /// The sites that contribute to `site` for some chunk, in the order in which their contributions are
    /// summed: first the sites below, which contribute to all chunks, then the peers, which all contribute to
    /// the same chunks. In a line there is at most one, whose sum comes before the site's own workers.
    pub fn member_sites(&self, site: SiteId) -> Vec<SiteId> {
        let below = (0..).zip(&self.sites).filter(|(_, other)| other.parent == Some(site)).map(|(id, _)| id);
        let mut members: Vec<SiteId> = below.collect();
        let tops = self.tops();
        if tops.contains(&site) && tops.len() > 1 {
            match self.crossing {
                Crossing::Sharded => members.extend(tops.into_iter().filter(|&top| top != site)),
                Crossing::Line if site == tops[0] => {}
                Crossing::Ring | Crossing::Line => members.push(self.beside(site, tops.len() - 1)),
            }
        }
        members
    }

    /// The number of workers of the smallest site, with those below it, that contributes to a chunk at the chunk's owner; `None` if
    /// none does.
    pub fn fewest_in_member_site(&self) -> Option<u32> {
        let members = self.tops().into_iter().flat_map(|top| self.member_sites(top));
        members.map(|member| self.ranks_below(member).len() as u32).min()
    }

    /// The site without a parent that comes `steps` after `top`.
    fn beside(&self, top: SiteId, steps: usize) -> SiteId {
        let tops = self.tops();
        let at = tops.iter().position(|&other| other == top).expect("only tops stand beside others");
        tops[(at + steps) % tops.len()]
    }

    /// A site's name for people.
    pub fn name(&self, site: SiteId) -> String {
        let Some(Site { name, hubs, .. }) = self.sites.get(usize::from(site)) else {
            return format!("site {site}");
        };
        let address = hubs.first().and_then(|hub| hub.interfaces.first()).map(|first| first.address.as_str());
        match (name.is_empty(), address) {
            (false, Some(address)) => format!("the hub of {name} ({address})"),
            (true, Some(address)) => format!("the hub at {address}"),
            _ => format!("site {site}"),
        }
    }
}

/// A composition with the placement at each site: the two ends of any stream must agree on it.
#[derive(Clone, Debug)]
pub struct Composed {
    /// The sites.
    pub composition: Composition,
    /// The placement at each site.
    pub placements: Vec<Placement>,
    /// The owner of each chunk.
    pub owners: Vec<SiteId>,
    hash: blake3::Hash,
}

impl Composed {
    /// Places each chunk of `map`, which was cut from `table`, at every site.
    ///
    /// # Errors
    /// If a site's hubs cannot be used for a placement, or the sites form no tree.
    pub fn new(table: &KeyTable, map: &ChunkMap, composition: Composition) -> Result<Self, CompositionError> {
        Composed::planned(table, map, composition, &[])
    }

    /// Does the same as [`Self::new`], but keys are dealt to the hubs of a site as [`Placement::planned`]
    /// deals them.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn planned(
        table: &KeyTable,
        map: &ChunkMap,
        composition: Composition,
        spreads: &[Spread],
    ) -> Result<Self, CompositionError> {
        composition.check()?;
        let placements = composition
            .sites
            .iter()
            .map(|site| {
                Placement::planned(table, map, &site.hubs, spreads)
                    .map_err(|cause| CompositionError::Shape { site: site.name.clone(), cause })
            })
            .collect::<Result<Vec<_>, _>>()?;
        let owners = composition.owners(table, map);
        let mut hasher = blake3::Hasher::new_derive_key("paramhub composition v1");
        for (site, placement) in composition.sites.iter().zip(&placements) {
            hasher.update(placement.hash().as_bytes());
            hasher.update(&site.parent.map_or(u32::MAX, u32::from).to_le_bytes());
        }
        let ways =
            [composition.crossing as u8, composition.optimize_at as u8, composition.between_sites.number()];
        hasher.update(&ways);
        owners.iter().for_each(|owner| {
            hasher.update(&owner.to_le_bytes());
        });
        Ok(Composed { hash: hasher.finalize(), composition, placements, owners })
    }

    /// Digest of everything that two hubs must share to understand each other's frames.
    pub fn hash(&self) -> blake3::Hash {
        self.hash
    }

    /// The site above `site` for a chunk.
    pub fn above(&self, site: SiteId, chunk: u32) -> Option<SiteId> {
        self.composition.above(site, self.owners[chunk as usize])
    }
}
