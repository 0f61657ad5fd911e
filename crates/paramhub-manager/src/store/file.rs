//! A redb file in a directory that is its owner's alone, or memory where no directory is given.
//!
//! Five redb tables: a job's namespace to JSON, a hub's number to JSON, a token's id to JSON, a team's name to JSON, and
//! authorities, the newest first.

use std::borrow::Borrow;
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction};

use super::{Key, Store, Table, Write, WriteError};
use crate::backup::Backup;
use crate::error::ManagerError;

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

/// The records in a file, or in memory.
pub(crate) struct FileStore {
    path: Option<PathBuf>,
    /// `None` between a failed write and the next one: redb refuses further work after an I/O error until it
    /// is reopened.
    database: Mutex<Option<Database>>,
}

impl FileStore {
    /// Opens the store in `directory`, creating it, or in memory.
    pub(crate) fn open(directory: Option<&Path>) -> Result<Self, ManagerError> {
        let Some(directory) = directory else {
            let backend = redb::backends::InMemoryBackend::new();
            let database = builder().create_with_backend(backend).expect("memory takes a new database");
            write(&database, &[]).expect("memory takes a new table");
            return Ok(FileStore { path: None, database: Mutex::new(Some(database)) });
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
        // This creates the tables, and shows at once whether the file system takes writes.
        write(&database, &[]).map_err(|cause| refuse(&path, cause, ADVICE_WRITABLE))?;
        Ok(FileStore { path: Some(path), database: Mutex::new(Some(database)) })
    }

    /// Makes a store in a directory that has none, with all records of a backup, or none.
    pub(crate) fn restore(directory: &Path, backup: &Backup) -> Result<(), ManagerError> {
        let path = directory.join(FILE);
        if path.exists() {
            return Err(refuse(&path, "it is there already".to_owned(), ADVICE_RESTORED));
        }
        // A store that is only partly written has another name.
        let unfinished = directory.join("restoring");
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .and_then(|()| DirBuilder::new().mode(0o700).create(&unfinished))
            .map_err(|cause| refuse(&path, format!("{}: {cause}", unfinished.display()), ADVICE_RESTORING))?;
        let removed = |cause| {
            let _ = std::fs::remove_dir_all(&unfinished);
            cause
        };
        let written = FileStore::open(Some(&unfinished)).map_err(removed)?;
        let store: &dyn Store = &written;
        store
            .save_backup(backup)
            .map_err(|cause| removed(refuse(&path, cause.to_string(), ADVICE_WRITABLE)))?;
        drop(written);
        std::fs::rename(unfinished.join(FILE), &path)
            .map_err(|cause| removed(refuse(&path, cause.to_string(), ADVICE_WRITABLE)))?;
        let _ = std::fs::remove_dir(&unfinished);
        Ok(())
    }

    fn reopen(&self) -> Result<Database, String> {
        let path = self.path.as_ref().expect("memory does not fail");
        let file = open_file(path).map_err(|cause| cause.to_string())?;
        builder().create_file(file).map_err(|cause| cause.to_string())
    }

    /// The place of the records in messages.
    fn place(&self) -> &Path {
        self.path.as_deref().unwrap_or(Path::new("memory"))
    }
}

impl Store for FileStore {
    fn read(&self, table: Table) -> Result<Vec<Vec<u8>>, ManagerError> {
        let database = self.database.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(database) = database.as_ref() else {
            let cause = "it could not be written a moment ago".to_owned();
            return Err(refuse(self.place(), cause, ADVICE_WRITABLE));
        };
        let read = match table {
            Table::Jobs => read_all(database, JOBS),
            Table::Hubs => read_all(database, HUBS),
            Table::Tokens => read_all(database, TOKENS),
            Table::Teams => read_all(database, TEAMS),
            Table::Authorities => read_all(database, AUTHORITIES),
        };
        read.map_err(|cause| self.damaged(cause.to_string()))
    }

    fn write(&self, writes: Vec<Write>) -> Result<(), WriteError> {
        let mut slot = self.database.lock().unwrap_or_else(PoisonError::into_inner);
        let explain = |cause: String| WriteError::Refused(format!("{}: {cause}", self.place().display()));
        if slot.is_none() {
            *slot = Some(self.reopen().map_err(explain)?);
        }
        let database = slot.as_ref().expect("it was just opened");
        let written = write(database, &writes);
        if written.is_err() && self.path.is_some() {
            *slot = None;
        }
        written.map_err(explain)
    }

    fn damaged(&self, cause: String) -> ManagerError {
        refuse(self.place(), cause, ADVICE_CORRUPT)
    }
}

fn refuse(path: &Path, cause: String, advice: &'static str) -> ManagerError {
    ManagerError::State { place: path.display().to_string(), cause, advice }
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

fn read_all<K: redb::Key + 'static>(
    database: &Database,
    table: TableDefinition<K, &'static [u8]>,
) -> Result<Vec<Vec<u8>>, redb::Error> {
    let table = database.begin_read()?.open_table(table)?;
    table.iter()?.map(|entry| Ok(entry?.1.value().to_vec())).collect()
}

/// Makes all writes in one transaction. The error is text for people.
fn write(database: &Database, writes: &[Write]) -> Result<(), String> {
    let write = || -> Result<(), redb::Error> {
        let transaction = database.begin_write()?;
        // Readers expect every table.
        transaction.open_table(JOBS)?;
        transaction.open_table(HUBS)?;
        transaction.open_table(TOKENS)?;
        transaction.open_table(TEAMS)?;
        transaction.open_table(AUTHORITIES)?;
        for Write { key, record } in writes {
            let record = record.as_deref();
            match key {
                Key::Job(namespace) => set(&transaction, JOBS, namespace.0, record)?,
                Key::Hub(hub) => set(&transaction, HUBS, *hub, record)?,
                Key::Token(id) => set(&transaction, TOKENS, id.as_str(), record)?,
                Key::Team(name) => set(&transaction, TEAMS, name.as_str(), record)?,
                Key::Authority(place) => set(&transaction, AUTHORITIES, *place, record)?,
            }
        }
        transaction.commit()?;
        Ok(())
    };
    write().map_err(|cause| cause.to_string())
}

fn set<'k, K: redb::Key + 'static>(
    transaction: &WriteTransaction,
    table: TableDefinition<K, &'static [u8]>,
    key: impl Borrow<K::SelfType<'k>>,
    record: Option<&[u8]>,
) -> Result<(), redb::Error> {
    let mut table = transaction.open_table(table)?;
    match record {
        Some(record) => drop(table.insert(key, record)?),
        None => drop(table.remove(key)?),
    }
    Ok(())
}
