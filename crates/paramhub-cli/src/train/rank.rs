//! One rank of a training whose ranks another launcher has started: `paramhub run`, or `mpirun`.

use anyhow::{Context, bail};
use paramhub::service::ServiceCreated;
use paramhub::{Key, Membership, Options};
use paramhub_bench::training::rehearse;
use paramhub_collective::communicator::{Communicator, RendezvousOptions, rendezvous};
use paramhub_train::data::Data;
use paramhub_train::net::Network;
use paramhub_train::trainer::Progress;
use paramhub_transport::host_identity;
use serde::{Deserialize, Serialize};

use super::environment::TrainEnvironment;
use super::progress::Display;
use super::rank_launcher::RankLauncher;
use super::report::Summary;
use super::spec::{self, WorkerReport};
use super::training::{TrainingResult, train_by_collectives, train_through_hub};
use super::{gather, parameters};
use crate::config::{Config, TrainSection};
use crate::{ExitCode, Usage};

/// The place where ranks that MPI has started meet.
#[derive(Serialize, Deserialize)]
struct JobAddress {
    url: String,
    job: ServiceCreated,
}

/// Trains as the rank that another launcher has started this process for.
pub(super) fn run(config: &Config, rank_launcher: RankLauncher) -> anyhow::Result<ExitCode> {
    let section = &config.train;
    spec::check_destinations(section)?;
    match rank_launcher {
        RankLauncher::Run => of_run(section.clone()),
        RankLauncher::Mpi => of_mpi(config.clone()),
    }
}

