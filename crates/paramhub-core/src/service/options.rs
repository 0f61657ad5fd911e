//! The options of a job.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{HubLabel, is_default};
use crate::checkpoint::{Every, Resume};
use crate::composition::{BetweenSites, OptimizeAt, Reduction};
#[cfg(doc)]
use crate::limits::WEIGHT_MAX;
use crate::limits::{REDIAL_GRACE_S, REDIAL_GRACE_S_MAX};
use crate::settings::Settings;
use crate::stragglers::{Quorum, Stragglers};

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
    /// The encoding in which sums cross between racks and hosts, if hubs serve them.
    #[serde(skip_serializing_if = "is_default")]
    pub between_sites: BetweenSites,
    /// The job's share of a hub core's time, relative to the other jobs with work there; 1 to 100.
    /// The creator of the job sets it, not its workers.
    #[serde(skip_serializing_if = "is_one")]
    pub weight: u32,
    /// The number of hubs, at most 1,024, for which ConnectService waits; hubs of single hosts do not count.
    /// Every hub that has joined by then serves the job, up to `max_hubs`. `None` waits for the first hub only. With 0 the
    /// ranks only meet, no hub serves them, and options that only a hub can follow are refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hubs: Option<u32>,
    /// The most hubs that serve the job when it begins, those with the fewest jobs: whatever happens to another hub leaves it
    /// alone. Hubs of racks and of hosts do not count. `None` for all that have joined. Hubs and workers do not hear of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_hubs: Option<u32>,
    /// The label that hubs must have to serve the job; those of single hosts need none. `None` for any hub. Hubs and workers do
    /// not hear of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hub_label: Option<HubLabel>,
    /// The reaction of the job when a network interface that its streams use goes down.
    #[serde(skip_serializing_if = "is_default")]
    pub on_interface_down: OnInterfaceDown,
    /// The time for which a hub or a worker waits for a worker whose connection was cut, and for which that worker dials
    /// again, 0 to 60; the worker is lost after that. With 0 it is lost at once. A worker whose process has ended is lost
    /// at once where the system says so. The hubs of jobs whose streams cannot be [resumed](crate::combinations) do not
    /// wait.
    #[serde(skip_serializing_if = "is_default_redial_grace")]
    pub redial_grace_s: f64,
    /// The reaction of the job when a worker is lost.
    #[serde(skip_serializing_if = "is_default")]
    pub on_worker_loss: OnWorkerLoss,
    /// The number of standbys of each chunk, 0 or 1. With 1 another hub makes the same updates from the same sums, and takes
    /// over inside the step when the hub is lost. Such a job waits for two hubs or more. Only for some jobs; see
    /// [`combinations`](crate::combinations).
    #[serde(skip_serializing_if = "is_default")]
    pub replicas: u32,
    /// With `on_worker_loss` `continue`: the least number of workers that steps go on with; at least 1 and at most the
    /// number of ranks.
    #[serde(skip_serializing_if = "is_one")]
    pub min_workers: u32,
    /// The number of ranks with which the job begins, 1 to the number of all its ranks, beginning with rank 0. The others
    /// may join while it runs with `on_worker_loss` `continue`; with `rewind` there may be another number of ranks, from rank
    /// 0 on, whenever all of them have been started again. `None` begins with all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_workers: Option<u32>,
    /// With `on_worker_loss` `rewind`: the number of steps from one to which the job can go back to the next, 1 to
    /// 1,000. The hubs keep a copy of parameters and optimizer state.
    #[serde(skip_serializing_if = "is_one")]
    pub rewind_every: u32,
    /// Unless `on_worker_loss` is `fail`: the time for which the job waits for other processes while it has fewer
    /// workers than it needs for a step, 1 to 604,800; it fails after that.
    #[serde(skip_serializing_if = "is_default_linger")]
    pub linger_s: f64,
    /// The largest number of bytes of a program state, 0 to 67,108,864. Of each rank a hub keeps the three newest states
    /// that the rank saves. With 0 none can be saved.
    #[serde(skip_serializing_if = "is_default")]
    pub program_state_bytes: u32,
    /// Encrypts the streams between hosts: those of workers to hubs, of hubs to one another, and of meshes. Hubs can
    /// demand it of all jobs.
    #[serde(skip_serializing_if = "is_default")]
    pub encrypt: bool,
    /// The treatment of workers that are late in a step: `wait`, `drop:FRACTION` or `backup:N`. All but
    /// `wait` are for synchronous jobs with an optimizer; see
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
    /// The checkpoint from which parameters, optimizer state, step and hyperparameters come: `latest`; a
    /// number of steps as text; or `auto`, the newest of the last run of this name unless that has finished. With
    /// `None`, or with `auto` and no such checkpoint, the job begins with rank 0's.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub resume: Option<Resume>,
}

