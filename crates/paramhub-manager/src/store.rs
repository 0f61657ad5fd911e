//! The records of jobs, hubs, tokens, teams and authorities on disk, or in memory where no state directory is given.
//!
//! Five redb tables: a job's namespace to JSON, a hub's number to JSON, a token's id to JSON, a team's name to JSON, and
//! authorities, the newest first. Records of jobs hold the jobs' secrets, those of authorities their keys: the file is
//! its owner's alone.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use paramhub_core::membership::{HubRecord, JobRecord};
use paramhub_core::teams::TeamRecord;
use paramhub_core::tokens::TokenRecord;
use paramhub_trust::AuthorityRecord;
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::backup::Backup;
use crate::error::ManagerError;
use crate::state::Changes;

/// Name of the file in the state directory.
const FILE: &str = "jobs.redb";
const JOBS: TableDefinition<[u8; 16], &[u8]> = TableDefinition::new("jobs");
const HUBS: TableDefinition<u32, &[u8]> = TableDefinition::new("hubs");
const TOKENS: TableDefinition<&str, &[u8]> = TableDefinition::new("tokens");
const AUTHORITIES: TableDefinition<u64, &[u8]> = TableDefinition::new("authorities");
const TEAMS: TableDefinition<&str, &[u8]> = TableDefinition::new("teams");
/// Records are small and read once: redb's own default would let the cache grow to a gigabyte.
const CACHE_BYTES: usize = 4 << 20;

const ADVICE_WRITABLE: &str = "Name a directory with --state that this user can write to and whose disk has room, or \
                               leave --state out to keep jobs in memory";
const ADVICE_CORRUPT: &str = "Move that file away to start with no jobs, tokens and teams and with another authority, or name another directory with \
     --state";
const ADVICE_RESTORING: &str = "Another restore may be under way there. Remove the directory `restoring` that an interrupted one has left, or name \
     another directory with --state";
const ADVICE_RESTORED: &str =
    "A backup is restored into a directory that has no state: name another with --state";
const ADVICE_IN_USE: &str =
    "Another connection manager uses it: stop that one, or name another directory with --state";

/// The records.
pub(crate) struct Store {
    path: Option<PathBuf>,
    /// `None` between a failed write and the next one: redb refuses further work after an I/O error until it
    /// is reopened.
    database: Mutex<Option<Database>>,
}

impl Store {
    /// Opens the store in `directory`, creating it, or in memory. It blocks on the disk, as all methods do.
    pub(crate) fn open(directory: Option<&Path>) -> Result<Self, ManagerError> {
        let Some(directory) = directory else {
            let backend = redb::backends::InMemoryBackend::new();
            let database = builder().create_with_backend(backend).expect("memory takes a new database");
            write(&database, &Changes::default()).expect("memory takes a new table");
            return Ok(Store { path: None, database: Mutex::new(Some(database)) });
        };
        let refuse = |path: &Path, cause: String, advice| ManagerError::State {
            path: path.to_path_buf(),
            cause,
            advice,
        };
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(|cause| refuse(directory, cause.to_string(), ADVICE_WRITABLE))?;
        let path = directory.join(FILE);
        let file = open_file(&path).map_err(|cause| refuse(&path, cause.to_string(), ADVICE_WRITABLE))?;
        let database = builder().create_file(file).map_err(|cause| {
            let advice = match &cause {
                DatabaseError::DatabaseAlreadyOpen => ADVICE_IN_USE,
                DatabaseError::Storage(redb::StorageError::Io(cause)) if !is_corrupt(cause) => {
                    ADVICE_WRITABLE
                }
                _ => ADVICE_CORRUPT,
            };
            refuse(&path, cause.to_string(), advice)
        })?;
        // This creates the table, and shows at once whether the file system takes writes.
        write(&database, &Changes::default()).map_err(|cause| refuse(&path, cause, ADVICE_WRITABLE))?;
        Ok(Store { path: Some(path), database: Mutex::new(Some(database)) })
    }

