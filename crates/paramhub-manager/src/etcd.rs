//! The state of several managers in one etcd, and which of them leads.
//!
//! | key, after the prefix and a slash | value |
//! | --- | --- |
//! | `format` | the version of this table |
//! | `leader` | the URL of the leader; the key has the leader's lease, and ends with it |
//! | `writes` | nothing; every write of a leader changes it |
//! | `access` | nothing; every write to tokens and authorities changes it |
//! | `jobs/`, `hubs/`, `tokens/`, `teams/`, `authorities/` and a name | a record, or where its parts are |
//! | `parts/`, the key of a record, `/`, a version, `/` and a number | a part of a record that is too large for one value |
//!
//! The revision at which the key `leader` was made is the number of the leader's term. A leader writes by transactions that
//! compare it, so one whose lease has ended writes nothing. They also compare the revision of the key `writes`, which the
//! write before has left: a write that etcd takes late, after the leader has repeated it and gone on, changes nothing.

mod candidate;
mod connection;
mod prepare;
mod records;
#[cfg(test)]
mod tests;

pub(crate) use candidate::Candidate;
pub(crate) use prepare::restore;

use crate::etcd_address::EtcdAddress;
use crate::store::{Key, Table};

/// The value of the key `format`.
const FORMAT: &str = "1";

/// The keys of one group of managers.
#[derive(Clone, Debug)]
struct Keys {
    /// With a slash at its end.
    prefix: String,
}

impl Keys {
    fn of(address: &EtcdAddress) -> Keys {
        Keys { prefix: format!("{}/", address.prefix) }
    }

    /// The beginning of all of them.
    fn all(&self) -> &str {
        &self.prefix
    }

    fn format(&self) -> String {
        format!("{}format", self.prefix)
    }

    fn leader(&self) -> String {
        format!("{}leader", self.prefix)
    }

    fn writes(&self) -> String {
        format!("{}writes", self.prefix)
    }

    fn access(&self) -> String {
        format!("{}access", self.prefix)
    }

    /// The beginning of the keys of a table.
    fn table(&self, table: Table) -> String {
        format!("{}{}/", self.prefix, table.name())
    }

    /// The key of a record. Numbers are padded, so that the order of keys is that of numbers.
    fn record(&self, key: &Key) -> String {
        let table = self.table(table_of(key));
        match key {
            Key::Job(namespace) => format!("{table}{namespace}"),
            Key::Hub(hub) => format!("{table}{hub:010}"),
            Key::Token(name) | Key::Team(name) => format!("{table}{name}"),
            Key::Authority(place) => format!("{table}{place:010}"),
        }
    }

    /// The beginning of the keys of all parts.
    fn all_parts(&self) -> String {
        format!("{}parts/", self.prefix)
    }

    /// The beginning of the keys of the parts of one version of a record, whose key is given.
    fn parts(&self, record: &str, version: &str) -> String {
        let record = record.strip_prefix(&self.prefix).expect("a record's key has the prefix");
        format!("{}parts/{record}/{version}/", self.prefix)
    }
}

/// The table in which a record is.
fn table_of(key: &Key) -> Table {
    match key {
        Key::Job(_) => Table::Jobs,
        Key::Hub(_) => Table::Hubs,
        Key::Token(_) => Table::Tokens,
        Key::Team(_) => Table::Teams,
        Key::Authority(_) => Table::Authorities,
    }
}
