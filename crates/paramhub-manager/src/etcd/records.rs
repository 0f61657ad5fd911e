//! The records of the present leader in etcd.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, DeleteOptions, GetOptions, KeyValue, Txn, TxnOp, TxnOpResponse};
use tokio::runtime::Handle;
use tokio::sync::Mutex;

use super::Keys;
use super::connection::{CALL_TIMEOUT, CallError, Connection, WRITE_TIMEOUT, reader};
use crate::error::ManagerError;
use crate::etcd_address::EtcdAddress;
use crate::store::{Key, Store, Table, Write, WriteError};
use crate::term::HeldTerm;

/// The most bytes of a value, and of a part of a record that is larger. etcd takes requests of 1.5 MB.
const VALUE_BYTES_MAX: usize = 256 << 10;
/// The most bytes of keys and values in one transaction.
const TRANSACTION_BYTES_MAX: usize = 1 << 20;
/// The most operations in one transaction. etcd takes 128.
const TRANSACTION_OPERATIONS_MAX: usize = 100;
/// The number of records that are read at a time.
const PAGE: i64 = 64;
/// The pause before a write that no member has answered is repeated.
const REPEAT_PAUSE: Duration = Duration::from_millis(100);
/// Begins the value of a record that is in parts. The JSON of a record never begins so.
const IN_PARTS: &str = "parts ";
const ADVICE_DAMAGED: &str =
    "Give the managers another prefix with --state, or restore a state that was saved";

/// An etcd, and the keys in it.
pub(super) struct Etcd {
    pub(super) address: EtcdAddress,
    pub(super) connection: Connection,
    pub(super) keys: Keys,
}

/// The store of a leader, for one term.
pub(crate) struct EtcdStore {
    etcd: Arc<Etcd>,
    term: Arc<HeldTerm>,
    executor: Handle,
    writer: Mutex<Writer>,
}

/// What the next write needs to know of those before.
#[derive(Default)]
struct Writer {
    /// The revision of the key `writes`.
    revision: i64,
    /// The versions of the records that are in parts, by their keys.
    versions: HashMap<String, String>,
    /// The number of records in parts that were written in this term.
    written: u64,
}

impl Etcd {
    /// All keys that begin so, with their values, in order.
    pub(super) async fn range(&self, beginning: &str) -> Result<Vec<KeyValue>, CallError> {
        let mut found: Vec<KeyValue> = Vec::new();
        let end = end_of(beginning);
        let mut from = beginning.as_bytes().to_vec();
        loop {
            let options = GetOptions::new().with_range(end.clone()).with_limit(PAGE);
            let page = self.connection.call(CALL_TIMEOUT, |client| {
                let (from, options) = (from.clone(), options.clone());
                async move { reader(&client).get(from, Some(options)).await }
            });
            let mut page = page.await?;
            let has_more = page.more();
            found.extend(page.take_kvs());
            match found.last() {
                Some(last) if has_more => from = [last.key(), &[0]].concat(),
                _ => return Ok(found),
            }
        }
    }

    /// The records of a table, in the order of their keys, and the versions of those in parts.
    pub(super) async fn records(
        &self,
        table: Table,
    ) -> Result<(Vec<Vec<u8>>, HashMap<String, String>), ReadError> {
        let (mut records, mut versions) = (Vec::new(), HashMap::new());
        for entry in self.range(&self.keys.table(table)).await? {
            let (key, value) = entry.into_key_value();
            let Some(parts) = value.strip_prefix(IN_PARTS.as_bytes()) else {
                records.push(value);
                continue;
            };
            let damaged = |what: &str| {
                ReadError::Damaged(format!("the record {} {what}", String::from_utf8_lossy(&key)))
            };
            let head = std::str::from_utf8(parts).ok().and_then(|head| head.split_once(' '));
            let (version, bytes) = head.ok_or_else(|| damaged("does not say where its parts are"))?;
            let key = String::from_utf8(key.clone()).map_err(|_| damaged("has a key that is no text"))?;
            let parts = self.range(&self.keys.parts(&key, version)).await?;
            let record: Vec<u8> = parts.iter().flat_map(|part| part.value()).copied().collect();
            if record.len().to_string() != bytes {
                return Err(damaged("lacks some of its parts"));
            }
            records.push(record);
            versions.insert(key, version.to_owned());
        }
        Ok((records, versions))
    }