    /// Makes a store in a directory that has none, with all records of a backup, or none.
    pub(crate) fn restore(directory: &Path, backup: &Backup) -> Result<(), ManagerError> {
        let path = directory.join(FILE);
        let refuse = |cause: String, advice| ManagerError::State { path: path.clone(), cause, advice };
        if path.exists() {
            return Err(refuse("it is there already".to_owned(), ADVICE_RESTORED));
        }
        // A store that is only partly written has another name.
        let unfinished = directory.join("restoring");
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .and_then(|()| DirBuilder::new().mode(0o700).create(&unfinished))
            .map_err(|cause| refuse(format!("{}: {cause}", unfinished.display()), ADVICE_RESTORING))?;
        let removed = |cause| {
            let _ = std::fs::remove_dir_all(&unfinished);
            cause
        };
        let written = Store::open(Some(&unfinished)).map_err(removed)?;
        let changes = Changes { jobs: backup.jobs.clone(), hubs: backup.hubs.clone(), ..Changes::default() };
        let all = || {
            written.save(&changes)?;
            backup.tokens.iter().try_for_each(|token| written.save_token(token, &[]))?;
            backup.teams.iter().try_for_each(|team| written.save_team(team))?;
            written.save_authorities(&backup.authorities)
        };
        all().map_err(|cause| removed(refuse(cause, ADVICE_WRITABLE)))?;
        drop(written);
        std::fs::rename(unfinished.join(FILE), &path)
            .map_err(|cause| removed(refuse(cause.to_string(), ADVICE_WRITABLE)))?;
        let _ = std::fs::remove_dir(&unfinished);
        Ok(())
    }

    /// All records of jobs, in no particular order.
    pub(crate) fn load_jobs(&self) -> Result<Vec<JobRecord>, ManagerError> {
        self.load_table(JOBS, "job")
    }

    /// All records of hubs.
    pub(crate) fn load_hubs(&self) -> Result<Vec<HubRecord>, ManagerError> {
        self.load_table(HUBS, "hub")
    }

    /// All records of tokens.
    pub(crate) fn load_tokens(&self) -> Result<Vec<TokenRecord>, ManagerError> {
        self.load_table(TOKENS, "token")
    }

    /// All records of authorities, the newest first.
    pub(crate) fn load_authorities(&self) -> Result<Vec<AuthorityRecord>, ManagerError> {
        self.load_table(AUTHORITIES, "authority")
    }

    /// Replaces the records of authorities, the newest first, all or none. The error is text for people.
    pub(crate) fn save_authorities(&self, records: &[AuthorityRecord]) -> Result<(), String> {
        self.write_by(|database| write_authorities(database, records))
    }

    /// All records of teams.
    pub(crate) fn load_teams(&self) -> Result<Vec<TeamRecord>, ManagerError> {
        self.load_table(TEAMS, "team")
    }

    fn load_table<K: redb::Key + 'static, R: DeserializeOwned>(
        &self,
        table: TableDefinition<K, &'static [u8]>,
        what: &str,
    ) -> Result<Vec<R>, ManagerError> {
        let database = self.database.lock().expect("no holder panics");
        let Some(database) = database.as_ref() else {
            return Err(ManagerError::State {
                path: self.path.clone().unwrap_or_default(),
                cause: "it could not be written a moment ago".to_owned(),
                advice: ADVICE_WRITABLE,
            });
        };
        read_all(database, table, what).map_err(|cause| ManagerError::State {
            path: self.path.clone().unwrap_or_default(),
            cause,
            advice: ADVICE_CORRUPT,
        })
    }

    /// Writes a token's record and removes others, all or none. The error is text for people.
    pub(crate) fn save_token(&self, record: &TokenRecord, removed: &[String]) -> Result<(), String> {
        self.write_by(|database| write_named(database, TOKENS, &[(&record.id, record)], removed))
    }

    /// Writes a team's record. The error is text for people.
    pub(crate) fn save_team(&self, record: &TeamRecord) -> Result<(), String> {
        self.write_by(|database| write_named(database, TEAMS, &[(&record.name, record)], &[]))
    }

    /// Removes a team's record. The error is text for people.
    pub(crate) fn remove_team(&self, name: String) -> Result<(), String> {
        self.write_by(|database| write_named::<TeamRecord>(database, TEAMS, &[], &[name]))
    }

    /// Writes and removes records of jobs and hubs, all or none. The error is text for people.
    pub(crate) fn save(&self, changes: &Changes) -> Result<(), String> {
        self.write_by(|database| write(database, changes))
    }

    fn write_by(&self, write: impl FnOnce(&Database) -> Result<(), String>) -> Result<(), String> {
        let mut slot = self.database.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if slot.is_none() {
            *slot = Some(self.reopen()?);
        }
        let database = slot.as_ref().expect("it was just opened");
        let written = write(database);
        if written.is_err() && self.path.is_some() {
            *slot = None;
        }
        written.map_err(|cause| self.explain(&cause))
    }

    fn reopen(&self) -> Result<Database, String> {
        let path = self.path.as_ref().expect("memory does not fail");
        let file = open_file(path).map_err(|cause| self.explain(&cause.to_string()))?;
        builder().create_file(file).map_err(|cause| self.explain(&cause.to_string()))
    }

    fn explain(&self, cause: &str) -> String {
        let path = self.path.as_deref().unwrap_or(Path::new("memory"));
        format!("{}: {cause}", path.display())
    }
}

