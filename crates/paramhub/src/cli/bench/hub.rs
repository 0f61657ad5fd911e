//! The processes of a benchmark that are hubs: the first with a manager, further ones that join it.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, bail};

use super::ablate::{Server, Variant, serve_by_worker};
use super::raw;
use super::spec::{HubSeat, HubUse, Line, Meeting, Order, Report, Spec};
use super::usage;
use crate::embedded::{EmbeddedConfig, EmbeddedHub};
use crate::service::{CreateService, JobOptions, ServiceCreated};
use crate::{HubConfig, ManagerClient, RunningHub};

/// Serves until the launcher hangs up.
pub(super) fn host(spec: &Spec, seat: HubSeat, line: &mut Line) -> anyhow::Result<()> {
    let raw = raw::serve(spec)?;
    let serving = Serving::start(spec, seat)?;
    line.say(&Report::Ready { url: serving.url().to_owned() })?;
    while let Some(order) = line.hear()? {
        if let Some(reason) = serving.has_failed() {
            bail!("the hub has failed: {reason}");
        }
        match order {
            Order::Open { job, options } => {
                let (job, cores) = serving.open(job, spec.workers, options)?;
                let url = serving.url().to_owned();
                line.say(&Report::Hosting(Meeting { url, job, cores, raw: raw.clone() }))?;
            }
            Order::Tell => line.say(&Report::Used(HubUse {
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

/// What answers the workers.
enum Serving {
    /// A hub and the manager of all.
    First(EmbeddedHub),
    Joined {
        hub: RunningHub,
        url: String,
    },
    /// Cores with workers of their own, which no manager knows.
    ByWorker(Server),
}

impl Serving {
    fn start(spec: &Spec, seat: HubSeat) -> anyhow::Result<Serving> {
        if spec.variant == Variant::WorkerByInterface {
            return Ok(Serving::ByWorker(serve_by_worker(spec)?));
        }
        let free_port = |&ip: &IpAddr| SocketAddr::new(ip, 0);
        let hub = HubConfig {
            listen: seat.listen.iter().map(free_port).collect(),
            cores: spec.cores,
            streams: spec.streams,
            rack: seat.rack,
            registry: spec.variant.registry(spec.cores)?,
            ..HubConfig::default()
        };
        if let Some(url) = seat.joins {
            let hub = RunningHub::start(ManagerClient::new(&url, Some(seat.token))?, hub)?;
            return Ok(Serving::Joined { hub, url });
        }
        let mut config = EmbeddedConfig { hub, ..EmbeddedConfig::default() };
        config.manager.listen = seat.listen.first().map(free_port).context("a hub listens somewhere")?;
        config.manager.admin_token = Some(seat.token);
        Ok(Serving::First(EmbeddedHub::start(config)?))
    }

    /// The manager's; empty where there is none.
    fn url(&self) -> &str {
        match self {
            Serving::First(hub) => hub.url(),
            Serving::Joined { url, .. } => url,
            Serving::ByWorker(_) => "",
        }
    }

    /// The job, and the cores that workers dial by themselves.
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
            Serving::ByWorker(Server { job, addresses }) => Ok((job.clone(), addresses.clone())),
            Serving::Joined { .. } => bail!("only the first hub creates the job"),
        }
    }

    fn has_failed(&self) -> Option<String> {
        match self {
            Serving::First(hub) => hub.has_failed(),
            Serving::Joined { hub, .. } => hub.has_failed(),
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
