//! Key-value stores at a hub, compared with those without one.

use std::sync::Arc;

use half::bf16;
use paramhub_collective::engine::{Engine, EngineConfig};
use paramhub_collective::kvstore::{Array, HubStoreConfig, Key, KvStore, StoreKind, StoreOptions, create};
use paramhub_core::codec::Dtype;
use paramhub_core::service::JobState;
use paramhub_kernels::Hyperparameters;
use paramhub_transport::ReceiveRegion;
use paramhub_worker::Options;

use crate::cluster::{Cluster, Ticket, Transports, gradient};

over_transports!(
    [tcp shm]
    sums_are_the_hub_s_and_first_values_rank_0_s,
    a_hub_s_parameters_are_those_of_a_store_that_sums_by_itself,
    a_store_that_nothing_was_pushed_to_finishes_its_job,
);

const COUNTS: [usize; 3] = [5, 30_001, 1];
const STEPS: u32 = 5;

fn engine() -> Arc<Engine> {
    Arc::new(Engine::new(EngineConfig { compute_threads: 1, ..Default::default() }).unwrap())
}

/// Gives every rank a store at a job, and returns each rank's result.
fn at_hub<T: Send>(ticket: &Ticket, ranks: u32, work: impl Fn(&dyn KvStore) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..ranks)
            .map(|rank| {
                let work = &work;
                scope.spawn(move || {
                    let transport = ticket.transports.of_rank(rank);
                    let options = Options { transport, ..Default::default() };
                    let config = HubStoreConfig {
                        options,
                        reproducible: true,
                        ..HubStoreConfig::new(ticket.membership(rank))
                    };
                    let store = create(StoreKind::Hub, StoreOptions::at_hub(engine(), config)).unwrap();
                    let made = work(&*store);
                    store.leave().unwrap();
                    made
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn array(store: &dyn KvStore, values: Vec<f32>) -> Array {
    Array::new(store.engine(), values)
}

fn values(store: &dyn KvStore, array: &Array) -> Vec<f32> {
    array.to_vec(store.engine()).unwrap()
}

fn sums_are_the_hub_s_and_first_values_rank_0_s(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    at_hub(&cluster.job("sums", 3), 3, |store| {
        assert_eq!((store.kind(), store.size()), (StoreKind::Hub, 3));
        let out = [array(store, vec![0.0; 30_001])];
        store.init(&1.into(), &array(store, vec![store.rank() as f32 + 1.5; 30_001])).unwrap();
        let wire: Vec<u8> = std::iter::repeat_n(bf16::from_f32(1.0).to_le_bytes(), 500).flatten().collect();
        let half = [Array::over(store.engine(), ReceiveRegion::owned(wire), Dtype::BF16)];
        store.init(&"half".into(), &half[0]).unwrap();
        store.pull(&1.into(), &out, 0).unwrap();
        assert_eq!(values(store, &out[0]), vec![1.5; 30_001]);
        for step in 1..4 {
            // Two arrays of one rank are added before they are sent.
            let own = [1.0, 2.0]
                .map(|times| array(store, vec![times * (step * (store.rank() + 1)) as f32; 30_001]));
            store.pushpull(&1.into(), &own, &out, 0).unwrap();
            store.pushpull(&"half".into(), &half, &half, 0).unwrap();
            assert_eq!(values(store, &out[0]), vec![(3 * step * 6) as f32; 30_001]);
            assert_eq!(values(store, &half[0]), vec![3.0_f32.powi(step as i32); 500]);
        }
        let late = store.init(&"late".into(), &out[0]).unwrap_err().to_string();
        assert!(late.contains("init all of them before the first push"), "{late}");
        store.barrier().unwrap();
    });
}

/// Trains, and returns the parameters.
fn trained(store: &dyn KvStore) -> Vec<Vec<f32>> {
    let numbers = Hyperparameters { learning_rate: 0.1, momentum: 0.9, ..Default::default() };
    store.set_optimizer("sgd", numbers).unwrap();
    let keys: Vec<Key> = (0..COUNTS.len()).map(|key| Key::from(format!("layer{key}").as_str())).collect();
    for (key, count) in keys.iter().zip(COUNTS) {
        store.init(key, &array(store, vec![0.25 * (1 + store.rank()) as f32; count])).unwrap();
    }
    let parameters = COUNTS.map(|count| array(store, vec![0.0; count]));
    for step in 0..STEPS {
        if step == 3 {
            store.set_hyperparameters(0, Hyperparameters { learning_rate: 0.01, ..numbers }).unwrap();
        }
        for (at, key) in keys.iter().enumerate().rev() {
            let own = array(store, gradient(store.rank(), at as u32, step, COUNTS[at]));
            store.push(key, &[own], 0).unwrap();
        }
        for (at, key) in keys.iter().enumerate() {
            store.pull(key, &parameters[at..=at], 0).unwrap();
        }
    }
    parameters.iter().map(|array| values(store, array)).collect()
}

fn a_hub_s_parameters_are_those_of_a_store_that_sums_by_itself(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let found = at_hub(&cluster.job("trained", 1), 1, trained);
    let local = create(StoreKind::Local, StoreOptions::new(engine())).unwrap();
    assert!(found[0] == trained(&*local), "the same kernels on the same numbers");

    let found = at_hub(&cluster.job("trained-by-three", 3), 3, trained);
    assert!(found.iter().all(|model| *model == found[0]), "all ranks have the same bits");
    // The mean of what three ranks push.
    let alone = create(StoreKind::Local, StoreOptions::new(engine())).unwrap();
    let expected = as_one(&*alone, 3);
    for (key, (found, expected)) in found[0].iter().zip(&expected).enumerate() {
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() <= 1e-5, "{key}: {found} for {expected}");
        }
    }
}

/// The result of so many ranks, by one that pushes the mean of their gradients.
fn as_one(store: &dyn KvStore, ranks: u32) -> Vec<Vec<f32>> {
    let numbers = Hyperparameters { learning_rate: 0.1, momentum: 0.9, ..Default::default() };
    store.set_optimizer("sgd", numbers).unwrap();
    let parameters = COUNTS.map(|count| array(store, vec![0.25; count]));
    for (key, parameters) in (0..).zip(&parameters) {
        store.init(&Key::Number(key), parameters).unwrap();
    }
    for step in 0..STEPS {
        if step == 3 {
            store.set_hyperparameters(0, Hyperparameters { learning_rate: 0.01, ..numbers }).unwrap();
        }
        for (at, &count) in COUNTS.iter().enumerate() {
            let mut mean = vec![0.0; count];
            for rank in 0..ranks {
                let own = gradient(rank, at as u32, step, count);
                mean.iter_mut().zip(own).for_each(|(mean, own)| *mean += own / ranks as f32);
            }
            store.pushpull(&Key::Number(at as u64), &[array(store, mean)], &parameters[at..=at], 0).unwrap();
        }
    }
    parameters.iter().map(|array| values(store, array)).collect()
}

fn a_store_that_nothing_was_pushed_to_finishes_its_job(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let ticket = cluster.job("unused", 2);
    at_hub(&ticket, 2, |store| store.init(&"a".into(), &array(store, vec![1.0; 8])).unwrap());
    cluster.await_state("unused", JobState::Finished);
}