    fn unread(&self, cause: ReadError) -> ManagerError {
        match cause {
            ReadError::Call(cause) => self.refuse(cause, super::prepare::ADVICE),
            ReadError::Damaged(cause) => self.refuse(cause, ADVICE_DAMAGED),
        }
    }

    pub(super) fn refuse(&self, cause: impl ToString, advice: &'static str) -> ManagerError {
        ManagerError::State { place: self.address.to_string(), cause: cause.to_string(), advice }
    }
}

/// Why records cannot be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("{0}")]
    Damaged(String),
}

impl EtcdStore {
    /// The store as this term's leader finds it. Removes parts that an interrupted write has left.
    pub(super) async fn open(etcd: Arc<Etcd>, term: Arc<HeldTerm>) -> Result<EtcdStore, ManagerError> {
        let unread = |cause: CallError| etcd.unread(cause.into());
        let last = etcd
            .connection
            .call(CALL_TIMEOUT, |mut client| {
                let key = etcd.keys.writes();
                async move { client.get(key, None).await }
            })
            .await
            .map_err(unread)?;
        let revision = last.kvs().first().map_or(0, KeyValue::mod_revision);
        let mut versions = HashMap::new();
        for table in [Table::Jobs, Table::Hubs, Table::Tokens, Table::Teams, Table::Authorities] {
            let read = etcd.records(table).await;
            versions.extend(read.map_err(|cause| etcd.unread(cause))?.1);
        }
        let left = etcd.range(&etcd.keys.all_parts()).await.map_err(unread)?;
        let is_of_a_record = |key: &str| {
            versions.iter().any(|(record, version)| key.starts_with(&etcd.keys.parts(record, version)))
        };
        let left: Vec<Operation> = left
            .iter()
            .filter_map(|part| part.key_str().ok())
            .filter(|key| !is_of_a_record(key))
            .map(|key| Operation::Remove { key: key.to_owned(), with_all_below: false })
            .collect();
        let writer = Mutex::new(Writer { revision, versions, written: 0 });
        let store = EtcdStore { etcd, term, executor: Handle::current(), writer };
        store
            .make(left, &mut *store.writer.lock().await)
            .await
            .map_err(|cause| store.damaged(cause.to_string()))?;
        Ok(store)
    }

    /// Makes operations, in order, by as few transactions as etcd takes.
    async fn make(&self, operations: Vec<Operation>, writer: &mut Writer) -> Result<(), WriteError> {
        for batch in batches(operations) {
            self.make_once(batch, writer).await?;
        }
        Ok(())
    }

