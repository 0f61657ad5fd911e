//! Ranks that keep the others waiting: who hears of it, and when it ends the job.

use paramhub_core::auth::Namespace;
use paramhub_core::composition::{Crossing, SiteId};
use paramhub_core::exchange::Awaited;
use paramhub_core::placement::RouteId;
use paramhub_core::service::{AwaitedRanks, CauseKind, HubEvent};
use paramhub_core::wire::Notice;
use tracing::warn;

use super::job::{Job, State};
use super::{Steward, rank_of};
use crate::core::{Absence, AwaitedNews, CoreCommand, Neighbour};

impl Steward {
    /// A rank or a site keeps the others waiting at a route, or does no more.
    pub(super) fn awaited(&mut self, namespace: Namespace, route: RouteId, news: AwaitedNews) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        if matches!(job.state, State::Ending { .. }) {
            return;
        }
        match news {
            // Where nobody is left to wait for, the job has ended.
            AwaitedNews::Late(absence) if absence.who.is_empty() => return,
            AwaitedNews::Late(absence) => drop(job.awaited.insert(route, absence)),
            AwaitedNews::Over { waited } => {
                job.awaited.remove(&route);
                if job.awaited.is_empty()
                    && let Some((who, _)) = job.told_awaited.take()
                {
                    let message = format!(
                        "job `{}` goes on: {} kept the others waiting for {:.0} s",
                        job.name,
                        names(job, &who),
                        waited.as_secs_f64()
                    );
                    self.tell_all(namespace, rank_of_all(&who), &message);
                    self.report(HubEvent::Awaited { namespace, message, awaited: None });
                }
                return;
            }
        }
        let Some(absence) = to_tell(job).cloned() else { return };
        if absence.has_expired {
            let names = names(job, &absence.who);
            let reason = format!(
                "{names} made no progress: others have waited {:.0} s for {}, and the job ends after {:.0} s of that \
                 (progress_timeout_s)",
                absence.waited.as_secs_f64(),
                what(&absence),
                job.progress_timeout.unwrap_or_default().as_secs_f64(),
            );
            return self.fail(namespace, CauseKind::Known, rank_of_all(&absence.who), reason);
        }
        // Every route tells; the first to find it as bad is enough.
        let magnitude = (absence.waited.as_secs().max(1)).ilog10() + 1;
        let is_known = |(who, told): &(Vec<Neighbour>, u32)| *who == absence.who && magnitude <= *told;
        if job.told_awaited.as_ref().is_some_and(is_known) {
            return;
        }
        job.told_awaited = Some((absence.who.clone(), magnitude));
        let ends = job.progress_timeout.map_or(String::new(), |timeout| {
            format!("; the job ends after {:.0} s of that", timeout.as_secs_f64())
        });
        let message = format!(
            "{} of job `{}` {} awaited: others have waited {:.0} s for {}{ends}",
            names(job, &absence.who),
            job.name,
            if absence.who.len() == 1 { "is" } else { "are" },
            absence.waited.as_secs_f64(),
            what(&absence),
        );
        let awaited = Some(AwaitedRanks {
            ranks: ranks_of(job, &absence),
            key: absence.key.clone(),
            what: absence.awaited.to_string(),
            seconds: absence.waited.as_secs_f64(),
        });
        self.tell_all(namespace, rank_of_all(&absence.who), &message);
        self.report(HubEvent::Awaited { namespace, message, awaited });
    }

    /// Tells the log and all ranks that exchange here.
    pub(super) fn tell_all(&self, namespace: Namespace, rank: Option<u32>, message: &str) {
        let Some(job) = self.jobs.get(&namespace) else { return };
        warn!("{message}");
        if let Some(core) = job.cores().next() {
            let notice = Notice { rank, message: message.to_owned() };
            self.cores[usize::from(core)].send(CoreCommand::NotifyAll { namespace, notice });
        }
    }
}

/// What is worth telling of the routes at which others wait. Contributions come first: where they are missing nothing else can
/// come. A release is awaited only where all routes wait for it, for rank 0 sends it when all have told it their norms.
fn to_tell(job: &Job) -> Option<&Absence> {
    let is_release = |absence: &&Absence| matches!(absence.awaited, Awaited::Release(_));
    let releases = job.awaited.values().filter(is_release).count();
    let others = job.awaited.values().filter(|absence| !is_release(absence));
    let first = others.max_by_key(|absence| (absence.has_expired, absence.waited));
    first.or_else(|| {
        let all_wait = releases == job.routes.len();
        job.awaited.values().filter(|_| all_wait).max_by_key(|absence| (absence.has_expired, absence.waited))
    })
}

fn what(absence: &Absence) -> String {
    let key = &absence.key;
    match absence.awaited {
        Awaited::Parameters => format!("the parameters of key `{key}` to start from"),
        Awaited::Contribution(step) if absence.who.len() > 1 => {
            format!("their contributions to step {step} of key `{key}`")
        }
        Awaited::Release(_) => absence.awaited.to_string(),
        Awaited::Contribution(_) => format!("{} of key `{key}`", absence.awaited),
    }
}

/// How people call them; of a site with its ranks.
fn names(job: &Job, who: &[Neighbour]) -> String {
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

/// All ranks that may be the ones, ascending.
fn ranks_of(job: &Job, absence: &Absence) -> Vec<u32> {
    let mut ranks: Vec<u32> = Vec::new();
    for who in &absence.who {
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

/// Whether a site's sum has those of others in it, for which it may wait in its turn: it tells of these itself.
fn may_wait_itself(job: &Job, site: SiteId) -> bool {
    let composition = &job.composed.composition;
    let tops = composition.sites.iter().filter(|site| site.parent.is_none()).count();
    let is_beside = composition.sites[usize::from(site)].parent.is_none();
    is_beside && composition.crossing == Crossing::Ring && tops > 2
}

/// The rank, if it is one alone.
fn rank_of_all(who: &[Neighbour]) -> Option<u32> {
    match who {
        [one] => rank_of(*one),
        _ => None,
    }
}
