//! The choice of hubs that become standbys of jobs which run.

use std::collections::BTreeMap;

use super::job::Transition;
use super::job::new_standbys::LackingShare;
use super::{Job, Membership, Now, Output};
use crate::auth::Namespace;
use crate::composition::Place;
use crate::standbys::{Candidate, best_candidate};

impl Membership {
    /// Asks hubs to become the standbys of shares that have none.
    pub(super) fn check_new_standbys(&mut self, namespace: Namespace, now: Now) {
        let Some(job) = self.jobs.get_mut(&namespace).filter(|job| !job.shares().is_empty()) else { return };
        let late = job.check_asked_standbys(now);
        job.note_lacking(now);
        let lacking = job.lacking_shares();
        if late != Transition::None {
            self.follow(namespace, late);
        }
        let mut asked: BTreeMap<u32, Vec<u16>> = BTreeMap::new();
        for lacking in lacking {
            if let Some(hub) = self.new_standby(namespace, lacking, &asked, now) {
                asked.entry(hub).or_default().push(lacking.share);
            }
        }
        for (hub, shares) in asked {
            let team = self.allowance(namespace);
            let (Some(shape), Some(job)) = (self.hubs.shape(hub).cloned(), self.jobs.get_mut(&namespace))
            else {
                continue;
            };
            let command = match job.parts_of(hub) {
                0 => job.ask_standby(hub, shape, shares, team, now),
                _ => job.ask_further(hub, shares, team, now),
            };
            if let Some(command) = command {
                self.outputs.push(Output::Save(namespace));
                self.outputs.push(Output::ChangeMembership { hub, namespace, command });
            }
        }
    }

    /// Whether a hub that offers to serve at `offered` can serve the workers of another at `place`, as it demands.
    pub(super) fn may_serve(&self, job: &Job, hub: u32, (offered, place): (&Place, &Place)) -> bool {
        let is_encrypted = job.options.encrypt || !self.hubs.demand_encryption(|other| other == hub);
        let is_chosen = self.hubs.is_chosen(hub, job.options.hub_label);
        (*offered == Place::default() || offered == place) && is_encrypted && is_chosen
    }

    /// The hub that is best asked to become the standby of one that serves a share, besides what is `asked` of others.
    fn new_standby(
        &self,
        namespace: Namespace,
        lacking: LackingShare,
        asked: &BTreeMap<u32, Vec<u16>>,
        now: Now,
    ) -> Option<u32> {
        let job = self.jobs.get(&namespace)?;
        let served_by = lacking.served_by;
        let (serving, place) = (self.hubs.location(served_by), self.hubs.place(served_by)?);
        let mut free = self.hubs.shapes();
        free.retain(|(hub, (_, offered))| {
            self.may_serve(job, *hub, (offered, place)) && !job.is_moved_off(*hub)
        });
        // The share waits for the hub that an operator has named, as long as that one takes jobs.
        let destination = job.destination(lacking, now);
        if let Some(named) = free.iter().find(|(hub, _)| Some(*hub) == destination).cloned() {
            free = vec![named];
        }
        free.retain(|(hub, _)| job.may_ask_standby(*hub, now) || job.may_ask_further(*hub, lacking, now));
        let candidates: Vec<Candidate> = free
            .iter()
            .map(|(hub, _)| {
                let elsewhere = self.jobs.values().filter(|job| !job.state().has_ended());
                let parts = (
                    job.parts_of(*hub) + asked.get(hub).map_or(0, Vec::len),
                    elsewhere.filter(|job| job.has_part_at(*hub)).count(),
                );
                Candidate { location: self.hubs.location(*hub), parts }
            })
            .collect();
        best_candidate(&serving, &candidates).map(|position| free[position].0)
    }
}
