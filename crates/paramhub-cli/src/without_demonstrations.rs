//! This takes the place of `train` and of the benchmarks beside `bench exchange` in a program that is built
//! without the feature `demonstrations`: it knows their names, and refuses them with the way to get them.

use std::ffi::OsString;

use clap::{Args, Subcommand};
use paramhub_harness::exchange::Extension;
use paramhub_harness::{ExitCode, Usage};
use serde::{Deserialize, Serialize};

use crate::config::Config;

const REFUSAL: &str = "this paramhub, which the Python package brings, has no trainer and no benchmark but `bench exchange`: for `train` \
                       and the others run `cargo install --path crates/paramhub-cli` in a clone of the repository, and start \
                       the paramhub that this installs";

/// The arguments of a command that is left out.
#[derive(Args)]
#[command(hide = true, disable_help_flag = true)]
pub(crate) struct LeftOut {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    _arguments: Vec<OsString>,
}

pub(crate) type TrainFlags = LeftOut;
pub(crate) type WorkerFlags = LeftOut;

impl LeftOut {
    pub(crate) fn apply(self, _: &mut Config) {}
}

/// The table `[train]` of a configuration file, which other programs may read: it is kept as it is.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct TrainSection(toml::Table);

impl TrainSection {
    pub(crate) fn with_defaults(&self) -> TrainSection {
        self.clone()
    }
}

pub(crate) fn train(_: &Config) -> anyhow::Result<ExitCode> {
    refuse()
}

pub(crate) fn usual_log(_: &Config) -> &'static str {
    "warn"
}

pub(crate) fn work(_: &WorkerFlags) -> anyhow::Result<ExitCode> {
    refuse()
}

/// The benchmarks that are left out.
#[derive(Subcommand)]
pub(crate) enum BenchCommand {
    Sweep(LeftOut),
    Ablate(LeftOut),
    Breakdown(LeftOut),
    Tenants(LeftOut),
    Poseidon(LeftOut),
    Designs(LeftOut),
    Plot(LeftOut),
    Kernels(LeftOut),
    Engine(LeftOut),
}

pub(crate) fn bench(_: BenchCommand) -> anyhow::Result<ExitCode> {
    refuse()
}

pub(crate) struct Benchmarks;

impl Extension for Benchmarks {}

fn refuse() -> anyhow::Result<ExitCode> {
    Err(Usage(REFUSAL.into()).into())
}
