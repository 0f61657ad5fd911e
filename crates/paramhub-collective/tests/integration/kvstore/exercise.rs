//! The requirements on every store, for any of several ranks that all run it. The tests of other crates'
//! communicators include it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use paramhub_collective::engine::Kind;
use paramhub_collective::kvstore::{Array, Key, KvStore};
use paramhub_kernels::Hyperparameters;

const COUNTS: [usize; 4] = [1, 300, 5, 70_001];
const STEPS: u32 = 5;

pub(crate) fn array(store: &dyn KvStore, values: Vec<f32>) -> Array {
    Array::new(store.engine(), values)
}

pub(crate) fn values(store: &dyn KvStore, array: &Array) -> Vec<f32> {
    array.to_vec(store.engine()).unwrap()
}

/// Whole numbers, whose sums are the same in any order.
fn gradient(rank: u32, key: usize, step: u32) -> Vec<f32> {
    let number = |at: usize| ((at * 5 + key * 3 + step as usize * 7 + rank as usize * 2) % 13) as f32 - 6.0;
    (0..COUNTS[key]).map(number).collect()
}

fn keys() -> Vec<Key> {
    vec!["fc.weight".into(), 1.into(), "fc.bias".into(), Key::from(u64::MAX)]
}

fn optimizer(store: &dyn KvStore) -> Hyperparameters {
    let numbers = Hyperparameters { learning_rate: 0.125, momentum: 0.5, ..Default::default() };
    store.set_optimizer("sgd", numbers).unwrap();
    numbers
}

/// Pulls the sums of all ranks, step by step, into the arrays of the gradients.
pub(crate) fn sums(store: &dyn KvStore) {
    let (kind, size) = (store.kind(), store.size());
    for (key, count) in keys().iter().zip(COUNTS) {
        // Rank 0's value becomes the value at all ranks.
        store.init(key, &array(store, vec![store.rank() as f32 + 1.5; count])).unwrap();
        let out = array(store, vec![0.0; count]);
        store.pull(key, std::slice::from_ref(&out), 0).unwrap();
        assert_eq!(values(store, &out), vec![1.5; count], "{kind} {key}");
    }
    for step in 0..STEPS {
        let gradients: Vec<Array> =
            (0..COUNTS.len()).map(|key| array(store, gradient(store.rank(), key, step))).collect();
        for (at, key) in keys().iter().enumerate().rev() {
            store.push(key, &gradients[at..=at], at as i32).unwrap();
        }
        // Pull into the gradient's array, as the papers' listings do.
        for (at, key) in keys().iter().enumerate() {
            store.pull(key, &gradients[at..=at], 0).unwrap();
        }
        for (at, sum) in gradients.iter().enumerate() {
            let of_ranks: Vec<Vec<f32>> = (0..size).map(|rank| gradient(rank, at, step)).collect();
            let expected = (0..COUNTS[at]).map(|i| of_ranks.iter().map(|of| of[i]).sum::<f32>());
            assert!(
                values(store, sum).into_iter().eq(expected),
                "{kind}, {size} ranks, key {at}, step {step}"
            );
        }
    }
}

/// Trains with an optimizer at the store, and returns the parameters.
pub(crate) fn trained(store: &dyn KvStore, ranks: &[u32]) -> Vec<Vec<f32>> {
    let numbers = optimizer(store);
    for (key, count) in keys().iter().zip(COUNTS) {
        store.init(key, &array(store, vec![2.0; count])).unwrap();
    }
    let parameters: Vec<Array> = COUNTS.iter().map(|&count| array(store, vec![0.0; count])).collect();
    for step in 0..STEPS {
        if step == 3 {
            store.set_hyperparameters(0, Hyperparameters { learning_rate: 0.25, ..numbers }).unwrap();
        }
        for (at, key) in keys().iter().enumerate() {
            // A process that stands for several ranks pushes the gradients of all of them.
            let own: Vec<Array> = ranks.iter().map(|&rank| array(store, gradient(rank, at, step))).collect();
            store.pushpull(key, &own, &parameters[at..=at], 0).unwrap();
        }
    }
    parameters.iter().map(|array| values(store, array)).collect()
}

const BRANCHES: usize = 12;
const ROUNDS: u32 = 8;

/// SplitMix64.
fn random(state: &Mutex<u64>) -> u64 {
    let mut state = state.lock().unwrap();
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut bits = *state;
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// Gradients that become ready in different orders at different ranks, as those of a net's branches do.
pub(crate) fn disorder(store: &dyn KvStore, seed: u64) {
    let chance = Mutex::new(seed ^ u64::from(store.rank()) << 32);
    let engine = store.engine();
    let lengths: Vec<usize> = (0..BRANCHES).map(|key| 1 + key * key * 700).collect();
    let gradients: Vec<Array> = lengths.iter().map(|&length| Array::new(engine, vec![0.0; length])).collect();
    let begun = AtomicU32::new(0);
    for (key, gradient) in gradients.iter().enumerate() {
        store.init(&Key::from(key as u64), gradient).unwrap();
    }
    for step in 0..ROUNDS {
        // Backward: the gradients are independent of each other, and each takes its time.
        for (key, gradient) in gradients.iter().enumerate() {
            let (memory, nap) = (gradient.clone(), random(&chance) % 300);
            let value = (step + key as u32) as f32;
            engine
                .operation(format!("backward {key}"), Kind::Compute)
                .mutates([gradient.variable()])
                .priority((random(&chance) % 5) as i32)
                .push(move || -> Result<(), String> {
                    std::thread::sleep(Duration::from_micros(nap));
                    memory.write(|bytes| {
                        bytes.chunks_exact_mut(4).for_each(|out| out.copy_from_slice(&value.to_le_bytes()))
                    });
                    Ok(())
                })
                .unwrap();
            begun.fetch_add(1, Ordering::Relaxed);
        }
        for (key, gradient) in gradients.iter().enumerate() {
            store
                .push(&Key::from(key as u64), std::slice::from_ref(gradient), (random(&chance) % 3) as i32)
                .unwrap();
        }
        for (key, gradient) in gradients.iter().enumerate() {
            store.pull(&Key::from(key as u64), std::slice::from_ref(gradient), 0).unwrap();
        }
        for (key, gradient) in gradients.iter().enumerate() {
            let expected = store.size() as f32 * (step + key as u32) as f32;
            let sums = gradient.to_vec(engine).unwrap();
            assert!(
                sums.iter().all(|&sum| sum == expected),
                "key {key}, step {step}: {} for {expected}",
                sums[0]
            );
        }
    }
    assert_eq!(begun.into_inner(), ROUNDS * BRANCHES as u32);
}
