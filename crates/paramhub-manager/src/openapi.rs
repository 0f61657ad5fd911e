//! The OpenAPI document, generated from the routes and from the types in paramhub-core.

#[cfg(test)]
mod page;

use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{ComponentsBuilder, OpenApi as Document};
use utoipa::{Modify, OpenApi};

use crate::routes::{authority, hubs, information_book, jobs, pages, teams, tokens};

/// Every route the manager serves.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "paramhub connection manager",
        description = "The manager speaks HTTP/1.1 without TLS, on port 7770 by default. A connection carries one request, and \
                       the manager closes it after the answer. Bodies are JSON with `content-type: application/json`, and \
                       unknown fields in them are refused. Byte strings are hexadecimal.\n\n\
                       Every answer that is not a success carries a ServiceError: the code for programs, the message for \
                       people. Of several managers that share one store all but the leader answer every call with 503 and \
                       `not_leader`, except those under the heading `manager`, of which they have all but the state. Unknown routes answer 404 and unknown methods 405 with one. A manager without an admin token \
                       answers only requests whose `Host` is `localhost` or a loopback address, with any port or none, and \
                       421 to others; `/health` answers under every name.\n\n\
                       A caller that has proved nothing yet, by a token or by a job's nonce, takes one of few places. Where \
                       these are full, the manager closes the oldest connection of the address with the most, with 503 if \
                       that can be sent. A client should send head and body at once, and try again if its connection \
                       breaks. Bodies and times are bounded.\n\n\
                       What workers and hubs say to each other on their data connections is described in docs/protocol.md, \
                       and so are the proofs of workers.",
    ),
    paths(
        jobs::create, jobs::connect, jobs::init, jobs::leave, jobs::list, jobs::show, jobs::stop, jobs::membership, jobs::replace_secret,
        jobs::move_job, jobs::move_status,
        information_book::query, information_book::best_scheme,
        hubs::register, hubs::list, hubs::drain, hubs::drain_status, hubs::poll, hubs::events, hubs::links, hubs::probe,
        authority::show, authority::replace,
        tokens::create, tokens::list, tokens::revoke,
        teams::set, teams::list, teams::remove,
        pages::index, pages::health, pages::metrics, pages::openapi,
        pages::state,
    ),
    modifiers(&Tokens),
    tags(
        (name = "jobs", description = "What workers and operators ask. An operator creates a job and gives namespace and nonce \
                                       to its workers. Each rank calls ConnectService, then InitService, and then opens its \
                                       streams to the hubs. Ranks of a job that was created with `hubs` 0 only meet: \
                                       ConnectService answers with their addresses and no hubs, and InitService is refused. \
                                       Ranks of any other job may do without hubs as well once they are connected, if all \
                                       of them do."),
        (name = "hubs", description = "What hubs ask, and what operators ask about hubs. A hub dials the manager; the manager \
                                       never dials. Commands are numbered from 1 without gaps, and are repeated until a poll \
                                       acknowledges them."),
        (name = "tokens", description = "The tokens of operators, teams and hubs. A manager that asks for no token has none."),
        (name = "teams", description = "Teams that share the hubs, each with quotas. The jobs of the team `vision` are those whose \
                                        names begin with `vision/`. A caller with a token of the team may leave that out; \
                                        the jobs of others do not exist for it."),
        (name = "manager", description = "The manager itself."),
    )
)]
pub(crate) struct ApiDocument;

struct Tokens;

impl Modify for Tokens {
    fn modify(&self, document: &mut Document) {
        let components = document.components.get_or_insert_with(|| ComponentsBuilder::new().build());
        let bearer = |description: &str| {
            let scheme =
                HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(description)).build();
            SecurityScheme::Http(scheme)
        };
        let admin = "The manager's admin token, or another of its tokens whose role fits. A manager that listens on loopback \
                     only may have none.";
        components.add_security_scheme("admin_token", bearer(admin));
        components
            .add_security_scheme("hub_token", bearer("The token that the hub was given when it registered."));
    }
}