impl JobOptions {
    /// How long a connection that was cut may take to be made again, where that is possible.
    pub fn redial_grace(&self) -> Duration {
        Duration::try_from_secs_f64(self.redial_grace_s.min(REDIAL_GRACE_S_MAX)).unwrap_or_default()
    }

    /// Returns whether another hub stands by for each chunk.
    pub fn has_standbys(&self) -> bool {
        self.replicas > 0
    }

    /// Returns whether the job goes on when a worker is lost.
    pub fn outlives_workers(&self) -> bool {
        self.on_worker_loss != OnWorkerLoss::Fail
    }

    /// Returns whether all ranks go back to an earlier step when a worker is lost.
    pub fn rewinds(&self) -> bool {
        self.on_worker_loss == OnWorkerLoss::Rewind
    }

    /// Returns whether the job begins again from its newest checkpoint when a hub is lost.
    pub fn outlives_hubs(&self) -> bool {
        self.rewinds() && self.checkpoint_every.is_some()
    }

    /// Returns whether the hubs keep copies of earlier steps, to which ranks go back. Hubs that exchange sums with one another, at
    /// several sites or with standbys, keep none: the ranks of such a job go back to a checkpoint.
    pub fn keeps_copies(&self, has_several_sites: bool) -> bool {
        self.rewinds() && !has_several_sites && !self.has_standbys()
    }

    /// The number of a job's ranks that are there when it begins.
    pub fn first_workers(&self, workers: u32) -> u32 {
        self.start_workers.map_or(workers, |first| first.min(workers))
    }

    /// The least number of a job's workers that make steps, if the job goes on when workers are lost.
    pub fn least_workers(&self, workers: u32) -> Option<u32> {
        match self.on_worker_loss {
            OnWorkerLoss::Fail => None,
            OnWorkerLoss::Continue => Some(self.min_workers),
            OnWorkerLoss::Rewind => Some(workers),
        }
    }

    /// The time that the InitService of a process that takes a lost rank may take, in seconds. In a job whose ranks go back
    /// it waits for the processes of all ranks.
    pub fn join_timeout_s(&self) -> f64 {
        match self.rewinds() {
            true => self.rendezvous_timeout_s.max(self.linger_s),
            false => self.rendezvous_timeout_s,
        }
    }

    /// The condition that ends a chunk's step without some of this many workers; `None` if it waits for all of them.
    pub fn quorum(&self, workers: u32) -> Option<Quorum> {
        match self.on_worker_loss {
            OnWorkerLoss::Continue => Some(Quorum::NotLost { least: self.min_workers }),
            OnWorkerLoss::Fail | OnWorkerLoss::Rewind => self.stragglers.quorum(workers),
        }
    }

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

/// The options that differ from their defaults, each with its value, as in `weight 3, stragglers drop:0.5`.
impl fmt::Display for JobOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn set<T: fmt::Display>(value: &Option<T>) -> Option<&dyn fmt::Display> {
            value.as_ref().map(|value| value as &dyn fmt::Display)
        }
        fn changed<'a, T: PartialEq + fmt::Display>(value: &'a T, usual: &T) -> Option<&'a dyn fmt::Display> {
            (value != usual).then_some(value)
        }
        // Named one by one, so that a new option cannot be forgotten.
        let JobOptions {
            rendezvous_timeout_s,
            lease_s,
            dead_after_s,
            reduction,
            optimize_at,
            between_sites,
            weight,
            hubs,
            max_hubs,
            hub_label,
            on_interface_down,
            redial_grace_s,
            on_worker_loss,
            replicas,
            min_workers,
            start_workers,
            rewind_every,
            linger_s,
            program_state_bytes,
            encrypt,
            stragglers,
            progress_timeout_s,
            checkpoint_every,
            resume,
        } = self;
        let usual = JobOptions::default();
        let options = [
            ("rendezvous_timeout_s", changed(rendezvous_timeout_s, &usual.rendezvous_timeout_s)),
            ("lease_s", changed(lease_s, &usual.lease_s)),
            ("dead_after_s", changed(dead_after_s, &usual.dead_after_s)),
            ("reduction", changed(reduction, &usual.reduction)),
            ("optimize_at", changed(optimize_at, &usual.optimize_at)),
            ("between_sites", changed(between_sites, &usual.between_sites)),
            ("weight", changed(weight, &usual.weight)),
            ("hubs", set(hubs)),
            ("max_hubs", set(max_hubs)),
            ("hub_label", set(hub_label)),
            ("on_interface_down", changed(on_interface_down, &usual.on_interface_down)),
            ("redial_grace_s", changed(redial_grace_s, &usual.redial_grace_s)),
            ("on_worker_loss", changed(on_worker_loss, &usual.on_worker_loss)),
            ("replicas", changed(replicas, &usual.replicas)),
            ("min_workers", changed(min_workers, &usual.min_workers)),
            ("start_workers", set(start_workers)),
            ("rewind_every", changed(rewind_every, &usual.rewind_every)),
            ("linger_s", changed(linger_s, &usual.linger_s)),
            ("program_state_bytes", changed(program_state_bytes, &usual.program_state_bytes)),
            ("encrypt", changed(encrypt, &usual.encrypt)),
            ("stragglers", changed(stragglers, &usual.stragglers)),
            ("progress_timeout_s", set(progress_timeout_s)),
            ("checkpoint_every", set(checkpoint_every)),
            ("resume", set(resume)),
        ];
        let mut separator = "";
        for (name, value) in options {
            if let Some(value) = value {
                write!(f, "{separator}{name} {value}")?;
                separator = ", ";
            }
        }
        Ok(())
    }
}

