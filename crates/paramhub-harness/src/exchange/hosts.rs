//! Where the processes of an exchange run: all on this machine, or each on a host of a testbed.

mod sites;

use std::net::{IpAddr, Ipv4Addr};
use std::process::Command;
use std::str::FromStr;

use anyhow::Context;
use clap::Args;
use paramhub::service::JobOptions;
use paramhub_core::composition::{BetweenSites, OptimizeAt, Reduction};

use crate::Usage;
use crate::launch::this_program_command;
use crate::values::Deployment;

pub use sites::Site;

/// The part of `--enter` that the host's name replaces.
const HOST: &str = "{host}";

/// Where workers and hubs run.
#[derive(Args, Clone)]
pub struct HostsFlags {
    /// Hosts of the workers, each with its address, as in r0w0=10.64.0.1,r0w1=10.64.0.2
    ///
    /// Ranks are spread over them evenly, neighbours together. Addresses after a + are further interfaces, which a hub
    /// beside the worker listens on, too. A name behind an @ is the host's rack: workers there exchange with the hubs of
    /// their rack, and these with one another.
    #[arg(long, value_name = "HOST[@RACK]=IP[+IP],..", value_delimiter = ',')]
    hosts: Vec<Host>,
    /// Hosts of hubs alone, each with the addresses of all its interfaces
    ///
    /// An address behind a / is that of a link which hubs have for themselves.
    #[arg(long, value_name = "HOST[@RACK]=IP[+IP][/IP],..", value_delimiter = ',', requires = "hosts")]
    hub_hosts: Vec<Host>,
    /// Where the hubs are [default: ncc]
    #[arg(long, value_enum, requires = "hosts")]
    deployment: Option<Deployment>,
    /// What makes a command run on a host, as in \"ip netns exec phub-{host}\"; split at its spaces
    #[arg(long, value_name = "COMMAND", requires = "hosts")]
    enter: Option<String>,
    /// How sums become those of all workers where hubs serve racks: auto, flat, tree, ring, sharded or line [default: auto]
    #[arg(long, value_name = "HOW", requires = "hosts")]
    reduction: Option<Reduction>,
    /// Where the optimizer runs then: every-site or owner [default: every-site]
    #[arg(long, value_name = "WHERE", requires = "hosts")]
    optimize_at: Option<OptimizeAt>,
    /// How sums cross between racks then: f32, bf16, int8, or the sums of matrices in one-bit or two-bit [default: f32]
    #[arg(long, value_name = "CODEC", requires = "hosts")]
    between_sites: Option<BetweenSites>,
    /// The number of standbys of each chunk, 0 or 1 [default: 0]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=1), requires = "hosts")]
    replicas: Option<u32>,
}

/// A host's name and addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Host {
    name: String,
    rack: Option<String>,
    addresses: Vec<IpAddr>,
    /// The address on a link that hubs have for themselves.
    between_hubs: Option<IpAddr>,
}

impl FromStr for Host {
    type Err = String;

    fn from_str(text: &str) -> Result<Host, String> {
        let (name, addresses) =
            text.split_once('=').ok_or_else(|| format!("{text} has no address: give HOST=IP"))?;
        if name.is_empty() || name.contains(char::is_whitespace) {
            return Err(format!("`{name}` is no name of a host"));
        }
        let parse = |text: &str| -> Result<IpAddr, String> {
            text.parse().map_err(|_| format!("{name}: `{text}` is no IP address"))
        };
        let (addresses, between_hubs) =
            addresses.split_once('/').map_or((addresses, None), |(own, between)| (own, Some(between)));
        let addresses = addresses.split('+').map(parse).collect::<Result<_, String>>()?;
        let between_hubs = between_hubs.map(parse).transpose()?;
        let (name, rack) = name.split_once('@').map_or((name, None), |(name, rack)| (name, Some(rack)));
        Ok(Host { name: name.to_owned(), rack: rack.map(str::to_owned), addresses, between_hubs })
    }
}

/// The hosts of all processes, by role.
#[derive(Clone, Debug)]
pub struct Hosts {
    /// `None` if all are on this machine.
    deployment: Option<Deployment>,
    /// Each rank's host and rack; empty if all are here.
    workers: Vec<(String, Option<String>)>,
    hubs: Vec<HubHost>,
    /// The words before a command that is to run on a host.
    enter: Vec<String>,
    /// The options of the job.
    pub options: JobOptions,
}

/// The host of one hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubHost {
    /// The host; `None` for this machine.
    host: Option<String>,
    /// The rack that it serves; `None` if it serves all workers.
    pub rack: Option<String>,
    /// The address of each interface.
    pub listen: Vec<IpAddr>,
    /// The address on a link that hubs have for themselves.
    pub between_hubs: Option<IpAddr>,
}

impl Hosts {
    /// One hub on loopback.
    pub fn here() -> Hosts {
        let listen = vec![Ipv4Addr::LOCALHOST.into()];
        let hub = HubHost { host: None, rack: None, listen, between_hubs: None };
        let options = JobOptions::default();
        Hosts { deployment: None, workers: Vec::new(), hubs: vec![hub], enter: Vec::new(), options }
    }

