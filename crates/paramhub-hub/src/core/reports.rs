//! The reports of a core about members that others wait for or go on without.

use std::time::Duration;

use paramhub_core::exchange::Awaited;

use super::ports::Neighbour;

/// A report about ranks and sites that others wait for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OverdueEvent {
    Late(OverdueNeighbours),
    /// The event that others waited for has come.
    Over {
        waited: Duration,
    },
}

/// A wait at a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OverdueNeighbours {
    /// The ranks and sites that others wait for, in order.
    pub(crate) neighbours: Vec<Neighbour>,
    /// The event that others wait for.
    pub(crate) awaited: Awaited,
    /// The key for which others have waited longest.
    pub(crate) key: String,
    pub(crate) waited: Duration,
    /// `true` if the wait has reached the job's limit.
    pub(crate) has_expired: bool,
}

/// A report about a rank that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LateRank {
    pub(crate) rank: u32,
    /// Steps that left it out, on average over the chunks here.
    pub(crate) steps: u64,
    /// All steps, on average over the chunks here.
    pub(crate) of: u64,
}
