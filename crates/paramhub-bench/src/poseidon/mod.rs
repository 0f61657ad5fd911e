//! `paramhub bench poseidon`: trainings whose computation is simulated and whose exchange is real (Poseidon,
//! section 5).

mod bound;
mod driver;
mod report;
mod system;
mod worker;

use std::path::PathBuf;

use clap::{Args, value_parser};
use paramhub::cost::Rate;
use paramhub::limits::CORES_MAX;
use paramhub_core::scheme::{
    Cluster, ElementBytes, HubPlace, LinkBytes, Plan, PlannedLayer, Scheme, Traffic,
};
use paramhub_harness::exchange::check_destination;
use paramhub_harness::exchange::hosts::{Hosts, HostsFlags};
use paramhub_harness::exchange::processes::{Run, interrupted, launch};
use paramhub_harness::exchange::report::{megabytes, write_json};
use paramhub_harness::exchange::spec::Spec;
use paramhub_harness::launch::Signals;
use paramhub_harness::models::Model;
use paramhub_harness::values::Deployment;
use paramhub_harness::{ExitCode, Usage};

use super::profile::Profile;
use driver::{Program, drive};
use report::{Expected, Setting, Summary};
use system::System;
use worker::WorkerLayer;
use worker::WorkerSpec;
pub(super) use worker::run_process;

/// The name by which a process learns that it takes part in this benchmark.
pub(super) const SCENARIO: &str = "poseidon";

/// Play the training of a model: compute by sleeping, exchange for real
///
/// Every worker sleeps as long as a layer computes and exchanges it as soon as backpropagation has made its gradient, or its
/// factors; the next step waits for each layer's parameters when it gets there. So a small machine stands for many with GPUs. The
/// systems take turns in one run, each with workers and a job of its own at the same hubs.
///
/// How long layers compute is built in: one machine's throughput as the papers have it, spread over the layers by their
/// operations; --profile names others.
#[derive(Args)]
pub struct PoseidonCommand {
    /// Whose layers: alexnet, vgg11, vgg19, googlenet, inception_v3, inception-bn, resnet18, resnet50, resnet152 or vgg19-22k
    #[arg(long, value_name = "NAME")]
    model: String,
    /// Worker processes of each system
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = value_parser!(u32).range(2..=256))]
    workers: u32,
    /// Samples of each worker and step
    #[arg(long, value_name = "K", default_value_t = 32, value_parser = value_parser!(u64).range(1..=1 << 20))]
    batch: u64,
    /// Divide all bytes and times by this, a square: sides of fully connected layers and the batch by its root, so that factors
    /// and gradients shrink alike
    #[arg(long, value_name = "S", default_value_t = 1)]
    scale: u64,
    /// How long each layer computes: JSON of {"images_per_second"} or {"layers": [{"name", "forward_ms", "backward_ms"}, ..]}
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Multiply the times of all layers by this, for other machines than the profile's
    #[arg(long, value_name = "F", default_value_t = 1.0)]
    stretch: f64,
    /// What takes turns
    #[arg(long, value_enum, value_delimiter = ',', default_value = "sequential,wfbp,poseidon")]
    systems: Vec<System>,
    /// Cores of each hub
    #[arg(long, value_name = "C", default_value_t = 1, value_parser = value_parser!(u16).range(1..=CORES_MAX as i64))]
    cores: u16,
    /// Steps of a turn, after one that leads in
    #[arg(long, value_name = "K", default_value_t = 3, value_parser = value_parser!(u32).range(1..=10_000))]
    steps: u32,
    /// Turns of each system that count
    #[arg(long, value_name = "R", default_value_t = 5, value_parser = value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    /// Payload that a host's link carries each way, as in 477mbit: shows how long a step would take if only links and computation
    /// took time
    #[arg(long, value_name = "RATE")]
    link: Option<Rate>,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the systems' steps
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    hosts: HostsFlags,
}

