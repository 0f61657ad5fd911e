//! The manager's state in one file: saved from a running manager, restored before one starts.

use std::path::Path;

use paramhub_core::membership::{HubRecord, JobRecord};
use paramhub_core::teams::TeamRecord;
use paramhub_core::tokens::TokenRecord;
use paramhub_trust::AuthorityRecord;
use serde::{Deserialize, Serialize};

use crate::error::ManagerError;
use crate::etcd_address::EtcdAddress;
use crate::store::{FileStore, Store};

/// The version of the form of a backup.
const VERSION: u32 = 1;

/// All records of a manager. It holds secrets: those of jobs, and the keys of authorities.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Backup {
    /// The version of this form.
    paramhub_state: u32,
    pub(crate) jobs: Vec<JobRecord>,
    /// A backup of an earlier release has none.
    #[serde(default)]
    pub(crate) hubs: Vec<HubRecord>,
    pub(crate) tokens: Vec<TokenRecord>,
    pub(crate) teams: Vec<TeamRecord>,
    /// The newest first.
    pub(crate) authorities: Vec<AuthorityRecord>,
}

impl Backup {
    /// Everything in a store. It blocks on the disk or the network.
    pub(crate) fn of(store: &dyn Store) -> Result<Backup, ManagerError> {
        Ok(Backup {
            paramhub_state: VERSION,
            jobs: store.load_jobs()?,
            hubs: store.load_hubs()?,
            tokens: store.load_tokens()?,
            teams: store.load_teams()?,
            authorities: store.load_authorities()?,
        })
    }

    /// Reads what a manager has saved.
    fn parse(backup: &[u8]) -> Result<Backup, ManagerError> {
        let unreadable = |cause: String| ManagerError::Backup { cause };
        let backup: Backup = serde_json::from_slice(backup).map_err(|cause| unreadable(cause.to_string()))?;
        if backup.paramhub_state != VERSION {
            return Err(unreadable(format!(
                "it has version {}, and this release reads {VERSION}",
                backup.paramhub_state
            )));
        }
        Ok(backup)
    }
}

/// Restores what a manager has saved into a state directory that has none yet. A manager that starts with it has
/// the jobs, hubs, tokens, teams and authorities of the other: jobs that ran when the backup was made, and that their
/// hubs still have, go on.
///
/// # Errors
/// If the backup is none or of a later release, or the directory has a state or cannot be written.
pub fn restore(backup: &[u8], directory: &Path) -> Result<(), ManagerError> {
    FileStore::restore(directory, &Backup::parse(backup)?)
}

/// [`restore`] into an etcd whose prefix has no state yet.
///
/// # Errors
/// If the backup is none or of a later release, etcd does not answer, or there is a state under the prefix already.
#[cfg(feature = "etcd")]
pub fn restore_to_etcd(backup: &[u8], address: &EtcdAddress) -> Result<(), ManagerError> {
    crate::etcd::restore(address, &Backup::parse(backup)?)
}

/// [`restore`] into an etcd, which needs the feature `etcd`.
///
/// # Errors
/// Always: this program was built without the feature.
#[cfg(not(feature = "etcd"))]
pub fn restore_to_etcd(_backup: &[u8], _address: &EtcdAddress) -> Result<(), ManagerError> {
    Err(ManagerError::EtcdMissing)
}
