//! The threads that call a design's collectives, as timelines show them.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use paramhub_collective::communicator::TracedCommunicator;
use paramhub_collective::engine::{EngineConfig, Kind, Trace};
use paramhub_collective::kvstore::{Array, Key, StoreKind, StoreOptions, create};

use super::group::at_all;
use super::team::engine;

/// The threads and names of all communication of two ranks that exchange four keys, two outstanding at a
/// time.
fn calls(kind: StoreKind) -> Vec<Vec<(String, String)>> {
    let unchanged = |config| config;
    at_all(2, unchanged, |native| {
        let trace = Arc::new(Trace::since(Instant::now()));
        let observer = Some(Arc::clone(&trace) as _);
        let engine = engine(EngineConfig { compute_threads: 1, observer, ..Default::default() });
        let communicator = TracedCommunicator::new(native, Arc::clone(&trace));
        let store = create(kind, StoreOptions::over(Arc::clone(&engine), communicator)).unwrap();
        let keys: Vec<(Key, Array)> =
            (0..4).map(|key| (key.into(), Array::new(&engine, vec![1.0]))).collect();
        for (key, value) in &keys {
            store.init(key, value).unwrap();
        }
        engine.wait_for_all().unwrap();
        trace.switch(true);
        for (key, value) in &keys {
            store.push(key, std::slice::from_ref(value), 0).unwrap();
        }
        for (key, value) in &keys {
            store.pull(key, std::slice::from_ref(value), 0).unwrap();
        }
        for (_, value) in &keys {
            assert_eq!(value.to_vec(&engine).unwrap(), [2.0]);
        }
        trace.switch(false);
        store.leave().unwrap();
        let here = thread::current().name().unwrap_or("unnamed").to_owned();
        let spans = trace.take().0.into_iter().filter(|span| span.kind == Kind::Communicate);
        let thread = |name: &str| if name == here { "caller".to_owned() } else { name.to_owned() };
        spans.map(|span| (thread(&span.thread_name), span.name)).collect()
    })
}

fn named<'a>(calls: &'a [(String, String)], thread: &str) -> Vec<&'a str> {
    calls.iter().filter(|(by, _)| by == thread).map(|(_, name)| name.as_str()).collect()
}

#[test]
fn the_pushing_thread_calls_all_collectives_of_funnel_and_the_barriers_of_concom() {
    for calls in calls(StoreKind::Funnel) {
        assert_eq!(named(&calls, "caller"), ["allreduce 0", "allreduce 1", "allreduce 2", "allreduce 3"]);
        assert_eq!(calls.len(), 4, "{calls:?}");
    }
    for calls in calls(StoreKind::ConCom) {
        assert_eq!(named(&calls, "caller"), ["barrier"], "after the first two: {calls:?}");
        // Each exchange is an operation and, inside it, a call.
        assert_eq!(calls.len(), 1 + 2 * 4, "{calls:?}");
    }
    for calls in calls(StoreKind::DepCha) {
        assert!(named(&calls, "caller").is_empty(), "{calls:?}");
        let names: Vec<&str> = calls.iter().map(|(_, name)| name.as_str()).step_by(2).collect();
        assert_eq!(
            names,
            ["allreduce 0", "allreduce 1", "allreduce 2", "allreduce 3"],
            "one after the other"
        );
    }
}
