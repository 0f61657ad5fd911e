//! What must hold between the sites of a job: all of them make the same versions of a chunk, of the same sums.

use std::collections::{BTreeMap, BTreeSet};

use paramhub_core::chunk::ChunkId;
use paramhub_core::composition::{Composition, SiteId};

use super::SiteChunk;
use crate::message::Contribution;

/// The sites of the job, and what they have made.
#[derive(Debug, Default)]
pub(super) struct Sites {
    /// The site of each rank that is not at the first.
    site_of: BTreeMap<u32, SiteId>,
    /// The ranks whose contributions each site sums; empty if there is one site.
    below: BTreeMap<SiteId, BTreeSet<u32>>,
    /// The first sum that a site has had for a version of a chunk, and the digest of the parameters.
    made: BTreeMap<(ChunkId, u32), Version>,
    /// Whether two hubs of one site have each chunk. They are counted as sites here.
    has_copies: bool,
}

#[derive(Debug)]
struct Version {
    site: SiteId,
    digest: u64,
    /// The contributions; `None` if only the owner has them.
    sum: Option<Vec<Contribution>>,
}

impl Sites {
    /// Sites that are not known yet.
    pub(super) fn new(has_copies: bool) -> Sites {
        Sites { has_copies, ..Sites::default() }
    }

    /// The sites are known.
    pub(super) fn arranged(&mut self, composition: &Composition) {
        if composition.is_flat() {
            return;
        }
        for (id, site) in (0..).zip(&composition.sites) {
            self.site_of.extend(site.workers.iter().map(|&rank| (rank, id)));
            self.below.insert(id, composition.ranks_below(id).into_iter().collect());
        }
    }

    /// The site at which a rank exchanges.
    pub(super) fn of(&self, rank: u32) -> SiteId {
        self.site_of.get(&rank).copied().unwrap_or(0)
    }

    /// A site sends a sum to the site above: every rank below is in it once.
    pub(super) fn raised(
        &self,
        (site, chunk): SiteChunk,
        step: u32,
        sum: &[Contribution],
    ) -> Result<(), String> {
        let ranks: BTreeSet<u32> = sum.iter().map(|contribution| contribution.rank).collect();
        let lacks_one = self.below.get(&site).is_none_or(|below| !below.is_subset(&ranks));
        let has_others = sum.iter().any(|contribution| contribution.step != step);
        match lacks_one || has_others || ranks.len() < sum.len() {
            false => Ok(()),
            true => Err(format!("site {site} sends up the sum of {sum:?} for chunk {chunk} at step {step}")),
        }
    }

    /// A site has updated a chunk with this sum, in the order of ranks.
    pub(super) fn updated(
        &mut self,
        chunk: SiteChunk,
        version: u32,
        sum: &[Contribution],
        digest: u64,
    ) -> Result<(), String> {
        self.makes(chunk, version, digest, Some(sum))
    }

    /// A site has taken the parameters of a version from the chunk's owner.
    pub(super) fn lowered(&mut self, chunk: SiteChunk, version: u32, digest: u64) -> Result<(), String> {
        self.makes(chunk, version, digest, None)
    }

    fn makes(
        &mut self,
        (site, chunk): SiteChunk,
        version: u32,
        digest: u64,
        sum: Option<&[Contribution]>,
    ) -> Result<(), String> {
        if self.below.is_empty() && !self.has_copies {
            return Ok(());
        }
        let made = Version { site, digest, sum: sum.map(<[_]>::to_vec) };
        let first = self.made.entry((chunk, version)).or_insert(made);
        let has_other_sum = first.sum.as_deref().zip(sum).is_some_and(|(first, sum)| first != sum);
        match first.digest != digest || has_other_sum {
            false => Ok(()),
            true => Err(format!(
                "site {site} makes version {version} of chunk {chunk} of {sum:?}, and site {} of {:?}",
                first.site, first.sum
            )),
        }
    }
}