    /// Makes one transaction, as often as it needs until a member answers.
    async fn make_once(&self, batch: Vec<Operation>, writer: &mut Writer) -> Result<(), WriteError> {
        let keys = &self.etcd.keys;
        let operations: Vec<TxnOp> = batch.into_iter().map(Operation::into_etcd).collect();
        loop {
            if !self.term.leads() {
                return Err(self.lost());
            }
            let compares = [
                Compare::create_revision(keys.leader(), CompareOp::Equal, self.term.number.0),
                Compare::mod_revision(keys.writes(), CompareOp::Equal, writer.revision),
            ];
            let mut all = vec![TxnOp::put(keys.writes(), "", None)];
            all.extend(operations.iter().cloned());
            let otherwise = [TxnOp::get(keys.leader(), None), TxnOp::get(keys.writes(), None)];
            let transaction = Txn::new().when(compares).and_then(all).or_else(otherwise);
            let made = self.etcd.connection.call(WRITE_TIMEOUT, |mut client| {
                let transaction = transaction.clone();
                async move { client.txn(transaction).await }
            });
            match made.await {
                Ok(answer) if answer.succeeded() => {
                    writer.revision = answer.header().map_or(0, etcd_client::ResponseHeader::revision);
                    return Ok(());
                }
                Ok(answer) => {
                    let found = answer.op_responses();
                    let [leader, writes] = &found[..] else { return Err(self.lost()) };
                    if first_of(leader).map(|leader| leader.create_revision()) != Some(self.term.number.0) {
                        self.term.end();
                        return Err(self.lost());
                    }
                    // etcd has made it, or one before it, although nobody has said so. Making it again changes nothing.
                    writer.revision = first_of(writes).map_or(0, |writes| writes.mod_revision());
                }
                Err(CallError::Unanswered(_)) => tokio::time::sleep(REPEAT_PAUSE).await,
                Err(refused) => return Err(WriteError::Refused(format!("{}: {refused}", self.etcd.address))),
            }
        }
    }

    fn lost(&self) -> WriteError {
        WriteError::Unanswered(format!("{}: this manager does not lead any more", self.etcd.address))
    }

    async fn read_table(&self, table: Table) -> Result<Vec<Vec<u8>>, ManagerError> {
        self.etcd.records(table).await.map(|(records, _)| records).map_err(|cause| self.etcd.unread(cause))
    }

    async fn write_all(&self, writes: Vec<Write>) -> Result<(), WriteError> {
        let mut writer = self.writer.lock().await;
        // What is written is known to be only once all is.
        let (mut operations, mut versions) = (Vec::new(), BTreeMap::new());
        let keys = &self.etcd.keys;
        let mut admits = false;
        for Write { key, record } in writes {
            admits |= matches!(key, Key::Token(_) | Key::Authority(_));
            let key = keys.record(&key);
            let version = match record {
                Some(record) if record.len() > VALUE_BYTES_MAX => {
                    writer.written += 1;
                    let version = format!("{:x}-{:x}", self.term.number.0, writer.written);
                    operations.extend(in_parts(keys, &key, &version, &record));
                    Some(version)
                }
                Some(record) => {
                    operations.push(Operation::Put { key: key.clone(), value: record });
                    None
                }
                None => {
                    operations.push(Operation::Remove { key: key.clone(), with_all_below: false });
                    None
                }
            };
            // The parts of the version before go after the record that named them.
            let before = versions.get(&key).cloned().unwrap_or_else(|| writer.versions.get(&key).cloned());
            if let Some(before) = before {
                operations.push(Operation::Remove { key: keys.parts(&key, &before), with_all_below: true });
            }
            versions.insert(key, version);
        }
        if admits {
            operations.push(Operation::Put { key: keys.access(), value: Vec::new() });
        }
        let made = self.make(operations, &mut writer).await;
        for (key, version) in versions {
            match version {
                Some(version) => drop(writer.versions.insert(key, version)),
                None => drop(writer.versions.remove(&key)),
            }
        }
        made
    }
}

impl Store for EtcdStore {
    fn read(&self, table: Table) -> Result<Vec<Vec<u8>>, ManagerError> {
        self.executor.block_on(self.read_table(table))
    }

    fn write(&self, writes: Vec<Write>) -> Result<(), WriteError> {
        self.executor.block_on(self.write_all(writes))
    }

    fn damaged(&self, cause: String) -> ManagerError {
        self.etcd.refuse(cause, ADVICE_DAMAGED)
    }
}

/// What a transaction does to a key.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Operation {
    Put { key: String, value: Vec<u8> },
    Remove { key: String, with_all_below: bool },
}

impl Operation {
    fn bytes(&self) -> usize {
        match self {
            Operation::Put { key, value } => key.len() + value.len(),
            Operation::Remove { key, .. } => key.len(),
        }
    }

