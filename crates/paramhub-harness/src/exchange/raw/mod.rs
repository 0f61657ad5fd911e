//! The bound: the time in which the same processes move the same bytes and do nothing with them.

mod shm;
mod tcp;

use serde::{Deserialize, Serialize};

use super::spec::{Spec, Transport};

/// The address at which workers find the raw server.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Server {
    /// There is no raw server.
    #[default]
    Nowhere,
    /// The address of each stream of a worker.
    Tcp(Vec<std::net::SocketAddr>),
    /// The name of a local socket.
    Shm(String),
}

/// Starts the server in the hub's process.
pub(super) fn serve(spec: &Spec) -> anyhow::Result<Server> {
    Ok(match spec.transport {
        _ if !spec.is_raw => Server::Nowhere,
        Transport::Tcp => Server::Tcp(tcp::serve(spec.workers, spec.streams, &spec.raw_bytes())?),
        Transport::Shm | Transport::Auto => Server::Shm(shm::serve(spec)?),
    })
}

/// A worker's end.
pub(super) enum Raw {
    Tcp { streams: tcp::RawStreams, source: Vec<u8>, target: Vec<u8> },
    Shm(shm::RawArena),
}

impl Raw {
    pub(super) fn connect(server: &Server, spec: &Spec, rank: u32) -> anyhow::Result<Option<Raw>> {
        let bytes = spec.keys.bytes() as usize;
        Ok(match server {
            Server::Nowhere => None,
            Server::Tcp(addresses) => Some(Raw::Tcp {
                streams: tcp::RawStreams::connect(addresses, spec.raw_bytes())?,
                // Written once, so that no exchange pays for memory that the kernel has only promised.
                source: vec![1; bytes],
                target: vec![1; bytes],
            }),
            Server::Shm(name) => Some(Raw::Shm(shm::RawArena::connect(name, spec, rank)?)),
        })
    }

    /// Sends every gradient byte and receives as many.
    pub(super) fn exchange(&mut self) -> anyhow::Result<()> {
        match self {
            Raw::Tcp { streams, source, target } => streams.exchange(source, target),
            Raw::Shm(arena) => arena.exchange(),
        }
    }
}