pub(super) fn poseidon(command: &PoseidonCommand) -> anyhow::Result<ExitCode> {
    let signals = Signals::catch()?;
    let side = command.scale.isqrt();
    if side == 0 || side * side != command.scale {
        let problem = format!("--scale {}: it takes a square, such as 4, 16 or 64", command.scale);
        return Err(Usage(problem).into());
    }
    if !(command.stretch.is_finite() && command.stretch >= 0.0) {
        return Err(Usage(format!("--stretch {}: times cannot be multiplied by it", command.stretch)).into());
    }
    check_destination("--json", command.json.as_deref())?;
    check_destination("--svg", command.svg.as_deref())?;
    // Ranks of all systems alternate, so that each system is spread over all hosts.
    let processes = command.systems.len() as u32 * command.workers;
    let hosts = command.hosts.hosts(processes)?;
    let (worker_specs, setting) = command.worker_specs(side, &hosts)?;
    println!("{}", setting.headline());
    let program = Program { worker_specs, hosts, rounds: command.rounds };
    let measured = match launch(&program.hosts, processes, &signals, |listener, is_over| {
        drive(&program, listener, is_over)
    })? {
        Run::Measured(measured) => measured,
        Run::Interrupted(signal) => return Ok(interrupted(signal)),
    };
    let summary = Summary::new(setting, &measured);
    println!("{}", summary.table());
    if let Some(path) = &command.json {
        write_json(&summary, path)?;
    }
    if let Some(path) = &command.svg {
        summary.bars().write(path)?;
    }
    Ok(ExitCode::SUCCESS)
}

impl PoseidonCommand {
    /// The specification of each system's workers.
    fn worker_specs(&self, side: u64, hosts: &Hosts) -> anyhow::Result<(Vec<WorkerSpec>, Setting)> {
        let model = Model::named(&self.model)?;
        let layers = model.layers();
        let profile = match &self.profile {
            Some(path) => Profile::read(path, &layers, self.batch)?,
            None => Profile::built_in(&self.model, &layers, self.batch)?,
        };
        let profile = profile.scaled(self.stretch / self.scale as f64);
        let (keys, layers) = model.scaled(side)?;
        let samples = self.batch.div_ceil(side);
        let played = layers.into_iter().zip(&profile.passes).map(|(layer, &passes)| WorkerLayer {
            name: layer.name,
            keys: layer.keys,
            fully_connected: layer.fully_connected,
            passes,
        });
        let played: Vec<WorkerLayer> = played.collect();
        let spec = Spec::new(keys, self.workers, self.cores.into());
        let cluster = self.cluster(hosts);
        let mut worker_specs = Vec::new();
        let mut expected = Vec::new();
        for &system in &self.systems {
            let worker_spec =
                WorkerSpec { spec: spec.clone(), system, layers: played.clone(), samples, steps: self.steps };
            let settings = worker_spec.settings()?;
            settings.check().map_err(|error| Usage(error.to_string()))?;
            let plan = Plan::new(&settings, &cluster);
            let by_factors = plan.layers.iter().filter(|planned| planned.scheme != Scheme::Hub);
            // Hubs of which each has whole layers to itself do not act as one link.
            let is_even = plan.layers.iter().all(|planned| planned.scheme != Scheme::FactorsToHub);
            let seconds = self.link.filter(|_| is_even).map(|link| {
                let transfers: Vec<f64> =
                    plan.layers.iter().map(|layer| link.seconds(plan.cost(layer))).collect();
                bound::step_seconds(&profile.passes, &transfers, system.overlaps())
            });
            let bytes_sent = mean_sent(&plan);
            expected.push(Expected {
                system,
                seconds,
                bytes_sent,
                busiest_by_mean: busiest_sent(&plan).map_or(1.0, |busiest| (busiest / bytes_sent).max(1.0)),
                by_factors: by_factors.map(|planned| planned.layer.name.clone()).collect(),
            });
            worker_specs.push(worker_spec);
        }
        let setting = Setting {
            model: self.model.clone(),
            workers: self.workers,
            batch: self.batch,
            scale: self.scale,
            stretch: self.stretch,
            link_bits_per_second: self.link.map(Rate::bits_per_second),
            samples,
            bytes: spec.keys.bytes(),
            compute_seconds: profile.seconds(),
            profile: profile.source,
            deployment: hosts.deployment(),
            hubs: hosts.hubs().len(),
            steps: self.steps,
            rounds: self.rounds,
            expected,
        };
        Ok((worker_specs, setting))
    }

