//! Operations that end later than their closures.

use std::sync::mpsc;
use std::thread;

use paramhub_collective::engine::{Completion, Kind};

use super::common::{Log, Never, engine};

#[test]
fn dependants_of_a_deferred_operation_wait_for_its_completion_and_its_thread_does_not() {
    let engine = engine([1, 1, 1]);
    let variable = engine.variable();
    let (give, given) = mpsc::channel::<Completion>();
    let log = Log::default();
    let deferred = engine.operation("allreduce", Kind::Communicate).mutates([&variable]);
    deferred.push_deferred(move |completion| give.send(completion).unwrap()).unwrap();
    let note = |what: &'static str| {
        let log = log.clone();
        move || -> Never {
            log.note(what);
            Ok(())
        }
    };
    engine.operation("update", Kind::Compute).reads([&variable]).push(note("update")).unwrap();
    // The only thread of its kind, which the deferred operation has left, runs this one.
    let other = engine.variable();
    engine.operation("barrier", Kind::Communicate).mutates([&other]).push(note("barrier")).unwrap();
    engine.wait_for_var(&other).unwrap();
    let completion = given.recv().unwrap();
    assert_eq!((engine.in_flight(), log.all()), (2, vec!["barrier"]));
    thread::spawn(move || completion.complete()).join().unwrap();
    engine.wait_for_all().unwrap();
    assert_eq!(log.all(), ["barrier", "update"]);
}

#[test]
fn an_operation_whose_completion_is_dropped_or_fails_has_failed() {
    let engine = engine([1, 1, 1]);
    let variable = engine.variable();
    let fails = |work: fn(Completion), reason: &str| {
        engine.operation("send", Kind::Communicate).mutates([&variable]).push_deferred(work).unwrap();
        let failure = engine.wait_for_var(&variable).unwrap_err();
        assert_eq!((failure.operation.as_str(), failure.reason.as_str()), ("send", reason));
    };
    fails(drop, "its completion was dropped without a word");
    fails(|completion| completion.fail("peer gone"), "peer gone");
    fails(|completion| completion.end_with(Err("reset")), "reset");
    let elsewhere = |completion: Completion| {
        thread::spawn(move || {
            let _held = completion;
            std::panic::resume_unwind(Box::new("network thread"));
        });
    };
    fails(elsewhere, "its completion was dropped in a panic");
    let later = |completion: Completion| {
        thread::spawn(move || completion.end_with(Ok::<(), String>(())));
    };
    engine.operation("send", Kind::Communicate).mutates([&variable]).push_deferred(later).unwrap();
    engine.wait_for_var(&variable).unwrap();
    engine.wait_for_all().unwrap();
}

#[test]
fn a_panic_before_the_completion_was_given_away_ends_the_operation_with_its_message() {
    let engine = engine([1, 1, 1]);
    let variable = engine.variable();
    let work = |completion: Completion| {
        let _held = completion;
        panic!("no route");
    };
    engine.operation("send", Kind::Communicate).mutates([&variable]).push_deferred(work).unwrap();
    assert_eq!(engine.wait_for_var(&variable).unwrap_err().reason, "it panicked: no route");
    engine.wait_for_all().unwrap();
}

#[test]
fn a_panic_after_the_completion_was_given_away_is_returned_by_a_wait_for_all() {
    let engine = engine([1, 1, 1]);
    let variable = engine.variable();
    let (give, given) = mpsc::channel::<Completion>();
    let work = move |completion: Completion| {
        give.send(completion).unwrap();
        panic!("too late");
    };
    engine.operation("send", Kind::Communicate).mutates([&variable]).push_deferred(work).unwrap();
    let completion = given.recv().unwrap();
    // The same thread runs this one after the panic.
    let other = engine.variable();
    engine.operation("next", Kind::Communicate).mutates([&other]).push(|| -> Never { Ok(()) }).unwrap();
    engine.wait_for_var(&other).unwrap();
    completion.complete();
    engine.wait_for_var(&variable).unwrap();
    assert_eq!(engine.wait_for_all().unwrap_err().reason, "it panicked: too late");
}

#[test]
fn a_completion_may_outlive_its_engine() {
    let (give, given) = mpsc::channel::<Completion>();
    let log = Log::default();
    {
        let engine = engine([1, 1, 1]);
        let (variable, noted) = (engine.variable(), log.clone());
        let deferred = engine.operation("send", Kind::Communicate).mutates([&variable]);
        deferred.push_deferred(move |completion| give.send(completion).unwrap()).unwrap();
        let never = move || -> Never {
            noted.note("ran");
            Ok(())
        };
        engine.operation("after", Kind::Compute).reads([&variable]).push(never).unwrap();
        // The operation has begun.
        let completion = given.recv().unwrap();
        drop(engine);
        completion.complete();
    }
    assert!(log.all().is_empty());
}
