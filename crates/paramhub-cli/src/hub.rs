//! `paramhub hub`

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::bail;
use clap::Args;
use paramhub::embedded::{EmbeddedConfig, EmbeddedHub};
use paramhub::{
    CheckpointConfig, HubConfig, HubError, JobLimits, ManagerClient, ManagerConfig, RunningHub, Selector,
    host_identity,
};
use paramhub_core::combinations::{self, Feature, Features};
use paramhub_core::cost::Rate;
use paramhub_core::service::HubLabel;
use paramhub_harness::launch::Signals;

use super::tls::{self, TlsFlags};
use super::{Usage, overlay};
use crate::ExitCode;
use crate::config::{
    Bytes, CHECKPOINTS_KEPT, Config, HubManager, HubSection, InterfaceRate, Pin, StatePlace,
};

/// The interval at which a running hub is checked for failure.
const HEALTH_INTERVAL: Duration = Duration::from_millis(500);
/// The time that a starting hub tries to reach the manager that it is to join.
const JOIN: Duration = Duration::from_secs(60);
/// The pause between two of these attempts.
const JOIN_PAUSE: Duration = Duration::from_millis(500);

#[derive(Args)]
#[command(args_override_self = true)]
pub(super) struct HubFlags {
    /// Addresses the hub listens on for data, one per interface; 0.0.0.0 and [::] stand for those of all interfaces chosen
    /// with --interfaces; port 0 takes a free one [default: 127.0.0.1:7771, or 0.0.0.0:7771 with --interfaces]
    #[arg(long, value_name = "IP:PORT", value_delimiter = ',', env = "PARAMHUB_HUB_LISTEN")]
    listen: Option<Vec<SocketAddr>>,
    /// Which interfaces to listen on: names (eth1; eth for all that begin so), networks (10.0.0.0/24), or, after ^, those to
    /// leave out (^docker,lo); auto is all that other hosts could reach [default: auto where 0.0.0.0 is listened on]
    #[arg(long, value_name = "SELECTOR", env = "PARAMHUB_HUB_INTERFACES")]
    interfaces: Option<Selector>,
    /// What an interface carries, where the system does not know or is wrong, as in eth1=10gbit; each gets its share
    #[arg(
        long = "interface-rate",
        value_name = "NAME=RATE",
        value_delimiter = ',',
        env = "PARAMHUB_HUB_INTERFACE_RATES"
    )]
    interface_rates: Option<Vec<InterfaceRate>>,
    /// What workers dial instead, per interface, where they cannot reach the listening address itself
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',', env = "PARAMHUB_HUB_ADVERTISE")]
    advertise: Option<Vec<String>>,
    /// This hub's address on a link that hubs have for themselves: what they send one another goes there, and the interfaces
    /// carry workers alone; port 0 takes a free one [default: none, hubs take the interfaces]
    #[arg(long, value_name = "IP:PORT", env = "PARAMHUB_HUB_BETWEEN_HUBS")]
    between_hubs: Option<SocketAddr>,
    /// Serve the workers of this rack: those started with the same name in PARAMHUB_RACK [default: all workers]
    #[arg(long, value_name = "NAME", env = "PARAMHUB_RACK")]
    rack: Option<String>,
    /// Serve this host's workers alone, over shared memory: their sums go on to the hubs of the rack, or to those that serve
    /// all workers [default: false]
    #[arg(long, env = "PARAMHUB_HUB_HOST_ONLY")]
    host_only: Option<bool>,
    /// Labels by which jobs choose hubs (--hub-label), at most 16 [default: none]
    #[arg(long = "label", value_name = "LABEL", value_delimiter = ',', env = "PARAMHUB_HUB_LABELS")]
    labels: Option<Vec<HubLabel>>,
    /// Threads that sum and optimise [default: every processor; a quarter of them on loopback]
    #[arg(long, value_name = "N", env = "PARAMHUB_HUB_CORES")]
    cores: Option<usize>,
    /// Streams that each worker keeps to each of them through each address [default: 1]
    #[arg(long, value_name = "S", env = "PARAMHUB_HUB_STREAMS")]
    streams: Option<usize>,
    /// Offer workers of this host TCP only [default: false]
    #[arg(long, env = "PARAMHUB_HUB_NO_SHARED_MEMORY")]
    no_shared_memory: Option<bool>,
    /// Encrypt the streams of every job between hosts: those in clear are refused [default: false]
    #[arg(long, env = "PARAMHUB_HUB_ENCRYPT")]
    encrypt: Option<bool>,
    /// Microseconds a core looks for work before it sleeps [default: 0]
    #[arg(long, value_name = "US", env = "PARAMHUB_HUB_SPIN_US")]
    spin_us: Option<u32>,
    /// Pin each of those threads to a processor [default: auto, which does unless the hub listens on loopback only]
    #[arg(long, value_enum, value_name = "WHEN", env = "PARAMHUB_HUB_PIN")]
    pin: Option<Pin>,
    /// Memory that all jobs may take together, as in 4G [default: four fifths of what is free at the start]
    #[arg(long, value_name = "SIZE", env = "PARAMHUB_HUB_MEMORY")]
    memory: Option<Bytes>,
    /// Memory that one job may take, as in 1G [default: as much as there is]
    #[arg(long, value_name = "SIZE", env = "PARAMHUB_HUB_JOB_MEMORY")]
    job_memory: Option<Bytes>,
    /// Streams that all workers of a job together may open to this hub [default: any number]
    #[arg(long, value_name = "N", env = "PARAMHUB_HUB_JOB_STREAMS")]
    job_streams: Option<u32>,
    /// What of each core's time a job is promised for each 1 of its weight: jobs beyond that are refused [default: nothing,
    /// and any number of jobs have equal shares]
    #[arg(long, value_name = "PERCENT", env = "PARAMHUB_HUB_JOB_SHARE")]
    job_share: Option<u32>,
    /// Where the hub's own connection manager listens; port 0 takes a free one. Or the URL, as in https://HOST:PORT, of a
    /// running one that the hub joins instead; of several managers with one etcd all, separated by commas [default:
    /// 127.0.0.1:7770]
    #[arg(long, value_name = "IP:PORT|URL", env = "PARAMHUB_HUB_MANAGER")]
    manager: Option<HubManager>,
    /// Join a running connection manager instead of starting one: the same as --manager URL
    #[arg(long, value_name = "URL", env = "PARAMHUB_HUB_JOIN", conflicts_with_all = ["manager", "state"])]
    join: Option<String>,
    /// What a rack's link to the other racks carries each way, as in 10gbit: lets the reduction `auto` choose between flat and
    /// hierarchical [default: what hubs of several racks probe]
    #[arg(long, value_name = "RATE", env = "PARAMHUB_CORE_RATE")]
    core_rate: Option<Rate>,
    /// How long a hub may be silent towards the connection manager that this one starts before it gets no new jobs and those that
    /// open there fail; running ones go on. Workers have --dead-after of their job [default: 10]
    #[arg(long, value_name = "SECONDS", env = "PARAMHUB_HUB_DEAD_AFTER", value_parser = super::parse_seconds)]
    hub_dead_after: Option<f64>,
    /// Directory that keeps jobs and hubs across restarts, so that jobs go on [default: none, kept in memory]
    #[arg(long, value_name = "DIR", env = "PARAMHUB_HUB_STATE")]
    state: Option<StatePlace>,
    #[command(flatten)]
    tls: TlsFlags,
    /// Directory for checkpoints of the jobs that are to have any; several hubs of a job must share it [default: none are
    /// written]
    #[arg(long, value_name = "DIR", env = "PARAMHUB_HUB_CHECKPOINTS")]
    checkpoints: Option<PathBuf>,
    /// Complete checkpoints of each job that are kept [default: 3]
    #[arg(long, value_name = "N", env = "PARAMHUB_HUB_CHECKPOINT_KEEP")]
    checkpoint_keep: Option<usize>,
}

