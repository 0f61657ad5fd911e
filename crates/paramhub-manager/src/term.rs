//! How long a registry may answer: always where a manager has its store for itself, else as long as it leads.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use paramhub_core::leadership::{self, Leadership};
use paramhub_core::service::{ErrorCode, ServiceError};
use tokio::sync::Notify;

use crate::clock::since_boot;
use crate::error::{Refusal, refusal};
use crate::registry::Registry;

/// The pages that any manager serves, whether it leads or not.
pub(crate) const OPEN_PAGES: [&str; 4] = ["/", "/health", "/metrics", "/openapi.json"];

/// The time for which one registry answers.
#[derive(Clone)]
pub(crate) enum Term {
    /// No other manager has the store.
    Unlimited,
    /// As long as this manager holds the lease.
    Held(Arc<HeldTerm>),
}

/// A term that this manager has won from others.
pub(crate) struct HeldTerm {
    pub(crate) number: leadership::Term,
    leadership: Mutex<Leadership>,
    /// Notified when the term ends before its time.
    ended: Notify,
}

impl Term {
    /// Whether the registry may answer now.
    pub(crate) fn leads(&self) -> bool {
        match self {
            Term::Unlimited => true,
            Term::Held(term) => term.leads(),
        }
    }

    /// Whether several managers share the store.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self, Term::Held(_))
    }
}

impl HeldTerm {
    /// A term that the store has given, as it was asked to at the moment `asked`; `None` if its answer has come too late.
    pub(crate) fn won(number: leadership::Term, lease: Duration, asked: Duration) -> Option<Arc<HeldTerm>> {
        let mut leadership = Leadership::default();
        leadership
            .won(number, lease, asked, since_boot())
            .then(|| Arc::new(HeldTerm { number, leadership: Mutex::new(leadership), ended: Notify::new() }))
    }

    pub(crate) fn leads(&self) -> bool {
        self.lock().leads(self.number, since_boot())
    }

    /// The store has renewed the lease, as it was asked to at the moment `asked`.
    pub(crate) fn renewed(&self, asked: Duration) {
        self.lock().renewed(self.number, asked, since_boot());
    }

    /// The store has not answered a renewal.
    pub(crate) fn not_renewed(&self) {
        self.lock().not_renewed(self.number, since_boot());
    }

    /// The term is over: the store says so, or the manager gives it up.
    pub(crate) fn end(&self) {
        self.lock().ended(self.number);
        self.ended.notify_one();
    }

    /// How long until the lease is to be renewed; `None` if the term is over.
    pub(crate) fn until_renewal(&self) -> Option<Duration> {
        let now = since_boot();
        let leadership = self.lock();
        let renew_at = leadership.renew_at(self.number).filter(|_| leadership.leads(self.number, now));
        renew_at.map(|at| at.saturating_sub(now))
    }

    /// Returns when the term is over.
    pub(crate) async fn over(&self) {
        loop {
            let now = since_boot();
            let until = self.lock().until(self.number).filter(|until| now < *until);
            let Some(until) = until else { return };
            tokio::select! {
                () = tokio::time::sleep(until - now) => {}
                () = self.ended.notified() => {}
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Leadership> {
        self.leadership.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Refuses calls to a registry whose term is over. The answer of a call during which it ended is thrown away: another
/// manager may have given another by now.
pub(crate) async fn fence(State(registry): State<Arc<Registry>>, request: Request, next: Next) -> Response {
    if OPEN_PAGES.contains(&request.uri().path()) {
        return next.run(request).await;
    }
    if registry.term.leads() {
        let answer = next.run(request).await;
        if registry.term.leads() {
            return answer;
        }
    }
    Refusal::from(lost_the_lead()).into_response()
}

/// The refusal of a call during which the manager has lost the lead.
pub(crate) fn lost_the_lead() -> ServiceError {
    refusal(
        ErrorCode::NotLeader,
        "this connection manager does not lead any more, and cannot say what became of the call: ask the one that leads now",
    )
}
