//! What a manager answers while it does not lead: that another does, and the pages that say how it is itself.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;
use paramhub_core::service::{ErrorCode, ServiceError};

use crate::access::Access;
use crate::error::{Refusal, refusal};
use crate::host::guard;
use crate::metrics::{self, CONTENT_TYPE, count};
use crate::routes::pages;

/// What a manager that does not lead knows of the lead.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Following {
    /// The URL under which the leader calls itself.
    pub(crate) leader: Option<String>,
    /// Why this manager cannot lead now, in words that follow a colon.
    pub(crate) trouble: Option<String>,
}

#[derive(Clone)]
struct Follower {
    access: Arc<Access>,
    following: Arc<Following>,
}

/// All routes of a manager that does not lead.
pub(crate) fn follower_router(access: Arc<Access>, following: Following) -> Router {
    Router::new()
        .route("/", get(pages::index))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(pages::openapi))
        .fallback(refuse)
        .layer(axum::middleware::from_fn_with_state(access.clone(), guard))
        .layer(axum::middleware::from_fn_with_state(access.clone(), count))
        .with_state(Follower { access, following: Arc::new(following) })
}

async fn health(State(follower): State<Follower>) -> String {
    match follower.following.as_ref() {
        Following { leader: Some(leader), .. } => format!("ok, follows {leader}\n"),
        Following { trouble: Some(trouble), .. } => format!("ok, follows nobody: {trouble}\n"),
        Following { .. } => "ok, follows nobody\n".to_owned(),
    }
}

async fn metrics(State(follower): State<Follower>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], metrics::render_follower(&follower.access))
}

async fn refuse(State(follower): State<Follower>) -> Refusal {
    follower.following.refusal().into()
}

impl Following {
    fn refusal(&self) -> ServiceError {
        let advice = "Give clients the URLs of all managers, separated by commas";
        let message = match self {
            Following { leader: Some(leader), .. } => {
                format!("this connection manager does not lead: the one at {leader} does. {advice}")
            }
            Following { trouble: Some(trouble), .. } => {
                format!("no connection manager leads that this one knows of: {trouble}")
            }
            Following { .. } => {
                "no connection manager leads yet that this one knows of: try again".to_owned()
            }
        };
        ServiceError { leader: self.leader.clone(), ..refusal(ErrorCode::NotLeader, message) }
    }
}
