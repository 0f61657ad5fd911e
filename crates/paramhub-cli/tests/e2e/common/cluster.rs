//! A manager, hubs and workers, spread over hosts of their own.

use std::collections::BTreeMap;

use super::hosts::{Host, Network};
use super::{Process, Program};

pub const MANAGER_PORT: u16 = 7770;
pub const HUB_PORT: u16 = 7771;
const TOKEN: &str = "of-these-hosts-only";

/// The processes that run on a host.
#[derive(Clone, Copy)]
pub struct Station {
    /// The rack; empty for none.
    rack: &'static str,
    hub: Option<Serves>,
    workers: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Serves {
    Everybody,
    Rack,
    Host,
}

impl Station {
    /// A hub for all workers.
    pub const HUB: Station = Station { rack: "", hub: Some(Serves::Everybody), workers: 0 };

    /// A hub for a rack.
    pub const fn rack_hub(rack: &'static str) -> Station {
        Station { rack, hub: Some(Serves::Rack), workers: 0 }
    }

    /// A hub for the workers beside it alone.
    pub const fn host_hub(rack: &'static str, workers: usize) -> Station {
        Station { rack, hub: Some(Serves::Host), workers }
    }

    /// Workers without a hub.
    pub const fn workers(rack: &'static str, workers: usize) -> Station {
        Station { rack, hub: None, workers }
    }

    /// The same station with workers on it.
    pub const fn with_workers(self, workers: usize) -> Station {
        Station { workers, ..self }
    }

    /// Whether jobs wait for the station's hub. They do not wait for a hub that serves its own host.
    pub fn is_waited_for(&self) -> bool {
        self.hub.is_some_and(|serves| serves != Serves::Host)
    }
}

/// Hosts, and what runs on them.
pub struct Cluster {
    // Processes end before their hosts do.
    manager: Option<Process>,
    hubs: BTreeMap<usize, Process>,
    pub manager_host: Host,
    stations: Vec<(Station, Host)>,
    /// Keeps the switch alive.
    _network: Network,
}

impl Cluster {
    /// The hosts without processes. `None`, after a line that says why, if network namespaces are not
    /// permitted.
    pub fn of_hosts(stations: &[Station]) -> Option<Cluster> {
        let mut network = Network::new()?;
        let manager_host = network.host();
        let stations = stations.iter().map(|&station| (station, network.host())).collect();
        Some(Cluster { manager: None, hubs: BTreeMap::new(), manager_host, stations, _network: network })
    }

    /// The hosts with manager and hubs.
    pub fn start(stations: &[Station]) -> Option<Cluster> {
        let mut cluster = Cluster::of_hosts(stations)?;
        cluster.manager = Some(cluster.start_manager());
        let with_hubs = (0..stations.len()).filter(|&station| stations[station].hub.is_some());
        cluster.hubs = with_hubs.map(|station| (station, cluster.start_hub(station))).collect();
        cluster.hubs.values().for_each(|hub| drop(hub.wait_for("hub ready: ")));
        Some(cluster)
    }

    pub fn start_manager(&self) -> Process {
        let listen = format!("{}:{MANAGER_PORT}", self.manager_host.address);
        let manager = self.manager_host.paramhub(["manager", "--listen", &listen]);
        let manager = manager.env("PARAMHUB_ADMIN_TOKEN", TOKEN).start();
        manager.wait_for("manager ready: ");
        manager
    }

    /// Starts the hub of a station; it may not be ready yet.
    pub fn start_hub(&self, station: usize) -> Process {
        let (Station { rack, hub, .. }, host) = &self.stations[station];
        let (url, listen) = (self.url(), self.address(station));
        let flags = ["hub", "--manager", &url, "--listen", &listen, "--cores", "1", "--pin", "no"];
        let host_only = (*hub == Some(Serves::Host)).then_some("--host-only");
        let of_rack = if rack.is_empty() { &[][..] } else { &["--rack", rack] };
        let program = host.paramhub(flags.into_iter().chain(host_only).chain(of_rack.iter().copied()));
        program.env("PARAMHUB_ADMIN_TOKEN", TOKEN).start()
    }

    /// The manager's URL.
    pub fn url(&self) -> String {
        format!("http://{}:{MANAGER_PORT}", self.manager_host.address)
    }

    pub fn host(&self, station: usize) -> &Host {
        &self.stations[station].1
    }

    /// The address on which a station's hub listens.
    pub fn address(&self, station: usize) -> String {
        format!("{}:{HUB_PORT}", self.host(station).address)
    }

    /// A hub that [`Cluster::start`] has started.
    pub fn hub(&self, station: usize) -> &Process {
        &self.hubs[&station]
    }

    /// Runs a command that operators use, on the manager's host.
    pub fn operate(&self, arguments: &[&str]) -> String {
        self.operator(arguments).finish().expect_code(0).stdout
    }

    fn operator(&self, arguments: &[&str]) -> Program {
        let program = self.manager_host.paramhub(arguments.iter().copied());
        program.env("PARAMHUB_URL", &self.url()).env("PARAMHUB_ADMIN_TOKEN", TOKEN)
    }

    /// Creates a job and starts all workers of the stations for it, in the order of the stations.
    pub fn start_job(&self, create: &[&str], arguments: &[&str]) -> Vec<Process> {
        let seats: Vec<(usize, &[&str])> = (0..self.stations.len())
            .flat_map(|station| std::iter::repeat_n((station, arguments), self.stations[station].0.workers))
            .collect();
        self.start_job_at(&seats, create)
    }

    /// The same with each rank's station and arguments. Workers get only the three lines that `jobs create`
    /// prints, their ranks and their racks.
    pub fn start_job_at(&self, seats: &[(usize, &[&str])], create: &[&str]) -> Vec<Process> {
        let workers = seats.len().to_string();
        let printed = self.operate(&[&["jobs", "create", "-n", &workers], create].concat());
        let worker = |(rank, &(station, arguments)): (usize, &(usize, &[&str]))| {
            let (Station { rack, .. }, host) = &self.stations[station];
            let program = host.example("exchange", arguments.iter().copied());
            let program = printed
                .lines()
                .filter_map(|line| line.split_once('='))
                .fold(program, |program, (name, value)| program.env(name, value));
            program.env("RANK", &rank.to_string()).env("PARAMHUB_RACK", rack).start()
        };
        seats.iter().enumerate().map(worker).collect()
    }
}
