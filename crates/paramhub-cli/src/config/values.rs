//! Values as people write them in flags, in the environment and in the file.

use std::convert::Infallible;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use paramhub::{EtcdAddress, Rate};
use serde::{Deserialize, Serialize};

/// The address of a hub's connection manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HubManager {
    /// The hub's own manager, which listens at this address.
    Own(SocketAddr),
    /// A running manager, at this URL.
    Running(String),
}

impl FromStr for HubManager {
    type Err = String;

    /// Only a full URL means a running manager: `host:port` could mean either.
    fn from_str(text: &str) -> Result<Self, String> {
        if text.contains("://") {
            return Ok(HubManager::Running(text.to_owned()));
        }
        text.parse().map(HubManager::Own).map_err(|_| {
            format!(
                "`{text}` is neither an IP:PORT for the hub's own connection manager to listen on, nor the URL of a running \
                 one, as in http://{text}"
            )
        })
    }
}

impl fmt::Display for HubManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HubManager::Own(address) => address.fmt(f),
            HubManager::Running(url) => f.write_str(url),
        }
    }
}

/// Where a connection manager keeps its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub(crate) enum StatePlace {
    /// A directory of this machine.
    Directory(PathBuf),
    /// An etcd, for several managers.
    Etcd(EtcdAddress),
    /// What cannot be used, and why. The command refuses it: parsers of flags and files would repeat the text, which may
    /// have a password.
    Unusable(String),
}

impl FromStr for StatePlace {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match EtcdAddress::is_meant(text) {
            true => text.parse().map_or_else(StatePlace::Unusable, StatePlace::Etcd),
            false => StatePlace::Directory(text.into()),
        })
    }
}

/// Without the password of an etcd.
impl fmt::Display for StatePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StatePlace::Directory(path) => path.display().fmt(f),
            StatePlace::Etcd(address) => address.fmt(f),
            StatePlace::Unusable(_) => f.write_str("etcd://"),
        }
    }
}

impl From<String> for StatePlace {
    fn from(text: String) -> Self {
        let Ok(place) = text.parse();
        place
    }
}

impl From<StatePlace> for String {
    fn from(place: StatePlace) -> String {
        place.to_string()
    }
}

/// A secret, which is never printed.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub(crate) struct Secret(pub(crate) String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Secret(text.to_owned())
    }
}

/// The rate of an interface, as in `eth1=10gbit`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct InterfaceRate {
    pub(crate) interface: String,
    pub(crate) rate: Rate,
}

impl FromStr for InterfaceRate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (interface, rate) =
            text.split_once('=').filter(|(interface, _)| !interface.trim().is_empty()).ok_or_else(|| {
                format!("`{text}` is no interface with its rate: expected one such as eth1=10gbit")
            })?;
        Ok(InterfaceRate { interface: interface.trim().to_owned(), rate: rate.parse()? })
    }
}

impl fmt::Display for InterfaceRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.interface, self.rate)
    }
}

impl TryFrom<String> for InterfaceRate {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<InterfaceRate> for String {
    fn from(rate: InterfaceRate) -> String {
        rate.to_string()
    }
}

/// The choice to pin hub cores to processors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Pin {
    /// Pinned unless the hub listens on loopback only, where workers share its processors.
    #[default]
    Auto,
    /// Always.
    Yes,
    /// Never.
    No,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hub_has_its_own_manager_or_joins_one() {
        for text in ["10.0.0.7:7770", "[::1]:0", "http://10.0.0.7:7770", "http://manager"] {
            let parsed: HubManager = text.parse().unwrap();
            assert_eq!(
                (parsed.to_string().as_str(), text.contains("http")),
                (text, matches!(parsed, HubManager::Running(_)))
            );
        }
        for text in ["manager:7770", "10.0.0.7", ""] {
            let refused = text.parse::<HubManager>().unwrap_err();
            assert!(refused.contains(&format!("as in http://{text}")), "{refused}");
        }
    }

    #[test]
    fn a_state_is_in_a_directory_or_in_etcd() {
        for text in ["/var/lib/paramhub", "etcd", "etcd://10.0.0.1:2379/paramhub"] {
            let place: StatePlace = text.parse().unwrap();
            assert_eq!(
                (place.to_string().as_str(), matches!(place, StatePlace::Etcd(_))),
                (text, text.contains(':'))
            );
        }
        let place: StatePlace = "etcd://u:secret@10.0.0.1/p".parse().unwrap();
        assert_eq!(String::from(place), "etcd://u@10.0.0.1:2379/p");
        let place: StatePlace = "etcd://u:secret@10.0.0.1".parse().unwrap();
        assert!(matches!(&place, StatePlace::Unusable(why) if why.contains("no prefix")), "{place:?}");
        assert!(!format!("{place} {place:?}").contains("secret"));
    }

    #[test]
    fn rates_of_interfaces_survive_text() {
        let parsed: InterfaceRate = " eth1 = 2.5gbit".parse().unwrap();
        assert_eq!((parsed.interface.as_str(), parsed.rate.mbit()), ("eth1", 2_500));
        assert_eq!(parsed.to_string().parse(), Ok(parsed));
        for text in ["eth1", "=10gbit", "eth1=", "eth1=10"] {
            assert!(text.parse::<InterfaceRate>().unwrap_err().contains("is no "), "{text}");
        }
    }
}
