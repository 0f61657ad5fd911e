//! Every store must pass these tests: the file's and, with the feature `etcd`, that of a real etcd.

use super::*;

/// Writes, reads and removes what a manager keeps, through a store that has nothing yet. `reopen` gives the store as a
/// manager that starts next finds it.
pub(crate) fn exercise(store: Box<dyn Store>, reopen: impl Fn(Box<dyn Store>) -> Box<dyn Store>) {
    for table in [Table::Jobs, Table::Hubs, Table::Tokens, Table::Teams, Table::Authorities] {
        assert_eq!(store.read(table).unwrap(), Vec::<Vec<u8>>::new(), "{table:?}");
    }
    let store = records_are_kept_replaced_and_removed(store, &reopen);
    let store = large_records_are_kept_whole(store, &reopen);
    many_records_are_written_at_once(store, &reopen);
}

fn records_are_kept_replaced_and_removed(
    store: Box<dyn Store>,
    reopen: &impl Fn(Box<dyn Store>) -> Box<dyn Store>,
) -> Box<dyn Store> {
    let keys = [
        Key::Job(namespace(1)),
        Key::Job(namespace(2)),
        Key::Hub(7),
        Key::Token("ab".into()),
        Key::Team("vision".into()),
        Key::Team("vision/deep".into()),
    ];
    store.write(keys.iter().map(|key| write(key, "first")).collect()).unwrap();
    store.write(vec![write(&keys[0], "second"), remove(keys[1].clone()), remove(Key::Hub(8))]).unwrap();
    // An authority that is replaced leaves its place to others, and no place remains of a longer list.
    let authority = |name: &str| AuthorityRecord { certificate: name.into(), key: "k".into(), made_at: 1 };
    store.save_authorities(&["c", "b", "a"].map(authority)).unwrap();
    store.save_authorities(&["d", "c"].map(authority)).unwrap();
    let store = reopen(store);
    assert_eq!(read(&*store, Table::Jobs), [r#""second""#]);
    assert_eq!(read(&*store, Table::Hubs), [r#""first""#]);
    assert_eq!(read(&*store, Table::Tokens), [r#""first""#]);
    assert_eq!(read(&*store, Table::Teams), [r#""first""#; 2]);
    let authorities = store.load_authorities().unwrap();
    assert_eq!(authorities.iter().map(|record| record.certificate.as_str()).collect::<Vec<_>>(), ["d", "c"]);
    let refused = store.load_hubs().unwrap_err().to_string();
    assert!(refused.contains("a record of hubs cannot be read"), "{refused}");
    for key in keys {
        store.write(vec![remove(key)]).unwrap();
    }
    store
}

/// One of them alone is larger than a request that etcd takes.
fn large_records_are_kept_whole(
    store: Box<dyn Store>,
    reopen: &impl Fn(Box<dyn Store>) -> Box<dyn Store>,
) -> Box<dyn Store> {
    let large = |letter: &str, bytes: usize| letter.repeat(bytes);
    let records = [large("a", 5 << 20), large("b", 300 << 10), large("c", 1 << 20), large("d", 10)];
    let keys: Vec<Key> = (0..4).map(|number| Key::Job(namespace(number))).collect();
    let writes = |records: &[String]| keys.iter().zip(records).map(|(key, text)| write(key, text)).collect();
    store.write(writes(&records)).unwrap();
    let store = reopen(store);
    let shown = |records: &[String]| records.iter().map(|text| format!("\"{text}\"")).collect::<Vec<_>>();
    assert!(read(&*store, Table::Jobs) == shown(&records), "they are as they were written");
    // Each gets another size, smaller or larger.
    let [a, b, c, d] = records;
    let records = [d, a, b, c];
    store.write(writes(&records)).unwrap();
    assert!(read(&*store, Table::Jobs) == shown(&records), "they are as they were replaced");
    let store = reopen(store);
    assert!(read(&*store, Table::Jobs) == shown(&records), "and remain so");
    store.write(keys.into_iter().map(remove).collect()).unwrap();
    assert!(read(&*store, Table::Jobs).is_empty());
    store
}

/// A manager that has lost many hubs at once changes as many records.
fn many_records_are_written_at_once(
    store: Box<dyn Store>,
    reopen: &impl Fn(Box<dyn Store>) -> Box<dyn Store>,
) {
    const MANY: u32 = 1000;
    let writes = (0..MANY).map(|hub| write(&Key::Hub(hub), &format!("{hub}"))).collect();
    store.write(writes).unwrap();
    let store = reopen(store);
    let expected: Vec<String> = (0..MANY).map(|hub| format!("\"{hub}\"")).collect();
    assert_eq!(read(&*store, Table::Hubs), expected, "in the order of their keys");
    store.write((0..MANY).map(|hub| remove(Key::Hub(hub))).collect()).unwrap();
    assert!(read(&*store, Table::Hubs).is_empty());
}

fn namespace(number: u8) -> Namespace {
    Namespace([number; 16])
}

fn write(key: &Key, text: &str) -> Write {
    put(key.clone(), &text)
}

fn read(store: &dyn Store, table: Table) -> Vec<String> {
    let records = store.read(table).unwrap();
    records.into_iter().map(|record| String::from_utf8(record).unwrap()).collect()
}

#[test]
fn a_file_keeps_records() {
    let folder = tempfile::tempdir().unwrap();
    let open = || Box::new(FileStore::open(Some(folder.path())).unwrap()) as Box<dyn Store>;
    exercise(open(), |store| {
        drop(store);
        open()
    });
}

#[test]
fn memory_keeps_records_while_the_manager_runs() {
    exercise(Box::new(FileStore::open(None).unwrap()), |store| store);
}
