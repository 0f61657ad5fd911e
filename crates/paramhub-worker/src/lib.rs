//! The worker's client: a job handle whose Push, Pull and PushPull move tensors through a hub.
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
//! let bias = job.push_pull(1, vec![1.0_f32; 10], vec![0.0_f32; 10])?; // small, late, and still not held up
//! let (_gradient, mean) = bias.wait()?;
//! assert_eq!(mean, [1.0; 10]);
//! weight.wait()?;
//! job.leave()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! One I/O thread serves all streams of a job, one to each hub core that owns some of its chunks. Gradients leave from
//! where they lie and parameters arrive where they are wanted; what a request needs is handed to the I/O thread and handed
//! back, so the data path allocates nothing, locks nothing and logs nothing per chunk.
//!
//! To a hub on the same host tensors do not travel at all: they lie in an arena that the hub maps, and frames only say
//! which chunk is ready. Any buffer is copied there and back; those of [`Job::gradient_tensor`] and
//! [`Job::parameter_tensor`] lie there already. [`Options::transport`] chooses otherwise.
//!
//! A request's way through these modules: [`Job`] checks it and claims its key, the inbox takes it to the I/O thread, a
//! lane (one stream's sending side) sends its chunks by urgency, the inbound side lands the answers, and the [`Handle`]
//! gives the buffers back.
#![forbid(unsafe_code)]

mod admission;
mod arena;
mod attendance;
mod desk;
mod dial;
mod engine;
mod errand;
mod error;
mod handle;
mod inbound;
mod inbox;
mod interfaces;
mod job;
mod lane;
mod member;
mod membership;
mod norms;
mod notices;
mod options;
mod quantised;
mod resume;
mod retunes;
mod scope;
mod staging;
mod statistics;
mod steps;

pub use admission::Admission;
pub use attendance::Attendance;
pub use errand::Errand;
pub use error::{Who, WorkerError};
pub use handle::{Finished, Handle};
pub use job::{FactorBuffers, FactorHandle, FactorRegions, Job, Resignation};
pub use member::Member;
pub use membership::Membership;
pub use notices::HubNotice;
pub use options::{Options, Sharing, Transport};
pub use paramhub_transport::interface::Selector;
pub use paramhub_transport::shm::{SharedTensor, Tensor};
pub use scope::Scope;
pub use statistics::Statistics;
