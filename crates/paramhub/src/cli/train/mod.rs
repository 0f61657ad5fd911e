//! `paramhub train`: [`launcher`] starts workers, each of which is a [`worker`]; where somebody else has started the ranks, each is
//! a [`rank`].

mod flags;
mod gather;
mod launcher;
mod learning;
mod parameters;
mod progress;
mod rank;
mod report;
mod spec;
mod venue;
mod worker;
mod world;

use crate::cli::{ExitCode, Usage};
use crate::config::Config;

pub(super) use flags::TrainFlags;
pub(super) use rank::{RankFlags, take_part};
pub(super) use spec::rehearse;
pub(super) use worker::{WorkerFlags, work};

pub(super) fn train(config: &Config) -> anyhow::Result<ExitCode> {
    spec::check(&config.train).map_err(Usage)?;
    match world::World::find()? {
        None => launcher::launch(config),
        Some(world) => rank::become_rank(config, world),
    }
}
