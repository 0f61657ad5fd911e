//! The effective configuration: flags override the environment, which overrides the file, which overrides the
//! defaults.

mod file;
mod values;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use paramhub::{CheckpointConfig, Selector, Stragglers};
use paramhub_core::checkpoint::{Every, ResumeChoice};
use paramhub_core::codec::Codec;
use paramhub_core::composition::{BetweenSites, OptimizeAt, Reduction};
use paramhub_core::consistency::Consistency;
use paramhub_core::cost::Rate;
use paramhub_core::service::{HUB_PORT, HubLabel, JobOptions, MANAGER_PORT, OnInterfaceDown, OnWorkerLoss};
use paramhub_harness::values::{optional_text, text};
use serde::{Deserialize, Serialize};

use crate::admin_token::TokenSource;

#[cfg(not(feature = "demonstrations"))]
pub(crate) use crate::without_demonstrations::TrainSection;
pub(crate) use file::{distance, load};
#[cfg(feature = "demonstrations")]
pub(crate) use paramhub_bench::training::{ExchangeKind, TrainOptimizer, TrainSection};
pub(crate) use paramhub_harness::values::{Bytes, Deployment};
pub(crate) use values::{HubManager, InterfaceRate, Pin, Secret, StatePlace};

/// Complete checkpoints of a job that a hub keeps.
pub(crate) const CHECKPOINTS_KEPT: usize = CheckpointConfig::KEPT;

/// Everything that can be configured, one table of the file for each command.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    /// The connection manager that `jobs`, `run`, `train` and `doctor` connect to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) url: Option<String>,
    /// The token that operators and hubs must give the connection manager.
    #[serde(skip_serializing)]
    pub(crate) admin_token: Option<Secret>,
    /// A file that has the token in its only line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) admin_token_file: Option<PathBuf>,
    /// Log filter, as in `info` or `paramhub_hub=debug`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) log: Option<String>,
    pub(crate) hub: HubSection,
    pub(crate) manager: ManagerSection,
    pub(crate) run: RunSection,
    pub(crate) train: TrainSection,
}

/// `[hub]`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct HubSection {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) listen: Option<Vec<SocketAddr>>,
    #[serde(with = "optional_text", skip_serializing_if = "Option::is_none")]
    pub(crate) interfaces: Option<Selector>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) interface_rates: Vec<InterfaceRate>,
    pub(crate) advertise: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) between_hubs: Option<SocketAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rack: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) labels: Vec<HubLabel>,
    pub(crate) host_only: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cores: Option<usize>,
    pub(crate) streams: usize,
    pub(crate) shared_memory: bool,
    pub(crate) encrypt: bool,
    pub(crate) spin_us: u32,
    pub(crate) pin: Pin,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) memory: Option<Bytes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) job_memory: Option<Bytes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) job_streams: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) job_share: Option<u32>,
    #[serde(with = "text")]
    pub(crate) manager: HubManager,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) join: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) core_rate: Option<Rate>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hub_dead_after_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) state: Option<StatePlace>,
    pub(crate) plain_http: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tls_names: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tls_certificate: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tls_key: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) checkpoints: Option<PathBuf>,
    pub(crate) checkpoint_keep: usize,
}

/// `[manager]`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ManagerSection {
    pub(crate) listen: SocketAddr,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) core_rate: Option<Rate>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hub_dead_after_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) state: Option<StatePlace>,
    pub(crate) plain_http: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tls_names: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tls_certificate: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tls_key: Option<PathBuf>,
}

/// `[run]`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RunSection {
    pub(crate) workers: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    pub(crate) cores: usize,
    pub(crate) rendezvous_timeout_s: f64,
    pub(crate) dead_after_s: f64,
    pub(crate) weight: u32,
    #[serde(with = "text")]
    pub(crate) consistency: Consistency,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) codec: Option<Codec>,
    #[serde(with = "text")]
    pub(crate) reduction: Reduction,
    #[serde(with = "text")]
    pub(crate) optimize_at: OptimizeAt,
    #[serde(with = "text")]
    pub(crate) between_sites: BetweenSites,
    pub(crate) encrypt: bool,
    #[serde(with = "text")]
    pub(crate) on_interface_down: OnInterfaceDown,
    pub(crate) redial_grace_s: f64,
    #[serde(with = "text")]
    pub(crate) on_worker_loss: OnWorkerLoss,
    pub(crate) min_workers: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) max_workers: Option<u32>,
    /// The name of the running job for which workers are started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) join: Option<String>,
    pub(crate) rewind_every: u32,
    pub(crate) replicas: u32,
    pub(crate) linger_s: f64,
    /// `None`: 4 MiB if the ranks go back to earlier steps, else 0.
    pub(crate) program_state_bytes: Option<u32>,
    pub(crate) max_restarts: u32,
    pub(crate) stragglers: Stragglers,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) progress_timeout_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hubs: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) max_hubs: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hub_label: Option<HubLabel>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) deployment: Option<Deployment>,
    pub(crate) hosts: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) host_rank: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) master_addr: Option<String>,
    pub(crate) master_port: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) checkpoints: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) checkpoint_every: Option<Every>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) resume: Option<ResumeChoice>,
}