/// The reaction of a job when an interface goes down. `fail`: the job fails, with the interface's name.
/// `continue`: its streams continue over the remaining interfaces; only for synchronous jobs at one site.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum OnInterfaceDown {
    /// The job fails, with the interface's name.
    #[default]
    Fail,
    /// Its streams continue over the remaining interfaces, as long as there are any. Only for synchronous
    /// jobs at one site; see [`combinations`](crate::combinations).
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

/// The reaction of a job when a worker is lost: its process has ended or has been silent for too long, or it has
/// given up. `fail`: the job fails, with the rank's name. `continue`: steps go on with the workers that remain,
/// and another process may take the rank. `rewind`: all ranks go back to an earlier step, and go on from there when
/// each rank has a process again. With `checkpoint_every` they go back to the newest checkpoint when a hub is lost and, where hubs
/// serve racks or hosts, when a worker is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum OnWorkerLoss {
    /// The job fails, with the rank's name.
    #[default]
    Fail,
    /// What the worker has contributed whole counts, steps go on with the workers that remain, and another process
    /// may take the rank. Only for some jobs; see [`combinations`](crate::combinations).
    Continue,
    /// All ranks go back to an earlier step, of which the hubs have kept the parameters and the optimizer's state or, where hubs
    /// serve racks or hosts and with `replicas`, a checkpoint, and go on from there when each rank has a process again: no update
    /// lacks a contribution. Only for some jobs; see [`combinations`](crate::combinations).
    Rewind,
}

impl fmt::Display for OnWorkerLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OnWorkerLoss::Fail => "fail",
            OnWorkerLoss::Continue => "continue",
            OnWorkerLoss::Rewind => "rewind",
        })
    }
}

impl FromStr for OnWorkerLoss {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "fail" => Ok(OnWorkerLoss::Fail),
            "continue" => Ok(OnWorkerLoss::Continue),
            "rewind" => Ok(OnWorkerLoss::Rewind),
            _ => Err(format!(
                "`{text}` is not what can be done about a lost worker: expected fail, continue or rewind"
            )),
        }
    }
}

/// The default of [`JobOptions::linger_s`].
const LINGER_S: f64 = 300.0;

/// Returns whether a count has its default, which is left out so that older hubs understand the text.
fn is_one(count: &u32) -> bool {
    *count == 1
}

/// Does the same as [`is_one`] for the time that a job waits for workers.
fn is_default_linger(linger_s: &f64) -> bool {
    *linger_s == LINGER_S
}

/// Does the same as [`is_one`] for the time that a hub waits for a worker whose stream was cut.
fn is_default_redial_grace(redial_grace_s: &f64) -> bool {
    *redial_grace_s == REDIAL_GRACE_S
}

impl Default for JobOptions {
    fn default() -> Self {
        JobOptions {
            rendezvous_timeout_s: 60.0,
            lease_s: 120.0,
            dead_after_s: 30.0,
            hubs: None,
            max_hubs: None,
            hub_label: None,
            encrypt: false,
            on_interface_down: OnInterfaceDown::default(),
            redial_grace_s: REDIAL_GRACE_S,
            on_worker_loss: OnWorkerLoss::default(),
            replicas: 0,
            min_workers: 1,
            start_workers: None,
            rewind_every: 1,
            linger_s: LINGER_S,
            program_state_bytes: 0,
            stragglers: Stragglers::default(),
            progress_timeout_s: None,
            checkpoint_every: None,
            resume: None,
            weight: 1,
            reduction: Reduction::default(),
            optimize_at: OptimizeAt::default(),
            between_sites: BetweenSites::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_shown_if_they_differ_from_their_defaults() {
        assert_eq!(JobOptions::default().to_string(), "");
        let options = JobOptions {
            weight: 3,
            max_hubs: Some(2),
            stragglers: "drop:0.5".parse().unwrap(),
            encrypt: true,
            ..JobOptions::default()
        };
        assert_eq!(options.to_string(), "weight 3, max_hubs 2, encrypt true, stragglers drop:0.5");
    }
}
