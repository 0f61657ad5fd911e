//! Failures, panics and the variables that they poison.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use paramhub_collective::engine::{Engine, Kind, Variable};
use proptest::prelude::*;

use super::common::{Log, Never, engine, mix};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Outcome {
    Succeeds,
    Errs,
    Panics,
    FailsLater,
    IsDropped,
}

#[derive(Clone, Debug)]
enum Step {
    Push { reads: Vec<usize>, mutates: Vec<usize>, outcome: Outcome },
    WaitForVar(usize),
    WaitToMutate(usize),
    WaitForAll,
}

const VARIABLES: usize = 4;

fn step() -> impl Strategy<Value = Step> {
    let some = || prop::collection::vec(0..VARIABLES, 0..3);
    let outcome = prop_oneof![
        12 => Just(Outcome::Succeeds),
        1 => Just(Outcome::Errs),
        1 => Just(Outcome::Panics),
        1 => Just(Outcome::FailsLater),
        1 => Just(Outcome::IsDropped),
    ];
    let push = (some(), some(), outcome).prop_map(|(reads, mutates, outcome)| Step::Push {
        reads,
        mutates,
        outcome,
    });
    prop_oneof![
        12 => push,
        1 => (0..VARIABLES).prop_map(Step::WaitForVar),
        1 => (0..VARIABLES).prop_map(Step::WaitToMutate),
        1 => Just(Step::WaitForAll),
    ]
}

/// The operations and reasons that waits reported, in order, and the values at the end.
type Report = (Vec<Option<(u64, String)>>, [u64; VARIABLES]);

fn reason(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Succeeds => unreachable!("it has none"),
        Outcome::Errs => "no luck",
        Outcome::Panics => "it panicked: no luck",
        Outcome::FailsLater => "no luck later",
        Outcome::IsDropped => "its completion was dropped without a word",
    }
}

/// Runs one operation after the other, and applies the rules of poison.
fn interpret(steps: &[Step]) -> Report {
    let (mut reported, mut values) = (Vec::new(), [0; VARIABLES]);
    let mut poison: [Option<(u64, String)>; VARIABLES] = Default::default();
    let mut unreported: Vec<(u64, String)> = Vec::new();
    let mut number = 0;
    for step in steps {
        match step {
            Step::Push { reads, mutates, outcome } => {
                let touched = || reads.iter().chain(mutates);
                let mut failure = touched().filter_map(|&at| poison[at].clone()).min();
                if failure.is_none() && *outcome != Outcome::Succeeds {
                    failure = Some((number, reason(*outcome).to_owned()));
                    unreported.extend(failure.clone());
                }
                match failure {
                    Some(_) => mutates.iter().for_each(|&at| poison[at].clone_from(&failure)),
                    None => mutates.iter().for_each(|&at| values[at] = mix(number)),
                }
                number += 1;
            }
            Step::WaitForVar(at) | Step::WaitToMutate(at) => {
                let failure = poison[*at].take();
                unreported.retain(|unreported| failure.as_ref() != Some(unreported));
                reported.push(failure);
            }
            Step::WaitForAll => {
                unreported.extend(poison.iter_mut().filter_map(Option::take));
                reported.push(unreported.drain(..).min());
            }
        }
    }
    (reported, values)
}

fn perform(engine: &Engine, steps: &[Step]) -> Report {
    let variables: [Variable; VARIABLES] = std::array::from_fn(|_| engine.variable());
    let values: [Arc<AtomicU64>; VARIABLES] = Default::default();
    let mut reported = Vec::new();
    let mut number = 0;
    for step in steps {
        let waited = match step {
            Step::Push { reads, mutates, outcome } => {
                let operation = engine.operation(number.to_string(), Kind::Compute);
                let operation = operation
                    .reads(reads.iter().map(|&at| &variables[at]))
                    .mutates(mutates.iter().map(|&at| &variables[at]));
                let mutated: Vec<_> = mutates.iter().map(|&at| Arc::clone(&values[at])).collect();
                let value = mix(number);
                match outcome {
                    Outcome::Succeeds => operation.push(move || -> Never {
                        mutated.iter().for_each(|mutated| mutated.store(value, Ordering::Relaxed));
                        Ok(())
                    }),
                    Outcome::Errs => operation.push(|| Err("no luck")),
                    // It is like a panic, but keeps the test's output readable.
                    Outcome::Panics => {
                        operation.push(|| -> Never { std::panic::resume_unwind(Box::new("no luck")) })
                    }
                    Outcome::FailsLater => operation.push_deferred(|completion| {
                        std::thread::spawn(move || completion.fail("no luck later"));
                    }),
                    Outcome::IsDropped => operation.push_deferred(drop),
                }
                .unwrap();
                number += 1;
                continue;
            }
            Step::WaitForVar(at) => engine.wait_for_var(&variables[*at]),
            Step::WaitToMutate(at) => engine.wait_to_mutate(&variables[*at]),
            Step::WaitForAll => engine.wait_for_all(),
        };
        reported.push(waited.err().map(|failure| {
            assert_eq!(failure.operation, failure.number.to_string());
            (failure.number, failure.reason.clone())
        }));
    }
    (reported, values.map(|value| value.load(Ordering::Relaxed)))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn failures_of_waits_and_values_equal_those_of_an_interpreter(
        mut steps in prop::collection::vec(step(), 1..40),
        threads in 1_usize..4,
    ) {
        steps.push(Step::WaitForAll);
        let engine = engine([threads, 1, 1]);
        prop_assert_eq!(perform(&engine, &steps), interpret(&steps));
        prop_assert_eq!(engine.in_flight(), 0);
    }
}

