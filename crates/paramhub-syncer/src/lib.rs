//! Exchanges each layer by its own scheme: through the hub, or by sufficient factors between the workers
//! where the factors have fewer numbers than the gradient (Poseidon sections 3.2 and 4.1).
//!
//! A training loop holds [`Syncers`]. Below them, [`FactorExchange`] can be used by itself:
//!
//! Rank r's batch gives a fully connected layer K rows of inputs and K rows of output gradients.
//! [`FactorExchange::push`] sends both to every other worker. When all have come, each worker computes the
//! sum of all gradients from them and runs the hub's own optimizer kernel on it, tile by tile, while the tile
//! is in cache. The parameters never travel: all workers keep copies of them, with equal bits.
//!
//! ```
//! use std::net::{IpAddr, Ipv4Addr};
//! use std::sync::mpsc::channel;
//! use paramhub_mesh::{MeshConfig, MeshListener, Nonce};
//! use paramhub_kernels::Registry;
//! use paramhub_syncer::{FactorConfig, FactorExchange, FactorLayer, LayerFactors, Outputs};
//! use paramhub_transport::ReceiveRegion;
//!
//! let listeners: Vec<_> =
//!     (0..2).map(|_| MeshListener::bind(IpAddr::V4(Ipv4Addr::LOCALHOST)).unwrap()).collect();
//! let addresses: Vec<_> = listeners.iter().map(MeshListener::address).collect();
//! std::thread::scope(|scope| {
//!     for (rank, listener) in listeners.into_iter().enumerate() {
//!         let config = MeshConfig::new(rank as u32, Nonce([7; 32]), addresses.clone());
//!         scope.spawn(move || {
//!             let optimizer = Registry::with_builtins().optimizer("sgd").unwrap();
//!             let mut hyperparameters = optimizer.defaults();
//!             hyperparameters.learning_rate = 1.0;
//!             let config = FactorConfig::new(listener.join(config).unwrap(), optimizer, hyperparameters);
//!             // Two outputs, three inputs, one sample a worker and step.
//!             let exchange = FactorExchange::new(config, vec![FactorLayer::new("fc", (2, 3), 1)]).unwrap();
//!             exchange.initialise(0, &[0.0; 6], &[], 0).unwrap();
//!             let (inputs, output_gradients) = ([1.0_f32, 2.0, 3.0], [rank as f32, 1.0]);
//!             let outputs = Outputs { weight: ReceiveRegion::owned(vec![0.0_f32; 6]), bias: None };
//!             let (sender, receiver) = channel();
//!             let factors = LayerFactors::of_f32(&inputs, &output_gradients);
//!             exchange.push(0, factors, outputs, move |updated| sender.send(updated).unwrap()).unwrap();
//!             let weight: Vec<f32> = receiver.recv().unwrap().unwrap().weight.into_owned().unwrap();
//!             // The mean of both workers' outer products, stepped against.
//!             assert_eq!(weight, [-0.5, -1.0, -1.5, -1.0, -2.0, -3.0]);
//!             exchange.leave(std::time::Duration::from_secs(10)).unwrap();
//!         });
//!     }
//! });
//! ```
#![forbid(unsafe_code)]

mod completion;
mod error;
mod exchange;
mod layer;
mod message;
mod open;
mod parameters;
mod peer_listener;
mod plan;
mod syncer;
mod syncers;

pub use error::SyncError;
pub use exchange::{FactorConfig, FactorExchange, FactorStatistics};
pub use layer::{FactorLayer, LayerFactors, Outputs};
pub use open::open_factors;
pub use peer_listener::{PeerAddresses, PeerListener, PortRange, address_towards};
pub use plan::{PlannedFactors, planned_factors};
pub use syncers::{SyncStatistics, Syncers};
