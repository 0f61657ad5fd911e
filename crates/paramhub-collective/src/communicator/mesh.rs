//! A communicator over a mesh of connections, which needs no other software.

use std::net::IpAddr;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use paramhub_core::codec::Dtype;
use paramhub_mesh::{ElementType, Handle, Mesh, MeshConfig, MeshError, MeshListener, ReduceOp};
use paramhub_transport::lend;

use super::error::CommunicatorError;
use super::{Collective, Communicator, check_blocks};

/// The time that leaving waits until the other ranks have read this rank's leave message.
const LEAVE: Duration = Duration::from_secs(10);
/// Room for an address as text.
const ADDRESS_BYTES: usize = 64;

/// A communicator of this library's own: over shared memory where all ranks are on one host, else over TCP.
#[derive(Debug)]
pub struct MeshCommunicator {
    mesh: Mesh,
    /// The configuration and this rank's address, for duplicates; `None` where only the mesh is known.
    origin: Option<(MeshConfig, IpAddr)>,
    copies: AtomicU32,
}

impl MeshCommunicator {
    /// Joins the other ranks, which listen at the addresses of the configuration.
    ///
    /// # Errors
    /// If a rank does not arrive or is refused.
    pub fn join(listener: MeshListener, config: MeshConfig) -> Result<MeshCommunicator, CommunicatorError> {
        let ip = listener.address().ip();
        let mesh = listener.join(config.clone())?;
        Ok(MeshCommunicator { mesh, origin: Some((config, ip)), copies: AtomicU32::new(0) })
    }

    /// A communicator over a joined mesh. It cannot be duplicated.
    pub fn over(mesh: Mesh) -> MeshCommunicator {
        MeshCommunicator { mesh, origin: None, copies: AtomicU32::new(0) }
    }

    /// The mesh, for operations that are not collectives.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Another communicator of the same ranks, which must all call it.
    ///
    /// # Errors
    /// If this communicator was made [over a mesh](Self::over), or a rank cannot be reached.
    pub fn another(&self) -> Result<MeshCommunicator, CommunicatorError> {
        let Some((config, ip)) = &self.origin else {
            return Err(CommunicatorError::Misused {
                name: "duplicate".into(),
                reason: "it was made of a mesh, and knows no other way to the ranks".into(),
            });
        };
        let number = self.copies.fetch_add(1, Ordering::Relaxed) + 1;
        let refused = |what, reason: String| CommunicatorError::System { rank: self.rank(), what, reason };
        let listener = MeshListener::bind(*ip).map_err(|error| refused("listen", error.to_string()))?;
        let addresses_text = self.exchange(&listener.address().to_string())?;
        let addresses = addresses_text.iter().map(|address| FromStr::from_str(address));
        let addresses = addresses
            .collect::<Result<Vec<_>, _>>()
            .map_err(|_| refused("read where the others listen", format!("{addresses_text:?}")))?;
        let name = format!("communicator {number}");
        let config = MeshConfig {
            name: format!("{}, {name}", config.name).into(),
            secrets: config.secrets.derive(&name),
            addresses,
            ..config.clone()
        };
        MeshCommunicator::join(listener, config)
    }

    /// Gathers every rank's text, by rank.
    fn exchange(&self, text: &str) -> Result<Vec<String>, CommunicatorError> {
        let mut own = [0_u8; ADDRESS_BYTES];
        own[..text.len()].copy_from_slice(text.as_bytes());
        let mut all = vec![0_u8; ADDRESS_BYTES * self.size() as usize];
        self.allgather("addresses", &own, &mut all)?;
        let text_of = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned();
        Ok(all.chunks(ADDRESS_BYTES).map(text_of).collect())
    }
}

/// Waits for an operation over lent memory.
fn done(handle: Result<Handle, MeshError>) -> Result<(), CommunicatorError> {
    Ok(handle?.wait()?)
}

fn element(dtype: Dtype) -> ElementType {
    match dtype {
        Dtype::F32 => ElementType::F32,
        Dtype::F16 => ElementType::F16,
        Dtype::BF16 => ElementType::BF16,
    }
}

impl Communicator for MeshCommunicator {
    fn rank(&self) -> u32 {
        self.mesh.rank()
    }

    fn size(&self) -> u32 {
        self.mesh.size()
    }

    fn transport(&self) -> &'static str {
        match self.mesh.shares_memory() {
            Ok(()) => "shared memory",
            Err(_) => "tcp",
        }
    }

    fn call(&self, name: &str, collective: Collective<'_>) -> Result<(), CommunicatorError> {
        let (mesh, sum_of) = (&self.mesh, ReduceOp::Sum);
        match collective {
            Collective::Allreduce { values, dtype } => {
                lend(|lending| done(mesh.allreduce(lending.receive(values), element(dtype), sum_of)))
            }
            Collective::Broadcast { bytes, root } => {
                lend(|lending| done(mesh.broadcast(lending.receive(bytes), root)))
            }
            Collective::ReduceScatter { values, sum, dtype } => {
                check_blocks(name, self.size(), sum.len(), values.len(), Some(dtype))?;
                let block = sum.len();
                lend(|lending| {
                    let blocks = (0..self.size() as usize).map(|rank| &values[rank * block..][..block]);
                    let inputs = blocks.map(|block| lending.send(block)).collect();
                    let output = lending.receive(sum);
                    done(mesh.reduce_scatter(inputs, output, false, element(dtype), sum_of))
                })
            }
            Collective::Allgather { block, all } => {
                check_blocks(name, self.size(), block.len(), all.len(), None)?;
                if block.is_empty() {
                    return done(mesh.barrier());
                }
                lend(|lending| {
                    let outputs = all.chunks_mut(block.len()).map(|output| lending.receive(output)).collect();
                    done(mesh.allgather(Some(lending.send(block)), outputs))
                })
            }
            Collective::Barrier => done(mesh.barrier()),
        }
    }

    fn duplicate(&self) -> Result<Box<dyn Communicator>, CommunicatorError> {
        Ok(Box::new(self.another()?))
    }

    fn abort(&self, reason: &str) {
        self.mesh.abort(reason);
    }

    fn leave(&self) -> Result<(), CommunicatorError> {
        Ok(self.mesh.leave(LEAVE)?)
    }

    fn failure(&self) -> Option<CommunicatorError> {
        self.mesh.failure().map(CommunicatorError::Mesh)
    }
}
