//! The launcher that started this process, if the process is one of several that are to train together.

use std::env::var_os;

use crate::Usage;

/// Variables in which programs started by an MPI launcher find the number of ranks: OpenMPI's, and that of
/// other launchers and of Slurm.
const MPI_SIZES: [&str; 2] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"];

/// A launcher of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RankLauncher {
    /// `paramhub run`, which has created the ranks' job.
    Run,
    /// `mpirun`.
    Mpi,
}

impl RankLauncher {
    /// The launcher, by the environment; `None` if this process is alone.
    ///
    /// # Errors
    /// If there is an MPI launcher and this program was built without MPI.
    pub(super) fn find() -> Result<Option<RankLauncher>, Usage> {
        let is_set = |variable: &str| var_os(variable).is_some_and(|value| !value.is_empty());
        if is_set("PARAMHUB_JOB") && is_set("RANK") {
            return Ok(Some(RankLauncher::Run));
        }
        let ranks =
            MPI_SIZES.iter().find_map(|variable| var_os(variable)?.to_str()?.trim().parse::<u32>().ok());
        match ranks {
            None => Ok(None),
            Some(_) if cfg!(feature = "mpi") => Ok(Some(RankLauncher::Mpi)),
            // Slurm sets this, too, for programs that do not use MPI.
            Some(0 | 1) => Ok(None),
            Some(ranks) => Err(Usage(format!(
                "{ranks} ranks were started as for MPI, which this paramhub was built without: build it with `cargo build --release \
                 --features mpi`, or start the ranks with `paramhub run -n {ranks} -- paramhub train`"
            ))),
        }
    }
}
