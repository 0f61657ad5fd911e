//! The records of a leader in a real etcd, which PATH must have.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Client, Compare, CompareOp, Txn, TxnOp};
use tokio::runtime::Runtime;

use super::candidate::{Won, leave, win_once};
use super::records::{Etcd, EtcdStore};
use crate::store::tests::exercise;
use crate::store::{Key, Store, Table, Write, WriteError};

#[path = "../../tests/etcd/server.rs"]
mod server;

use server::EtcdServer;

/// Far longer than any of these tests takes.
const LEASE: Duration = Duration::from_secs(600);

/// An etcd, and what a manager needs to write to it.
struct Bench {
    server: EtcdServer,
    etcd: Arc<Etcd>,
    runtime: Runtime,
}

impl Bench {
    fn new() -> Bench {
        let (server, runtime) = (EtcdServer::start(), Runtime::new().unwrap());
        let address = server.address("group/one").parse().unwrap();
        let (etcd, is_new) = runtime.block_on(Etcd::open(&address)).unwrap();
        assert!(is_new);
        let authorities = runtime.block_on(etcd.authorities_or_new(true)).unwrap();
        assert_eq!(authorities.len(), 1);
        Bench { server, etcd, runtime }
    }

    /// Takes the lead, which nobody has, for longer than any test takes.
    fn win(&self) -> Won {
        let won = self.runtime.block_on(win_once(&self.etcd, "http://test", LEASE));
        won.unwrap().expect("nobody leads")
    }

    fn store(&self, won: &Won) -> EtcdStore {
        self.runtime.block_on(EtcdStore::open(self.etcd.clone(), won.term.clone())).unwrap()
    }

    fn leave(&self, won: &Won) {
        self.runtime.block_on(leave(&self.etcd, won.lease));
    }

    /// Makes a transaction as somebody else. Returns whether its compares held.
    fn transact(&self, transaction: Txn) -> bool {
        self.runtime.block_on(async {
            let mut client = Client::connect([self.server.endpoint()], None).await.unwrap();
            client.txn(transaction).await.unwrap().succeeded()
        })
    }

    fn count(&self, beginning: &str) -> usize {
        self.runtime.block_on(self.etcd.range(beginning)).unwrap().len()
    }
}

fn hub(number: u32, text: &str) -> Vec<Write> {
    vec![Write { key: Key::Hub(number), record: Some(text.as_bytes().to_vec()) }]
}

fn hubs(store: &dyn Store) -> Vec<String> {
    store.read(Table::Hubs).unwrap().into_iter().map(|record| String::from_utf8(record).unwrap()).collect()
}

#[test]
fn etcd_keeps_records() {
    let bench = Rc::new(Bench::new());
    // The managers' first authority is there already.
    let won = Rc::new(RefCell::new(bench.win()));
    let store = bench.store(&won.borrow());
    store.write(vec![Write { key: Key::Authority(0), record: None }]).unwrap();
    let reopen = {
        let (bench, won) = (bench.clone(), won.clone());
        move |store: Box<dyn Store>| {
            drop(store);
            bench.leave(&won.borrow());
            *won.borrow_mut() = bench.win();
            Box::new(bench.store(&won.borrow())) as Box<dyn Store>
        }
    };
    exercise(Box::new(store), reopen);
    assert_eq!(bench.count(&bench.etcd.keys.all_parts()), 0, "no part remains of records that are gone");
}

#[test]
fn a_leader_whose_lease_has_ended_writes_nothing() {
    let bench = Bench::new();
    let former = bench.win();
    let store = bench.store(&former);
    store.write(hub(1, "by the former")).unwrap();
    // It does not know that its lease is gone.
    bench.leave(&former);
    assert!(former.term.leads(), "its clock might as well stand still");
    let present = bench.win();
    let present_store = bench.store(&present);
    present_store.write(hub(1, "by the present")).unwrap();
    let refused = store.write(hub(1, "by the former again"));
    assert!(matches!(refused, Err(WriteError::Unanswered(_))), "{refused:?}");
    assert!(!former.term.leads(), "it has learnt so by that");
    assert_eq!(hubs(&present_store), ["by the present"]);
    assert!(present.term.leads());
}

#[test]
fn a_write_that_etcd_takes_after_later_ones_changes_nothing() {
    let bench = Bench::new();
    let won = bench.win();
    let store = bench.store(&won);
    let keys = &bench.etcd.keys;
    let revision = || {
        let found = bench.runtime.block_on(async {
            let mut client = Client::connect([bench.server.endpoint()], None).await.unwrap();
            client.get(keys.writes(), None).await.unwrap()
        });
        found.kvs().first().map_or(0, |writes| writes.mod_revision())
    };
    let write = |revision: i64, text: &str| {
        let compares = [
            Compare::create_revision(keys.leader(), CompareOp::Equal, won.term.number.0),
            Compare::mod_revision(keys.writes(), CompareOp::Equal, revision),
        ];
        let puts = [TxnOp::put(keys.writes(), "", None), TxnOp::put(keys.record(&Key::Hub(1)), text, None)];
        Txn::new().when(compares).and_then(puts)
    };
    let before = revision();
    store.write(hub(1, "first")).unwrap();
    store.write(hub(1, "second")).unwrap();
    assert!(!bench.transact(write(before, "first")), "it comes late");
    assert_eq!(hubs(&store), ["second"]);
    // One that etcd has made and whose answer was lost is repeated.
    assert!(bench.transact(write(revision(), "third")));
    store.write(hub(1, "third")).unwrap();
    store.write(hub(1, "fourth")).unwrap();
    assert_eq!(hubs(&store), ["fourth"]);
    assert!(won.term.leads());
}

#[test]
fn parts_that_an_interrupted_write_has_left_are_removed() {
    let bench = Bench::new();
    let former = bench.win();
    let store = bench.store(&former);
    let large = "x".repeat(600 << 10);
    store.write(hub(1, &large)).unwrap();
    let keys = &bench.etcd.keys;
    let record = keys.record(&Key::Hub(1));
    let left = format!("{}000000", keys.parts(&record, "1-9"));
    assert!(bench.transact(Txn::new().and_then([TxnOp::put(left, "half", None)])));
    assert_eq!(bench.count(&keys.all_parts()), 4);
    bench.leave(&former);
    let store = bench.store(&bench.win());
    assert_eq!(bench.count(&keys.all_parts()), 3);
    assert!(hubs(&store) == [large]);
}

#[test]
fn a_record_that_lacks_a_part_is_named() {
    let bench = Bench::new();
    let won = bench.win();
    let store = bench.store(&won);
    store.write(hub(1, &"x".repeat(600 << 10))).unwrap();
    let parts = bench.runtime.block_on(bench.etcd.range(&bench.etcd.keys.all_parts())).unwrap();
    let part = parts[1].key().to_vec();
    assert!(bench.transact(Txn::new().and_then([TxnOp::delete(part, None)])));
    let refused = store.read(Table::Hubs).unwrap_err().to_string();
    assert!(refused.contains("group/one/hubs/0000000001 lacks some of its parts"), "{refused}");
}

#[test]
fn only_one_of_many_that_ask_at_once_wins() {
    let bench = Bench::new();
    let winners = bench.runtime.block_on(async {
        let asking: Vec<_> = (0..8)
            .map(|_| {
                let etcd = bench.etcd.clone();
                tokio::spawn(async move { win_once(&etcd, "http://test", LEASE).await.unwrap() })
            })
            .collect();
        let mut winners = 0;
        for asked in asking {
            winners += usize::from(asked.await.unwrap().is_some());
        }
        winners
    });
    assert_eq!(winners, 1);
}
