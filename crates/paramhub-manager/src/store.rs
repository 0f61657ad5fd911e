//! The records of jobs, hubs, tokens, teams and authorities, and the stores that keep them: one file of this machine, or
//! the etcd that several managers share.
//!
//! A record is JSON in every store, so that a state can move from one to another. Records of jobs hold the jobs' secrets,
//! those of authorities their keys: a store is for the managers alone.

mod file;
#[cfg(test)]
pub(crate) mod tests;

use paramhub_core::auth::Namespace;
use paramhub_core::membership::{HubRecord, JobRecord};
use paramhub_core::teams::TeamRecord;
use paramhub_core::tokens::TokenRecord;
use paramhub_trust::{AUTHORITIES_MAX, AuthorityRecord};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::backup::Backup;
use crate::error::ManagerError;
use crate::state::Changes;

pub(crate) use file::FileStore;

/// A kind of record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Table {
    Jobs,
    Hubs,
    Tokens,
    Teams,
    Authorities,
}

/// The name of one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Key {
    Job(Namespace),
    Hub(u32),
    /// A token's id.
    Token(String),
    /// A team's name.
    Team(String),
    /// The place among the authorities, of which the newest has 0.
    Authority(u64),
}

/// A record to write, in JSON, or `None` to remove it.
#[derive(Clone, Debug)]
pub(crate) struct Write {
    pub(crate) key: Key,
    pub(crate) record: Option<Vec<u8>>,
}

/// Why a write failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteError {
    /// The store refuses it, because its disk is full or broken. The text is for people.
    #[error("{0}")]
    Refused(String),
    /// The store has not answered, or not to this manager, which may not lead any more. Whether the write was made is not
    /// known: nobody may be told that it was, or that it was not. Only a store that several managers share fails so.
    #[error("{0}")]
    #[cfg_attr(not(feature = "etcd"), expect(dead_code, reason = "only managers that share a store need it"))]
    Unanswered(String),
}

/// What keeps records. All methods block on a disk or the network.
pub(crate) trait Store: Send + Sync {
    /// All records of a table, in the order of their keys.
    fn read(&self, table: Table) -> Result<Vec<Vec<u8>>, ManagerError>;

    /// Writes and removes records, in this order. Each is written whole or not at all. If this fails, those at the
    /// beginning may have been written, and the caller writes all of them again.
    fn write(&self, writes: Vec<Write>) -> Result<(), WriteError>;

    /// The error for a record that cannot be read.
    fn damaged(&self, cause: String) -> ManagerError;
}

impl dyn Store + '_ {
    /// All records of jobs, in no particular order.
    pub(crate) fn load_jobs(&self) -> Result<Vec<JobRecord>, ManagerError> {
        self.load(Table::Jobs)
    }

    /// All records of hubs.
    pub(crate) fn load_hubs(&self) -> Result<Vec<HubRecord>, ManagerError> {
        self.load(Table::Hubs)
    }

    /// All records of tokens.
    pub(crate) fn load_tokens(&self) -> Result<Vec<TokenRecord>, ManagerError> {
        self.load(Table::Tokens)
    }

    /// All records of teams.
    pub(crate) fn load_teams(&self) -> Result<Vec<TeamRecord>, ManagerError> {
        self.load(Table::Teams)
    }

    /// All records of authorities, the newest first.
    pub(crate) fn load_authorities(&self) -> Result<Vec<AuthorityRecord>, ManagerError> {
        self.load(Table::Authorities)
    }

    fn load<R: DeserializeOwned>(&self, table: Table) -> Result<Vec<R>, ManagerError> {
        parse(&self.read(table)?, table).map_err(|cause| self.damaged(cause))
    }

    /// Writes and removes records of jobs and hubs. No record of a job comes before that of a hub that it names, and no
    /// hub is removed before the jobs that say that it is gone.
    pub(crate) fn save(&self, changes: &Changes) -> Result<(), WriteError> {
        let hubs = changes.hubs.iter().map(|record| put(Key::Hub(record.hub), record));
        let jobs = changes.jobs.iter().map(|record| put(Key::Job(record.status.namespace), record));
        let removed_jobs = changes.removed_jobs.iter().map(|&namespace| remove(Key::Job(namespace)));
        let removed_hubs = changes.removed_hubs.iter().map(|&hub| remove(Key::Hub(hub)));
        self.write(hubs.chain(jobs).chain(removed_jobs).chain(removed_hubs).collect())
    }

    /// Writes a token's record and removes others.
    pub(crate) fn save_token(&self, record: &TokenRecord, removed: &[String]) -> Result<(), WriteError> {
        let removed = removed.iter().map(|id| remove(Key::Token(id.clone())));
        self.write(std::iter::once(put(Key::Token(record.id.clone()), record)).chain(removed).collect())
    }

    /// Writes a team's record.
    pub(crate) fn save_team(&self, record: &TeamRecord) -> Result<(), WriteError> {
        self.write(vec![put(Key::Team(record.name.clone()), record)])
    }

    /// Removes a team's record.
    pub(crate) fn remove_team(&self, name: String) -> Result<(), WriteError> {
        self.write(vec![remove(Key::Team(name))])
    }

    /// Replaces the records of authorities, the newest first.
    pub(crate) fn save_authorities(&self, records: &[AuthorityRecord]) -> Result<(), WriteError> {
        let places = 0..AUTHORITIES_MAX.max(records.len());
        let write = |place: usize| {
            let key = Key::Authority(place as u64);
            records.get(place).map_or_else(|| remove(key.clone()), |record| put(key.clone(), record))
        };
        self.write(places.map(write).collect())
    }

    /// Writes all records of a backup.
    pub(crate) fn save_backup(&self, backup: &Backup) -> Result<(), WriteError> {
        let changes = Changes { jobs: backup.jobs.clone(), hubs: backup.hubs.clone(), ..Changes::default() };
        self.save(&changes)?;
        backup.tokens.iter().try_for_each(|token| self.save_token(token, &[]))?;
        backup.teams.iter().try_for_each(|team| self.save_team(team))?;
        self.save_authorities(&backup.authorities)
    }
}

/// Parses the records of a table. The error is text for people.
pub(crate) fn parse<R: DeserializeOwned>(records: &[Vec<u8>], table: Table) -> Result<Vec<R>, String> {
    let parsed: Result<Vec<R>, serde_json::Error> =
        records.iter().map(|record| serde_json::from_slice(record)).collect();
    parsed.map_err(|cause| format!("a record of {} cannot be read: {cause}", table.name()))
}

impl Table {
    /// Its name in messages and in keys.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Table::Jobs => "jobs",
            Table::Hubs => "hubs",
            Table::Tokens => "tokens",
            Table::Teams => "teams",
            Table::Authorities => "authorities",
        }
    }
}

/// The JSON of a record.
pub(crate) fn json(record: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(record).expect("records are plain data")
}

fn put(key: Key, record: &impl Serialize) -> Write {
    Write { key, record: Some(json(record)) }
}

fn remove(key: Key) -> Write {
    Write { key, record: None }
}
