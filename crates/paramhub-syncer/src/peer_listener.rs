//! Connects the workers of a job with one another: each listens, and the connection manager gives the
//! addresses to all.

use std::fmt;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use paramhub_control::ManagerClient;
use paramhub_core::auth::StreamSecret;
use paramhub_mesh::{Mesh, MeshConfig, MeshListener, MeshSecrets};
use paramhub_worker::{Member, Membership};

use crate::error::SyncError;

/// The ports on which the workers of a machine may listen for one another, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    first: u16,
    last: u16,
}

impl PortRange {
    /// A port that the system chooses.
    pub const ANY: PortRange = PortRange { first: 0, last: 0 };

    /// Listens on the first port of the range that is free.
    ///
    /// # Errors
    /// A message for people: why no port is available.
    pub fn listen(self, address: IpAddr) -> Result<MeshListener, String> {
        for port in self.first..=self.last {
            match MeshListener::bind_to(SocketAddr::new(address, port)) {
                Ok(listener) => return Ok(listener),
                Err(error) if error.kind() == ErrorKind::AddrInUse => {}
                Err(error) => return Err(format!("cannot listen on {address}: {error}")),
            }
        }
        let PortRange { first, last } = self;
        Err(format!(
            "no port from {first} to {last} of {address} is free: give one for each worker of this machine"
        ))
    }
}

impl FromStr for PortRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let port = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port > 0);
        match (port(first), port(last)) {
            (Some(first), Some(last)) if first <= last => Ok(PortRange { first, last }),
            _ => Err(format!("`{text}` is no port and no range of them, such as 7800 or 7800-7815")),
        }
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PortRange { first, last } if first == last => write!(f, "{first}"),
            PortRange { first, last } => write!(f, "{first}-{last}"),
        }
    }
}

/// The address of this machine's interface towards the connection manager at `url`; other machines that reach
/// the manager are likely to reach this one under it. Sends nothing.
///
/// # Errors
/// A message for people: why the address is not known.
pub fn address_towards(url: &str) -> Result<IpAddr, String> {
    let manager = ManagerClient::new(url, None).map_err(|error| error.to_string())?;
    let cannot = |why: &str| format!("cannot find the interface that leads to {url}: {why}");
    let resolved =
        manager.host_and_port().to_socket_addrs().map_err(|error| cannot(&error.to_string()))?.next();
    let server = resolved.ok_or_else(|| cannot("its name has no address"))?;
    let any: IpAddr = if server.is_ipv4() { [0, 0, 0, 0].into() } else { Ipv6Addr::UNSPECIFIED.into() };
    // Connecting a datagram socket sends nothing: it only picks the route.
    let picked = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect(server)?;
        socket.local_addr()
    });
    match picked.map_err(|error| cannot(&error.to_string()))?.ip() {
        address if address.is_unspecified() => Err(cannot("the kernel names none")),
        address => Ok(address),
    }
}

/// The listener of a worker for the others of its job. A worker makes it before it connects to the connection
/// manager with [`Options::peer_address`](paramhub_worker::Options::peer_address).
#[derive(Debug)]
pub struct PeerListener {
    listener: MeshListener,
    rank: u32,
}

impl PeerListener {
    /// Listens on this machine's interface towards the connection manager.
    ///
    /// # Errors
    /// If no interface leads there or no port is free.
    pub fn listen(membership: &Membership, ports: PortRange) -> Result<PeerListener, SyncError> {
        let rank = membership.rank;
        let listener = address_towards(&membership.url)
            .and_then(|address| ports.listen(address))
            .map_err(|reason| SyncError::Rendezvous { rank, reason: reason.into() })?;
        Ok(PeerListener::new(listener, membership))
    }

    /// For a caller that chooses the address on which it listens.
    pub fn new(listener: MeshListener, membership: &Membership) -> PeerListener {
        PeerListener { listener, rank: membership.rank }
    }

    /// The address for [`Options::peer_address`](paramhub_worker::Options::peer_address).
    pub fn address(&self) -> SocketAddr {
        self.listener.address()
    }

