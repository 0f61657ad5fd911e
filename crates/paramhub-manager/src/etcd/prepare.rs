//! What a manager does with etcd before it may lead: it checks that the prefix is one of managers, and makes an authority
//! for a new one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use etcd_client::{Compare, CompareOp, Txn, TxnOp};
use paramhub_trust::{AuthorityRecord, ManagerIdentity};
use tokio::runtime::Runtime;

use super::candidate::{LEASE, Won, leave, renew, win_once};
use super::connection::{CALL_TIMEOUT, CallError, Connection, WRITE_TIMEOUT};
use super::records::{Etcd, EtcdStore};
use super::{FORMAT, Keys};
use crate::backup::Backup;
use crate::blocking::blocking;
use crate::error::ManagerError;
use crate::etcd_address::EtcdAddress;
use crate::store::{Key, Store, Table, json};

/// How long a manager that starts calls an etcd that does not answer.
const START_PATIENCE: Duration = Duration::from_secs(10);
/// The pause between two of these calls.
const START_PAUSE: Duration = Duration::from_millis(250);
pub(super) const ADVICE: &str =
    "Check with --state where etcd answers and what its user may read and write, and that it runs";
const ADVICE_PREFIX: &str =
    "Name a prefix with --state under which there are no keys but those of connection managers";
const ADVICE_RELEASE: &str = "Start the release of the other managers, or name another prefix with --state";
const ADVICE_RESTORED: &str =
    "A backup is restored under a prefix that has no state: name another with --state";

impl Etcd {
    /// An etcd that answers, and whose prefix is one of managers, or has no key: then it is new.
    pub(super) async fn open(address: &EtcdAddress) -> Result<(Arc<Etcd>, bool), ManagerError> {
        let refuse =
            |cause: String| ManagerError::State { place: address.to_string(), cause, advice: ADVICE };
        let connection = Connection::new(address).map_err(refuse)?;
        let etcd = Etcd { address: address.clone(), connection, keys: Keys::of(address) };
        let begun = Instant::now();
        let format = loop {
            match etcd.format().await {
                Err(CallError::Unanswered(_)) if begun.elapsed() < START_PATIENCE => {
                    tokio::time::sleep(START_PAUSE).await;
                }
                found => break found.map_err(|cause| etcd.refuse(in_plain_words(cause), ADVICE))?,
            }
        };
        match format {
            Format::Ours => Ok((Arc::new(etcd), false)),
            Format::None => Ok((Arc::new(etcd), true)),
            Format::Other(found) => {
                let cause = format!("its state has the format {found}, and this release reads {FORMAT}");
                Err(etcd.refuse(cause, ADVICE_RELEASE))
            }
            Format::Foreign => {
                let cause = "there are keys under its prefix that are not of connection managers, or of a restore that was \
                             interrupted";
                Err(etcd.refuse(cause, ADVICE_PREFIX))
            }
        }
    }

    async fn format(&self) -> Result<Format, CallError> {
        let (key, all) = (self.keys.format(), self.keys.all().to_owned());
        let one = etcd_client::GetOptions::new().with_prefix().with_limit(1).with_keys_only();
        let looks = Txn::new().and_then([TxnOp::get(key, None), TxnOp::get(all, Some(one))]);
        let found = self.connection.call(CALL_TIMEOUT, |mut client| {
            let looks = looks.clone();
            async move { client.txn(looks).await }
        });
        let found = found.await?.op_responses();
        let first = |index: usize| found.get(index).and_then(super::records::first_of);
        Ok(match (first(0), first(1)) {
            (Some(format), _) if format.value() == FORMAT.as_bytes() => Format::Ours,
            (Some(format), _) => Format::Other(String::from_utf8_lossy(format.value()).into_owned()),
            (None, Some(_)) => Format::Foreign,
            (None, None) => Format::None,
        })
    }

