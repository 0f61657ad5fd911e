//! Waits, from several threads and from the wrong one.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use paramhub_collective::engine::Kind;

use super::common::{Gate, Never, Random, engine, seed};

#[test]
fn a_wait_on_the_engines_own_thread_is_refused_instead_of_waiting_for_itself() {
    let engine = Arc::new(engine([1, 1, 1]));
    let variable = engine.variable();
    for wait in [0, 1, 2] {
        let (own, mutated) = (Arc::clone(&engine), variable.clone());
        let work = move || match wait {
            0 => own.wait_for_var(&mutated),
            1 => own.wait_to_mutate(&mutated),
            _ => own.wait_for_all(),
        };
        engine.operation("wait", Kind::Compute).mutates([&variable]).push(work).unwrap();
        let failure = engine.wait_for_var(&variable).unwrap_err();
        assert!(failure.reason.contains("on a thread of the engine"), "{failure}");
    }
}

#[test]
fn a_wait_to_read_does_not_wait_for_readers_and_one_to_mutate_does() {
    let engine = engine([1, 1, 1]);
    let (variable, gate) = (engine.variable(), Gate::default());
    let held = gate.clone();
    let read = move || -> Never {
        held.pass();
        Ok(())
    };
    engine.operation("read", Kind::Compute).reads([&variable]).push(read).unwrap();
    engine.wait_for_var(&variable).unwrap();
    assert_eq!(engine.in_flight(), 1);
    let (sender, receiver) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            engine.wait_to_mutate(&variable).unwrap();
            sender.send(engine.in_flight()).unwrap();
        });
        assert_eq!(receiver.try_recv(), Err(mpsc::TryRecvError::Empty));
        gate.open();
    });
    assert_eq!(receiver.recv(), Ok(0));
}

#[test]
fn threads_that_push_and_wait_at_the_same_time_all_come_back_and_see_what_they_waited_for() {
    let seed = seed();
    let engine = engine([2, 1, 1]);
    let shared = engine.variable();
    let total = Arc::new(AtomicU64::new(0));
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 1_500;
    thread::scope(|scope| {
        for number in 0..THREADS {
            let (engine, shared, total) = (&engine, &shared, &total);
            scope.spawn(move || {
                let mut random = Random(seed ^ number);
                let (own, count) = (engine.variable(), Arc::new(AtomicU64::new(0)));
                for round in 1..=ROUNDS {
                    let (mine, all) = (Arc::clone(&count), Arc::clone(total));
                    let work = move || -> Never {
                        // The two steps are not atomic together: only the engine's order keeps the sum right.
                        mine.store(mine.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                        all.store(all.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                        Ok(())
                    };
                    let kind = [Kind::Compute, Kind::Copy, Kind::Communicate][random.below(3)];
                    engine.operation("count", kind).mutates([&own, shared]).push(work).unwrap();
                    match random.below(8) {
                        0 => engine.wait_for_var(&own).unwrap(),
                        1 => engine.wait_to_mutate(&own).unwrap(),
                        2 => engine.wait_for_var(shared).unwrap(),
                        3 if round % 50 == 0 => engine.wait_for_all().unwrap(),
                        _ => continue,
                    }
                    assert_eq!(count.load(Ordering::Relaxed), round, "PARAMHUB_TEST_SEED={seed}");
                }
            });
        }
    });
    engine.wait_for_all().unwrap();
    assert_eq!(total.load(Ordering::Relaxed), THREADS * ROUNDS);
}

#[test]
fn no_wake_up_is_lost_however_threads_fall_asleep() {
    let seed = seed();
    let mut random = Random(seed);
    for spin_us in [0, 1, 20] {
        let config = paramhub_collective::engine::EngineConfig {
            spin: std::time::Duration::from_micros(spin_us),
            in_flight: 4,
            ..super::common::config([3, 1, 1])
        };
        let engine = paramhub_collective::engine::Engine::new(config).unwrap();
        let variable = engine.variable();
        for _ in 0..2_000 {
            for _ in 0..random.below(12) {
                let pause = random.below(200);
                let work = move || -> Never {
                    (0..pause).for_each(|_| std::hint::spin_loop());
                    Ok(())
                };
                let operation = engine.operation("pause", Kind::Compute);
                let operation =
                    if pause.is_multiple_of(3) { operation.mutates([&variable]) } else { operation };
                operation.push(work).unwrap();
            }
            match random.below(3) {
                0 => engine.wait_for_all().unwrap(),
                1 => engine.wait_for_var(&variable).unwrap(),
                _ => (0..random.below(2_000)).for_each(|_| std::hint::spin_loop()),
            }
        }
        engine.wait_for_all().unwrap();
    }
}
