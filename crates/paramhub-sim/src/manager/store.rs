//! What a manager keeps on its disk, and what it has yet to save.

use std::collections::{BTreeMap, BTreeSet};

use paramhub_core::auth::Namespace;
use paramhub_core::membership::{Answer, CallId, HubRecord, JobRecord, Membership, Now};
use paramhub_core::service::{HubCommand, HubRegistered, JobStatus};

use crate::network::StreamId;

/// The records on disk.
#[derive(Default)]
pub(crate) struct Store {
    jobs: BTreeMap<Namespace, JobRecord>,
    hubs: BTreeMap<u32, HubRecord>,
}

/// What has changed, and the answers that wait until it is saved, as in the product's `state`.
#[derive(Default)]
pub(super) struct Unsaved {
    pub(super) jobs: BTreeSet<Namespace>,
    pub(super) removed_jobs: Vec<Namespace>,
    /// Hubs that have joined or are forgotten.
    pub(super) hubs: BTreeSet<u32>,
    pub(super) answers: Vec<(CallId, Answer)>,
    /// A hub must know no membership that a manager which restarts does not.
    pub(super) commands: Vec<(u32, HubCommand)>,
    /// Hubs whose calls to join wait.
    pub(super) joining: Vec<(StreamId, HubRegistered)>,
}

/// Records to write, and the keys of those to remove.
pub(super) struct Changes {
    jobs: Vec<JobRecord>,
    removed_jobs: Vec<Namespace>,
    hubs: Vec<HubRecord>,
    removed_hubs: Vec<u32>,
}

impl Store {
    /// Writes and removes records, all or none.
    pub(super) fn save(&mut self, changes: Changes) {
        self.jobs.extend(changes.jobs.into_iter().map(|record| (record.status.namespace, record)));
        changes.removed_jobs.iter().for_each(|namespace| drop(self.jobs.remove(namespace)));
        self.hubs.extend(changes.hubs.into_iter().map(|record| (record.hub, record)));
        changes.removed_hubs.iter().for_each(|hub| drop(self.hubs.remove(hub)));
    }

    /// Writes the record of a job that is new.
    pub(super) fn create(&mut self, record: JobRecord) {
        self.jobs.insert(record.status.namespace, record);
    }

    /// All records.
    pub(super) fn load(&self) -> (Vec<JobRecord>, Vec<HubRecord>) {
        (self.jobs.values().cloned().collect(), self.hubs.values().cloned().collect())
    }

    /// A job as its record shows it.
    pub(super) fn status(&self, namespace: Namespace) -> Option<&JobStatus> {
        self.jobs.get(&namespace).map(|record| &record.status)
    }
}

impl Unsaved {
    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty() && self.removed_jobs.is_empty() && self.hubs.is_empty()
    }

    /// The records as they are now.
    pub(super) fn changes(&self, membership: &Membership, now: Now) -> Changes {
        let jobs = self.jobs.iter().filter_map(|&namespace| membership.job(namespace).ok());
        let (mut hubs, mut removed_hubs) = (Vec::new(), Vec::new());
        for &hub in &self.hubs {
            match membership.hub_record(hub) {
                Some(record) => hubs.push(record),
                None => removed_hubs.push(hub),
            }
        }
        Changes {
            jobs: jobs.map(|job| job.record(now)).collect(),
            removed_jobs: self.removed_jobs.clone(),
            hubs,
            removed_hubs,
        }
    }
}