    /// The authorities of the managers. The first manager under a prefix makes one, and of several that start at once
    /// the others take it.
    pub(super) async fn authorities_or_new(
        &self,
        is_new: bool,
    ) -> Result<Vec<AuthorityRecord>, ManagerError> {
        let read =
            || async { self.parsed(Table::Authorities).await.map_err(|cause| self.refuse(cause, ADVICE)) };
        let there = read().await?;
        if !there.is_empty() {
            return Ok(there);
        }
        let (keys, made) = (&self.keys, ManagerIdentity::make_authority()?);
        let newest = keys.record(&Key::Authority(0));
        let nothing = match is_new {
            true => Compare::version(keys.all(), CompareOp::Equal, 0).with_prefix(),
            false => Compare::version(newest.clone(), CompareOp::Equal, 0),
        };
        let puts = [TxnOp::put(keys.format(), FORMAT, None), TxnOp::put(newest, json(&made), None)];
        let first = Txn::new().when([nothing]).and_then(puts);
        let created = self.connection.call(WRITE_TIMEOUT, |mut client| {
            let first = first.clone();
            async move { client.txn(first).await }
        });
        created.await.map_err(|cause| self.refuse(in_plain_words(cause), ADVICE))?;
        match read().await? {
            there if there.is_empty() => Err(self.refuse("a backup is being restored there", ADVICE_PREFIX)),
            there => Ok(there),
        }
    }

    /// The records of a table, parsed. The error is text for people.
    pub(super) async fn parsed<R: serde::de::DeserializeOwned>(
        &self,
        table: Table,
    ) -> Result<Vec<R>, String> {
        let (records, _) = self.records(table).await.map_err(|cause| cause.to_string())?;
        crate::store::parse(&records, table)
    }
}

enum Format {
    /// The prefix has no key.
    None,
    Ours,
    Other(String),
    Foreign,
}

/// Explains what a wrong user meets.
fn in_plain_words(cause: CallError) -> String {
    let text = cause.to_string();
    if text.contains("user name is empty") {
        return format!("{text}: it asks for a user, as in etcd://USER:PASSWORD@HOST:PORT/PREFIX");
    }
    text
}

/// Writes a backup under a prefix that has no key.
pub(crate) fn restore(address: &EtcdAddress, backup: &Backup) -> Result<(), ManagerError> {
    let runtime = Runtime::new().map_err(ManagerError::System)?;
    runtime.block_on(async {
        let (etcd, is_new) = Etcd::open(address).await?;
        let refuse = |cause: String| etcd.refuse(cause, ADVICE);
        if !is_new {
            return Err(etcd.refuse("it is there already", ADVICE_RESTORED));
        }
        let won = win_once(&etcd, "restore", LEASE).await.map_err(|cause| refuse(cause.to_string()))?;
        let Won { term, lease } =
            won.ok_or_else(|| refuse("a connection manager uses the prefix".to_owned()))?;
        let renewing = tokio::spawn(renew(etcd.clone(), term.clone(), lease));
        let store: Arc<dyn Store> = Arc::new(EtcdStore::open(etcd.clone(), term).await?);
        let records = serde_json::to_vec(backup).expect("records are plain data");
        let written = blocking(move || {
            let backup: Backup = serde_json::from_slice(&records).expect("it was just written");
            store.save_backup(&backup)
        });
        let written = written.await.map_err(|refused| refuse(refused.message))?;
        renewing.abort();
        // The format comes last: without it no manager starts with a part of the records.
        let finished = match written {
            Ok(()) => {
                let put = etcd.connection.call(WRITE_TIMEOUT, |mut client| {
                    let key = etcd.keys.format();
                    async move { client.put(key, FORMAT, None).await }
                });
                put.await.map(drop).map_err(|cause| cause.to_string())
            }
            Err(cause) => Err(cause.to_string()),
        };
        leave(&etcd, lease).await;
        finished.map_err(|cause| {
            refuse(format!(
                "{cause}. What was written there must be removed before another try (etcdctl del --prefix)"
            ))
        })
    })
}
