//! Compares random graphs with an interpreter that runs one operation after the other.

use std::sync::{Arc, RwLock, mpsc};
use std::thread;

use paramhub_collective::engine::{Engine, Kind, Variable};

use super::common::{Never, Random, engine, mix, seed};

const OPERATIONS: usize = 10_000;
const KINDS: [Kind; 3] = [Kind::Compute, Kind::Copy, Kind::Communicate];

struct Step {
    reads: Vec<usize>,
    mutates: Vec<usize>,
    kind: Kind,
    priority: i32,
    is_deferred: bool,
}

/// A step may name a variable twice, and both read and mutate it.
fn steps(random: &mut Random, variables: usize) -> Vec<Step> {
    let some = |random: &mut Random, most: usize| -> Vec<usize> {
        (0..random.below(most + 1)).map(|_| random.below(variables)).collect()
    };
    (0..OPERATIONS)
        .map(|_| Step {
            reads: some(random, 5),
            mutates: some(random, 3),
            kind: KINDS[random.below(3)],
            priority: random.below(5) as i32 - 2,
            is_deferred: random.below(16) == 0,
        })
        .collect()
}

/// The result of step `number`, which depends on all values that it may see, and on their order.
fn value(number: usize, mutated: usize, seen: impl Iterator<Item = u64>) -> u64 {
    seen.fold(mix((number as u64) << 32 | mutated as u64), |hash, value| mix(hash ^ value).rotate_left(7))
}

fn interpret(steps: &[Step], variables: usize) -> Vec<u64> {
    let mut values = vec![0; variables];
    for (number, step) in steps.iter().enumerate() {
        let before = values.clone();
        for &mutated in &step.mutates {
            let seen = step.reads.iter().chain(&step.mutates).map(|&at| before[at]);
            values[mutated] = value(number, mutated, seen);
        }
    }
    values
}

/// Takes every lock without waiting: a lock that fails shows two operations that the engine should have kept
/// apart.
fn perform(number: usize, step: &Step, values: &[RwLock<u64>]) {
    let mut reads: Vec<_> = step.reads.iter().filter(|at| !step.mutates.contains(at)).copied().collect();
    reads.sort_unstable();
    reads.dedup();
    let mut mutates = step.mutates.clone();
    mutates.sort_unstable();
    mutates.dedup();
    let read: Vec<_> =
        reads.iter().map(|&at| values[at].try_read().expect("no operation mutates it")).collect();
    let mut mutated: Vec<_> =
        mutates.iter().map(|&at| values[at].try_write().expect("no operation has it")).collect();
    let seen = |at: &usize| match mutates.binary_search(at) {
        Ok(place) => *mutated[place],
        Err(_) => *read[reads.binary_search(at).unwrap()],
    };
    let seen: Vec<u64> = step.reads.iter().chain(&step.mutates).map(seen).collect();
    for (at, value_of) in mutates.iter().zip(&mut mutated) {
        **value_of = value(number, *at, seen.iter().copied());
    }
}

fn run(engine: &Engine, steps: Vec<Step>, variables: usize, with_priorities: bool) -> Vec<u64> {
    let handles: Vec<Variable> = (0..variables).map(|_| engine.variable()).collect();
    let values: Arc<Vec<RwLock<u64>>> = Arc::new((0..variables).map(|_| RwLock::new(0)).collect());
    let (complete, completions) = mpsc::channel();
    let completer =
        thread::spawn(move || completions.iter().for_each(|complete: Box<dyn FnOnce() + Send>| complete()));
    for (number, step) in steps.into_iter().enumerate() {
        let named = |list: &[usize]| list.iter().map(|&at| handles[at].clone()).collect::<Vec<_>>();
        let (reads, mutates) = (named(&step.reads), named(&step.mutates));
        let operation = engine.operation(format!("step {number}"), step.kind).reads(&reads).mutates(&mutates);
        let operation = if with_priorities { operation.priority(step.priority) } else { operation };
        let values = Arc::clone(&values);
        if step.is_deferred {
            let complete = complete.clone();
            let work = move |completion: paramhub_collective::engine::Completion| {
                let end = Box::new(move || {
                    perform(number, &step, &values);
                    completion.complete();
                });
                complete.send(end as _).unwrap();
            };
            operation.push_deferred(work).unwrap();
        } else {
            let work = move || -> Never {
                perform(number, &step, &values);
                Ok(())
            };
            operation.push(work).unwrap();
        }
    }
    // The engine keeps what it needs when the handles are dropped.
    drop(handles);
    drop(complete);
    engine.wait_for_all().unwrap();
    completer.join().unwrap();
    values.iter().map(|value| *value.read().unwrap()).collect()
}

#[test]
fn ten_thousand_random_operations_make_what_an_interpreter_makes_with_any_threads() {
    let seed = seed();
    for (case, threads) in [[1, 1, 1], [2, 1, 1], [1, 3, 2], [8, 4, 4]].into_iter().enumerate() {
        for variables in [2, 50, 1000] {
            for with_priorities in [false, true] {
                let graph = seed ^ (case * 10 + variables) as u64;
                let steps = || steps(&mut Random(graph), variables);
                let made = run(&engine(threads), steps(), variables, with_priorities);
                let expected = interpret(&steps(), variables);
                assert_eq!(
                    made, expected,
                    "PARAMHUB_TEST_SEED={seed} {threads:?} {variables} {with_priorities}"
                );
            }
        }
    }
}

#[test]
fn threads_that_push_the_same_variables_in_all_orders_never_wait_in_a_circle() {
    let seed = seed();
    let engine = engine([2, 1, 1]);
    let variables: Vec<Variable> = (0..4).map(|_| engine.variable()).collect();
    let counts: Vec<_> = (0..4).map(|_| Arc::new(RwLock::new(0))).collect();
    const PUSHERS: u64 = 4;
    const EACH: usize = 2_000;
    thread::scope(|scope| {
        for pusher in 0..PUSHERS {
            let (engine, variables, counts) = (&engine, &variables, &counts);
            scope.spawn(move || {
                let mut random = Random(seed ^ pusher);
                for _ in 0..EACH {
                    let mut order = [0, 1, 2, 3];
                    (1..4).for_each(|at| order.swap(at, random.below(at + 1)));
                    let counts = counts.clone();
                    let operation = engine.operation("count", KINDS[random.below(3)]);
                    let operation = operation.mutates(order.map(|at| &variables[at]));
                    let work = move || -> Never {
                        order
                            .iter()
                            .for_each(|&at| *counts[at].try_write().expect("no operation has it") += 1);
                        Ok(())
                    };
                    operation.push(work).unwrap();
                }
            });
        }
    });
    engine.wait_for_all().unwrap();
    assert!(counts.iter().all(|count| *count.read().unwrap() == PUSHERS * EACH as u64));
}