impl Default for HubSection {
    fn default() -> Self {
        HubSection {
            listen: None,
            interfaces: None,
            interface_rates: Vec::new(),
            advertise: Vec::new(),
            between_hubs: None,
            rack: None,
            labels: Vec::new(),
            host_only: false,
            cores: None,
            streams: 1,
            shared_memory: true,
            encrypt: false,
            spin_us: 0,
            pin: Pin::Auto,
            memory: None,
            job_memory: None,
            job_streams: None,
            job_share: None,
            manager: HubManager::Own(SocketAddr::from(([127, 0, 0, 1], MANAGER_PORT))),
            join: None,
            core_rate: None,
            hub_dead_after_s: None,
            state: None,
            plain_http: false,
            tls_names: Vec::new(),
            tls_certificate: None,
            tls_key: None,
            checkpoints: None,
            checkpoint_keep: CHECKPOINTS_KEPT,
        }
    }
}

impl HubSection {
    /// The addresses the hub listens on: those given, or those of all interfaces chosen, or loopback where
    /// none was chosen.
    pub(crate) fn effective_listen(&self) -> Vec<SocketAddr> {
        let ip = if self.interfaces.is_none() { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED };
        self.listen.clone().unwrap_or_else(|| vec![SocketAddr::from((ip, HUB_PORT))])
    }

    /// Returns whether every worker must be on this machine.
    fn is_loopback_only(&self) -> bool {
        self.effective_listen().iter().all(|address| address.ip().is_loopback())
    }

    /// The number of core threads: the one given, or every processor of a machine that the hub has to itself.
    /// A hub on loopback shares the machine with its workers and takes a quarter of the processors.
    pub(crate) fn effective_cores(&self) -> usize {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let share = if self.is_loopback_only() { processors / 4 } else { processors };
        self.cores.unwrap_or(share.max(1))
    }

    /// The hub's own connection manager, or a running one that it joins.
    pub(crate) fn effective_manager(&self) -> HubManager {
        self.join.clone().map_or_else(|| self.manager.clone(), HubManager::Running)
    }

    /// Returns whether it is said how other machines call the hub's own connection manager.
    pub(crate) fn has_tls_options(&self) -> bool {
        let has_certificate = self.tls_certificate.is_some() || self.tls_key.is_some();
        self.plain_http || !self.tls_names.is_empty() || has_certificate
    }

    pub(crate) fn is_pinned(&self) -> bool {
        match self.pin {
            Pin::Auto => !self.is_loopback_only(),
            Pin::Yes => true,
            Pin::No => false,
        }
    }
}

impl Default for ManagerSection {
    fn default() -> Self {
        ManagerSection {
            listen: SocketAddr::from(([127, 0, 0, 1], MANAGER_PORT)),
            core_rate: None,
            hub_dead_after_s: None,
            state: None,
            plain_http: false,
            tls_names: Vec::new(),
            tls_certificate: None,
            tls_key: None,
        }
    }
}

impl Default for RunSection {
    fn default() -> Self {
        let JobOptions {
            rendezvous_timeout_s,
            dead_after_s,
            weight,
            reduction,
            optimize_at,
            between_sites,
            on_interface_down,
            redial_grace_s,
            on_worker_loss,
            min_workers,
            rewind_every,
            replicas,
            linger_s,
            stragglers,
            ..
        } = JobOptions::default();
        RunSection {
            workers: 1,
            name: None,
            cores: 1,
            rendezvous_timeout_s,
            dead_after_s,
            weight,
            consistency: Consistency::Synchronous,
            codec: None,
            reduction,
            optimize_at,
            between_sites,
            encrypt: false,
            on_interface_down,
            redial_grace_s,
            on_worker_loss,
            min_workers,
            max_workers: None,
            join: None,
            rewind_every,
            replicas,
            linger_s,
            program_state_bytes: None,
            max_restarts: 0,
            stragglers,
            progress_timeout_s: None,
            hubs: None,
            max_hubs: None,
            hub_label: None,
            deployment: None,
            hosts: 1,
            host_rank: None,
            master_addr: None,
            master_port: 29_500,
            checkpoints: None,
            checkpoint_every: None,
            resume: None,
        }
    }
}

impl Config {
    /// The configuration as a file with the same effect, secrets left out.
    pub(crate) fn to_toml(&self) -> String {
        let mut shown = self.clone();
        shown.hub.listen = Some(self.hub.effective_listen());
        shown.hub.cores = Some(self.hub.effective_cores());
        shown.train = self.train.with_defaults();
        let body = toml::to_string(&shown).expect("a configuration is plain tables and values");
        let secret = match self.admin_token {
            Some(_) if self.admin_token_file.is_none() => "# admin_token is set and not shown\n",
            _ => "",
        };
        format!("{secret}{body}")
    }

    /// Reads the admin token: `given` on the command line or in the environment, or else in the file of the
    /// configuration.
    ///
    /// # Errors
    /// If it is given twice, or its file cannot be used.
    pub(crate) fn take_token(&mut self, given: TokenSource) -> Result<(), String> {
        let configured = TokenSource { token: self.admin_token.take(), file: self.admin_token_file.take() };
        let file = given.file.clone().filter(|file| !file.as_os_str().is_empty());
        self.admin_token = given.read()?;
        self.admin_token_file = file;
        if self.admin_token.is_none() {
            self.admin_token_file = configured.file.clone();
            self.admin_token = configured.read()?;
        }
        Ok(())
    }

    /// The admin token in plain text, to be sent to the manager.
    pub(crate) fn admin_token(&self) -> Option<String> {
        self.admin_token.as_ref().map(|secret| secret.0.clone())
    }
}