    /// The host of each hub; the first has the connection manager.
    pub fn hubs(&self) -> &[HubHost] {
        &self.hubs
    }

    /// The rack of a rank.
    pub fn rack(&self, rank: u32) -> Option<String> {
        self.workers.get(rank as usize).and_then(|(_, rack)| rack.clone())
    }

    /// Returns where hubs are in relation to workers; `None` if all are on this machine.
    pub fn deployment(&self) -> Option<Deployment> {
        self.deployment
    }

    /// The number of hosts with ranks; `None` if all are on this machine.
    pub fn machines(&self) -> Option<u32> {
        let mut names: Vec<&str> = self.workers.iter().map(|(host, _)| host.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        (names.len() > 1).then_some(names.len() as u32)
    }

    /// Interfaces of the hub that has most.
    pub fn interfaces(&self) -> usize {
        self.hubs.iter().map(|hub| hub.listen.len()).max().unwrap_or(0)
    }

    /// The command that starts this program once more, on the host of the process: workers by rank, then
    /// hubs.
    ///
    /// # Errors
    /// If this program's own file cannot be found.
    pub fn command(&self, process: usize, workers: usize) -> anyhow::Result<Command> {
        let program = this_program_command().context("cannot find this program's own file")?;
        let Some(host) = self.host(process, workers).filter(|_| !self.enter.is_empty()) else {
            return Ok(program);
        };
        let mut words = self.enter.iter().map(|word| word.replace(HOST, host));
        let mut command = Command::new(words.next().expect("it is not empty"));
        command.args(words).arg(program.get_program()).args(program.get_args());
        Ok(command)
    }

    /// The name of a process in messages.
    pub fn name(&self, process: usize, workers: usize) -> String {
        let what = match process.checked_sub(workers) {
            None => format!("worker {process}"),
            Some(_) if self.hubs.len() == 1 => "the hub".to_owned(),
            Some(number) => format!("hub {number}"),
        };
        match self.host(process, workers) {
            Some(host) => format!("{what} on {host}"),
            None => what,
        }
    }

    fn host(&self, process: usize, workers: usize) -> Option<&str> {
        match process.checked_sub(workers) {
            None => self.workers.get(process).map(|(host, _)| host.as_str()),
            Some(number) => self.hubs.get(number).and_then(|hub| hub.host.as_deref()),
        }
    }
}

impl HostsFlags {
    /// The hosts of this many workers and their hubs.
    ///
    /// # Errors
    /// If the flags contradict each other.
    pub fn hosts(&self, workers: u32) -> Result<Hosts, Usage> {
        if self.hosts.is_empty() {
            return Ok(Hosts::here());
        }
        let workers = workers as usize;
        if self.hosts.len() > workers {
            return Err(Usage(format!(
                "--hosts: there are {} of them for {workers} workers: give at most as many",
                self.hosts.len()
            )));
        }
        let deployment = self.deployment.unwrap_or(Deployment::Ncc);
        let hubs: Vec<HubHost> = self.hosts_of_hubs(deployment)?.iter().map(HubHost::on).collect();
        if self.replicas == Some(1) && hubs.len() < 2 {
            return Err(Usage(
                "--replicas: a standby needs another hub: give two hosts or more in --hub-hosts".into(),
            ));
        }
        let enter: Vec<String> =
            self.enter.iter().flat_map(|command| command.split_whitespace()).map(str::to_owned).collect();
        if self.enter.is_some() && !enter.iter().any(|word| word.contains(HOST)) {
            return Err(Usage(format!("--enter: nothing in it is {HOST}, so all hosts would be one")));
        }
        let place = |rank: usize| {
            let host = &self.hosts[rank * self.hosts.len() / workers];
            (host.name.clone(), host.rack.clone())
        };
        let options = JobOptions {
            reduction: self.reduction.unwrap_or_default(),
            optimize_at: self.optimize_at.unwrap_or_default(),
            between_sites: self.between_sites.unwrap_or_default(),
            replicas: self.replicas.unwrap_or_default(),
            ..JobOptions::default()
        };
        let workers = (0..workers).map(place).collect();
        Ok(Hosts { deployment: Some(deployment), workers, hubs, enter, options })
    }

