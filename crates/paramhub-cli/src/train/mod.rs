//! `paramhub train`: [`launcher`] starts workers, each of which is a [`worker`]. Where another launcher has
//! started the ranks, each is a [`rank`].

mod chaos;
mod environment;
mod flags;
mod gather;
mod launcher;
mod parameters;
mod progress;
mod rank;
mod rank_launcher;
mod report;
mod spec;
mod training;
mod worker;

use crate::config::Config;
use crate::{ExitCode, Usage};

pub(super) use flags::TrainFlags;
#[cfg(test)]
pub(super) use rank_launcher::RankLauncher;
#[cfg(test)]
pub(super) use spec::check;
pub(super) use worker::{WorkerFlags, work};

/// The log filter where none is given. With `--chaos` the launcher itself tells of each worker that is lost, of which hub
/// and manager would warn as well.
pub(super) fn usual_log(config: &Config) -> &'static str {
    if config.train.chaos_s.is_some() { "error" } else { "warn" }
}

pub(super) fn train(config: &Config) -> anyhow::Result<ExitCode> {
    let launcher = rank_launcher::RankLauncher::find()?;
    spec::check(config, launcher).map_err(Usage)?;
    match launcher {
        None => launcher::launch(config),
        Some(rank_launcher) => rank::run(config, rank_launcher),
    }
}
