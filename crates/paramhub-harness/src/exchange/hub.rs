//! The processes of a benchmark that are hubs. The first has a manager, and further ones join it; or the
//! process runs a variant's own cores, which no manager knows.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, bail};
use paramhub::embedded::{EmbeddedConfig, EmbeddedHub};
use paramhub::service::{CreateService, JobOptions, ServiceCreated};
use paramhub::{HubConfig, ManagerClient, RunningHub};

use super::extension::{CoreServer, Extension};
use super::messages::{
    HubProcessSettings, HubUse, JobEndpoints, JsonConnection, LauncherCommand, ProcessReport,
};
use super::raw;
use super::spec::Spec;
use super::usage;

/// Serves the workers until the benchmark's driver hangs up. If the benchmark asks for it, a raw server in
/// this process moves the same bytes and does nothing with them (see [`raw`]).
///
/// # Errors
/// If a server cannot start, the driver sends a command of a worker, or the hub has failed. A failure of the
/// hub is noticed when the next command comes.
pub(super) fn host(
    spec: &Spec,
    settings: HubProcessSettings,
    extension: &dyn Extension,
    connection: &mut JsonConnection,
) -> anyhow::Result<()> {
    let raw = raw::serve(spec)?;
    let serving = Serving::start(spec, settings, extension)?;
    connection.send(&ProcessReport::Ready { url: serving.url().to_owned() })?;
    while let Some(command) = connection.receive()? {
        if let Some(reason) = serving.failure() {
            bail!("the hub has failed: {reason}");
        }
        match command {
            LauncherCommand::Open { job, options } => {
                let (job, cores) = serving.open(job, spec.workers, options)?;
                let url = serving.url().to_owned();
                connection.send(&ProcessReport::Hosting(JobEndpoints {
                    url,
                    job,
                    cores,
                    raw: raw.clone(),
                }))?;
            }
            LauncherCommand::ReportUse => connection.send(&ProcessReport::Used(HubUse {
                cpu_seconds: usage::cpu_seconds(),
                core_seconds: usage::core_seconds(),
                peak_bytes: usage::peak_bytes(),
            }))?,
            _ => bail!("the launcher gave a hub a worker's command"),
        }
    }
    serving.stop();
    Ok(())
}

/// The server that answers the workers.
enum Serving {
    /// A hub and the manager of all hubs.
    First(EmbeddedHub),
    /// A further hub, and the URL of the first hub's manager, which it has joined.
    Joined { hub: RunningHub, url: String },
    /// The variant's own cores, which workers dial directly.
    WithoutManager(CoreServer),
}

impl Serving {
    fn start(
        spec: &Spec,
        settings: HubProcessSettings,
        extension: &dyn Extension,
    ) -> anyhow::Result<Serving> {
        if let Some(server) = extension.serve(spec)? {
            return Ok(Serving::WithoutManager(server));
        }
        let free_port = |&ip: &IpAddr| SocketAddr::new(ip, 0);
        let hub = HubConfig {
            listen: settings.listen.iter().map(free_port).collect(),
            between_hubs: settings.between_hubs.as_ref().map(free_port),
            cores: spec.cores,
            streams: spec.streams,
            rack: settings.rack,
            registry: extension.registry(spec)?,
            ..HubConfig::default()
        };
        if let Some(url) = settings.joins {
            let hub = RunningHub::start(ManagerClient::new(&url, Some(settings.token))?, hub)?;
            return Ok(Serving::Joined { hub, url });
        }
        let mut config = EmbeddedConfig { hub, ..EmbeddedConfig::default() };
        config.manager.listen = settings.listen.first().map(free_port).context("a hub listens somewhere")?;
        config.manager.admin_token = Some(settings.token);
        Ok(Serving::First(EmbeddedHub::start(config)?))
    }

    /// The manager's URL; empty if there is none.
    fn url(&self) -> &str {
        match self {
            Serving::First(hub) => hub.url(),
            Serving::Joined { url, .. } => url,
            Serving::WithoutManager(_) => "",
        }
    }

    /// The job, and the cores that workers dial directly: none at the first hub, which creates the job at its
    /// manager. A variant's server made its job when it started.
    ///
    /// # Errors
    /// If the manager refuses the job, or this hub is not the first.
    fn open(
        &self,
        name: String,
        workers: u32,
        options: JobOptions,
    ) -> anyhow::Result<(ServiceCreated, Vec<SocketAddr>)> {
        match self {
            Serving::First(hub) => {
                let request = CreateService { name, workers, options };
                Ok((hub.client().create_service(&request)?, Vec::new()))
            }
            Serving::WithoutManager(CoreServer { job, addresses }) => Ok((job.clone(), addresses.clone())),
            Serving::Joined { .. } => bail!("only the first hub creates the job"),
        }
    }

    fn failure(&self) -> Option<String> {
        match self {
            Serving::First(hub) => hub.failure(),
            Serving::Joined { hub, .. } => hub.failure(),
            Serving::WithoutManager(_) => None,
        }
    }

    fn stop(self) {
        match self {
            Serving::First(hub) => hub.stop(),
            Serving::Joined { hub, .. } => hub.stop(),
            Serving::WithoutManager(_) => {}
        }
    }
}
