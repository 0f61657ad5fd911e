//! The state of the checkpoints of all jobs.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use paramhub_core::auth::Namespace;
use paramhub_core::checkpoint::CheckpointStatus;
use paramhub_core::service::HubJobCheckpoints;

/// The state of each job's checkpoints, for reports to the manager.
#[derive(Clone, Debug, Default)]
pub(crate) struct CheckpointStatuses(Arc<Mutex<HashMap<Namespace, (CheckpointStatus, bool)>>>);

impl CheckpointStatuses {
    /// The state for all jobs; it lists a job that is over one last time.
    pub(crate) fn read(&self) -> Vec<HubJobCheckpoints> {
        let mut statuses = self.0.lock().expect("no panic while holding it");
        let all = statuses
            .iter()
            .map(|(&namespace, (status, _))| HubJobCheckpoints { namespace, status: status.clone() });
        let all = all.collect();
        statuses.retain(|_, (_, is_over)| !*is_over);
        all
    }

    pub(super) fn change(&self, namespace: Namespace, change: impl FnOnce(&mut CheckpointStatus)) {
        change(&mut self.0.lock().expect("no panic while holding it").entry(namespace).or_default().0);
    }

    pub(super) fn end(&self, namespace: Namespace) {
        if let Some((_, is_over)) = self.0.lock().expect("no panic while holding it").get_mut(&namespace) {
            *is_over = true;
        }
    }
}
