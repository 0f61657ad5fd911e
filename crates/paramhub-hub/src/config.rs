use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use paramhub_control::ControlError;
use paramhub_kernels::Registry;
use paramhub_transport::interface::{Rate, Selector};
use thiserror::Error;

use crate::checkpoint::CheckpointConfig;

/// How a hub runs. Start from [`HubConfig::default`] and change what differs.
#[derive(Clone, Debug)]
pub struct HubConfig {
    /// One address per interface; port 0 takes a free one. `0.0.0.0` and `[::]` stand for the addresses of all `interfaces`,
    /// unless it is said what to advertise instead.
    pub listen: Vec<SocketAddr>,
    /// Which interfaces such an address stands for.
    pub interfaces: Selector,
    /// What interfaces carry, by name, where the system does not know or is wrong. Each gets chunks in proportion.
    pub interface_rates: Vec<(String, Rate)>,
    /// What workers dial instead of the listening address, per interface, as `host:port`; needed only where they cannot
    /// reach the address itself. An empty list advertises what is listened on.
    pub advertise: Vec<String>,
    /// Serve the workers of this rack, which name it too; everybody, if neither this nor `host` is given.
    pub rack: Option<String>,
    /// Serve the workers of this host alone, which name it too: their sums go on to the hubs of the rack, or to those that
    /// serve everybody. By default workers name it as [`host_identity`](paramhub_transport::host_identity) does.
    pub host: Option<String>,
    /// Core threads that sum and optimise; at least one.
    pub cores: usize,
    /// Streams that each worker keeps to each core through each interface; at least one. More let a chunk overtake
    /// another one on the way, and cost a system call each.
    pub streams: usize,
    /// Let workers of this host exchange through shared memory.
    pub shared_memory: bool,
    /// How long a core looks for work before it sleeps. Right for a hub with a machine to itself; where workers share its
    /// processors it takes from them what they compute with.
    pub spin: Duration,
    /// Pin each core thread to a processor, of its interface's NUMA node where that is known. Right for a hub with a machine to itself, wrong where workers share it.
    pub pin: bool,
    /// Bytes all jobs' buffers may take together; `None` allows four fifths of what is free when the hub starts.
    pub memory_bytes: Option<u64>,
    /// What one of them may take.
    pub job_limits: JobLimits,
    /// Where checkpoints go of jobs that ask for them; `None` keeps none.
    pub checkpoints: Option<CheckpointConfig>,
    /// Optimizers and aggregators that jobs may ask for by name.
    pub registry: Registry,
}

/// What one job may take of a hub, each `None` for as much as there is. A job that asks for more is refused at InitService
/// with what would fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobLimits {
    /// Bytes of its buffers; at least 1.
    pub memory_bytes: Option<u64>,
    /// Streams of all its workers, and of sites, to all cores together; at least 1.
    pub streams: Option<u32>,
    /// Percent of a core's time that a job is promised for each 1 of its weight, on every core where it has chunks, 1 to 100:
    /// jobs whose promises do not fit beside each other are refused. A core that others leave idle gives more.
    pub share_percent: Option<u32>,
}

impl Default for HubConfig {
    /// A free port of the loopback interface and one core with one stream, not pinned.
    fn default() -> Self {
        HubConfig {
            listen: vec![SocketAddr::from(([127, 0, 0, 1], 0))],
            interfaces: Selector::Auto,
            interface_rates: Vec::new(),
            advertise: Vec::new(),
            rack: None,
            host: None,
            cores: 1,
            streams: 1,
            shared_memory: true,
            spin: Duration::ZERO,
            pin: false,
            memory_bytes: None,
            job_limits: JobLimits::default(),
            checkpoints: None,
            registry: Registry::with_builtins(),
        }
    }
}

/// Why a hub cannot start or go on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HubError {
    /// The configuration contradicts itself.
    #[error("{0}")]
    Config(String),
    /// An address cannot be listened on.
    #[error("{0}")]
    Listen(std::io::Error),
    /// The folder of checkpoints cannot be used.
    #[error(
        "no checkpoint can be written to {}: {cause}. Give --checkpoints a directory that this user may write to, on a disk with room",
        folder.display()
    )]
    Checkpoints {
        /// As given.
        folder: PathBuf,
        /// What the operating system says.
        cause: std::io::Error,
    },
    /// The operating system refuses threads, descriptors or the like.
    #[error("the hub cannot {what}: {cause}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the operating system says.
        cause: std::io::Error,
    },
    /// The connection manager cannot be joined.
    #[error("the hub cannot join the connection manager: {0}")]
    Manager(#[from] ControlError),
}
