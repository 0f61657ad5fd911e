//! The calls with which operators make, list and revoke tokens.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What a token is for. `admin`: everything. `hub`: hubs join with it. `reader`: jobs, hubs and metrics can be
/// read with it, and nothing changed. `team`: the jobs of one team can be created, read and stopped with it,
/// and hubs read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum TokenRole {
    /// Everything.
    Admin,
    /// Hubs join with it.
    Hub,
    /// Jobs, hubs and metrics can be read with it.
    Reader,
    /// The jobs of one team can be created, read and stopped with it, and hubs read.
    Team,
}

impl fmt::Display for TokenRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TokenRole::Admin => "admin",
            TokenRole::Hub => "hub",
            TokenRole::Reader => "reader",
            TokenRole::Team => "team",
        })
    }
}

impl FromStr for TokenRole {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [TokenRole::Admin, TokenRole::Hub, TokenRole::Reader, TokenRole::Team]
            .into_iter()
            .find(|role| role.to_string() == text)
            .ok_or_else(|| format!("`{text}` is no role: expected admin, hub, reader or team"))
    }
}

/// `POST /v1/tokens`: makes a token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateToken {
    /// The name in listings and logs: 1 to 64 letters, digits, `.`, `_` and `-`, of no other valid token.
    pub name: String,
    /// What the token is for.
    pub role: TokenRole,
    /// The team, for the role `team` and no other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub team: Option<String>,
}

/// Answer to [`CreateToken`].
#[derive(Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TokenCreated {
    /// The token. No other answer shows it.
    pub token: String,
    /// The token as listings show it.
    pub status: TokenStatus,
}

/// `GET /v1/tokens` (a list).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TokenStatus {
    /// Its name; `configured` is the one that the manager was started with.
    pub name: String,
    /// What it is for.
    pub role: TokenRole,
    /// The team, if that is its role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub team: Option<String>,
    /// The time at which it was made, in seconds since 1970; 0 for the configured one.
    pub created_at: u64,
    /// The name of the token with which it was made.
    pub created_by: String,
    /// The time at which it was revoked; `None` while it is valid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked_at: Option<u64>,
}

/// A token stays out of logs.
impl fmt::Debug for TokenCreated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenCreated").field("status", &self.status).finish_non_exhaustive()
    }
}