impl HubFlags {
    pub(super) fn apply(self, config: &mut Config) {
        if let Some(switched_off) = self.no_shared_memory {
            config.hub.shared_memory = !switched_off;
        }
        if self.manager.is_some() {
            // A manager to join that is named in the file must not override the flag.
            config.hub.join = None;
        }
        config.hub.hub_dead_after_s = self.hub_dead_after.or(config.hub.hub_dead_after_s);
        overlay!(self.tls => config.hub; plain_http, tls_names; tls_certificate, tls_key);
        overlay!(
            self => config.hub;
            interface_rates, advertise, labels, host_only, encrypt, streams, spin_us, pin, manager, checkpoint_keep;
            listen, interfaces, between_hubs, rack, core_rate, cores, memory, job_memory, job_streams, job_share, join, state, checkpoints
        );
    }
}

/// A hub with its own manager, or one that has joined a running manager.
enum Serving {
    Embedded(EmbeddedHub),
    /// The hub and its manager's URL.
    Joined(RunningHub, String),
}

pub(super) fn serve(config: &Config) -> anyhow::Result<ExitCode> {
    let signals = Signals::catch()?;
    let Some(serving) = start(config, &signals)? else { return Ok(ExitCode::SUCCESS) };
    let (url, addresses) = match &serving {
        Serving::Embedded(hub) => (hub.url(), hub.addresses()),
        Serving::Joined(hub, url) => (url.as_str(), hub.addresses()),
    };
    let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    let cores = config.hub.effective_cores();
    println!("hub ready: manager {url} data {} cores {cores}", addresses.join(","));
    let failure = loop {
        if signals.wait(HEALTH_INTERVAL).is_some() {
            break None;
        }
        let failure = match &serving {
            Serving::Embedded(hub) => hub.failure(),
            Serving::Joined(hub, _) => hub.failure(),
        };
        if failure.is_some() {
            break failure;
        }
    };
    match serving {
        Serving::Embedded(hub) => hub.stop(),
        Serving::Joined(hub, _) => hub.stop(),
    }
    match failure {
        Some(reason) => bail!("the hub has failed: {reason}"),
        None => Ok(ExitCode::SUCCESS),
    }
}

