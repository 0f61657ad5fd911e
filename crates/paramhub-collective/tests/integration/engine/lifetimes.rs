//! Handles that are dropped while operations are in flight, and operations that push others.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use paramhub_collective::engine::{Engine, EngineConfig, EngineError, Kind, PushError};

use super::common::{Gate, Log, Never, config, engine};

#[test]
fn an_operation_and_what_it_captured_are_gone_when_a_wait_for_it_returns() {
    let engine = engine([2, 1, 1]);
    for _ in 0..500 {
        let (variable, data) = (engine.variable(), Arc::new(()));
        let captured = Arc::clone(&data);
        let work = move || -> Never {
            let _used = &captured;
            Ok(())
        };
        engine.operation("use", Kind::Compute).mutates([&variable]).push(work).unwrap();
        engine.wait_for_var(&variable).unwrap();
        Arc::try_unwrap(data).expect("no other operation has it");
    }
}

#[test]
fn a_dropped_engine_waits_for_what_runs_and_drops_what_has_not_begun() {
    let (gate, log, token) = (Gate::default(), Log::default(), Arc::new(()));
    let engine = engine([1, 1, 1]);
    let variable = engine.variable();
    let (begun, has_begun) = mpsc::channel();
    let (held, noted) = (gate.clone(), log.clone());
    let long = move || -> Never {
        begun.send(()).unwrap();
        held.pass();
        noted.note("long");
        Ok(())
    };
    engine.operation("long", Kind::Compute).mutates([&variable]).push(long).unwrap();
    for number in 0..1000 {
        let (noted, token) = (log.clone(), Arc::clone(&token));
        let work = move || -> Never {
            let _held = &token;
            noted.note("later");
            Ok(())
        };
        // Some operations wait for the variable, some for the thread.
        let operation = engine.operation("later", Kind::Compute);
        let operation = if number % 2 == 0 { operation.mutates([&variable]) } else { operation };
        operation.push(work).unwrap();
    }
    has_begun.recv().unwrap();
    let pusher = engine.pusher();
    let dropping = thread::spawn(move || drop(engine));
    // Once a push is refused, no operation begins any more.
    while pusher.operation("probe", Kind::Copy).push(|| -> Never { Ok(()) }).is_ok() {
        thread::yield_now();
    }
    gate.open();
    dropping.join().unwrap();
    assert_eq!((log.all(), Arc::strong_count(&token)), (vec!["long"], 1));
    let refused = pusher.operation("late", Kind::Copy).push(|| -> Never { Ok(()) });
    assert_eq!(refused, Err(PushError::Closed { operation: "late".into() }));
}

#[test]
fn an_operation_may_own_its_engine() {
    let engine = Arc::new(engine([1, 1, 1]));
    let (sender, receiver) = mpsc::channel();
    let (gate, own) = (Gate::default(), Arc::clone(&engine));
    let held = gate.clone();
    let work = move || -> Never {
        held.pass();
        drop(own);
        sender.send(()).unwrap();
        Ok(())
    };
    engine.operation("last", Kind::Compute).push(work).unwrap();
    drop(engine);
    gate.open();
    receiver.recv().unwrap();
}

#[test]
fn operations_push_operations_that_are_ordered_behind_them() {
    let engine = engine([2, 1, 1]);
    let (variable, log) = (engine.variable(), Log::default());
    fn nest(
        pusher: paramhub_collective::engine::Pusher,
        depth: usize,
        variable: paramhub_collective::engine::Variable,
        log: Log<usize>,
    ) {
        let again = (pusher.clone(), variable.clone(), log.clone());
        let work = move || -> Never {
            let (pusher, variable, log) = again;
            log.note(depth);
            if depth < 300 {
                nest(pusher, depth + 1, variable, log);
            }
            Ok(())
        };
        pusher.operation("nested", Kind::Compute).mutates([&variable]).push(work).unwrap();
    }
    nest(engine.pusher(), 0, variable, log.clone());
    engine.wait_for_all().unwrap();
    assert_eq!(log.all(), (0..=300).collect::<Vec<_>>());
}

#[test]
fn a_full_engine_blocks_pushes_outside_and_refuses_them_inside() {
    const IN_FLIGHT: u64 = 8;
    let engine = Engine::new(EngineConfig { in_flight: IN_FLIGHT, ..config([1, 1, 1]) }).unwrap();
    let (gate, pushed, ran) = (Gate::default(), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (held, pusher) = (gate.clone(), engine.pusher());
    let (sender, receiver) = mpsc::channel();
    let inside = move || -> Never {
        held.pass();
        // Outside the engine is full; inside there is room for as many again.
        let push = || pusher.operation("inner", Kind::Copy).push(|| -> Never { Ok(()) });
        let variable = pusher.variable();
        let block = Gate::default();
        let blocked = block.clone();
        let wait = move || -> Never {
            blocked.pass();
            Ok(())
        };
        pusher.operation("block", Kind::Copy).mutates([&variable]).push(wait).unwrap();
        let refused = (0..).find_map(|number| push().err().map(|error| (number, error))).unwrap();
        block.open();
        sender.send(refused).unwrap();
        Ok(())
    };
    engine.operation("outer", Kind::Compute).push(inside).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..100 {
                let ran = Arc::clone(&ran);
                let work = move || -> Never {
                    ran.fetch_add(1, Ordering::Relaxed);
                    Ok(())
                };
                engine.operation("many", Kind::Compute).push(work).unwrap();
                pushed.fetch_add(1, Ordering::Relaxed);
            }
        });
        while pushed.load(Ordering::Relaxed) < IN_FLIGHT as usize - 1 {
            thread::yield_now();
        }
        for _ in 0..100 {
            thread::yield_now();
            assert_eq!(
                (pushed.load(Ordering::Relaxed), engine.in_flight()),
                (IN_FLIGHT as usize - 1, IN_FLIGHT)
            );
        }
        gate.open();
    });
    let (number, error) = receiver.recv().unwrap();
    // Eight came before, then the blocking one, and then these.
    assert_eq!(number, IN_FLIGHT - 1);
    assert_eq!(error, PushError::Full { operation: "inner".into(), limit: 2 * IN_FLIGHT });
    engine.wait_for_all().unwrap();
    assert_eq!(ran.load(Ordering::Relaxed), 100);
}

#[test]
fn a_variable_of_another_engine_is_refused() {
    let (one, other) = (engine([1, 1, 1]), engine([1, 1, 1]));
    let variable = other.variable();
    let refused = one.operation("mix", Kind::Compute).reads([&variable]).push(|| -> Never { Ok(()) });
    assert_eq!(refused, Err(PushError::Foreign { operation: "mix".into() }));
    one.wait_for_all().unwrap();
}

#[test]
fn configurations_out_of_bounds_are_refused_in_words() {
    let refused = |config: EngineConfig| Engine::new(config).unwrap_err().to_string();
    assert_eq!(refused(config([1, 0, 1])), "0 threads for copy operations: expected 1 to 256");
    assert_eq!(refused(config([257, 1, 1])), "257 threads for compute operations: expected 1 to 256");
    let none = EngineConfig { in_flight: 0, ..EngineConfig::default() };
    assert!(matches!(Engine::new(none), Err(EngineError::InFlight(0))));
}
