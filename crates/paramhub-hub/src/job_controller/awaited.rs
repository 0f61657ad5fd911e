//! Ranks that keep the others waiting: the reports about them, and the end of the job if the wait is too
//! long.

use paramhub_core::auth::Namespace;
use paramhub_core::composition::{Crossing, SiteId};
use paramhub_core::exchange::Awaited;
use paramhub_core::placement::RouteId;
use paramhub_core::service::{AwaitedRanks, CauseKind, HubEvent};
use paramhub_core::wire::Notice;
use tracing::warn;

use super::job::{HubJob, JobPhase};
use super::{JobController, rank_of};
use crate::core::{CoreCommand, Neighbour, OverdueEvent, OverdueNeighbours};

impl JobController {
    /// Handles the report that a rank or a site keeps the others waiting at a route, or no longer does.
    pub(super) fn awaited(&mut self, namespace: Namespace, route: RouteId, event: OverdueEvent) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        if matches!(job.state, JobPhase::Ending { .. }) {
            return;
        }
        match event {
            // If there is no member left to wait for, the job has ended.
            OverdueEvent::Late(overdue) if overdue.neighbours.is_empty() => return,
            OverdueEvent::Late(overdue) => drop(job.awaited.insert(route, overdue)),
            OverdueEvent::Over { waited } => {
                job.awaited.remove(&route);
                if job.awaited.is_empty()
                    && let Some((who, _)) = job.announced_awaited.take()
                {
                    let message = format!(
                        "job `{}` goes on: {} kept the others waiting for {:.0} s",
                        job.name,
                        names(job, &who),
                        waited.as_secs_f64()
                    );
                    self.notify_all(namespace, rank_of_all(&who), &message);
                    self.report(HubEvent::Awaited { namespace, message, awaited: None });
                }
                return;
            }
        }
        let Some(overdue) = to_announce(job).cloned() else { return };
        if overdue.has_expired {
            let names = names(job, &overdue.neighbours);
            let reason = format!(
                "{names} made no progress: others have waited {:.0} s for {}, and the job ends after {:.0} s of that \
                 (progress_timeout_s)",
                overdue.waited.as_secs_f64(),
                what(&overdue),
                job.progress_timeout.unwrap_or_default().as_secs_f64(),
            );
            return self.fail(namespace, CauseKind::Known, rank_of_all(&overdue.neighbours), reason);
        }
        // Every route reports it; the first report of each magnitude is enough.
        let magnitude = (overdue.waited.as_secs().max(1)).ilog10() + 1;
        let is_known =
            |(who, announced): &(Vec<Neighbour>, u32)| *who == overdue.neighbours && magnitude <= *announced;
        if job.announced_awaited.as_ref().is_some_and(is_known) {
            return;
        }
        job.announced_awaited = Some((overdue.neighbours.clone(), magnitude));
        let ends = job.progress_timeout.map_or(String::new(), |timeout| {
            format!("; the job ends after {:.0} s of that", timeout.as_secs_f64())
        });
        let message = format!(
            "{} of job `{}` {} awaited: others have waited {:.0} s for {}{ends}",
            names(job, &overdue.neighbours),
            job.name,
            if overdue.neighbours.len() == 1 { "is" } else { "are" },
            overdue.waited.as_secs_f64(),
            what(&overdue),
        );
        let awaited = Some(AwaitedRanks {
            ranks: ranks_of(job, &overdue),
            key: overdue.key.clone(),
            what: overdue.awaited.to_string(),
            seconds: overdue.waited.as_secs_f64(),
        });
        self.notify_all(namespace, rank_of_all(&overdue.neighbours), &message);
        self.report(HubEvent::Awaited { namespace, message, awaited });
    }

    /// Sends a notice to the log and to all ranks that exchange here.
    pub(super) fn notify_all(&self, namespace: Namespace, rank: Option<u32>, message: &str) {
        let Some(job) = self.jobs.get(&namespace) else { return };
        warn!("{message}");
        if let Some(core) = job.cores().next() {
            let notice = Notice { rank, message: message.to_owned() };
            self.cores[usize::from(core)].send(CoreCommand::NotifyAll { namespace, notice });
        }
    }
}

/// Which of the waits at routes to announce. Contributions come first, since nothing else can come while they
/// are missing. A release counts only if all routes wait for it, since rank 0 sends it when all have sent it
/// their norms.
fn to_announce(job: &HubJob) -> Option<&OverdueNeighbours> {
    let is_release = |overdue: &&OverdueNeighbours| matches!(overdue.awaited, Awaited::Release(_));
    let releases = job.awaited.values().filter(is_release).count();
    let others = job.awaited.values().filter(|overdue| !is_release(overdue));
    let first = others.max_by_key(|overdue| (overdue.has_expired, overdue.waited));
    first.or_else(|| {
        let all_wait = releases == job.routes.len();
        job.awaited.values().filter(|_| all_wait).max_by_key(|overdue| (overdue.has_expired, overdue.waited))
    })
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
fn names(job: &HubJob, who: &[Neighbour]) -> String {
    const NAMED: usize = 8;
    let name = |&who: &Neighbour| {
        let ranks = match who {
            Neighbour::Worker(_) => Vec::new(),
            Neighbour::Site(site) if may_wait_itself(job, site) => {
                return format!("{} or one before it in the ring", job.name_of(who));
            }
            Neighbour::Site(site) => job.composed.composition.ranks_below(site),
        };
        let ranks: Vec<String> = ranks.iter().take(NAMED).map(ToString::to_string).collect();
        match ranks.len() {
            0 => job.name_of(who),
            1 => format!("{} with rank {}", job.name_of(who), ranks[0]),
            _ => format!("{} with ranks {}", job.name_of(who), ranks.join(", ")),
        }
    };
    let mut named: Vec<String> = who.iter().take(NAMED).map(name).collect();
    if who.len() > NAMED {
        named.push(format!("{} more", who.len() - NAMED));
    }
    named.join(", ")
}

/// All ranks that may be the late ones, ascending.
fn ranks_of(job: &HubJob, overdue: &OverdueNeighbours) -> Vec<u32> {
    let mut ranks: Vec<u32> = Vec::new();
    for who in &overdue.neighbours {
        match who {
            Neighbour::Worker(rank) => ranks.push(*rank),
            Neighbour::Site(site) if may_wait_itself(job, *site) => {}
            Neighbour::Site(site) => ranks.extend(job.composed.composition.ranks_below(*site)),
        }
    }
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// Whether a site's sum includes those of other sites, for which it may wait itself: it then reports these
/// itself.
fn may_wait_itself(job: &HubJob, site: SiteId) -> bool {
    let composition = &job.composed.composition;
    let tops = composition.sites.iter().filter(|site| site.parent.is_none()).count();
    let is_beside = composition.sites[usize::from(site)].parent.is_none();
    is_beside && composition.crossing == Crossing::Ring && tops > 2
}

/// The rank, if the list is a single worker.
fn rank_of_all(who: &[Neighbour]) -> Option<u32> {
    match who {
        [one] => rank_of(*one),
        _ => None,
    }
}
