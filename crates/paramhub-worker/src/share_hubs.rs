//! Where the chunks of each route are in a job with standbys. The hubs of a share change while the job runs, and the manager
//! knows them: a worker that has lost a hub asks it, unless it finds the other hub at once.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use paramhub_control::ManagerClient;
use paramhub_core::auth::Namespace;
use paramhub_core::placement::{HubShape, Route, RouteId};
use paramhub_core::service::{ConnectService, ErrorCode};
use paramhub_core::standbys::{Share, route_at};

use crate::resume::RoutePlace;

/// The time that the manager may take to answer.
const ASK_TIMEOUT: Duration = Duration::from_secs(1);
/// The age up to which an answer counts as new. All streams of a worker are lost together, and one question is enough.
const ANSWER_FRESH: Duration = Duration::from_millis(500);

/// The hubs of a job's shares, as this worker knows them.
pub(crate) struct ShareHubs {
    /// How the manager is asked; `None` in a job that was opened without one.
    pub(crate) asker: Option<ShareAsker>,
    known: Mutex<KnownHubs>,
}

/// The call that the manager answers with the shares.
#[derive(Clone, Debug)]
pub(crate) struct ShareAsker {
    pub(crate) manager: ManagerClient,
    pub(crate) namespace: Namespace,
    /// The call, proved.
    pub(crate) call: ConnectService,
}

struct KnownHubs {
    /// The hubs of the placement and, after them, those that the job has got since it began.
    hubs: Vec<HubShape>,
    /// The number of those of the placement.
    first: usize,
    shares: Vec<Share>,
    /// How often the manager has named other shares.
    changes: u32,
    answered: Option<Instant>,
}

/// What a question to the manager has brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// The chunks are at other hubs than this worker knew.
    Elsewhere,
    /// They are where this worker knew.
    Unchanged,
    /// The job has ended, or goes on without this worker. The text says why.
    Over(String),
    /// The manager has not answered.
    NoAnswer,
}

impl ShareHubs {
    pub(crate) fn new(hubs: Vec<HubShape>, shares: Vec<Share>, asker: Option<ShareAsker>) -> ShareHubs {
        let known = KnownHubs { first: hubs.len(), hubs, shares, changes: 0, answered: None };
        ShareHubs { asker, known: Mutex::new(known) }
    }

    /// Where a route is: at the hub that serves it and, if there is one, at its standby. The number is for
    /// [`ask`](Self::ask).
    pub(crate) fn places(&self, id: RouteId, route: &Route) -> (Vec<RoutePlace>, u32) {
        let known = self.known();
        let Some(share) = known.shares.get(usize::from(route.hub)) else {
            return (Vec::new(), known.changes);
        };
        let own = &known.hubs[usize::from(route.hub)];
        let place = |position: u16| {
            let shape = known.hubs.get(usize::from(position))?;
            let (interface, core) = match position == route.hub {
                true => (route.interface, route.core),
                false => route_at(route, own, shape),
            };
            Some(RoutePlace {
                address: shape.interfaces[usize::from(interface)].address.as_str().into(),
                interface,
                core,
                standby_route: (position != route.hub).then_some(id),
            })
        };
        let places = [Some(share.served_by), share.standby].into_iter().flatten().filter_map(place);
        (places.collect(), known.changes)
    }

    /// Asks the manager where the chunks are, unless it has answered since a moment, and just now. `seen` is the number that came
    /// with the places which the caller knows.
    pub(crate) fn ask(&self, seen: u32, since: Instant) -> Asked {
        let Some(asker) = &self.asker else { return Asked::Unchanged };
        // The streams of the other lanes wait for this answer, too.
        let mut known = self.known();
        if known.changes != seen {
            return Asked::Elsewhere;
        }
        let is_fresh = |answered: Instant| answered >= since && answered.elapsed() < ANSWER_FRESH;
        if known.answered.is_some_and(is_fresh) {
            return Asked::Unchanged;
        }
        match asker.manager.connect_service(asker.namespace, &asker.call, ASK_TIMEOUT) {
            Ok(answer) => known.learn(answer.shares, answer.later_hubs),
            Err(error) if error.code() == Some(ErrorCode::JobEnded) => Asked::Over(error.to_string()),
            // The ranks have gone back, or another process has this one's.
            Err(error) if error.code() == Some(ErrorCode::WrongNonce) => {
                Asked::Over("the connection manager does not know it as a rank of this job any more".into())
            }
            Err(_) => Asked::NoAnswer,
        }
    }

    fn known(&self) -> MutexGuard<'_, KnownHubs> {
        self.known.lock().expect("no panic while holding it")
    }
}

impl KnownHubs {
    fn learn(&mut self, shares: Vec<Share>, later_hubs: Vec<HubShape>) -> Asked {
        self.answered = Some(Instant::now());
        let hubs = self.first + later_hubs.len();
        let is_hub = |position: u16| usize::from(position) < hubs;
        let fits = |share: &Share| is_hub(share.served_by) && share.standby.is_none_or(is_hub);
        if shares.len() != self.shares.len() || shares == self.shares || !shares.iter().all(fits) {
            return Asked::Unchanged;
        }
        self.hubs.truncate(self.first);
        self.hubs.extend(later_hubs);
        self.shares = shares;
        self.changes += 1;
        Asked::Elsewhere
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paramhub_core::placement::InterfaceShape;

    fn shape(address: &str, cores: &[u16]) -> HubShape {
        let interface = InterfaceShape { address: address.into(), cores: cores.to_vec(), weight: 1 };
        HubShape { interfaces: vec![interface], local: None, between_hubs: None }
    }

    fn places(hubs: &ShareHubs) -> Vec<(String, u16, Option<RouteId>)> {
        let (places, _) = hubs.places(3, &Route { hub: 1, interface: 0, core: 1 });
        let place = |place: RoutePlace| (place.address.to_string(), place.core, place.standby_route);
        places.into_iter().map(place).collect()
    }

    #[test]
    fn a_route_is_at_the_hubs_that_the_manager_has_named_last() {
        let first = vec![shape("a:1", &[0]), shape("b:1", &[0, 1])];
        let shares = vec![Share::new(0, Some(1)), Share::new(1, Some(0))];
        let hubs = ShareHubs::new(first, shares.clone(), None);
        assert_eq!(places(&hubs), [("b:1".into(), 1, None), ("a:1".into(), 0, Some(3))]);
        assert_eq!(hubs.ask(0, Instant::now()), Asked::Unchanged, "there is nobody to ask");

        assert_eq!(hubs.known().learn(shares, Vec::new()), Asked::Unchanged);
        let moved = vec![Share::new(0, None), Share { copying: true, ..Share::new(0, Some(2)) }];
        let learn = |shares: &[Share], later| hubs.known().learn(shares.to_vec(), later);
        assert_eq!(learn(&moved, vec![shape("c:1", &[5, 6])]), Asked::Elsewhere);
        assert_eq!(places(&hubs), [("a:1".into(), 0, Some(3)), ("c:1".into(), 6, Some(3))]);
        assert_eq!(learn(&moved, Vec::new()), Asked::Unchanged, "a hub of which nothing is said is none");
        assert_eq!(learn(&[Share::new(0, None)], Vec::new()), Asked::Unchanged, "a share is missing");
        assert_eq!(places(&hubs).len(), 2);
    }
}
