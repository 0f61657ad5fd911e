//! Shares that this hub serves, and that get another [standby](crate::standbys) while the job runs. The hub opens a stream to it for
//! each route, and copies the chunks. When the standby has all of them, the manager hears of it: from then on the standby can
//! take over.

use std::time::Duration;

use super::JobControl;
use super::job::Job;
use crate::auth::Namespace;
use crate::placement::RouteId;
use crate::service::HubEvent;

impl Job {
    /// The standby of a share that this hub serves, if that still receives its copies.
    fn copying_to(&self, share: u16) -> Option<u16> {
        let held = self.shares.get(usize::from(share)).filter(|held| held.copying);
        held.filter(|held| held.served_by == self.terms.hub)?.standby
    }

    /// The standby of a share that this hub serves, if that has all chunks and the manager has not said yet that it knows.
    pub(super) fn copied_to(&self, share: u16) -> Option<u16> {
        let are_copied = self.routes_of(share).all(|route| self.copied.contains(&route.id));
        self.copying_to(share).filter(|_| are_copied && !self.lost_counterparts.contains_key(&share))
    }
}

impl JobControl {
    /// The new standby of a route cannot be reached. Another one may have taken its place since.
    pub(super) fn standby_unreachable(
        &mut self,
        namespace: Namespace,
        (route, standby): (RouteId, u16),
        reason: String,
        now: Duration,
    ) {
        let job = self.jobs.get(&namespace);
        let terms = job.and_then(|job| Some((job, job.terms.routes.iter().find(|terms| terms.id == route)?)));
        if terms.is_some_and(|(job, terms)| job.copying_to(terms.share) == Some(standby)) {
            self.counterpart_lost(namespace, route, reason, now);
        }
    }

    /// Notes that the new standby of a route has all chunks.
    pub(super) fn copied(&mut self, namespace: Namespace, route: RouteId) {
        let Some(job) = self.jobs.get_mut(&namespace).filter(|job| !job.is_ending()) else { return };
        let Some(share) = job.terms.routes.iter().find(|terms| terms.id == route).map(|terms| terms.share)
        else {
            return;
        };
        job.copied.insert(route);
        let ready = job.copied_to(share);
        if let Some(standby) = ready {
            self.info(format!("job `{}`: the standby has all chunks", self.jobs[&namespace].terms.name));
            self.report(HubEvent::StandbyReady { namespace, share, standby });
        }
    }

    /// Reports once more which standbys have all chunks: the manager has restarted, and may not have had the report.
    pub(super) fn report_copied_again(&mut self, namespace: Namespace) {
        let Some(job) = self.jobs.get(&namespace) else { return };
        let shares = 0..job.shares.len() as u16;
        let ready: Vec<(u16, u16)> =
            shares.filter_map(|share| job.copied_to(share).map(|standby| (share, standby))).collect();
        for (share, standby) in ready {
            self.report(HubEvent::StandbyReady { namespace, share, standby });
        }
    }

    /// Whether the other hub of a route is a standby that still receives its copies, which the job does not need.
    pub(super) fn is_copying(&self, namespace: Namespace, route: RouteId) -> bool {
        let Some(job) = self.jobs.get(&namespace) else { return false };
        let terms = job.terms.routes.iter().find(|terms| terms.id == route);
        terms.is_some_and(|terms| job.copying_to(terms.share).is_some())
    }
}
