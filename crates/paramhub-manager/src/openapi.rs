//! The OpenAPI document, drawn from the routes and from the types in paramhub-core.

use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{ComponentsBuilder, OpenApi as Document};
use utoipa::{Modify, OpenApi};

use crate::routes::{book, hubs, jobs, pages};

/// Every route the manager serves.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "paramhub connection manager",
        description = "Jobs, rendezvous and hubs. Every answer that is not a success carries a ServiceError; unknown \
                       routes answer 404 and unknown methods 405 with one. A manager on loopback without an admin token \
                       answers 421 to a request whose Host is no name of loopback. A connection carries one request. What \
                       workers and hubs say to each other on their data connections is described in docs/protocol.md.",
    ),
    paths(
        jobs::create, jobs::connect, jobs::init, jobs::leave, jobs::list, jobs::show, jobs::stop, jobs::membership,
        book::query, book::best_scheme,
        hubs::register, hubs::list, hubs::poll, hubs::events, hubs::links, hubs::probe,
        pages::index, pages::health, pages::metrics, pages::openapi,
    ),
    modifiers(&Tokens),
    tags(
        (name = "jobs", description = "What workers and operators ask."),
        (name = "hubs", description = "What hubs ask."),
        (name = "manager", description = "The manager itself."),
    )
)]
pub(crate) struct Interface;

struct Tokens;

impl Modify for Tokens {
    fn modify(&self, document: &mut Document) {
        let components = document.components.get_or_insert_with(|| ComponentsBuilder::new().build());
        let bearer = |description: &str| {
            let scheme =
                HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(description)).build();
            SecurityScheme::Http(scheme)
        };
        let admin = "The manager's admin token. A manager that listens on loopback only may have none.";
        components.add_security_scheme("admin_token", bearer(admin));
        components
            .add_security_scheme("hub_token", bearer("The token that the hub was given when it registered."));
    }
}
