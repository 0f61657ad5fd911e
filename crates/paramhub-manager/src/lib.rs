//! The connection manager: jobs, rendezvous and hubs behind JSON over HTTP, with an embedded store or, behind the feature
//! `etcd`, one that several managers share.
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
//! `tls`; `frontend` has what answers them, which is the registry, or the `follower` while another manager leads; `routes`
//! decides which caller may call which route; `rendezvous` lets ranks wait, each as a `caller`; `registry`
//! guards the `state` of jobs and hubs for a `term` and saves it to the `store`. Which hubs and ranks may join, when a
//! rendezvous is complete, and when hubs and jobs end is decided by the state machine in
//! [`paramhub_core::membership`].
#![forbid(unsafe_code)]

mod access;
mod allocation;
mod answered_requests;
mod auth;
mod backup;
mod blocking;
mod body;
mod caller;
mod clock;
mod config;
mod connection_slots;
mod error;
#[cfg(feature = "etcd")]
mod etcd;
mod etcd_address;
mod follower;
mod frontend;
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
#[cfg_attr(not(feature = "etcd"), allow(dead_code, reason = "only managers that share a store need it"))]
mod term;
mod tls;

pub use backup::{restore, restore_to_etcd};
pub use config::ManagerConfig;
pub use error::ManagerError;
pub use etcd_address::EtcdAddress;
pub use manager::{Manager, RunningManager};
pub use paramhub_trust::CertificateFiles;
