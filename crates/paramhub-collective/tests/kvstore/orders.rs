//! Gradients that are ready in other orders at other ranks, as branches of a net are: what mis-orders the naive design
//! (`tests/communicators/naive.rs`) must not disturb these. Calls are checked, so that a wrong order would be named.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use paramhub_collective::engine::Kind;
use paramhub_collective::kvstore::{Array, Key, KvStore};

use crate::team::{DESIGNS, stores};

const KEYS: usize = 12;
const STEPS: u32 = 8;
const SIZE: u32 = 3;

/// SplitMix64.
fn random(state: &Mutex<u64>) -> u64 {
    let mut state = state.lock().unwrap();
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut bits = *state;
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

fn train(store: &dyn KvStore, seed: u64) {
    let chance = Mutex::new(seed ^ u64::from(store.rank()) << 32);
    let engine = store.engine();
    let lengths: Vec<usize> = (0..KEYS).map(|key| 1 + key * key * 700).collect();
    let gradients: Vec<Array> = lengths.iter().map(|&length| Array::new(engine, vec![0.0; length])).collect();
    let begun = AtomicU32::new(0);
    for (key, gradient) in gradients.iter().enumerate() {
        store.init(&Key::from(key as u64), gradient).unwrap();
    }
    for step in 0..STEPS {
        // Backward: independent of each other, and each takes its time.
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
            let expected = SIZE as f32 * (step + key as u32) as f32;
            let sums = gradient.to_vec(engine).unwrap();
            assert!(
                sums.iter().all(|&sum| sum == expected),
                "key {key}, step {step}: {} for {expected}",
                sums[0]
            );
        }
    }
    assert_eq!(begun.into_inner(), STEPS * KEYS as u32);
}

#[test]
fn ranks_whose_gradients_are_ready_in_other_orders_sum_what_belongs_together() {
    let seed = match std::env::var("PARAMHUB_TEST_SEED") {
        Ok(text) => text.parse().expect("PARAMHUB_TEST_SEED is a number"),
        Err(_) => std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
    };
    println!("PARAMHUB_TEST_SEED={seed}");
    for kind in DESIGNS {
        stores(kind, SIZE, |store| train(store, seed));
    }
}
