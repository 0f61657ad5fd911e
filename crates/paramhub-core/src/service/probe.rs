//! What a manager, hubs and operators say about the network between racks.

use serde::{Deserialize, Serialize};

use crate::auth::{Namespace, Nonce};
use crate::cost::Rate;

/// One hub's part in a probe between two.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ProbeOrder {
    /// Names the probe, as a namespace names a job: random, and used once.
    pub probe: Namespace,
    /// The secret that both hubs prove to each other to know.
    pub nonce: Nonce,
    /// Streams between them.
    pub streams: u16,
    /// The other hub's addresses, `host:port`, to be dialled in turn; none for the hub that is dialled.
    pub dial: Vec<String>,
}

/// What a hub found out in a probe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ProbeReport {
    /// Which.
    pub probe: Namespace,
    /// What arrived from the other hub, or why nothing did.
    pub outcome: ProbeOutcome,
    /// Whether the rates of the hub's own interfaces are known; where not, their weights are guesses.
    pub is_rated: bool,
}

/// How a probe came out at one hub.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ProbeOutcome {
    /// Payload a second that arrived while as much as possible went the other way.
    BitsPerSecond(f64),
    /// Why nothing was measured.
    Failed(String),
}

/// `POST /v1/links`: hubs probe the network between their racks, whatever is known of it. Nothing is to be said yet; that it must
/// be said as JSON keeps web pages from asking.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ProbeLinks {}

/// Answer to `GET /v1/links` and to [`ProbeLinks`]: one entry for each pair of racks and direction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LinkStatus {
    /// The rack whose hub sent.
    pub from: String,
    /// The rack whose hub received.
    pub to: String,
    /// The two hubs, in that order.
    pub hubs: [u32; 2],
    /// What arrived while as much as possible went the other way; `None` where the probe failed.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub rate: Option<Rate>,
    /// Whether the link is known to carry no less than that only, since the hubs' own interfaces carry no more.
    pub is_at_least: bool,
    /// Why the probe failed; empty where it did not.
    pub problem: String,
    /// Seconds since.
    pub age_s: f64,
}
