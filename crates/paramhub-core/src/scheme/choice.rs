//! How the settings ask to exchange a layer.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::Scheme;

/// The way in which the settings ask to exchange a layer: `auto`, or a scheme by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum SchemeChoice {
    /// The scheme that [`Cluster::best_scheme`](super::Cluster::best_scheme) finds cheapest.
    Auto,
    /// This scheme.
    Only(Scheme),
}

/// The default is that everything goes through the hubs.
impl Default for SchemeChoice {
    fn default() -> Self {
        SchemeChoice::Only(Scheme::Hub)
    }
}

impl SchemeChoice {
    /// The scheme, if the choice names one other than the hub.
    pub fn forced(self) -> Option<Scheme> {
        match self {
            SchemeChoice::Auto | SchemeChoice::Only(Scheme::Hub) => None,
            SchemeChoice::Only(scheme) => Some(scheme),
        }
    }
}

impl fmt::Display for SchemeChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SchemeChoice::Auto => f.write_str("auto"),
            SchemeChoice::Only(scheme) => scheme.fmt(f),
        }
    }
}

impl FromStr for SchemeChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(SchemeChoice::Auto),
            _ => text
                .parse()
                .map(SchemeChoice::Only)
                .map_err(|_| format!("unknown scheme `{text}`: expected auto, {}", names())),
        }
    }
}

fn names() -> String {
    let names = Scheme::ALL.map(Scheme::name);
    let (last, others) = names.split_last().expect("there are schemes");
    format!("{} or {last}", others.join(", "))
}

impl TryFrom<String> for SchemeChoice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<SchemeChoice> for String {
    fn from(choice: SchemeChoice) -> String {
        choice.to_string()
    }
}
