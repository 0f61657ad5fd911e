//! Stores that end without being left in order.

use paramhub_collective::engine::EngineConfig;
use paramhub_collective::kvstore::{Key, StoreError, StoreOptions, create};

use super::exercise::array;
use super::group::at_all;
use super::team::{DESIGNS, engine, local};

#[test]
fn a_rank_that_aborts_ends_what_the_others_wait_for_and_says_why() {
    for kind in DESIGNS {
        let failures = at_all(
            3,
            |config| config,
            |native| {
                let store =
                    create(kind, StoreOptions::over(engine(EngineConfig::default()), native)).unwrap();
                let key = Key::from("w");
                let own = [array(&*store, vec![1.0; 10])];
                let exchange = || {
                    store.pushpull(&key, &own, &own, 0)?;
                    Ok(store.engine().wait_for_var(own[0].variable())?)
                };
                let begun = store.init(&key, &own[0]);
                if store.rank() == 1 {
                    begun.unwrap();
                    store.abort("rank 1 has no data");
                    return None;
                }
                // Which call fails depends on the design.
                let mut made: Result<(), StoreError> = begun;
                while made.is_ok() {
                    made = exchange();
                }
                let error = made.unwrap_err();
                let culprit = store.failure().expect("it has failed").culprit();
                Some((error.to_string(), culprit))
            },
        );
        assert_eq!(failures[1], None);
        for (message, culprit) in failures.into_iter().flatten() {
            assert!(message.contains("rank 1 has no data"), "{kind}: {message}");
            assert_eq!(culprit, Some(1), "{kind}: {message}");
        }
    }
}

#[test]
fn a_local_store_ignores_an_abort() {
    let store = local();
    store.abort("no reason");
    assert!(store.failure().is_none());
    store.leave().unwrap();
}
