//! One worker of a played training: it sleeps as long as layers compute, and exchanges them.

use std::time::{Duration, Instant};

use anyhow::bail;
use paramhub_core::codec::Codec;
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::scheme::LayerSettings;
use paramhub_kernels::Registry;
use paramhub_syncer::{LayerFactors, Syncers};
use serde::{Deserialize, Serialize};

use super::system::System;
use crate::cli::bench::numbers;
use crate::cli::bench::profile::Passes;
use crate::cli::bench::spec::{Line, Meeting, Order, Report, Spec};
use crate::cli::bench::usage::{self, NetworkBytes};
use crate::settings::Settings;
use crate::{Membership, Options};

/// What a worker plays.
#[derive(Clone, Serialize, Deserialize)]
pub(in crate::cli::bench) struct Part {
    pub(super) spec: Spec,
    pub(super) system: System,
    pub(super) layers: Vec<PartLayer>,
    /// K of one worker.
    pub(super) samples: u64,
    /// Of a turn, beside the one that leads in.
    pub(super) steps: u32,
}

/// One layer, front layers first.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct PartLayer {
    pub(super) name: String,
    pub(super) keys: Vec<u32>,
    pub(super) fully_connected: Option<[u64; 2]>,
    pub(super) passes: Passes,
}

/// A turn of a worker.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(in crate::cli::bench) struct Played {
    /// Of a step, on average.
    pub(super) seconds: f64,
    /// Of all steps of the turn together, the leading one included, on this worker's host: what a hub beside it exchanges is in
    /// these, too.
    pub(super) bytes_sent: u64,
    pub(super) bytes_received: u64,
    pub(super) cpu_seconds: f64,
    /// Steps that these bytes are of.
    pub(super) steps: u32,
}

impl Part {
    /// What all ranks agree on.
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
                true => key.clone().in_codec(Codec::OneBit),
                false => key.clone(),
            };
            settings.keys = KeyTable::new((0..).zip(settings.keys.keys()).map(in_one_bit).collect())?;
        }
        Ok(Settings { scheme, layers, ..settings })
    }
}

/// Is this rank of a job until the launcher hangs up.
pub(in crate::cli::bench) fn play(part: Part, rank: u32, at: Meeting, line: &mut Line) -> anyhow::Result<()> {
    let mut player = Player::join(part, rank, at)?;
    line.say(&Report::Joined)?;
    let mut turn = None;
    while let Some(order) = line.hear()? {
        match (order, turn.take()) {
            (Order::Turn { start, .. }, None) => {
                turn = Some(player.turn(start)?);
                line.say(&Report::Rested)?;
            }
            (Order::Count, Some(turn)) => line.say(&Report::Played(played(turn)))?,
            _ => bail!("the launcher gave a player another's order"),
        }
    }
    Ok(player.syncers.leave()?)
}

/// A turn that this worker has played.
struct Turn {
    seconds: f64,
    cpu_seconds: f64,
    /// Before it.
    network: NetworkBytes,
    steps: u32,
}

/// With what its host has sent and received by now: a hub beside this worker may have answered others after it.
fn played(turn: Turn) -> Played {
    let Turn { seconds, cpu_seconds, network, steps } = turn;
    let now = usage::network_bytes();
    let (bytes_sent, bytes_received) = (now.sent - network.sent, now.received - network.received);
    Played { seconds, bytes_sent, bytes_received, cpu_seconds, steps }
}

/// A rank and what it exchanges.
struct Player {
    part: Part,
    syncers: Syncers,
    /// Of each layer.
    memory: Vec<Memory>,
}

/// What a layer exchanges from.
struct Memory {
    /// Of its syncer.
    number: usize,
    update: Update,
    /// Of each key.
    parameters: Vec<Vec<f32>>,
}

enum Update {
    /// Of each key.
    Gradients(Vec<Vec<f32>>),
    Factors {
        inputs: Vec<f32>,
        output_gradients: Vec<f32>,
    },
}

