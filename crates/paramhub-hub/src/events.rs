//! The events that the hub's threads send to the job controller, and its reports for the manager.

use std::ops::Range;
use std::time::Instant;

use paramhub_core::auth::Namespace;
use paramhub_core::placement::RouteId;
use paramhub_core::service::{HubCommand, HubEvent, HubJobCounters, JobEnd, ProbeReport};

use crate::checkpoint::Loaded;
use crate::core::CoreEvent;

/// An event for the job controller.
#[derive(Debug)]
pub(crate) enum ControllerEvent {
    /// A command of the manager.
    Command(HubCommand),
    /// A report of a core.
    Core(CoreEvent),
    /// The hubs of the sites above cannot be reached.
    SitesUnreachable { namespace: Namespace, reason: String },
    /// The new standby of a route cannot be reached.
    StandbyUnreachable { namespace: Namespace, route: RouteId, standby: u16, reason: String },
    /// Interfaces, numbered as in the hub's shape, have gone down for this reason, or are up again.
    Interfaces { numbers: Range<u16>, down: Option<String> },
    /// A probe has ended.
    Probed(ProbeReport),
    /// A job's checkpoint has been read for its shards, or cannot be.
    Loaded { namespace: Namespace, result: Result<Loaded, String> },
    /// The last checkpoint of a job is in memory, or will not be taken.
    LastCheckpointTaken { namespace: Namespace },
    /// The last checkpoint of a job that goes on, and whose workers are about to be ended, is in memory or
    /// will not be taken.
    CheckpointKept { namespace: Namespace },
    /// The hub shuts down.
    Stop,
}

/// A report for the manager.
#[derive(Debug)]
pub(crate) enum ReportEvent {
    Event(HubEvent),
    /// A job has ended at this time. The counters are included because its core has forgotten them.
    Ended(JobEnd, Instant, HubJobCounters),
    /// The hub is about to stop.
    Leaving,
}
