//! The meaning of init, push and pull, the same in every design.

use half::bf16;
use paramhub_collective::engine::{EngineConfig, Kind};
use paramhub_collective::kvstore::{
    Array, HubStoreConfig, Key, KvStore, StoreError, StoreKind, StoreOptions, create,
};
use paramhub_core::auth::{Namespace, Nonce};
use paramhub_core::codec::Dtype;
use paramhub_core::combinations::Caller;
use paramhub_kernels::Hyperparameters;
use paramhub_transport::ReceiveRegion;
use paramhub_worker::Membership;

use super::exercise::{array, sums, trained, values};
use super::team::{DESIGNS, engine, local, stores};

#[test]
fn sums_of_all_ranks_are_pulled_by_all() {
    for (kind, size) in DESIGNS.into_iter().flat_map(|kind| [(kind, 2), (kind, 3)]) {
        stores(kind, size, |store| {
            assert_eq!((store.kind(), store.size()), (kind, size));
            sums(store);
        });
    }
}

#[test]
fn an_optimizer_makes_the_same_parameters_at_every_rank_in_every_design() {
    // The optimizer gets a mean here, and the sum in a local store, which for one rank are the same.
    let local = local();
    let alone = trained(&*local, &[0]);
    for kind in DESIGNS {
        let found = stores(kind, 1, |store| trained(store, &[0]));
        assert!(found[0] == alone, "{kind} alone is local");
    }
    let expected = stores(StoreKind::Funnel, 3, |store| trained(store, &[store.rank()]));
    assert!(expected[0] != alone);
    for kind in DESIGNS {
        let found = stores(kind, 3, |store| trained(store, &[store.rank()]));
        assert!(found.iter().all(|of| *of == expected[0]), "{kind}");
    }
}

#[test]
fn several_values_of_a_rank_are_added_up_and_several_outs_filled_in_halves_too() {
    for kind in DESIGNS {
        stores(kind, 2, |store| {
            let half = |value: f32| {
                let wire: Vec<u8> =
                    std::iter::repeat_n(bf16::from_f32(value).to_le_bytes(), 500).flatten().collect();
                Array::over(store.engine(), ReceiveRegion::owned(wire), Dtype::BF16)
            };
            let key = Key::from("half");
            store.init(&key, &half(1.0)).unwrap();
            let own = [half(1.0), half(2.5), half(store.rank() as f32)];
            let outs = [half(0.0), half(0.0)];
            store.pushpull(&key, &own, &outs, 0).unwrap();
            for out in &outs {
                assert_eq!(values(store, out), vec![8.0; 500], "{kind}");
            }
        });
    }
}

#[test]
fn every_push_counts_pulled_or_not() {
    for kind in DESIGNS {
        stores(kind, 2, |store| {
            store.set_optimizer("sgd", Hyperparameters { learning_rate: 1.0, ..Default::default() }).unwrap();
            let key = Key::from(7);
            store.init(&key, &array(store, vec![0.0; 10])).unwrap();
            let one = [array(store, vec![-1.0; 10])];
            let out = [array(store, vec![0.0; 10])];
            store.push(&key, &one, 0).unwrap();
            store.push(&key, &one, 0).unwrap();
            store.pull(&key, &out, 0).unwrap();
            assert_eq!(values(store, &out[0]), vec![2.0; 10], "{kind}");
            store.push(&key, &one, 0).unwrap();
            store.barrier().unwrap();
            store.pull(&key, &out, 0).unwrap();
            assert_eq!(values(store, &out[0]), vec![3.0; 10], "{kind}");
            store.pull(&key, &out, 0).unwrap();
            assert_eq!(values(store, &out[0]), vec![3.0; 10], "{kind}");
            // A push that is never pulled is exchanged at the end.
            store.push(&key, &one, 0).unwrap();
        });
    }
}

