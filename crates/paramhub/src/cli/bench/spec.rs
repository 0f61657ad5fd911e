//! What is exchanged, and what launcher and processes say to one another: a line of JSON each.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::Context;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::ablate::Variant;
use super::breakdown::{Learnt, Lesson};
use super::designs::{Cue, Heard};
use super::numbers::Verdict;
use super::poseidon::{Part, Played};
use super::raw;
use crate::service::{JobOptions, ServiceCreated};
use crate::settings::{OptimizerChoice, Settings};
use crate::{Hyperparameters, KeyTable, Registry};

/// What the hub does with the gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Optimizer {
    /// Nothing but their mean
    Mean,
    /// SGD without momentum
    Sgd,
    /// SGD with Nesterov's momentum
    Nesterov,
    /// Adam
    Adam,
}

/// How bytes travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Transport {
    /// Loopback TCP
    Tcp,
    /// Memory that workers and hub share
    Shm,
    /// What workers choose by themselves: shared memory, since all are on one host
    Auto,
}

impl Transport {
    /// In words.
    pub(super) fn name(self) -> &'static str {
        match self {
            Transport::Tcp => "TCP",
            Transport::Shm | Transport::Auto => "shared memory",
        }
    }

    /// What `--raw` measures beside it.
    pub(super) fn bound(self) -> &'static str {
        match self {
            Transport::Tcp => "bare TCP streams",
            Transport::Shm | Transport::Auto => "one pass over shared memory",
        }
    }
}

/// One exchange, as all processes must know it.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Spec {
    pub(super) keys: KeyTable,
    pub(super) workers: u32,
    pub(super) optimizer: Optimizer,
    pub(super) cores: usize,
    /// A worker's to each core.
    pub(super) streams: usize,
    pub(super) chunk_bytes: u32,
    pub(super) is_raw: bool,
    pub(super) transport: Transport,
    /// Workers read parameters from one copy.
    pub(super) shares_parameters: bool,
    /// How all of it is done.
    pub(super) variant: Variant,
}

impl Spec {
    pub(super) fn settings(&self) -> anyhow::Result<Settings> {
        let name = match self.optimizer {
            Optimizer::Mean => "mean",
            Optimizer::Sgd | Optimizer::Nesterov => "sgd",
            Optimizer::Adam => "adam",
        };
        let is_nesterov = self.optimizer == Optimizer::Nesterov;
        let defaults = Registry::with_builtins().optimizer(name)?.defaults();
        let hyperparameters = Hyperparameters {
            learning_rate: 0.01,
            momentum: if is_nesterov { 0.9 } else { 0.0 },
            nesterov: is_nesterov,
            ..defaults
        };
        let optimizer =
            OptimizerChoice { hyperparameters: Some(hyperparameters), ..OptimizerChoice::named(name) };
        let settings =
            Settings { optimizer, chunk_bytes: self.chunk_bytes, ..Settings::new(self.keys.clone()) };
        // What levels add up to depends on the order, and the last exchange is compared bit by bit.
        Ok(Settings { reproducible: settings.quantises(), ..settings })
    }

    /// Raw bytes of each stream, one way: a worker's gradients, spread evenly over as many streams as it has to the hub,
    /// core by core.
    pub(super) fn raw_bytes(&self) -> Vec<usize> {
        let (bytes, streams) = (self.keys.bytes() as usize, self.cores * self.streams);
        (0..streams).map(|stream| bytes * (stream + 1) / streams - bytes * stream / streams).collect()
    }
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Turn {
    /// All keys through the hub.
    Exchange,
    /// As many bytes through the raw server.
    Raw,
}

/// What a hub must know of itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct HubSeat {
    /// An interface each, on ports that are free. The manager listens on the first hub's first.
    pub(super) listen: Vec<IpAddr>,
    /// The manager of the first hub; the first has none to join.
    pub(super) joins: Option<String>,
    /// Whom it serves; `None` for everybody.
    pub(super) rack: Option<String>,
    /// What hubs show to the manager.
    pub(super) token: String,
}

/// Where the workers meet the hubs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Meeting {
    /// The hub's connection manager; empty where there is none.
    pub(super) url: String,
    pub(super) job: ServiceCreated,
    /// Where cores that have workers of their own listen.
    pub(super) cores: Vec<SocketAddr>,
    /// Where the raw server listens.
    pub(super) raw: raw::Server,
}

