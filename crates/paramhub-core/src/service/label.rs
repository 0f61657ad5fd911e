//! Labels of hubs, by which jobs choose them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The most bytes of a label.
pub(super) const LABEL_BYTES_MAX: usize = 32;
/// The most labels of a hub.
pub const LABELS_MAX: usize = 16;

/// A word that an operator gives hubs, such as the name of a group of machines: 1 to 32 letters and digits of ASCII and the
/// characters `-`, `_`, `.`, `=` and `/`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(value_type = String, example = "ssd"))]
#[serde(try_from = "String", into = "String")]
pub struct HubLabel(
    /// The label, and zeros behind it.
    [u8; LABEL_BYTES_MAX],
);

/// A text that is no label.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "a hub's label has 1 to {LABEL_BYTES_MAX} of the characters a-z, A-Z, 0-9 and -_.=/, and {0:?} is none"
)]
pub struct InvalidLabel(String);

impl HubLabel {
    fn as_str(&self) -> &str {
        let length = self.0.iter().position(|&byte| byte == 0).unwrap_or(LABEL_BYTES_MAX);
        str::from_utf8(&self.0[..length]).expect("a label is ASCII")
    }
}

impl FromStr for HubLabel {
    type Err = InvalidLabel;

    fn from_str(text: &str) -> Result<HubLabel, InvalidLabel> {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.=/".contains(&byte);
        if text.is_empty() || text.len() > LABEL_BYTES_MAX || !text.bytes().all(is_allowed) {
            let shown = text.floor_char_boundary(LABEL_BYTES_MAX + 1);
            return Err(InvalidLabel(text[..shown].to_owned()));
        }
        let mut bytes = [0; LABEL_BYTES_MAX];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        Ok(HubLabel(bytes))
    }
}

impl TryFrom<String> for HubLabel {
    type Error = InvalidLabel;

    fn try_from(text: String) -> Result<HubLabel, InvalidLabel> {
        text.parse()
    }
}

impl From<HubLabel> for String {
    fn from(label: HubLabel) -> String {
        label.as_str().to_owned()
    }
}

impl fmt::Display for HubLabel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

impl fmt::Debug for HubLabel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?}", self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_short_words() {
        for text in ["a", "gpu=h100", "rack-1/left_2.x", &"z".repeat(LABEL_BYTES_MAX)] {
            let label: HubLabel = text.parse().unwrap();
            assert_eq!(label.to_string(), text);
            assert_eq!(serde_json::to_string(&label).unwrap(), format!("\"{text}\""));
            assert_eq!(serde_json::from_str::<HubLabel>(&format!("\"{text}\"")).unwrap(), label);
        }
        for text in ["", "two words", "a,b", "ü", &"z".repeat(LABEL_BYTES_MAX + 1), "a\0"] {
            let refused = text.parse::<HubLabel>().unwrap_err().to_string();
            assert!(refused.contains("1 to 32 of the characters"), "{refused}");
        }
    }
}
