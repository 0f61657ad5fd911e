//! One worker of a played training: it sleeps as long as layers compute, and exchanges them.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use paramhub_core::scheme::{LayerSettings, SchemeChoice};
use paramhub_kernels::Registry;
use paramhub_syncer::{FactorExchange, LayerFactors, Outputs, Peers, Ports, SyncError, open_factors};
use paramhub_transport::ReceiveRegion;
use serde::{Deserialize, Serialize};
use std::sync::mpsc::{Receiver, sync_channel};

use super::profile::Passes;
use super::system::System;
use crate::cli::bench::numbers;
use crate::cli::bench::spec::{Line, Meeting, Order, Report, Spec};
use crate::cli::bench::usage;
use crate::settings::Settings;
use crate::{FactorBuffers, FactorHandle, Handle, Job, Member, Membership, Options};

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
        Ok(Settings { scheme, layers: layers.collect(), ..self.spec.settings()? })
    }
}

/// Is this rank of a job until the launcher hangs up.
pub(in crate::cli::bench) fn play(part: Part, rank: u32, at: Meeting, line: &mut Line) -> anyhow::Result<()> {
    let mut player = Player::join(part, rank, at)?;
    line.say(&Report::Joined)?;
    while let Some(order) = line.hear()? {
        let Order::Turn { start, .. } = order else { bail!("the launcher gave a player another's order") };
        line.say(&Report::Played(player.turn(start)?))?;
    }
    player.leave()
}

/// A rank and what it exchanges.
struct Player {
    part: Part,
    job: Job,
    factors: Option<FactorExchange>,
    layers: Vec<Layer>,
}

/// How one layer is exchanged.
enum Layer {
    Hub(Vec<HubKey>),
    Factors {
        /// In the exchange of factors.
        number: usize,
        inputs: Vec<f32>,
        output_gradients: Vec<f32>,
        state: FactorState,
    },
    /// None only while it changes from idle to under way or back.
    ToHub(Option<ToHub>),
}

/// A layer whose factors go to a hub.
enum ToHub {
    Idle(FactorBuffers<Vec<f32>, Vec<f32>>),
    Underway(FactorHandle<Vec<f32>, Vec<f32>>),
}

/// A key that goes through the hub.
enum HubKey {
    Idle {
        gradient: Vec<f32>,
        parameters: Vec<f32>,
    },
    Underway(Handle<Vec<f32>, Vec<f32>>),
    /// Only while it changes from one to the other.
    Moving,
}

enum FactorState {
    Idle(Vec<f32>, Option<Vec<f32>>),
    Underway(Receiver<Result<Outputs, SyncError>>),
    Moving,
}

impl Player {
    fn join(part: Part, rank: u32, at: Meeting) -> anyhow::Result<Player> {
        let membership = Membership { url: at.url, namespace: at.job.namespace, nonce: at.job.nonce, rank };
        let settings = part.settings()?;
        let meeting = (settings.scheme != SchemeChoice::default())
            .then(|| paramhub_syncer::Meeting::listen(&membership, Ports::ANY))
            .transpose()?;
        let peer_address = meeting.as_ref().map(paramhub_syncer::Meeting::address);
        let options = Options { transport: crate::Transport::Tcp, peer_address, ..Default::default() };
        let member = Member::connect_with(membership, options)?;
        let peers = Peers::of(&member);
        let job = member.init(settings)?;
        let opened = match meeting {
            Some(meeting) => open_factors(&job, meeting, &peers, &Registry::with_builtins(), 1)?,
            None => None,
        };
        let (factors, planned) =
            opened.map_or((None, Vec::new()), |(factors, planned)| (Some(factors), planned));
        let mut layers = Vec::with_capacity(part.layers.len());
        for layer in &part.layers {
            let number = planned.iter().position(|planned| layer.keys[0] == planned.weight);
            let goes_to_hub = job.factor_blocks().iter().any(|block| block.weight == layer.keys[0]);
            layers.push(match (number, layer.fully_connected) {
                (None, Some([outputs, inputs])) if goes_to_hub => {
                    let samples = part.samples as usize;
                    let fill = |count: u64, seed: usize| {
                        (0..count as usize * samples).map(|at| numbers::small(rank, seed, at)).collect()
                    };
                    Layer::ToHub(Some(ToHub::Idle(FactorBuffers {
                        inputs: fill(inputs, 1),
                        output_gradients: fill(outputs, 2),
                        weight: vec![0.0; (outputs * inputs) as usize],
                        bias: (layer.keys.len() > 1).then(|| vec![0.0; outputs as usize]),
                    })))
                }
                (Some(number), Some([outputs, inputs])) => {
                    let samples = part.samples as usize;
                    let fill = |count: u64, seed: usize| {
                        (0..count as usize * samples).map(|at| numbers::small(rank, seed, at)).collect()
                    };
                    let bias = (layer.keys.len() > 1).then(|| vec![0.0; outputs as usize]);
                    let weight = vec![0.0; (outputs * inputs) as usize];
                    let exchange = factors.as_ref().expect("planned layers are opened");
                    exchange.initialise(number, &weight, bias.as_deref().unwrap_or(&[]), 0)?;
                    Layer::Factors {
                        number,
                        inputs: fill(inputs, 1),
                        output_gradients: fill(outputs, 2),
                        state: FactorState::Idle(weight, bias),
                    }
                }
                _ => Layer::Hub(layer.keys.iter().map(|&key| HubKey::new(&job, key)).collect()),
            });
        }
        if job.settings().has_parameters() {
            let mut zeros: Vec<Vec<f32>> = part
                .spec
                .keys
                .keys()
                .iter()
                .map(|key| vec![0.0; key.elements().unwrap_or(0) as usize])
                .collect();
            job.broadcast(&mut zeros, 0)?;
        }
        Ok(Player { part, job, factors, layers })
    }

