//! The connection manager: jobs, rendezvous and hubs behind JSON over HTTP, with an embedded store.
//!
//! It keeps PHub's calls (section 3.1): CreateService makes a job, ConnectService lets its ranks meet in any
//! order, and InitService has them agree on what they exchange and the hubs allocate memory for it. After
//! that workers and hubs exchange without the manager, which only receives the hubs' reports.
//!
//! This is the only crate with an executor, and its callers do not see it: [`Manager::start`] runs the
//! manager on threads of its own, so that a blocking program can embed one.
//!
//! ```
//! use paramhub_manager::{Manager, ManagerConfig};
//!
//! let config = ManagerConfig { listen: "127.0.0.1:0".parse().unwrap(), ..ManagerConfig::default() };
//! let manager = Manager::start(config)?;
//! println!("a connection manager answers at {}", manager.url());
//! manager.stop();
//! # Ok::<(), paramhub_manager::ManagerError>(())
//! ```
//!
//! From the outside inwards: `server` accepts connections, for which there are `connection_slots`, in clear or over
//! `tls`; `routes`
//! decides which caller may call which route; `rendezvous` lets ranks wait, each as a `caller`; `registry`
//! guards the `state` of jobs and hubs and saves it to the `store`. Which hubs and ranks may join, when a
//! rendezvous is complete, and when hubs and jobs end is decided by the state machine in
//! [`paramhub_core::membership`].
#![forbid(unsafe_code)]

mod allocation;
mod answered_requests;
mod auth;
mod backup;
mod body;
mod caller;
mod clock;
mod config;
mod connection_slots;
mod error;
mod host;
mod hub_queues;
mod key_table_budgets;
mod log;
mod manager;
mod metered_stream;
mod metrics;
mod openapi;
mod registry;
mod rendezvous;
mod routes;
mod server;
mod state;
mod store;
mod tls;

pub use backup::restore;
pub use config::ManagerConfig;
pub use error::ManagerError;
pub use manager::{Manager, RunningManager};
pub use paramhub_trust::CertificateFiles;
