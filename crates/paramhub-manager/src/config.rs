//! The configuration of a connection manager.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use paramhub_core::cost::Rate;
use paramhub_core::service::MANAGER_PORT;
use paramhub_trust::CertificateFiles;

use crate::error::ManagerError;
use crate::etcd_address::EtcdAddress;

/// The configuration of a connection manager. Start from [`ManagerConfig::default`] and change what
/// differs.
#[derive(Clone)]
pub struct ManagerConfig {
    /// The address to listen at; port 0 lets the system choose. Default: loopback, port 7770.
    pub listen: SocketAddr,
    /// Directory that keeps the jobs across restarts; `None` keeps them in memory. Default: `None`.
    pub state: Option<PathBuf>,
    /// The etcd that keeps the jobs instead, for several managers of which one leads; needs the feature `etcd`. Default:
    /// `None`.
    pub etcd: Option<EtcdAddress>,
    /// The token that operators and hubs must show. Needed unless the manager listens on loopback only;
    /// enforced wherever it is given. Default: `None`.
    pub admin_token: Option<String>,
    /// `true` lets callers of other machines use HTTP in clear. Default: `false`; they use TLS.
    pub plain_http: bool,
    /// Further names under which the manager is called, host names or IP addresses, for the certificate that
    /// curl and browsers check. It has those of this machine and of its interfaces in any case. Default: none.
    pub tls_names: Vec<String>,
    /// A certificate for curl, browsers and other programs that are not of paramhub. Default: `None`, they get
    /// one that the manager's own authority has signed.
    pub certificate: Option<CertificateFiles>,
    /// The rate of a rack's link to the others, each way. With it a job's `auto` reduction follows PHub's
    /// condition. Default: `None`, hubs of several racks probe it.
    pub core_rate: Option<Rate>,
    /// The time that a hub may be silent before it gets no new jobs and those that open there fail; running ones go on. At
    /// least 100 ms; hubs call about three times as often. Default: 10 s.
    pub hub_timeout: Duration,
    /// The most connections of callers that have proved nothing. Beyond that the oldest connection of the
    /// address with the most of them is evicted. An eighth of the descriptors that the process may open if
    /// that is less. Default: 1,024.
    pub unauthenticated_max: usize,
    /// The most ranks whose jobs wait to be complete, each of which holds a connection. Ranks of further jobs
    /// are asked to try again. Half of the descriptors that the process may open if that is less. Default:
    /// 16,384.
    pub ranks_max: usize,
    /// The most jobs that may live at a time. Default: 10,000.
    pub living_jobs_max: usize,
    /// The number of ended jobs that are remembered, the newest. Default: 1,000.
    pub ended_jobs_max: usize,
}

impl Default for ManagerConfig {
    fn default() -> Self {
        ManagerConfig {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, MANAGER_PORT)),
            state: None,
            etcd: None,
            admin_token: None,
            plain_http: false,
            tls_names: Vec::new(),
            certificate: None,
            core_rate: None,
            hub_timeout: Duration::from_secs(10),
            unauthenticated_max: 1024,
            ranks_max: 16_384,
            living_jobs_max: 10_000,
            ended_jobs_max: 1000,
        }
    }
}

impl ManagerConfig {
    /// Whether callers of other machines must use TLS. Then jobs' secrets tell by what to recognise the manager.
    pub(crate) fn needs_tls(&self) -> bool {
        !self.plain_http && !self.listen.ip().is_loopback()
    }

    /// Refuses configurations that are unsafe or cannot work.
    pub(crate) fn check(&self) -> Result<(), ManagerError> {
        match &self.admin_token {
            None if !self.listen.ip().is_loopback() => {
                return Err(ManagerError::TokenNeeded { address: self.listen });
            }
            Some(token) if !(1..=4096).contains(&token.len()) => return Err(ManagerError::TokenUnusable),
            Some(token) if !token.bytes().all(|byte| byte.is_ascii_graphic()) => {
                return Err(ManagerError::TokenUnusable);
            }
            _ => {}
        }
        match &self.etcd {
            Some(_) if cfg!(not(feature = "etcd")) => return Err(ManagerError::EtcdMissing),
            Some(etcd) if self.state.is_some() => {
                return Err(ManagerError::Setting {
                    setting: "the place of the state",
                    value: etcd.to_string(),
                    expected: "a directory or an etcd, not both",
                });
            }
            _ => {}
        }
        let out_of_bounds =
            |setting, value, expected| Err(ManagerError::Setting { setting, value, expected });
        if !(Duration::from_millis(100)..=Duration::from_secs(86_400)).contains(&self.hub_timeout) {
            let value = format!("{:?}", self.hub_timeout);
            return out_of_bounds("the silence after which a hub is lost", value, "between 100 ms and a day");
        }
        for (setting, value) in
            [("unauthenticated_max", self.unauthenticated_max), ("ranks_max", self.ranks_max)]
        {
            if !(8..=1 << 20).contains(&value) {
                return out_of_bounds(setting, value.to_string(), "between 8 and 1,048,576");
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for ManagerConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ManagerConfig")
            .field("listen", &self.listen)
            .field("state", &self.state)
            .field("etcd", &self.etcd)
            .field("admin_token", &self.admin_token.as_ref().map(|_| ".."))
            .field("plain_http", &self.plain_http)
            .field("tls_names", &self.tls_names)
            .field("certificate", &self.certificate)
            .field("hub_timeout", &self.hub_timeout)
            .field("unauthenticated_max", &self.unauthenticated_max)
            .field("ranks_max", &self.ranks_max)
            .field("living_jobs_max", &self.living_jobs_max)
            .field("ended_jobs_max", &self.ended_jobs_max)
            .finish()
    }
}
