//! One worker of a simulated training: it sleeps as long as layers compute, and exchanges them.

use std::time::{Duration, Instant};

use anyhow::bail;
use paramhub::settings::Settings;
use paramhub::{Membership, Options};
use paramhub_core::codec::Codec;
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::scheme::LayerSettings;
use paramhub_harness::exchange::messages::{JobEndpoints, JsonConnection};
use paramhub_harness::exchange::numbers;
use paramhub_harness::exchange::spec::Spec;
use paramhub_harness::exchange::usage::{self, NetworkBytes};
use paramhub_kernels::Registry;
use paramhub_syncer::{LayerFactors, Syncers};
use serde::{Deserialize, Serialize};

use super::system::System;
use crate::profile::Passes;

/// The model and times that a worker simulates.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct WorkerSpec {
    pub(super) spec: Spec,
    pub(super) system: System,
    pub(super) layers: Vec<WorkerLayer>,
    /// K of one worker.
    pub(super) samples: u64,
    /// Steps of a turn, beside the leading one.
    pub(super) steps: u32,
}

/// One layer.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct WorkerLayer {
    pub(super) name: String,
    pub(super) keys: Vec<u32>,
    pub(super) fully_connected: Option<[u64; 2]>,
    pub(super) passes: Passes,
}

/// A turn of a worker.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct TurnMeasurement {
    /// Seconds of a step, on average.
    pub(super) seconds: f64,
    /// Bytes that this worker's host sent in all steps of the turn together, the leading one included. A hub
    /// beside the worker counts, too.
    pub(super) bytes_sent: u64,
    pub(super) bytes_received: u64,
    pub(super) cpu_seconds: f64,
    /// The number of steps in which these bytes were sent.
    pub(super) steps: u32,
}

impl WorkerSpec {
    /// The settings on which all ranks agree.
    pub(super) fn settings(&self) -> anyhow::Result<Settings> {
        let scheme = self.system.scheme();
        let layers = self.layers.iter().map(|layer| match layer.fully_connected {
            Some([outputs, inputs]) => {
                let shape = [outputs, inputs, self.samples];
                LayerSettings::fully_connected(&layer.name, layer.keys.clone(), shape)
            }
            None => LayerSettings::other(&layer.name, layer.keys.clone()),
        });
        let layers = layers.collect();
        let mut settings = self.spec.settings()?;
        if self.system == System::OneBit {
            let weights = self.layers.iter().filter(|layer| layer.fully_connected.is_some());
            let weights: Vec<u32> = weights.map(|layer| layer.keys[0]).collect();
            let in_one_bit = |(number, key): (u32, &Key)| match weights.contains(&number) {
                true => key.clone().in_codec(Codec::ONE_BIT),
                false => key.clone(),
            };
            settings.keys = KeyTable::new((0..).zip(settings.keys.keys()).map(in_one_bit).collect())?;
        }
        Ok(Settings { scheme, layers, ..settings })
    }
}

/// A message from the launcher.
#[derive(Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub(crate) enum SimulationCommand {
    /// Be this rank of a simulated training. Answered by [`SimulationReport::Joined`].
    Join { spec: Box<WorkerSpec>, rank: u32, at: JobEndpoints },
    /// Take a turn, from this instant of the monotonic clock on. Answered by [`SimulationReport::TurnEnded`].
    Turn { start: Duration },
    /// All ranks' turns are over: report the measurements. Answered by [`SimulationReport::Measured`].
    Measure,
}

/// A message to the launcher.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "snake_case")]
pub(super) enum SimulationReport {
    Joined,
    TurnEnded,
    Measured(TurnMeasurement),
}

/// Runs a rank of a job until the launcher hangs up.
pub(crate) fn run_process(command: SimulationCommand, connection: &mut JsonConnection) -> anyhow::Result<()> {
    let SimulationCommand::Join { spec, rank, at } = command else {
        bail!("the launcher sent a command out of turn")
    };
    let mut worker = SimulatedWorker::join(*spec, rank, at)?;
    connection.send(&SimulationReport::Joined)?;
    let mut turn = None;
    while let Some(order) = connection.receive()? {
        match (order, turn.take()) {
            (SimulationCommand::Turn { start }, None) => {
                turn = Some(worker.turn(start)?);
                connection.send(&SimulationReport::TurnEnded)?;
            }
            (SimulationCommand::Measure, Some(turn)) => {
                connection.send(&SimulationReport::Measured(played(turn)))?
            }
            _ => bail!("the launcher gave a simulated worker another's order"),
        }
    }
    Ok(worker.syncers.leave()?)
}

/// A turn that this worker has played.
struct MeasuredTurn {
    seconds: f64,
    cpu_seconds: f64,
    /// The bytes of the network before the turn.
    network: NetworkBytes,
    steps: u32,
}

/// Adds the bytes that the host has sent and received by now: a hub beside this worker may have answered
/// others after the turn.
fn played(turn: MeasuredTurn) -> TurnMeasurement {
    let MeasuredTurn { seconds, cpu_seconds, network, steps } = turn;
    let now = usage::network_bytes();
    let (bytes_sent, bytes_received) = (now.sent - network.sent, now.received - network.received);
    TurnMeasurement { seconds, bytes_sent, bytes_received, cpu_seconds, steps }
}

/// A rank and the data that it exchanges.
struct SimulatedWorker {
    spec: WorkerSpec,
    syncers: Syncers,
    /// The buffers of each layer.
    buffers: Vec<LayerBuffers>,
}

