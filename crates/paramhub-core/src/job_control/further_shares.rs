//! Shares whose [standby](crate::standbys) this hub is to become while it has a part in their job already. It allocates their
//! chunks and says so. With the next change of the shares the manager makes it their standby, or it gives the chunks up.
//!
//! A route with which a hub has nothing more to do is given up, too: a core frees it while the job goes on. The hub takes
//! further shares only when that is done.

use super::job::{Job, Phase};
use super::{JobControl, JobTerms, Output, RoleChange, RouteTerms, mebibytes};
use crate::auth::Namespace;
use crate::placement::RouteId;
use crate::service::{FurtherShares, HubEvent};
use crate::standbys::Role;

/// Further shares of which cores allocate the chunks, or have allocated them.
#[derive(Clone, Debug)]
pub(super) struct AllocatedFurther {
    asked: FurtherShares,
    /// The number of routes that are not allocated yet.
    opening: usize,
}

impl Job {
    /// The number of the further shares that are allocated, if there are any.
    pub(super) fn allocated_further(&self) -> Option<u32> {
        self.further.as_ref().filter(|further| further.opening == 0).map(|further| further.asked.number)
    }

    /// The routes of this job of which cores have something.
    pub(super) fn routes_here(&self) -> usize {
        self.terms.routes.len() + self.routes_closing
    }

    /// The routes of the further shares whose standby this hub has not become with a change of the shares.
    pub(super) fn refused_further(&mut self) -> Vec<RouteTerms> {
        self.further_waits = None;
        let Some(AllocatedFurther { asked, opening }) = self.further.take() else { return Vec::new() };
        let is_refused = |route: &&RouteTerms| {
            asked.shares.contains(&route.share) && (opening > 0 || self.role(route) == Role::None)
        };
        self.terms.routes.iter().filter(is_refused).copied().collect()
    }

    /// This hub has nothing more to do with a route, which a core frees.
    pub(super) fn give_up(&mut self, route: RouteId) {
        self.terms.routes.retain(|terms| terms.id != route);
        self.left.retain(|&(left, _)| left != route);
        self.copied.remove(&route);
        self.routes_closing += 1;
    }
}

impl JobControl {
    /// Whether the hub is to plan further shares of a job that it has with this epoch and at this position. A command can come
    /// twice.
    pub fn wants_further(&self, namespace: Namespace, epoch: u64, hub: u16, further: &FurtherShares) -> bool {
        let job = self.jobs.get(&namespace).filter(|job| job.terms.epoch == epoch && job.terms.hub == hub);
        let has_them = |job: &Job| {
            let asked = job.further.as_ref().map(|allocated| &allocated.asked);
            let waits = job.further_waits.as_ref().map(|(_, asked)| asked);
            asked == Some(further) || waits == Some(further)
        };
        self.is_serving() && job.is_some_and(|job| !job.is_ending() && !has_them(job))
    }

    /// Takes further shares of a job, of which `added` has the routes, or refuses them.
    pub(super) fn take_further(&mut self, added: JobTerms, asked: FurtherShares) {
        let namespace = added.namespace;
        // A manager that has restarted since it asked for others does not know of them.
        let others = self.jobs.get_mut(&namespace).map(Job::refused_further).unwrap_or_default();
        self.give_up_routes(namespace, &others);
        if let Some(job) = self.jobs.get_mut(&namespace).filter(|job| job.routes_closing > 0) {
            job.further_waits = Some((Box::new(added), asked));
            return;
        }
        if let Err(reason) = self.check_further(&added) {
            self.warn(format!("further chunks of a job were refused: {reason}"));
            return self.report(HubEvent::Refused { namespace, reason });
        }
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        let (name, routes) = (job.terms.name.clone(), added.routes.len());
        job.further = Some(AllocatedFurther { asked, opening: routes });
        let memory = mebibytes(added.memory_bytes());
        let ids: Vec<RouteId> = added.routes.iter().map(|route| route.id).collect();
        job.terms.routes.extend(added.routes);
        self.info(format!("job `{name}`: {routes} further routes, {memory} MiB, for a standby"));
        self.outputs.push(Output::OpenFurther { namespace, routes: ids });
        if routes == 0 {
            self.report_allocated(namespace);
        }
    }

    fn check_further(&self, added: &JobTerms) -> Result<(), String> {
        let job = self.jobs.get(&added.namespace).ok_or("the job has ended here")?;
        let name = &job.terms.name;
        let has_route = |added: &RouteTerms| job.terms.routes.iter().any(|route| route.id == added.id);
        match job.phase {
            Phase::Running => {}
            _ => return Err(format!("job `{name}` does not run at this hub yet, or not any more")),
        }
        if added.routes.iter().any(has_route) {
            return Err(format!("this hub has these chunks of job `{name}` already"));
        }
        let mut all = job.terms.clone();
        all.routes.extend(&added.routes);
        self.check_admission_of_further(&all, added)
    }

    /// Notes that a core has allocated a route of a job that runs, or could not.
    pub(super) fn further_opened(&mut self, namespace: Namespace, missing_bytes: Option<u64>) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        match (&mut job.further, missing_bytes) {
            (Some(further), None) => {
                further.opening = further.opening.saturating_sub(1);
                if further.opening == 0 {
                    self.report_allocated(namespace);
                }
            }
            (further, Some(missing)) => {
                if further.is_some() {
                    self.refuse_further(namespace, missing);
                }
                // The core has nothing of this route to free.
                self.further_closed(namespace);
            }
            (None, None) => {}
        }
    }

    /// Gives further shares up, because some core could not allocate.
    fn refuse_further(&mut self, namespace: Namespace, missing_bytes: u64) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        let missing = mebibytes(missing_bytes);
        let reason = format!(
            "job `{}` needs memory for further chunks at this hub, but the operating system had no {missing} MiB left for one \
             part",
            job.terms.name
        );
        let routes = job.refused_further();
        self.warn(reason.clone());
        self.give_up_routes(namespace, &routes);
        self.report(HubEvent::Refused { namespace, reason });
    }

    /// Has cores free routes with which this hub has nothing more to do.
    pub(super) fn give_up_routes(&mut self, namespace: Namespace, routes: &[RouteTerms]) {
        for route in routes {
            if let Some(job) = self.jobs.get_mut(&namespace) {
                job.give_up(route.id);
            }
            let (core, route) = (route.core, route.id);
            self.outputs.push(Output::ChangeRole { namespace, core, route, role: RoleChange::Stop });
        }
    }

    /// Notes that a route with which this hub has nothing more to do is free. Further shares may have waited for that.
    pub(super) fn further_closed(&mut self, namespace: Namespace) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        job.routes_closing = job.routes_closing.saturating_sub(1);
        if job.routes_closing == 0
            && let Some((added, asked)) = job.further_waits.take()
        {
            self.take_further(*added, asked);
        }
    }
}
