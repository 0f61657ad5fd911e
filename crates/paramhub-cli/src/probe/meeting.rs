//! How ranks learn each other's addresses: through the job's hub. Each rank writes its own part of one
//! tensor, and the hub sums them.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use paramhub::settings::Settings;
use paramhub::{Job, Key, KeyTable, Member};

/// A rank's part of the tensor: each value is one byte of address, port, and the length and bytes of the host's name.
const VALUES: usize = 64;
const HOST: usize = 19;

/// The address of a rank and the name of its host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) address: SocketAddr,
    /// The name by which the host calls itself, or its beginning.
    pub(super) host: String,
}

impl Place {
    pub(super) fn new(address: SocketAddr) -> Place {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Place { address, host }
    }

    fn encode(&self) -> [u8; VALUES] {
        let mut bytes = [0; VALUES];
        let ip = match self.address.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        bytes[..16].copy_from_slice(&ip.octets());
        bytes[16..18].copy_from_slice(&self.address.port().to_le_bytes());
        let host = &self.host.as_bytes()[..self.host.len().min(VALUES - HOST)];
        bytes[18] = host.len() as u8;
        bytes[HOST..HOST + host.len()].copy_from_slice(host);
        bytes
    }

    fn decode(bytes: &[u8; VALUES]) -> Place {
        let ip: [u8; 16] = bytes[..16].try_into().expect("a fixed range");
        let port = u16::from_le_bytes([bytes[16], bytes[17]]);
        let end = (HOST + usize::from(bytes[18])).min(VALUES);
        let host = String::from_utf8_lossy(&bytes[HOST..end]);
        Place {
            address: SocketAddr::new(Ipv6Addr::from(ip).to_canonical(), port),
            // The name is printed on a terminal.
            host: host.chars().filter(|c| !c.is_control() && *c != '\u{fffd}').collect(),
        }
    }
}

/// Gives this rank's place to the others and returns the places of all, by rank.
pub(super) fn meet(member: Member, place: &Place) -> anyhow::Result<(Job, Vec<Place>)> {
    let (rank, workers) = (member.rank() as usize, member.workers() as usize);
    let keys = KeyTable::new(vec![Key::new("places", [workers as u64, VALUES as u64])])?;
    let job = member.init(Settings::new(keys))?;
    let mut said = vec![0.0_f32; workers * VALUES];
    for (value, byte) in said[rank * VALUES..].iter_mut().zip(place.encode()) {
        *value = f32::from(byte);
    }
    let (_, mean) = job.push_pull(0, said, vec![0.0_f32; workers * VALUES])?.wait()?;
    let bytes: Vec<u8> = mean.iter().map(|value| (value * workers as f32).round() as u8).collect();
    let (parts, _) = bytes.as_chunks::<VALUES>();
    let places: Vec<Place> = parts.iter().map(Place::decode).collect();
    check(&places)?;
    Ok((job, places))
}

/// Refuses a loopback address if any rank has another one: loopback leads to the machine itself.
fn check(places: &[Place]) -> anyhow::Result<()> {
    let is_local = |place: &Place| place.address.ip().is_loopback();
    let (local, remote) =
        (places.iter().position(is_local), places.iter().position(|place| !is_local(place)));
    if let (Some(local), Some(remote)) = (local, remote) {
        anyhow::bail!(
            "rank {local} listens on {}, which rank {remote} at {} cannot reach: start it with --address",
            places[local].address.ip(),
            places[remote].address.ip(),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(address: &str, host: &str) -> Place {
        Place { address: address.parse().unwrap(), host: host.into() }
    }

    #[test]
    fn places_survive_the_way_through_the_hub() {
        for each in [
            place("10.0.3.7:40001", "node-7"),
            place("[2001:db8::7]:65535", ""),
            place("127.0.0.1:1", "a name as long as it can be without a cut-off"),
        ] {
            assert_eq!(Place::decode(&each.encode()), each);
        }
        let long = place("10.0.0.1:1", &"x".repeat(100));
        assert_eq!(Place::decode(&long.encode()).host, "x".repeat(VALUES - HOST));
        // The text of another rank is shown on a terminal, so it must hold no control characters.
        let mut hostile = place("10.0.0.1:1", "a\x1b[2Jb").encode();
        hostile[18] = 255;
        assert_eq!(Place::decode(&hostile).host, "a[2Jb");
    }

    #[test]
    fn loopback_among_machines_is_found_out() {
        check(&[place("127.0.0.1:1", ""), place("127.0.0.1:2", "")]).unwrap();
        check(&[place("10.0.0.1:1", ""), place("10.0.0.2:1", "")]).unwrap();
        let refused = check(&[place("10.0.0.1:1", ""), place("127.0.0.1:2", "")]).unwrap_err().to_string();
        assert!(
            refused.contains("rank 1 listens on 127.0.0.1") && refused.contains("--address"),
            "{refused}"
        );
    }
}
