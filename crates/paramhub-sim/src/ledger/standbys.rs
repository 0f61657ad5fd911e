//! What must hold where two hubs have each chunk: a hub that takes over has all that workers were answered, and the hub before
//! it answers with nothing newer.

use std::collections::BTreeMap;

use paramhub_core::chunk::ChunkId;
use paramhub_core::composition::{Composition, SiteId};

use super::SiteChunk;
use crate::job::hub_at;
use crate::network::Process;

/// The hubs of a job with standbys. Each has a number for its copies of the chunks, its position in the job.
#[derive(Debug, Default)]
pub(super) struct Standbys {
    copies: BTreeMap<Process, SiteId>,
    /// The newest version of each chunk that a worker has received.
    received: BTreeMap<ChunkId, u32>,
    /// The hub that has taken over a chunk last, and the version that it had then.
    taken_over: BTreeMap<ChunkId, (SiteId, u32)>,
}

impl Standbys {
    /// The hubs are known.
    pub(super) fn arranged(&mut self, composition: &Composition) {
        let hubs = (0..).zip(&composition.sites[0].hubs);
        self.copies = hubs.map(|(copy, shape)| (Process::Hub(hub_at(shape)), copy)).collect();
    }

    /// The number of a hub's copies.
    pub(super) fn copy_of(&self, hub: Process) -> SiteId {
        self.copies.get(&hub).copied().unwrap_or(0)
    }

    /// A hub takes over a chunk, of which it has this version.
    pub(super) fn takes_over(&mut self, (copy, chunk): SiteChunk, version: u32) -> Result<(), String> {
        self.taken_over.insert(chunk, (copy, version));
        match self.received.get(&chunk) {
            Some(&newest) if newest > version => Err(format!(
                "hub {copy} takes over chunk {chunk} at version {version}, and workers have {newest}"
            )),
            _ => Ok(()),
        }
    }

    /// A worker has received a version of a chunk from a hub.
    pub(super) fn received(&mut self, (copy, chunk): SiteChunk, version: u32) -> Result<(), String> {
        let newest = self.received.entry(chunk).or_default();
        *newest = version.max(*newest);
        match self.taken_over.get(&chunk) {
            Some(&(other, at)) if other != copy && version > at => Err(format!(
                "hub {copy} answers with version {version} of chunk {chunk}, which hub {other} has taken over at version {at}"
            )),
            _ => Ok(()),
        }
    }
}
