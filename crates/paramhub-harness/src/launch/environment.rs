//! The variables in the environment of a worker.

use std::net::{Ipv4Addr, TcpListener};
use std::process::Command;

use paramhub_core::service::ServiceCreated;

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

/// A loopback port on which no process listens now, for frameworks that want a MASTER_PORT of their own.
///
/// # Errors
/// If the system has none.
pub fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}
