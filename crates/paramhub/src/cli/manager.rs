//! `paramhub manager`

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::overlay;
use crate::cli::ExitCode;
use crate::config::Config;
use crate::launch::Signals;
use crate::{Manager, ManagerConfig};

#[derive(Args)]
#[command(args_override_self = true)]
pub(super) struct ManagerFlags {
    /// Where it listens; port 0 takes a free one [default: 127.0.0.1:7770]
    #[arg(long, value_name = "IP:PORT", env = "PARAMHUB_MANAGER_LISTEN")]
    listen: Option<SocketAddr>,
    /// Directory that keeps the jobs' records across restarts [default: none, kept in memory]
    #[arg(long, value_name = "DIR", env = "PARAMHUB_MANAGER_STATE")]
    state: Option<PathBuf>,
}

impl ManagerFlags {
    pub(super) fn apply(self, config: &mut Config) {
        overlay!(self => config.manager; listen; state);
    }
}

pub(super) fn serve(config: &Config) -> anyhow::Result<ExitCode> {
    let signals = Signals::catch()?;
    super::hub::raise_descriptor_limit();
    let manager = Manager::start(ManagerConfig {
        listen: config.manager.listen,
        state: config.manager.state.clone(),
        admin_token: config.admin_token(),
        ..ManagerConfig::default()
    })?;
    println!("manager ready: {}", manager.url());
    while signals.wait(Duration::from_secs(3600)).is_none() {}
    manager.stop();
    Ok(ExitCode::SUCCESS)
}
