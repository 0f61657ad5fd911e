//! Who may call this manager, and how: what the server needs whether or not the manager leads.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use paramhub_core::tokens::Tokens;
use paramhub_trust::{AuthorityRecord, ManagerIdentity};
use rustix::process::{Resource, getrlimit};

use crate::answered_requests::AnsweredRequests;
use crate::blocking::blocking;
use crate::config::ManagerConfig;
use crate::connection_slots::ConnectionSlots;
use crate::error::ManagerError;
use crate::tls::machine_names;

/// The time between two looks at how long certificates are still valid, and whether the configured one's file has
/// changed.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(60);

/// The certificates, the tokens, and the connections of callers.
pub(crate) struct Access {
    /// The tokens of operators and hubs. A change is made on a copy, which replaces them once it is saved.
    tokens: RwLock<Arc<Tokens>>,
    /// The certificates, and the authorities that have signed them.
    pub(crate) identity: ManagerIdentity,
    /// Held while authorities or certificates change.
    pub(crate) changing_authorities: tokio::sync::Mutex<()>,
    /// Held while tokens or teams change.
    pub(crate) changing_tokens: tokio::sync::Mutex<()>,
    /// Whether callers of other machines must use TLS.
    pub(crate) needs_tls: bool,
    pub(crate) requests: AnsweredRequests,
    pub(crate) slots: Arc<ConnectionSlots>,
}

impl Access {
    pub(crate) fn new(
        config: &ManagerConfig,
        authorities: Vec<AuthorityRecord>,
        tokens: Tokens,
    ) -> Result<Access, ManagerError> {
        let names = machine_names(config.listen).into_iter().chain(config.tls_names.clone()).collect();
        Ok(Access {
            tokens: RwLock::new(Arc::new(tokens)),
            identity: ManagerIdentity::new(authorities, names, config.certificate.clone())?,
            changing_authorities: tokio::sync::Mutex::new(()),
            changing_tokens: tokio::sync::Mutex::new(()),
            needs_tls: config.needs_tls(),
            requests: AnsweredRequests::default(),
            slots: slots(config),
        })
    }

    /// The tokens that are valid now.
    pub(crate) fn tokens(&self) -> Arc<Tokens> {
        self.tokens.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the tokens by a changed copy of them.
    pub(crate) fn replace_tokens(&self, tokens: Tokens) {
        *self.tokens.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(tokens);
    }

    /// Renews certificates, without end.
    pub(crate) async fn renew_certificates(self: Arc<Self>) {
        loop {
            tokio::time::sleep(RENEWAL_INTERVAL).await;
            let _alone = self.changing_authorities.lock().await;
            let access = self.clone();
            if let Ok(Err(cause)) = blocking(move || access.identity.renew(SystemTime::now())).await {
                tracing::error!("the certificate stays as it was: {cause}");
            }
        }
    }
}

/// The slots that the configuration and the process's limit of descriptors allow.
fn slots(config: &ManagerConfig) -> Arc<ConnectionSlots> {
    let descriptors = getrlimit(Resource::Nofile).current.map_or(usize::MAX, |limit| limit as usize);
    ConnectionSlots::new(
        config.unauthenticated_max.min(descriptors / 8),
        config.ranks_max.min(descriptors / 2),
    )
}
