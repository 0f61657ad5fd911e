//! The processes of a benchmark that are hubs: the first has a manager, further ones join it.

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

/// Serves until the launcher hangs up.
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
            _ => bail!("the launcher gave a hub a worker's order"),
        }
    }
    serving.stop();
    Ok(())
}

/// The server that answers the workers.
enum Serving {
    /// A hub and the manager of all hubs.
    First(EmbeddedHub),
    Joined {
        hub: RunningHub,
        url: String,
    },
    /// Cores with workers of their own. No manager knows them.
    ByWorker(CoreServer),
}

impl Serving {
    fn start(
        spec: &Spec,
        settings: HubProcessSettings,
        extension: &dyn Extension,
    ) -> anyhow::Result<Serving> {
        if let Some(server) = extension.serve(spec)? {
            return Ok(Serving::ByWorker(server));
        }
        let free_port = |&ip: &IpAddr| SocketAddr::new(ip, 0);
        let hub = HubConfig {
            listen: settings.listen.iter().map(free_port).collect(),
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
            Serving::ByWorker(_) => "",
        }
    }

    /// Creates the job, and lists the cores that workers dial directly.
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
            Serving::ByWorker(CoreServer { job, addresses }) => Ok((job.clone(), addresses.clone())),
            Serving::Joined { .. } => bail!("only the first hub creates the job"),
        }
    }

    fn failure(&self) -> Option<String> {
        match self {
            Serving::First(hub) => hub.failure(),
            Serving::Joined { hub, .. } => hub.failure(),
            Serving::ByWorker(_) => None,
        }
    }

    fn stop(self) {
        match self {
            Serving::First(hub) => hub.stop(),
            Serving::Joined { hub, .. } => hub.stop(),
            Serving::ByWorker(_) => {}
        }
    }
}
