//! The blocking HTTP client with which hubs, workers and the command line call the connection manager.
//!
//! A manager on another machine is called over TLS. A worker recognises it by the authority's fingerprint in the
//! job's secret, the bearer of a token by the manager's proof that it knows the token.
//!
//! Several managers that share one store are one for a client that has their URLs: a call goes to the one that leads.
//!
//! Every call opens its own connection: calls are rare, and without a pool no call can fail because a kept
//! connection has gone stale. Requests and answers are the types of [`paramhub_core::service`].
//!
//! ```no_run
//! use paramhub_control::ManagerClient;
//! use paramhub_core::service::CreateService;
//!
//! let manager = ManagerClient::new(paramhub_control::DEFAULT_URL, None)?;
//! let job = CreateService { name: "digits".into(), workers: 4, options: Default::default() };
//! let created = manager.create_service(&job)?;
//! println!("namespace {}", created.namespace);
//! # Ok::<(), paramhub_control::ControlError>(())
//! ```
#![forbid(unsafe_code)]

mod address;
mod call;
mod client;
mod error;
mod managers;
mod tls;

pub use client::ManagerClient;
pub use error::ControlError;

/// The manager's URL where the user gives none: loopback,
/// [`MANAGER_PORT`](paramhub_core::service::MANAGER_PORT).
pub const DEFAULT_URL: &str = "http://127.0.0.1:7770";
