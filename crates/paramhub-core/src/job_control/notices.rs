//! What ranks and the manager hear of neighbours that are silent, late or on another interface. Every core and
//! every stream reports these; each is announced once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{JobControl, LateNeighbour, Output, RESUME, Recipient};
use crate::auth::Namespace;
use crate::composition::Neighbour;
use crate::placement::RouteId;
use crate::service::HubEvent;
use crate::wire::Notice;

/// What has been announced of a job's neighbours.
#[derive(Debug, Default)]
pub(super) struct Announced {
    /// The neighbours that are silent.
    silent: BTreeSet<Neighbour>,
    /// For each neighbour that was left out: the number of digits of the missed steps.
    late: BTreeMap<Neighbour, u32>,
    /// When a neighbour was last reported to continue over an interface.
    moved: BTreeMap<(Neighbour, u16), Duration>,
}

impl JobControl {
    /// Reports that a neighbour is silent, or is heard again.
    pub(super) fn silence(&mut self, namespace: Namespace, neighbour: Neighbour, seconds: Option<f64>) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        let changed = match seconds {
            Some(_) => job.announced.silent.insert(neighbour),
            None => job.announced.silent.remove(&neighbour),
        };
        if !changed || job.is_ending() {
            return;
        }
        let (name, job_name) = (job.name_of(neighbour), &job.terms.name);
        let outlives_it = job.terms.min_workers.is_some() || job.terms.begins_again;
        let goes_on = outlives_it || matches!(neighbour, Neighbour::Counterpart(_));
        let message = match seconds {
            Some(seconds) => format!(
                "{name} of job `{job_name}` has not been heard for {seconds:.0} s; {} after {:.0} s",
                if goes_on { "it counts as lost" } else { "the job fails" },
                job.terms.dead_after.as_secs_f64()
            ),
            None => format!("{name} of job `{job_name}` is heard again"),
        };
        self.warn(message.clone());
        let first = self.jobs[&namespace].ranks.first_present();
        self.notify(namespace, Recipient::Rank(first), neighbour.rank(), &message);
        self.report(HubEvent::Noticed { namespace, message });
    }

    /// Reports that a stream of a neighbour that was cut goes on, over this interface.
    pub(super) fn moved(
        &mut self,
        namespace: Namespace,
        (route, neighbour): (RouteId, Neighbour),
        by: u16,
        now: Duration,
    ) {
        let over = self.interface_name(by);
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        // A resumed stream also shows that the neighbour is heard again.
        job.announced.silent.remove(&neighbour);
        // And that what has ended was an older stream of it, which this hub has heard of late.
        job.lost_workers.remove(&(route, neighbour));
        let before = job.announced.moved.insert((neighbour, by), now);
        if before.is_some_and(|before| now.saturating_sub(before) < RESUME) {
            return;
        }
        let why = match self.interfaces_down.values().next() {
            Some(down) => format!("the hub's {}", down.reason),
            None => "a stream of it was cut".to_string(),
        };
        let message =
            format!("{} of job `{}` goes on over {over}: {why}", job.name_of(neighbour), job.terms.name);
        self.info(message.clone());
        let first = self.jobs[&namespace].ranks.first_present();
        self.notify(namespace, Recipient::Rank(first), neighbour.rank(), &message);
        self.report(HubEvent::Noticed { namespace, message });
    }

    /// Reports to a late rank, or to the ranks of a late site, and to rank 0, that steps end without it. The first report of each
    /// magnitude is enough.
    pub(super) fn late(&mut self, namespace: Namespace, late: LateNeighbour) {
        let LateNeighbour { neighbour, steps, of } = late;
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        let (magnitude, announced) = (digits(steps), job.announced.late.entry(neighbour).or_default());
        if magnitude <= *announced {
            return;
        }
        *announced = magnitude;
        let message = format!(
            "{} of job `{}` is late: {steps} of {of} steps so far have ended without it (stragglers = {})",
            job.name_of(neighbour),
            job.terms.name,
            job.terms.stragglers
        );
        let itself = match neighbour {
            Neighbour::Worker(rank) => Some(Recipient::Rank(rank)),
            // One hub of all those that own chunks is enough.
            Neighbour::Site(site) => {
                let owner = job.terms.composed.composition.tops().into_iter().find(|&top| top != site);
                let speaks = owner == Some(job.terms.site) && job.terms.hub == 0;
                speaks.then_some(Recipient::Site(site))
            }
            Neighbour::Counterpart(_) => None,
        };
        self.warn(message.clone());
        let recipients = [Some(Recipient::Rank(0)), itself.filter(|&to| to != Recipient::Rank(0))];
        for to in recipients.into_iter().flatten() {
            self.notify(namespace, to, neighbour.rank(), &message);
        }
        self.report(HubEvent::Noticed { namespace, message });
    }

    /// Sends a notice to the log and to all ranks that exchange here.
    pub(super) fn notify_all(&mut self, namespace: Namespace, rank: Option<u32>, message: &str) {
        if self.jobs.contains_key(&namespace) {
            self.warn(message.to_owned());
            self.notify(namespace, Recipient::All, rank, message);
        }
    }

    /// Sends a notice by way of the job's first core, which has a stream of every rank here.
    fn notify(&mut self, namespace: Namespace, to: Recipient, rank: Option<u32>, message: &str) {
        if let Some(&core) = self.jobs[&namespace].terms.cores().first() {
            let notice = Notice { rank, message: message.to_owned() };
            self.outputs.push(Output::Notify { namespace, core, to, notice });
        }
    }

    /// The name of an interface for people.
    fn interface_name(&self, number: u16) -> String {
        let names = &self.hub.interface_names;
        let copies = (self.hub.interfaces / names.len().max(1)).max(1);
        // Only other hubs come another way.
        names.get(usize::from(number) / copies).map_or("the link between hubs", String::as_str).to_owned()
    }
}

/// Number of decimal digits of a count, at least 1.
pub(super) fn digits(count: u64) -> u32 {
    count.max(1).ilog10() + 1
}
