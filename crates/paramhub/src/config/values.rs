//! Values as people write them in flags, in the environment and in the file.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use clap::ValueEnum;
use paramhub_collective::kvstore::StoreKind;
use paramhub_core::settings::has_parameters;
use serde::{Deserialize, Serialize};

use crate::Rate;

/// Reads and writes a value through its text form, so that the file takes what the flags take.
pub(crate) mod text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<T: Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    pub(crate) fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
    where
        T: FromStr,
        T::Err: Display,
        D: Deserializer<'de>,
    {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// [`text`] for values that may be missing.
pub(crate) mod optional_text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::{Deserializer, Serializer};

    pub(crate) fn serialize<T: Display, S: Serializer>(
        value: &Option<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => serializer.collect_str(value),
            None => serializer.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
    where
        T: FromStr,
        T::Err: Display,
        D: Deserializer<'de>,
    {
        super::text::deserialize(deserializer).map(Some)
    }
}

/// A number of bytes, written plainly or in binary units: `32K`, `1M`, `4G`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BytesInFile", into = "String")]
pub(crate) struct Bytes(pub(crate) u64);

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a number of bytes or a size such as \"32K\"")]
enum BytesInFile {
    Number(u64),
    Text(String),
}

const UNITS: [(&str, u32); 4] = [("T", 40), ("G", 30), ("M", 20), ("K", 10)];

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || format!("`{text}` is no size: expected bytes or a binary unit, as in 32K, 1M or 4G");
        let upper = text.trim().to_ascii_uppercase();
        let plain = upper.strip_suffix('B').unwrap_or(&upper);
        let plain = plain.strip_suffix('I').unwrap_or(plain);
        let (digits, shift) = UNITS
            .iter()
            .find_map(|&(unit, shift)| plain.strip_suffix(unit).map(|digits| (digits, shift)))
            .unwrap_or((plain, 0));
        let number: u64 = digits.trim().parse().map_err(|_| refuse())?;
        number.checked_mul(1 << shift).map(Bytes).ok_or_else(refuse)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = UNITS.iter().find(|&&(_, shift)| self.0 > 0 && self.0.is_multiple_of(1 << shift));
        match whole {
            Some((unit, shift)) => write!(f, "{}{unit}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

impl TryFrom<BytesInFile> for Bytes {
    type Error = String;

    fn try_from(value: BytesInFile) -> Result<Self, String> {
        match value {
            BytesInFile::Number(number) => Ok(Bytes(number)),
            BytesInFile::Text(text) => text.parse(),
        }
    }
}

impl From<Bytes> for String {
    fn from(bytes: Bytes) -> String {
        bytes.to_string()
    }
}

/// Where a hub's connection manager is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HubManager {
    /// The hub's own, listening here.
    Own(SocketAddr),
    /// A running one, at this URL.
    Running(String),
}

impl FromStr for HubManager {
    type Err = String;

    /// Only a URL written in full is one: `host:port` could be either.
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

/// A secret: nothing prints it.
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

/// What an interface carries, as in `eth1=10gbit`.
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

/// Whether hub cores are pinned to processors.
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

/// What turns gradients into parameters in `paramhub train`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum TrainOptimizer {
    #[default]
    Sgd,
    Nesterov,
    Adam,
    AdamW,
}

impl TrainOptimizer {
    const ALL: [TrainOptimizer; 4] = [Self::Sgd, Self::Nesterov, Self::Adam, Self::AdamW];

    fn name(self) -> &'static str {
        match self {
            Self::Sgd => "sgd",
            Self::Nesterov => "nesterov",
            Self::Adam => "adam",
            Self::AdamW => "adamw",
        }
    }

    /// The kernel that computes it; Nesterov is a setting of SGD.
    pub(crate) fn kernel(self) -> &'static str {
        if self == Self::Nesterov { "sgd" } else { self.name() }
    }

    /// A step size with which the bundled networks learn.
    pub(crate) fn default_learning_rate(self) -> f64 {
        match self {
            Self::Sgd | Self::Nesterov => 0.02,
            Self::Adam | Self::AdamW => 0.002,
        }
    }
}

