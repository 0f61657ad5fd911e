//! A process of the comparison: one rank of a scenario, which the launcher commands.

use anyhow::{Context, bail};
use paramhub::Membership;
use paramhub_harness::exchange::messages::JsonConnection;
use paramhub_mesh::{MeshConfig, MeshListener};
use paramhub_syncer::address_towards;

use super::messages::{ScenarioCommand, ScenarioReply, Work};
use super::rank_runtime::RankRuntime;
use super::scenario::Carrier;
use super::simulated_rank::SimulatedRank;
use super::train::train_rank;

/// Runs a rank of a scenario until the launcher hangs up.
pub(crate) fn run_rank(command: ScenarioCommand, connection: &mut JsonConnection) -> anyhow::Result<()> {
    let ScenarioCommand::Enter { rank_spec, rank, url, job } = command else {
        bail!("the launcher sent a command out of turn")
    };
    let listener = match rank_spec.scenario.over {
        Some(Carrier::Native) => Some(listen(&url)?),
        _ => None,
    };
    connection.send(&ScenarioReply::Listening(listener.as_ref().map(MeshListener::address)))?;
    let (addresses, secret) = match connection.receive()? {
        Some(ScenarioCommand::Meet { addresses, secret }) => (addresses, secret),
        Some(_) => bail!("the launcher sent a command out of turn"),
        None => return Ok(()),
    };
    let native = listener.map(|listener| {
        let config =
            MeshConfig { shares_memory: rank_spec.shares_memory, ..MeshConfig::new(rank, secret, addresses) };
        (listener, config)
    });
    let membership = job.map(|job| Membership::of_job(url, &job, rank));
    let runtime = RankRuntime::open(&rank_spec, rank, membership, native)?;
    match &rank_spec.work {
        Work::Play(workload) => {
            SimulatedRank::new(runtime, workload, rank, rank_spec.ranks)?.play(connection)
        }
        Work::Train(section) => train_rank(&runtime, section, connection),
    }
}

/// Listens on this host's interface towards the hubs.
fn listen(url: &str) -> anyhow::Result<MeshListener> {
    let address = address_towards(url).map_err(anyhow::Error::msg)?;
    MeshListener::bind(address).with_context(|| format!("cannot listen on {address}"))
}
