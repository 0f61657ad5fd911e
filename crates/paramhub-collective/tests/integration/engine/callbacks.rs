//! Closures that are called when a thread's wait would end.

use std::sync::{Arc, mpsc};
use std::thread;

use paramhub_collective::engine::Kind;

use super::common::{Gate, Log, Never, engine};

#[test]
fn a_closure_is_called_in_its_turn_when_the_variable_is_free() {
    let engine = engine([1, 1, 1]);
    let (variable, gate, log) = (engine.variable(), Gate::default(), Log::default());
    let note = |what: &'static str| {
        let log = log.clone();
        move |outcome: Result<(), _>| {
            outcome.unwrap();
            log.note(what);
        }
    };
    engine.when_readable(&variable, note("nothing was pushed"));
    engine.when_mutable(&variable, note("nothing was pushed"));
    assert_eq!(log.all(), ["nothing was pushed"; 2], "at once, and on this thread");
    let held = gate.clone();
    let read = move || -> Never {
        held.pass();
        Ok(())
    };
    engine.operation("read", Kind::Compute).reads([&variable]).push(read).unwrap();
    engine.when_readable(&variable, note("beside the reader"));
    engine.when_mutable(&variable, note("after the reader"));
    let noted = log.clone();
    let mutate = move || -> Never {
        noted.note("mutated");
        Ok(())
    };
    engine.operation("mutate", Kind::Copy).mutates([&variable]).push(mutate).unwrap();
    engine.when_readable(&variable, note("after the mutation"));
    assert_eq!(log.all()[2..], ["beside the reader"]);
    gate.open();
    engine.wait_for_var(&variable).unwrap();
    assert_eq!(log.all()[2..], ["beside the reader", "after the reader", "mutated", "after the mutation"]);
}

#[test]
fn a_closure_receives_the_failure_which_then_counts_as_reported() {
    let engine = engine([1, 1, 1]);
    let (variable, gate) = (engine.variable(), Gate::default());
    let (sender, receiver) = mpsc::channel();
    let held = gate.clone();
    let divide = move || {
        held.pass();
        Err("by zero")
    };
    engine.operation("divide", Kind::Compute).mutates([&variable]).push(divide).unwrap();
    engine.operation("print", Kind::Compute).reads([&variable]).push(|| Err("this is not run")).unwrap();
    engine.when_readable(&variable, move |outcome| sender.send(outcome).unwrap());
    gate.open();
    let failure = receiver.recv().unwrap().unwrap_err();
    assert_eq!(failure.to_string(), "operation divide failed: by zero");
    engine.wait_for_var(&variable).unwrap();
    engine.wait_for_all().unwrap();
}

#[test]
fn a_panic_of_a_closure_is_lost_and_a_dropped_engine_calls_no_closure() {
    let engine = engine([1, 1, 1]);
    let (variable, gate, log) = (engine.variable(), Gate::default(), Log::default());
    engine.when_readable(&variable, |_| panic!("on purpose"));
    let (begun, has_begun) = mpsc::channel();
    let held = gate.clone();
    let long = move || -> Never {
        begun.send(()).unwrap();
        held.pass();
        Ok(())
    };
    engine.operation("long", Kind::Compute).mutates([&variable]).push(long).unwrap();
    let (noted, token) = (log.clone(), Arc::new(()));
    let captured = Arc::clone(&token);
    engine.when_mutable(&variable, move |_| {
        let _held = &captured;
        noted.note("called");
    });
    has_begun.recv().unwrap();
    let pusher = engine.pusher();
    let dropping = thread::spawn(move || drop(engine));
    while pusher.operation("probe", Kind::Copy).push(|| -> Never { Ok(()) }).is_ok() {
        thread::yield_now();
    }
    gate.open();
    dropping.join().unwrap();
    assert!(log.all().is_empty(), "what it waited for may not have been done");
    Arc::try_unwrap(token).expect("the closure is gone");
}
