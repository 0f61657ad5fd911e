//! `paramhub bench designs`: the designs that embed collectives in a dependency engine, and the hub, side by side (MPI collectives in
//! DAGs, section 5).

mod bound;
mod driver;
mod figure;
mod messages;
mod mpi;
mod rank;
mod rank_runtime;
mod report;
mod scenario;
mod scenario_ranks;
mod simulated_gpu;
mod simulated_model;
mod simulated_rank;
mod step;
mod timeline;
mod train;
mod trained;

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, value_parser};
use paramhub::limits::CORES_MAX;
use paramhub_core::key::KeyTable;
use paramhub_harness::exchange::check_destination;
use paramhub_harness::exchange::hosts::{Hosts, HostsFlags};
use paramhub_harness::exchange::processes::{Run, interrupted, launch_all};
use paramhub_harness::exchange::report::{megabytes, write_json};
use paramhub_harness::exchange::spec::{Spec, Transport};
use paramhub_harness::launch::Signals;
use paramhub_harness::models::Model;
use paramhub_harness::{ExitCode, Usage};
use paramhub_train::data::DataSource;
use paramhub_train::net::NetKind;

use super::profile::Profile;
use driver::{Pace, Program};
use messages::{RankSpec, Work, Workload, WorkloadLayer};
pub(super) use rank::run_rank;
pub(super) use report::Summary;
use report::{RanksResults, Setting};
use scenario::{Carrier, Design, KeyOrder, Scenario};

/// The name by which a process learns that it takes part in this benchmark.
pub(super) const SCENARIO: &str = "designs";

/// Compare how collectives are embedded in a dependency engine: funnel, concom, depcha, and a hub beside them
///
/// Every rank pushes the operations of a training step to an engine: a forward and a backward pass of each layer, which sleep as long
/// as a profile says on the one thread that stands for a GPU's queue; every key's exchange, which is real; and its update. The
/// scenarios take turns in one run, each with processes of its own. Beside each step stands its bound: how long it would take if
/// only computation and one collective after the other took time, each as long as it takes alone.
///
/// With --train a real network learns instead, and an epoch's time is measured.
#[derive(Args)]
pub struct DesignsCommand {
    /// Whose layers are simulated: inception-bn, resnet50 or any other that `paramhub bench poseidon` takes
    #[arg(long, value_name = "NAME", default_value = "inception-bn")]
    model: String,
    /// Train this network instead: mlp, lenet, cifar-quick or inception
    #[arg(long, value_name = "NET", conflicts_with_all = ["model", "profile", "stretch", "share", "scale", "order", "trace", "svg"])]
    train: Option<NetKind>,
    /// What it learns: digits, idx:DIR (MNIST's files) or cifar10:DIR (the binary version)
    #[arg(long, requires = "train", default_value_t = DataSource::Digits)]
    data: DataSource,
    /// Passes over the training set in each turn
    #[arg(long, value_name = "N", requires = "train", default_value_t = 2, value_parser = value_parser!(u32).range(1..=10_000))]
    epochs: u32,
    /// Numbers of ranks, one after the other
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "2,4,8", value_parser = value_parser!(u32).range(2..=256))]
    ranks: Vec<u32>,
    /// Samples of each rank and step
    #[arg(long, value_name = "K", default_value_t = 32, value_parser = value_parser!(u32).range(1..=1 << 20))]
    batch: u32,
    /// What takes turns
    #[arg(long, value_enum, value_delimiter = ',', default_value = "funnel,concom,depcha,hub")]
    designs: Vec<Design>,
    /// What carries collectives; mpi needs a program built with the feature mpi, and mpirun
    #[arg(long, value_enum, value_delimiter = ',', default_value = "native,mpi")]
    over: Vec<Carrier>,
    /// In which order a step pushes its keys
    #[arg(long, value_enum, value_delimiter = ',', default_value = "front-first,last-first,back-then-front")]
    order: Vec<KeyOrder>,
    /// Of concom: keys between two barriers, and communicators
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = value_parser!(u16).range(1..=64))]
    outstanding: u16,
    /// Exchange over TCP alone, though ranks are on one host
    #[arg(long)]
    tcp: bool,
    /// Divide all bytes and times by this, a square
    #[arg(long, value_name = "S", default_value_t = 1)]
    scale: u64,
    /// How long each layer computes: JSON of {"images_per_second"} or {"layers": [{"name", "forward_ms", "backward_ms"}, ..]}
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Multiply the times of all layers by this
    #[arg(long, value_name = "F", default_value_t = 1.0, conflicts_with = "share")]
    stretch: f64,
    /// Have layers compute so long that the collectives of the first scenario, alone and with the first number of ranks, take this
    /// share of it: 1 for as long
    #[arg(long, value_name = "F")]
    share: Option<f64>,
    /// Examples of an epoch [default: ImageNet's]
    #[arg(long, value_name = "N", default_value_t = 1_281_167, value_parser = value_parser!(u64).range(1..))]
    epoch_examples: u64,
    /// Cores of each hub
    #[arg(long, value_name = "C", default_value_t = 1, value_parser = value_parser!(u16).range(1..=CORES_MAX as i64))]
    cores: u16,
    /// Steps of a turn, after one that leads in
    #[arg(long, value_name = "K", default_value_t = 3, value_parser = value_parser!(u32).range(1..=10_000))]
    steps: u32,
    /// Turns of each scenario that count
    #[arg(long, value_name = "R", default_value_t = 5, value_parser = value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw epochs over numbers of ranks
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write what every rank ran when, in a turn that does not count: a file for each scenario and order, for chrome://tracing or
    /// Perfetto, and a picture of a step for each order and carrier
    #[arg(long, value_name = "DIR")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    hosts: HostsFlags,
}

