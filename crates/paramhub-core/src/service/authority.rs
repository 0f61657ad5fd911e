//! The calls about the authority that signs the manager's certificates.

use serde::{Deserialize, Serialize};

use crate::auth::Fingerprint;

/// `GET /v1/authority`, and answer to [`ReplaceAuthority`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AuthorityStatus {
    /// The authority's certificate in PEM, for `curl --cacert`, Prometheus and browsers.
    pub certificate: String,
    /// The hash of its public key, which the secrets of new jobs carry if the manager is reached over TLS.
    pub fingerprint: Fingerprint,
    /// Authorities before it whose certificates the manager still has, for the workers of older jobs.
    pub former: usize,
}

/// `POST /v1/authority`: makes a new authority.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ReplaceAuthority {
    /// Forget the former ones at once. Workers of older jobs do not recognise the manager then: those that have yet
    /// to join fail, and so do jobs without hubs, whose ranks renew their leases. Other jobs that run go on.
    #[serde(default)]
    pub revoke_former: bool,
}
