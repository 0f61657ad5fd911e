//! A communicator over a mesh of connections: what needs nothing installed.

use std::net::IpAddr;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use paramhub_core::codec::Dtype;
use paramhub_mesh::{ElementType, Handle, Mesh, MeshConfig, MeshError, MeshListener, ReduceOp};
use paramhub_transport::lend;

use super::error::CommunicatorError;
use super::{Communicator, check_blocks};

/// How long leaving waits for the other ranks to have read that this one does.
const LEAVE: Duration = Duration::from_secs(10);
/// Room for an address as text.
const ADDRESS_BYTES: usize = 64;

/// A communicator of this library's own: over shared memory where all ranks are on one host, else over TCP.
#[derive(Debug)]
pub struct Native {
    mesh: Mesh,
    /// What it was made with and where this rank listens, for others like it; none where only the mesh is known.
    origin: Option<(MeshConfig, IpAddr)>,
    copies: AtomicU32,
}

impl Native {
    /// Joins the other ranks, each of which listens where the configuration says.
    ///
    /// # Errors
    /// If a rank does not arrive or is turned away.
    pub fn join(listener: MeshListener, config: MeshConfig) -> Result<Native, CommunicatorError> {
        let ip = listener.address().ip();
        let mesh = listener.join(config.clone())?;
        Ok(Native { mesh, origin: Some((config, ip)), copies: AtomicU32::new(0) })
    }

    /// Over a mesh that its ranks have joined. It cannot be duplicated.
    pub fn over(mesh: Mesh) -> Native {
        Native { mesh, origin: None, copies: AtomicU32::new(0) }
    }

    /// The connections, for what is no collective.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Another of the same ranks, which all call it.
    ///
    /// # Errors
    /// If it was made [over a mesh](Self::over), or a rank cannot be reached.
    pub fn another(&self) -> Result<Native, CommunicatorError> {
        let Some((config, ip)) = &self.origin else {
            return Err(CommunicatorError::Misplaced {
                name: "duplicate".into(),
                reason: "it was made of a mesh, and knows no other way to the ranks".into(),
            });
        };
        let number = self.copies.fetch_add(1, Ordering::Relaxed) + 1;
        let refused = |what, reason: String| CommunicatorError::System { rank: self.rank(), what, reason };
        let listener = MeshListener::bind(*ip).map_err(|error| refused("listen", error.to_string()))?;
        let told = self.exchange(&listener.address().to_string())?;
        let addresses = told.iter().map(|address| FromStr::from_str(address));
        let addresses = addresses
            .collect::<Result<Vec<_>, _>>()
            .map_err(|_| refused("read where the others listen", format!("{told:?}")))?;
        let name = format!("communicator {number}");
        let config = MeshConfig {
            name: format!("{}, {name}", config.name).into(),
            secret: config.secret.derive(&name),
            addresses,
            ..config.clone()
        };
        Native::join(listener, config)
    }

    /// Every rank's text, by rank.
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

impl Communicator for Native {
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

    fn allreduce(&self, _name: &str, values: &mut [u8], dtype: Dtype) -> Result<(), CommunicatorError> {
        lend(|lending| done(self.mesh.allreduce(lending.receive(values), element(dtype), ReduceOp::Sum)))
    }

    fn broadcast(&self, _name: &str, bytes: &mut [u8], root: u32) -> Result<(), CommunicatorError> {
        lend(|lending| done(self.mesh.broadcast(lending.receive(bytes), root)))
    }

    fn reduce_scatter(
        &self,
        name: &str,
        values: &[u8],
        sum: &mut [u8],
        dtype: Dtype,
    ) -> Result<(), CommunicatorError> {
        check_blocks(name, self.size(), sum.len(), values.len(), Some(dtype))?;
        let block = sum.len();
        lend(|lending| {
            let blocks = (0..self.size() as usize).map(|rank| &values[rank * block..][..block]);
            let inputs = blocks.map(|block| lending.send(block)).collect();
            let output = lending.receive(sum);
            done(self.mesh.reduce_scatter(inputs, output, false, element(dtype), ReduceOp::Sum))
        })
    }

    fn allgather(&self, name: &str, block: &[u8], all: &mut [u8]) -> Result<(), CommunicatorError> {
        check_blocks(name, self.size(), block.len(), all.len(), None)?;
        if block.is_empty() {
            return self.barrier();
        }
        lend(|lending| {
            let outputs = all.chunks_mut(block.len()).map(|output| lending.receive(output)).collect();
            done(self.mesh.allgather(Some(lending.send(block)), outputs))
        })
    }

    fn barrier(&self) -> Result<(), CommunicatorError> {
        done(self.mesh.barrier())
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
