//! The benchmarks beside `paramhub bench exchange`: what each choice of the design is worth, where a step's
//! time goes, tenants, the systems of Poseidon, the designs of collectives, the kernels and the dependency
//! engine. Their processes, messages and flags extend those of [`paramhub_harness::exchange`].
#![forbid(unsafe_code)]

// Its `println!` and the like replace those of std.
#[macro_use]
extern crate paramhub_harness;

mod ablate;
mod breakdown;
mod curves;
mod designs;
mod engine;
mod kernels;
mod plot;
mod poseidon;
mod profile;
mod redraw;
mod rounds;
mod sweep;
mod tenants;
pub mod training;

use std::net::SocketAddr;

use clap::Subcommand;
use paramhub::service::ServiceCreated;
use paramhub::{Job, Registry};
use paramhub_harness::ExitCode;
use paramhub_harness::exchange::messages::JsonConnection;
use paramhub_harness::exchange::spec::Spec;
use paramhub_harness::exchange::{CoreServer, Extension};
use serde_json::Value;

use ablate::Variant;

/// The benchmarks as subcommands of `paramhub bench`.
#[derive(Subcommand)]
#[allow(missing_docs, reason = "the flags of each have its description, which --help shows")]
pub enum BenchCommand {
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

/// Runs a benchmark.
///
/// # Errors
/// [`paramhub_harness::Usage`] for flags that contradict each other, or whatever the benchmark fails with.
pub fn bench(command: BenchCommand) -> anyhow::Result<ExitCode> {
    match command {
        BenchCommand::Sweep(flags) => sweep::sweep(&flags),
        BenchCommand::Ablate(flags) => ablate::ablate(&flags),
        BenchCommand::Breakdown(flags) => breakdown::breakdown(&flags),
        BenchCommand::Tenants(flags) => tenants::tenants(&flags),
        BenchCommand::Poseidon(flags) => poseidon::poseidon(&flags),
        BenchCommand::Designs(flags) => designs::designs(&flags),
        BenchCommand::Plot(flags) => redraw::redraw(&flags),
        BenchCommand::Kernels(flags) => kernels::kernels(&flags),
        BenchCommand::Engine(flags) => engine::engine(&flags),
    }
}

/// The parts that these benchmarks add to the processes of the exchange.
pub struct Benchmarks;

impl Extension for Benchmarks {
    fn registry(&self, spec: &Spec) -> anyhow::Result<Registry> {
        Variant::of_exchange(spec)?.registry(spec.cores)
    }

    fn serve(&self, spec: &Spec) -> anyhow::Result<Option<CoreServer>> {
        match Variant::of_exchange(spec)? {
            Variant::WorkerByInterface => ablate::serve_stream_per_worker(spec).map(Some),
            _ => Ok(None),
        }
    }

    fn join(
        &self,
        spec: &Spec,
        rank: u32,
        job: &ServiceCreated,
        addresses: &[SocketAddr],
    ) -> anyhow::Result<Option<Job>> {
        match Variant::of_exchange(spec)? {
            Variant::WorkerByInterface => {
                ablate::join_stream_per_worker(spec, rank, job, addresses).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn run_scenario(
        &self,
        scenario: &str,
        command: Value,
        connection: &mut JsonConnection,
    ) -> anyhow::Result<()> {
        match scenario {
            breakdown::SCENARIO => breakdown::run_process(serde_json::from_value(command)?, connection),
            poseidon::SCENARIO => poseidon::run_process(serde_json::from_value(command)?, connection),
            designs::SCENARIO => designs::run_rank(serde_json::from_value(command)?, connection),
            _ => anyhow::bail!("there is no benchmark `{scenario}`: the launcher is of another version"),
        }
    }
}
