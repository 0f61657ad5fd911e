//! The variables in the environment of a worker.

use std::fs;
use std::io::{Error, ErrorKind};
use std::net::{Ipv4Addr, TcpListener};
use std::process::Command;

use paramhub_core::service::ServiceCreated;

/// The least port that is chosen for MASTER_PORT: many services have those below.
const PORT_MIN: u16 = 10_000;
/// How many ports are tried.
const PORT_TRIES: usize = 1000;

/// One worker's rank in a job, and what it needs to join.
pub struct RankEnvironment<'a> {
    /// The rank among all workers.
    pub rank: u32,
    /// All workers of the job.
    pub workers: u32,
    /// The rank among the workers of this machine.
    pub local_rank: u32,
    /// The workers of this machine.
    pub local_workers: u32,
    /// The connection manager's URL.
    pub url: &'a str,
    /// The job's namespace and secret.
    pub job: &'a ServiceCreated,
}

impl RankEnvironment<'_> {
    /// Sets the variables by which the worker finds its manager, its job and its rank.
    pub fn prepare(&self, command: &mut Command) {
        command
            .env("RANK", self.rank.to_string())
            .env("LOCAL_RANK", self.local_rank.to_string())
            .env("WORLD_SIZE", self.workers.to_string())
            .env("LOCAL_WORLD_SIZE", self.local_workers.to_string())
            .env("PARAMHUB_URL", self.url)
            .env("PARAMHUB_JOB", self.job.namespace.to_string())
            .env("PARAMHUB_SECRET", String::from(self.job.secret()))
            // A worker does not need the operator's token.
            .env_remove("PARAMHUB_ADMIN_TOKEN")
            .env_remove("PARAMHUB_ADMIN_TOKEN_FILE");
    }
}

/// A loopback port on which no process listens now, for frameworks that want a MASTER_PORT of their own. If it can be, it lies
/// below the ports that the system gives to connections, of which one may have it before rank 0 listens there.
///
/// # Errors
/// If the system has none.
pub fn free_port() -> std::io::Result<u16> {
    let listen = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port));
    let below = PORT_MIN..first_port_of_connections().unwrap_or(PORT_MIN);
    for _ in 0..PORT_TRIES {
        if below.is_empty() {
            break;
        }
        let mut random = [0; 2];
        getrandom::fill(&mut random).map_err(Error::other)?;
        let port = below.start + u16::from_le_bytes(random) % below.len() as u16;
        match listen(port) {
            Err(error) if error.kind() == ErrorKind::AddrInUse => {}
            listener => return listener.map(|_| port),
        }
    }
    Ok(listen(0)?.local_addr()?.port())
}

/// The least port that the system gives to connections; `None` if it does not say.
fn first_port_of_connections() -> Option<u16> {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok()?;
    range.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_free_port_is_none_that_a_connection_gets() {
        let port = free_port().unwrap();
        let first = first_port_of_connections().unwrap();
        assert!(
            first <= PORT_MIN || (PORT_MIN..first).contains(&port),
            "{port}, and connections from {first} on"
        );
        assert!(TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok());
    }
}
