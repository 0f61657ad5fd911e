//! One rank of a training whose ranks somebody else has started: `paramhub run`, or `mpirun`.

use std::os::unix::process::CommandExt;

use anyhow::{Context, bail};
use clap::Args;
use paramhub_collective::communicator::{Communicator, MeetOptions, meet};
use paramhub_train::THREADS_VARIABLE;
use paramhub_train::data::Data;
use paramhub_train::net::Network;
use paramhub_train::trainer::Progress;
use paramhub_transport::host_identity;
use serde::{Deserialize, Serialize};

use super::learning::{Learnt, by_collectives, through_the_hub};
use super::progress::Display;
use super::report::Summary;
use super::spec::{self, WorkerReport};
use super::venue::Venue;
use super::world::World;
use super::{gather, parameters};
use crate::cli::{ExitCode, Usage, checkpoints};
use crate::config::{Config, ExchangeKind, TrainSection};
use crate::launch::this_program;
use crate::service::ServiceCreated;
use crate::{Key, Membership, Options};

#[derive(Args)]
pub(crate) struct RankFlags {
    /// What to do, as JSON.
    spec: String,
}

/// What a rank is to do.
#[derive(Serialize, Deserialize)]
struct Part {
    world: World,
    /// Of the connection manager.
    url: Option<String>,
    train: TrainSection,
}

/// Where ranks that MPI has started meet.
#[derive(Serialize, Deserialize)]
struct Place {
    url: String,
    job: ServiceCreated,
}

/// Becomes a rank: this program once more, in an environment that lets it compute in one thread.
pub(super) fn become_rank(config: &Config, world: World) -> anyhow::Result<ExitCode> {
    let section = &config.train;
    check(section, world)?;
    // `paramhub run` has created the job at hubs of its own, or with mpirun rank 0 does.
    let runs = config.url.is_some() || world == World::Run;
    checkpoints::check(runs, section.checkpoints.as_deref(), section.checkpoint_every, section.resume)?;
    spec::check_destinations(section)?;
    let part = Part { world, url: config.url.clone(), train: section.clone() };
    let mut command = this_program().context("cannot find this program's own file")?;
    if let Some(log) = &config.log {
        command.args(["--log", log]);
    }
    command.arg("train-rank").arg(serde_json::to_string(&part)?).env(THREADS_VARIABLE, "1");
    if let Some(token) = config.admin_token() {
        command.env("PARAMHUB_ADMIN_TOKEN", token);
    }
    Err(anyhow::Error::from(command.exec()).context("cannot start this program once more"))
}

/// Refuses what is the launcher's to say.
fn check(section: &TrainSection, world: World) -> Result<(), Usage> {
    let launcher = world.launcher();
    if section.exchange == ExchangeKind::Local {
        return Err(Usage(format!("--exchange local is one process: start it without `{launcher}`")));
    }
    if section.workers.is_some() {
        return Err(Usage(format!("--workers is for `{launcher}` to say here, with -n: leave it out")));
    }
    let of_the_venue =
        [("--name", section.name.is_some()), ("--cores", section.cores != TrainSection::default().cores)];
    let mut of_the_launcher = spec::of_the_job(section).into_iter().chain(of_the_venue);
    match of_the_launcher.find_map(|(flag, is_given)| is_given.then_some(flag)) {
        Some(flag) if world == World::Run => {
            Err(Usage(format!("{flag} is the job's, which `paramhub run` has created: give it to that")))
        }
        _ => Ok(()),
    }
}

/// The rank's part, in its own environment.
pub(crate) fn take_part(config: &Config, flags: &RankFlags) -> anyhow::Result<ExitCode> {
    let part: Part = serde_json::from_str(&flags.spec).context("cannot read what to do")?;
    match part.world {
        World::Run => of_run(part.train),
        World::Mpi => {
            let config = Config { url: part.url, train: part.train, ..config.clone() };
            of_mpi(config)
        }
    }
}

