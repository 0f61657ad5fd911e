//! The specification of an exchange, and the messages between launcher and processes: a line of JSON each.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::Context;
use paramhub::limits::CHUNK_BYTES_DEFAULT;
use paramhub::service::{JobOptions, ServiceCreated};
use paramhub::settings::{OptimizerChoice, Settings};
use paramhub::{Hyperparameters, KeyTable, Registry};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::numbers::Verdict;
use super::raw;

/// The aggregator or optimizer that the hub applies to the gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// Nothing but their mean
    Mean,
    /// SGD without momentum
    Sgd,
    /// SGD with Nesterov's momentum
    Nesterov,
    /// Adam
    Adam,
}

/// The way in which bytes travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Loopback TCP
    Tcp,
    /// Memory that workers and hub share
    Shm,
    /// What workers choose by themselves: shared memory, since all are on one host
    Auto,
}

impl Transport {
    /// The name in words.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Tcp => "TCP",
            Transport::Shm | Transport::Auto => "shared memory",
        }
    }

    /// The bound that `--raw` measures for it.
    pub fn bound(self) -> &'static str {
        match self {
            Transport::Tcp => "bare TCP streams",
            Transport::Shm | Transport::Auto => "one pass over shared memory",
        }
    }
}

/// One exchange, as all processes need it.
#[derive(Clone, Serialize, Deserialize)]
pub struct Spec {
    /// The tensors.
    pub keys: KeyTable,
    /// Worker processes.
    pub workers: u32,
    /// The aggregator or optimizer that the hub applies to the gradients.
    pub optimizer: Optimizer,
    /// Cores of each hub.
    pub cores: usize,
    /// Streams of each worker to each core.
    pub streams: usize,
    /// The unit of exchange.
    pub chunk_bytes: u32,
    /// `true` if the bound is measured, too.
    pub is_raw: bool,
    /// The way in which bytes travel.
    pub transport: Transport,
    /// `true` if workers read parameters from one copy.
    pub shares_parameters: bool,
    /// `true` if Push and Pull of a key are one request.
    pub is_fused: bool,
    /// `true` if the parameters must be those that the kernels compute from the gradients, so that they are
    /// checked.
    pub is_exact: bool,
    /// The variant of an [`Extension`](super::Extension); `None` for the normal path.
    pub variant: Option<String>,
}

impl Spec {
    /// The means of gradients, over one stream of each worker to each of this many cores, by the normal path.
    pub fn new(keys: KeyTable, workers: u32, cores: usize) -> Spec {
        Spec {
            keys,
            workers,
            optimizer: Optimizer::Mean,
            cores,
            streams: 1,
            chunk_bytes: CHUNK_BYTES_DEFAULT,
            is_raw: false,
            transport: Transport::Tcp,
            shares_parameters: false,
            is_fused: true,
            is_exact: true,
            variant: None,
        }
    }

    /// The settings on which the workers agree with the hub.
    ///
    /// # Errors
    /// If there is no such optimizer.
    pub fn settings(&self) -> anyhow::Result<Settings> {
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
        // A sum of levels depends on the order, and the last exchange is compared bit by bit.
        Ok(Settings { reproducible: settings.quantises(), ..settings })
    }

    /// Raw bytes of each stream, one way: a worker's gradients, spread evenly over as many streams as the
    /// worker has to the hub, core by core.
    pub fn raw_bytes(&self) -> Vec<usize> {
        let (bytes, streams) = (self.keys.bytes() as usize, self.cores * self.streams);
        (0..streams).map(|stream| bytes * (stream + 1) / streams - bytes * stream / streams).collect()
    }
}

/// The subject of a timed turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Turn {
    /// All keys through the hub.
    Exchange,
    /// As many bytes through the raw server.
    Raw,
}

/// The settings of a hub process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HubProcessSettings {
    /// The address of each interface, with free ports. The manager listens on the first address of the first
    /// hub.
    pub listen: Vec<IpAddr>,
    /// The manager of the first hub; `None` for the first hub itself.
    pub joins: Option<String>,
    /// The rack that it serves; `None` if it serves all workers.
    pub rack: Option<String>,
    /// The token that hubs show to the manager.
    pub token: String,
}

/// The addresses at which workers find the hubs of a job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JobEndpoints {
    /// The URL of the hubs' connection manager; empty if there is none.
    pub url: String,
    /// The namespace and the secret.
    pub job: ServiceCreated,
    /// The addresses of cores that have workers of their own.
    pub(super) cores: Vec<SocketAddr>,
    /// The address of the raw server.
    pub(super) raw: raw::Server,
}

