//! What must hold where two hubs have each chunk: a hub that takes over has all that workers were answered, the hub before
//! it answers with nothing newer, and a hub that still receives its copies never takes over.

use std::collections::{BTreeMap, BTreeSet};

use paramhub_core::chunk::ChunkId;
use paramhub_core::composition::{Composition, SiteId};
use paramhub_core::standbys::Share;

use super::SiteChunk;
use crate::network::StreamId;

/// The hubs of a job with standbys. Each has a number for its copies of the chunks: its position in the job. A hub that comes
/// back, or becomes a standby once more, has another position.
#[derive(Debug, Default)]
pub(super) struct Standbys {
    /// The number of hubs with which the job has begun.
    first_hubs: u16,
    /// The copies from which workers are answered by each stream.
    copies: BTreeMap<StreamId, SiteId>,
    /// The newest version of each chunk that a worker has received.
    received: BTreeMap<ChunkId, u32>,
    /// The hubs that have taken over a chunk, in this order, and the versions that they had then.
    taken_over: BTreeMap<ChunkId, Vec<(SiteId, u32)>>,
    /// The shares that the manager has told last, with their number.
    decided: Option<(u32, Vec<Share>)>,
    /// How often a hub that has joined a running job had all chunks of a share.
    became_ready: usize,
    /// How often a hub that serves a share had all chunks of a further one.
    became_ready_further: usize,
    /// The hubs that have joined the running job and have taken over since.
    later_took_over: BTreeSet<SiteId>,
}

impl Standbys {
    /// The hubs are known.
    pub(super) fn arranged(&mut self, composition: &Composition, shares: &[Share]) {
        self.decided.get_or_insert_with(|| (0, shares.to_vec()));
        self.first_hubs = composition.hubs() as u16;
    }

    /// A hub with these copies exchanges with a worker by a stream.
    pub(super) fn exchanges(&mut self, stream: StreamId, copy: SiteId) {
        self.copies.insert(stream, copy);
    }

    /// The number of the copies at the other end of a worker's stream.
    pub(super) fn copy_of(&self, stream: StreamId) -> SiteId {
        self.copies.get(&stream).copied().unwrap_or(0)
    }

    /// How often a hub that has joined a running job had all chunks of a share.
    pub(super) fn became_ready(&self) -> usize {
        self.became_ready
    }

    /// How often a hub that serves a share had all chunks of a further one.
    pub(super) fn became_ready_further(&self) -> usize {
        self.became_ready_further
    }

    /// How many hubs that have joined the running job have taken over.
    pub(super) fn later_took_over(&self) -> usize {
        self.later_took_over.len()
    }

    /// The manager tells hubs the shares, which have changed so often.
    pub(super) fn decided(&mut self, number: u32, shares: &[Share]) -> Result<(), String> {
        let Some((known, before)) = &self.decided else {
            self.decided = Some((number, shares.to_vec()));
            return Ok(());
        };
        if number == *known && before != shares {
            return Err(format!(
                "hubs are told different shares as number {number}: {before:?} and {shares:?}"
            ));
        }
        if number <= *known {
            // The manager has told them before.
            return Ok(());
        }
        let is_next = number == known + 1;
        for (share, (was, is)) in before.iter().zip(shares).enumerate() {
            let takes_over = was.served_by != is.served_by;
            if is_next && takes_over && was.ready_standby() != Some(is.served_by) {
                return Err(format!(
                    "hub {} takes over share {share}, of which the hubs were {was:?}: it does not have all chunks",
                    is.served_by
                ));
            }
            if was.copying && !is.copying && is.standby == was.standby && is.standby.is_some() {
                self.became_ready += 1;
                let has_other = |other: &Share| other.served_by == is.standby.unwrap_or_default();
                self.became_ready_further += usize::from(shares.iter().any(has_other));
            }
        }
        self.decided = Some((number, shares.to_vec()));
        Ok(())
    }

    /// A hub takes over a chunk, of which it has this version, if it has the chunk.
    pub(super) fn takes_over(
        &mut self,
        (copy, chunk): SiteChunk,
        version: Option<u32>,
    ) -> Result<(), String> {
        self.taken_over.entry(chunk).or_default().push((copy, version.unwrap_or(0)));
        if copy >= self.first_hubs {
            self.later_took_over.insert(copy);
        }
        match (self.received.get(&chunk), version) {
            (Some(&newest), None) => Err(format!(
                "hub {copy} takes over chunk {chunk} without it, and workers have version {newest}"
            )),
            (Some(&newest), Some(version)) if newest > version => Err(format!(
                "hub {copy} takes over chunk {chunk} at version {version}, and workers have {newest}"
            )),
            _ => Ok(()),
        }
    }

    /// A worker has received a version of a chunk from a hub.
    pub(super) fn received(&mut self, (copy, chunk): SiteChunk, version: u32) -> Result<(), String> {
        let newest = self.received.entry(chunk).or_default();
        *newest = version.max(*newest);
        let all = self.taken_over.get(&chunk).map_or(&[][..], Vec::as_slice);
        // The hub that has taken over after this one.
        let own = all.iter().rposition(|&(other, _)| other == copy).map_or(0, |own| own + 1);
        match all.get(own) {
            Some(&(other, at)) if version > at => Err(format!(
                "hub {copy} answers with version {version} of chunk {chunk}, which hub {other} has taken over at version {at}"
            )),
            _ => Ok(()),
        }
    }
}