    fn into_etcd(self) -> TxnOp {
        match self {
            Operation::Put { key, value } => TxnOp::put(key, value, None),
            Operation::Remove { key, with_all_below: true } => {
                TxnOp::delete(key, Some(DeleteOptions::new().with_prefix()))
            }
            Operation::Remove { key, with_all_below: false } => TxnOp::delete(key, None),
        }
    }

    fn key(&self) -> &str {
        match self {
            Operation::Put { key, .. } | Operation::Remove { key, .. } => key,
        }
    }

    fn touches(&self, other: &str) -> bool {
        match self {
            Operation::Remove { key, with_all_below: true } => other.starts_with(key.as_str()),
            Operation::Put { key, .. } | Operation::Remove { key, .. } => key == other,
        }
    }
}

/// The operations that write a record in parts. The record itself, which names them, comes last: until then the version
/// before is the record.
fn in_parts<'a>(
    keys: &'a Keys,
    key: &'a str,
    version: &'a str,
    record: &'a [u8],
) -> impl Iterator<Item = Operation> + 'a {
    let beginning = keys.parts(key, version);
    let parts = record.chunks(VALUE_BYTES_MAX).enumerate().map(move |(number, part)| Operation::Put {
        key: format!("{beginning}{number:06}"),
        value: part.to_vec(),
    });
    let head = format!("{IN_PARTS}{version} {}", record.len()).into_bytes();
    parts.chain(std::iter::once(Operation::Put { key: key.to_owned(), value: head }))
}

/// Divides operations into transactions that etcd takes. No transaction changes a key twice, which etcd refuses.
fn batches(operations: Vec<Operation>) -> Vec<Vec<Operation>> {
    let mut batches: Vec<Vec<Operation>> = Vec::new();
    let (mut bytes, mut keys) = (0, Vec::<String>::new());
    for operation in operations {
        let is_full = bytes + operation.bytes() > TRANSACTION_BYTES_MAX
            || keys.len() >= TRANSACTION_OPERATIONS_MAX
            || keys.iter().any(|key| operation.touches(key));
        if is_full || batches.is_empty() {
            batches.push(Vec::new());
            (bytes, keys) = (0, Vec::new());
        }
        bytes += operation.bytes();
        keys.push(operation.key().to_owned());
        batches.last_mut().expect("one was just there").push(operation);
    }
    batches
}

/// The end of the range of all keys that begin so.
fn end_of(beginning: &str) -> Vec<u8> {
    let mut end = beginning.as_bytes().to_vec();
    // Every beginning here ends with a slash.
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

/// The key that a transaction has read, if it is there.
pub(super) fn first_of(read: &TxnOpResponse) -> Option<&KeyValue> {
    match read {
        TxnOpResponse::Get(found) => found.kvs().first(),
        _ => None,
    }
}

#[cfg(test)]
mod batching {
    use super::*;

    #[test]
    fn transactions_have_as_much_as_etcd_takes_and_no_key_twice() {
        let put = |key: &str, bytes: usize| Operation::Put { key: key.into(), value: vec![0; bytes] };
        let many: Vec<Operation> = (0..250).map(|number| put(&format!("{number}"), 1)).collect();
        assert_eq!(batches(many).iter().map(Vec::len).collect::<Vec<_>>(), [100, 100, 50]);
        let large = (0..5).map(|number| put(&format!("{number}"), VALUE_BYTES_MAX)).collect();
        assert_eq!(batches(large).iter().map(Vec::len).collect::<Vec<_>>(), [3, 2]);
        let twice = vec![put("a", 1), put("b", 1), put("a", 2)];
        assert_eq!(batches(twice).iter().map(Vec::len).collect::<Vec<_>>(), [2, 1]);
        let below = Operation::Remove { key: "p/1/".into(), with_all_below: true };
        assert_eq!(batches(vec![put("p/1/0", 1), below.clone()]).len(), 2);
        assert_eq!(batches(vec![put("p/2/0", 1), below]).len(), 1);
        assert!(batches(Vec::new()).is_empty());
    }
}
