//! Ranks that keep the others waiting: the reports about them, and the end of the job if the wait is too
//! long.

use std::collections::BTreeMap;
use std::time::Duration;

use super::job::Job;
use super::notices::digits;
use super::{JobControl, OverdueEvent, OverdueNeighbours};
use crate::auth::Namespace;
use crate::composition::{Crossing, Neighbour, SiteId};
use crate::exchange::Awaited;
use crate::placement::RouteId;
use crate::service::{AwaitedRanks, CauseKind, HubEvent};

/// Neighbours or ranks that a message names.
const NAMED: usize = 8;

/// The waits of one job.
#[derive(Debug, Default)]
pub(super) struct Waits {
    /// The routes at which members wait for others.
    at: BTreeMap<RouteId, OverdueNeighbours>,
    /// The neighbours in the last announcement of a wait, and the number of digits of its seconds.
    announced: Option<(Vec<Neighbour>, u32)>,
}

impl JobControl {
    /// Handles the report that a rank or a site keeps the others waiting at a route, or no longer does.
    pub(super) fn awaited(
        &mut self,
        namespace: Namespace,
        route: RouteId,
        event: OverdueEvent,
        now: Duration,
    ) {
        let Some(job) = self.jobs.get_mut(&namespace).filter(|job| !job.is_ending()) else { return };
        match event {
            // If there is no member left to wait for, the job has ended.
            OverdueEvent::Late(overdue) if overdue.neighbours.is_empty() => {}
            OverdueEvent::Late(overdue) => {
                job.waits.at.insert(route, overdue);
                self.announce_wait(namespace, now);
            }
            OverdueEvent::Over { waited } => {
                job.waits.at.remove(&route);
                self.announce_progress(namespace, waited);
            }
        }
    }

    /// Announces that a job goes on for which others have waited, once none of its routes waits.
    fn announce_progress(&mut self, namespace: Namespace, waited: Duration) {
        let Some(job) = self.jobs.get_mut(&namespace).filter(|job| job.waits.at.is_empty()) else { return };
        let Some((neighbours, _)) = job.waits.announced.take() else { return };
        let message = format!(
            "job `{}` goes on: {} kept the others waiting for {:.0} s",
            job.terms.name,
            names(job, &neighbours),
            waited.as_secs_f64()
        );
        self.notify_all(namespace, rank_of_all(&neighbours), &message);
        self.report(HubEvent::Awaited { namespace, message, awaited: None });
    }

    /// Announces the wait of a job that matters most, or ends the job if that wait has reached its limit.
    fn announce_wait(&mut self, namespace: Namespace, now: Duration) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        let Some(overdue) = to_announce(job).cloned() else { return };
        let rank = rank_of_all(&overdue.neighbours);
        if overdue.has_expired {
            let reason = no_progress(job, &overdue);
            return self.fail(namespace, CauseKind::Known, rank, reason, now);
        }
        // Every route reports it; the first report of each magnitude is enough.
        let magnitude = digits(overdue.waited.as_secs());
        let is_known = |(neighbours, announced): &(Vec<Neighbour>, u32)| {
            *neighbours == overdue.neighbours && magnitude <= *announced
        };
        if job.waits.announced.as_ref().is_some_and(is_known) {
            return;
        }
        job.waits.announced = Some((overdue.neighbours.clone(), magnitude));
        let message = is_awaited(job, &overdue);
        let awaited = Some(AwaitedRanks {
            ranks: ranks_of(job, &overdue),
            key: overdue.key.clone(),
            what: overdue.awaited.to_string(),
            seconds: overdue.waited.as_secs_f64(),
        });
        self.notify_all(namespace, rank, &message);
        self.report(HubEvent::Awaited { namespace, message, awaited });
    }
}

/// Which of the waits at routes to announce. Contributions come first, since nothing else can come while they
/// are missing. A release counts only if all routes wait for it, since rank 0 sends it when all have sent it
/// their norms.
fn to_announce(job: &Job) -> Option<&OverdueNeighbours> {
    let is_release = |overdue: &&OverdueNeighbours| matches!(overdue.awaited, Awaited::Release(_));
    let waits = &job.waits.at;
    let releases = waits.values().filter(is_release).count();
    let others = waits.values().filter(|overdue| !is_release(overdue));
    let first = others.max_by_key(|overdue| (overdue.has_expired, overdue.waited));
    first.or_else(|| {
        let all_wait = releases == job.terms.routes.len();
        waits.values().filter(|_| all_wait).max_by_key(|overdue| (overdue.has_expired, overdue.waited))
    })
}

