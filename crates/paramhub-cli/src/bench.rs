//! `paramhub bench`: the speed of an exchange, and further benchmarks where this program has them.

use clap::{Args, Subcommand};
use paramhub_harness::exchange::{self, ExchangeCommand, PeerFlags, exchange};

use crate::ExitCode;
#[cfg(not(feature = "demonstrations"))]
use crate::without_demonstrations as further;
#[cfg(feature = "demonstrations")]
use paramhub_bench as further;

#[derive(Args)]
pub(super) struct BenchFlags {
    #[command(subcommand)]
    what: BenchCommand,
}

#[derive(Subcommand)]
enum BenchCommand {
    Exchange(ExchangeCommand),
    #[command(flatten)]
    Further(further::BenchCommand),
}

pub(super) fn bench(flags: BenchFlags) -> anyhow::Result<ExitCode> {
    match flags.what {
        BenchCommand::Exchange(command) => exchange(&command),
        BenchCommand::Further(command) => further::bench(command),
    }
}

/// Runs a process of a benchmark.
pub(super) fn run_process(flags: &PeerFlags) -> anyhow::Result<ExitCode> {
    exchange::run_process(flags, &further::Benchmarks)
}
