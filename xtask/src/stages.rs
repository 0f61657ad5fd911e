//! The stages, in the order they run: what answers fastest first. Runners that print a count of tests stand in
//! such an order that the last count is the one of the whole workspace.

mod build;
mod deny;
mod docs;
mod fuzz;
mod lint;
mod tests;

use crate::stage::Stage;

/// Every stage of `cargo xtask test`.
pub(crate) static ALL: &[Stage] = &[
    Stage { name: "fmt", about: "the sources are formatted", run: lint::format },
    Stage { name: "clippy", about: "clippy has nothing to say", run: lint::clippy },
    Stage { name: "doc", about: "the documentation builds without a warning", run: docs::build },
    Stage { name: "build", about: "everything builds", run: build::everything },
    Stage { name: "doctest", about: "the examples in the documentation run", run: docs::examples },
    Stage { name: "tests", about: "unit, integration and end-to-end tests", run: tests::run },
    Stage { name: "deny", about: "licences and sources of the dependencies", run: deny::check },
    Stage { name: "fuzz", about: "a short run of each fuzz target", run: fuzz::short_run },
];