impl Player {
    fn join(part: Part, rank: u32, at: Meeting) -> anyhow::Result<Player> {
        let membership = Membership { url: at.url, namespace: at.job.namespace, nonce: at.job.nonce, rank };
        let options = Options { transport: crate::Transport::Tcp, ..Default::default() };
        let registry = Registry::with_builtins();
        let mut syncers = Syncers::join(membership, options, part.settings()?, &registry, 1)?;
        let elements = |key: u32| part.spec.keys.keys()[key as usize].elements().unwrap_or(0) as usize;
        let numbers =
            |seed: usize, count: usize| (0..count).map(|at| numbers::small(rank, seed, at)).collect();
        let mut memory = Vec::with_capacity(part.layers.len());
        for layer in &part.layers {
            let mut parameters: Vec<Vec<f32>> =
                layer.keys.iter().map(|&key| vec![0.0; elements(key)]).collect();
            for (&key, parameters) in layer.keys.iter().zip(&mut parameters) {
                syncers.begin(key, parameters)?;
            }
            let number = syncers.of_key(layer.keys[0]);
            let update = match layer.fully_connected.filter(|_| syncers.takes_factors(number)) {
                Some([outputs, inputs]) => Update::Factors {
                    inputs: numbers(1, (inputs * part.samples) as usize),
                    output_gradients: numbers(2, (outputs * part.samples) as usize),
                },
                None => {
                    let of_key = |&key: &u32| numbers(key as usize, elements(key));
                    Update::Gradients(layer.keys.iter().map(of_key).collect())
                }
            };
            memory.push(Memory { number, update, parameters });
        }
        Ok(Player { part, syncers, memory })
    }

    fn turn(&mut self, start: Duration) -> anyhow::Result<Turn> {
        std::thread::sleep(start.saturating_sub(usage::monotonic()));
        let (cpu, network) = (usage::cpu_seconds(), usage::network_bytes());
        let mut clock = Clock { now: Instant::now() };
        let mut led_in = clock.now;
        for step in 0..=self.part.steps {
            self.step(&mut clock)?;
            if step == 0 {
                led_in = clock.now;
            }
        }
        let seconds = (clock.now - led_in).as_secs_f64() / f64::from(self.part.steps);
        for layer in 0..self.memory.len() {
            self.receive(layer)?;
        }
        let cpu_seconds = usage::cpu_seconds() - cpu;
        Ok(Turn { seconds, cpu_seconds, network, steps: self.part.steps + 1 })
    }

    /// Forward, each layer as soon as its parameters are there, and backward (algorithm 2).
    fn step(&mut self, clock: &mut Clock) -> anyhow::Result<()> {
        let count = self.memory.len();
        if self.part.system == System::Sequential {
            for layer in 0..count {
                self.receive(layer)?;
            }
            clock.catch_up();
        }
        for layer in 0..count {
            if self.receive(layer)? {
                clock.catch_up();
            }
            clock.pass(self.part.layers[layer].passes.forward);
        }
        for layer in (0..count).rev() {
            clock.pass(self.part.layers[layer].passes.backward);
            if self.part.system != System::Sequential {
                self.send(layer)?;
            }
        }
        if self.part.system == System::Sequential {
            for layer in (0..count).rev() {
                self.send(layer)?;
            }
        }
        Ok(())
    }

    /// Sends a layer's gradients or its factors.
    fn send(&mut self, layer: usize) -> anyhow::Result<()> {
        let Memory { number, update, .. } = &mut self.memory[layer];
        match update {
            Update::Gradients(gradients) => {
                for (&key, gradient) in self.part.layers[layer].keys.iter().zip(gradients) {
                    self.syncers.send(key, std::mem::take(gradient))?;
                }
            }
            Update::Factors { inputs, output_gradients } => {
                self.syncers.send_factors(*number, LayerFactors::of_f32(inputs, output_gradients))?;
            }
        }
        Ok(())
    }

    /// Waits for a layer's parameters; says whether they were under way.
    fn receive(&mut self, layer: usize) -> anyhow::Result<bool> {
        let Memory { number, update, parameters } = &mut self.memory[layer];
        if !self.syncers.receive(*number)? {
            return Ok(false);
        }
        for (place, &key) in self.part.layers[layer].keys.iter().enumerate() {
            let gradient = self.syncers.move_out(key, &mut parameters[place]);
            if let Update::Gradients(gradients) = update {
                gradients[place] = gradient;
            }
        }
        Ok(true)
    }
}

/// When what has been played so far would be over on a machine that computes exactly as long as the profile says.
struct Clock {
    now: Instant,
}

impl Clock {
    /// Computes for so long.
    fn pass(&mut self, seconds: f64) {
        self.now += Duration::from_secs_f64(seconds);
        std::thread::sleep(self.now.saturating_duration_since(Instant::now()));
    }

    /// Has waited until now.
    fn catch_up(&mut self) {
        self.now = self.now.max(Instant::now());
    }
}
