//! Runs every interleaving of a few threads, and every order in which memory may show their writes: the files
//! of the engine in which threads meet are compiled with loom's locks and atomics.

#[allow(dead_code, unreachable_pub)]
#[path = "../../src/engine/failure.rs"]
mod failure;
#[allow(dead_code)]
#[path = "../../src/engine/graph.rs"]
mod graph;
#[allow(dead_code)]
#[path = "../../src/engine/in_flight_limit.rs"]
mod in_flight_limit;
#[allow(dead_code)]
#[path = "../../src/engine/queue.rs"]
mod queue;
#[allow(dead_code)]
#[path = "../../src/engine/ready.rs"]
mod ready;
#[allow(dead_code)]
#[path = "../../src/engine/small_list.rs"]
mod small_list;
#[allow(dead_code)]
#[path = "../../src/engine/spin.rs"]
mod spin;

mod sync {
    pub(super) use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
    pub(super) use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
}

use std::time::Duration;

use failure::Failure;
use graph::{Dependencies, QueueAccess, QueuedOperation, VariableQueue, enter, leave};
use in_flight_limit::{InFlightLimit, PushRefusal};
use loom::thread;
use queue::Access::{self, Mutate, Read};
use ready::ReadyQueue;
use sync::{Arc, AtomicUsize, Mutex, Ordering};

/// No bound: every interleaving.
const ALL: Option<usize> = None;
/// The maximum of preemptions, where all interleavings would take minutes. Loom's authors found that few bugs
/// need more than two.
const MANY: Option<usize> = Some(3);

fn explore(preemptions: Option<usize>, check: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = preemptions;
    model.check(check);
}

/// A variable, and how often it was mutated. The count is read and written with relaxed order, so that the
/// model shows a stale value if the engine does not order the accesses.
struct Data {
    queue: Arc<VariableQueue<Operation>>,
    mutations: AtomicUsize,
}

#[derive(Clone)]
struct Operation(Arc<Inner>);

struct Inner {
    dependencies: Dependencies<Operation>,
    touched: Vec<(usize, Access)>,
    /// For each variable, the number of mutations pushed before.
    expected: Mutex<Vec<usize>>,
    role: Role,
}

#[derive(Clone, Copy, PartialEq)]
enum Role {
    Succeeds,
    Fails,
    /// Takes the poison, like a wait that reports a failure.
    Waits,
}

impl QueuedOperation for Operation {
    fn dependencies(&self) -> &Dependencies<Operation> {
        &self.0.dependencies
    }
}

struct Model {
    data: Vec<Data>,
    /// The number of mutations pushed so far, by variable, under a lock like that of [`InFlightLimit`].
    pushes: Mutex<Vec<usize>>,
    ended: AtomicUsize,
    poisoned: AtomicUsize,
    reported: AtomicUsize,
}

impl Model {
    fn new(variables: usize) -> Arc<Model> {
        let variable = || Data { queue: Arc::new(VariableQueue::new()), mutations: AtomicUsize::new(0) };
        Arc::new(Model {
            data: (0..variables).map(|_| variable()).collect(),
            pushes: Mutex::new(vec![0; variables]),
            ended: AtomicUsize::new(0),
            poisoned: AtomicUsize::new(0),
            reported: AtomicUsize::new(0),
        })
    }

    /// Pushes an operation and runs all operations that the calling thread makes ready.
    fn push(&self, touched: &[(usize, Access)], role: Role) {
        let queue_access =
            |&(at, access): &(usize, Access)| QueueAccess { queue: Arc::clone(&self.data[at].queue), access };
        let dependencies = Dependencies::new(touched.iter().map(queue_access).collect(), role == Role::Waits);
        let expected = Mutex::new(Vec::new());
        let operation =
            Operation(Arc::new(Inner { dependencies, touched: touched.to_vec(), expected, role }));
        let is_ready = {
            let mut pushes = self.pushes.lock().unwrap();
            operation.0.expected.lock().unwrap().clone_from(&pushes);
            touched.iter().for_each(|&(at, access)| pushes[at] += usize::from(access == Mutate));
            enter(&operation)
        };
        let mut ready: Vec<Operation> = is_ready.then_some(operation).into_iter().collect();
        while let Some(operation) = ready.pop() {
            self.run(&operation, &mut ready);
        }
    }

    fn run(&self, operation: &Operation, ready: &mut Vec<Operation>) {
        let Inner { dependencies, touched, expected, role } = &*operation.0;
        let expected = expected.lock().unwrap().clone();
        for &(at, access) in touched {
            let mutations = &self.data[at].mutations;
            let seen = mutations.load(Ordering::Relaxed);
            assert_eq!(seen, expected[at], "neither early nor late, and all that was written is seen");
            if access == Mutate {
                mutations.store(seen + 1, Ordering::Relaxed);
            }
        }
        if *role == Role::Waits {
            self.reported.fetch_add(usize::from(dependencies.poison().is_some()), Ordering::Relaxed);
            return leave(operation, None, |next| ready.push(next), |_| ());
        }
        let failure = dependencies.poison().or_else(|| {
            (*role == Role::Fails).then(|| {
                let (operation, reason) = (String::new(), String::new());
                std::sync::Arc::new(Failure { number: 0, operation, reason })
            })
        });
        if dependencies.is_poisoned() {
            self.poisoned.fetch_add(1, Ordering::Relaxed);
        }
        leave(operation, failure.as_ref(), |next| ready.push(next), |_| ());
        self.ended.fetch_add(1, Ordering::Relaxed);
    }
}