fn of_run(section: TrainSection) -> anyhow::Result<ExitCode> {
    let membership = Membership::from_env()?;
    if section.exchange.collective().is_some() {
        let worker = Options { transport: section.transport, ..Options::from_env()? };
        let communicator = meet(membership, MeetOptions { worker, ..MeetOptions::default() })?;
        return together(section, communicator);
    }
    let ranks = std::env::var("WORLD_SIZE").ok().and_then(|ranks| ranks.parse().ok());
    let ranks = ranks.context("WORLD_SIZE does not say how many ranks `paramhub run` has started")?;
    let rank = membership.rank;
    let taught = Student::new(section, rank, ranks).learn(|section, data, network, progress| {
        through_the_hub(section, &data, network, membership, progress)
    })?;
    // Through hubs a rank hears nothing of the others' times, so rank 0 speaks for itself.
    if rank == 0 {
        taught.show(vec![taught.report()], None)?;
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(not(feature = "mpi"))]
fn of_mpi(_: Config) -> anyhow::Result<ExitCode> {
    bail!("this paramhub was built without MPI: build it with --features mpi");
}

#[cfg(feature = "mpi")]
fn of_mpi(config: Config) -> anyhow::Result<ExitCode> {
    use paramhub_mpi::{Mpi, Threads};

    let threads = match config.train.exchange {
        ExchangeKind::Concom => Threads::Many,
        _ => Threads::One,
    };
    let communicator = Mpi::start(threads)?;
    if config.train.exchange.collective().is_some() {
        return together(config.train, Box::new(communicator));
    }
    at_hubs_of_rank_0(config, &communicator)
}

/// By collectives, and what came of it for all ranks.
fn together(section: TrainSection, communicator: Box<dyn Communicator>) -> anyhow::Result<ExitCode> {
    let kind = section.exchange.collective().context("this exchange has no collectives")?;
    // The store has the other one to itself.
    let beside = communicator.duplicate()?;
    let student = Student::new(section, communicator.rank(), communicator.size());
    let taught = student.learn(|section, data, network, progress| {
        by_collectives(section, kind, data, network, communicator, progress)
    })?;
    taught.conclude(&*beside)?;
    beside.leave()?;
    Ok(ExitCode::SUCCESS)
}

/// Through hubs that rank 0 finds or starts, for ranks that know one another by other means.
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
    let venue = match rank {
        0 => Some(Venue::open(&config)?),
        _ => None,
    };
    let place = venue
        .as_ref()
        .and_then(Venue::seats)
        .map(|(url, job)| Place { url: url.to_owned(), job: job.clone() });
    let place = gather::text_of_rank_0(ranks, &serde_json::to_string(&place)?)?;
    let Some(Place { url, job }) = serde_json::from_str(&place)? else {
        bail!("rank 0 has no job for the others")
    };
    let membership = Membership { url, namespace: job.namespace, nonce: job.nonce, rank };
    let student = Student::new(config.train, rank, size);
    let taught = student.learn(|section, data, network, progress| {
        through_the_hub(section, &data, network, membership, progress)
    })?;
    taught.conclude(ranks)?;
    ranks.leave()?;
    if let Some(venue) = venue {
        venue.close_when_all_have_left();
    }
    Ok(ExitCode::SUCCESS)
}

/// Who learns.
struct Student {
    section: TrainSection,
    display: Option<Display>,
}

impl Student {
    /// Rank 0 shows how it goes.
    fn new(mut section: TrainSection, rank: u32, ranks: u32) -> Student {
        section.workers = Some(ranks);
        let display = (rank == 0).then(|| Display::new(&section, f64::from(ranks)));
        Student { section, display }
    }

    /// Has `learn` train a network on the data.
    fn learn(
        self,
        learn: impl FnOnce(&TrainSection, Data, &mut Network, &mut dyn FnMut(&Progress)) -> anyhow::Result<Learnt>,
    ) -> anyhow::Result<Taught> {
        let Student { section, mut display } = self;
        spec::rehearse(&section)?;
        let data = section.data.load()?;
        let mut network = Network::new(section.net, data.train.geometry(), section.seed)?;
        let mut progress = |progress: &Progress| {
            if let Some(display) = &mut display {
                display.update(&progress.into());
            }
        };
        let learnt = learn(&section, data, &mut network, &mut progress)?;
        if let Some(display) = display {
            display.finish();
        }
        Ok(Taught { section, keys: network.keys().to_vec(), learnt })
    }
}

/// Who has learnt.
struct Taught {
    section: TrainSection,
    keys: Vec<Key>,
    learnt: Learnt,
}

impl Taught {
    fn report(&self) -> WorkerReport {
        WorkerReport::new(&self.learnt.report, self.learnt.transport)
    }

    /// Has rank 0 show what came of it for all ranks.
    fn conclude(&self, ranks: &dyn Communicator) -> anyhow::Result<()> {
        let own = gather::difference_from_rank_0(ranks, &self.learnt.report.parameters)?;
        let told = gather::texts(ranks, &serde_json::to_string(&(self.report(), own))?)?;
        if ranks.rank() != 0 {
            return Ok(());
        }
        let told = told.iter().map(|text| serde_json::from_str(text));
        let told: Vec<(WorkerReport, f64)> =
            told.collect::<Result<_, _>>().context("cannot read what ranks tell")?;
        let largest = told.iter().map(|(_, difference)| *difference).fold(0.0, f64::max);
        self.show(told.into_iter().map(|(report, _)| report).collect(), Some(largest))
    }

    /// Prints the table, and writes what is to be written.
    fn show(&self, reports: Vec<WorkerReport>, difference: Option<f64>) -> anyhow::Result<()> {
        let Taught { section, keys, learnt } = self;
        let summary = Summary::new(section, reports, Vec::new(), difference);
        println!("{}", summary.table());
        if let Some(path) = &section.json {
            summary.write(path)?;
        }
        if let Some(path) = &section.save {
            parameters::save(path, keys, &learnt.report.parameters)?;
        }
        Ok(())
    }
}
