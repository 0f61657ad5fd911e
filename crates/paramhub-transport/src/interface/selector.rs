//! The interfaces that an operator wants, and their text.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// An address and the length of its subnet's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subnet {
    address: IpAddr,
    bits: u32,
}

impl Subnet {
    /// `bits` beyond the address's own count as all of them.
    pub fn new(address: IpAddr, bits: u32) -> Self {
        let most = if address.is_ipv4() { 32 } else { 128 };
        Subnet { address, bits: bits.min(most) }
    }

    /// The address.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Whether an address is in the same subnet.
    pub fn contains(&self, ip: IpAddr) -> bool {
        match (self.address, ip) {
            (IpAddr::V4(mine), IpAddr::V4(ip)) => {
                let differ = mine.to_bits() ^ ip.to_bits();
                differ.checked_shr(32 - self.bits).is_none_or(|prefix| prefix == 0)
            }
            (IpAddr::V6(mine), IpAddr::V6(ip)) => {
                let differ = mine.to_bits() ^ ip.to_bits();
                differ.checked_shr(128 - self.bits).is_none_or(|prefix| prefix == 0)
            }
            _ => false,
        }
    }
}

/// Which interfaces to use. The text is a list with commas of names, beginnings of names and CIDR networks.
/// If the list begins with `^`, all of these are left out instead.
///
/// A name that ends in a digit selects that interface alone, so that `eth1` is not `eth10`; another name
/// selects all that begin with it, so that `docker` selects `docker0`. `=NAME` always selects that name
/// alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Selector {
    /// Those over which a peer on another host could be reached; written `auto`.
    #[default]
    Auto,
    /// These and no others.
    Only(Vec<Pattern>),
    /// Those of `Auto` except these.
    Except(Vec<Pattern>),
}

/// One entry of a [`Selector`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// This name.
    Name(String),
    /// Names that begin with this text.
    Beginning(String),
    /// Addresses in this network.
    Network(Subnet),
}

/// Bytes of an interface's name in Linux, without the closing zero.
const NAME_BYTES_MAX: usize = 15;
/// More than a hub may have interfaces.
const PATTERNS_MAX: usize = 256;

impl Pattern {
    /// Whether it selects this address of this interface.
    pub(super) fn matches(&self, name: &str, ip: IpAddr) -> bool {
        match self {
            Pattern::Network(network) => network.contains(ip),
            by_name => by_name.matches_name(name),
        }
    }

    /// Whether it selects this interface, whatever its addresses.
    pub(super) fn matches_name(&self, name: &str) -> bool {
        match self {
            Pattern::Name(wanted) => wanted == name,
            Pattern::Beginning(beginning) => name.starts_with(beginning.as_str()),
            Pattern::Network(_) => false,
        }
    }
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if let Some((address, bits)) = text.split_once('/') {
            let refuse = || format!("`{text}` is no network: expected one such as 10.0.0.0/24");
            let address: IpAddr = address.parse().map_err(|_| refuse())?;
            let bits: u32 = bits.parse().map_err(|_| refuse())?;
            let most = if address.is_ipv4() { 32 } else { 128 };
            return if bits <= most {
                Ok(Pattern::Network(Subnet::new(address, bits)))
            } else {
                Err(refuse())
            };
        }
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Pattern::Network(Subnet::new(address, 128)));
        }
        let name = text.strip_prefix('=').unwrap_or(text);
        let is_sound =
            |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'/' | b'^' | b'=' | b':' | b',');
        if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(is_sound) {
            return Err(format!(
                "`{text}` is no interface: expected a name such as eth0, a network such as 10.0.0.0/24, or, with ^ in \
                 front of the whole list, what to leave out"
            ));
        }
        let means_one = text.starts_with('=') || name.ends_with(|last: char| last.is_ascii_digit());
        Ok(if means_one { Pattern::Name(name.into()) } else { Pattern::Beginning(name.into()) })
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pattern::Name(name) if name.ends_with(|last: char| last.is_ascii_digit()) => f.write_str(name),
            Pattern::Name(name) => write!(f, "={name}"),
            Pattern::Beginning(beginning) => f.write_str(beginning),
            Pattern::Network(network) => write!(f, "{}/{}", network.address, network.bits),
        }
    }
}

impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text == "auto" {
            return Ok(Selector::Auto);
        }
        let list = text.strip_prefix('^');
        let patterns: Vec<Pattern> =
            list.unwrap_or(text).split(',').map(str::parse).collect::<Result<_, _>>()?;
        match patterns.len() {
            0..=PATTERNS_MAX if list.is_some() => Ok(Selector::Except(patterns)),
            0..=PATTERNS_MAX => Ok(Selector::Only(patterns)),
            many => Err(format!("{many} interfaces are more than the {PATTERNS_MAX} that can be listed")),
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let patterns = match self {
            Selector::Auto => return f.write_str("auto"),
            Selector::Only(patterns) => patterns,
            Selector::Except(patterns) => {
                f.write_str("^")?;
                patterns
            }
        };
        for (position, pattern) in patterns.iter().enumerate() {
            write!(f, "{}{pattern}", if position > 0 { "," } else { "" })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_survive_text() {
        for (text, shown) in [
            ("auto", "auto"),
            ("eth0", "eth0"),
            (" eth0 , 10.0.0.0/24 ", "eth0,10.0.0.0/24"),
            ("^docker,lo", "^docker,lo"),
            ("=docker", "=docker"),
            ("=eth0", "eth0"),
            ("10.0.0.7,fe80::1", "10.0.0.7/32,fe80::1/128"),
            ("enp1s0f0np0,rack-a.12", "enp1s0f0np0,rack-a.12"),
        ] {
            let selector: Selector = text.parse().unwrap();
            assert_eq!(selector.to_string(), shown);
            assert_eq!(selector.to_string().parse(), Ok(selector));
        }
        for text in
            ["", "^", "eth0,", "eth0,^lo", "10.0.0.0/33", "10.0.0/8", "a/b", "sixteen-bytes-16", "e th0"]
        {
            let refused = text.parse::<Selector>().unwrap_err();
            assert!(refused.contains("is no "), "`{text}`: {refused}");
        }
    }

    #[test]
    fn a_name_with_a_number_is_one_interface_and_one_without_is_all_that_begin_so() {
        let matches = |pattern: &str, name| pattern.parse::<Pattern>().unwrap().matches_name(name);
        assert!(matches("eth1", "eth1") && !matches("eth1", "eth10") && !matches("eth1", "eth1.5"));
        assert!(
            matches("eth", "eth1") && matches("docker", "docker0") && matches("docker", "docker_gwbridge")
        );
        assert!(matches("=rack", "rack") && !matches("=rack", "rack0"));
    }

    #[test]
    fn networks_contain_what_shares_their_prefix() {
        let contains = |network: &str, ip: &str| {
            network.parse::<Pattern>().unwrap().matches("eth0", ip.parse().unwrap())
        };
        assert!(contains("10.0.1.7/24", "10.0.1.255") && !contains("10.0.1.0/24", "10.0.2.0"));
        assert!(contains("0.0.0.0/0", "255.1.2.3") && contains("::/0", "fe80::1"));
        assert!(contains("10.0.0.7", "10.0.0.7") && !contains("10.0.0.7/32", "10.0.0.6"));
        assert!(contains("fd00::/8", "fd12::1") && !contains("fd00::/8", "fe80::1"));
        assert!(!contains("0.0.0.0/0", "::1"), "families do not mix");
    }
}
