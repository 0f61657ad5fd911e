//! Installs or finds what the communicator over MPI needs. It is a feature, since most people who build
//! this have no MPI.

use crate::packages::SystemProgram;
use crate::stage::{Extent, Failure};

static NEEDED: [SystemProgram; 3] = [
    SystemProgram { name: "OpenMPI", probe: &["mpirun", "--version"], debian_package: "openmpi-bin" },
    SystemProgram {
        name: "OpenMPI's headers",
        // The compiler's wrapper comes with the programs.
        probe: &["sh", "-c", "echo '#include <mpi.h>' | mpicc -E -x c - > /dev/null 2>&1"],
        debian_package: "libopenmpi-dev",
    },
    // A library. The package whose name has no version comes with the headers that are needed.
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

/// The features that cargo builds, lints and tests: everything, and the communicator over MPI unless the
/// run is to be quick. All stages pass the same, so that cargo builds each crate once.
pub(crate) fn workspace(extent: Extent) -> Result<&'static [&'static str], Failure> {
    if extent == Extent::Quick {
        return Ok(&["--workspace"]);
    }
    NEEDED.iter().try_for_each(SystemProgram::ensure)?;
    Ok(&["--workspace", "--features", "paramhub-cli/mpi,paramhub-mpi/mpi"])
}
