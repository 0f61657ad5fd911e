//! The consistency states when a worker may see the others' contributions, and how far it may run ahead.

use serde::{Deserialize, Serialize};

/// The consistency of a job's parameters.
///
/// Where hubs serve racks or hosts, it is that of these sites to one another: the workers of a site always step together, their
/// mean is one contribution, and sites take the place of workers in what follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Consistency {
    /// A step ends when every worker has contributed to it; all workers receive the same parameters.
    #[default]
    Synchronous,
    /// Each contribution is applied by itself when it arrives, and its sender gets the newest parameters at
    /// once.
    Asynchronous,
    /// As asynchronous, but no worker runs more than this many steps ahead of the slowest one.
    BoundedStaleness(u32),
}

impl std::fmt::Display for Consistency {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Consistency::Synchronous => f.write_str("sync"),
            Consistency::Asynchronous => f.write_str("async"),
            Consistency::BoundedStaleness(bound) => write!(f, "staleness:{bound}"),
        }
    }
}

impl std::str::FromStr for Consistency {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "sync" => Ok(Consistency::Synchronous),
            "async" => Ok(Consistency::Asynchronous),
            _ => text
                .strip_prefix("staleness:")
                .and_then(|bound| bound.parse().ok())
                .map(Consistency::BoundedStaleness)
                .ok_or_else(|| {
                    format!("unknown consistency `{text}`: expected sync, async or staleness:STEPS, as in staleness:2")
                }),
        }
    }
}