fn of_run(section: TrainSection) -> anyhow::Result<ExitCode> {
    let membership = Membership::from_env()?;
    if section.exchange.collective().is_some() {
        let worker = Options { transport: section.transport, ..Options::from_env()? };
        let communicator =
            rendezvous(membership, RendezvousOptions { worker, ..RendezvousOptions::default() })?;
        return together(section, communicator);
    }
    let ranks = std::env::var("WORLD_SIZE").ok().and_then(|ranks| ranks.parse().ok());
    let ranks = ranks.context("WORLD_SIZE does not say how many ranks `paramhub run` has started")?;
    let rank = membership.rank;
    let trained = TrainingRank::new(section, rank, ranks).learn(|section, data, network, progress| {
        train_through_hub(section, &data, network, membership, |_| {}, progress)
    })?;
    // Ranks that exchange through hubs do not exchange their times, so rank 0 reports its own alone.
    if rank == 0 {
        trained.show(vec![trained.report()], None)?;
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(not(feature = "mpi"))]
fn of_mpi(_: Config) -> anyhow::Result<ExitCode> {
    bail!("this paramhub was built without MPI: build it with --features mpi");
}

#[cfg(feature = "mpi")]
fn of_mpi(config: Config) -> anyhow::Result<ExitCode> {
    use paramhub_mpi::{MpiCommunicator, ThreadLevel};

    use crate::config::ExchangeKind;

    let threads = match config.train.exchange {
        ExchangeKind::Concom => ThreadLevel::Multiple,
        _ => ThreadLevel::Serialized,
    };
    let communicator = MpiCommunicator::start(threads)?;
    if config.train.exchange.collective().is_some() {
        return together(config.train, Box::new(communicator));
    }
    at_hubs_of_rank_0(config, &communicator)
}

/// Trains by collectives and concludes with the results of all ranks.
fn together(section: TrainSection, communicator: Box<dyn Communicator>) -> anyhow::Result<ExitCode> {
    let kind = section.exchange.collective().context("this exchange has no collectives")?;
    // The store takes the original communicator for itself.
    let beside = communicator.duplicate()?;
    let training_rank = TrainingRank::new(section, communicator.rank(), communicator.size());
    let trained = training_rank.learn(|section, data, network, progress| {
        train_by_collectives(section, kind, data, network, communicator, progress)
    })?;
    trained.conclude(&*beside)?;
    beside.leave()?;
    Ok(ExitCode::SUCCESS)
}

/// Trains through hubs that rank 0 finds or starts, for ranks that already have a communicator.
#[cfg_attr(not(feature = "mpi"), expect(dead_code, reason = "only MPI starts ranks that have no job yet"))]
fn at_hubs_of_rank_0(mut config: Config, ranks: &dyn Communicator) -> anyhow::Result<ExitCode> {
    let (rank, size) = (ranks.rank(), ranks.size());
    let hosts = gather::texts(ranks, &host_identity())?;
    if config.url.is_none() && hosts.iter().any(|host| *host != hosts[0]) {
        let problem = "ranks are on several hosts, which a hub inside rank 0 does not serve: start `paramhub hub` and name it \
                       with --hub URL";
        return Err(Usage(problem.into()).into());
    }
    config.train.workers = Some(size);
    let environment = match rank {
        0 => Some(TrainEnvironment::open(&config)?),
        _ => None,
    };
    let job_address = environment
        .as_ref()
        .and_then(TrainEnvironment::membership)
        .map(|(url, job)| JobAddress { url: url.to_owned(), job: job.clone() });
    let job_address = gather::text_of_rank_0(ranks, &serde_json::to_string(&job_address)?)?;
    let Some(JobAddress { url, job }) = serde_json::from_str(&job_address)? else {
        bail!("rank 0 has no job for the others")
    };
    let membership = Membership::of_job(url, &job, rank);
    let training_rank = TrainingRank::new(config.train, rank, size);
    let trained = training_rank.learn(|section, data, network, progress| {
        train_through_hub(section, &data, network, membership, |_| {}, progress)
    })?;
    trained.conclude(ranks)?;
    ranks.leave()?;
    if let Some(environment) = environment {
        environment.close_when_all_have_left();
    }
    Ok(ExitCode::SUCCESS)
}

/// A rank before its training.
struct TrainingRank {
    rank: u32,
    section: TrainSection,
    display: Option<Display>,
}

impl TrainingRank {
    /// Only rank 0 has a display.
    fn new(mut section: TrainSection, rank: u32, ranks: u32) -> TrainingRank {
        section.workers = Some(ranks);
        let display = (rank == 0).then(|| Display::new(&section, f64::from(ranks)));
        TrainingRank { rank, section, display }
    }

    /// Loads the data and has `learn` train a network on it.
    fn learn(
        self,
        learn: impl FnOnce(
            &TrainSection,
            Data,
            &mut Network,
            &mut dyn FnMut(&Progress),
        ) -> anyhow::Result<TrainingResult>,
    ) -> anyhow::Result<TrainedRank> {
        let TrainingRank { rank, section, mut display } = self;
        rehearse(&section)?;
        let data = section.data.load()?;
        let mut network = Network::new(section.net, data.train.geometry(), section.seed)?;
        let mut progress = |progress: &Progress| {
            if let Some(display) = &mut display {
                display.update(&progress.into());
            }
        };
        let result = learn(&section, data, &mut network, &mut progress)?;
        if let Some(display) = display {
            display.finish();
        }
        Ok(TrainedRank { rank, section, keys: network.keys().to_vec(), result })
    }
}

/// A rank after its training.
struct TrainedRank {
    rank: u32,
    section: TrainSection,
    keys: Vec<Key>,
    result: TrainingResult,
}

impl TrainedRank {
    fn report(&self) -> WorkerReport {
        WorkerReport::new(self.rank as usize, &self.result.report, self.result.transport)
    }

    /// Gathers the results of all ranks at rank 0, which shows them.
    fn conclude(&self, ranks: &dyn Communicator) -> anyhow::Result<()> {
        let own = gather::difference_from_rank_0(ranks, &self.result.report.parameters)?;
        let texts = gather::texts(ranks, &serde_json::to_string(&(self.report(), own))?)?;
        if ranks.rank() != 0 {
            return Ok(());
        }
        let texts = texts.iter().map(|text| serde_json::from_str(text));
        let results: Vec<(WorkerReport, f64)> =
            texts.collect::<Result<_, _>>().context("cannot read the results of the ranks")?;
        let largest = results.iter().map(|(_, difference)| *difference).fold(0.0, f64::max);
        self.show(results.into_iter().map(|(report, _)| report).collect(), Some(largest))
    }

    /// Prints the table, and writes the files that were asked for.
    fn show(&self, reports: Vec<WorkerReport>, difference: Option<f64>) -> anyhow::Result<()> {
        let TrainedRank { section, keys, result, .. } = self;
        let summary = Summary::new(section, reports, Vec::new(), difference);
        println!("{}", summary.table());
        if let Some(path) = &section.json {
            summary.write(path)?;
        }
        if let Some(path) = &section.save {
            parameters::save(path, keys, &result.report.parameters)?;
        }
        Ok(())
    }
}
