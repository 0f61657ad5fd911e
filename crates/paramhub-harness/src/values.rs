//! Values as people write them in flags, in the environment and in files.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Reads and writes a value through its text form, so that the file accepts what the flags accept.
pub mod text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    /// Writes the text form.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<T: Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    /// Reads the text form.
    ///
    /// # Errors
    /// If the text is no such value.
    pub fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
    where
        T: FromStr,
        T::Err: Display,
        D: Deserializer<'de>,
    {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// [`text`] for values that may be missing.
pub mod optional_text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::{Deserializer, Serializer};

    /// Writes the text form of a value that is there.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<T: Display, S: Serializer>(value: &Option<T>, serializer: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => serializer.collect_str(value),
            None => serializer.serialize_none(),
        }
    }

    /// Reads the text form of a value that is there.
    ///
    /// # Errors
    /// If the text is no such value.
    pub fn deserialize<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
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
pub struct Bytes(pub u64);

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

/// Which hosts have hubs (PHub, section 3.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Deployment {
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
}
