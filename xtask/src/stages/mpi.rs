//! The communicator over MPI, and the program that trains by it: a feature, since most who build this have no MPI.

use crate::command::Invocation;
use crate::packages::SystemProgram;
use crate::stage::Failure;
use crate::stages::tests;

static NEEDED: [SystemProgram; 3] = [
    SystemProgram { name: "OpenMPI", probe: &["mpirun", "--version"], debian_package: "openmpi-bin" },
    SystemProgram {
        name: "OpenMPI's headers",
        // The compiler's wrapper comes with the programs.
        probe: &["sh", "-c", "echo '#include <mpi.h>' | mpicc -E -x c - > /dev/null 2>&1"],
        debian_package: "libopenmpi-dev",
    },
    // A library. The name without a version comes with the headers that it needs to read others.
    SystemProgram {
        name: "libclang",
        probe: &[
            "sh",
            "-c",
            r#"test -n "$LIBCLANG_PATH" || find /usr/lib /usr/lib64 /usr/local/lib -name libclang.so 2>/dev/null | grep -q ."#,
        ],
        debian_package: "libclang-dev",
    },
];

/// Of the whole workspace, so that all that has been built without the feature is built once.
const FEATURES: [&str; 3] = ["--workspace", "--features", "paramhub/mpi,paramhub-mpi/mpi"];
/// What has tests that need it.
const TESTS: [&str; 6] = ["--test", "mpi", "--test", "e2e_mpi", "--test", "e2e_bench_designs"];

pub(crate) fn check() -> Result<(), Failure> {
    NEEDED.iter().try_for_each(SystemProgram::ensure)?;
    let targets = ["--lib", "--bins"].into_iter().chain(TESTS);
    Invocation::parse("cargo clippy").args(FEATURES).args(targets).args(["--", "-D", "warnings"]).run()?;
    Invocation::parse("cargo test --doc --package paramhub-mpi --features mpi").run()?;
    tests::run_of(&[&FEATURES[..], &TESTS].concat())
}