/// The buffers of a layer.
struct LayerBuffers {
    /// The number of its syncer.
    number: usize,
    update: Update,
    /// The parameters of each key.
    parameters: Vec<Vec<f32>>,
}

enum Update {
    /// The gradients of each key.
    Gradients(Vec<Vec<f32>>),
    Factors {
        inputs: Vec<f32>,
        output_gradients: Vec<f32>,
    },
}

impl SimulatedWorker {
    fn join(spec: WorkerSpec, rank: u32, at: JobEndpoints) -> anyhow::Result<SimulatedWorker> {
        let membership = Membership::of_job(at.url, &at.job, rank);
        let options = Options { transport: paramhub::Transport::Tcp, ..Default::default() };
        let registry = Registry::with_builtins();
        let mut syncers = Syncers::join(membership, options, spec.settings()?, &registry, 1)?;
        let elements = |key: u32| spec.spec.keys.keys()[key as usize].elements().unwrap_or(0) as usize;
        let numbers =
            |seed: usize, count: usize| (0..count).map(|at| numbers::small(rank, seed, at)).collect();
        let mut buffers = Vec::with_capacity(spec.layers.len());
        for layer in &spec.layers {
            let mut parameters: Vec<Vec<f32>> =
                layer.keys.iter().map(|&key| vec![0.0; elements(key)]).collect();
            for (&key, parameters) in layer.keys.iter().zip(&mut parameters) {
                syncers.begin(key, parameters)?;
            }
            let number = syncers.of_key(layer.keys[0]);
            let update = match layer.fully_connected.filter(|_| syncers.takes_factors(number)) {
                Some([outputs, inputs]) => Update::Factors {
                    inputs: numbers(1, (inputs * spec.samples) as usize),
                    output_gradients: numbers(2, (outputs * spec.samples) as usize),
                },
                None => {
                    let of_key = |&key: &u32| numbers(key as usize, elements(key));
                    Update::Gradients(layer.keys.iter().map(of_key).collect())
                }
            };
            buffers.push(LayerBuffers { number, update, parameters });
        }
        Ok(SimulatedWorker { spec, syncers, buffers })
    }

    fn turn(&mut self, start: Duration) -> anyhow::Result<MeasuredTurn> {
        std::thread::sleep(start.saturating_sub(usage::monotonic()));
        let (cpu, network) = (usage::cpu_seconds(), usage::network_bytes());
        let mut clock = Clock { now: Instant::now() };
        let mut led_in = clock.now;
        for step in 0..=self.spec.steps {
            self.step(&mut clock)?;
            if step == 0 {
                led_in = clock.now;
            }
        }
        let seconds = (clock.now - led_in).as_secs_f64() / f64::from(self.spec.steps);
        for layer in 0..self.buffers.len() {
            self.receive(layer)?;
        }
        let cpu_seconds = usage::cpu_seconds() - cpu;
        Ok(MeasuredTurn { seconds, cpu_seconds, network, steps: self.spec.steps + 1 })
    }

    /// Runs a step: forward, each layer as soon as its parameters are there, and backward (algorithm 2).
    fn step(&mut self, clock: &mut Clock) -> anyhow::Result<()> {
        let count = self.buffers.len();
        if self.spec.system == System::Sequential {
            for layer in 0..count {
                self.receive(layer)?;
            }
            clock.catch_up();
        }
        for layer in 0..count {
            if self.receive(layer)? {
                clock.catch_up();
            }
            clock.pass(self.spec.layers[layer].passes.forward_seconds);
        }
        for layer in (0..count).rev() {
            clock.pass(self.spec.layers[layer].passes.backward_seconds);
            if self.spec.system != System::Sequential {
                self.send(layer)?;
            }
        }
        if self.spec.system == System::Sequential {
            for layer in (0..count).rev() {
                self.send(layer)?;
            }
        }
        Ok(())
    }

    /// Sends a layer's gradients or factors.
    fn send(&mut self, layer: usize) -> anyhow::Result<()> {
        let LayerBuffers { number, update, .. } = &mut self.buffers[layer];
        match update {
            Update::Gradients(gradients) => {
                for (&key, gradient) in self.spec.layers[layer].keys.iter().zip(gradients) {
                    self.syncers.send(key, std::mem::take(gradient))?;
                }
            }
            Update::Factors { inputs, output_gradients } => {
                self.syncers.send_factors(*number, LayerFactors::of_f32(inputs, output_gradients))?;
            }
        }
        Ok(())
    }

    /// Waits for a layer's parameters. Returns whether they were under way.
    fn receive(&mut self, layer: usize) -> anyhow::Result<bool> {
        let LayerBuffers { number, update, parameters } = &mut self.buffers[layer];
        if !self.syncers.receive(*number)? {
            return Ok(false);
        }
        for (place, &key) in self.spec.layers[layer].keys.iter().enumerate() {
            let gradient = self.syncers.move_out(key, &mut parameters[place]);
            if let Update::Gradients(gradients) = update {
                gradients[place] = gradient;
            }
        }
        Ok(true)
    }
}

/// The time at which all computation so far would end on a machine that takes exactly the profile's times.
struct Clock {
    now: Instant,
}

impl Clock {
    /// Computes for `seconds`.
    fn pass(&mut self, seconds: f64) {
        self.now += Duration::from_secs_f64(seconds);
        std::thread::sleep(self.now.saturating_duration_since(Instant::now()));
    }

    /// Advances the clock to now, after a wait.
    fn catch_up(&mut self) {
        self.now = self.now.max(Instant::now());
    }
}
