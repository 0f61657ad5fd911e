use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use paramhub_control::ControlError;
use paramhub_core::job_control::JobLimits;
use paramhub_core::service::HubLabel;
use paramhub_kernels::Registry;
use paramhub_transport::interface::{Rate, Selector};
use thiserror::Error;

use crate::checkpoint::CheckpointConfig;

/// The configuration of a hub. Start from [`HubConfig::default`] and change what differs.
#[derive(Clone, Debug)]
pub struct HubConfig {
    /// One address per interface; port 0 takes a free one. `0.0.0.0` and `[::]` stand for the addresses of
    /// all `interfaces`, unless `advertise` is given.
    pub listen: Vec<SocketAddr>,
    /// The interfaces for which such an address stands.
    pub interfaces: Selector,
    /// The rates of interfaces, by name, if the system does not know them or is wrong. Each interface gets
    /// chunks in proportion to its rate.
    pub interface_rates: Vec<(String, Rate)>,
    /// The addresses that workers dial instead of the listening ones, per interface, as `host:port`; needed
    /// only if workers cannot reach the addresses themselves. An empty list advertises the listening
    /// addresses.
    pub advertise: Vec<String>,
    /// The address of this hub on a link that hubs have for themselves: they reach it there, and it reaches them from there.
    /// Port 0 takes a free one. Without it, hubs take the interfaces that workers take.
    pub between_hubs: Option<SocketAddr>,
    /// Serve the workers that name this rack; all workers, if neither this nor `host` is given.
    pub rack: Option<String>,
    /// Serve only the workers that name this host: their sums go to the hubs of the rack, or to those that
    /// serve all workers. By default workers name it as [`host_identity`](paramhub_transport::host_identity)
    /// does.
    pub host: Option<String>,
    /// The labels by which jobs choose the hub, at most 16.
    pub labels: Vec<HubLabel>,
    /// Core threads, which sum and optimise; at least one.
    pub cores: usize,
    /// Streams that each worker keeps to each core through each interface; at least one. With more streams a
    /// chunk can overtake another one on the way, at the cost of a system call each.
    pub streams: usize,
    /// Let workers of this host exchange through shared memory.
    pub shared_memory: bool,
    /// Encrypt the streams of every job between hosts, whatever the job asks for.
    pub encrypt: bool,
    /// The time that a core looks for work before it sleeps. Right for a hub with a machine to itself; on
    /// processors that workers share, it takes away time that they need to compute.
    pub spin: Duration,
    /// Pin each core thread to a processor, of its interface's NUMA node if that is known. Right for a hub
    /// with a machine to itself, wrong on a machine that workers share.
    pub pin: bool,
    /// Bytes that all jobs' buffers may take together; `None` allows four fifths of the memory that is free
    /// when the hub starts.
    pub memory_bytes: Option<u64>,
    /// The limits of one job.
    pub job_limits: JobLimits,
    /// The folder for the checkpoints of jobs that ask for them; `None` keeps none.
    pub checkpoints: Option<CheckpointConfig>,
    /// Optimizers and aggregators that jobs may ask for by name.
    pub registry: Registry,
}

impl Default for HubConfig {
    /// A free port of the loopback interface and one core with one stream, not pinned.
    fn default() -> Self {
        HubConfig {
            listen: vec![SocketAddr::from(([127, 0, 0, 1], 0))],
            interfaces: Selector::Auto,
            interface_rates: Vec::new(),
            advertise: Vec::new(),
            between_hubs: None,
            rack: None,
            host: None,
            labels: Vec::new(),
            cores: 1,
            streams: 1,
            shared_memory: true,
            encrypt: false,
            spin: Duration::ZERO,
            pin: false,
            memory_bytes: None,
            job_limits: JobLimits::default(),
            checkpoints: None,
            registry: Registry::with_builtins(),
        }
    }
}

/// The reason why a hub cannot start or go on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HubError {
    /// A configuration that contradicts itself.
    #[error("{0}")]
    Config(String),
    /// An address on which the hub cannot listen.
    #[error("{0}")]
    Listen(std::io::Error),
    /// A folder for checkpoints that cannot be used.
    #[error(
        "no checkpoint can be written to {}: {cause}. Give --checkpoints a directory that this user may write to, on a disk with room",
        folder.display()
    )]
    Checkpoints {
        /// The folder as configured.
        folder: PathBuf,
        /// The error of the operating system.
        cause: std::io::Error,
    },
    /// The operating system refuses threads, descriptors or other resources.
    #[error("the hub cannot {what}: {cause}")]
    System {
        /// The action that failed.
        what: &'static str,
        /// The error of the operating system.
        cause: std::io::Error,
    },
    /// The hub cannot join the connection manager.
    #[error("the hub cannot join the connection manager: {0}")]
    Manager(#[from] ControlError),
}