/// Runs threads that each push the operations of one team; the main thread pushes those of the first.
fn all_run(
    preemptions: Option<usize>,
    variables: usize,
    teams: &'static [&'static [&'static [(usize, Access)]]],
) {
    explore(preemptions, move || {
        let model = Model::new(variables);
        let threads: Vec<_> = teams[1..]
            .iter()
            .map(|operations| {
                let model = Arc::clone(&model);
                thread::spawn(move || {
                    operations.iter().for_each(|touched| model.push(touched, Role::Succeeds))
                })
            })
            .collect();
        teams[0].iter().for_each(|touched| model.push(touched, Role::Succeeds));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let operations: usize = teams.iter().map(|team| team.len()).sum();
        assert_eq!(model.ended.load(Ordering::Relaxed), operations);
    });
}

#[test]
fn operations_pushed_against_each_others_order_of_variables_cannot_wait_in_a_circle() {
    all_run(ALL, 2, &[&[&[(0, Mutate), (1, Mutate)]], &[&[(1, Mutate), (0, Mutate)]]]);
    all_run(
        MANY,
        2,
        &[&[&[(0, Mutate), (1, Mutate)]], &[&[(1, Mutate), (0, Mutate)]], &[&[(0, Read), (1, Read)]]],
    );
}

#[test]
fn reads_see_the_mutation_before_them_and_the_mutation_after_them_waits_for_all() {
    all_run(MANY, 1, &[&[&[(0, Mutate)], &[(0, Read)]], &[&[(0, Read)], &[(0, Mutate)]]]);
}

#[test]
fn an_operation_of_several_variables_becomes_ready_once() {
    all_run(
        ALL,
        3,
        &[&[&[(0, Mutate)], &[(0, Read), (1, Read), (2, Mutate)]], &[&[(1, Mutate)], &[(2, Read)]]],
    );
}

#[test]
fn a_failure_reaches_what_is_pushed_after_it_on_any_thread() {
    explore(ALL, || {
        let model = Model::new(2);
        model.push(&[(0, Mutate)], Role::Fails);
        let other = {
            let model = Arc::clone(&model);
            thread::spawn(move || model.push(&[(0, Read), (1, Mutate)], Role::Succeeds))
        };
        model.push(&[(1, Mutate), (0, Read)], Role::Succeeds);
        other.join().unwrap();
        assert_eq!(model.poisoned.load(Ordering::Relaxed), 2);
        assert!(model.data.iter().all(|data| data.queue.take_poison().is_some()));
    });
}

#[test]
fn a_failure_is_returned_by_one_wait_or_by_none_yet() {
    explore(ALL, || {
        let model = Model::new(1);
        let waits = |model: &Arc<Model>| {
            let model = Arc::clone(model);
            move || model.push(&[(0, Read)], Role::Waits)
        };
        let other = thread::spawn(waits(&model));
        model.push(&[(0, Mutate)], Role::Fails);
        waits(&model)();
        other.join().unwrap();
        assert_eq!(model.reported.load(Ordering::Relaxed), 1);
        assert!(!model.data[0].queue.is_poisoned());
    });
}

#[test]
fn no_thread_sleeps_while_there_is_an_operation_for_it() {
    for batches in [&[1, 1][..], &[2], &[1, 2]] {
        explore(ALL, move || {
            let queue = Arc::new(ReadyQueue::new(Duration::ZERO));
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let queue = Arc::clone(&queue);
                    thread::spawn(move || queue.take().unwrap())
                })
                .collect();
            for &batch in batches {
                queue.put((0..batch).map(|_| (0, ()))).unwrap();
            }
            // Each thread takes one: a lost wakeup leaves a thread asleep for ever, which loom detects.
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }
}

#[test]
fn a_closed_queue_lets_every_thread_go() {
    explore(ALL, || {
        let queue = Arc::new(ReadyQueue::<()>::new(Duration::ZERO));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let queue = Arc::clone(&queue);
                thread::spawn(move || queue.take().is_some())
            })
            .collect();
        queue.put([(0, ())]).unwrap();
        let left = queue.close().len();
        let taken: usize = threads.into_iter().map(|thread| usize::from(thread.join().unwrap())).sum();
        assert_eq!(left + taken, 1);
    });
}

#[test]
fn waits_for_room_and_waits_for_the_end_are_both_woken() {
    explore(MANY, || {
        let progress = Arc::new(InFlightLimit::new(1, Duration::ZERO));
        drop(progress.push(false).unwrap());
        let end_waiter = {
            let progress = Arc::clone(&progress);
            thread::spawn(move || progress.end())
        };
        let pusher = {
            let progress = Arc::clone(&progress);
            thread::spawn(move || {
                drop(progress.push(false).unwrap());
                progress.end();
            })
        };
        progress.wait_for_fewer_than(1);
        end_waiter.join().unwrap();
        pusher.join().unwrap();
        assert_eq!(progress.in_flight(), 0);
        drop(progress.push(true).unwrap());
        drop(progress.push(true).unwrap());
        assert_eq!(progress.push(true).err(), Some(PushRefusal::Full(2)));
        progress.close();
        assert_eq!(progress.push(false).err(), Some(PushRefusal::Closed));
    });
}