pub(super) fn designs(command: &DesignsCommand) -> anyhow::Result<ExitCode> {
    let signals = Signals::catch()?;
    check_destination("--json", command.json.as_deref())?;
    check_destination("--svg", command.svg.as_deref())?;
    let scenarios = command.scenarios()?;
    match command.train {
        Some(net) => trained::compare(command, net, &scenarios, &signals),
        None => command.play(&scenarios, &signals),
    }
}

impl DesignsCommand {
    /// The scenarios that can run here. The error is the reason why others cannot.
    fn scenarios(&self) -> Result<Vec<Scenario>, Usage> {
        let missing = mpi::missing().filter(|_| self.over.contains(&Carrier::Mpi));
        let carriers: Vec<Carrier> =
            self.over.iter().copied().filter(|over| *over != Carrier::Mpi || missing.is_none()).collect();
        let scenarios = Scenario::all(&self.designs, &carriers);
        match missing {
            Some(reason) if scenarios.is_empty() => Err(Usage(format!("--over mpi: {reason}"))),
            Some(reason) => {
                eprintln!("paramhub: nothing goes over MPI: {reason}");
                Ok(scenarios)
            }
            None => Ok(scenarios),
        }
    }

    fn play(&self, scenarios: &[Scenario], signals: &Signals) -> anyhow::Result<ExitCode> {
        let (workload, setting, seconds) = self.workload()?;
        if let Some(folder) = &self.trace {
            std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        }
        println!("{}", headline(&setting));
        let mut pace = match self.share {
            Some(share) => Pace::Share { share, seconds },
            None => Pace::Times(self.stretch),
        };
        let mut summary = Summary::new(setting);
        for &ranks in &self.ranks {
            let program = Program {
                rank_specs: self.rank_specs(scenarios, ranks, &Work::Play(workload.clone())),
                orders: self.order.clone(),
                spec: self.spec(workload.keys.clone(), ranks),
                hosts: self.hosts(scenarios, ranks)?,
                sites: self.hosts.first(ranks).sites(ranks),
                rounds: self.rounds,
                pace,
            };
            let run = launch_all(
                |socket| program.commands(socket),
                signals,
                |listener, is_over| program.play(listener, is_over),
            )?;
            let measured = match run {
                Run::Measured(measured) => measured,
                Run::Interrupted(signal) => return Ok(interrupted(signal)),
            };
            measured.verdict.require_right()?;
            // The computation is the same for all numbers of ranks.
            pace = Pace::Times(measured.stretch);
            let of_ranks = RanksResults::new(&summary.setting, &workload, scenarios, ranks, &measured);
            println!("{}\n{}", of_ranks.headline(), of_ranks.table());
            summary.ranks.push(of_ranks);
            if let Some(folder) = &self.trace {
                figure::write_timelines(folder, &self.model, scenarios, ranks, &measured.rows)?;
            }
        }
        if let Some(path) = &self.json {
            write_json(&summary, path)?;
        }
        if let Some(path) = &self.svg {
            summary.groups().write(path)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// The workload, and its seconds of computation.
    fn workload(&self) -> anyhow::Result<(Workload, Setting, f64)> {
        let side = self.scale.isqrt();
        if side == 0 || side * side != self.scale {
            let problem = format!("--scale {}: it takes a square, such as 4, 16 or 64", self.scale);
            return Err(Usage(problem).into());
        }
        for (flag, value, least) in
            [("--stretch", self.stretch, 0.0), ("--share", self.share.unwrap_or(1.0), f64::MIN_POSITIVE)]
        {
            if !(value.is_finite() && value >= least) {
                return Err(Usage(format!("{flag} {value}: computation cannot be so long")).into());
            }
        }
        let batch = u64::from(self.batch);
        let model = Model::named(&self.model)?;
        let layers = model.layers();
        let profile = match &self.profile {
            Some(path) => Profile::read(path, &layers, batch)?,
            None => Profile::built_in(&self.model, &layers, batch)?,
        };
        let profile = profile.scaled(1.0 / self.scale as f64);
        let seconds = profile.seconds();
        if self.share.is_some() && seconds == 0.0 {
            return Err(Usage("--share: no layer of the profile takes time".into()).into());
        }
        let (keys, layers) = model.scaled(side)?;
        let layers = layers.into_iter().zip(&profile.passes);
        let layers =
            layers.map(|(layer, &passes)| WorkloadLayer { name: layer.name, keys: layer.keys, passes });
        let setting = Setting {
            model: self.model.clone(),
            batch,
            scale: self.scale,
            bytes: keys.bytes(),
            keys: keys.len(),
            profile: profile.source.clone(),
            outstanding: self.outstanding.into(),
            epoch_examples: self.epoch_examples,
            steps: self.steps,
            rounds: self.rounds,
        };
        Ok((Workload { keys, layers: layers.collect(), steps: self.steps }, setting, seconds))
    }

    fn rank_specs(&self, scenarios: &[Scenario], ranks: u32, work: &Work) -> Vec<RankSpec> {
        let rank_spec = |&scenario: &Scenario| RankSpec {
            scenario,
            ranks,
            outstanding: self.outstanding.into(),
            shares_memory: !self.tcp,
            is_traced: self.trace.is_some(),
            work: work.clone(),
        };
        scenarios.iter().map(rank_spec).collect()
    }

    /// The hosts of hubs, and of ranks that need no `mpirun`.
    fn hosts(&self, scenarios: &[Scenario], ranks: u32) -> Result<Hosts, Usage> {
        let own = scenarios.iter().filter(|scenario| !scenario.is_by_mpi()).count() as u32;
        // If no such rank exists, hubs still need their hosts.
        self.hosts.first(ranks).hosts(own.max(1) * ranks)
    }

    /// The specification that hubs need.
    fn spec(&self, keys: KeyTable, ranks: u32) -> Spec {
        Spec { transport: Transport::Auto, ..Spec::new(keys, ranks, self.cores.into()) }
    }
}

fn headline(setting: &Setting) -> String {
    let Setting { model, keys, bytes, batch, scale, profile, .. } = setting;
    let scaled = if *scale > 1 { format!(", bytes and times divided by {scale}") } else { String::new() };
    format!(
        "{model}: {keys} keys, {} of gradients a rank, {batch} samples{scaled} ({profile})",
        megabytes(*bytes)
    )
}