#[test]
fn the_failure_names_the_operation_its_reason_and_reaches_what_depends_on_it() {
    let engine = engine([2, 1, 1]);
    let [a, b, c] = std::array::from_fn(|_| engine.variable());
    let ran = Log::default();
    let note = |name: &'static str| {
        let ran = ran.clone();
        move || -> Never {
            ran.note(name);
            Ok(())
        }
    };
    engine.operation("read shard 3", Kind::Copy).mutates([&a]).push(|| Err("no such file")).unwrap();
    engine.operation("depends", Kind::Compute).reads([&a]).mutates([&b]).push(note("depends")).unwrap();
    engine.operation("apart", Kind::Compute).mutates([&c]).push(note("apart")).unwrap();
    let failure = engine.wait_for_var(&b).unwrap_err();
    assert_eq!(failure.to_string(), "operation read shard 3 failed: no such file");
    engine.wait_for_var(&c).unwrap();
    // The wait reported b's failure; a stays poisoned until a wait reports its failure, too.
    engine.operation("b again", Kind::Compute).mutates([&b]).push(note("b again")).unwrap();
    engine.wait_for_var(&b).unwrap();
    engine.operation("a again", Kind::Compute).mutates([&a]).push(note("a again")).unwrap();
    assert_eq!(engine.wait_for_var(&a).unwrap_err(), failure);
    engine.wait_for_all().unwrap();
    assert_eq!(ran.all(), ["apart", "b again"]);
}

#[test]
fn a_failure_without_a_variable_is_returned_once_by_a_wait_for_all() {
    let engine = engine([1, 1, 1]);
    engine.operation("log", Kind::Compute).push(|| Err("disk full")).unwrap();
    assert_eq!(engine.wait_for_all().unwrap_err().to_string(), "operation log failed: disk full");
    engine.wait_for_all().unwrap();
}

#[test]
fn waiting_for_all_makes_every_variable_usable_again() {
    let engine = engine([1, 1, 1]);
    let variables: Vec<Variable> = (0..50).map(|_| engine.variable()).collect();
    engine.operation("first", Kind::Compute).mutates(&variables).push(|| Err("early")).unwrap();
    engine.operation("second", Kind::Compute).push(|| Err("late")).unwrap();
    assert_eq!(engine.wait_for_all().unwrap_err().operation, "first");
    for variable in &variables {
        engine.operation("again", Kind::Compute).mutates([variable]).push(|| -> Never { Ok(()) }).unwrap();
    }
    engine.wait_for_all().unwrap();
}

#[test]
fn a_long_chain_and_a_wide_fan_behind_a_failure_end_without_deep_stacks() {
    let engine = engine([1, 1, 1]);
    let gate = super::common::Gate::default();
    let (root, ran) = (engine.variable(), Arc::new(AtomicU64::new(0)));
    let held = gate.clone();
    let fail = move || {
        held.pass();
        Err("broken")
    };
    engine.operation("root", Kind::Compute).mutates([&root]).push(fail).unwrap();
    let chain = engine.variable();
    for _ in 0..20_000 {
        let count = || {
            let ran = Arc::clone(&ran);
            move || -> Never {
                ran.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
        };
        engine.operation("link", Kind::Compute).reads([&root]).mutates([&chain]).push(count()).unwrap();
        engine.operation("reader", Kind::Copy).reads([&root]).push(count()).unwrap();
    }
    gate.open();
    assert_eq!(engine.wait_for_var(&chain).unwrap_err().operation, "root");
    assert_eq!(engine.wait_for_all().unwrap_err().operation, "root");
    assert_eq!(ran.load(Ordering::Relaxed), 0);
}

#[test]
fn a_panic_with_any_payload_is_a_failure_and_the_thread_goes_on() {
    struct PanicsWhenDropped;
    impl Drop for PanicsWhenDropped {
        fn drop(&mut self) {
            std::panic::resume_unwind(Box::new("again"));
        }
    }
    let engine = engine([1, 1, 1]);
    let variable = engine.variable();
    let fails = |work: fn() -> Never, reason: &str| {
        engine.operation("fit", Kind::Compute).mutates([&variable]).push(work).unwrap();
        assert_eq!(engine.wait_for_var(&variable).unwrap_err().reason, reason);
    };
    fails(|| panic!("out of {}", "range"), "it panicked: out of range");
    fails(|| panic!("plain"), "it panicked: plain");
    fails(|| std::panic::resume_unwind(Box::new(7)), "it panicked");
    fails(|| std::panic::resume_unwind(Box::new(PanicsWhenDropped)), "it panicked");
    engine.operation("fit", Kind::Compute).mutates([&variable]).push(|| -> Never { Ok(()) }).unwrap();
    engine.wait_for_var(&variable).unwrap();
}
