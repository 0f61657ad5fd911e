//! The options of a job.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::is_default;
use crate::checkpoint::{Every, Resume};
use crate::composition::{OptimizeAt, Reduction};
#[cfg(doc)]
use crate::limits::WEIGHT_MAX;
use crate::settings::Settings;
use crate::stragglers::Stragglers;

/// Waits and lifetimes of one job, in seconds, and its policies. A hub that does not know an option refuses
/// the job.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct JobOptions {
    /// The time that ConnectService, InitService and the opening of all streams may each take, 0.1 to 86,400;
    /// the error lists the missing ranks or hubs.
    pub rendezvous_timeout_s: f64,
    /// Ends a job that does not run yet, when no worker has called for so long and no call waits; 0.1 to
    /// 604,800. It never ends a job that runs at hubs.
    pub lease_s: f64,
    /// The time that a worker may be silent on its streams before the job fails; 1 to 86,400, and at least 15
    /// with `on_interface_down` `continue`.
    pub dead_after_s: f64,
    /// The way in which the sums of sites become those of all workers, if hubs serve racks or hosts.
    pub reduction: Reduction,
    /// The place where the optimizer runs if there are several sites.
    pub optimize_at: OptimizeAt,
    /// The job's share of a hub core's time, relative to the other jobs with work there; 1 to 100.
    /// The creator of the job sets it, not its workers.
    #[serde(skip_serializing_if = "is_one")]
    pub weight: u32,
    /// The number of hubs, at most 1,024, for which ConnectService waits; hubs of single hosts do not count.
    /// Every hub that has joined by then serves the job. `None` waits for the first hub only. With 0 the
    /// ranks only meet, no hub serves them, and options that only a hub can follow are refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hubs: Option<u32>,
    /// The reaction of the job when a network interface that its streams use goes down.
    #[serde(skip_serializing_if = "is_default")]
    pub on_interface_down: OnInterfaceDown,
    /// Encrypts the streams between hosts: those of workers to hubs, of hubs to one another, and of meshes. Hubs can
    /// demand it of all jobs.
    #[serde(skip_serializing_if = "is_default")]
    pub encrypt: bool,
    /// The treatment of workers that are late in a step: `wait`, `drop:FRACTION` or `backup:N`. All but
    /// `wait` are for synchronous jobs at one site with an optimizer; see
    /// [`combinations`](crate::combinations).
    #[serde(skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, example = "backup:1"))]
    pub stragglers: Stragglers,
    /// The time that the ranks may wait for one of them before the job ends with that rank's name, 1 to
    /// 604,800; with `None` the wait is only reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress_timeout_s: Option<f64>,
    /// The interval at which the job's hubs write a checkpoint: `1000` (steps) or `30s`; `None` writes none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub checkpoint_every: Option<Every>,
    /// The checkpoint from which parameters, optimizer state, step and hyperparameters come: `latest`, or a
    /// number of steps as text; with `None` the job begins with rank 0's.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub resume: Option<Resume>,
}

impl JobOptions {
    /// Returns whether streams continue over other interfaces.
    pub fn continues(&self) -> bool {
        self.on_interface_down == OnInterfaceDown::Continue
    }

    /// The divisor of the steps in which gradients do not include the residuals of quantised gradients before
    /// them. Residuals are each worker's own and in no checkpoint. In a reproducible job, a run that goes on
    /// from a checkpoint and a run that was never interrupted must be equal after the checkpoint.
    pub fn residuals_begin_every(&self, settings: &Settings) -> Option<NonZeroU32> {
        match self.checkpoint_every {
            Some(Every::Steps(steps)) if settings.reproducible => Some(steps),
            _ => None,
        }
    }
}

/// The reaction of a job when an interface goes down. `fail`: the job fails, with the interface's name.
/// `continue`: its streams continue over the remaining interfaces; only for synchronous jobs at one site
/// whose steps have one phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum OnInterfaceDown {
    /// The job fails, with the interface's name.
    #[default]
    Fail,
    /// Its streams continue over the remaining interfaces, as long as there are any. Only for synchronous
    /// jobs at one site whose steps have one phase; see [`combinations`](crate::combinations).
    Continue,
}

impl fmt::Display for OnInterfaceDown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OnInterfaceDown::Fail => "fail",
            OnInterfaceDown::Continue => "continue",
        })
    }
}

impl FromStr for OnInterfaceDown {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "fail" => Ok(OnInterfaceDown::Fail),
            "continue" => Ok(OnInterfaceDown::Continue),
            _ => Err(format!("`{text}` is not what can be done about it: expected fail or continue")),
        }
    }
}

/// Returns whether a job has the default weight, which is left out so that older hubs understand the text.
fn is_one(weight: &u32) -> bool {
    *weight == 1
}

impl Default for JobOptions {
    fn default() -> Self {
        JobOptions {
            rendezvous_timeout_s: 60.0,
            lease_s: 120.0,
            dead_after_s: 30.0,
            hubs: None,
            encrypt: false,
            on_interface_down: OnInterfaceDown::default(),
            stragglers: Stragglers::default(),
            progress_timeout_s: None,
            checkpoint_every: None,
            resume: None,
            weight: 1,
            reduction: Reduction::default(),
            optimize_at: OptimizeAt::default(),
        }
    }
}