/// Why a job ends whose members have waited too long.
fn no_progress(job: &Job, overdue: &OverdueNeighbours) -> String {
    format!(
        "{} made no progress: others have waited {:.0} s for {}, and the job ends after {:.0} s of that \
         (progress_timeout_s)",
        names(job, &overdue.neighbours),
        overdue.waited.as_secs_f64(),
        what(overdue),
        job.terms.progress_timeout.unwrap_or_default().as_secs_f64(),
    )
}

/// The announcement of a wait.
fn is_awaited(job: &Job, overdue: &OverdueNeighbours) -> String {
    let ends = job.terms.progress_timeout.map_or(String::new(), |timeout| {
        format!("; the job ends after {:.0} s of that", timeout.as_secs_f64())
    });
    format!(
        "{} of job `{}` {} awaited: others have waited {:.0} s for {}{ends}",
        names(job, &overdue.neighbours),
        job.terms.name,
        if overdue.neighbours.len() == 1 { "is" } else { "are" },
        overdue.waited.as_secs_f64(),
        what(overdue),
    )
}

fn what(overdue: &OverdueNeighbours) -> String {
    let key = &overdue.key;
    match overdue.awaited {
        Awaited::Parameters => format!("the parameters of key `{key}` to start from"),
        Awaited::Contribution(step) if overdue.neighbours.len() > 1 => {
            format!("their contributions to step {step} of key `{key}`")
        }
        Awaited::Release(_) => overdue.awaited.to_string(),
        Awaited::Contribution(_) => format!("{} of key `{key}`", overdue.awaited),
    }
}

/// The names of neighbours for people; a site's name includes its ranks.
fn names(job: &Job, neighbours: &[Neighbour]) -> String {
    let name = |&neighbour: &Neighbour| {
        let ranks = match neighbour {
            Neighbour::Worker(_) | Neighbour::Counterpart(_) => Vec::new(),
            Neighbour::Site(site) if may_wait_itself(job, site) => {
                return format!("{} or one before it in the ring", job.name_of(neighbour));
            }
            Neighbour::Site(site) => job.terms.composed.composition.ranks_below(site),
        };
        let ranks: Vec<String> = ranks.iter().take(NAMED).map(ToString::to_string).collect();
        match ranks.len() {
            0 => job.name_of(neighbour),
            1 => format!("{} with rank {}", job.name_of(neighbour), ranks[0]),
            _ => format!("{} with ranks {}", job.name_of(neighbour), ranks.join(", ")),
        }
    };
    let mut named: Vec<String> = neighbours.iter().take(NAMED).map(name).collect();
    if neighbours.len() > NAMED {
        named.push(format!("{} more", neighbours.len() - NAMED));
    }
    named.join(", ")
}

/// All ranks that may be the late ones, ascending.
fn ranks_of(job: &Job, overdue: &OverdueNeighbours) -> Vec<u32> {
    let mut ranks: Vec<u32> = Vec::new();
    for neighbour in &overdue.neighbours {
        match neighbour {
            Neighbour::Worker(rank) => ranks.push(*rank),
            Neighbour::Counterpart(_) => {}
            Neighbour::Site(site) if may_wait_itself(job, *site) => {}
            Neighbour::Site(site) => ranks.extend(job.terms.composed.composition.ranks_below(*site)),
        }
    }
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// Whether a site's sum includes those of other sites, for which it may wait itself: it then reports these
/// itself.
fn may_wait_itself(job: &Job, site: SiteId) -> bool {
    let composition = &job.terms.composed.composition;
    let is_beside = composition.sites[usize::from(site)].parent.is_none();
    is_beside
        && matches!(composition.crossing, Crossing::Ring | Crossing::Line)
        && composition.tops().len() > 2
}

/// The rank, if the list is a single worker.
fn rank_of_all(neighbours: &[Neighbour]) -> Option<u32> {
    match neighbours {
        [one] => one.rank(),
        _ => None,
    }
}