impl fmt::Display for TrainOptimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TrainOptimizer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !has_parameters(text) {
            return Err(format!(
                "`{text}` returns the {text} of the gradients and updates no parameters, so nothing would be learnt: \
                 use sgd, nesterov, adam or adamw"
            ));
        }
        Self::ALL
            .into_iter()
            .find(|optimizer| optimizer.name() == text)
            .ok_or_else(|| format!("unknown optimizer `{text}`: expected sgd, nesterov, adam or adamw"))
    }
}

/// Which hosts have hubs (PHub, section 3.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Deployment {
    /// One hub, on a host of its own
    Ncc,
    /// A hub on each of several hosts of their own
    Ncs,
    /// One hub, beside the workers of the first host
    Cc,
    /// A hub beside the workers of every host
    Cs,
}

impl fmt::Display for Deployment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ncc => "ncc",
            Self::Ncs => "ncs",
            Self::Cc => "cc",
            Self::Cs => "cs",
        })
    }
}

/// Who exchanges the gradients of `paramhub train`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ExchangeKind {
    /// Worker processes through a hub.
    #[default]
    Hub,
    /// One process computes every worker's share.
    Local,
    /// Worker processes by collectives, which each worker's main thread calls key by key.
    Funnel,
    /// By collectives over several communicators at once.
    Concom,
    /// By collectives in a chain of dependencies.
    Depcha,
}

impl ExchangeKind {
    /// The store that exchanges by collectives, where it does.
    pub(crate) fn collective(self) -> Option<StoreKind> {
        match self {
            ExchangeKind::Hub | ExchangeKind::Local => None,
            ExchangeKind::Funnel => Some(StoreKind::Funnel),
            ExchangeKind::Concom => Some(StoreKind::ConCom),
            ExchangeKind::Depcha => Some(StoreKind::DepCha),
        }
    }
}

impl fmt::Display for ExchangeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value().expect("none is skipped");
        f.write_str(value.get_name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_survive_text() {
        for (text, bytes, shown) in [
            ("0", 0, "0"),
            ("1000", 1000, "1000"),
            ("32K", 32 << 10, "32K"),
            ("32kib", 32 << 10, "32K"),
            (" 1 MB ", 1 << 20, "1M"),
            ("1024M", 1 << 30, "1G"),
        ] {
            let parsed: Bytes = text.parse().unwrap();
            assert_eq!((parsed.0, parsed.to_string().as_str()), (bytes, shown), "{text}");
        }
        for text in ["", "K", "-1", "1.5G", "99999999999T", "12X"] {
            assert!(text.parse::<Bytes>().unwrap_err().contains("is no size"), "{text}");
        }
    }

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
    fn rates_of_interfaces_survive_text() {
        let parsed: InterfaceRate = " eth1 = 2.5gbit".parse().unwrap();
        assert_eq!((parsed.interface.as_str(), parsed.rate.mbit()), ("eth1", 2_500));
        assert_eq!(parsed.to_string().parse(), Ok(parsed));
        for text in ["eth1", "=10gbit", "eth1=", "eth1=10"] {
            assert!(text.parse::<InterfaceRate>().unwrap_err().contains("is no "), "{text}");
        }
    }

    #[test]
    fn what_learns_nothing_is_refused_with_a_reason() {
        for text in ["mean", "sum"] {
            let refused = text.parse::<TrainOptimizer>().unwrap_err();
            assert!(
                refused.contains(&format!("the {text} of the gradients and updates no parameters")),
                "{refused}"
            );
        }
        for optimizer in TrainOptimizer::ALL {
            assert_eq!(optimizer.to_string().parse(), Ok(optimizer));
        }
    }
}
