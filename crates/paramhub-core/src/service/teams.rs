//! The calls with which operators name teams and set their quotas, and what a hub learns of a team.

use std::fmt;

use serde::{Deserialize, Serialize};

/// `PUT /v1/teams/{team}`: what the jobs of a team may have together while they live. `None` sets no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct TeamQuotas {
    /// The number of jobs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub jobs: Option<u32>,
    /// The sum of the jobs' weights, which are their shares of a hub core's time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Bytes of the jobs' buffers at all hubs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Streams of the jobs to all hubs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub streams: Option<u64>,
}

impl fmt::Display for TeamQuotas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quotas = [
            self.jobs.map(|jobs| format!("{jobs} jobs at once")),
            self.weight.map(|weight| format!("weight {weight}")),
            self.memory_bytes.map(|bytes| format!("{} MiB of memory", bytes.div_ceil(1 << 20))),
            self.streams.map(|streams| format!("{streams} streams")),
        ];
        let quotas: Vec<String> = quotas.into_iter().flatten().collect();
        f.write_str(if quotas.is_empty() { "no limit" } else { "" })?;
        f.write_str(&quotas.join(", "))
    }
}

/// `GET /v1/teams` (a list): a team, its quotas, and what its living jobs have of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TeamStatus {
    /// Its name, with which the names of its jobs begin.
    pub name: String,
    /// What its jobs may have together.
    pub quotas: TeamQuotas,
    /// The number of its living jobs.
    pub jobs: u32,
    /// The sum of their weights.
    pub weight: u64,
    /// Bytes of their buffers at hubs.
    pub memory_bytes: u64,
    /// Their streams to hubs.
    pub streams: u64,
}

/// What a job's team may still have at hubs, besides its other jobs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct TeamAllowance {
    /// Bytes of buffers; `None` sets no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<Allowance>,
    /// Streams; `None` sets no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub streams: Option<Allowance>,
}

/// What is left of a team's quota.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Allowance {
    /// What is left.
    pub left: u64,
    /// The quota, what uses it, and what to do, for the message of a refusal.
    pub terms: String,
}

impl Allowance {
    /// Checks that a job can have `needed`, or returns the terms.
    pub(crate) fn check(allowance: Option<&Allowance>, needed: u64) -> Result<(), &str> {
        allowance
            .filter(|allowance| needed > allowance.left)
            .map_or(Ok(()), |allowance| Err(&allowance.terms))
    }
}
