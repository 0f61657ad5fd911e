//! A manager, hubs and workers, spread over hosts of their own.

use std::collections::BTreeMap;

use super::hosts::{Host, Network};
use super::{Process, Program};

pub const MANAGER_PORT: u16 = 7770;
pub const HUB_PORT: u16 = 7771;
pub const TOKEN: &str = "of-these-hosts-only";

/// The processes that run on a host.
#[derive(Clone, Copy)]
pub struct HostRole {
    /// The rack; empty for none.
    rack: &'static str,
    hub: Option<Serves>,
    workers: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Serves {
    AllWorkers,
    Rack,
    Host,
}

impl HostRole {
    /// A hub for all workers.
    pub const HUB: HostRole = HostRole { rack: "", hub: Some(Serves::AllWorkers), workers: 0 };

    /// A hub for a rack.
    pub const fn rack_hub(rack: &'static str) -> HostRole {
        HostRole { rack, hub: Some(Serves::Rack), workers: 0 }
    }

    /// A hub for the workers beside it alone.
    pub const fn host_hub(rack: &'static str, workers: usize) -> HostRole {
        HostRole { rack, hub: Some(Serves::Host), workers }
    }

    /// Workers without a hub.
    pub const fn workers(rack: &'static str, workers: usize) -> HostRole {
        HostRole { rack, hub: None, workers }
    }

    /// The same role with workers on it.
    pub const fn with_workers(self, workers: usize) -> HostRole {
        HostRole { workers, ..self }
    }

    /// Returns whether jobs wait for the role's hub. They do not wait for a hub that serves its own host.
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
    roles: Vec<(HostRole, Host)>,
    network: Network,
}

impl Cluster {
    /// The hosts without processes. `None`, after a line that says why, if network namespaces are not
    /// permitted.
    pub fn of_hosts(roles: &[HostRole]) -> Option<Cluster> {
        let mut network = Network::new()?;
        let manager_host = network.host();
        let roles = roles.iter().map(|&role| (role, network.host())).collect();
        Some(Cluster { manager: None, hubs: BTreeMap::new(), manager_host, roles, network })
    }

    /// The hosts with manager and hubs.
    pub fn start(roles: &[HostRole]) -> Option<Cluster> {
        let mut cluster = Cluster::of_hosts(roles)?;
        cluster.manager = Some(cluster.start_manager());
        let with_hubs = (0..roles.len()).filter(|&role| roles[role].hub.is_some());
        cluster.hubs = with_hubs.map(|role| (role, cluster.start_hub(role))).collect();
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

    /// Starts the hub of a role; it may not be ready yet.
    pub fn start_hub(&self, role: usize) -> Process {
        self.start_hub_with(role, &[])
    }

    /// The same with more arguments.
    pub fn start_hub_with(&self, role: usize, arguments: &[&str]) -> Process {
        let (HostRole { rack, hub, .. }, host) = &self.roles[role];
        let (url, listen) = (self.url(), self.address(role));
        let flags = ["hub", "--manager", &url, "--listen", &listen, "--cores", "1", "--pin", "no"];
        let host_only = (*hub == Some(Serves::Host)).then_some("--host-only");
        let of_rack = if rack.is_empty() { &[][..] } else { &["--rack", rack] };
        let given = host_only.into_iter().chain(of_rack.iter().copied()).chain(arguments.iter().copied());
        let program = host.paramhub(flags.into_iter().chain(given));
        program.env("PARAMHUB_ADMIN_TOKEN", TOKEN).start()
    }

    /// The network of the hosts, whose switch sees every packet between them.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// The manager's URL.
    pub fn url(&self) -> String {
        format!("https://{}:{MANAGER_PORT}", self.manager_host.address)
    }

    pub fn host(&self, role: usize) -> &Host {
        &self.roles[role].1
    }

    /// The address on which a role's hub listens.
    pub fn address(&self, role: usize) -> String {
        format!("{}:{HUB_PORT}", self.host(role).address)
    }

    /// A hub that [`Cluster::start`] has started.
    pub fn hub(&self, role: usize) -> &Process {
        &self.hubs[&role]
    }

    /// Runs a command that operators use, on the manager's host.
    pub fn operate(&self, arguments: &[&str]) -> String {
        self.operator(arguments).finish().expect_code(0).stdout
    }

    /// The same on the host of a role.
    pub fn operate_from(&self, role: usize, arguments: &[&str]) -> String {
        let program = self.host(role).paramhub(arguments.iter().copied());
        let program = program.env("PARAMHUB_URL", &self.url()).env("PARAMHUB_ADMIN_TOKEN", TOKEN);
        program.finish().expect_code(0).stdout
    }

    fn operator(&self, arguments: &[&str]) -> Program {
        let program = self.manager_host.paramhub(arguments.iter().copied());
        program.env("PARAMHUB_URL", &self.url()).env("PARAMHUB_ADMIN_TOKEN", TOKEN)
    }

    /// Creates a job and starts all workers of the roles for it, in the order of the roles.
    pub fn start_job(&self, create: &[&str], arguments: &[&str]) -> Vec<Process> {
        let ranks: Vec<(usize, &[&str])> = (0..self.roles.len())
            .flat_map(|role| std::iter::repeat_n((role, arguments), self.roles[role].0.workers))
            .collect();
        self.start_job_at(&ranks, create)
    }

    /// The same with each rank's role and arguments. Workers get only the three lines that `jobs create`
    /// prints, their ranks and their racks.
    pub fn start_job_at(&self, ranks: &[(usize, &[&str])], create: &[&str]) -> Vec<Process> {
        let workers = ranks.len().to_string();
        let printed = self.operate(&[&["jobs", "create", "-n", &workers], create].concat());
        let worker = |(rank, &(role, arguments)): (usize, &(usize, &[&str]))| {
            let (HostRole { rack, .. }, host) = &self.roles[role];
            let program = host.example("exchange", arguments.iter().copied());
            let program = printed
                .lines()
                .filter_map(|line| line.split_once('='))
                .fold(program, |program, (name, value)| program.env(name, value));
            program.env("RANK", &rank.to_string()).env("PARAMHUB_RACK", rack).start()
        };
        ranks.iter().enumerate().map(worker).collect()
    }
}
