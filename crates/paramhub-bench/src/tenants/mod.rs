//! `paramhub bench tenants`: the throughput that jobs lose by sharing a hub (PHub, section 4.8 and figure
//! 18).

mod driver;
mod report;

use clap::{Args, value_parser};
use paramhub_harness::exchange::check_destination;
use paramhub_harness::exchange::hosts::HostsFlags;
use paramhub_harness::exchange::processes::{Run, interrupted, launch};
use paramhub_harness::exchange::report::write_json;
use paramhub_harness::exchange::{ExchangeFlags, check_memory, headline};
use paramhub_harness::launch::Signals;
use paramhub_harness::{ExitCode, Usage};

use driver::{Program, drive};
use report::Summary;

/// Several jobs at once on one hub, against one of them alone
///
/// Every job has its own workers, each a process, and all exchange the same model. In turns, one of the jobs exchanges alone
/// while the others rest, and all exchange at once. With J jobs, a fair share is a J-th of what one alone has: what is lost
/// against it is 1 - J t / T, where t is the time of the one and T that of the last of all. After the last iteration every
/// worker exchanges once more, all jobs at once, and compares what comes with the kernels, number by number.
#[derive(Args)]
pub struct TenantsCommand {
    /// Jobs, each with --workers workers
    #[arg(long, value_name = "J", default_value_t = 8, value_parser = value_parser!(u32).range(1..=256))]
    jobs: u32,
    #[command(flatten)]
    exchange: ExchangeFlags,
    #[command(flatten)]
    hosts: HostsFlags,
}

pub(super) fn tenants(command: &TenantsCommand) -> anyhow::Result<ExitCode> {
    let flags = &command.exchange;
    if flags.raw {
        let why = "--raw has no jobs to compare: `paramhub bench exchange` measures it";
        return Err(Usage(why.into()).into());
    }
    let signals = Signals::catch()?;
    let (model, spec) = flags.spec()?;
    // Ranks of the jobs alternate, so that each job is spread over all hosts.
    let hosts = command.hosts.hosts(command.jobs * spec.workers)?;
    check_destination("--json", flags.json.as_deref())?;
    check_memory(&spec, command.jobs)?;
    let settings = flags.settings(&spec);
    println!(
        "{} jobs, alone and at once, each: {}",
        command.jobs,
        headline(&model, spec.keys.bytes(), &settings)
    );
    let processes = command.jobs * spec.workers;
    let program = Program {
        jobs: command.jobs as usize,
        spec,
        hosts: hosts.clone(),
        warmup: flags.warmup,
        iterations: flags.iters,
    };
    let measured =
        match launch(&hosts, processes, &signals, |listener, is_over| drive(&program, listener, is_over))? {
            Run::Measured(measured) => measured,
            Run::Interrupted(signal) => return Ok(interrupted(signal)),
        };
    let summary = Summary::new(model, flags.transport, program.spec.keys.bytes(), settings, &measured);
    println!("{}", summary.table(&measured));
    if let Some(path) = &flags.json {
        write_json(&summary, path)?;
    }
    measured.verdict.require_right()?;
    Ok(ExitCode::SUCCESS)
}
