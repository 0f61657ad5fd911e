//! `paramhub bench`: how fast gradients are exchanged here, how fast bare bytes are, how fast the kernels, and
//! what the dependency engine costs.

mod ablate;
mod breakdown;
mod conductor;
mod curves;
mod designs;
mod engine;
mod exchange;
mod hosts;
mod hub;
mod kernels;
mod numbers;
mod peer;
mod plot;
mod poseidon;
mod processes;
mod profile;
mod raw;
mod redraw;
mod report;
mod rounds;
mod spec;
mod statistics;
mod sweep;
mod tenants;
mod usage;

use std::path::Path;

use clap::{Args, Subcommand};

use super::Usage;
use crate::cli::ExitCode;

pub(super) use peer::{PeerFlags, take_part};

#[derive(Args)]
pub(super) struct BenchFlags {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Exchange(exchange::ExchangeCommand),
    Sweep(sweep::SweepFlags),
    Ablate(ablate::AblateFlags),
    Breakdown(breakdown::BreakdownFlags),
    Tenants(tenants::TenantsCommand),
    Poseidon(poseidon::PoseidonCommand),
    Designs(designs::DesignsCommand),
    Plot(redraw::PlotFlags),
    Kernels(kernels::KernelsFlags),
    Engine(engine::EngineFlags),
}

pub(super) fn bench(flags: BenchFlags) -> anyhow::Result<ExitCode> {
    match flags.what {
        What::Exchange(flags) => exchange::exchange(&flags),
        What::Sweep(flags) => sweep::sweep(&flags),
        What::Ablate(flags) => ablate::ablate(&flags),
        What::Breakdown(flags) => breakdown::breakdown(&flags),
        What::Tenants(flags) => tenants::tenants(&flags),
        What::Poseidon(flags) => poseidon::poseidon(&flags),
        What::Designs(flags) => designs::designs(&flags),
        What::Plot(flags) => redraw::redraw(&flags),
        What::Kernels(flags) => kernels::kernels(&flags),
        What::Engine(flags) => engine::engine(&flags),
    }
}

/// A long benchmark is a poor way to find out that a folder does not exist.
fn check_destination(flag: &str, file: Option<&Path>) -> anyhow::Result<()> {
    let Some(path) = file else { return Ok(()) };
    let parent = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
    if !parent.is_dir() {
        let (path, parent) = (path.display(), parent.display());
        return Err(Usage(format!("{flag} {path}: there is no folder {parent}")).into());
    }
    Ok(())
}

fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}
