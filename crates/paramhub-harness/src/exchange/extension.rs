//! The extension points by which further benchmarks add to the processes of the exchange.

use std::net::SocketAddr;

use anyhow::bail;
use paramhub::service::ServiceCreated;
use paramhub::{Job, Registry};
use serde_json::Value;

use super::messages::JsonConnection;
use super::spec::Spec;

/// The parts that the benchmarks of a program add to the exchange: variants of it, which replace
/// parts of the hub or of the worker, and scenarios whose processes do something else. What is
/// provided here is the exchange alone.
pub trait Extension {
    /// The optimizers and aggregators of the hubs of this exchange, under the usual names.
    ///
    /// # Errors
    /// If the exchange is of a variant that cannot be.
    fn registry(&self, _spec: &Spec) -> anyhow::Result<Registry> {
        Ok(Registry::with_builtins())
    }

    /// Starts the server that takes the hub's place in this exchange; `None` if a hub serves it.
    ///
    /// # Errors
    /// If the server cannot start.
    fn serve(&self, _spec: &Spec) -> anyhow::Result<Option<CoreServer>> {
        Ok(None)
    }

    /// Joins such a server's job as this rank; `None` if a hub serves the exchange.
    ///
    /// # Errors
    /// If the server cannot be reached.
    fn join(
        &self,
        _spec: &Spec,
        _rank: u32,
        _job: &ServiceCreated,
        _addresses: &[SocketAddr],
    ) -> anyhow::Result<Option<Job>> {
        Ok(None)
    }

    /// Runs this process in a scenario of another benchmark, from the scenario's first command on.
    ///
    /// # Errors
    /// If the program has no such scenario, or it fails.
    fn run_scenario(
        &self,
        scenario: &str,
        _command: Value,
        _connection: &mut JsonConnection,
    ) -> anyhow::Result<()> {
        bail!("this program has no benchmark `{scenario}`: its launcher is another paramhub")
    }
}

/// A server without a manager, whose cores have workers of their own.
pub struct CoreServer {
    /// The job that it serves.
    pub job: ServiceCreated,
    /// The address of each core. Rank `r` belongs to core `r` modulo their number.
    pub addresses: Vec<SocketAddr>,
}
