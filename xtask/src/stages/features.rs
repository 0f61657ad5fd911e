//! Installs or finds what the features need that are off by default, since most people who build this have no MPI and no
//! etcd: the communicator over MPI, and managers that share an etcd.

use crate::packages::SystemProgram;
use crate::stage::{Extent, Failure};

static NEEDED_BY_MPI: [SystemProgram; 3] = [
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

static NEEDED_BY_ETCD: [SystemProgram; 3] = [
    SystemProgram { name: "protoc", probe: &["protoc", "--version"], debian_package: "protobuf-compiler" },
    SystemProgram {
        name: "protoc's definitions",
        probe: &[
            "sh",
            "-c",
            r#"folder=$(mktemp -d) && echo 'syntax = "proto3"; import "google/protobuf/descriptor.proto";' > "$folder/a.proto"
               protoc -I "$folder" -o /dev/null "$folder/a.proto" 2>/dev/null; found=$?; rm -r "$folder"; exit $found"#,
        ],
        debian_package: "libprotobuf-dev",
    },
    // The tests start it.
    SystemProgram { name: "etcd", probe: &["etcd", "--version"], debian_package: "etcd-server" },
];

/// The features that cargo builds, lints and tests: nothing but the defaults if the run is to be quick, else also the
/// communicator over MPI, and in a full run also managers that share an etcd. All stages of a run pass the same, so that
/// cargo builds each crate once.
pub(crate) fn workspace(extent: Extent) -> Result<&'static [&'static str], Failure> {
    if extent == Extent::Quick {
        return Ok(&["--workspace"]);
    }
    NEEDED_BY_MPI.iter().try_for_each(SystemProgram::ensure)?;
    if extent == Extent::Standard {
        return Ok(&["--workspace", "--features", "paramhub-cli/mpi,paramhub-mpi/mpi"]);
    }
    NEEDED_BY_ETCD.iter().try_for_each(SystemProgram::ensure)?;
    Ok(&[
        "--workspace",
        "--features",
        "paramhub-cli/mpi,paramhub-mpi/mpi,paramhub-cli/etcd,paramhub-manager/etcd",
    ])
}
