//! The worker's client: a [`Job`], through which a worker pushes and pulls tensors.
//!
//! ```no_run
//! use paramhub_core::key::{Key, KeyTable};
//! use paramhub_core::settings::Settings;
//! use paramhub_worker::{Member, Membership};
//!
//! let member = Member::connect(Membership::from_env()?)?; // returns when every rank is here
//! let keys = KeyTable::new(vec![Key::new("weight", [1000]), Key::new("bias", [10])])?;
//! let job = member.init(Settings::new(keys))?;
//!
//! let weight = job.push_pull(0, vec![1.0_f32; 1000], vec![0.0_f32; 1000])?;
//! let bias = job.push_pull(1, vec![1.0_f32; 10], vec![0.0_f32; 10])?; // small, so it does not wait for the first
//! let (_gradient, mean) = bias.wait()?;
//! assert_eq!(mean, [1.0; 10]);
//! weight.wait()?;
//! job.leave()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! One I/O thread serves all streams of a job; each stream leads to one hub core that owns some of the job's
//! chunks. The I/O thread sends gradients straight from the caller's buffers and receives parameters straight
//! into them. The caller hands the buffers over with a request and gets them back at its end, so the data
//! path allocates nothing, locks nothing and logs nothing per chunk.
//!
//! Between a worker and a hub on the same host tensors do not travel at all: they lie in an arena that the
//! hub maps, and a frame says only which chunk is ready. The client copies buffers into the arena and back, but
//! not those of [`Job::gradient_tensor`] and [`Job::parameter_tensor`], which lie there. [`Options::transport`]
//! can ask for TCP instead.
//!
//! This is the way of a request: [`Job`] checks it and claims its key, an inbox takes it to the I/O thread, the
//! lane of each stream sends its chunks by urgency, `inbound` checks the answers and says where they belong, and
//! the [`Handle`] gives the buffers back.
#![forbid(unsafe_code)]

mod arena;
mod command;
mod dial;
mod error;
mod handle;
mod inbound;
mod interfaces;
mod io_loop;
mod job;
mod job_config;
mod lane;
mod lease;
mod loss_report;
mod member;
mod membership;
mod norms;
mod notices;
mod options;
mod program_state;
mod quantisation;
mod region_request;
mod request_groups;
mod requests_in_flight;
mod resume;
mod scope;
mod share_hubs;
mod staging;
mod statistics;
mod steps;

pub use error::{WorkerError, WorkerId};
pub use handle::{Finished, Handle};
pub use job::{AbortHandle, FactorBuffers, FactorHandle, FactorRegions, Job};
pub use job_config::JobConfig;
pub use lease::JobLease;
pub use member::Member;
pub use membership::Membership;
pub use notices::HubNotice;
pub use options::{Options, ParameterSharing, Transport};
pub use paramhub_transport::interface::Selector;
pub use paramhub_transport::shm::{SharedTensor, Tensor};
pub use region_request::RegionRequest;
pub use scope::Scope;
pub use statistics::Statistics;
