//! The stages, in the order they run: what answers fastest first. Of cargo's runners that print a count of tests the
//! last is the one of the whole workspace; pytest's comes after it.

mod build;
mod deny;
mod docs;
mod fuzz;
mod lint;
mod mpi;
mod python;
mod tests;

use crate::stage::Stage;

/// Every stage of `cargo xtask test`.
pub(crate) static ALL: &[Stage] = &[
    Stage { name: "fmt", about: "the sources are formatted", run: |_| lint::format() },
    Stage { name: "clippy", about: "clippy has nothing to say", run: |_| lint::clippy() },
    Stage { name: "doc", about: "the documentation builds without a warning", run: |_| docs::build() },
    Stage { name: "build", about: "everything builds", run: |_| build::everything() },
    Stage { name: "doctest", about: "the examples in the documentation run", run: |_| docs::examples() },
    Stage {
        name: "mpi",
        about: "the communicator over MPI, with ranks that mpirun starts",
        run: |_| mpi::check(),
    },
    Stage { name: "tests", about: "unit, integration and end-to-end tests", run: |_| tests::run() },
    Stage {
        name: "python",
        about: "the Python package: lints, wheel, and tests with torch",
        run: python::check,
    },
    Stage { name: "deny", about: "licences and sources of the dependencies", run: |_| deny::check() },
    Stage { name: "fuzz", about: "a short run of each fuzz target", run: |_| fuzz::short_run() },
];
