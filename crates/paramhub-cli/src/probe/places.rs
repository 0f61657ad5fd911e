//! Where each rank is: the address at which it listens, from the connection manager, and the name of its host,
//! from the rank itself.

use std::net::SocketAddr;

use paramhub_mesh::{Mesh, MeshError};
use paramhub_transport::lend;

/// Bytes of a host's name; a longer one is cut off, a shorter one is padded with zeros.
const HOST_BYTES: usize = 64;

/// The address of a rank and the name of its host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) address: SocketAddr,
    /// The name by which the host calls itself, or its beginning.
    pub(super) host: String,
}

/// Gathers the places of all ranks, by rank. Every rank must call it.
pub(super) fn gather(mesh: &Mesh, addresses: &[SocketAddr]) -> Result<Vec<Place>, MeshError> {
    let mut names = vec![[0; HOST_BYTES]; addresses.len()];
    names[mesh.rank() as usize] = padded(&rustix::system::uname().nodename().to_string_lossy());
    lend(|lending| {
        let names = names.iter_mut().map(|name| lending.receive(name)).collect();
        mesh.allgather(None, names)?.wait()
    })?;
    let place = |(&address, name)| Place { address, host: printable(name) };
    Ok(addresses.iter().zip(&names).map(place).collect())
}

fn padded(name: &str) -> [u8; HOST_BYTES] {
    let mut padded = [0; HOST_BYTES];
    let name = &name.as_bytes()[..name.len().min(HOST_BYTES)];
    padded[..name.len()].copy_from_slice(name);
    padded
}

/// The name that a rank gave, without characters that a terminal would obey.
fn printable(name: &[u8; HOST_BYTES]) -> String {
    String::from_utf8_lossy(name).chars().filter(|c| !c.is_control() && *c != '\u{fffd}').collect()
}

/// Refuses a loopback address if any rank has another one: loopback leads to the machine itself.
pub(super) fn check(addresses: &[SocketAddr]) -> anyhow::Result<()> {
    let is_local = |address: &SocketAddr| address.ip().is_loopback();
    let local = addresses.iter().position(is_local);
    let remote = addresses.iter().position(|address| !is_local(address));
    if let (Some(local), Some(remote)) = (local, remote) {
        anyhow::bail!(
            "rank {local} listens on {}, which rank {remote} at {} cannot reach: start it with --address",
            addresses[local].ip(),
            addresses[remote].ip(),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_hosts_are_short_and_printable() {
        assert_eq!(printable(&padded("node-7")), "node-7");
        assert_eq!(printable(&padded("")), "");
        assert_eq!(printable(&padded(&"x".repeat(100))), "x".repeat(HOST_BYTES));
        // The text of another rank is shown on a terminal, so it must hold no control characters.
        assert_eq!(printable(&padded("a\x1b[2Jb")), "a[2Jb");
        assert_eq!(printable(&[0xff; HOST_BYTES]), "");
    }

    #[test]
    fn loopback_among_machines_is_found_out() {
        let addresses = |texts: [&str; 2]| texts.map(|text| text.parse().unwrap());
        check(&addresses(["127.0.0.1:1", "127.0.0.1:2"])).unwrap();
        check(&addresses(["10.0.0.1:1", "10.0.0.2:1"])).unwrap();
        let refused = check(&addresses(["10.0.0.1:1", "127.0.0.1:2"])).unwrap_err().to_string();
        assert!(
            refused.contains("rank 1 listens on 127.0.0.1") && refused.contains("--address"),
            "{refused}"
        );
    }
}
