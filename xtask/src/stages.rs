//! The stages, in the order in which they run: the quickest come first. Of cargo's runners that print a
//! number of tests, that of the whole workspace comes last; pytest's comes after it.

mod build;
mod deny;
mod docs;
mod features;
mod fuzz;
mod links;
mod lint;
mod neighbour;
pub(crate) mod python;
mod tests;

use crate::release;
use crate::stage::{Extent, Stage};

/// Every stage of `cargo xtask test`.
pub(crate) static ALL: &[Stage] = &[
    Stage { name: "fmt", about: "the sources are formatted", extent: Extent::Quick, run: |_| lint::format() },
    Stage {
        name: "links",
        about: "what the documentation points at exists",
        extent: Extent::Quick,
        run: |_| links::check(),
    },
    Stage {
        name: "clippy",
        about: "clippy has nothing to say",
        extent: Extent::Quick,
        run: |options| lint::clippy(options.extent),
    },
    Stage {
        name: "doc",
        about: "the documentation builds without a warning",
        extent: Extent::Standard,
        run: |_| docs::build(),
    },
    Stage {
        name: "build",
        about: "everything builds",
        extent: Extent::Standard,
        run: |options| build::everything(options.extent),
    },
    Stage {
        name: "doctest",
        about: "the examples in the documentation run",
        extent: Extent::Standard,
        run: |options| docs::examples(options.extent),
    },
    Stage {
        name: "tests",
        about: "unit, integration and end-to-end tests, over MPI too, and in a full run with etcd",
        extent: Extent::Quick,
        run: |options| tests::run(options.extent),
    },
    Stage {
        name: "python",
        about: "the Python package: lints, wheel, and tests with torch",
        extent: Extent::Standard,
        run: python::check,
    },
    Stage {
        name: "gpu",
        about: "the Python package with tensors on a GPU, where nvidia-smi finds one",
        extent: Extent::Standard,
        run: python::check_on_gpu,
    },
    Stage {
        name: "deny",
        about: "licences and sources of the dependencies",
        extent: Extent::Standard,
        run: |_| deny::check(),
    },
    Stage {
        name: "neighbour",
        about: "the programs of the release before work beside those of this one",
        extent: Extent::Full,
        run: |options| neighbour::check(options.extent),
    },
    Stage {
        name: "release",
        about: "what users install: wheel, archive and Debian package, each built and tried out",
        extent: Extent::Full,
        run: |_| release::make(&release::options::ALL),
    },
    Stage {
        name: "fuzz",
        about: "a short run of each fuzz target",
        extent: Extent::Full,
        run: |_| fuzz::short_run(),
    },
];
