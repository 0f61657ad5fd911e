//! The messages between the launcher and the processes of an exchange, and the socket that carries them.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::Context;
use paramhub::service::{JobOptions, ServiceCreated};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::numbers::Verdict;
use super::raw;
use super::spec::Spec;

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
    /// The address on a link that hubs have for themselves.
    pub between_hubs: Option<IpAddr>,
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

/// A command of the benchmark's driver, a thread of the launcher.
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