    fn turn(&mut self, start: Duration) -> anyhow::Result<Played> {
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
        for layer in 0..self.layers.len() {
            self.receive(layer)?;
        }
        let after = usage::network_bytes();
        Ok(Played {
            seconds,
            bytes_sent: after.sent - network.sent,
            bytes_received: after.received - network.received,
            cpu_seconds: usage::cpu_seconds() - cpu,
            steps: self.part.steps + 1,
        })
    }

    /// Forward, each layer as soon as its parameters are there, and backward (algorithm 2).
    fn step(&mut self, clock: &mut Clock) -> anyhow::Result<()> {
        let count = self.layers.len();
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

    /// Sends a layer's gradient or its factors.
    fn send(&mut self, layer: usize) -> anyhow::Result<()> {
        match &mut self.layers[layer] {
            Layer::Hub(keys) => {
                for (key, &number) in keys.iter_mut().zip(&self.part.layers[layer].keys) {
                    let HubKey::Idle { gradient, parameters } = std::mem::replace(key, HubKey::Moving) else {
                        bail!("key {number} is pushed twice")
                    };
                    *key = HubKey::Underway(self.job.push_pull(number, gradient, parameters)?);
                }
            }
            Layer::ToHub(state) => {
                let Some(ToHub::Idle(buffers)) = state.take() else { bail!("layer {layer} is pushed twice") };
                let weight = self.part.layers[layer].keys[0];
                *state = Some(ToHub::Underway(self.job.push_pull_factors(weight, buffers)?));
            }
            Layer::Factors { number, inputs, output_gradients, state } => {
                let FactorState::Idle(weight, bias) = std::mem::replace(state, FactorState::Moving) else {
                    bail!("layer {layer} is pushed twice")
                };
                let outputs =
                    Outputs { weight: ReceiveRegion::owned(weight), bias: bias.map(ReceiveRegion::owned) };
                let (tell, told) = sync_channel(1);
                let exchange = self.factors.as_ref().context("a layer without its exchange")?;
                let factors = LayerFactors::of_f32(inputs, output_gradients);
                // Nobody waits any more if the turn has failed.
                exchange.push(*number, factors, outputs, move |outcome| drop(tell.send(outcome)))?;
                *state = FactorState::Underway(told);
            }
        }
        Ok(())
    }

    /// Waits for a layer's parameters; says whether they were under way.
    fn receive(&mut self, layer: usize) -> anyhow::Result<bool> {
        match &mut self.layers[layer] {
            Layer::Hub(keys) => {
                let mut waited = false;
                for key in keys {
                    *key = match std::mem::replace(key, HubKey::Moving) {
                        HubKey::Underway(handle) => {
                            waited = true;
                            let (gradient, parameters) = handle.wait()?;
                            HubKey::Idle { gradient, parameters }
                        }
                        idle => idle,
                    };
                }
                Ok(waited)
            }
            Layer::ToHub(state) => {
                let waits = matches!(state, Some(ToHub::Underway(_)));
                if let Some(ToHub::Underway(handle)) = state.take_if(|_| waits) {
                    *state = Some(ToHub::Idle(handle.wait()?));
                }
                Ok(waits)
            }
            Layer::Factors { state, .. } => {
                let FactorState::Underway(told) = state else { return Ok(false) };
                let outputs = told.recv().context("an exchange of factors ended without an answer")??;
                let memory = |region: ReceiveRegion| region.into_owned().expect("it was given as a vector");
                *state = FactorState::Idle(memory(outputs.weight), outputs.bias.map(memory));
                Ok(true)
            }
        }
    }

    fn leave(self) -> anyhow::Result<()> {
        if let Some(factors) = &self.factors {
            factors.leave(Options::default().leave_timeout)?;
        }
        Ok(self.job.leave()?)
    }
}

impl HubKey {
    fn new(job: &Job, key: u32) -> HubKey {
        let elements = job.settings().keys.keys()[key as usize].elements().unwrap_or(0) as usize;
        let gradient = (0..elements).map(|at| numbers::small(job.rank(), key as usize, at)).collect();
        HubKey::Idle { gradient, parameters: vec![0.0; elements] }
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