#[test]
fn an_array_that_does_not_fit_is_refused_with_what_would_fit() {
    let store = &*local();
    let message_of = |outcome: Result<(), StoreError>| outcome.unwrap_err().to_string();
    let three = [array(store, vec![0.0; 3])];
    assert_eq!(
        message_of(store.push(&"w".into(), &three, 0)),
        "key w: it has no value yet: give it one with init"
    );
    store.init(&"w".into(), &array(store, vec![1.0; 4])).unwrap();
    assert_eq!(message_of(store.init(&"w".into(), &three[0])), "key w: it has its value already");
    assert_eq!(
        message_of(store.push(&"w".into(), &three, 0)),
        "key w: its value is 4 of f32, the array is 3 of f32"
    );
    assert_eq!(
        message_of(store.pull(&"w".into(), &[], 0)),
        "key w: there is no array to push, or to pull into"
    );
    store.push(&"w".into(), &[array(store, vec![1.0; 4])], 0).unwrap();
    let late = store.set_optimizer("sgd", Hyperparameters::default());
    assert_eq!(message_of(late), "the optimizer is chosen before the first push");
    assert_eq!(message_of(store.set_hyperparameters(0, Hyperparameters::default())), "there is no optimizer");

    let unknown = message_of(local().set_optimizer("sdg", Hyperparameters::default()));
    assert!(unknown.contains("sdg") && unknown.contains("sgd"), "{unknown}");

    let two = || engine(EngineConfig { communicate_threads: 2, ..Default::default() });
    let refused = |kind, options| create(kind, options).err().unwrap().to_string();
    assert_eq!(refused(StoreKind::DepCha, StoreOptions::new(two())), "a depcha store needs a communicator");
    assert_eq!(
        refused(StoreKind::Hub, StoreOptions::new(two())),
        "a hub store needs a HubStoreConfig: make its options with StoreOptions::at_hub"
    );
    let message_of = "nccl".parse::<StoreKind>().unwrap_err().to_string();
    assert_eq!(message_of, "there is no store `nccl`: expected hub, local, funnel, concom, depcha");
    super::group::at_all(
        1,
        |config| config,
        |native| {
            let options = StoreOptions { outstanding: Some(3), ..StoreOptions::over(two(), native) };
            let message_of = refused(StoreKind::ConCom, options);
            assert!(message_of.starts_with("3 keys at a time need as many threads"), "{message_of}");
        },
    );
    super::group::at_all(
        1,
        |config| config,
        |native| {
            let communicator = refused(StoreKind::Local, StoreOptions::over(two(), native));
            let membership = Membership {
                url: "http://127.0.0.1:1".into(),
                namespace: Namespace([1; 16]),
                secret: Nonce([2; 32]).into(),
                rank: 0,
            };
            let at_hub = StoreOptions::at_hub(two(), HubStoreConfig::new(membership));
            let membership = refused(StoreKind::Funnel, at_hub);
            let outstanding = StoreOptions { outstanding: Some(2), ..StoreOptions::new(two()) };
            let all = [communicator, membership, refused(StoreKind::Local, outstanding)];
            for rule in Caller::Store.rules() {
                let shown = format!("{}; {}", rule.why, rule.remedy);
                assert!(
                    all.iter().any(|message_of| message_of.ends_with(&shown)),
                    "no example meets {rule:?}"
                );
            }
        },
    );
}

#[test]
fn a_gradient_that_could_not_be_made_is_named_where_it_is_waited_for() {
    for kind in [StoreKind::Local, StoreKind::Funnel, StoreKind::ConCom, StoreKind::DepCha] {
        let work = |store: &dyn KvStore| {
            let key = Key::from("w");
            store.init(&key, &array(store, vec![1.0; 4])).unwrap();
            store.barrier().unwrap();
            let gradient = [array(store, vec![0.0; 4])];
            let broken =
                store.engine().operation("backward w", Kind::Compute).mutates([gradient[0].variable()]);
            broken.push(|| Err("it is not a number")).unwrap();
            let out = [array(store, vec![0.0; 4])];
            let pushed = store.pushpull(&key, &gradient, &out, 0);
            let message = match pushed {
                // A design whose push waits reports it there.
                Err(error) => error.to_string(),
                Ok(()) => out[0].to_vec(store.engine()).unwrap_err().to_string(),
            };
            assert_eq!(message, "operation backward w failed: it is not a number", "{kind}");
        };
        if kind == StoreKind::Local {
            work(&*local());
            continue;
        }
        super::group::at_all(
            1,
            |config| config,
            |native| {
                let engine = engine(EngineConfig::default());
                let options = StoreOptions::over(engine, native);
                work(&*create(kind, options).unwrap());
            },
        );
    }
}
