//! A parameter hub for distributed deep-learning training.
//!
//! The workers of a job push their gradients. A hub sums each chunk of them as it arrives, runs the optimizer
//! on it and sends the new parameters back. This crate is the public API of all its parts. The program that
//! comes with it, `paramhub`, starts hubs (`paramhub hub`) and workers (`paramhub run`), and shows both at
//! work (`paramhub train`).
//!
//! # A worker
//!
//! [`Membership::from_env`] reads the environment variables that `paramhub run -n 4 -- ./worker` sets for
//! each worker, [`Member::connect`] waits for the other workers, and [`Member::init`] agrees with them on the
//! tensors and on what the hub does with them:
//!
//! ```no_run
//! use paramhub::settings::{OptimizerChoice, Settings};
//! use paramhub::{Hyperparameters, Key, KeyTable, Member, Membership};
//!
//! let member = Member::connect(Membership::from_env()?)?;
//! let keys = KeyTable::new(vec![Key::new("layer1.weight", [128, 64]), Key::new("layer1.bias", [128])])?;
//! let hyperparameters = Hyperparameters { learning_rate: 0.02, momentum: 0.9, ..Default::default() };
//! let optimizer = OptimizerChoice { hyperparameters: Some(hyperparameters), ..OptimizerChoice::named("sgd") };
//! let job = member.init(Settings { optimizer, ..Settings::new(keys) })?;
//! # let (weight_gradient, weight) = (vec![0.0_f32; 128 * 64], vec![0.0_f32; 128 * 64]);
//!
//! // Fused Push and Pull of key 0, the first of the table: the gradient leaves at once, and the new
//! // parameters arrive while this worker computes on.
//! let weight = job.push_pull(0, weight_gradient, weight)?;
//! // ... the backward pass of the layers below ...
//! let (weight_gradient, weight) = weight.wait()?;
//! job.leave()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # A hub
//!
//! [`embedded::EmbeddedHub`] runs the connection manager and a hub inside this process. A job is created at the
//! manager, which answers with the namespace and the nonce, the job's secret, that its workers need:
//!
//! ```no_run
//! use paramhub::embedded::{EmbeddedConfig, EmbeddedHub};
//! use paramhub::service::CreateService;
//!
//! let hub = EmbeddedHub::start(EmbeddedConfig::default())?;
//! let request = CreateService { name: "digits".into(), workers: 4, options: Default::default() };
//! let job = hub.client().create_service(&request)?;
//! println!("join job {} at {}", job.namespace, hub.url());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Either with a hub or without
//!
//! A [key-value store](collective::kvstore) exchanges through a hub or by collectives, as one argument
//! selects. It exchanges in operations of a [dependency engine](collective::engine), which may run beside
//! operations of yours that compute:
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use paramhub::Membership;
//! use paramhub::collective::engine::{Engine, EngineConfig};
//! use paramhub::collective::kvstore::{Array, HubStoreConfig, StoreKind, StoreOptions, create};
//!
//! let engine = Arc::new(Engine::new(EngineConfig::default())?);
//! let config = HubStoreConfig::new(Membership::from_env()?);
//! let store = create(StoreKind::Hub, StoreOptions::at_hub(Arc::clone(&engine), config))?;
//! let weight = [Array::new(&engine, vec![0.0; 128 * 64])];
//! store.init(&"layer1.weight".into(), &weight[0])?;
//! let priority = 0;
//! store.pushpull(&"layer1.weight".into(), &weight, &weight, priority)?;
//! engine.wait_for_var(weight[0].variable())?;
//! store.leave()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Optimizers and aggregators of your own go into the hub's [`Registry`]; see [`Optimizer`] and [`Aggregator`].
//! Codecs of your own are registered by [`register_codec`].
#![forbid(unsafe_code)]

pub mod embedded;

pub use paramhub_collective as collective;
pub use paramhub_control::{ControlError, DEFAULT_URL, ManagerClient};
pub use paramhub_core::codec::{Codec, Dtype};
pub use paramhub_core::consistency::Consistency;
pub use paramhub_core::hyperparameters::Hyperparameters;
pub use paramhub_core::key::{Key, KeyTable};
pub use paramhub_core::stragglers::Stragglers;
pub use paramhub_core::{auth, checkpoint, composition, cost, limits, placement, scheme, service, settings};
pub use paramhub_hub::{CheckpointConfig, HubConfig, HubError, JobLimits, Rate, RunningHub, Selector};
pub use paramhub_kernels::{
    Aggregator, Optimizer, QuantisedCodec, QuantisedFormat, RegisterCodecError, Registry, register_codec,
};
pub use paramhub_manager::{
    CertificateFiles, EtcdAddress, Manager, ManagerConfig, ManagerError, RunningManager,
};
pub use paramhub_manager::{restore as restore_state, restore_to_etcd as restore_state_to_etcd};
pub use paramhub_mesh as mesh;
pub use paramhub_transport::host_identity;
pub use paramhub_worker::{
    FactorBuffers, FactorHandle, Handle, HubNotice, Job, Member, Membership, Options, ParameterSharing,
    SharedTensor, Statistics, Tensor, Transport, WorkerError,
};

/// The examples in the documentation compile.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../../docs/getting-started.md")]
    struct GettingStarted;
    #[doc = include_str!("../../../docs/collectives.md")]
    struct Collectives;
    #[doc = include_str!("../../../docs/poseidon.md")]
    struct Poseidon;
}
