//! Where the chunks of each route are in a job with standbys, as a worker knows it. A worker that has lost a hub asks the
//! manager, unless it finds the other hub at once, as the product's `share_hubs` does.

use std::time::{Duration, Instant};

use paramhub_core::placement::{HubShape, Route, RouteId};
use paramhub_core::resuming::Attempts;
use paramhub_core::service::{ConnectService, ErrorCode};
use paramhub_core::standbys::{Share, route_at};

use super::Worker;
use super::streams::{LaneState, RoutePlace};
use crate::call::{Answer, CallError, Caller, Line, Request};
use crate::job::hub_at;
use crate::network::{Arrival, Process, StreamId};
use crate::world::Context;

/// The time that the manager may take to answer.
const ASK_TIMEOUT: Duration = Duration::from_secs(1);
/// The age up to which an answer counts as new.
const ANSWER_FRESH: Duration = Duration::from_millis(500);

/// The hubs of a job's shares, as a worker knows them.
pub(super) struct ShareHubs {
    asker: Caller,
    /// The hubs of the placement and, after them, those that the job has got since it began.
    hubs: Vec<HubShape>,
    /// The number of those of the placement.
    first: usize,
    shares: Vec<Share>,
    /// How often the manager has named other shares.
    pub(super) changes: u32,
    answered: Option<Instant>,
}

/// What a question to the manager has brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// The chunks are at other hubs than this worker knew.
    Elsewhere,
    /// They are where this worker knew.
    Unchanged,
    /// The job has ended.
    Over,
    /// The manager has not answered.
    NoAnswer,
}

/// A lane whose hubs have all been tried, and that waits for the manager's answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asking {
    pub(super) attempts: Attempts,
    /// Whether one of the hubs is about to serve the route, or to end its part.
    pub(super) is_waited_for: bool,
    /// How many hubs were tried, and how many of them do not run.
    pub(super) tried: usize,
    pub(super) gone: usize,
    /// An earlier answer of the manager is not enough.
    pub(super) since: Instant,
}

impl ShareHubs {
    pub(super) fn new(process: Process, hubs: Vec<HubShape>, shares: Vec<Share>) -> ShareHubs {
        let asker = Caller::new(process, Line::Shares, Duration::ZERO);
        ShareHubs { asker, first: hubs.len(), hubs, shares, changes: 0, answered: None }
    }

    /// Where a route is: at the hub that serves it and, if there is one, at its standby.
    pub(super) fn places(&self, id: RouteId, route: &Route) -> Vec<RoutePlace> {
        let own = &self.hubs[usize::from(route.hub)];
        let place = |position: u16| {
            let shape = self.hubs.get(usize::from(position))?;
            let is_own = position == route.hub;
            let (interface, core) =
                if is_own { (route.interface, route.core) } else { route_at(route, own, shape) };
            let standby_route = (!is_own).then_some(id);
            Some(RoutePlace { hub: Process::Hub(hub_at(shape)), interface, core, standby_route })
        };
        let share = self.shares.get(usize::from(route.hub));
        // A job without standbys has no shares.
        let (served_by, standby) = share.map_or((route.hub, None), |share| (share.served_by, share.standby));
        [Some(served_by), standby].into_iter().flatten().filter_map(place).collect()
    }

    fn learn(&mut self, shares: &[Share], later_hubs: &[HubShape], now: Instant) -> Asked {
        self.answered = Some(now);
        let hubs = self.first + later_hubs.len();
        let is_hub = |position: u16| usize::from(position) < hubs;
        let fits = |share: &Share| is_hub(share.served_by) && share.standby.is_none_or(is_hub);
        if shares.len() != self.shares.len() || shares == self.shares || !shares.iter().all(fits) {
            return Asked::Unchanged;
        }
        self.hubs.truncate(self.first);
        self.hubs.extend_from_slice(later_hubs);
        self.shares = shares.to_vec();
        self.changes += 1;
        Asked::Elsewhere
    }

    fn ended(&mut self, ended: &Result<Answer, CallError>, now: Instant) -> Asked {
        match ended {
            Ok(Answer::Connected(connected)) => self.learn(&connected.shares, &connected.later_hubs, now),
            Err(CallError::Refused(refusal)) if refusal.code == ErrorCode::JobEnded => Asked::Over,
            _ => Asked::NoAnswer,
        }
    }

    /// Asks the manager, unless it has answered since a moment, and just now. Returns `None` while there is no answer. `seen`
    /// is how often the shares had changed when the caller last knew its places.
    fn ask(
        &mut self,
        (seen, since): (u32, Instant),
        call: &ConnectService,
        context: &mut Context<'_>,
    ) -> Option<Asked> {
        if self.changes != seen {
            return Some(Asked::Elsewhere);
        }
        if self.asker.is_calling() {
            return None;
        }
        let now = context.instant();
        let is_fresh = |answered: Instant| answered >= since && now.duration_since(answered) < ANSWER_FRESH;
        if self.answered.is_some_and(is_fresh) {
            return Some(Asked::Unchanged);
        }
        self.asker.call(Request::Connect(Box::new(call.clone())), ASK_TIMEOUT, context);
        None
    }
}

impl Worker {
    /// All hubs of a lane's route have been tried in vain. If this worker asks the manager now, the lane waits for the answer.
    pub(super) fn ask_manager(&mut self, index: usize, asking: Asking, context: &mut Context<'_>) {
        let seen = self.lanes[index].seen;
        let Some(hubs) = &mut self.share_hubs else { return };
        match hubs.ask((seen, asking.since), self.member.call(), context) {
            Some(asked) => self.asked(index, asking, Some(asked), context),
            None => {
                self.lanes[index].state = LaneState::Resuming(asking.attempts, None);
                self.lanes[index].asking = Some(asking);
            }
        }
    }

    /// A stream learns something. Returns whether it is that of a question to the manager.
    pub(super) fn asker_arrived(
        &mut self,
        stream: StreamId,
        arrival: &Arrival,
        context: &mut Context<'_>,
    ) -> bool {
        let Some(hubs) = &mut self.share_hubs else { return false };
        let Some(ended) = hubs.asker.arrived(stream, arrival, context) else { return false };
        let asked = hubs.ended(&ended, context.instant());
        self.answer_lanes(asked, context);
        true
    }

    /// A time has come for which a question to the manager has waited.
    pub(super) fn asker_woken(&mut self, awaited: u64, context: &mut Context<'_>) {
        let Some(hubs) = &mut self.share_hubs else { return };
        let Some(ended) = hubs.asker.woken(awaited, context) else { return };
        let asked = hubs.ended(&ended, context.instant());
        self.answer_lanes(asked, context);
    }

    /// One lane has this answer, and the others look whether it is enough for them.
    fn answer_lanes(&mut self, asked: Asked, context: &mut Context<'_>) {
        let mut asked = Some(asked);
        for index in 0..self.lanes.len() {
            let Some(asking) = self.lanes[index].asking.take() else { continue };
            if !matches!(self.lanes[index].state, LaneState::Resuming(_, None)) {
                continue;
            }
            match asked.take() {
                Some(asked) => self.asked(index, asking, Some(asked), context),
                None => self.ask_manager(index, asking, context),
            }
        }
    }
}