    /// The cluster as the manager will find it.
    fn cluster(&self, hosts: &Hosts) -> Cluster {
        let hubs = hosts.hubs().len() as u32;
        let place = match hosts.deployment() {
            Some(Deployment::Ncc | Deployment::Ncs) => {
                HubPlace::Dedicated { width: hosts.interfaces() as f64 }
            }
            Some(Deployment::Cc | Deployment::Cs) | None => HubPlace::BesideWorkers,
        };
        let machines = hosts.machines().unwrap_or(self.workers).min(self.workers);
        Cluster { workers: self.workers, machines, hubs, place, encoding: ElementBytes::F32 }
    }
}

/// The bytes that a host with workers sends by plan, with a hub beside them or without; the mean of all hosts
/// if a layer has one hub to itself.
fn mean_sent(plan: &Plan) -> f64 {
    let of_layer = |planned: &PlannedLayer| {
        let traffic = plan.traffic(planned, planned.scheme)?;
        Some(match (planned.scheme, traffic.both, traffic.worker) {
            (Scheme::FactorsToHub, Some(both), Some(worker)) => {
                let machines = f64::from(plan.cluster.machines);
                (both.sent + (machines - 1.0) * worker.sent) / machines
            }
            (_, both, worker) => both.or(worker)?.sent,
        })
    };
    plan.rows().filter_map(of_layer).sum()
}

/// The bytes sent by the host with the largest of the layers that go to one hub each; `None` if there are
/// none. The chunks of the other keys are placed on the hubs that have no such layer, so this host sends all
/// their gradients.
fn busiest_sent(plan: &Plan) -> Option<f64> {
    let sent = |planned: &PlannedLayer, direction: fn(Traffic) -> Option<LinkBytes>| {
        plan.traffic(planned, planned.scheme).and_then(direction).map_or(0.0, |direction| direction.sent)
    };
    let (to_hub, rest): (Vec<_>, Vec<_>) =
        plan.rows().partition(|planned| planned.scheme == Scheme::FactorsToHub);
    let as_worker: f64 = to_hub.iter().map(|planned| sent(planned, |traffic| traffic.worker)).sum();
    let more = |planned: &&PlannedLayer| {
        sent(planned, |traffic| traffic.both) - sent(planned, |traffic| traffic.worker)
    };
    let largest = to_hub.iter().map(more).reduce(f64::max)?;
    let rest = rest.iter().map(|planned| planned.layer.parameters() as f64 * planned.encoding.gradient);
    Some(as_worker + largest + rest.sum::<f64>())
}

impl Setting {
    /// Returns the way in which sizes and times differ from those of the model and the profile.
    fn scaled(&self) -> String {
        let divided = match self.scale {
            1 => String::new(),
            scale => format!(", bytes and times divided by {scale} (K = {})", self.samples),
        };
        match self.stretch {
            1.0 => divided,
            stretch => format!("{divided}, times multiplied by {stretch}"),
        }
    }

    fn headline(&self) -> String {
        let Setting { model, workers, batch, bytes, compute_seconds, profile, .. } = self;
        let scaled = self.scaled();
        format!(
            "{model}: {} of gradients a worker, {workers} workers of {batch} samples{scaled}\n{:.1} ms of computation a step ({profile})",
            megabytes(*bytes),
            compute_seconds * 1e3,
        )
    }
}
