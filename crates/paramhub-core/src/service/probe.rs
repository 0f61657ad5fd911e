//! The messages of a manager, hubs and operators about the network between racks.

use serde::{Deserialize, Serialize};

use crate::auth::{Namespace, Nonce};
use crate::cost::Rate;

/// One hub's part in a probe between two hubs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ProbeOrder {
    /// The name of the probe, as a namespace is the name of a job: random, and used once.
    pub probe: Namespace,
    /// The secret of which both hubs prove their knowledge.
    pub nonce: Nonce,
    /// Number of streams between them.
    pub streams: u16,
    /// The addresses of the other hub, `host:port`, to be dialled in turn; none for the hub that is dialled.
    pub dial: Vec<String>,
}

/// The result of a probe at a hub.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ProbeReport {
    /// The probe.
    pub probe: Namespace,
    /// The rate at which the other hub's bytes arrived, or why none did.
    pub outcome: ProbeOutcome,
    /// `true` if the rates of the hub's own interfaces are known; if not, their weights are guesses.
    pub is_rated: bool,
}

/// The result of a probe at one hub.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ProbeOutcome {
    /// The rate at which payload arrived while the hub sent as much as possible.
    BitsPerSecond(f64),
    /// The reason why nothing was measured.
    Failed(String),
}

/// `POST /v1/links`: hubs probe the network between their racks, even if its rate is known. The body has no
/// fields yet; that it must be JSON keeps web pages from sending the request.
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
    /// The rate at which payload arrived while as much as possible went the other way; `None` if the probe
    /// failed.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub rate: Option<Rate>,
    /// `true` if the rate is only a lower bound of the link's, since the hubs' own interfaces carry no more.
    pub is_at_least: bool,
    /// The reason why the probe failed; empty if it did not.
    pub problem: String,
    /// Seconds since the probe.
    pub age_s: f64,
}
