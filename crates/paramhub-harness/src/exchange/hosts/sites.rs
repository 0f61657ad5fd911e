//! Hosts for ranks that this program does not start one by one.

use std::net::IpAddr;

use super::{HOST, Host, HostsFlags};

/// A host of workers, for launchers that start their processes themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// Its first address.
    pub address: IpAddr,
    /// The words before a command that is to run there.
    pub enter: Vec<String>,
    /// The number of ranks there.
    pub ranks: u32,
}

impl HostsFlags {
    /// The hosts of this many ranks, in rank order; empty if no hosts are given.
    pub fn sites(&self, ranks: u32) -> Vec<Site> {
        let count = self.hosts.len();
        let site = |(number, host): (usize, &Host)| {
            let on_it = (0..ranks as usize).filter(|rank| rank * count / ranks as usize == number).count();
            let words = self.enter.iter().flat_map(|command| command.split_whitespace());
            let enter = words.map(|word| word.replace(HOST, &host.name)).collect();
            Site { address: host.addresses[0], enter, ranks: on_it as u32 }
        };
        self.hosts.iter().enumerate().map(site).collect()
    }

    /// The same flags with at most this many of the workers' hosts.
    pub fn first(&self, count: u32) -> HostsFlags {
        let hosts = self.hosts.iter().take(count as usize).cloned().collect();
        HostsFlags { hosts, ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_are_started_by_themselves_are_on_the_same_hosts() {
        let flags = HostsFlags {
            hosts: ["a=10.0.0.1", "b=10.0.0.2+10.0.1.2"].map(|host| host.parse().unwrap()).into(),
            hub_hosts: Vec::new(),
            deployment: None,
            enter: Some("in {host}".into()),
            reduction: None,
            replicas: None,
            optimize_at: None,
            between_sites: None,
        };
        let sites = flags.sites(3);
        let described: Vec<_> = sites.iter().map(|site| (site.address.to_string(), site.ranks)).collect();
        assert_eq!(described, [("10.0.0.1".to_owned(), 2), ("10.0.0.2".to_owned(), 1)]);
        assert_eq!(sites[1].enter, ["in", "b"]);
        assert_eq!(flags.first(1).sites(3).len(), 1);
    }
}