fn builder() -> redb::Builder {
    let mut builder = Database::builder();
    builder.set_cache_size(CACHE_BYTES);
    builder
}

fn open_file(path: &Path) -> std::io::Result<File> {
    let file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    if file.metadata()?.permissions().mode() & 0o077 != 0 {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    Ok(file)
}

fn is_corrupt(cause: &std::io::Error) -> bool {
    matches!(cause.kind(), std::io::ErrorKind::InvalidData | std::io::ErrorKind::UnexpectedEof)
}

/// All records of a table; `what` names one in errors.
fn read_all<K: redb::Key + 'static, R: DeserializeOwned>(
    database: &Database,
    table: TableDefinition<K, &'static [u8]>,
    what: &str,
) -> Result<Vec<R>, String> {
    let read = || -> Result<Vec<Result<R, serde_json::Error>>, redb::Error> {
        let table = database.begin_read()?.open_table(table)?;
        table.iter()?.map(|entry| Ok(serde_json::from_slice(entry?.1.value()))).collect()
    };
    let records = read().map_err(|cause| cause.to_string())?;
    let records: Result<Vec<R>, serde_json::Error> = records.into_iter().collect();
    records.map_err(|cause| format!("a {what}'s record cannot be read: {cause}"))
}

/// Writes and removes records of a table whose keys are text.
fn write_named<R: Serialize>(
    database: &Database,
    table: TableDefinition<&'static str, &'static [u8]>,
    changed: &[(&String, &R)],
    removed: &[String],
) -> Result<(), String> {
    let write = || -> Result<(), redb::Error> {
        let transaction = database.begin_write()?;
        {
            let mut table = transaction.open_table(table)?;
            for (key, record) in changed {
                let json = serde_json::to_vec(record).expect("records are plain data");
                table.insert(key.as_str(), json.as_slice())?;
            }
            for key in removed {
                table.remove(key.as_str())?;
            }
        }
        transaction.commit()?;
        Ok(())
    };
    write().map_err(|cause| cause.to_string())
}

fn write_authorities(database: &Database, records: &[AuthorityRecord]) -> Result<(), String> {
    let write = || -> Result<(), redb::Error> {
        let transaction = database.begin_write()?;
        {
            let mut table = transaction.open_table(AUTHORITIES)?;
            table.retain(|_, _| false)?;
            for (place, record) in (0..).zip(records) {
                let json = serde_json::to_vec(record).expect("records are plain data");
                table.insert(place, json.as_slice())?;
            }
        }
        transaction.commit()?;
        Ok(())
    };
    write().map_err(|cause| cause.to_string())
}

fn write(database: &Database, changes: &Changes) -> Result<(), String> {
    let write = || -> Result<(), redb::Error> {
        let transaction = database.begin_write()?;
        {
            // This creates the other tables, which readers expect.
            transaction.open_table(TOKENS)?;
            transaction.open_table(AUTHORITIES)?;
            transaction.open_table(TEAMS)?;
            let mut table = transaction.open_table(JOBS)?;
            for record in &changes.jobs {
                let json = serde_json::to_vec(record).expect("records are plain data");
                table.insert(record.status.namespace.0, json.as_slice())?;
            }
            for namespace in &changes.removed_jobs {
                table.remove(namespace.0)?;
            }
            let mut table = transaction.open_table(HUBS)?;
            for record in &changes.hubs {
                let json = serde_json::to_vec(record).expect("records are plain data");
                table.insert(record.hub, json.as_slice())?;
            }
            for hub in &changes.removed_hubs {
                table.remove(hub)?;
            }
        }
        transaction.commit()?;
        Ok(())
    };
    write().map_err(|cause| cause.to_string())
}
