//! `paramhub manager`

use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;
use paramhub::{Manager, ManagerConfig};
use paramhub_core::cost::Rate;
use paramhub_harness::launch::Signals;

use super::tls::{self, TlsFlags};
use super::{Usage, overlay};
use crate::ExitCode;
use crate::config::{Config, StatePlace};

#[derive(Args)]
#[command(args_override_self = true)]
pub(super) struct ManagerFlags {
    /// Where it listens; port 0 takes a free one [default: 127.0.0.1:7770]
    #[arg(long, value_name = "IP:PORT", env = "PARAMHUB_MANAGER_LISTEN")]
    listen: Option<SocketAddr>,
    /// What a rack's link to the other racks carries each way, as in 10gbit: lets the reduction `auto` choose between flat and
    /// hierarchical [default: what hubs of several racks probe]
    #[arg(long, value_name = "RATE", env = "PARAMHUB_CORE_RATE")]
    core_rate: Option<Rate>,
    /// How long a hub may be silent before it gets no new jobs and those that open there fail; running ones go on. Workers have
    /// --dead-after of their job [default: 10]
    #[arg(long, value_name = "SECONDS", env = "PARAMHUB_HUB_DEAD_AFTER", value_parser = super::parse_seconds)]
    hub_dead_after: Option<f64>,
    /// Directory that keeps jobs and hubs across restarts, so that jobs go on. Or the etcd that keeps them for several managers,
    /// of which one leads, as in etcd://10.0.0.1:2379,10.0.0.2:2379/paramhub; USER:PASSWORD@ before the hosts where it asks for
    /// them, and etcds://.../paramhub?ca=FILE over TLS [default: none, kept in memory]
    #[arg(long, value_name = "DIR|URL", env = "PARAMHUB_MANAGER_STATE", hide_env_values = true)]
    state: Option<StatePlace>,
    #[command(flatten)]
    tls: TlsFlags,
}

impl ManagerFlags {
    pub(super) fn apply(self, config: &mut Config) {
        config.manager.hub_dead_after_s = self.hub_dead_after.or(config.manager.hub_dead_after_s);
        overlay!(self.tls => config.manager; plain_http, tls_names; tls_certificate, tls_key);
        overlay!(self => config.manager; listen; state, core_rate);
    }
}

pub(super) fn serve(config: &Config) -> anyhow::Result<ExitCode> {
    let signals = Signals::catch()?;
    paramhub_transport::handshakes::raise_descriptor_limit();
    let (state, etcd) = match config.manager.state.clone() {
        Some(StatePlace::Etcd(etcd)) => (None, Some(etcd)),
        Some(StatePlace::Directory(state)) => (Some(state), None),
        Some(StatePlace::Unusable(why)) => return Err(Usage(format!("--state: {why}")).into()),
        None => (None, None),
    };
    let manager = Manager::start(ManagerConfig {
        listen: config.manager.listen,
        state,
        etcd,
        core_rate: config.manager.core_rate,
        admin_token: config.admin_token(),
        plain_http: config.manager.plain_http,
        tls_names: config.manager.tls_names.clone(),
        certificate: tls::certificate(&config.manager.tls_certificate, &config.manager.tls_key)?,
        hub_timeout: super::hub_timeout(config.manager.hub_dead_after_s),
        ..ManagerConfig::default()
    })?;
    println!("manager ready: {}", manager.url());
    while signals.wait(Duration::from_secs(3600)).is_none() {}
    manager.stop();
    Ok(ExitCode::SUCCESS)
}
