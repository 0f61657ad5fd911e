//! These tests show which operations run together, in which order and on which threads, and what observers
//! see.

use std::sync::{Arc, Barrier, Mutex};
use std::thread;

use paramhub_collective::engine::{Engine, EngineConfig, Event, Kind, Observer};

use super::common::{Gate, Log, Never, config, engine};

#[test]
fn reads_run_together_and_what_is_apart_does_too() {
    let engine = engine([4, 1, 1]);
    let [shared, a, b] = std::array::from_fn(|_| engine.variable());
    engine.operation("write", Kind::Compute).mutates([&shared]).push(|| -> Never { Ok(()) }).unwrap();
    // Each operation waits until all four run.
    let meeting = Arc::new(Barrier::new(4));
    for apart in [None, None, Some(&a), Some(&b)] {
        let meeting = Arc::clone(&meeting);
        let work = move || -> Never {
            meeting.wait();
            Ok(())
        };
        let operation = engine.operation("meet", Kind::Compute);
        let operation = match apart {
            None => operation.reads([&shared]),
            Some(apart) => operation.mutates([apart]),
        };
        operation.push(work).unwrap();
    }
    engine.wait_for_all().unwrap();
}

#[test]
fn the_highest_priority_goes_first_and_readiness_decides_among_equals() {
    let engine = engine([1, 1, 1]);
    let (begun, gate, log) = (Gate::default(), Gate::default(), Log::default());
    let (begins, held) = (begun.clone(), gate.clone());
    let hold = move || -> Never {
        begins.open();
        held.pass();
        Ok(())
    };
    engine.operation("hold", Kind::Compute).push(hold).unwrap();
    // The only thread has taken it: otherwise it could take a more urgent one first.
    begun.pass();
    for (number, priority) in [0, -5, 3, 0, 3, 100, -5].into_iter().enumerate() {
        let log = log.clone();
        let work = move || -> Never {
            log.note(number);
            Ok(())
        };
        engine.operation("note", Kind::Compute).priority(priority).push(work).unwrap();
    }
    gate.open();
    engine.wait_for_all().unwrap();
    assert_eq!(log.all(), [5, 2, 4, 0, 3, 1, 6]);
}

#[test]
fn the_highest_priority_released_by_an_end_goes_first() {
    let engine = engine([1, 1, 1]);
    let (gate, log, root) = (Gate::default(), Log::default(), engine.variable());
    let held = gate.clone();
    let hold = move || -> Never {
        held.pass();
        Ok(())
    };
    engine.operation("hold", Kind::Compute).mutates([&root]).push(hold).unwrap();
    for (number, priority) in [1, 0, 2, 2, 1].into_iter().enumerate() {
        let log = log.clone();
        let work = move || -> Never {
            log.note(number);
            Ok(())
        };
        engine.operation("note", Kind::Compute).reads([&root]).priority(priority).push(work).unwrap();
    }
    gate.open();
    engine.wait_for_all().unwrap();
    assert_eq!(log.all(), [2, 3, 0, 4, 1]);
}

#[test]
fn a_variable_that_is_named_several_times_counts_once_and_as_mutated() {
    let engine = engine([4, 1, 1]);
    for count in [1, 3, 8, 40] {
        let variables: Vec<_> = (0..count).map(|_| engine.variable()).collect();
        let value = Arc::new(Mutex::new(0));
        for _ in 0..50 {
            let value = Arc::clone(&value);
            // If two ran at a time, the lock would fail.
            let work = move || {
                *value.try_lock().map_err(|error| error.to_string())? += 1;
                thread::yield_now();
                Ok::<(), String>(())
            };
            let operation =
                engine.operation("count", Kind::Compute).reads(&variables).mutates(&variables[..1]);
            operation.reads(&variables).push(work).unwrap();
        }
        engine.wait_for_all().unwrap();
        assert_eq!(*value.lock().unwrap(), 50);
    }
}

#[derive(Default)]
struct Timeline(Log<(u64, String, Kind, bool, String)>);

impl Timeline {
    fn note(&self, event: &Event<'_>, is_begin: bool) {
        let thread = thread::current().name().unwrap_or_default().to_owned();
        self.0.note((event.number, event.name.to_owned(), event.kind, is_begin, thread));
    }
}

impl Observer for Timeline {
    fn begin(&self, event: &Event<'_>) {
        self.note(event, true);
    }

    fn end(&self, event: &Event<'_>, succeeded: bool) {
        assert_eq!(succeeded, event.name != "fail");
        self.note(event, false);
        // The observer's own panic affects no operation.
        std::panic::resume_unwind(Box::new("ignored"));
    }
}

#[test]
fn an_observer_sees_begin_and_end_of_all_that_runs_with_its_threads() {
    let timeline = Arc::new(Timeline::default());
    let config = EngineConfig { observer: Some(Arc::clone(&timeline) as _), ..config([1, 1, 1]) };
    let engine = Engine::new(config).unwrap();
    let variable = engine.variable();
    let ends = || -> Never { Ok(()) };
    engine.operation("copy in", Kind::Copy).mutates([&variable]).push(ends).unwrap();
    let reduce = engine.operation("reduce", Kind::Communicate).mutates([&variable]);
    let reply = |completion: paramhub_collective::engine::Completion| {
        thread::Builder::new().name("network".into()).spawn(move || completion.complete()).unwrap();
    };
    reduce.push_deferred(reply).unwrap();
    engine.operation("fail", Kind::Compute).mutates([&variable]).push(|| Err("so it goes")).unwrap();
    engine.operation("not run", Kind::Compute).reads([&variable]).push(ends).unwrap();
    engine.wait_for_all().unwrap_err();
    let seen = |number, name: &str, kind, is_begin, thread: &str| {
        (number, name.to_owned(), kind, is_begin, thread.to_owned())
    };
    let expected = [
        seen(0, "copy in", Kind::Copy, true, "copy 0"),
        seen(0, "copy in", Kind::Copy, false, "copy 0"),
        seen(1, "reduce", Kind::Communicate, true, "communicate 0"),
        seen(1, "reduce", Kind::Communicate, false, "network"),
        seen(2, "fail", Kind::Compute, true, "compute 0"),
        seen(2, "fail", Kind::Compute, false, "compute 0"),
    ];
    assert_eq!(timeline.0.all(), expected);
}
