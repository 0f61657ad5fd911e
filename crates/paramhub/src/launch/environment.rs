//! What a worker finds in its environment.

use std::net::{Ipv4Addr, TcpListener};
use std::process::Command;

use paramhub_core::service::ServiceCreated;

/// One worker's place in a job.
pub(crate) struct Seat<'a> {
    pub(crate) rank: u32,
    pub(crate) workers: u32,
    /// Among those of this machine.
    pub(crate) local_rank: u32,
    pub(crate) local_workers: u32,
    pub(crate) url: &'a str,
    pub(crate) job: &'a ServiceCreated,
}

impl Seat<'_> {
    /// Tells the worker where and as whom to join.
    pub(crate) fn prepare(&self, command: &mut Command) {
        command
            .env("RANK", self.rank.to_string())
            .env("LOCAL_RANK", self.local_rank.to_string())
            .env("WORLD_SIZE", self.workers.to_string())
            .env("LOCAL_WORLD_SIZE", self.local_workers.to_string())
            .env("PARAMHUB_URL", self.url)
            .env("PARAMHUB_JOB", self.job.namespace.to_string())
            .env("PARAMHUB_SECRET", String::from(self.job.nonce))
            // The operator's token is more than a worker needs.
            .env_remove("PARAMHUB_ADMIN_TOKEN");
    }
}

/// A loopback port that nobody listens on now, for frameworks that want a MASTER_PORT of their own.
pub(crate) fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}