/// `None` if a signal came first.
fn start(config: &Config, signals: &Signals) -> anyhow::Result<Option<Serving>> {
    let section = &config.hub;
    check(section)?;
    let listen = section.effective_listen();
    if listen.is_empty() {
        return Err(Usage("the hub needs an address to listen on: give --listen IP:PORT".into()).into());
    }
    let hub = HubConfig {
        listen,
        interfaces: section.interfaces.clone().unwrap_or_default(),
        interface_rates: section
            .interface_rates
            .iter()
            .map(|given| (given.interface.clone(), given.rate))
            .collect(),
        advertise: section.advertise.clone(),
        between_hubs: section.between_hubs,
        rack: section.rack.clone(),
        host: section.host_only.then(host_identity),
        labels: section.labels.clone(),
        cores: section.effective_cores(),
        streams: section.streams,
        shared_memory: section.shared_memory,
        encrypt: section.encrypt,
        spin: Duration::from_micros(section.spin_us.into()),
        pin: section.is_pinned(),
        memory_bytes: section.memory.map(|bytes| bytes.0),
        job_limits: JobLimits {
            memory_bytes: section.job_memory.map(|bytes| bytes.0),
            streams: section.job_streams,
            share_percent: section.job_share,
        },
        checkpoints: section
            .checkpoints
            .clone()
            .map(|folder| CheckpointConfig { folder, keep: section.checkpoint_keep }),
        ..HubConfig::default()
    };
    let listen = match section.effective_manager() {
        HubManager::Own(listen) => listen,
        HubManager::Running(url) => {
            let manager =
                ManagerClient::new(&url, config.admin_token()).map_err(|error| Usage(error.to_string()))?;
            return Ok(join(&manager, &hub, signals)?.map(|hub| Serving::Joined(hub, url)));
        }
    };
    let state = match section.state.clone() {
        Some(StatePlace::Etcd(_) | StatePlace::Unusable(_)) => {
            let message = "a hub's own connection manager keeps its state in a directory. For several managers start `paramhub \
                           manager --state etcd://...` on several hosts, and the hub with --join and the URLs of all";
            return Err(Usage(message.to_owned()).into());
        }
        Some(StatePlace::Directory(state)) => Some(state),
        None => None,
    };
    let manager = ManagerConfig {
        listen,
        state,
        core_rate: section.core_rate,
        admin_token: config.admin_token(),
        plain_http: section.plain_http,
        tls_names: section.tls_names.clone(),
        certificate: tls::certificate(&section.tls_certificate, &section.tls_key)?,
        hub_timeout: super::hub_timeout(section.hub_dead_after_s),
        ..ManagerConfig::default()
    };
    Ok(Some(Serving::Embedded(EmbeddedHub::start(EmbeddedConfig { manager, hub })?)))
}

/// Refuses options that do not combine.
pub(super) fn check(section: &HubSection) -> Result<(), Usage> {
    combinations::check(asked(section)).map_err(|conflict| Usage(conflict.to_string()))
}

/// The features of a hub's options.
fn asked(section: &HubSection) -> Features {
    let joins = matches!(section.effective_manager(), HubManager::Running(_));
    Features::of([
        (Feature::JoinedManager, joins),
        // The flag --join goes before a folder that the file names for the hub's own manager.
        (Feature::HubState, section.state.is_some() && section.join.is_none()),
        (Feature::ManagerTls, section.has_tls_options()),
        (Feature::HubDeadAfter, section.hub_dead_after_s.is_some()),
        (Feature::CoreRate, section.core_rate.is_some()),
        (Feature::CheckpointsKept, section.checkpoint_keep != CHECKPOINTS_KEPT),
        (Feature::NoCheckpointFolder, section.checkpoints.is_none()),
    ])
}

/// Joins a manager that may itself be starting only now. `None` if a signal came first.
fn join(manager: &ManagerClient, hub: &HubConfig, signals: &Signals) -> anyhow::Result<Option<RunningHub>> {
    let begun = Instant::now();
    let mut is_first = true;
    loop {
        match RunningHub::start(manager.clone(), hub.clone()) {
            Err(HubError::Manager(error)) if error.is_away() && begun.elapsed() < JOIN => {
                if std::mem::take(&mut is_first) {
                    eprintln!("paramhub: {error} The hub tries again for {} s", JOIN.as_secs());
                }
            }
            started => return Ok(Some(started?)),
        }
        if signals.wait(JOIN_PAUSE).is_some() {
            return Ok(None);
        }
    }
}
