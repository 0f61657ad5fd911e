//! Helpers that the tests share.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex};

use paramhub_collective::engine::{Engine, EngineConfig};

/// Numbers that are the same for the same seed: SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

pub(crate) fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// `PARAMHUB_TEST_SEED`, or one from the clock; printed either way.
pub(crate) fn seed() -> u64 {
    let seed = match std::env::var("PARAMHUB_TEST_SEED") {
        Ok(text) => text.parse().expect("PARAMHUB_TEST_SEED is a number"),
        Err(_) => std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
    };
    println!("PARAMHUB_TEST_SEED={seed}");
    seed
}

/// An engine with these numbers of threads for compute, copy and communicate operations.
pub(crate) fn engine(threads: [usize; 3]) -> Engine {
    Engine::new(config(threads)).unwrap()
}

pub(crate) fn config([compute_threads, copy_threads, communicate_threads]: [usize; 3]) -> EngineConfig {
    EngineConfig { compute_threads, copy_threads, communicate_threads, ..EngineConfig::default() }
}

/// The result of operations that cannot fail.
pub(crate) type Never = Result<(), std::convert::Infallible>;

/// Blocks operations until it is opened.
#[derive(Clone, Default)]
pub(crate) struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    pub(crate) fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    pub(crate) fn pass(&self) {
        drop(self.0.1.wait_while(self.0.0.lock().unwrap(), |open| !*open).unwrap());
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Gate")
    }
}

/// The events, in order.
#[derive(Clone)]
pub(crate) struct Log<T>(Arc<Mutex<Vec<T>>>);

impl<T> Default for Log<T> {
    fn default() -> Log<T> {
        Log(Arc::default())
    }
}

impl<T: Clone> Log<T> {
    pub(crate) fn note(&self, what: T) {
        self.0.lock().unwrap().push(what);
    }

    pub(crate) fn all(&self) -> Vec<T> {
        self.0.lock().unwrap().clone()
    }
}