    /// Connects with all other workers of a job, after every rank has connected to the manager. Each mesh of
    /// a job must have another `name`.
    ///
    /// # Errors
    /// If a rank does not listen or cannot be reached.
    pub fn join(self, member: &PeerAddresses, name: &str) -> Result<Mesh, SyncError> {
        let (listener, config) = self.mesh_config(member, name)?;
        Ok(listener.join(config)?)
    }

    /// The listener and configuration with which [`join`](Self::join) connects, for callers that change the
    /// configuration.
    ///
    /// # Errors
    /// If a rank does not listen.
    pub fn mesh_config(
        self,
        member: &PeerAddresses,
        name: &str,
    ) -> Result<(MeshListener, MeshConfig), SyncError> {
        let PeerListener { listener, rank } = self;
        let silent = member.addresses.iter().position(Option::is_none);
        if let Some(peer) = silent {
            let reason = format!(
                "rank {peer} does not listen for the others, which this rank does: let all ranks exchange alike"
            );
            return Err(SyncError::Rendezvous { rank, reason: reason.into() });
        }
        let addresses = member.addresses.iter().flatten().copied().collect();
        let secrets = MeshSecrets::Pairs(member.pair_secrets.as_slice().into());
        let config = MeshConfig {
            name: Arc::from(format!("{} of job {}", name, member.job)),
            encrypts: member.encrypts,
            redial_grace: member.redial_grace,
            ..MeshConfig::new(rank, secrets.derive(name), addresses)
        };
        Ok((listener, config))
    }
}

/// The addresses at which the workers of a job listen for one another, and the secrets with which they prove
/// themselves, known once all have connected to the manager.
#[derive(Clone, Debug)]
pub struct PeerAddresses {
    job: String,
    addresses: Vec<Option<SocketAddr>>,
    /// The secret that this rank shares with each other.
    pair_secrets: Vec<Option<StreamSecret>>,
    /// Whether what they exchange is encrypted.
    encrypts: bool,
    /// How long a connection of theirs that was cut may take to be made again.
    redial_grace: Duration,
}

impl PeerAddresses {
    /// The addresses and secrets that the manager gave to this member.
    pub fn of(member: &Member) -> PeerAddresses {
        PeerAddresses {
            job: member.job_name().to_owned(),
            addresses: member.peer_addresses().to_vec(),
            pair_secrets: member.pair_secrets().to_vec(),
            encrypts: member.encrypts(),
            redial_grace: member.redial_grace(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_one_or_a_range() {
        for text in ["7780", "40000-40015"] {
            assert_eq!(text.parse::<PortRange>().unwrap().to_string(), text);
        }
        for text in ["", "a", "0", "5-4", "0-5", "1-2-3", "70000"] {
            assert!(text.parse::<PortRange>().is_err(), "{text}");
        }
    }

    #[test]
    fn workers_of_one_machine_take_the_ports_one_after_another() {
        let loopback = IpAddr::from([127, 0, 0, 1]);
        let first = PortRange::ANY.listen(loopback).unwrap().address().port();
        // The port was free a moment ago, and one of the next ports is probably free, too.
        let ports = PortRange { first, last: first.saturating_add(50) };
        let listeners = [ports.listen(loopback).unwrap(), ports.listen(loopback).unwrap()];
        let [one, two] = listeners.each_ref().map(|listener| listener.address().port());
        assert!(one != two && (first..=ports.last).contains(&one) && (first..=ports.last).contains(&two));
        let taken = PortRange { first: one, last: one }.listen(loopback).unwrap_err();
        assert!(taken.contains(&format!("no port from {one} to {one} of 127.0.0.1 is free")), "{taken}");
    }

    #[test]
    fn the_way_to_a_server_on_loopback_is_loopback() {
        assert!(address_towards("http://127.0.0.1:7770").unwrap().is_loopback());
        assert!(address_towards("127.0.0.1").unwrap().is_loopback());
        assert!(address_towards("https://127.0.0.1").unwrap().is_loopback());
        assert!(address_towards("ftp://127.0.0.1").is_err());
    }
}