/// From the launcher.
#[derive(Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub(super) enum Order {
    /// Be a hub. Answered by [`Report::Ready`].
    Host { spec: Spec, seat: HubSeat },
    /// All hubs have joined the first: create a job of this name. Answered by it with [`Report::Hosting`].
    Open { job: String, options: JobOptions },
    /// Be this rank of the job. Answered by [`Report::Joined`].
    Join { spec: Spec, rank: u32, rack: Option<String>, at: Meeting },
    /// A worker's turn, from this instant of the monotonic clock on. Answered by [`Report::Done`].
    Turn { turn: Turn, start: Duration },
    /// Be the hub of a training. Answered by [`Report::Hosting`].
    Teach { lesson: Lesson },
    /// Be this rank of it, through the hub if there is one. Answered by [`Report::Joined`].
    Attend { lesson: Lesson, rank: u32, at: Option<Meeting> },
    /// Train, from this instant of the monotonic clock on. Answered by [`Report::Learnt`].
    Learn { start: Duration },
    /// Play this rank of a training. Answered by [`Report::Joined`].
    Play { part: Part, rank: u32, at: Meeting },
    /// All ranks' turns of a played training are over: say what it was. Answered by [`Report::Played`].
    Count,
    /// Play one of the designs of collectives. Answered by [`Report::Design`].
    Design(Cue),
    /// Say what the hub has used. Answered by [`Report::Used`].
    Tell,
    /// Exchange once more into poisoned memory and check every number; `exchanges` were made before. Answered by
    /// [`Report::Checked`].
    Check { exchanges: u64 },
}

/// To the launcher.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "snake_case")]
pub(super) enum Report {
    /// The first word of a process.
    Here {
        seat: usize,
    },
    /// A hub is there, with the URL of its manager.
    Ready {
        url: String,
    },
    Hosting(Meeting),
    Joined,
    Done {
        seconds: f64,
        /// Of frames, where the turn was an exchange.
        bytes_sent: u64,
        bytes_received: u64,
        cpu_seconds: f64,
        peak_bytes: u64,
    },
    Used(HubUse),
    Checked(Verdict),
    Learnt(Learnt),
    /// A turn of a played training is over.
    Rested,
    Played(Played),
    Design(Heard),
}

/// What the hub's process has used since its start.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct HubUse {
    /// All its threads.
    pub(super) cpu_seconds: f64,
    /// Each of its cores.
    pub(super) core_seconds: Vec<f64>,
    pub(super) peak_bytes: u64,
}

impl HubUse {
    /// Of two hubs together: the largest peak, and cores one after the other.
    pub(super) fn and(mut self, other: HubUse) -> HubUse {
        self.core_seconds.extend(other.core_seconds);
        HubUse {
            cpu_seconds: self.cpu_seconds + other.cpu_seconds,
            core_seconds: self.core_seconds,
            peak_bytes: self.peak_bytes.max(other.peak_bytes),
        }
    }
}

/// One end of the conversation.
pub(super) struct Line {
    socket: BufReader<UnixStream>,
}

impl Line {
    pub(super) fn new(socket: UnixStream) -> Line {
        Line { socket: BufReader::new(socket) }
    }

    pub(super) fn say(&mut self, message: &impl Serialize) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.socket.get_mut().write_all(&line).context("the other side is gone")
    }

    /// Says that no more will be said.
    pub(super) fn hang_up(&mut self) {
        // It may be gone already.
        let _ = self.socket.get_ref().shutdown(Shutdown::Write);
    }

    /// `None` once the other side has hung up.
    pub(super) fn hear<M: DeserializeOwned>(&mut self) -> anyhow::Result<Option<M>> {
        let mut line = String::new();
        self.socket.read_line(&mut line).context("the other side does not answer")?;
        // A line without its end was cut off.
        if !line.ends_with('\n') {
            return Ok(None);
        }
        Ok(Some(serde_json::from_str(&line).context("the other side is of another version")?))
    }
}

#[cfg(test)]
impl Spec {
    /// In small chunks.
    pub(super) fn small(keys: KeyTable, workers: u32, cores: usize) -> Spec {
        Spec {
            keys,
            workers,
            optimizer: Optimizer::Mean,
            cores,
            streams: 1,
            chunk_bytes: 1024,
            is_raw: false,
            transport: Transport::Tcp,
            shares_parameters: false,
            variant: Variant::Normal,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Key;

    #[test]
    fn raw_streams_share_all_bytes_evenly() {
        let keys = KeyTable::new(vec![Key::new("k", [1001])]).unwrap();
        let spec = Spec::small(keys, 2, 3);
        assert_eq!(spec.raw_bytes(), [1334, 1335, 1335]);
        let twice = Spec { streams: 2, ..spec };
        assert_eq!(twice.raw_bytes(), [667, 667, 668, 667, 667, 668]);
    }
}
