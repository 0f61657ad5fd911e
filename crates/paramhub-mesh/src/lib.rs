//! A mesh of connections between the workers of a job, and collectives over it.
//!
//! A hub exchanges gradients. A mesh carries everything else that workers exchange: broadcasts, gathers,
//! integers, maxima, and messages from one to another. [`MeshListener::join`] connects every rank with every
//! other; [`Mesh`] has the operations.
//!
//! ```
//! use std::net::{IpAddr, Ipv4Addr};
//! use paramhub_mesh::{ElementType, MeshConfig, MeshListener, Nonce, ReduceOp};
//! use paramhub_transport::lend;
//!
//! let listeners: Vec<MeshListener> =
//!     (0..3).map(|_| MeshListener::bind(IpAddr::V4(Ipv4Addr::LOCALHOST)).unwrap()).collect();
//! let addresses: Vec<_> = listeners.iter().map(MeshListener::address).collect();
//! std::thread::scope(|scope| {
//!     for (rank, listener) in listeners.into_iter().enumerate() {
//!         let config = MeshConfig::new(rank as u32, Nonce([7; 32]), addresses.clone());
//!         scope.spawn(move || {
//!             let mesh = listener.join(config).unwrap();
//!             let mut values = [rank as f32, 1.0];
//!             lend(|lending| {
//!                 mesh.allreduce(lending.receive(&mut values), ElementType::F32, ReduceOp::Sum)?.wait()
//!             })
//!             .unwrap();
//!             assert_eq!(values, [3.0, 3.0]);
//!             mesh.leave(std::time::Duration::from_secs(10)).unwrap();
//!         });
//!     }
//! });
//! ```
//!
//! The modules without sockets are apart from those that move bytes: `schedule` lists the steps of a rank for
//! a collective, `arithmetic` reduces, and `wire` encodes and decodes; `join` makes the connections, and
//! `progress_engine`, one thread a mesh, does the rest. Collectives between ranks of one host go through
//! `memory` instead.

#![forbid(unsafe_code)]

mod arithmetic;
mod command;
mod config;
mod descriptor;
mod element;
mod error;
mod handle;
mod join;
mod memory;
mod mesh;
mod noted;
mod operation;
mod probe;
mod progress_engine;
mod schedule;
mod secrets;
mod socket;
mod wire;

pub use config::MeshConfig;
pub use element::{ElementType, ReduceOp};
pub use error::{MeshError, MeshRank};
pub use handle::Handle;
pub use join::MeshListener;
pub use mesh::Mesh;
pub use noted::Noted;
pub use probe::{Bandwidths, Pairs, Probe};
pub use secrets::MeshSecrets;
// The types that these signatures use, so that a caller needs this crate alone.
pub use paramhub_core::auth::Nonce;
pub use paramhub_core::cost::Rate;
pub use paramhub_transport::{ReceiveRegion, SendRegion};
