//! A connection manager and a hub inside this process: all that a single machine needs.

use std::net::SocketAddr;

use paramhub_control::{ControlError, ManagerClient};
use paramhub_core::service::CoreCounters;
use paramhub_hub::{HubConfig, HubError, ListeningHub, RunningHub};
use paramhub_manager::{Manager, ManagerConfig, ManagerError, RunningManager};
use thiserror::Error;

/// The configuration of both.
#[derive(Clone, Debug)]
pub struct EmbeddedConfig {
    /// The connection manager.
    pub manager: ManagerConfig,
    /// The hub that joins it.
    pub hub: HubConfig,
}

impl Default for EmbeddedConfig {
    /// Free ports on the loopback interface, one core, nothing kept on disk.
    fn default() -> Self {
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        EmbeddedConfig {
            manager: ManagerConfig { listen, ..ManagerConfig::default() },
            hub: HubConfig::default(),
        }
    }
}

impl EmbeddedConfig {
    /// The default with this many hub cores.
    pub fn with_cores(cores: usize) -> Self {
        let mut config = EmbeddedConfig::default();
        config.hub.cores = cores;
        config
    }
}

/// The reason why the manager or the hub cannot start.
#[derive(Debug, Error)]
pub enum EmbeddedError {
    /// The connection manager cannot start.
    #[error(transparent)]
    Manager(#[from] ManagerError),
    /// The hub cannot start.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// The manager's own address is unusable.
    #[error(transparent)]
    Control(#[from] ControlError),
}

/// A running connection manager and a hub that has joined it. Dropping it stops both.
pub struct EmbeddedHub {
    // The hub sends its last report to its manager, so it is dropped first.
    hub: RunningHub,
    manager: RunningManager,
    client: ManagerClient,
    url: String,
}

impl EmbeddedHub {
    /// Starts both; returns when jobs can be created.
    ///
    /// # Errors
    /// A port in use, a state directory that cannot be written, no memory: whatever keeps either from starting.
    pub fn start(config: EmbeddedConfig) -> Result<EmbeddedHub, EmbeddedError> {
        // The hub is opened first, so that no manager starts for a hub that cannot run.
        let hub = ListeningHub::open(config.hub)?;
        let admin_token = config.manager.admin_token.clone();
        let manager = Manager::start(config.manager)?;
        let url = manager.url();
        let client = ManagerClient::new(&url, admin_token)?;
        let hub = hub.join(client.clone())?;
        Ok(EmbeddedHub { hub, manager, client, url })
    }

    /// The connection manager's URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// A client of the connection manager.
    pub fn client(&self) -> &ManagerClient {
        &self.client
    }

    /// The data addresses that are listened on.
    pub fn addresses(&self) -> &[SocketAddr] {
        self.hub.addresses()
    }

    /// The time counters of each hub core.
    pub fn cores(&self) -> Vec<CoreCounters> {
        self.hub.cores()
    }

    /// The bytes of all jobs' buffers.
    pub fn memory_bytes(&self) -> u64 {
        self.hub.memory_bytes()
    }

    /// Returns the reason why the hub cannot go on, if it cannot.
    pub fn failure(&self) -> Option<String> {
        self.hub.failure()
    }

    /// Ends both within a second, unless a checkpoint is being written. The hub notifies its workers.
    pub fn stop(self) {
        self.hub.stop();
        self.manager.stop();
    }
}
