//! `paramhub probe`: what the network carries between the workers of a job.

mod places;
mod report;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use paramhub::{Member, Membership, Options};
use paramhub_mesh::{Pairs, Probe};
use paramhub_syncer::{PeerAddresses, PeerListener, PortRange, address_towards};

use super::Usage;
use crate::ExitCode;

/// How long the ranks may take to leave the job.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Measure what the network carries between the workers of a job
///
/// Every worker of the job runs it: `paramhub run -n 4 -- paramhub probe`, or by hand on several machines, with the job's
/// PARAMHUB_URL, PARAMHUB_JOB and PARAMHUB_SECRET and a RANK each. Every pair sends to one another for a moment, one way, the
/// other, and both at once. A number is the payload of one TCP connection with one thread at each end, in Mbit/s as it
/// arrived: what a link leaves after headers, or what such a thread can do where the link is faster. Rank 0 prints them.
#[derive(Args)]
pub(super) struct ProbeFlags {
    /// How long all measurements together may take, about. The same at every worker
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, allow_negative_numbers = true)]
    seconds: f64,
    /// Measure disjoint pairs at the same time: quicker, and pairs that share a link share its rate. The same at every worker
    #[arg(long)]
    together: bool,
    /// The address of this machine on which the others reach it [default: of the interface towards the manager]
    #[arg(long, value_name = "IP")]
    address: Option<IpAddr>,
    /// The port on which the others reach this rank, or a range, as in 7800-7815, of which it takes the first free one: ranks of
    /// one machine need a port each [default: any that is free]
    #[arg(long, value_name = "PORT[-PORT]")]
    port: Option<PortRange>,
    /// Print JSON, in one line
    #[arg(long)]
    json: bool,
}

pub(super) fn probe(flags: &ProbeFlags) -> anyhow::Result<ExitCode> {
    let seconds = flags.seconds;
    let budget = Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|budget| !budget.is_zero())
        .ok_or_else(|| Usage(format!("--seconds {seconds}: measuring takes some time above zero")))?;
    let membership = Membership::from_env().map_err(|error| Usage(error.to_string()))?;
    let pairs = if flags.together { Pairs::Together } else { Pairs::OneByOne };
    let rank = membership.rank;
    let address = match flags.address {
        Some(address) => address,
        None => address_towards(&membership.url)
            .map_err(|problem| Usage(format!("{problem}: name this machine's address with --address")))?,
    };
    let listener = flags.port.unwrap_or(PortRange::ANY).listen(address);
    let listener = listener
        .map_err(|problem| Usage(format!("{problem}: say with --address and --port where to listen")))?;
    let listener = PeerListener::new(listener, &membership);

    let options = Options { peer_address: Some(listener.address()), ..Options::default() };
    let member = Member::connect_with(membership, options)?;
    if member.workers() < 2 {
        let problem = "a job of one worker has no network to measure: `paramhub run -n 2 -- paramhub probe`";
        return Err(Usage(problem.into()).into());
    }
    let (listener, config) = listener.mesh_config(&PeerAddresses::of(&member), "probe")?;
    let addresses = config.addresses.clone();
    places::check(&addresses)?;
    let mesh = Arc::new(listener.join(config)?);
    let of_job = Arc::downgrade(&mesh);
    let lease = member.hold_lease(move |error| {
        if let Some(mesh) = of_job.upgrade() {
            mesh.abort(&error.to_string());
        }
    })?;
    let places = places::gather(&mesh, &addresses);
    let measured = places.and_then(|places| Ok((places, mesh.probe(&Probe { budget, pairs })?)));
    let left = mesh.leave(LEAVE_TIMEOUT);
    let (places, measured) = measured?;
    left?;
    lease.leave()?;
    if rank == 0 {
        let report = report::Report::new(&places, pairs, &measured);
        let text = if flags.json { serde_json::to_string(&report)? } else { report.text() };
        println!("{}", text.trim_end());
    }
    Ok(ExitCode::SUCCESS)
}
