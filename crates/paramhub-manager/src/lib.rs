//! The connection manager: jobs, rendezvous and hubs behind JSON over HTTP, with an embedded store.
//!
//! It keeps PHub's calls (section 3.1): CreateService makes a job, ConnectService lets its ranks meet in any order,
//! InitService has them agree on what they exchange and the hubs allocate for it. After that workers and hubs speak to
//! each other alone, and the manager only listens to what the hubs tell.
//!
//! This is the only crate with an executor, and it keeps it to itself: [`Manager::start`] runs the manager on threads of
//! its own, so that a blocking program can embed one.
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
//! From the outside inwards: `server` takes connections, for which there are `places`, `routes` says who may call what, `rendezvous` lets ranks wait,
//! `registry` guards the `world` of jobs and hubs and saves it to the `store`, and `job` is one job's state machine.
#![forbid(unsafe_code)]

mod allocation;
mod auth;
mod body;
mod clock;
mod config;
mod error;
mod host;
mod hubs;
mod job;
mod line;
mod manager;
mod metrics;
mod openapi;
mod places;
mod probes;
mod registry;
mod rendezvous;
mod routes;
mod server;
mod store;
mod world;

pub use config::ManagerConfig;
pub use error::ManagerError;
pub use manager::{Manager, RunningManager};
