//! The configuration of a mesh.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use paramhub_core::limits::WORKERS_MAX;

use crate::error::{MeshError, MeshRank};
use crate::secrets::MeshSecrets;

/// The information that a rank needs to join a mesh. All but `rank`, `secrets`, `shares_memory` and the
/// timeouts must be the same on every rank.
#[derive(Clone, Debug)]
pub struct MeshConfig {
    /// The mesh's name in messages.
    pub name: Arc<str>,
    /// The rank of this process, counted from 0.
    pub rank: u32,
    /// Ranks in the mesh.
    pub size: u32,
    /// The secrets with which the ranks prove themselves. Two meshes must not share them: derive those of each
    /// mesh from the job's.
    pub secrets: MeshSecrets,
    /// The address at which each rank listens, by rank: what
    /// [`MeshListener::address`](crate::MeshListener::address) returned there, with an IP address under which
    /// the others reach it. The caller exchanges the addresses. A rank does not use its own.
    pub addresses: Vec<SocketAddr>,
    /// `true` if ranks that are all on one host do collectives through shared memory. If one of them forbids
    /// it, all use TCP, as ranks on several hosts do, and ranks where the memory cannot be allocated.
    pub shares_memory: bool,
    /// `true` if the connections are encrypted: TCP is, and shared memory needs not be.
    pub encrypts: bool,
    /// The time that [`join`](crate::MeshListener::join) waits for the others.
    pub join_timeout: Duration,
    /// A peer that has sent nothing for so long, while an operation is outstanding, counts as dead. Peers
    /// send heartbeats.
    pub dead_after: Duration,
    /// The time in which a connection that broke, for example by a reset, is made again and goes on where it was
    /// cut. If it is zero, the mesh fails at once. A connection that is closed is the death of a process. Ranks that
    /// share memory are on one host and dial no connection again.
    pub redial_grace: Duration,
}

impl MeshConfig {
    /// The time that joining may take.
    pub const JOIN_TIMEOUT: Duration = Duration::from_secs(60);
    /// Longer than a switch takes to restart a port; a killed process is noticed at once all the same.
    pub const DEAD_AFTER: Duration = Duration::from_secs(30);
    /// That of a job's streams to its hubs.
    pub const REDIAL_GRACE: Duration = Duration::from_millis(500);

    /// A configuration with the default timeouts.
    pub fn new(rank: u32, secrets: impl Into<MeshSecrets>, addresses: Vec<SocketAddr>) -> Self {
        MeshConfig {
            name: "default".into(),
            rank,
            size: u32::try_from(addresses.len()).unwrap_or(u32::MAX),
            secrets: secrets.into(),
            addresses,
            shares_memory: true,
            encrypts: false,
            join_timeout: Self::JOIN_TIMEOUT,
            dead_after: Self::DEAD_AFTER,
            redial_grace: Self::REDIAL_GRACE,
        }
    }

    pub(crate) fn this_rank(&self) -> MeshRank {
        MeshRank { mesh: Arc::clone(&self.name), rank: self.rank }
    }

    pub(crate) fn check(&self) -> Result<(), MeshError> {
        let (rank, size) = (self.rank, self.size);
        let reason = if size == 0 || size > WORKERS_MAX {
            format!("a mesh has 1 to {WORKERS_MAX} ranks, not {size}")
        } else if rank >= size {
            format!("a mesh of {size} has ranks 0 to {}, not {rank}", size - 1)
        } else if self.addresses.len() != size as usize {
            format!(
                "{} addresses were given for {size} ranks: give one for each, by rank",
                self.addresses.len()
            )
        } else if let Some(rank) = (0..rank).find(|rank| self.addresses[*rank as usize].port() == 0) {
            format!("the address of rank {rank} has port 0: give the one that its listener has got")
        } else if let Some(rank) = (0..rank).find(|rank| self.addresses[*rank as usize].ip().is_unspecified())
        {
            let address = self.addresses[rank as usize];
            format!(
                "rank {rank} cannot be reached at {address}: give the IP address of one of its interfaces"
            )
        } else if self.dead_after.is_zero() {
            "dead_after is zero: no peer answers that fast".to_owned()
        } else {
            return Ok(());
        };
        Err(MeshError::Configuration { this_rank: self.this_rank(), reason: reason.into() })
    }
}