impl JobEndpoints {
    /// A job at the hubs of this manager, without a raw server.
    pub fn new(url: String, job: ServiceCreated) -> JobEndpoints {
        JobEndpoints { url, job, cores: Vec::new(), raw: raw::Server::Nowhere }
    }
}

/// A message from the launcher.
#[derive(Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
#[allow(missing_docs, reason = "the fields are named after what they hold")]
pub enum LauncherCommand {
    /// Be a hub. Answered by [`ProcessReport::Ready`].
    Host { spec: Spec, settings: HubProcessSettings },
    /// All hubs have joined the first: create a job of this name. The first hub answers with
    /// [`ProcessReport::Hosting`].
    Open { job: String, options: JobOptions },
    /// Be this rank of the job. Answered by [`ProcessReport::Joined`].
    Join { spec: Spec, rank: u32, rack: Option<String>, at: JobEndpoints },
    /// Take a worker's turn, from this instant of the monotonic clock on. Answered by
    /// [`ProcessReport::Done`].
    Turn { turn: Turn, start: Duration },
    /// Take part in a scenario of another benchmark, whose commands and reports follow from this first command
    /// on.
    Scenario { name: String, command: Value },
    /// Report what the hub has used. Answered by [`ProcessReport::Used`].
    ReportUse,
    /// Exchange once more into poisoned memory and check every number; `exchanges` were made before. Answered by
    /// [`ProcessReport::Checked`].
    Check { exchanges: u64 },
}

impl LauncherCommand {
    /// The first command of a scenario.
    ///
    /// # Errors
    /// If the command is no JSON.
    pub fn scenario(name: &str, command: &impl Serialize) -> anyhow::Result<LauncherCommand> {
        Ok(LauncherCommand::Scenario { name: name.to_owned(), command: serde_json::to_value(command)? })
    }
}

/// A message to the launcher.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "snake_case")]
#[allow(missing_docs, reason = "the commands that they answer name them")]
pub enum ProcessReport {
    /// The first message of a process: its number.
    Here {
        process: usize,
    },
    /// A hub is ready; this is the URL of its manager.
    Ready {
        url: String,
    },
    Hosting(JobEndpoints),
    Joined,
    Done {
        seconds: f64,
        /// Bytes of frames, if the turn was an exchange.
        bytes_sent: u64,
        bytes_received: u64,
        cpu_seconds: f64,
        peak_bytes: u64,
    },
    Used(HubUse),
    Checked(Verdict),
}

/// The resources that the hub's process has used since its start.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct HubUse {
    /// The processor seconds of all its threads.
    pub cpu_seconds: f64,
    /// The processor seconds of each of its cores.
    pub core_seconds: Vec<f64>,
    /// The most memory that it has had at once.
    pub peak_bytes: u64,
}

impl HubUse {
    /// The use of two hubs together: the larger peak, and the cores one after the other.
    pub fn and(mut self, other: HubUse) -> HubUse {
        self.core_seconds.extend(other.core_seconds);
        HubUse {
            cpu_seconds: self.cpu_seconds + other.cpu_seconds,
            core_seconds: self.core_seconds,
            peak_bytes: self.peak_bytes.max(other.peak_bytes),
        }
    }
}

/// One end of the socket between the launcher and a process, which carries a line of JSON for each message.
pub struct JsonConnection {
    socket: BufReader<UnixStream>,
}

impl JsonConnection {
    /// A connection over this socket.
    pub fn new(socket: UnixStream) -> JsonConnection {
        JsonConnection { socket: BufReader::new(socket) }
    }

    /// Sends a message.
    ///
    /// # Errors
    /// If the other side is gone.
    pub fn send(&mut self, message: &impl Serialize) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.socket.get_mut().write_all(&line).context("the other side is gone")
    }

    /// Closes the sending direction: no further message follows.
    pub fn close_write(&mut self) {
        // The process may be gone already.
        let _ = self.socket.get_ref().shutdown(Shutdown::Write);
    }

    /// The next message; `None` once the other side has hung up.
    ///
    /// # Errors
    /// If the other side sends something else, or nothing for too long.
    pub fn receive<M: DeserializeOwned>(&mut self) -> anyhow::Result<Option<M>> {
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
mod tests {
    use paramhub::Key;

    use super::*;

    #[test]
    fn raw_streams_share_all_bytes_evenly() {
        let keys = KeyTable::new(vec![Key::new("k", [1001])]).unwrap();
        let spec = Spec::new(keys, 2, 3);
        assert_eq!(spec.raw_bytes(), [1334, 1335, 1335]);
        let twice = Spec { streams: 2, ..spec };
        assert_eq!(twice.raw_bytes(), [667, 667, 668, 667, 667, 668]);
    }
}