    fn hosts_of_hubs(&self, deployment: Deployment) -> Result<&[Host], Usage> {
        let (own, name) = (&self.hub_hosts, deployment);
        match (deployment, own.len()) {
            (Deployment::Ncc, 1) | (Deployment::Ncs, 1..) => Ok(own),
            (Deployment::Ncc, _) => Err(Usage(format!("{name} has one hub: give one host in --hub-hosts"))),
            (Deployment::Ncs, _) => Err(Usage(format!("{name}: give hosts in --hub-hosts"))),
            (Deployment::Cc, 0) => Ok(&self.hosts[..1]),
            (Deployment::Cs, 0) => Ok(&self.hosts),
            _ => {
                Err(Usage(format!("{name} has its hubs beside workers: --hub-hosts cannot be used with it")))
            }
        }
    }
}

impl HubHost {
    fn on(host: &Host) -> HubHost {
        let (name, rack) = (host.name.clone(), host.rack.clone());
        let (listen, between_hubs) = (host.addresses.clone(), host.between_hubs);
        HubHost { host: Some(name), rack, listen, between_hubs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(hosts: &str, hub_hosts: &str, deployment: Deployment) -> HostsFlags {
        let parse = |text: &str| text.split_terminator(',').map(|host| host.parse().unwrap()).collect();
        HostsFlags {
            hosts: parse(hosts),
            hub_hosts: parse(hub_hosts),
            deployment: Some(deployment),
            enter: Some("in {host}".into()),
            reduction: None,
            replicas: None,
            optimize_at: None,
            between_sites: None,
        }
    }

    #[test]
    fn a_deployment_says_where_hubs_are() {
        let (two, hubs) = ("a=10.0.0.1,b=10.0.0.2+10.0.1.2", "x=10.0.0.3,y=10.0.0.4");
        let hosts = |hosts, hub_hosts, deployment| -> Vec<String> {
            let hosts = flags(hosts, hub_hosts, deployment).hosts(4).unwrap();
            hosts.hubs.iter().map(|hub| hub.host.clone().unwrap()).collect()
        };
        assert_eq!(hosts(two, "x=10.0.0.3", Deployment::Ncc), ["x"]);
        assert_eq!(hosts(two, hubs, Deployment::Ncs), ["x", "y"]);
        assert_eq!(hosts(two, "", Deployment::Cc), ["a"]);
        assert_eq!(hosts(two, "", Deployment::Cs), ["a", "b"]);
        let hosts = flags(two, "", Deployment::Cs).hosts(4).unwrap();
        assert_eq!((hosts.interfaces(), hosts.hubs[1].listen.len()), (2, 2));
        for (hub_hosts, deployment) in
            [("", Deployment::Ncc), (hubs, Deployment::Ncc), ("", Deployment::Ncs), (hubs, Deployment::Cs)]
        {
            assert!(flags(two, hub_hosts, deployment).hosts(4).is_err(), "{deployment:?} with {hub_hosts}");
        }
    }

    #[test]
    fn standbys_need_another_hub() {
        let with = |hub_hosts, deployment| {
            let flags = flags("a=10.0.0.1", hub_hosts, deployment);
            HostsFlags { replicas: Some(1), ..flags }.hosts(2)
        };
        assert_eq!(with("x=10.0.0.3,y=10.0.0.4", Deployment::Ncs).unwrap().options.replicas, 1);
        assert!(with("x=10.0.0.3", Deployment::Ncc).unwrap_err().0.starts_with("--replicas: "));
    }

    #[test]
    fn ranks_are_spread_over_hosts_neighbours_together() {
        let hosts = flags("a=10.0.0.1,b=10.0.0.2", "x=10.0.0.3", Deployment::Ncc).hosts(4).unwrap();
        let names: Vec<&str> = hosts.workers.iter().map(|(host, _)| host.as_str()).collect();
        assert_eq!(names, ["a", "a", "b", "b"]);
        assert_eq!(hosts.name(2, 4), "worker 2 on b");
        assert_eq!(hosts.name(4, 4), "the hub on x");
        assert_eq!(Hosts::here().name(4, 4), "the hub");
        assert!(flags("a=10.0.0.1,b=10.0.0.2", "x=10.0.0.3", Deployment::Ncc).hosts(1).is_err());
    }

    #[test]
    fn the_command_of_a_process_runs_on_its_host() {
        let hosts = flags("a=10.0.0.1,b=10.0.0.2", "", Deployment::Cc).hosts(2).unwrap();
        let words = |process| {
            let command = hosts.command(process, 2).unwrap();
            [command.get_program()]
                .into_iter()
                .chain(command.get_args())
                .take(2)
                .map(|word| word.to_owned())
                .collect()
        };
        let (last, hub): (Vec<_>, Vec<_>) = (words(1), words(2));
        assert_eq!((last, hub), (vec!["in".into(), "b".into()], vec!["in".into(), "a".into()]));
        assert_ne!(Hosts::here().command(0, 2).unwrap().get_program(), "in");
        let everywhere =
            HostsFlags { enter: Some("nsenter".into()), ..flags("a=10.0.0.1", "", Deployment::Cc) };
        assert!(everywhere.hosts(2).is_err());
    }

    #[test]
    fn hosts_are_names_with_addresses() {
        for wrong in
            ["a", "=10.0.0.1", "a=", "a=b", "a=10.0.0.1+", "a b=10.0.0.1", "a=10.0.0.1/", "a=/10.0.0.1"]
        {
            assert!(wrong.parse::<Host>().is_err(), "{wrong}");
        }
        let host: Host = "a=10.0.0.1+fd00::1".parse().unwrap();
        assert_eq!((host.addresses.len(), host.between_hubs), (2, None));
        let host: Host = "a=10.0.0.1/10.0.9.1".parse().unwrap();
        assert_eq!((host.addresses.len(), host.between_hubs), (1, Some("10.0.9.1".parse().unwrap())));
    }
}
