//! What answers the callers: the registry of a manager that leads, or the follower's few pages.

use std::sync::{Arc, PoisonError, RwLock};

use axum::Router;
use tokio::sync::watch;

use crate::access::Access;
use crate::follower::{Following, follower_router};
use crate::registry::Registry;
use crate::server::router;

/// The server's way to what answers now.
pub(crate) struct Frontend {
    pub(crate) access: Arc<Access>,
    /// Has the registry of the present term, and is replaced when that ends.
    answering: RwLock<Router>,
    stopping: watch::Sender<bool>,
}

impl Frontend {
    /// A manager that does not lead yet.
    pub(crate) fn new(access: Arc<Access>) -> Arc<Frontend> {
        let answering = RwLock::new(follower_router(access.clone(), Following::default()));
        Arc::new(Frontend { access, answering, stopping: watch::channel(false).0 })
    }

    /// What answers a request that comes now.
    pub(crate) fn answering(&self) -> Router {
        self.answering.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lets the registry of a term answer.
    pub(crate) fn lead(&self, registry: &Arc<Registry>) {
        self.replace(router(registry.clone()));
    }

    /// Lets no registry answer.
    #[cfg_attr(not(feature = "etcd"), expect(dead_code, reason = "only managers that share a store need it"))]
    pub(crate) fn follow(&self, following: Following) {
        self.replace(follower_router(self.access.clone(), following));
    }

    fn replace(&self, router: Router) {
        // The one before may have the last reference to a registry, which is dropped outside of the lock.
        let _before = {
            let mut answering = self.answering.write().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *answering, router)
        };
    }

    /// Begins to stop.
    pub(crate) fn stop(&self) {
        self.stopping.send_replace(true);
    }

    /// Returns when the manager stops.
    pub(crate) async fn stopped(&self) {
        // The sender lives as long as `self`, so this cannot fail.
        let _ = self.stopping.subscribe().wait_for(|stopping| *stopping).await;
    }
}
