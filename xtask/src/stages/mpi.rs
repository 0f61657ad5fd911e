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

/// The feature, and the package that has it.
const PACKAGE: [&str; 4] = ["--package", "paramhub-mpi", "--features", "mpi"];

/// The program, whose every other test runs without it.
const PROGRAM: [&str; 4] = ["--package", "paramhub", "--features", "mpi"];

pub(crate) fn check() -> Result<(), Failure> {
    NEEDED.iter().try_for_each(SystemProgram::ensure)?;
    Invocation::parse("cargo clippy --all-targets").args(PACKAGE).args(["--", "-D", "warnings"]).run()?;
    Invocation::parse("cargo test --doc").args(PACKAGE).run()?;
    tests::run_of(&PACKAGE)?;
    Invocation::parse("cargo clippy --bins --test e2e_mpi")
        .args(PROGRAM)
        .args(["--", "-D", "warnings"])
        .run()?;
    tests::run_of(&[&PROGRAM[..], &["--test", "e2e_mpi"]].concat())
}
