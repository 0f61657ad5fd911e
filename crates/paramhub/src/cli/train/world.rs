//! Who has started this process, if it is one of several that are to train together.

use std::env::var_os;

use serde::{Deserialize, Serialize};

use crate::cli::Usage;

/// Variables that programs started by an MPI launcher find the number of ranks in: OpenMPI's, and that of others and of Slurm.
const MPI_SIZES: [&str; 2] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"];

/// A launcher of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum World {
    /// `paramhub run`, which has created their job.
    Run,
    /// `mpirun`.
    Mpi,
}

impl World {
    /// What the environment says; none where this process is alone.
    ///
    /// # Errors
    /// If there is an MPI launcher, and this program knows no MPI.
    pub(super) fn find() -> Result<Option<World>, Usage> {
        let is_set = |variable: &str| var_os(variable).is_some_and(|value| !value.is_empty());
        if is_set("PARAMHUB_JOB") && is_set("RANK") {
            return Ok(Some(World::Run));
        }
        let ranks =
            MPI_SIZES.iter().find_map(|variable| var_os(variable)?.to_str()?.trim().parse::<u32>().ok());
        match ranks {
            None => Ok(None),
            Some(_) if cfg!(feature = "mpi") => Ok(Some(World::Mpi)),
            // Slurm says so to programs that have nothing to do with MPI.
            Some(0 | 1) => Ok(None),
            Some(ranks) => Err(Usage(format!(
                "{ranks} ranks were started as for MPI, which this paramhub was built without: build it with `cargo build --release \
                 --features mpi`, or start the ranks with `paramhub run -n {ranks} -- paramhub train`"
            ))),
        }
    }

    pub(super) fn launcher(self) -> &'static str {
        match self {
            World::Run => "paramhub run",
            World::Mpi => "mpirun",
        }
    }
}
